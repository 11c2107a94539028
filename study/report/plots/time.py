"""Time: of a step with its spread, what is sent in it, and what memory buys for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from study.records.arms import arms, fast_memory, moves_state, same_stage
from study.records.frames import Records, without_probes
from study.records.schema import STATE_KINDS
from study.records.statistics import SHOWN_BELOW, geometric_mean, middle
from study.report.plots.canvas import (
    GUIDE,
    INK,
    OTHER,
    TRAFFIC,
    Drawing,
    EndLabel,
    arms_of,
    bars,
    finish,
    finished,
    label_beside,
    legend_of_fills,
    marked,
    notes_of,
    number,
    per_workload,
    plain_ticks,
    rows_of_arms,
    sheet,
    sheet_of_rows,
    single_runs,
    style_of,
    unit_for,
)

# Points of single steps that one row can hold and still be seen as points.
_MOST_DOTS = 120


def step_time(records: Records) -> list[Drawing]:
    runs = finished(records)
    timed = runs[runs["step_time_s_median"].notna()]
    return per_workload("step_time", timed, functools.partial(_step_time, records.steps))


def _step_time(steps: pd.DataFrame, workload: str, runs: pd.DataFrame) -> Drawing:
    arms, notes = arms_of(runs), notes_of(runs)
    times = runs.groupby("arm")[["step_time_s_median", "step_time_s_p10", "step_time_s_p90"]]
    figures = times.agg(geometric_mean) * 1e3
    single_steps = steps[steps["run"].isin(runs["run"])].merge(runs[["run", "arm"]], on="run")
    figure, (axes,) = sheet_of_rows(len(arms))
    wobble = np.random.default_rng(0)
    for row, (arm, strategy) in enumerate(arms.items()):
        style = style_of(strategy)
        times = single_steps.loc[single_steps["arm"] == arm, "step_time_s"].dropna().to_numpy() * 1e3
        times = times[:: max(len(times) // _MOST_DOTS, 1)]
        axes.scatter(times, row + wobble.uniform(-0.26, 0.26, len(times)), s=7, color=style.colour, alpha=0.25,
                     linewidth=0)  # fmt: skip
        median, low, high = figures.loc[arm]
        axes.plot([low, high], [row, row], color=style.colour, linewidth=3, solid_capstyle="round")
        each = runs.loc[runs["arm"] == arm, "step_time_s_median"] * 1e3
        if 1 < len(each) < SHOWN_BELOW:
            axes.vlines(each, row - 0.4, row + 0.4, color=INK, linewidth=1, zorder=5)
        axes.plot(median, row, markersize=8.5, zorder=4, **style.points)
        axes.annotate(f"{median:,.0f}" if median >= 10 else number(median), (1.01, row), va="center", size=9,
                      xycoords=("axes fraction", "data"))  # fmt: skip
    rows_of_arms(axes, arms, notes)
    end = float(figures["step_time_s_p90"].max()) * 1.25
    axes.set(xlim=(0, end))
    beyond = int((1e3 * single_steps["step_time_s"] > end).sum())
    axes.set_xlabel("ms per optimizer step; on the right the middle")
    plain_ticks(axes.xaxis)
    words = ", ".join(f"{arm} {number(figures.loc[arm, 'step_time_s_median'])} ms" for arm in arms)
    subtitle = "Median with the middle 80 % of steps; dots are single steps"
    subtitle += ", strokes the medians of each run, the marker their middle." if _has_few_repeats(runs) else "."
    subtitle += f" {beyond} of {len(single_steps)} steps lie beyond the end." if beyond else ""
    lead = f"Median time of one step on {workload}"
    return finish(figure, "Time of one step", workload, subtitle, words, notes, lead=lead)


def _has_few_repeats(runs: pd.DataFrame) -> bool:
    """Of which every run is drawn beside the middle."""
    return bool(runs.groupby("arm").size().between(2, SHOWN_BELOW - 1).any())


def traffic(records: Records) -> list[Drawing]:
    """What one rank sends in one step; a virtual rank's is real as well."""
    runs = without_probes(records).runs
    return per_workload("traffic", runs[(runs["status_state"] == "ok") & runs["collectives"].notna()], _traffic)


def _traffic(workload: str, runs: pd.DataFrame) -> Drawing:
    first, notes = runs.drop_duplicates("arm").set_index("arm"), notes_of(runs)
    counted = {arm: json.loads(first.loc[arm, "collectives"]) for arm in arms_of(runs)}
    sent = pd.DataFrame(
        {arm: {kind: each["wire_bytes_per_rank"] for kind, each in one.items()} for arm, one in counted.items()}
    ).T.fillna(0)
    sent = sent[[*(kind for kind in TRAFFIC if kind in sent), *sorted(set(sent) - set(TRAFFIC))]]
    unit, size = unit_for(sent.sum(axis="columns").max())
    sent /= size
    totals = sent.sum(axis="columns")
    # Of all parameters, where a run holds them undivided.
    undivided = runs[(runs["zero_stage"].fillna(0) < 3) & (runs["distributed_type"] != "FSDP")]
    whole = float(undivided["params_bytes_device"].max()) / size
    subtitle = "Ring bytes (NCCL) of one rank; an all-reduce goes there and back."
    figure, (axes,) = sheet_of_rows(len(sent))
    if whole > 0:
        subtitle += f" The dashed lines are whole copies of the parameters ({number(whole)} {unit})."
        for copy in range(1, min(int(totals.max() / whole + 0.01), 6) + 1):
            axes.axvline(copy * whole, zorder=0, **GUIDE)
    bars(axes, sent, TRAFFIC, totals.map(number), f"{unit} per rank and step", notes)
    words = ", ".join(f"{arm} {number(total)} {unit}" for arm, total in totals.items())
    legend = legend_of_fills({kind: TRAFFIC.get(kind, OTHER) for kind in sent}, {})
    return finish(figure, "Sent in one step", workload, subtitle, words, notes, legend)


