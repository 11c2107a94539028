"""Shared parts of notebooks: the table of runs, styles of strategies, a figure with its title, bars, and labels."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from string import ascii_lowercase
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from PIL import Image
from scipy.optimize import isotonic_regression

from study.config.errors import UserError
from study.config.registry import REGISTRY
from study.config.strategies import resolve_repository_path
from study.records.frames import read_records
from study.records.workloads import read_arm, strategy_order
from study.report.svg import draw_svg

# A dash pattern of matplotlib: the offset, then the lengths of dashes and gaps.
Dash = tuple[int, tuple[float, ...]]
_LINES_ONLY = "1234+x_|"


class Style(NamedTuple):
    """Color, marker and dashes of a strategy in every figure, table and page; also distinct in black and white."""

    colour: str
    marker: str
    dash: Dash

    @property
    def points(self) -> dict[str, Any]:
        """Return keyword arguments of matplotlib for markers without a line."""
        # A marker without a face has only an edge color.
        edge = {"markeredgecolor": self.colour} if self.marker in _LINES_ONLY else {}
        return {"color": self.colour, "marker": self.marker, "linestyle": "", **edge}

    @property
    def line(self) -> dict[str, Any]:
        """Return keyword arguments of matplotlib for a line with markers."""
        return self.points | {"linestyle": self.dash}

    @property
    def hollow(self) -> dict[str, Any]:
        """Return keyword arguments of matplotlib for hollow markers without a line."""
        return self.points | {"markerfacecolor": "white", "markeredgecolor": self.colour}


class Fill(NamedTuple):
    """Color and hatch of a bar."""

    colour: str
    hatch: str = ""


STRATEGIES: Mapping[str, Style] = {name: Style(row.colour, row.marker, (0, row.dash)) for name, row in REGISTRY.items()}
UNKNOWN = Style("#767676", "o", (0, (1, 2)))
# The color is the kind of bytes, the hatch their place.
STATE = {
    "params": Fill("#1f4e79"),
    "grads": Fill("#e8a33d"),
    "optimizer": Fill("#a678b8"),
    "rest": Fill("#c3c9cf"),
    "reserved": Fill("#dbe0e5", "...."),
    "outside": Fill("#eff1f3"),
    "gathered": Fill("#93b7d9", "\\\\\\\\"),
}
PLACES = {"device": "", "host": "////", "nvme": "xxxx"}
# Not the colors of stages: pages show both kinds of figures.
TRAFFIC = {
    "all_reduce": Fill("#d99a2b"),
    "reduce_scatter": Fill("#b56a00", "////"),
    "reduce": Fill("#f2cf8d", "----"),
    "all_gather": Fill("#1d7a85"),
    "broadcast": Fill("#8fc4ca", "xxxx"),
    "all_to_all": Fill("#7a5195", "...."),
}
# In the stacking order of the bars.
PROFILE = {
    "matmul": Fill("#0a35b3"),
    "attention": Fill("#2b98ff", "////"),
    "elementwise": Fill("#e8a33d"),
    "optimizer": Fill("#7a5195", "\\\\"),
    "copies": Fill("#018228", "xxxx"),
    "collectives": Fill("#db3502", "////"),
    "other": Fill("#767676"),
    "idle": Fill("#e3e7eb"),
}
RELEASES = {
    "equal": Fill("#86b6dd"),
    "lucky": Fill("#c4ddf2"),
    "different": Fill("#8c1610"),
    "cpu": Fill("#e0912b"),
    "mismatch": Fill("#7d4fb0", "////"),
    "refuses": Fill("#b3b8bf", "...."),
    "crashes": Fill("#555b63"),
    "not installable": Fill("#f6f5f1"),
    "not judged": Fill("#f6f5f1", "xxxx"),
}
OTHER = Fill("#b0b6bd")
INK, QUIET, FAINT, ACCENT = "#1f2328", "#5b636e", "#dfe3e8", "#a0410d"
# A reference line.
GUIDE: Any = {"color": QUIET, "linestyle": (0, (4, 3)), "linewidth": 1.1}
# The width of a phone: its smallest text, of 9 points, has 9 pixels or more from 330 pixels on, also in a wider column.
WIDTH_IN = 4.2
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
    **{
        f"{axis}tick.{key}": value
        for axis in "xy"
        for key, value in {"color": "#aeb5bd", "labelcolor": QUIET, "labelsize": 9.5, "major.size": 3}.items()
    },
    # A record's name may contain a dollar sign.
    "text.color": INK,
    "text.parse_math": False,
    "lines.markeredgecolor": "white",
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "hatch.color": "#ffffffb0",
    "figure.facecolor": "#ffffff",
    "savefig.facecolor": "#ffffff",
    # Equal figures are equal files.
    "svg.hashsalt": "zero-study",
}
_TITLE_IN, _LINE_IN = 0.25, 0.185
_TITLE_LETTERS, _LINE_LETTERS, _LABEL_LETTERS, _LEGEND_LETTERS, _AXIS_LETTERS = 40, 56, 24, 51, 36
_DOTS_PER_INCH, _COLOURS, MAX_POINTS, _MAX_LINES = 200, 128, 14, 3
_END, _HALO = "end of a line", [withStroke(linewidth=2, foreground="white")]


def load_frames(folder: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return one row per run and one per step, from a runs directory or a report here or in the checkout.

    Figures made after it have the style of the project.
    """
    if not (path := resolve_repository_path(folder)).exists():
        raise UserError(f"there is no folder {folder}, neither here nor in the checkout", "name another records_dir")
    matplotlib.rcParams.update(SETTINGS)
    records = read_records(path)
    return records.runs.assign(probe=records.runs["probe"].fillna(False).astype(bool)), records.steps


