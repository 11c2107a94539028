"""Figures: the effect of each switch, the waterfall from the listing to a corrected protocol, and the order of arms."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from study.autopsy.contrasts import Autopsy, mean_ratio, share_text
from study.autopsy.design import AA, CORRECTED, PUBLISHED, SWITCHES, Response
from study.config.text import percent
from study.records.statistics import Interval
from study.report.canvas import ACCENT, FAINT, INK, QUIET, SETTINGS, Drawing, finish, sheet

PANELS = ("loss", "time", "memory")
_TITLES = {"loss": "Loss", "time": "Time", "memory": "Peak memory"}
# The first of each panel is the figure that the listing reports; the waterfall shows it.
_SHOWN = {
    "loss": ("eval_loss", "train_loss"), "time": ("whole_s", "warm_s_per_sample"),
    "memory": ("device_peak_never_reset", "device_peak_reset", "host_peak_never_reset", "host_peak_reset"),
}  # fmt: skip
_RISES, _FALLS, _BAND = "#c58b1a", "#2b98ff", "#d3d7dc"
_OFFSETS = (-0.14, 0.14)


def panel_responses(study: Autopsy, panel: str) -> list[Response]:
    """Return the two responses of a panel; for memory, those of the device if there is one."""
    return [study.responses[name] for name in _SHOWN[panel] if name in study.responses][:2]


def effect_panel(axes: Axes, study: Autopsy, panel: str, names: bool = True) -> None:
    """Draw a row per switch and a marker per response, with its interval over seeds."""
    responses = panel_responses(study, panel)
    band = study.ratio(responses[0].name, "aa", AA)
    if band.low is not None and band.high is not None:
        axes.axvspan(math.log(band.low), math.log(band.high), color=_BAND, zorder=0)
        axes.axvline(math.log(band.center), color=_BAND, linewidth=3, zorder=0)
    axes.axvline(0, color=QUIET, linewidth=0.8, zorder=1)
    if panel == "loss":
        axes.axvline(math.log1p(PUBLISHED["eval_loss"]), color=ACCENT, linewidth=1.4, linestyle=(0, (3, 2)), zorder=2)
    for response, offset, fill in zip(responses, _OFFSETS, (INK, "white"), strict=False):
        for row, effect in enumerate(study.effects[response.name]):
            _dot(axes, effect.ratio, row + offset, fill)
    _rows(axes, [f"{switch.letter}  {switch.name}" for switch in SWITCHES], names)
    _in_percent(axes)


def _dot(axes: Axes, estimate: Interval, row: float, fill: str) -> None:
    if estimate.low is not None and estimate.high is not None:
        axes.plot(np.log([estimate.low, estimate.high]), [row, row], color=INK, linewidth=1.6, zorder=3)
    axes.plot(math.log(estimate.center), row, "o", markersize=6.5, color=fill, markeredgecolor=INK, zorder=4)


def _rows(axes: Axes, names: Sequence[str], are_named: bool) -> None:
    axes.set_yticks(range(len(names)), names if are_named else [""] * len(names))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color=FAINT, linewidth=0.6, zorder=0)


def _in_percent(axes: Axes, margin: float = 0.12) -> None:
    axes.use_sticky_edges = False
    axes.margins(x=margin)
    axes.autoscale_view()
    low, high = axes.get_xlim()
    ticks = _ticks(low, high)
    axes.set_xticks(ticks, list(map(_tick, ticks)))
    axes.set_xlim(low, high)


def _tick(log: float) -> str:
    return percent(math.expm1(log), signed=True) if abs(log) > 1e-9 else "0"


def _ticks(low: float, high: float) -> list[float]:
    """Return logs of at most six round ratios in this range, far enough apart for their labels."""
    first, last = math.expm1(low), math.expm1(high)
    sizes = (base * 10.0**power for power in range(-5, 6) for base in (1, 2, 5))
    step = next(size for size in sizes if (last - first) / size <= 6)
    places = [math.log1p(step * place) for place in range(math.ceil(first / step), math.floor(last / step) + 1)]
    spaced: list[float] = []
    for place in places:
        if not spaced or place - spaced[-1] > 0.17 * (high - low):
            spaced.append(place)
    return spaced


def waterfall_panel(axes: Axes, study: Autopsy, panel: str, names: bool = True) -> None:
    """Draw the steps from the listing's gap to that of a corrected protocol, and the measured corrected cell."""
    response = panel_responses(study, panel)[0]
    fitted = study.models[response.name]
    ends = [float(fitted.printed().mean())]
    for part in fitted.shares().values():
        ends.append(ends[-1] + float(part.mean()))
    labels = ["as printed", *(f"{switch.letter}  {switch.name}" for switch in SWITCHES), "corrected", "measured"]
    axes.axvline(0, color=QUIET, linewidth=0.8, zorder=1)
    axes.barh(0, ends[0], height=0.62, color=INK, zorder=2)
    for row, (before, after) in enumerate(itertools.pairwise(ends), 1):
        axes.barh(row, after - before, left=before, height=0.62, color=_RISES if after > before else _FALLS, zorder=2)
        axes.plot([before, before], [row - 1, row], color=QUIET, linewidth=0.7, zorder=1)
    axes.barh(len(ends), ends[-1], height=0.62, color=INK, zorder=2)
    measured = study.ratio(response.name, "corrected", CORRECTED)
    if measured.n:
        _dot(axes, measured, len(ends) + 1, "white")
    _rows(axes, labels, names)
    _in_percent(axes, margin=0.2)
    for row, (before, after) in enumerate([(0.0, ends[0]), *itertools.pairwise(ends), (0.0, ends[-1])]):
        label = percent(math.expm1(after - before), signed=True)
        axes.annotate(
            label, (max(before, after), row), xytext=(4, 0), textcoords="offset points", va="center", size=8.5
        )


