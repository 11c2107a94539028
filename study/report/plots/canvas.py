"""What all figures share: their runs, the sheet with its title, bars, and labels that do not cover each other."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.optimize import isotonic_regression

from study.config.registry import REGISTRY
from study.records.frames import Records, real
from study.records.statistics import SHOWN_BELOW
from study.records.workloads import strategy_order

# How a strategy looks, the same in every figure, table and page.
# No two colours come close to each other for a reader with protanopia, deuteranopia or tritanopia, and each strategy
# has a marker of its own, so that a figure reads in black and white as well. A strategy with teams has the colour of
# the one under it, and another line. A test measures all three.

# A dash pattern as matplotlib takes it: the offset, then lengths of ink and gap.
Dash = tuple[int, tuple[float, ...]]
SOLID: Dash = (0, ())
_LINES_ALONE = "1234+x_|"


class Style(NamedTuple):
    colour: str
    marker: str
    dash: Dash

    @property
    def points(self) -> dict[str, Any]:
        """As matplotlib takes it. A marker of lines alone is all edge."""
        edge = {"markeredgecolor": self.colour} if self.marker in _LINES_ALONE else {}
        return {"color": self.colour, "marker": self.marker, "linestyle": "", **edge}

    @property
    def line(self) -> dict[str, Any]:
        return self.points | {"linestyle": self.dash}


STRATEGIES: Mapping[str, Style] = {name: Style(row.colour, row.marker, (0, row.dash)) for name, row in REGISTRY.items()}
UNKNOWN = Style("#767676", "o", (0, (1, 2)))


class Fill(NamedTuple):
    colour: str
    hatch: str


# Colours tell what the bytes are, hatches tell where they are.
STATE: Mapping[str, Fill] = {
    "params": Fill("#31688e", ""), "grads": Fill("#e8a33d", ""), "optimizer": Fill("#7a5195", ""),
    "rest": Fill("#b9c0c8", ""), "reserved": Fill("#dbe0e5", ""), "outside": Fill("#eff1f3", ""),
}  # fmt: skip
PLACES: Mapping[str, str] = {"device": "", "host": "////", "nvme": "xxxx"}
TRAFFIC: Mapping[str, Fill] = {
    "all_reduce": Fill("#0a35b3", ""),
    "reduce_scatter": Fill("#2b98ff", "////"),
    "reduce": Fill("#7fb2e5", "\\\\\\\\"),
    "all_gather": Fill("#db3502", "\\\\\\\\"),
    "broadcast": Fill("#e0a98f", "xxxx"),
    "all_to_all": Fill("#7a5195", "...."),
}
# Where the time of a step goes, in the order in which it is stacked; what is idle comes last.
PROFILE: Mapping[str, Fill] = {
    "matmul": Fill("#0a35b3", ""),
    "attention": Fill("#2b98ff", "////"),
    "elementwise": Fill("#e8a33d", ""),
    "optimizer": Fill("#7a5195", "\\\\"),
    "copies": Fill("#018228", "xxxx"),
    "collectives": Fill("#db3502", "////"),
    "other": Fill("#767676", ""),
    "idle": Fill("#e3e7eb", ""),
}
OTHER = Fill("#b0b6bd", "")
# What came of a release: right, wrong, wrong together with another release, or nothing to compare.
RELEASES: Mapping[str, Fill] = {
    "equal": Fill("#74b06f", ""), "lucky": Fill("#c3dec0", ""), "different": Fill("#b3240f", ""),
    "cpu": Fill("#d98a7e", ""), "mismatch": Fill("#d2691e", "////"),
    "refuses": Fill("#c9ced4", ""), "crashes": Fill("#767c85", ""), "not installable": Fill("#e8ebee", ""),
    "not judged": Fill("#e8ebee", "xxxx"),
}  # fmt: skip

INK, QUIET, FAINT, ACCENT = "#1f2328", "#5b636e", "#dfe3e8", "#a0410d"

# A line to read others against.
GUIDE: Any = {"color": QUIET, "linestyle": (0, (4, 3)), "linewidth": 1.1}

# One column of a page, and a whole telephone: type is large against the figure, because a phone halves it.
WIDTH_IN = 4.8
SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": "#aeb5bd",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": "#aeb5bd",
    "ytick.color": "#aeb5bd",
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "text.color": INK,
    "lines.markeredgecolor": "white",
    # A name from a record may hold a dollar sign.
    "text.parse_math": False,
    "hatch.linewidth": 0.7,
    "hatch.color": "#ffffffb0",
    "figure.facecolor": "#ffffff",
    "savefig.facecolor": "#ffffff",
    "legend.frameon": False,
    # The same figure gives the same file.
    "svg.hashsalt": "zero-study",
    "svg.fonttype": "path",
}


def style_of(strategy: object) -> Style:
    return STRATEGIES.get(str(strategy), UNKNOWN)


# More than this many workloads in one notebook is a heap; the tables hold them all.
MOST_WORKLOADS = 6
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TITLE_IN, _LINE_IN = 0.25, 0.185
_TITLE_LETTERS, _LINE_LETTERS, _ARM_LETTERS = 46, 64, 26
_T = TypeVar("_T")


class Drawing(NamedTuple):
    """A figure, what it shows in words for those who do not see it, and the file name it goes by."""

    figure: Figure
    alt: str
    name: str = ""


def drawings(name: str, subjects: Iterable[tuple[str, _T]], draw: Callable[[str, _T], Drawing | None]) -> list[Drawing]:
    """A numbered drawing of each subject that has something to draw."""
    with matplotlib.rc_context(SETTINGS):
        drawn = [draw(subject, about_it) for subject, about_it in subjects]
    return [each._replace(name=f"{name}_{place}") for place, each in enumerate(drawn, 1) if each is not None]


def per_workload(name: str, runs: pd.DataFrame, draw: Callable[[str, pd.DataFrame], Drawing | None]) -> list[Drawing]:
    return drawings(name, _workloads(runs), draw)


def _workloads(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The runs that may be compared with each other; of many workloads those with most runs."""
    sizes = runs.groupby("workload").size().sort_values(ascending=False, kind="stable")
    for workload in sorted(sizes.index[:MOST_WORKLOADS]):
        yield str(workload), runs[runs["workload"] == workload]


