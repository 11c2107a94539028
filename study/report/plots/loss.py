"""Loss: the curves themselves, and what is left of them when the baseline is taken away."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from study.report.plots.canvas import (
    Drawing,
    EndLabel,
    footnote,
    in_house_style,
    label_beside,
    legend_of,
    marked,
    number,
    plain_ticks,
    power_of_ten,
    sheet,
    strategy_of_arm,
)
from study.report.plots.palette import ACCENT, INK, QUIET, style_of
from study.report.plots.select import arms_of, finished, notes_of, per_workload
from study.report.records.fairness import baseline_arm
from study.report.records.frames import Records

# A curve has no more points than a printed column can hold; longer runs are averaged over neighbouring steps.
MOST_POINTS = 300
# Two curves nearer than this share of the plot's height are one line to the eye, and get one label.
_ONE_LINE = 0.006
# Where a difference of exactly nothing is drawn, below every difference that float32 can show here.
_NOTHING_LEFT = 1e-9
_FLOAT32_ROUNDING = 2.0**-24


@in_house_style
def loss_curves(records: Records) -> list[Drawing]:
    def draw(name: str, workload: str, runs: pd.DataFrame) -> Drawing | None:
        losses = _losses(records.steps, runs)
        return None if losses.empty else _curves(name, workload, runs, losses, records.steps)

    return per_workload("loss", finished(records), draw)


@in_house_style
def loss_differences(records: Records) -> list[Drawing]:
    def draw(name: str, workload: str, runs: pd.DataFrame) -> Drawing | None:
        losses, baseline = _losses(records.steps, runs), baseline_arm(runs)
        if baseline is None or losses.empty or runs["arm"].nunique() < 2:
            return None
        return _differences(name, workload, runs, losses, baseline)

    return per_workload("loss_difference", finished(records), draw)


def _losses(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Step by run, in the runs' order, long runs averaged over neighbouring steps."""
    chosen = steps[steps["run"].isin(runs["run"])]
    table = chosen.pivot(index="step", columns="run", values="loss").dropna(axis="columns", how="all")
    stride = math.ceil(len(table) / MOST_POINTS)
    if stride > 1:
        blocks = np.arange(len(table)) // stride
        table = table.groupby(blocks).mean().set_axis(table.index[::stride][: blocks[-1] + 1])
    return table


def _of_arm(losses: pd.DataFrame, runs: pd.DataFrame, arm: str) -> pd.DataFrame:
    return losses[[run for run in runs.loc[runs["arm"] == arm, "run"] if run in losses.columns]]


def _curves(name: str, workload: str, runs: pd.DataFrame, losses: pd.DataFrame, steps: pd.DataFrame) -> Drawing:
    arms = [arm for arm in arms_of(runs) if not _of_arm(losses, runs, arm).empty]
    middles = {arm: _of_arm(losses, runs, arm).median(axis="columns") for arm in arms}
    notes, strategies = notes_of(runs, "confounded_loss"), strategy_of_arm(runs)
    low, high = float(losses.min().min()), float(losses.max().max())
    groups = _groups(middles, (high - low or 1) * _ONE_LINE)
    figure, (axes,) = sheet("Training loss", workload, _agreement(groups, middles, runs), 2.8)
    _draw_groups(axes, groups, middles, strategies)
    for arm in arms:
        band = _of_arm(losses, runs, arm)
        if band.shape[1] > 1:
            axes.fill_between(
                band.index, band.min(axis="columns"), band.max(axis="columns"), color=style_of(strategies[arm]).colour,
                alpha=0.15, linewidth=0,
            )  # fmt: skip
    _draw_evaluations(axes, runs, steps)
    _draw_floor(axes, runs, low)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, nats")
    axes.grid(axis="y")
    axes.margins(x=0.02)
    plain_ticks(axes.yaxis)
    footnote(axes, notes)
    legend_of(figure, [(arm, strategies[arm]) for arm in arms], notes)
    if len(groups) > 1:
        last = losses.index[-1]
        ends = [EndLabel(last, float(middles[group[0]].iloc[-1]), _group_label(group, notes),
                         style_of(strategies[group[0]]).colour) for group in groups[:8]]  # fmt: skip
        label_beside(axes, ends)
    ends_text = ", ".join(f"{arm} ends at {number(middles[arm].iloc[-1])}" for arm in arms)
    return Drawing(name, f"Training loss, {workload}", f"Training loss by step for {workload}: {ends_text}.", figure)