def frontier(records: Records) -> list[Drawing]:
    return per_workload("frontier", finished(records), _frontier)


def _frontier(workload: str, runs: pd.DataFrame) -> Drawing | None:
    on_device = runs["peak_memory_gib_allocated"].notna().any()
    memory = "peak_memory_gib_allocated" if on_device else "host_peak_rss_gib"
    # As in the tables: a repeat of a seed is no seed of its own.
    speeds = {arm: middle(runs, "tokens_per_s", arm).center for arm in arms_of(runs)}
    points = pd.DataFrame({memory: runs.groupby("arm")[memory].median(), "tokens_per_s": pd.Series(speeds)}).dropna()
    if len(points) < 2:
        return None
    notes = notes_of(runs)
    best = _undominated(points[[not notes[arm] for arm in points.index]]) or list(points.index)
    figure, (axes,) = sheet(4.2)
    stairs = points.loc[best].sort_values(memory)
    axes.step(stairs[memory], stairs["tokens_per_s"], where="post", **GUIDE)
    place = "on the device" if on_device else "of the process (resident set)"
    axes.set(xlabel=f"peak memory {place}, GiB per rank", ylabel="tokens per second, all ranks")
    plain_ticks(axes.yaxis)
    _labelled(axes, points, arms_of(runs), notes, runs.set_index("arm")[[memory, "tokens_per_s"]])
    words = ", ".join(
        f"{arm} {number(speed)} tokens/s at {number(used)} GiB" for arm, (used, speed) in points.iterrows()
    )
    listed = " and ".join(filter(None, (", ".join(best[:-1]), best[-1])))
    subtitle = f"By the middle of its runs nothing here is both faster and smaller than {listed}."
    return finish(figure, "Throughput against memory", workload, subtitle, words, notes)


def _undominated(points: pd.DataFrame) -> list[str]:
    memory, speed = points.columns
    ordered = points.sort_values([memory, speed], ascending=[True, False])
    ahead = ordered[speed] > ordered[speed].cummax().shift(fill_value=-np.inf)
    return [str(arm) for arm in ordered.index[ahead]]


def _labelled(
    axes: Axes, points: pd.DataFrame, strategies: Mapping[str, str], notes: Mapping[str, str], single: pd.DataFrame
) -> None:
    """A named marker for each arm, on axes that start at nothing; small ones for its single runs where they are few."""
    ends = []
    for arm, (x, y) in points.iterrows():
        style = style_of(strategies[str(arm)])
        one, other = single.loc[[arm]].to_numpy(dtype=float).T
        single_runs(axes, one, other, style.colour)
        axes.plot(x, y, markersize=9.5, **style.points)
        ends.append(EndLabel(x, y, marked(str(arm), notes), style.colour))
    axes.grid()
    axes.margins(x=0.1, y=0.1)
    axes.set(xlim=(0, None), ylim=(0, None))
    label_beside(axes, ends)


def offload(records: Records) -> list[Drawing]:
    """Each strategy with offload as an arrow from the same stage without it: memory won to the left, time paid up."""
    return per_workload("offload", finished(records), _offload)


def _offload(workload: str, runs: pd.DataFrame) -> Drawing | None:
    strategies, notes = arms_of(runs), notes_of(runs)
    # From an arm with offload to the one without it, on as many ranks.
    moved = {arm.name: kept for arm in arms(runs) if moves_state(arm) and (kept := same_stage(arm))}
    moves = {arm: moved[arm] for arm in strategies if arm in moved}
    if not moves:
        return None
    places = fast_memory(runs)
    held = runs[[f"{kind}_bytes_{place}" for kind in STATE_KINDS for place in places]].sum(axis="columns")
    points = pd.DataFrame({"arm": runs["arm"], "state": held, "ms": runs["step_time_s_median"] * 1e3})
    unit, size = unit_for(points["state"].max())
    points["state"] /= size
    single = points.set_index("arm")
    points = points.groupby("arm").agg({"state": "median", "ms": geometric_mean})
    figure, (axes,) = sheet(3.9)
    for arm, kept in moves.items():
        axes.annotate("", tuple(points.loc[arm]), xytext=tuple(points.loc[kept]), arrowprops={
            "arrowstyle": "->", "color": style_of(strategies[arm]).colour, "linewidth": 1.2, "shrinkA": 5, "shrinkB": 5,
            "alpha": 0.7,
        })  # fmt: skip
    shown = dict.fromkeys(arm for pair in moves.items() for arm in reversed(pair))
    where = "on the device" if len(places) == 1 else "in memory"
    axes.set(xlabel=f"model state left {where}, {unit} per rank", ylabel="time of one step, ms")
    _labelled(axes, points.loc[list(shown)], strategies, notes, single)
    words = ", ".join(
        f"{arm} leaves {number(points.loc[arm, 'state'])} of {number(points.loc[kept, 'state'])} {unit} and takes "
        f"{number(points.loc[arm, 'ms'])} instead of {number(points.loc[kept, 'ms'])} ms" for arm, kept in moves.items()
    )  # fmt: skip
    subtitle = "An arrow leads from a stage without offload to the same stage with it."
    said = {arm: notes[arm] for arm in shown}
    return finish(figure, "What offload wins and costs", workload, subtitle, words, said)