def finished(records: Records) -> pd.DataFrame:
    """The runs that trained to their end on devices that were there: nothing else has a loss or a time."""
    runs = real(records).runs
    return runs[runs["status_state"] == "ok"]


def arms_of(runs: pd.DataFrame) -> dict[str, str]:
    """Each with its strategy, from plain training to the most offloaded."""
    arms = runs.drop_duplicates("arm")
    places = zip(arms["strategy"].map(strategy_order), arms["world_size"], arms["arm"], arms["strategy"], strict=True)
    return {str(arm): strategy for _, _, arm, strategy in sorted(places)}


def notes_of(runs: pd.DataFrame, column: str = "confounded") -> dict[str, str]:
    """What breaks the comparison, by arm; empty where nothing does."""
    return {str(arm): "; ".join(sorted({text for text in group if text})) for arm, group in runs.groupby("arm")[column]}


def sheet(height_in: float, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **grid)[0])


def sheet_of_rows(rows: int, row_in: float = 0.27, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    return sheet(0.75 + row_in * rows, columns, **grid)


def finish(
    figure: Figure, title: str, subject: str, subtitle: str, words: str, notes: Mapping[str, str] | None = None,
    legend: Sequence[Any] = (), *, legend_columns: int = 3, lead: str = "",
) -> Drawing:  # fmt: skip
    """Puts the title above the plot, and below it the legend and what breaks the comparison of marked arms."""
    titles, subtitles = _wrapped(title, _TITLE_LETTERS), [*_wrapped(subject), *_wrapped(subtitle)]
    reasons: dict[str, list[str]] = {}
    for arm, reason in (notes or {}).items():
        if reason:
            reasons.setdefault(reason, []).append(arm)
    footnotes = [f"† confounded, {', '.join(arms)}: {reason}" for reason, arms in reasons.items()]
    lines = [line for text in footnotes for line in _wrapped(text)]
    foot_in = _LINE_IN * len(lines) + 0.12 if lines else 0
    legend_in = math.ceil(len(legend) / legend_columns) * 13.5 / 72 + 0.15 if legend else 0
    body_in, head_in = figure.get_figheight(), 0.1 + _TITLE_IN * len(titles) + _LINE_IN * len(subtitles)
    height_in = head_in + body_in + legend_in + foot_in
    figure.set_figheight(height_in)
    figure.set_layout_engine("constrained", rect=(0, (legend_in + foot_in) / height_in, 1, body_in / height_in))
    texts: tuple[tuple[list[str], float, dict[str, Any]], ...] = (
        (titles, height_in - 0.07, {"size": 12, "weight": "bold", "va": "top"}),
        (subtitles, height_in - 0.07 - _TITLE_IN * len(titles),
         {"size": 9.5, "color": QUIET, "va": "top", "linespacing": 1.25}),
        (lines, 0.05, {"size": 9, "color": QUIET, "va": "bottom"}),
    )  # fmt: skip
    for text, place_in, manner in texts:
        figure.text(0.012, place_in / height_in, "\n".join(text), **manner)
    if legend:
        # Room is made above, so the layout need not look for any.
        figure.legend(
            handles=legend, loc="lower left", bbox_to_anchor=(0, foot_in / height_in), ncols=legend_columns,
            fontsize=9, borderaxespad=0.3, columnspacing=1.3, markerscale=0.85, handlelength=2.4,
        ).set_in_layout(False)  # fmt: skip
    return Drawing(figure, f"{lead or f'{title}, {subject}'}: {words}.")


def _wrapped(text: str, letters: int = _LINE_LETTERS) -> list[str]:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(" ".join(printable.split()), letters, break_on_hyphens=False)


def marked(arm: str, notes: Mapping[str, str]) -> str:
    """The arm on at most two lines, with a dagger when it is confounded."""
    lines = _wrapped(f"{arm} †" if notes.get(arm) else arm, _ARM_LETTERS)
    return "\n".join(lines if len(lines) <= 2 else [lines[0], f"{lines[1][: _ARM_LETTERS - 1]}…"])


def power_of_ten(value: float) -> str:
    return "10" + str(round(np.log10(value))).translate(_SUPERSCRIPTS)


def number(value: float) -> str:
    """Three digits that count, without an exponent where a person would not write one."""
    if value == 0 or np.isnan(value):
        return "-" if value else "0"
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}·10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    digits = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def unit_for(largest_bytes: float) -> tuple[str, int]:
    return ("GiB", 2**30) if largest_bytes >= 2**30 else ("MiB", 2**20)


