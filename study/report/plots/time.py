"""Time: of a step with its spread, what is sent in it, and what memory buys for it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from study.report.plots.canvas import (
    Drawing,
    EndLabel,
    footnote,
    in_house_style,
    label_beside,
    legend_below,
    marked,
    number,
    plain_ticks,
    rows_of_arms,
    sheet,
    strategy_of_arm,
)
from study.report.plots.palette import OTHER_TRAFFIC, QUIET, TRAFFIC, style_of
from study.report.plots.select import arms_of, finished, notes_of, whole_parameters, workloads
from study.report.records.frames import Records, without_probes

NO_TIMES = "No finished run here has timed steps, so there is no time to draw."
NO_TRAFFIC = "No run here watched its collectives, so there is no traffic to draw."
NO_FRONTIER = "No finished run here has both a throughput and a peak memory, so there is no frontier to draw."
NO_OFFLOAD = (
    "No workload here has a strategy with offload beside the same stage without it, so there is none to compare."
)
# Points of single steps that one row can hold and still be seen as points.
_MOST_DOTS = 120
_ROW_IN, _FRAME_IN = 0.27, 0.75
_KEPT = {"zero2_cpu": "zero2", "zero3_cpu_optimizer": "zero3", "zero3_cpu": "zero3", "zero3_nvme_optimizer": "zero3",
         "zero3_nvme": "zero3", "zero3_cpu_nvme": "zero3"}  # fmt: skip


@in_house_style
def step_time(records: Records) -> list[Drawing] | str:
    drawings = []
    for place, (workload, runs) in enumerate(workloads(finished(records)), start=1):
        timed = runs[runs["step_time_s_median"].notna()]
        if not timed.empty:
            drawings.append(_step_time(f"step_time_{place}", workload, timed, records.steps))
    return drawings or NO_TIMES


def _step_time(name: str, workload: str, runs: pd.DataFrame, steps: pd.DataFrame) -> Drawing:
    arms, notes, strategies = arms_of(runs), notes_of(runs), strategy_of_arm(runs)
    figures = runs.groupby("arm")[["step_time_s_median", "step_time_s_p10", "step_time_s_p90"]].median() * 1e3
    single_steps = steps[steps["run"].isin(runs["run"])].merge(runs[["run", "arm"]], on="run")
    fastest = str(figures["step_time_s_median"].idxmin())
    title = "Time of one step"
    subtitle = f"Median with the middle 80 % of steps; dots are single steps. The fastest is {fastest}."
    figure, (axes,) = sheet(title, workload, subtitle, _FRAME_IN + _ROW_IN * len(arms))
    wobble = np.random.default_rng(0)
    for row, arm in enumerate(arms):
        colour, marker, _ = style_of(strategies[arm])
        times = single_steps.loc[single_steps["arm"] == arm, "step_time_s"].dropna().to_numpy() * 1e3
        times = times[:: max(len(times) // _MOST_DOTS, 1)]
        axes.scatter(times, row + wobble.uniform(-0.26, 0.26, len(times)), s=7, color=colour, alpha=0.25, linewidth=0)
        median, low, high = figures.loc[arm]
        axes.plot([low, high], [row, row], color=colour, linewidth=3, solid_capstyle="round")
        axes.plot(median, row, marker=marker, markersize=8.5, color=colour, markeredgecolor="white", zorder=4)
        axes.annotate(f"{median:,.0f}" if median >= 10 else number(median), (1.01, row), va="center", size=9,
                      xycoords=("axes fraction", "data"))  # fmt: skip
    rows_of_arms(axes, arms, notes)
    axes.set_xlim(0, float(figures["step_time_s_p90"].max()) * 1.25)
    plain_ticks(axes.xaxis)
    axes.set_xlabel("ms per optimizer step; on the right the median")
    footnote(axes, notes)
    words = ", ".join(f"{arm} {number(figures.loc[arm, 'step_time_s_median'])} ms" for arm in arms)
    return Drawing(name, f"{title}, {workload}", f"Median time of one step on {workload}: {words}.", figure)


@in_house_style
def traffic(records: Records) -> list[Drawing] | str:
    """What one rank hands to its collectives in one step; a virtual rank's is real as well."""
    runs = without_probes(records).runs
    runs = runs[(runs["status_state"] == "ok") & runs["collectives"].notna()]
    drawings = [
        _traffic(f"traffic_{place}", workload, chosen) for place, (workload, chosen) in enumerate(workloads(runs), 1)
    ]
    return drawings or NO_TRAFFIC


