"""Losses of strategies compared with the workload's baseline, seed by seed, and their curves."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from study.config.text import NOT_MEASURED, format_number, percent, power_of_ten
from study.records.fairness import baseline_arm, has_dropout
from study.records.frames import Records, real_runs, steps_by_run
from study.records.outcome import has_diverged
from study.records.statistics import BF16_SPACING, LOSS_MARGIN, Equivalence, equivalence_test, paired, paired_runs
from study.records.strategy_runs import NAN, Row, StrategyRuns, first_known_value
from study.report import canvas
from study.report.document import Answer, Question, format_names, format_or_dash
from study.report.questions.comparison import Comparison, arm_notes, arm_table, fair_arms, real_arms, workloads

_CONFOUND, _EVALUATION = "confounded_loss", "eval_loss_final"
# Differences up to this multiple of the reruns' are not evidence: more pairs have a larger maximum.
_CHANCE = 2.0
Steps = dict[str, pd.DataFrame]
Verdict = Literal["same", "other", "open"]


class StepDifference(NamedTuple):
    """The largest difference at any step, relative to the reference's loss at that step."""

    ratio: float = NAN
    nats: float = NAN
    step: float = NAN
    loss: float = NAN


def largest_step_difference(pairs: Iterable[tuple[str, str]], steps: Steps) -> StepDifference:
    """Return the largest difference between paired runs at any step; the second of each pair is the reference."""
    differences = []
    for pair in pairs:
        if all(run in steps for run in pair):
            losses, baseline = (steps[run]["loss"].to_numpy() for run in pair)
            count = min(len(losses), len(baseline))
            gaps, reference = np.abs(losses[:count] - baseline[:count]), np.abs(baseline[:count])
            # A loss of exactly 0 has no relative difference. Runs with a step without a loss are not compared.
            shares = np.divide(gaps, reference, out=np.where(gaps > 0, np.inf, gaps), where=reference > 0)
            if count and not np.isnan(shares).any():
                at = int(np.argmax(shares))
                differences.append(StepDifference(float(shares[at]), float(gaps[at]), at + 1, float(reference[at])))
    return max(differences, default=StepDifference())


def largest_rerun_difference(runs: pd.DataFrame, steps: Steps) -> StepDifference:
    """Return the largest difference between reruns of the same strategy and seed, which is due to the machine alone."""
    ended = runs[runs["status_state"] == "ok"]
    reruns = ended.groupby(["arm", "seed"], dropna=False)["run"].apply(list)
    return largest_step_difference((pair for same in reruns for pair in itertools.combinations(same, 2)), steps)


def _diverged_seeds(arm: StrategyRuns) -> list[int]:
    """Return the seeds that diverged to NaN while the baseline's run trained to its end."""
    runs = arm.workload_runs
    trained = runs.loc[(runs["arm"] == arm.baseline) & (runs["status_state"] == "ok"), "seed"]
    lost = arm.runs[(arm.runs["status_state"] == "failed") & (arm.runs[_CONFOUND] == "")]
    lost = lost[lost["status_reason"].fillna("").map(has_diverged) & lost["seed"].isin(trained)]
    return sorted({int(seed) for seed in lost["seed"]})


class _LossComparison(NamedTuple):
    arm: StrategyRuns
    # Difference and margin relative to the baseline's loss at that step; infinite if a seed diverged to NaN.
    difference: float
    margin: float
    # The margin relative to the loss above the known floor.
    reducible_margin: float
    verdict: Verdict
    test: Equivalence
    by: Literal["steps", "seeds", "end"]