def plain_ticks(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _position: f"{value:,.10g}")


def rows_of_arms(axes: Axes, arms: Iterable[str], notes: Mapping[str, str]) -> None:
    """One row per arm, the first on top."""
    names = [marked(arm, notes) for arm in arms]
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def bars(
    axes: Axes, parts: pd.DataFrame, fills: Mapping[str, Fill], texts: Iterable[str], xlabel: str,
    notes: Mapping[str, str], *, marks: Sequence[float] | None = None, margin: float = 0.1,
) -> None:  # fmt: skip
    """A bar per row, its parts one after the other and a text behind it; a mark is an upright line across a bar."""
    rows, ends = np.arange(len(parts)), np.zeros(len(parts))
    for kind, sizes in parts.fillna(0).items():
        fill, widths = fills.get(str(kind), OTHER), sizes.to_numpy()
        # A bar of no width would take the margin from the plot.
        seen = widths > 0
        axes.barh(rows[seen], widths[seen], left=ends[seen], height=0.72, color=fill.colour, hatch=fill.hatch,
                  edgecolor="white", linewidth=0.4)  # fmt: skip
        ends = ends + widths
    if marks is not None:
        axes.vlines(marks, rows - 0.42, rows + 0.42, color=INK, linewidth=1.6, zorder=5)
        ends = np.fmax(ends, marks)
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        beside(axes, text, (end, row))
    rows_of_arms(axes, parts.index, notes)
    axes.grid(visible=False)
    axes.margins(x=margin)
    axes.set(xlabel=xlabel, xlim=(0, None))


def beside(axes: Axes, text: str, place: tuple[float, float], **manner: Any) -> None:
    axes.annotate(text, place, xytext=(4, 0), textcoords="offset points", va="center", size=9, **manner)


def legend_of_fills(fills: Mapping[str, Fill], words: Mapping[str, str]) -> list[Patch]:
    return [
        Patch(facecolor=fill.colour, hatch=fill.hatch, edgecolor="white", label=words.get(kind, kind.replace("_", "-")))
        for kind, fill in fills.items()
    ]


def legend_of_arms(arms: Mapping[str, str], notes: Mapping[str, str]) -> list[Line2D]:
    """Arms with the line and marker of their strategy."""
    styles = {arm: style_of(strategy) for arm, strategy in arms.items()}
    return [
        Line2D([], [], label=marked(arm, notes), **style.line | {"markeredgecolor": style.colour})
        for arm, style in styles.items()
    ]


def single_runs(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """Beside the middle of its runs every one of them, where they are few."""
    if 1 < len(x) < SHOWN_BELOW:
        axes.plot(x, y, ".", color=colour, markersize=5, alpha=0.7)


class EndLabel(NamedTuple):
    x: float
    y: float
    text: str
    colour: str


def label_beside(axes: Axes, labels: Sequence[EndLabel], size: float = 9) -> None:
    """Writes each text to the right of its point, moved up or down where it would cover another."""
    figure, gap_points = axes.figure, 12
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
        heights = axes.transData.transform([(label.x, label.y) for label in labels])[:, 1] / per_point
        for note, height, place in zip(notes, heights, _apart(heights, size * 1.25), strict=True):
            note.set_position((gap_points, place - height))
            assert note.arrow_patch is not None
            note.arrow_patch.set_visible(abs(place - height) > size / 2)


def _apart(wanted: Any, gap: float) -> Any:
    """The places nearest to the wanted ones that are a gap apart."""
    order, gaps = np.argsort(wanted, kind="stable"), gap * np.arange(len(wanted))
    places = np.empty(len(wanted))
    places[order] = isotonic_regression(wanted[order] - gaps).x + gaps
    return places
