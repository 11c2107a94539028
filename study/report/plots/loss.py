"""Loss: the curves themselves, and what is left of them when the baseline is taken away."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from study.records.fairness import baseline_arm, has_dropout
from study.records.frames import Records
from study.records.statistics import paired_runs
from study.report.plots.canvas import (
    ACCENT,
    GUIDE,
    INK,
    QUIET,
    Drawing,
    EndLabel,
    arms_of,
    finish,
    finished,
    label_beside,
    legend_of_arms,
    marked,
    notes_of,
    number,
    per_workload,
    plain_ticks,
    power_of_ten,
    sheet,
    style_of,
)

# A curve has no more points than a printed column can hold; longer runs are averaged over neighbouring steps.
MOST_POINTS = 300
_MOST_LABELS = 8
# Two curves nearer than this share of the plot's height are one line to the eye, and get one label.
_ONE_LINE = 0.006
# Where a difference of exactly nothing is drawn, below every difference that float32 can show here.
_NOTHING_LEFT = 1e-9
_FLOAT32_ROUNDING = 2.0**-24


def loss_curves(records: Records) -> list[Drawing]:
    return per_workload("loss", finished(records), functools.partial(_curves, records.steps))


def loss_differences(records: Records) -> list[Drawing]:
    return per_workload("loss_difference", finished(records), functools.partial(_differences, records.steps))


def _losses(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Step by run, long runs averaged over neighbouring steps."""
    table = steps[steps["run"].isin(runs["run"])].pivot(index="step", columns="run", values="loss")
    table = table.dropna(axis="columns", how="all")
    stride = math.ceil(len(table) / MOST_POINTS)
    if stride > 1:
        blocks = np.arange(len(table)) // stride
        table = table.groupby(blocks).mean().set_axis(table.index[::stride])
    return table


def _curves(steps: pd.DataFrame, workload: str, runs: pd.DataFrame) -> Drawing | None:
    # A repeat computes the same curve, and would count twice in the middle of its arm.
    runs = runs.drop_duplicates(["arm", "seed"])
    every_losses = _losses(steps, runs)
    # Arms are seen to agree on the seeds that all of them ran; what other seeds do is the background to that.
    runs = _of_shared_seeds(runs[runs["run"].isin(every_losses.columns)])
    losses = every_losses[runs["run"]]
    if losses.empty:
        return None
    of_arm = {arm: losses[losses.columns.intersection(runs.loc[runs["arm"] == arm, "run"])] for arm in arms_of(runs)}
    of_arm = {arm: of_it for arm, of_it in of_arm.items() if not of_it.empty}
    middles = {arm: of_it.median(axis="columns") for arm, of_it in of_arm.items()}
    notes, strategies = notes_of(runs, "confounded_loss"), {arm: arms_of(runs)[arm] for arm in of_arm}
    low, high = float(every_losses.min().min()), float(every_losses.max().max())
    groups = _groups(middles, (high - low or 1) * _ONE_LINE)
    figure, (axes,) = sheet(2.8)
    others = every_losses.drop(columns=losses.columns)
    axes.plot(others.index, others, color=QUIET, linewidth=0.6, alpha=0.35, zorder=1)
    _draw_groups(axes, groups, middles, strategies)
    for arm, of_it in of_arm.items():
        if of_it.shape[1] > 1:
            least, most = of_it.min(axis="columns"), of_it.max(axis="columns")
            axes.fill_between(of_it.index, least, most, color=style_of(strategies[arm]).colour, alpha=0.15, linewidth=0)
    _draw_evaluations(axes, runs, steps)
    _draw_floor(axes, runs, low)
    axes.set(xlabel="optimizer step", ylabel="training loss, nats")
    axes.grid(axis="y")
    axes.margins(x=0.02)
    plain_ticks(axes.yaxis)
    if len(groups) > 1:
        _label_groups(axes, groups, middles, strategies, notes)
    words = ", ".join(f"{arm} ends at {number(middle.iloc[-1])}" for arm, middle in middles.items())
    return finish(figure, "Training loss", workload, _agreement(groups, middles, runs, not others.empty), words, notes,
                  legend_of_arms(strategies, notes), legend_columns=2,
                  lead=f"Training loss by step for {workload}")  # fmt: skip


def _of_shared_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """All runs, where no seed was run by every arm."""
    shared = runs[runs.groupby("seed")["arm"].transform("nunique") == runs["arm"].nunique()]
    return runs if shared.empty else shared