_LINES = (
    ("w", "train_loss", "carried weights, training loss", ACCENT, "o"),
    ("w", "eval_loss", "carried weights, evaluation loss", "#c58b1a", "^"),
    ("W", "eval_loss", "fresh weights, both losses", INK, "s"),
)


def order_panel(axes: Axes, study: Autopsy) -> None:
    """Draw the gap with the standard arm first and with ZeRO first, at equal batches, for carried and fresh weights."""
    for turn, (letter, response, name, color, marker) in enumerate(_LINES):
        centers = []
        for place, values in enumerate(_by_order(study, response, letter)):
            estimate, x = mean_ratio(values), place + (turn - 1) * 0.06
            centers.append((x, math.log(estimate.center)))
            axes.plot(np.full(len(values), x), values, marker, color=color, markersize=3.5, alpha=0.4, linewidth=0)
            if estimate.low is not None and estimate.high is not None:
                axes.vlines(x, math.log(estimate.low), math.log(estimate.high), color=color, linewidth=2)
        axes.plot(*zip(*centers, strict=True), marker=marker, color=color, linewidth=2, markersize=7, label=name)
    axes.axhline(0, color=QUIET, linewidth=0.8, zorder=0)
    axes.axhline(math.log1p(PUBLISHED["eval_loss"]), color=ACCENT, linewidth=1.2, linestyle=(0, (3, 2)), zorder=0)
    axes.set_xticks((0, 1), ("standard first\n(as printed)", "ZeRO first"))
    axes.set_xlim(-0.35, 1.35)
    axes.margins(y=0.15)
    low, high = axes.get_ylim()
    ticks = _ticks(low, high)
    axes.set_yticks(ticks, list(map(_tick, ticks)))
    axes.legend(loc="upper left", fontsize=8.5, frameon=False)


def _by_order(study: Autopsy, response: str, letter: str) -> list[np.ndarray]:
    """Return one gap per seed, with the standard arm first and with ZeRO first; batches are equal."""
    table = study.gaps(response)
    cells = ([cell for cell in table if letter in cell and order in cell and "B" in cell] for order in "oO")
    return [table[columns].mean(axis="columns").dropna().to_numpy() for columns in cells]


def _title_of_order(study: Autopsy) -> str:
    first, swapped = (float(values.mean()) for values in _by_order(study, "train_loss", "w"))
    return (
        "Swap the order, and the advantage changes arms" if first * swapped < 0 else "Carried weights, in both orders"
    )


def legend(panel: str, study: Autopsy) -> list[Line2D | Patch]:
    """Return the legend of a panel."""
    marks: list[Line2D | Patch] = [
        Line2D([], [], linestyle="", marker="o", markersize=6.5, color=fill, markeredgecolor=INK, label=response.words)
        for response, fill in zip(panel_responses(study, panel), (INK, "white"), strict=False)
    ]
    marks.append(Patch(color=_BAND, label="two equal arms"))
    if panel == "loss":
        marks.append(Line2D([], [], color=ACCENT, linestyle=(0, (3, 2)), label="published, -1.2 %"))
    return marks