def _traffic(name: str, workload: str, runs: pd.DataFrame) -> Drawing:
    arms, notes = arms_of(runs), notes_of(runs)
    sent = {arm: json.loads(runs.loc[runs["arm"] == arm, "collectives"].iloc[0]) for arm in arms}
    kinds = [kind for kind in TRAFFIC if any(kind in collectives for collectives in sent.values())]
    kinds += sorted({kind for collectives in sent.values() for kind in collectives} - set(kinds))
    largest = max((sum(entry["payload_bytes"] for entry in one.values()) for one in sent.values()), default=0)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    title = "Sent in one step"
    whole = float(whole_parameters(runs).max()) / size
    subtitle = "Payload of the collectives of one rank."
    if whole > 0:
        subtitle += f" The dashed lines are whole copies of the parameters ({number(whole)} {unit})."
    figure, (axes,) = sheet(title, workload, subtitle, _FRAME_IN + _ROW_IN * len(arms))
    totals = {}
    for row, arm in enumerate(arms):
        left = 0.0
        for kind in kinds:
            width = sent[arm].get(kind, {}).get("payload_bytes", 0) / size
            fill = TRAFFIC.get(kind, OTHER_TRAFFIC)
            axes.barh(row, width, left=left, height=0.72, color=fill.colour, hatch=fill.hatch, edgecolor="white",
                      linewidth=0.4)  # fmt: skip
            left += width
        totals[arm] = left
        axes.annotate(number(left), (left, row), xytext=(4, 0), textcoords="offset points", va="center", size=9)
    copies = int(largest / size / whole + 0.01) if whole > 0 else 0
    for copy in range(1, min(copies, 6) + 1):
        axes.axvline(copy * whole, color=QUIET, linestyle=(0, (4, 3)), linewidth=0.9, zorder=0)
    rows_of_arms(axes, arms, notes)
    axes.grid(visible=False)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} per rank and step")
    footnote(axes, notes)
    handles = [Patch(facecolor=fill.colour, hatch=fill.hatch, edgecolor="white", label=kind.replace("_", "-"))
               for kind in kinds for fill in [TRAFFIC.get(kind, OTHER_TRAFFIC)]]  # fmt: skip
    legend_below(figure, handles, 4, columnspacing=1.3)
    words = ", ".join(f"{arm} {number(total)} {unit}" for arm, total in totals.items())
    return Drawing(name, f"{title}, {workload}", f"{title}, {workload}: {words}.", figure)


@in_house_style
def frontier(records: Records) -> list[Drawing] | str:
    drawings = []
    for place, (workload, runs) in enumerate(workloads(finished(records)), start=1):
        memory = "peak_memory_gib_allocated" if runs["peak_memory_gib_allocated"].notna().any() else "host_peak_rss_gib"
        points = runs.groupby("arm")[[memory, "tokens_per_s"]].median().dropna()
        if len(points) > 1:
            drawings.append(_frontier(f"frontier_{place}", workload, runs, points, memory))
    return drawings or NO_FRONTIER


def _frontier(name: str, workload: str, runs: pd.DataFrame, points: pd.DataFrame, memory: str) -> Drawing:
    strategies, notes = strategy_of_arm(runs), notes_of(runs)
    best = _undominated(points, memory)
    title = "Throughput against memory"
    figure, (axes,) = sheet(title, workload, f"Nothing here is both faster and smaller than {_listed(best)}.", 4.2)
    stairs = points.loc[best].sort_values(memory)
    axes.step(stairs[memory], stairs["tokens_per_s"], where="post", color=QUIET, linestyle=(0, (4, 3)), linewidth=1.1)
    for arm, (used, speed) in points.iterrows():
        colour, marker, _ = style_of(strategies[str(arm)])
        axes.plot(used, speed, marker=marker, markersize=9.5, color=colour, markeredgecolor="white", linestyle="")
    place = "on the device" if memory == "peak_memory_gib_allocated" else "of the process (resident set)"
    axes.set_xlabel(f"peak memory {place}, GiB per rank")
    axes.set_ylabel("tokens per second, all ranks")
    axes.grid()
    axes.margins(x=0.08, y=0.08)
    plain_ticks(axes.yaxis)
    _room_at_zero(axes)
    footnote(axes, notes)
    label_beside(axes, [EndLabel(used, speed, marked(str(arm), notes), style_of(strategies[str(arm)]).colour)
                        for arm, (used, speed) in points.iterrows()], size=8.5)  # fmt: skip
    words = ", ".join(
        f"{arm} {number(speed)} tokens/s at {number(used)} GiB" for arm, (used, speed) in points.iterrows()
    )
    return Drawing(name, f"{title}, {workload}", f"{title}, {workload}: {words}.", figure)