def _compare_losses(strategies: Sequence[StrategyRuns], steps: Steps) -> list[_LossComparison]:
    """Compare each strategy with the baseline step by step; by seeds if dropout masks differ between strategies."""
    by_seed = Comparison({strategies[0].workload: strategies}, _EVALUATION, lambda arm: arm.baseline)
    chance = _CHANCE * largest_rerun_difference(strategies[0].workload_runs, steps).ratio
    rows = []
    for arm in (arm for arm in strategies if arm.baseline is not None and not arm.is_baseline):
        pairs, test = _evaluations(arm), _test(arm)
        is_bf16 = str(arm.value("precision")).startswith("bf16")
        margin = max(LOSS_MARGIN, BF16_SPACING) if is_bf16 else LOSS_MARGIN
        if _diverged_seeds(arm):
            rows.append(_LossComparison(arm, math.inf, margin, NAN, "other", test, "end"))
        elif not arm.is_fair(_CONFOUND):
            continue
        elif not has_dropout(arm.ok_runs):
            largest = largest_step_difference(paired_runs(arm.workload_runs, arm.name, arm.baseline or ""), steps)
            if not math.isnan(largest.ratio):
                verdict: Verdict = "same" if largest.ratio <= margin else "open" if largest.ratio <= chance else "other"
                reducible = _reducible_fraction(margin, largest.loss, arm.ok_runs["floor_loss"])
                rows.append(_LossComparison(arm, largest.ratio, margin, reducible, verdict, test, "steps"))
        elif test.mean_difference is not None and (base := pairs["baseline"].mean()) > 0:
            difference = by_seed.of(arm)
            is_other = difference is not None and difference.is_significant
            verdict = "same" if test.verdict == "equivalent" else "other" if is_other else "open"
            reducible = _reducible_fraction(LOSS_MARGIN, base, arm.ok_runs["floor_eval_loss"])
            fraction = abs(test.mean_difference) / base
            rows.append(_LossComparison(arm, fraction, LOSS_MARGIN, reducible, verdict, test, "seeds"))
    return rows


def _evaluations(arm: StrategyRuns) -> pd.DataFrame:
    return paired(arm.workload_runs, _EVALUATION, arm.name, arm.baseline or "", form=np.asarray)


def _test(arm: StrategyRuns) -> Equivalence:
    pairs = _evaluations(arm)
    return equivalence_test(pairs["value"].tolist(), pairs["baseline"].tolist())


def _reducible_fraction(fraction: float, loss: float, floors: pd.Series) -> float:
    """Return a fraction of the loss as a fraction of the loss above its floor; NaN if the floor is unknown."""
    floor = first_known_value(floors)
    return fraction * loss / (loss - floor) if floor is not None and loss > floor else NAN


def answer(records: Records) -> Answer | None:
    """Return whether the losses differ, per workload; None without a comparison."""
    steps, grouped = steps_by_run(real_runs(records)), workloads(records)
    by_workload = {workload: _compare_losses(group, steps) for workload, group in grouped.items()}
    comparisons = list(itertools.chain(*by_workload.values()))
    if not comparisons:
        return None
    rows, asides = list[Row](), list[str]()
    for workload, group in by_workload.items():
        if group:
            worst = max(group, key=lambda comparison: comparison.difference)
            rerun = largest_rerun_difference(grouped[workload][0].workload_runs, steps).ratio
            beyond = [
                comparison.verdict for comparison in group if comparison.by == "steps" and comparison.verdict != "same"
            ]
            if beyond and math.isnan(rerun):
                asides.append("There are no reruns, so the run-to-run variation of the loss is unknown.")
            elif "open" in beyond:
                asides.append(f"Inconclusive: above the margin, but below {_CHANCE:g} times the difference of reruns.")
            tested = [comparison.test for comparison in group if comparison.test.verdict != "no test"]
            equal = sum(test.verdict == "equivalent" for test in tested)
            rows.append({
                "Workload": workload,
                "Same loss": f"{sum(comparison.verdict == 'same' for comparison in group)} of {len(group)}",
                "Worst strategy": worst.arm.name,
                "Max difference": "NaN" if math.isinf(worst.difference) else percent(worst.difference),
                "Rerun": format_or_dash(rerun, percent),
                "Margin": percent(worst.margin),
                "Equivalent": f"{equal} of {len(tested)}" if tested else "one seed",
            })  # fmt: skip
    table = pd.DataFrame(rows)
    in_table = {id(comparison.arm) for comparison in comparisons}
    alone = [arm.name for group in grouped.values() for arm in fair_arms(group, _CONFOUND) if id(arm) not in in_table]
    if alone:
        asides.append(f"Not compared, because the baseline has no run with any of their seeds: {format_names(alone)}.")
    notes = (*_notes(comparisons), *dict.fromkeys(asides), *arm_notes(itertools.chain(*grouped.values()), _CONFOUND))
    return Answer(_sentence(comparisons), table.loc[:, (table != NOT_MEASURED).any()], notes)