def drawings(study: Autopsy) -> list[Drawing]:
    """Draw each panel as a separate figure, for narrow pages, and then all panels on one sheet."""
    drawn = []
    with matplotlib.rc_context(SETTINGS):
        for panel in PANELS:
            figure, (axes,) = sheet(2.5)
            effect_panel(axes, study, panel)
            title = f"{_TITLES[panel]}: what correcting each switch does"
            response = panel_responses(study, panel)[0]
            words = ", ".join(f"{effect.letter} {share_text(effect.ratio)}" for effect in study.effects[response.name])
            subtitle = "To the figure of the ZeRO arm over that of the standard arm, which comes first."
            drawn.append(finish(figure, title, subtitle, "", words, legend=legend(panel, study), legend_columns=2,
                               lead=title)._replace(name=f"effects_{panel}"))  # fmt: skip
            figure, (axes,) = sheet(2.9)
            waterfall_panel(axes, study, panel)
            title = f"{_TITLES[panel]}: from the listing to a corrected protocol"
            subtitle = f"ZeRO over standard, {response.words}. Corrected adds up the steps; measured has ZeRO first."
            drawn.append(finish(figure, title, subtitle, "", _words_of_waterfall(study, response), lead=title)
                        ._replace(name=f"waterfall_{panel}"))  # fmt: skip
        figure, (axes,) = sheet(3.3)
        order_panel(axes, study)
        title = _title_of_order(study)
        subtitle = "ZeRO over standard at equal batches; small marks are seeds."
        words = ", ".join(
            f"{name}, {order} {percent(math.expm1(float(values.mean())), signed=True)}"
            for letter, response, name, *_ in _LINES
            for order, values in zip(("standard first", "ZeRO first"), _by_order(study, response, letter), strict=True)
        )
        drawn.append(finish(figure, title, subtitle, "", words, lead=title)._replace(name="order"))
        drawn.append(_screen(study))
    return drawn


def _words_of_waterfall(study: Autopsy, response: Response) -> str:
    fitted = study.models[response.name]
    steps = {"as printed": fitted.printed(), **fitted.shares(), "corrected": fitted.corrected()}
    return ", ".join(
        f"{name} {percent(math.expm1(float(values.mean())), signed=True)}" for name, values in steps.items()
    )


def headline(study: Autopsy) -> str:
    """Return the page's main result: in how many sessions DeepSpeed was active."""
    (on, sessions), (exactly_on, exactly) = study.engine_was_on(), study.engine_was_on(all_as_printed=True)
    return (
        f"DeepSpeed was active in {on} of {sessions} sessions that set it as the listing does"
        f" ({exactly_on} of {exactly} exactly as printed)"
    )


def _screen(study: Autopsy) -> Drawing:
    figure = Figure(figsize=(15.5, 8.4), layout="constrained")
    grid = figure.subplot_mosaic(
        [[*(f"e-{panel}" for panel in PANELS), "order"], [*(f"w-{panel}" for panel in PANELS), "order"]],
        width_ratios=(1, 1, 1, 0.95), height_ratios=(1, 1.15),
    )  # fmt: skip
    for place, panel in enumerate(PANELS):
        upper, lower = grid[f"e-{panel}"], grid[f"w-{panel}"]
        effect_panel(upper, study, panel, names=not place)
        upper.set_title(_TITLES[panel])
        upper.legend(handles=legend(panel, study), loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=8.5,
                     ncols=2, frameon=False, columnspacing=1)  # fmt: skip
        waterfall_panel(lower, study, panel, names=not place)
    grid["e-loss"].set_ylabel("correcting one switch", color=QUIET)
    grid["w-loss"].set_ylabel("from the listing to the corrected protocol", color=QUIET)
    order_panel(grid["order"], study)
    grid["order"].set_title(textwrap.fill(_title_of_order(study), 24))
    grid["order"].set_ylabel("ZeRO over standard, at equal batches", color=QUIET)
    figure.suptitle(headline(study), x=0.008, ha="left", size=15, weight="bold")
    words = "; ".join(f"{panel}: {_words_of_waterfall(study, panel_responses(study, panel)[0])}" for panel in PANELS)
    return Drawing(figure, f"The whole screen. {words}.", "screen")
