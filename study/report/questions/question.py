"""What every file of this folder defines: one question of a reader, and all that a report says to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pandas as pd

from study.report.plots.canvas import Drawing
from study.report.records.frames import Records

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