def _sentence(comparisons: Sequence[_LossComparison]) -> str:
    different, unsure = (
        [comparison for comparison in comparisons if comparison.verdict == verdict] for verdict in ("other", "open")
    )
    count, largest = len(comparisons), max(comparison.difference for comparison in comparisons)
    if different:
        worst = max(different, key=lambda comparison: comparison.difference / comparison.margin)
        what = f"`{worst.arm.name}` differs from its baseline by {percent(worst.difference)}"
        if math.isinf(worst.difference):
            seeds = ", ".join(map(str, _diverged_seeds(worst.arm)))
            what = f"`{worst.arm.name}` diverged to NaN, but its baseline did not (seed {seeds})"
        return f"Yes, under {len(different)} of {count} strategies: {what}."
    if not unsure:
        return f"No: in all {count} comparisons the loss is within {percent(largest)} of the baseline's."
    return (
        f"Inconclusive under {len(unsure)} of {count} strategies: their differences are neither significant nor within"
        f" the margin of equivalence; max difference {percent(largest)}."
    )


def _notes(comparisons: Sequence[_LossComparison]) -> Iterable[str]:
    if any(comparison.by == "steps" for comparison in comparisons):
        yield "Max difference: at any step, relative to the baseline's loss at that step."
    if above := [
        comparison.reducible_margin for comparison in comparisons if not math.isnan(comparison.reducible_margin)
    ]:
        yield f"The margin is at most {percent(max(above))} of the loss above its floor, which training can reduce."
    if seeds := sorted({comparison.test.n for comparison in comparisons if comparison.test.verdict != "no test"}):
        n = "-".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))
        yield f"Equivalent: two one-sided tests (TOST) of evaluation losses, seed by seed (n = {n})."
    if any(comparison.by == "seeds" for comparison in comparisons):
        yield "With dropout, masks differ between strategies: evaluation losses are compared by seed, not by step."
    if any(comparison.by == "steps" and comparison.margin > LOSS_MARGIN for comparison in comparisons):
        yield (
            f"The margin of a step in bf16 is {percent(BF16_SPACING)}, the spacing of bf16 numbers. It was"
            f" {percent(LOSS_MARGIN)} until a strategy failed it, and was widened after that (reports/LOG.md,"
            " 2026-11-20)."
        )


def loss_table(records: Records) -> pd.DataFrame:
    """Return a row per strategy with its losses and its differences from the baseline."""
    steps = steps_by_run(real_runs(records))

    def figures(arm: StrategyRuns) -> Row:
        largest, verdict = StepDifference(), arm.role if arm.is_baseline else "no baseline"
        if arm.baseline is not None and not arm.is_baseline:
            verdict = _test(arm).text()
            if not has_dropout(arm.ok_runs):
                largest = largest_step_difference(paired_runs(arm.workload_runs, arm.name, arm.baseline), steps)
        return {
            "Train loss, first": arm.median_over_seeds("train_loss_first"),
            "Train loss, last": arm.median_over_seeds("train_loss_final"),
            "Eval loss": arm.geometric_mean(_EVALUATION).text(4),
            "Accuracy": arm.median_over_seeds("eval_accuracy"),
            "Perplexity": arm.median_over_seeds("eval_perplexity"),
            "Max difference in a step": largest.nats,
            "at step": largest.step,
            "of the loss there": format_or_dash(largest.ratio, percent),
            "Equivalent": verdict,
        }

    return arm_table(real_arms(records), figures, _CONFOUND)