def _groups(middles: Mapping[str, pd.Series], margin: float) -> list[list[str]]:
    """Arms whose curves the eye cannot tell apart, the first of each standing for all."""
    groups: list[list[str]] = []
    for arm, middle in middles.items():
        near = (group for group in groups if (middle - middles[group[0]]).abs().max() <= margin)
        group = next(near, None)
        if group is None:
            groups.append([arm])
        else:
            group.append(arm)
    return groups


def _agreement(
    groups: Sequence[Sequence[str]], middles: Mapping[str, pd.Series], runs: pd.DataFrame, has_others: bool
) -> str:
    largest = max(groups, key=len)
    faint = " Faint: other seeds, which some arms ran." if has_others else ""
    if len(largest) < 2:
        return f"Each line is the median over the runs of one arm.{faint}"
    apart = max(float((middles[arm] - middles[largest[0]]).abs().max()) for arm in largest)
    bands = " The band spans the runs of an arm." if runs.groupby("arm").size().max() > 1 else ""
    count = f"All {len(largest)}" if len(groups) == 1 else f"{len(largest)} of {len(middles)}"
    return f"{count} strategies lie on one line: the largest difference at any step is {number(apart)}.{bands}{faint}"


def _label_groups(
    axes: Axes, groups: Iterable[Sequence[str]], curves: Mapping[str, pd.Series], strategies: Mapping[str, str],
    notes: Mapping[str, str],
) -> None:  # fmt: skip
    """At the end of the first curve of each group."""
    labels = []
    for first, *others in itertools.islice(groups, _MOST_LABELS):
        text = marked(first, notes) + (f" + {len(others)} more" if others else "")
        curve, colour = curves[first], style_of(strategies[first]).colour
        labels.append(EndLabel(curve.index[-1], float(curve.iloc[-1]), text, colour))
    label_beside(axes, labels, 9.5)