def _undominated(points: pd.DataFrame, memory: str) -> list[str]:
    ordered = points.sort_values([memory, "tokens_per_s"], ascending=[True, False])
    ahead = ordered["tokens_per_s"] > ordered["tokens_per_s"].cummax().shift(fill_value=-np.inf)
    return [str(arm) for arm in ordered.index[ahead]]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _room_at_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)


@in_house_style
def offload(records: Records) -> list[Drawing] | str:
    """Each strategy with offload as an arrow from the same stage without it: memory won to the left, time paid up."""
    drawings = []
    for place, (workload, runs) in enumerate(workloads(finished(records)), start=1):
        moves = _moves(runs)
        if moves:
            drawings.append(_offload(f"offload_{place}", workload, runs, moves))
    return drawings or NO_OFFLOAD


def _moves(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """(with offload, without it), of the same number of ranks."""
    pairs = []
    for arm in arms_of(runs):
        run = runs[runs["arm"] == arm].iloc[0]
        kept = runs[(runs["strategy"] == _KEPT.get(run["strategy"])) & (runs["world_size"] == run["world_size"])]
        if not kept.empty:
            pairs.append((arm, str(kept["arm"].iloc[0])))
    return pairs


def _offload(name: str, workload: str, runs: pd.DataFrame, moves: Sequence[tuple[str, str]]) -> Drawing:
    strategies, notes = strategy_of_arm(runs), notes_of(runs)
    device = runs[[f"{kind}_bytes_device" for kind in ("params", "grads", "optimizer")]].sum(axis="columns") / 2**20
    points = pd.DataFrame({"arm": runs["arm"], "state": device, "ms": runs["step_time_s_median"] * 1e3})
    points = points.groupby("arm").median()
    unit, size = ("GiB", 1024) if points["state"].max() >= 1024 else ("MiB", 1)
    points["state"] /= size
    title = "What offload wins and costs"
    subtitle = "An arrow leads from a stage that keeps its state on the device to the same stage with offload."
    figure, (axes,) = sheet(title, workload, subtitle, 3.9)
    shown = list(dict.fromkeys(arm for pair in moves for arm in reversed(pair)))
    for arm, kept in moves:
        colour = style_of(strategies[arm]).colour
        axes.annotate("", tuple(points.loc[arm]), xytext=tuple(points.loc[kept]), arrowprops={
            "arrowstyle": "->", "color": colour, "linewidth": 1.2, "shrinkA": 5, "shrinkB": 5, "alpha": 0.7,
        })  # fmt: skip
    for arm in shown:
        colour, marker, _ = style_of(strategies[arm])
        axes.plot(*points.loc[arm], marker=marker, markersize=9.5, color=colour, markeredgecolor="white", linestyle="")
    axes.set_xlabel(f"model state left on the device, {unit} per rank")
    axes.set_ylabel("median time of one step, ms")
    axes.grid()
    axes.margins(x=0.12, y=0.12)
    _room_at_zero(axes)
    footnote(axes, {arm: notes.get(arm, "") for arm in shown})
    ends = [
        EndLabel(state, ms, marked(str(arm), notes), style_of(strategies[str(arm)]).colour)
        for arm, (state, ms) in points.loc[shown].iterrows()
    ]
    label_beside(axes, ends, size=9)
    words = ", ".join(
        f"{arm} leaves {number(points.loc[arm, 'state'])} of {number(points.loc[kept, 'state'])} {unit} and takes "
        f"{number(points.loc[arm, 'ms'])} instead of {number(points.loc[kept, 'ms'])} ms" for arm, kept in moves
    )  # fmt: skip
    return Drawing(name, f"{title}, {workload}", f"{title}, {workload}: {words}.", figure)
