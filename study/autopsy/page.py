"""The page of the autopsy and its figures, from its records only.

The figures: the effect of each switch, the waterfall from the listing to a corrected protocol, and the order of arms.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from study.autopsy.contrasts import FILE, Autopsy, Effect, mean_ratio, read_arms, read_sessions, share_text
from study.autopsy.design import AA, CORRECTED, GATES, PRINTED, PUBLISHED, SCALES, SWITCHES, Kind, Response
from study.autopsy.run import MARK
from study.config.errors import UserError
from study.config.text import percent
from study.records.statistics import Interval, equivalence_test
from study.report.canvas import ACCENT, FAINT, INK, QUIET, SETTINGS, Drawing, finish, sheet
from study.report.document import PageSection, page_html, page_markdown, render_paragraphs
from study.report.site.publishing import FIGURES, publish_report

TITLE = "What makes the gap in loss that the listing of S2 (University of Guelph) prints?"
_MADE_BY = (
    "Made by `study autopsy report` from `arms.parquet`; `study autopsy run` makes the sessions anew. Design, expected"
    " signs and margins were committed before the first of them."
)
_MARKS = {"as expected": " ✓", "not as expected": " ✗"}


def build(runs: Path, output: Path, *, runs_named: bool) -> Path:
    """Build the page from the sessions in `runs`, or from the table of an earlier report, and return its path."""
    arms = read_sessions(runs) if (runs / MARK).is_file() or runs_named else read_arms(output)
    study = Autopsy(arms)
    if study.models["eval_loss"].terms.empty:
        raise UserError("no seed has all its 16 cells yet", "run: study autopsy run")
    output.resolve().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.building-", dir=output.resolve().parent))
    try:
        arms.to_parquet(folder / FILE, index=False, compression="zstd")
        *panels, screen = drawings(study)
        (folder / FIGURES).mkdir()
        for drawing in (*panels, screen):
            (folder / FIGURES / f"{drawing.name}.png").write_bytes(drawing.png)
        first, *remaining = sections(study)
        facts = _facts(study)
        html = page_html(
            "autopsy.html.j2", TITLE, {"index": TITLE}, "index", lead="", facts=facts, failure="",
            sections=[dataclasses.replace(first, drawings=panels), *remaining],
        )  # fmt: skip
        (folder / "index.html").write_text(html, encoding="utf-8")
        first = dataclasses.replace(first, text=f"{facts}\n\n![{screen.alt}]({FIGURES}/screen.png)")
        markdown = page_markdown(TITLE, [first, *remaining, PageSection(text=_MADE_BY)])
        (folder / "summary.md").write_text(markdown, encoding="utf-8")
        publish_report(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return output / "index.html"


def sections(study: Autopsy) -> list[PageSection]:
    """Return the sections of the page."""
    arms = study.arms
    bad = arms[(arms["state"] != "ok") & (arms["kind"] != "gate")].drop_duplicates("session")
    failures = [f"{row.session}: {row.state}, {row.reason}" for row in bad.itertuples()]
    limits = render_paragraphs(
        "autopsy_limits.j2", lanes=int(arms["lanes"].max()), gpu=SCALES["a100"],
        on_gpu=SCALES[str(arms["scale"].iloc[0])].on_gpu,
    )  # fmt: skip
    every_effect = pd.DataFrame(
        {"switch": effect.letter, "figure": effect.response.words, "effect": _effect_text(effect),
         "over both orders": share_text(effect.average), "expected": effect.expected, "found": effect.outcome}
        for of_switch in zip(*study.effects.values(), strict=True) for effect in of_switch
    )  # fmt: skip
    # The signs that were committed before the first session, and those found.
    predictions = pd.DataFrame(
        {"expected → found, for": response.words,
         **{effect.letter: f"{effect.expected} → {effect.outcome}{_MARKS.get(effect.verdict, '')}"
            for effect in study.effects[name]},
         "null margin": percent(study.null_margin(name))}
        for name, response in study.responses.items()
    )  # fmt: skip
    return [
        PageSection(sentence=f"{headline(study)}.", notes=_findings(study)),
        PageSection("As printed and corrected", table=_protocols(study)),
        PageSection("The switches", table=_switches(study)),
        PageSection("Expected, and found", table=predictions),
        PageSection("From the listing's dictionary to an engine that runs", table=_gates(arms)),
        PageSection("Every effect", tables={"Each switch on each figure": every_effect}),
        PageSection("Limits", notes=limits),
        *([PageSection("Failed sessions", notes=failures)] if failures else []),
    ]


def _facts(study: Autopsy) -> str:
    arms = study.arms
    environments = [json.loads(text) for text in arms["environment"].unique() if text != "null"]
    sessions = arms.drop_duplicates("session")
    last = environments[-1]
    device = ", ".join(entry["name"] for entry in last["devices"]) or "no accelerator"
    commits = sorted({str(entry["git_commit"])[:12] for entry in environments})
    minutes = sessions["session_s"].sum() / 60 / sessions["lanes"].max()
    return " · ".join([
        f"{len(sessions)} sessions, {int((sessions['state'] == 'ok').sum())} ok",
        f"{len(study.models['eval_loss'].terms)} seeds with all their cells",
        f"{last['cpu']}, {device}",
        *(f"{name} {last['packages'][name]}" for name in ("torch", "transformers", "accelerate", "deepspeed")),
        f"commit {', '.join(commits)}",
        f"{sessions['started_at'].min()[:10]}, {minutes:.0f} minutes",
    ])  # fmt: skip


def _memory(study: Autopsy) -> str:
    return next(name for name in ("device_peak_never_reset", "host_peak_never_reset") if name in study.responses)


def _findings(study: Autopsy) -> list[str]:
    engine = 1 + 2 * study.models["eval_loss"].terms["E"]
    equivalence = equivalence_test(list(engine), [1.0] * len(engine), study.null_margin("eval_loss"))
    standard = study.arms[(study.arms["kind"] == "printed rate") & (study.arms["arm"] == "standard")]

    def share(kind: Kind, cell: str) -> Callable[[str], str]:
        return lambda response: share_text(study.ratio(response, kind, cell))

    return render_paragraphs(
        "autopsy_findings.j2", printed=share("factorial", PRINTED), corrected=share("corrected", CORRECTED),
        equal=share("aa", AA), third=share("printed rate", PRINTED),
        engine="" if study.engine_was_on(all_as_printed=True)[0] else ", without DeepSpeed",
        published={loss: percent(change, signed=True) for loss, change in PUBLISHED.items()},
        effect=lambda letter, name: share_text(study.effects[name][CORRECTED.index(letter)].ratio),
        equivalence=equivalence.text(), memory=_memory(study),
        detectable=percent(study.minimum_detectable_effect("whole_s")),
        verdicts=collections.Counter(effect.verdict for effects in study.effects.values() for effect in effects),
        at_rate={"loss": f"{standard['eval_loss'].mean():.3f}", "accuracy": f"{standard['eval_accuracy'].mean():.2f}",
                 "chance": f"{math.log(2):.3f}"} if study.ratio("eval_loss", "printed rate", PRINTED).n else {},
    )  # fmt: skip


def _protocols(study: Autopsy) -> pd.DataFrame:
    protocols: dict[str, tuple[Kind, str]] = {
        "as printed": ("factorial", PRINTED), "third run of the listing": ("listing", PRINTED),
        "corrected": ("corrected", CORRECTED), "corrected, clipping not asked for": ("unclipped", CORRECTED),
        "two equal arms": ("aa", AA),
    }  # fmt: skip
    return pd.DataFrame(
        {
            "ZeRO over standard": response.words,
            **{what: share_text(study.ratio(name, *at)) for what, at in protocols.items()},
        }
        for name, response in study.responses.items()
    )


def _switches(study: Autopsy) -> pd.DataFrame:
    arms = study.arms
    sessions = arms[(arms["kind"] == "factorial") & (arms["state"] == "ok")].drop_duplicates("session")["cell"]
    printed = {switch.letter: int(sessions.str.contains(switch.letter.lower()).sum()) for switch in SWITCHES}
    shown = ("eval_loss", "train_loss", "whole_s", "warm_cpu_s_per_sample", _memory(study))
    return pd.DataFrame({
        "switch": [f"{switch.letter} {switch.name}" for switch in SWITCHES],
        "as printed": [switch.printed for switch in SWITCHES], "corrected": [switch.corrected for switch in SWITCHES],
        "in the listing": [switch.line for switch in SWITCHES],
        "claims": [", ".join(switch.claims) for switch in SWITCHES],
        "sessions": [f"{count} and {len(sessions) - count}" for count in printed.values()],
        **{study.responses[name].words: map(_effect_text, study.effects[name]) for name in shown
           if name in study.responses},
    })  # fmt: skip


def _effect_text(effect: Effect) -> str:
    return f"{share_text(effect.ratio)}, p {effect.p:.2g}"


def _gates(arms: pd.DataFrame) -> pd.DataFrame:
    gates = arms[arms["kind"] == "gate"].drop_duplicates("cell").set_index("cell")
    rows = []
    for name in (name for name in GATES if name in gates.index):
        gate = gates.loc[name]
        on = "the engine is on" if gate.get("deepspeed_enabled") is True else "no engine, and no message"
        what = f"{on}; clips at {gate['clips_at']:g}" if gate["state"] == "ok" else gate["reason"]
        rows.append({"the dictionary": name, "what happens": what})
    return pd.DataFrame(rows)


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