def _draw_groups(
    axes: Axes, groups: Sequence[Sequence[str]], middles: Mapping[str, pd.Series], strategies: Mapping[str, str]
) -> None:
    """Lines that cover each other carry their markers in turns, so that every arm is seen to be there."""
    for group in groups:
        for turn, arm in enumerate(group):
            style, middle = style_of(strategies[arm]), middles[arm]
            every = max(len(group), len(middle) // 24, 1)
            look = {"linewidth": 1.1, "alpha": 0.55} if turn else {"linewidth": 1.6}
            axes.plot(middle.index, middle, zorder=3 - turn / 100, **style.line | {"marker": ""} | look)
            axes.plot(middle.index[turn % every :: every], middle.iloc[turn % every :: every], markersize=6.5,
                      markeredgewidth=0.7, zorder=4, **style.points)  # fmt: skip


def _draw_evaluations(axes: Axes, runs: pd.DataFrame, steps: pd.DataFrame) -> None:
    """The median over all arms, which the table takes apart; a ring on each evaluated step, or on some of many."""
    evaluated = steps[steps["run"].isin(runs["run"]) & steps["eval_loss"].notna()]
    if evaluated.empty:
        return
    middle = evaluated.groupby("step")["eval_loss"].median()
    middle = middle[:: math.ceil(len(middle) / MOST_POINTS)]
    axes.plot(middle.index, middle, color=ACCENT, linestyle=":", marker="o", markersize=10, markerfacecolor="none",
              markeredgecolor=ACCENT, markeredgewidth=1.4, markevery=math.ceil(len(middle) / 12),
              zorder=5)  # fmt: skip
    text = axes.annotate("evaluation", (middle.index[-1], middle.iloc[-1]), xytext=(-2, 12),
                         textcoords="offset points", ha="right", size=9, color=ACCENT, zorder=6)  # fmt: skip
    text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def _draw_floor(axes: Axes, runs: pd.DataFrame, low: float) -> None:
    floors = runs["floor_loss"].dropna().unique()
    if len(floors) != 1:
        return
    floor = float(floors[0])
    axes.axhline(floor, **GUIDE)
    axes.annotate(
        f"best possible {number(floor)}", (0.01, floor), xycoords=("axes fraction", "data"), xytext=(0, -4),
        textcoords="offset points", va="top", size=9, color=QUIET,
    )  # fmt: skip
    axes.set_ylim(bottom=min(low, floor) - 0.12 * (axes.get_ylim()[1] - min(low, floor)))


def _differences(steps: pd.DataFrame, workload: str, runs: pd.DataFrame) -> Drawing | None:
    """The bold line is the largest distance so far of any run from the baseline's with its seed."""
    losses, baseline = _losses(steps, runs), baseline_arm(runs)
    # Under dropout each arm draws masks of its own, and a step tells nothing.
    if baseline is None or losses.empty or runs["arm"].nunique() < 2 or has_dropout(runs):
        return None
    known = runs[runs["run"].isin(losses.columns)]
    gaps = {}
    for arm in arms_of(runs):
        apart_by_pair = [losses[run] - losses[its] for run, its in paired_runs(known, arm, baseline)]
        # A step without a loss is no difference of 0.
        measured = [apart for apart in apart_by_pair if apart.notna().all()]
        if arm != baseline and measured:
            apart = pd.concat(measured, axis="columns")
            gaps[arm] = apart.abs().max(axis="columns")
    notes, strategies = notes_of(runs, "confounded_loss"), {arm: arms_of(runs)[arm] for arm in gaps}
    figure, (axes,) = sheet(2.8)
    farthest = {arm: gap.clip(lower=_NOTHING_LEFT).cummax().ffill() for arm, gap in gaps.items()}
    for turn, (arm, gap) in enumerate(gaps.items()):
        style, every = style_of(strategies[arm]), max(len(gap) // 8, 1)
        axes.plot(gap.index, gap.clip(lower=_NOTHING_LEFT), color=style.colour, linewidth=0.7, alpha=0.3)
        axes.plot(farthest[arm].index, farthest[arm], linewidth=1.5, markersize=6, markeredgewidth=0.6,
                  markevery=(turn % every, every), **style.line)  # fmt: skip
    again = _same_arm_twice(losses, known)
    if again is not None:
        axes.plot(again.index, again.clip(lower=_NOTHING_LEFT), color=INK, linewidth=1.2, linestyle=(0, (1, 1.5)))
    peaks = {arm: float(gap.max()) for arm, gap in gaps.items()}
    _scale_of_differences(axes, float(losses.median().median()) * _FLOAT32_ROUNDING, max(peaks.values()))
    axes.set(xlabel="optimizer step", ylabel="distance in loss, nats")
    alike: dict[str, list[str]] = {}
    for arm, far in farthest.items():
        alike.setdefault(f"{far.iloc[-1]:.1e}", []).append(arm)
    _label_groups(axes, alike.values(), farthest, strategies, notes)
    furthest = max(peaks, key=lambda arm: peaks[arm])
    subtitle = f"No arm is further from {baseline} than {number(peaks[furthest])} at any step ({furthest})."
    subtitle += " Bold: the largest distance so far. Faint: that of each step. Dashed: the rounding of float32."
    if again is not None:
        subtitle += f" Dotted: the same arm twice, {number(float(again.iloc[-1]))} at most."
    if same := sum(peak == 0 for peak in peaks.values()):
        subtitle += f" {same} of {len(peaks)} never differ at all."
    words = ", ".join(f"{arm} {number(peak)}" for arm, peak in peaks.items())
    return finish(figure, f"Distance from {baseline}", workload, subtitle, words, notes,
                  legend_of_arms(strategies, notes), legend_columns=2,
                  lead=f"Largest distance in loss from {baseline} on {workload}")  # fmt: skip


def _same_arm_twice(losses: pd.DataFrame, runs: pd.DataFrame) -> pd.Series | None:
    """The largest distance so far between two runs of one arm and seed; None where nothing ran twice."""
    gaps = [
        losses[one] - losses[other]
        for _, again in runs.groupby(["arm", "seed"])["run"]
        for one, other in itertools.combinations(again, 2)
    ]
    return pd.concat(gaps, axis="columns").abs().max(axis="columns").cummax() if gaps else None


def _scale_of_differences(axes: Axes, rounding: float, highest: float) -> None:
    axes.set(yscale="log", ylim=(_NOTHING_LEFT * 0.5, max(highest * 4, rounding * 40)))
    axes.axhline(rounding, **GUIDE)
    ticks = 10.0 ** np.arange(math.log10(_NOTHING_LEFT), math.floor(math.log10(axes.get_ylim()[1])) + 1)
    axes.set_yticks(ticks, ["0" if tick == _NOTHING_LEFT else power_of_ten(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.axhspan(axes.get_ylim()[0], _NOTHING_LEFT * 2, color=INK, alpha=0.05, linewidth=0)
    axes.margins(x=0.02)