def _groups(middles: dict[str, pd.Series], margin: float) -> list[list[str]]:
    """Arms whose curves the eye cannot tell apart, the first of each standing for all."""
    groups: list[list[str]] = []
    for arm, middle in middles.items():
        for group in groups:
            if (middle - middles[group[0]]).abs().max() <= margin:
                group.append(arm)
                break
        else:
            groups.append([arm])
    return groups


def _agreement(groups: Sequence[Sequence[str]], middles: dict[str, pd.Series], runs: pd.DataFrame) -> str:
    largest = max(groups, key=len)
    if len(largest) < 2:
        return "Each line is the median over the runs of one arm."
    apart = max(float((middles[arm] - middles[largest[0]]).abs().max()) for arm in largest)
    bands = " The band spans the runs of an arm." if runs.groupby("arm").size().max() > 1 else ""
    count = f"All {len(largest)}" if len(groups) == 1 else f"{len(largest)} of {len(middles)}"
    return f"{count} strategies lie on one line: the largest difference at any step is {number(apart)}.{bands}"


def _group_label(group: Sequence[str], notes: dict[str, str]) -> str:
    return marked(group[0], notes) + (f" + {len(group) - 1} more" if len(group) > 1 else "")


def _draw_groups(
    axes: Axes, groups: Sequence[Sequence[str]], middles: dict[str, pd.Series], strategies: dict[str, str]
) -> None:
    """Lines that cover each other carry their markers in turns, so that every arm is seen to be there."""
    for group in groups:
        for turn, arm in enumerate(group):
            style, middle = style_of(strategies[arm]), middles[arm]
            every = max(len(group), len(middle) // 24, 1)
            axes.plot(
                middle.index, middle, color=style.colour, linestyle=style.dash, linewidth=1.6 if turn == 0 else 1.1,
                alpha=1 if turn == 0 else 0.55, zorder=3 - turn / 100,
            )  # fmt: skip
            axes.plot(
                middle.index[turn % every :: every], middle.iloc[turn % every :: every], linestyle="",
                color=style.colour, marker=style.marker, markersize=6.5, markeredgecolor="white",
                markeredgewidth=0.7, zorder=4,
            )  # fmt: skip


def _draw_evaluations(axes: Axes, runs: pd.DataFrame, steps: pd.DataFrame) -> None:
    """One ring per evaluated step: the median over all arms, which the table takes apart."""
    evaluated = steps[steps["run"].isin(runs["run"]) & steps["eval_loss"].notna()]
    if evaluated.empty:
        return
    middle = evaluated.groupby("step")["eval_loss"].median()
    axes.plot(middle.index, middle, linestyle="", marker="o", markersize=10, markerfacecolor="none",
              markeredgecolor=ACCENT, markeredgewidth=1.4, zorder=5)  # fmt: skip
    axes.annotate("evaluation", (middle.index[-1], middle.iloc[-1]), xytext=(-2, 9), textcoords="offset points",
                  ha="right", size=9, color=ACCENT)  # fmt: skip


def _draw_floor(axes: Axes, runs: pd.DataFrame, low: float) -> None:
    floors = runs["floor_loss"].dropna().unique()
    if len(floors) != 1:
        return
    floor = float(floors[0])
    axes.axhline(floor, color=QUIET, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate(
        f"best possible {number(floor)}", (0.01, floor), xycoords=("axes fraction", "data"), xytext=(0, -4),
        textcoords="offset points", va="top", size=9, color=QUIET,
    )  # fmt: skip
    axes.set_ylim(bottom=min(low, floor) - 0.12 * (axes.get_ylim()[1] - min(low, floor)))


def _paired(losses: pd.DataFrame, runs: pd.DataFrame, arm: str, baseline: str) -> npt.NDArray[np.float64] | None:
    """|loss - baseline's loss| by step, each run against the one with its seed and repeat, then the median."""
    pairs = runs[runs["arm"] == arm].merge(runs[runs["arm"] == baseline], on=["seed", "repeat"], suffixes=("", "_b"))
    columns = [(run, base) for run, base in zip(pairs["run"], pairs["run_b"], strict=True)
               if run in losses.columns and base in losses.columns]  # fmt: skip
    if not columns:
        return None
    gaps = np.abs(np.stack([(losses[run] - losses[base]).to_numpy(dtype=float) for run, base in columns]))
    return np.median(gaps, axis=0)


def _differences(name: str, workload: str, runs: pd.DataFrame, losses: pd.DataFrame, baseline: str) -> Drawing:
    gaps = {arm: gap for arm in arms_of(runs) if arm != baseline
            if (gap := _paired(losses, runs, arm, baseline)) is not None}  # fmt: skip
    notes, strategies = notes_of(runs, "confounded_loss"), strategy_of_arm(runs)
    title = f"Distance from {baseline}"
    figure, (axes,) = sheet(title, workload, _largest(gaps, baseline), 2.8)
    axes.set_yscale("log")
    farthest = {arm: np.fmax.accumulate(np.maximum(gap, _NOTHING_LEFT)) for arm, gap in gaps.items()}
    for turn, (arm, gap) in enumerate(gaps.items()):
        style = style_of(strategies[arm])
        every = max(len(gap) // 8, 1)
        axes.plot(losses.index, np.maximum(gap, _NOTHING_LEFT), color=style.colour, linewidth=0.7, alpha=0.3)
        axes.plot(
            losses.index, farthest[arm], color=style.colour, linestyle=style.dash, linewidth=1.5, marker=style.marker,
            markersize=6, markevery=(turn % every, every), markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
    _scale_of_differences(axes, losses, gaps)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("distance in loss, nats")
    footnote(axes, notes)
    legend_of(figure, [(arm, strategies[arm]) for arm in gaps], notes)
    label_beside(axes, [
        EndLabel(losses.index[-1], float(farthest[group[0]][-1]), _group_label(group, notes),
                 style_of(strategies[group[0]]).colour)
        for group in _same_to_two_digits({arm: float(far[-1]) for arm, far in farthest.items()})[:8]
    ])  # fmt: skip
    worst = ", ".join(f"{arm} {number(float(np.nanmax(gap)))}" for arm, gap in gaps.items())
    return Drawing(
        name, f"{title}, {workload}", f"Largest distance in loss from {baseline} on {workload}: {worst}.", figure
    )


def _same_to_two_digits(values: dict[str, float]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(f"{value:.1e}", []).append(name)
    return list(groups.values())


def _largest(gaps: dict[str, npt.NDArray[np.float64]], baseline: str) -> str:
    peaks = {arm: float(np.nanmax(gap)) for arm, gap in gaps.items()}
    arm = max(peaks, key=lambda arm: peaks[arm])
    same = sum(peak == 0 for peak in peaks.values())
    exact = " Bold: the largest distance so far. Faint: that of each step. Dashed: the rounding of float32."
    exact += f" {same} of {len(peaks)} never differ at all." if same else ""
    return f"No arm is further from {baseline} than {number(peaks[arm])} at any step ({arm}).{exact}"


def _scale_of_differences(axes: Axes, losses: pd.DataFrame, gaps: dict[str, npt.NDArray[np.float64]]) -> None:
    highest = max(float(np.nanmax(gap)) for gap in gaps.values())
    rounding = float(losses.median().median()) * _FLOAT32_ROUNDING
    axes.set_ylim(_NOTHING_LEFT * 0.5, max(highest * 4, rounding * 40))
    axes.axhline(rounding, color=QUIET, linestyle=(0, (4, 3)), linewidth=1)
    ticks = 10.0 ** np.arange(math.log10(_NOTHING_LEFT), math.floor(math.log10(axes.get_ylim()[1])) + 1)
    axes.set_yticks(ticks, ["0" if tick == _NOTHING_LEFT else power_of_ten(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.axhspan(axes.get_ylim()[0], _NOTHING_LEFT * 2, color=INK, alpha=0.05, linewidth=0)
    axes.margins(x=0.02)
