"""Time: of a step with its spread, what is sent in it, and what memory buys for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from study.report.plots.canvas import (
    Drawing,
    EndLabel,
    beside_bar,
    end_rows,
    footnote,
    in_house_style,
    label_beside,
    legend_of_fills,
    marked,
    number,
    plain_ticks,
    rows_of_arms,
    sheet,
    stack,
    strategy_of_arm,
)
from study.report.plots.palette import OTHER, QUIET, TRAFFIC, style_of
from study.report.plots.select import arms_of, finished, notes_of, per_workload, whole_parameters
from study.report.records.frames import Records, without_probes

# Points of single steps that one row can hold and still be seen as points.
_MOST_DOTS = 120
_ROW_IN, _FRAME_IN = 0.27, 0.75
_KEPT = {"zero2_cpu": "zero2", "zero3_cpu_optimizer": "zero3", "zero3_cpu": "zero3", "zero3_nvme_optimizer": "zero3",
         "zero3_nvme": "zero3", "zero3_cpu_nvme": "zero3"}  # fmt: skip


@in_house_style
def step_time(records: Records) -> list[Drawing]:
    runs = finished(records)
    timed = runs[runs["step_time_s_median"].notna()]
    return per_workload("step_time", timed, functools.partial(_step_time, records.steps))


def _step_time(steps: pd.DataFrame, name: str, workload: str, runs: pd.DataFrame) -> Drawing:
    arms, notes, strategies = arms_of(runs), notes_of(runs), strategy_of_arm(runs)
    figures = runs.groupby("arm")[["step_time_s_median", "step_time_s_p10", "step_time_s_p90"]].median() * 1e3
    single_steps = steps[steps["run"].isin(runs["run"])].merge(runs[["run", "arm"]], on="run")
    title = "Time of one step"
    subtitle = "Median with the middle 80 % of steps; dots are single steps."
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
def traffic(records: Records) -> list[Drawing]:
    """What one rank sends in one step; a virtual rank's is real as well."""
    runs = without_probes(records).runs
    return per_workload("traffic", runs[(runs["status_state"] == "ok") & runs["collectives"].notna()], _traffic)


def _traffic(name: str, workload: str, runs: pd.DataFrame) -> Drawing:
    arms = arms_of(runs)
    counted = {arm: json.loads(runs.loc[runs["arm"] == arm, "collectives"].iloc[0]) for arm in arms}
    sent = {arm: {kind: each["wire_bytes_per_rank"] for kind, each in one.items()} for arm, one in counted.items()}
    known = {kind for one in sent.values() for kind in one}
    kinds = [*(kind for kind in TRAFFIC if kind in known), *sorted(known - set(TRAFFIC))]
    largest = max((sum(one.values()) for one in sent.values()), default=0)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    title, whole = "Sent in one step", float(whole_parameters(runs).max()) / size
    subtitle = "Bytes on the wire of one rank; an all-reduce goes there and back."
    if whole > 0:
        subtitle += f" The dashed lines are whole copies of the parameters ({number(whole)} {unit})."
    figure, (axes,) = sheet(title, workload, subtitle, _FRAME_IN + _ROW_IN * len(arms))
    totals = {}
    for row, arm in enumerate(arms):
        totals[arm] = stack(axes, row, {kind: sent[arm].get(kind, 0) / size for kind in kinds}, TRAFFIC)
        beside_bar(axes, number(totals[arm]), totals[arm], row)
    copies = int(largest / size / whole + 0.01) if whole > 0 else 0
    for copy in range(1, min(copies, 6) + 1):
        axes.axvline(copy * whole, color=QUIET, linestyle=(0, (4, 3)), linewidth=0.9, zorder=0)
    end_rows(axes, arms, notes_of(runs), f"{unit} per rank and step")
    legend_of_fills(figure, {kind: TRAFFIC.get(kind, OTHER) for kind in kinds}, {}, columns=4)
    words = ", ".join(f"{arm} {number(total)} {unit}" for arm, total in totals.items())
    return Drawing.of(name, title, workload, words, figure)


@in_house_style
def frontier(records: Records) -> list[Drawing]:
    return per_workload("frontier", finished(records), _frontier)


def _frontier(name: str, workload: str, runs: pd.DataFrame) -> Drawing | None:
    memory = "peak_memory_gib_allocated" if runs["peak_memory_gib_allocated"].notna().any() else "host_peak_rss_gib"
    points = runs.groupby("arm")[[memory, "tokens_per_s"]].median().dropna()
    if len(points) < 2:
        return None
    strategies, notes = strategy_of_arm(runs), notes_of(runs)
    best = _undominated(points[[not notes[arm] for arm in points.index]], memory) or list(points.index)
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
    return Drawing.of(name, title, workload, words, figure)


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
def offload(records: Records) -> list[Drawing]:
    """Each strategy with offload as an arrow from the same stage without it: memory won to the left, time paid up."""
    return per_workload("offload", finished(records), _offload)


def _moves(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """(with offload, without it), of the same number of ranks."""
    pairs = []
    for arm in arms_of(runs):
        run = runs[runs["arm"] == arm].iloc[0]
        kept = runs[(runs["strategy"] == _KEPT.get(run["strategy"])) & (runs["world_size"] == run["world_size"])]
        if not kept.empty:
            pairs.append((arm, str(kept["arm"].iloc[0])))
    return pairs


def _offload(name: str, workload: str, runs: pd.DataFrame) -> Drawing | None:
    moves = _moves(runs)
    if not moves:
        return None
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
    return Drawing.of(name, title, workload, words, figure)
