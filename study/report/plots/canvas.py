"""What all figures share: the sheet, its title, the axes' manner, and labels that do not cover each other."""

from __future__ import annotations

import dataclasses
import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from study.report.plots.palette import INK, OTHER, QUIET, SETTINGS, WIDTH_IN, Fill, style_of

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TITLE_IN, _LINE_IN = 0.25, 0.185
_TITLE_LETTERS, _LINE_LETTERS, _ARM_LETTERS = 46, 64, 26


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure, the file name it goes by, and what it shows in words for those who do not see it."""

    name: str
    title: str
    alt: str
    figure: Figure

    @classmethod
    def of(cls, name: str, title: str, subject: str, words: str, figure: Figure) -> Drawing:
        return cls(name, f"{title}, {subject}", f"{title}, {subject}: {words}.", figure)


def in_house_style(draw: Callable[_P, _T]) -> Callable[_P, _T]:
    @functools.wraps(draw)
    def drawn(*arguments: _P.args, **named: _P.kwargs) -> _T:
        with matplotlib.rc_context(SETTINGS):
            return draw(*arguments, **named)

    return drawn


def sheet(
    title: str, workload: str, subtitle: str, height_in: float, columns: int = 1, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """An empty figure under a title; `height_in` is that of the plot, and the words above it come on top."""
    titles, subtitles = _wrapped(title, _TITLE_LETTERS), [*_wrapped(workload), *_wrapped(subtitle)]
    head_in = 0.1 + _TITLE_IN * len(titles) + _LINE_IN * len(subtitles)
    figure = Figure(figsize=(WIDTH_IN, height_in + head_in), layout="constrained")
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head_in / (height_in + head_in)))
    figure.text(0.012, 1 - 0.07 / figure.get_figheight(), "\n".join(titles), size=12, weight="bold", va="top")
    below = 1 - (0.07 + _TITLE_IN * len(titles)) / figure.get_figheight()
    figure.text(0.012, below, "\n".join(subtitles), size=9.5, color=QUIET, va="top", linespacing=1.25)
    axes = figure.subplots(1, columns, squeeze=False, **grid)[0]
    return figure, list(axes)


def _wrapped(text: str, letters: int = _LINE_LETTERS) -> list[str]:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(" ".join(printable.split()), letters, break_on_hyphens=False)


def power_of_ten(value: float, _position: int | None = None) -> str:
    return "10" + str(round(np.log10(value))).translate(_SUPERSCRIPTS) if value > 0 else "0"


def number(value: float) -> str:
    """Three digits that count, without an exponent where a person would not write one."""
    if value == 0 or np.isnan(value):
        return "-" if value else "0"
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}·10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    digits = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def plain_ticks(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _position: f"{value:,.10g}")


def rows_of_arms(axes: Axes, arms: Sequence[str], notes: dict[str, str]) -> None:
    """One row per arm, the first on top."""
    axes.set_yticks(range(len(arms)), [marked(arm, notes) for arm in arms])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def end_rows(axes: Axes, arms: Sequence[str], notes: dict[str, str], xlabel: str, margin: float = 0.1) -> None:
    """What every chart of bars has: names at the side, from zero, room for the figure behind a bar, footnotes."""
    rows_of_arms(axes, arms, notes)
    axes.grid(visible=False)
    axes.margins(x=margin)
    axes.set_xlim(left=0)
    axes.set_xlabel(xlabel)
    footnote(axes, notes)


def stack(axes: Axes, row: int, widths: Mapping[str, float], fills: Mapping[str, Fill]) -> float:
    """A bar of parts, one after the other; gives where it ends."""
    left = 0.0
    for kind, width in widths.items():
        fill = fills.get(kind, OTHER)
        axes.barh(row, width, left=left, height=0.72, color=fill.colour, hatch=fill.hatch, edgecolor="white",
                  linewidth=0.4)  # fmt: skip
        left += width
    return left


def beside_bar(axes: Axes, text: str, end: float, row: int, colour: str = INK) -> None:
    axes.annotate(text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", size=9, color=colour)


def legend_of_fills(figure: Figure, fills: Mapping[str, Fill], words: Mapping[str, str], columns: int = 3) -> None:
    handles = [
        Patch(facecolor=fill.colour, hatch=fill.hatch, edgecolor="white", label=words.get(kind, kind.replace("_", "-")))
        for kind, fill in fills.items()
    ]
    legend_below(figure, handles, columns, columnspacing=1.3)


def marked(arm: str, notes: dict[str, str]) -> str:
    """The arm on at most two lines, with a dagger when it is confounded."""
    return "\n".join(_wrapped(f"{arm} †" if notes.get(arm) else arm, _ARM_LETTERS)[:2])


def footnote(axes: Any, notes: dict[str, str]) -> None:
    """Names under the axes what breaks the comparison, for every arm that carries the mark."""
    reasons: dict[str, list[str]] = {}
    for arm, reason in notes.items():
        if reason:
            reasons.setdefault(reason, []).append(arm)
    lines = [f"† confounded, {', '.join(arms)}: {reason}" for reason, arms in reasons.items()]
    if lines:
        wrapped = [line for text in lines for line in _wrapped(text)]
        foot_in = _LINE_IN * len(wrapped) + 0.12
        _grow(axes.figure, foot_in)
        axes.figure.text(
            0.012, 0.05 / axes.figure.get_figheight(), "\n".join(wrapped), size=9, color=QUIET, va="bottom"
        )


def _grow(figure: Any, foot_in: float) -> float:
    """Makes room under the plot, above what is at the foot already; gives the place of its lower edge."""
    before = figure.get_figheight()
    after = before + foot_in
    figure.set_figheight(after)
    for text in figure.texts:
        low = text.get_position()[1] * before / after
        text.set_y(low + foot_in / after if text.get_va() == "top" else low)
    _, bottom, _, body = figure.get_layout_engine().get()["rect"]
    bottom, body = bottom * before / after, body * before / after
    figure.set_layout_engine("constrained", rect=(0, bottom + foot_in / after, 1, body))
    return float(bottom)


class EndLabel(NamedTuple):
    x: float
    y: float
    text: str
    colour: str


def label_beside(axes: Axes, labels: Sequence[EndLabel], size: float = 9.5, gap_points: float = 12) -> None:
    """Writes each text to the right of its point, moved up or down where it would cover another."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    notes = [
        axes.annotate(
            label.text, (label.x, label.y), xytext=(gap_points, 0), textcoords="offset points", va="center", size=size,
            color=label.colour, arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.5, "shrinkA": 1,
                                            "shrinkB": 3, "relpos": (0, 0.5)},
        )
        for label in labels
    ]  # fmt: skip
    per_point = figure.dpi / 72
    # Twice: the labels take room from the axes, and that moves the points.
    for _ in range(2):
        figure.draw_without_rendering()
        heights = [float(axes.transData.transform((label.x, label.y))[1]) / per_point for label in labels]
        for note, height, place in zip(notes, heights, _apart(heights, size * 1.25), strict=True):
            note.set_position((gap_points, place - height))
            assert note.arrow_patch is not None
            note.arrow_patch.set_visible(abs(place - height) > size / 2)


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """The places nearest to the wanted ones that are a gap apart: neighbours that collide share their middle."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[list[float]] = []
    for index in order:
        blocks.append([wanted[index], 1.0])
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            (low, low_count), (high, high_count) = blocks[-2], blocks[-1]
            count = low_count + high_count
            blocks[-2:] = [[(low * low_count + high * high_count) / count, count]]
    places = [middle + gap * (k - (count - 1) / 2) for middle, count in blocks for k in range(int(count))]
    found = [0.0] * len(wanted)
    for index, place in zip(order, places, strict=True):
        found[index] = place
    return found


def legend_of(figure: Figure, arms: Iterable[tuple[str, str]], notes: dict[str, str]) -> None:
    """Arms with the line and marker of their strategy, below the plot."""
    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, linestyle=style.dash, label=marked(arm, notes))
        for arm, strategy in arms
        for style in [style_of(strategy)]
    ]
    legend_below(figure, handles, 2, 8.5, handlelength=2.6, columnspacing=2, markerscale=0.85)


def legend_below(figure: Any, handles: Sequence[Any], ncols: int, fontsize: float = 9, **manner: Any) -> None:
    """Under the plot and above its footnotes."""
    rows = math.ceil(len(handles) / ncols)
    bottom = _grow(figure, rows * fontsize * 1.5 / 72 + 0.15)
    # Room is made above, so the layout need not look for any.
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, bottom), ncols=ncols, fontsize=fontsize,
        borderaxespad=0.3, **manner,
    ).set_in_layout(False)  # fmt: skip


def strategy_of_arm(runs: pd.DataFrame) -> dict[str, str]:
    return dict(zip(runs["arm"], runs["strategy"], strict=True))