# Points of a curve that a printed column can show; longer runs are averaged over adjacent steps.
MAX_POINTS = 300
_MAX_LABELS = 8
# Curves closer than this fraction of the plot's height look like one line, and share a label.
_ONE_LINE = 0.006
# Height at which a difference of 0 is drawn, below all differences of float32 losses.
_ZERO = 1e-9
_FLOAT32_ROUNDING = 2.0**-24


def loss_curves(records: Records) -> list[canvas.Drawing]:
    """Draw the training losses of each workload."""
    return canvas.per_workload("loss", canvas.finished(records), functools.partial(_curves, records.steps))


def loss_differences(records: Records) -> list[canvas.Drawing]:
    """Draw the difference of each strategy from the baseline, step by step."""
    runs = canvas.finished(records)
    return canvas.per_workload("loss_difference", runs, functools.partial(_differences, records.steps))


def _losses(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return losses by step and run; of long runs the means over adjacent steps."""
    table = steps[steps["run"].isin(runs["run"])].pivot(index="step", columns="run", values="loss")
    table = table.dropna(axis="columns", how="all")
    stride = math.ceil(len(table) / MAX_POINTS)
    if stride > 1:
        table = table.groupby(np.arange(len(table)) // stride).mean().set_axis(table.index[::stride])
    return table


def _curves(steps: pd.DataFrame, workload: str, runs: pd.DataFrame) -> canvas.Drawing | None:
    # A repeat has the same curve as the first run, and would count twice in the median.
    runs = runs.drop_duplicates(["arm", "seed"])
    all_losses = _losses(steps, runs)
    runs = runs[runs["run"].isin(all_losses.columns)]
    # Strategies are compared on the seeds that all of them ran; other seeds are drawn as background.
    shared = runs[runs.groupby("seed")["arm"].transform("nunique") == runs["arm"].nunique()]
    runs = runs if shared.empty else shared
    losses = all_losses[runs["run"]]
    if losses.empty:
        return None
    strategies, notes = canvas.arm_strategies(runs), canvas.find_confounds(runs, _CONFOUND)
    arm_losses = {arm: losses[runs.loc[runs["arm"] == arm, "run"]] for arm in strategies}
    medians = {arm: curves.median(axis="columns") for arm, curves in arm_losses.items()}
    low, high = float(all_losses.min().min()), float(all_losses.max().max())
    groups: list[list[str]] = []
    for arm, curve in medians.items():
        matches = (arms for arms in groups if (curve - medians[arms[0]]).abs().max() <= (high - low or 1) * _ONE_LINE)
        if (group := next(matches, None)) is None:
            groups.append([arm])
        else:
            group.append(arm)
    figure, (axes,) = canvas.sheet(2.8)
    background = all_losses.drop(columns=losses.columns)
    axes.plot(background.index, background, color=canvas.QUIET, linewidth=0.6, alpha=0.35, zorder=1)
    for group in groups:
        # Overlapping lines have their markers at different steps, so that every strategy is visible.
        for turn, arm in enumerate(group):
            style, curve = canvas.find_style(strategies[arm]), medians[arm]
            stride = max(len(group), len(curve) // 24, 1)
            look = {"linewidth": 1.1, "alpha": 0.55} if turn else {"linewidth": 1.6}
            axes.plot(curve.index, curve, zorder=3 - turn / 100, **style.line | {"marker": ""} | look)
            axes.plot(curve.index[turn % stride :: stride], curve.iloc[turn % stride :: stride], markersize=6.5,
                      markeredgewidth=0.7, zorder=4, **style.points)  # fmt: skip
    for arm, curves in arm_losses.items():
        if curves.shape[1] > 1:
            axes.fill_between(curves.index, curves.min(axis="columns"), curves.max(axis="columns"), alpha=0.15,
                              color=canvas.find_style(strategies[arm]).colour, linewidth=0)  # fmt: skip
    _draw_evaluations(axes, runs, steps)
    _draw_floor(axes, runs, low)
    axes.set(xlabel="optimizer step", ylabel="training loss, nats")
    axes.grid(axis="y")
    axes.margins(x=0.02)
    canvas.plain_ticks(axes.yaxis)
    if len(groups) > 1:
        _label_groups(axes, groups, medians, strategies, notes)
    faint = "" if background.empty else " Faint: other seeds, which some strategies ran."
    subtitle, largest = f"Each line is the median over the runs of one strategy.{faint}", max(groups, key=len)
    if len(largest) > 1:
        spread = max(float((medians[arm] - medians[largest[0]]).abs().max()) for arm in largest)
        count = f"All {len(largest)}" if len(groups) == 1 else f"{len(largest)} of {len(medians)}"
        bands = " The band spans the runs of a strategy." if runs.groupby("arm").size().max() > 1 else ""
        subtitle = f"{count} strategies lie on one line: max difference {format_number(spread)} at any step.{bands}"
        subtitle += faint
    words = ", ".join(f"{arm} ends at {format_number(curve.iloc[-1])}" for arm, curve in medians.items())
    return canvas.finish(figure, "Training loss", workload, subtitle, words, notes,
                         canvas.legend_of_arms(strategies, notes), legend_columns=2,
                         lead=f"Training loss by step for {workload}")  # fmt: skip


def _label_groups(
    axes: Axes, groups: Iterable[Sequence[str]], curves: Mapping[str, pd.Series], strategies: Mapping[str, str],
    notes: Mapping[str, str],
) -> None:  # fmt: skip
    """Label the end of the first curve of each group."""
    labels = []
    for first, *rest in itertools.islice(groups, _MAX_LABELS):
        text = canvas.format_label(first, notes) + (f" + {len(rest)} more" if rest else "")
        curve, colour = curves[first], canvas.find_style(strategies[first]).colour
        labels.append(canvas.EndLabel(curve.index[-1], float(curve.iloc[-1]), text, colour))
    canvas.label_ends(axes, labels, 9.5)


def _draw_evaluations(axes: Axes, runs: pd.DataFrame, steps: pd.DataFrame) -> None:
    """Draw the median over all strategies, with a ring on each evaluated step or, of many, on some."""
    evaluated = steps[steps["run"].isin(runs["run"]) & steps["eval_loss"].notna()]
    if evaluated.empty:
        return
    curve = evaluated.groupby("step")["eval_loss"].median()
    curve = curve[:: math.ceil(len(curve) / MAX_POINTS)]
    axes.plot(curve.index, curve, color=canvas.ACCENT, linestyle=":", marker="o", markersize=10,
              markerfacecolor="none", markeredgecolor=canvas.ACCENT, markeredgewidth=1.4,
              markevery=math.ceil(len(curve) / 12), zorder=5)  # fmt: skip
    text = axes.annotate("evaluation", (curve.index[-1], curve.iloc[-1]), xytext=(-2, 12),
                         textcoords="offset points", ha="right", size=9, color=canvas.ACCENT, zorder=6)  # fmt: skip
    text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def _draw_floor(axes: Axes, runs: pd.DataFrame, low: float) -> None:
    floors = runs["floor_loss"].dropna().unique()
    if len(floors) == 1:
        floor = float(floors[0])
        axes.axhline(floor, **canvas.GUIDE)
        axes.annotate(f"best possible {format_number(floor)}", (0.01, floor), xycoords=("axes fraction", "data"),
                      xytext=(0, -4), textcoords="offset points", va="top", size=9, color=canvas.QUIET)  # fmt: skip
        axes.set_ylim(bottom=min(low, floor) - 0.12 * (axes.get_ylim()[1] - min(low, floor)))


def _differences(steps: pd.DataFrame, workload: str, runs: pd.DataFrame) -> canvas.Drawing | None:
    """Draw the difference of each run from the baseline's with the same seed; bold is its maximum so far."""
    losses, baseline = _losses(steps, runs), baseline_arm(runs)
    # With dropout, masks differ between strategies, so steps are not comparable.
    if baseline is None or losses.empty or runs["arm"].nunique() < 2 or has_dropout(runs):
        return None
    runs = runs[runs["run"].isin(losses.columns)]
    gaps = {}
    for arm in canvas.arm_strategies(runs):
        gap_of_pairs = [losses[run] - losses[reference] for run, reference in paired_runs(runs, arm, baseline)]
        # A step without a loss is not a difference of 0.
        measured = [gap for gap in gap_of_pairs if gap.notna().all()]
        if arm != baseline and measured:
            gaps[arm] = pd.concat(measured, axis="columns").abs().max(axis="columns")
    if not gaps:
        return None
    notes, strategies = canvas.find_confounds(runs, _CONFOUND), {arm: canvas.arm_strategies(runs)[arm] for arm in gaps}
    so_far = {arm: gap.clip(lower=_ZERO).cummax().ffill() for arm, gap in gaps.items()}
    figure, (axes,) = canvas.sheet(2.8)
    for turn, (arm, gap) in enumerate(gaps.items()):
        style, stride = canvas.find_style(strategies[arm]), max(len(gap) // 8, 1)
        axes.plot(gap.index, gap.clip(lower=_ZERO), color=style.colour, linewidth=0.7, alpha=0.3)
        axes.plot(so_far[arm].index, so_far[arm], linewidth=1.5, markersize=6, markeredgewidth=0.6,
                  markevery=(turn % stride, stride), **style.line)  # fmt: skip
    reruns = [losses[first] - losses[second] for _, same in runs.groupby(["arm", "seed"])["run"]
              for first, second in itertools.combinations(same, 2)]  # fmt: skip
    peaks = {arm: float(gap.max()) for arm, gap in gaps.items()}
    worst = max(peaks, key=lambda arm: peaks[arm])
    subtitle = f"Max difference from {baseline} at any step: {format_number(peaks[worst])} ({worst})."
    subtitle += " Bold: the largest so far. Faint: that of each step. Dashed: the rounding of float32."
    if reruns:
        rerun = pd.concat(reruns, axis="columns").abs().max(axis="columns").cummax()
        axes.plot(rerun.index, rerun.clip(lower=_ZERO), color=canvas.INK, linewidth=1.2, linestyle=(0, (1, 1.5)))
        subtitle += f" Dotted: reruns of the same strategy, at most {format_number(float(rerun.iloc[-1]))}."
    if same := sum(peak == 0 for peak in peaks.values()):
        subtitle += f" {same} of {len(peaks)} never differ at all."
    rounding = float(losses.median().median()) * _FLOAT32_ROUNDING
    axes.set(yscale="log", ylim=(_ZERO * 0.5, max(max(peaks.values()) * 4, rounding * 40)))
    axes.axhline(rounding, **canvas.GUIDE)
    exponents = range(round(math.log10(_ZERO)), math.floor(math.log10(axes.get_ylim()[1])) + 1)
    axes.set_yticks([10.0**exponent for exponent in exponents], ["0", *map(power_of_ten, exponents[1:])])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.axhspan(axes.get_ylim()[0], _ZERO * 2, color=canvas.INK, alpha=0.05, linewidth=0)
    axes.margins(x=0.02)
    axes.set(xlabel="optimizer step", ylabel="difference in loss, nats")
    groups: dict[str, list[str]] = {}
    for arm, curve in so_far.items():
        groups.setdefault(f"{curve.iloc[-1]:.1e}", []).append(arm)
    _label_groups(axes, groups.values(), so_far, strategies, notes)
    words = ", ".join(f"{arm} {format_number(peak)}" for arm, peak in peaks.items())
    return canvas.finish(figure, f"Difference from {baseline}", workload, subtitle, words, notes,
                         canvas.legend_of_arms(strategies, notes), legend_columns=2,
                         lead=f"Largest difference in loss from {baseline} on {workload}")  # fmt: skip


QUESTION = Question(
    "loss", "Do ZeRO and offload change the loss?", answer,
    no_data="No workload here has two strategies with comparable losses.", tables={"loss": loss_table},
    figures={"loss_curves": loss_curves, "loss_differences": loss_differences}, notebook="loss_curves",
)  # fmt: skip