class Drawing(NamedTuple):
    """A figure, its content in words for those who do not see it, and its name."""

    figure: Figure
    alt: str
    name: str = ""

    def __repr__(self) -> str:
        """Return the content in words, which Jupyter keeps as the plain text of the figure."""
        return self.alt

    def _repr_mimebundle_(self, **_kinds: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what Jupyter displays; `study report` takes its figures from there."""
        # Both images have one layout.
        png = as_png(self.figure)
        return {"image/png": png, "image/svg+xml": as_svg(self.figure)}, {"figure": self.name}


def as_png(figure: Figure) -> bytes:
    """Return a PNG with 128 colors, a third of its full size."""
    with matplotlib.rc_context(SETTINGS):
        _fix_layout(figure)
        full, small = io.BytesIO(), io.BytesIO()
        # Uncompressed: the image is compressed once, after its colors are reduced.
        figure.savefig(full, format="rgba", dpi=_DOTS_PER_INCH)
    # Median cut, the default, would mix colors of strategies with few points.
    tree, plain = Image.Quantize.FASTOCTREE, Image.Dither.NONE
    width = int(figure.get_figwidth() * _DOTS_PER_INCH)
    size = (width, len(full.getvalue()) // (4 * width))
    image = Image.frombytes("RGBA", size, full.getvalue()).convert("RGB")
    image = image.quantize(_COLOURS, method=tree, dither=plain)
    image.save(small, format="png")
    return small.getvalue()


def _fix_layout(figure: Figure) -> None:
    """Lay the figure out for good: with an engine matplotlib draws it twice, the first time for the layout alone."""
    if (engine := figure.get_layout_engine()) is None:
        return
    usual = figure.dpi
    figure.dpi = _DOTS_PER_INCH
    with _without_arrows(figure):
        engine.execute(figure)
    figure.dpi = usual
    figure.set_layout_engine(None)


@contextmanager
def _without_arrows(figure: Figure) -> Iterator[None]:
    """Take the arrows from the labels of ends during a layout.

    An arrow goes from its label to a point of the axes, so it needs no further space, and to clip it at its ends took
    a third of the layout.
    """
    arrows = {note: (note.arrowprops, note.arrow_patch) for note in figure.findobj(Annotation)}
    for note in arrows:
        note.arrowprops = note.arrow_patch = None
    try:
        yield
    finally:
        for note, (properties, patch) in arrows.items():
            note.arrowprops, note.arrow_patch = properties, patch


def as_svg(figure: Figure) -> str:
    """Return the figure as SVG with text as text."""
    return draw_svg(figure, SETTINGS)


def find_style(strategy: object) -> Style:
    """Return the style of a strategy; a gray one if the registry does not have it."""
    return STRATEGIES.get(str(strategy), UNKNOWN)


def by_workload(runs: pd.DataFrame, most: int, also: str = "") -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the workloads with most runs and `also`, batch 2 before batch 16, and the runs of each."""
    ranked = runs.groupby("workload").size().sort_values(ascending=False, kind="stable").index
    largest = ranked[(np.arange(len(ranked)) < most) | (ranked == also)]
    for workload in sorted(largest, key=lambda name: re.sub("[0-9]+", lambda digits: digits[0].zfill(9), name)):
        yield str(workload), runs[runs["workload"] == workload]


def arm_strategies(runs: pd.DataFrame) -> dict[str, str]:
    """Return the strategy's name by its label, from plain training to the most offloaded."""
    arms = runs.drop_duplicates("arm")
    places = zip(arms["strategy"].map(strategy_order), arms["world_size"], arms["arm"], arms["strategy"], strict=True)
    return {str(arm): strategy for _, _, arm, strategy in sorted(places)}


def find_rows(table: pd.DataFrame, workload: str, strategies: Iterable[str], columns: Iterable[str]) -> pd.DataFrame:
    """Return these columns of a question's table by strategy of a workload; NaN if the table lacks one."""
    # A table has no columns that are empty.
    rows = table.reindex(columns=["Workload", "Strategy", *columns])
    rows = rows[rows["Workload"] == workload].drop(columns="Workload")
    return rows.set_index("Strategy").reindex(index=list(strategies))


def find_confounds(runs: pd.DataFrame, column: str = "confounded") -> dict[str, str]:
    """Return the reasons why a strategy's runs are not comparable, by its label; an empty text if they are."""
    return {str(arm): "; ".join(sorted({text for text in group if text})) for arm, group in runs.groupby("arm")[column]}


def sheet(height_in: float, columns: int = 1, rows: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure one page column wide, and its axes."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def sheet_of_rows(rows: int, row_in: float = 0.27, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure whose height fits the number of rows, and its axes."""
    return sheet(0.75 + row_in * rows, columns, **grid)


def finish(
    figure: Figure,
    title: str,
    subject: str,
    subtitle: str,
    words: str,
    notes: Mapping[str, str] | None = None,
    legend: Sequence[Any] = (),
    *,
    legend_columns: int = 3,
    lead: str = "",
    name: str = "",
    keys: Sequence[str] = (),
) -> Drawing:
    """Return the figure with its title, its legend, and footnotes: keys, and strategies that are not comparable."""
    titles, subtitles = _wrapped(title, _TITLE_LETTERS), [*_wrapped(subject), *_wrapped(subtitle)]
    lines, notes = [line for key in keys for line in _wrapped(key)], notes or {}
    for reason in filter(None, dict.fromkeys(notes.values())):
        arms = ", ".join(arm for arm in notes if notes[arm] == reason)
        lines += _wrapped(f"† confounded, {arms}: {reason}")
    foot_in = 0.155 * len(lines) + 0.12 if lines else 0
    for item in legend:
        parts = str(item.get_label()).split("\n")
        item.set_label("\n".join(line for part in parts for line in _wrapped(part)))
    entries = [item.get_label().split("\n") for item in legend]
    longest = sorted((max(map(len, entry)) for entry in entries), reverse=True)
    # A further column costs the width of 7 letters.
    while legend_columns > 1 and sum(longest[:legend_columns]) > _LEGEND_LETTERS - 7 * (legend_columns - 1):
        legend_columns -= 1
    columns = np.array_split([len(entry) for entry in entries], legend_columns)
    legend_in = max(column.sum() for column in columns) * 13.5 / 72 + 0.15 if legend else 0
    body_in, head_in = figure.get_figheight(), 0.1 + _TITLE_IN * len(titles) + _LINE_IN * len(subtitles)
    height_in = head_in + body_in + legend_in + foot_in
    figure.set_figheight(height_in)
    for axes in figure.axes:
        axes.set_xlabel("\n".join(_wrapped(axes.get_xlabel(), _AXIS_LETTERS)))
    figure.set_layout_engine("constrained", rect=(0, (legend_in + foot_in) / height_in, 1, body_in / height_in))
    for text, place_in, manner in (
        (titles, height_in - 0.07, {"size": 12, "weight": "bold", "va": "top"}),
        (
            subtitles,
            height_in - 0.07 - _TITLE_IN * len(titles),
            {"size": 9.5, "color": QUIET, "va": "top", "linespacing": 1.25},
        ),
        (lines, 0.05, {"size": 9, "color": QUIET, "va": "bottom"}),
    ):
        figure.text(0.012, place_in / height_in, "\n".join(text), **manner)  # type: ignore[arg-type]
    for axes in figure.axes:
        _spread_labels(figure, axes)
    if legend:
        # The figure already has space for the legend.
        figure.legend(
            handles=legend,
            loc="lower left",
            bbox_to_anchor=(0, foot_in / height_in),
            ncols=legend_columns,
            fontsize=9,
            borderaxespad=0.3,
            columnspacing=1.3,
            markerscale=0.85,
            handlelength=2.4,
        ).set_in_layout(False)
    return Drawing(figure, f"{lead or f'{title}, {subject}'}: {'; '.join([words, *keys])}. {subtitle}".strip(), name)


def _wrapped(text: str, letters: int = _LINE_LETTERS) -> list[str]:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return _Wrapper(letters, break_on_hyphens=False).wrap(" ".join(printable.split()))


class _Wrapper(textwrap.TextWrapper):
    """Break a word that is longer than a line after one of its periods, underscores and equals signs."""

    def _split(self, text: str) -> list[str]:
        parts: list[str] = []
        for word in super()._split(text):
            parts += re.split(r"(?<=[._=])(?=\w)", word) if len(word) > self.width else [word]
        return parts


def format_label(arm: str, notes: Mapping[str, str]) -> str:
    """Return a strategy's label on at most three lines, with a dagger if it is confounded."""
    text = arm.replace("zero_optimization.", "")
    lines = _wrapped(f"{text} †" if notes.get(arm) else text, _LABEL_LETTERS)
    return "\n".join([*lines[: _MAX_LINES - 1], f"{lines[_MAX_LINES - 1]} …"] if len(lines) > _MAX_LINES else lines)


def letter_settings(arms: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return labels of one line, in which a letter is for settings that are long, and the keys of these letters."""
    names = [read_arm(arm.replace("zero_optimization.", "")) for arm in arms]
    long = dict.fromkeys(name.settings for name in names if name.settings and len(str(name)) > _LABEL_LETTERS)
    letters = dict(zip(long, ascii_lowercase, strict=False))
    labels = [f"{name.label} + {letters[name.settings]}" if name.settings in letters else str(name) for name in names]
    return labels, [f"{letter}: {', '.join(settings)}" for settings, letter in letters.items()]


def rows_of_arms(axes: Axes, arms: Iterable[str], notes: Mapping[str, str]) -> None:
    """Label one row per strategy, the first at the top; the figure grows if labels have several lines."""
    names = [format_label(arm, notes) for arm in arms]
    lines, figure = max((name.count("\n") + 1 for name in names), default=1), axes.figure
    assert isinstance(figure, Figure)
    figure.set_figheight(max(figure.get_figheight(), 0.75 + (0.04 + 0.16 * lines) * len(names)))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def bars(
    axes: Axes,
    parts: pd.DataFrame,
    fills: Mapping[str, Fill],
    texts: Iterable[str],
    xlabel: str,
    notes: Mapping[str, str],
    *,
    marks: Sequence[float] | None = None,
    margin: float = 0.1,
) -> None:
    """Draw one stacked bar per row with a text at its end; `marks` are vertical lines across the bars."""
    rows, ends = np.arange(len(parts)), np.zeros(len(parts))
    for kind, sizes in parts.fillna(0).items():
        fill, widths = fills.get(str(kind), OTHER), sizes.to_numpy()
        # A bar of zero width would remove the plot's margin.
        visible = widths > 0
        axes.barh(
            rows[visible],
            widths[visible],
            left=ends[visible],
            height=0.72,
            color=fill.colour,
            hatch=fill.hatch,
            edgecolor="white",
            linewidth=0.4,
        )
        ends = ends + widths
    if marks is not None:
        axes.vlines(marks, rows - 0.42, rows + 0.42, color=INK, linewidth=1.6, zorder=5)
        # A number is at its bar, unless a mark is so near that it would be beneath the number.
        is_near = np.asarray(marks) - ends < 0.2 * max(np.nanmax(marks, initial=0), ends.max(initial=0))
        ends = np.where(is_near, np.fmax(ends, marks), ends)
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        write_right(axes, text, (end, row))
    rows_of_arms(axes, parts.index, notes)
    axes.grid(visible=False)
    axes.margins(x=margin)
    axes.set(xlabel=xlabel, xlim=(0, None))


def write_right(axes: Axes, text: str, place: tuple[float, float]) -> None:
    """Write a text to the right of a point."""
    axes.annotate(text, place, xytext=(4, 0), textcoords="offset points", va="center", size=9, path_effects=_HALO)


def legend_of_fills(fills: Mapping[str, Fill], words: Mapping[str, str]) -> list[Patch]:
    """Return a legend entry per fill."""
    return [
        Patch(facecolor=fill.colour, hatch=fill.hatch, edgecolor="white", label=words.get(kind, kind.replace("_", "-")))
        for kind, fill in fills.items()
    ]


def legend_of_arms(arms: Mapping[str, str], notes: Mapping[str, str]) -> list[Line2D]:
    """Return a legend entry per strategy, with its line and marker."""
    return [
        Line2D([], [], label=format_label(arm, notes), **style.line | {"markeredgecolor": style.colour})
        for arm, style in zip(arms, map(find_style, arms.values()), strict=True)
    ]


class EndLabel(NamedTuple):
    """A text at the end of a line."""

    x: float
    y: float
    text: str
    colour: str
    leftward: bool = False


def label_ends(axes: Axes, labels: Sequence[EndLabel], size: float = 9) -> None:
    """Write each text next to its point; `finish` moves those that overlap."""
    for label in labels:
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(-12 if label.leftward else 12, 0),
            textcoords="offset points",
            va="center",
            ha="right" if label.leftward else "left",
            size=size,
            color=label.colour,
            label=_END,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (label.leftward, 0.5),
            },
            path_effects=_HALO,
        )


def _spread_labels(figure: Figure, axes: Axes) -> None:
    """Shift labels of ends up or down, so that none overlaps another."""
    notes = [text for text in axes.texts if isinstance(text, Annotation) and text.get_label() == _END]
    sizes = np.array([float(note.get_fontsize()) for note in notes])
    spaces = 1.25 * sizes * [note.get_text().count("\n") + 1 for note in notes]
    engine = figure.get_layout_engine()
    assert engine is not None
    # Twice, because the labels shrink the axes, which moves the points.
    for _ in range(2 if notes else 0):
        with _without_arrows(figure):
            engine.execute(figure)
        heights = axes.transData.transform([note.xy for note in notes])[:, 1] * 72 / figure.dpi
        # The places closest to the points that are in their order, each with its space.
        order, places = np.argsort(heights, kind="stable"), heights.copy()
        gaps = np.cumsum(spaces[order]) - spaces[order] / 2
        places[order] = isotonic_regression(heights[order] - gaps).x + gaps
        for note, size, height, place in zip(notes, sizes, heights, places, strict=True):
            note.set_position((note.get_position()[0], place - height))
            assert note.arrow_patch is not None
            note.arrow_patch.set_visible(abs(place - height) > size / 2)


def label_points(
    axes: Axes,
    points: pd.DataFrame,
    runs: pd.DataFrame,
    strategies: Mapping[str, str],
    notes: Mapping[str, str],
    few: Container[str],
    best: Container[str],
) -> None:
    """Draw a marker per strategy, hollow if it has few seeds, and its single runs; both have the same columns.

    The axes start at 0, that of x only if points are in its lower half. Of more than 14 strategies only the best ones
    are labeled, and the others are gray.
    """
    ends = []
    for arm, (x, y) in points.iterrows():
        is_labeled = len(points) <= MAX_POINTS or arm in best
        style = find_style(strategies[str(arm)]) if is_labeled else UNKNOWN
        single = runs.loc[[arm]].to_numpy(dtype=float)
        axes.plot(*single.T, ".", color=style.colour, markersize=5, alpha=0.7)
        # A hollow marker hides no other one.
        look = style.hollow | {"markerfacecolor": "none"} if arm in few else style.points
        axes.plot(x, y, markersize=8, **look)
        # On the right side a text goes to the left, or the axes would be narrow.
        leftward = x > 0.7 * points.iloc[:, 0].max() and points.iloc[:, 0].min() < 0.5 * points.iloc[:, 0].max()
        ends += [EndLabel(x, y, format_label(str(arm), notes), style.colour, leftward)] * is_labeled
    axes.grid()
    axes.margins(x=0.1, y=0.1)
    axes.set(xlim=(0 if axes.dataLim.x0 < axes.dataLim.x1 / 2 else None, None), ylim=(0, None))
    # The margin is of the range of the points, which may be next to nothing: their markers would be cut, and the
    # numbers on the axis of x would differ in the seventh digit.
    left, _, right, top = axes.dataLim.extents
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.03 * top))
    if 0 < right < 1.01 * left:
        axes.set_xlim(0.99 * left, 1.01 * right)
    label_ends(axes, ends)
