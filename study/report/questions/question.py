"""What every file of this folder defines: one question of a reader, and all that a report says to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from study.records.frames import Records
from study.records.statistics import percent
from study.report.plots.canvas import Drawing

NOT_MEASURED = "-"
# A sentence names at most so many.
_MOST_NAMES = 3


@dataclasses.dataclass(frozen=True)
class Link:
    """A cell that leads somewhere; without an address it is its text."""

    text: str
    address: str

    def __str__(self) -> str:
        return self.text


def cell_text(value: object) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return NOT_MEASURED
    if isinstance(value, float):
        whole = value.is_integer() or abs(value) >= 1000
        return f"{value:,.0f}" if whole and abs(value) < 1e9 else f"{value:#.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def known(value: float, form: Callable[[float], str]) -> str:
    return NOT_MEASURED if math.isnan(value) else form(value)


def span(values: Iterable[float], form: Callable[[float], str]) -> str:
    """The lowest and the highest of the known values."""
    measured = [value for value in values if not math.isnan(value)]
    return " to ".join(dict.fromkeys(form(end) for end in (min(measured), max(measured))))


def names(arms: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in dict.fromkeys(arms)]
    more = len(shown) - _MOST_NAMES
    if more > 0:
        shown[_MOST_NAMES:] = [f"{more} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def times_text(value: float) -> str:
    return f"{value:.2f}"


def change_text(share: float) -> str:
    return percent(share, signed=True)


Table = Callable[[Records], pd.DataFrame]
Figures = Callable[[Records], list[Drawing]]


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The first screen: one sentence, a small table, and what a reader must know beside the table."""

    sentence: str
    table: pd.DataFrame
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    name: str
    # As a reader asks it.
    title: str
    # None where the records hold nothing that answers it; then a report says `nothing`.
    answer: Callable[[Records], Answer | None]
    nothing: str
    tables: Mapping[str, Table]
    figures: Mapping[str, Figures] = dataclasses.field(default_factory=dict)
    # The figure that stands on the first screen instead of the small table.
    first_figure: str | None = None
    # In notebooks/; without one its tables are on the first page.
    notebook: str | None = None
