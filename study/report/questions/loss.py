"""Losses of strategies compared with the workload's baseline, seed by seed, and their curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from study.config.text import NOT_MEASURED, percent
from study.records.fairness import has_dropout
from study.records.frames import Records, real_runs, steps_by_run
from study.records.statistics import (
    BF16_SPACING,
    CLAIMED_DIFFERENCE,
    LOSS_MARGIN,
    MIN_SAMPLE,
    Equivalence,
    equivalence_test,
    paired,
    paired_runs,
    step_margin,
)
from study.records.strategy_runs import NAN, Row, StrategyRuns, first_known_value
from study.records.workloads import BASELINES, read_arm
from study.report.document import Answer, Question, format_names, format_or_dash
from study.report.facts import Headline, caption, footnotes
from study.report.questions.comparison import arm_notes, arm_table, fair_arms, real_arms, workloads
from study.report.questions.memory import describe_scope

_CONFOUND, _EVALUATION = "confounded_loss", "eval_loss_final"
# Differences up to this multiple of the reruns' are not evidence: more pairs have a larger maximum.
_CHANCE = 2.0
# A difference above this fraction of its margin has a footnote.
_NARROW = 0.5
Steps = dict[str, pd.DataFrame]
Verdict = Literal["same", "other", "open"]


class StepDifference(NamedTuple):
    """The largest difference at any step, relative to the reference's loss at that step."""

    ratio: float = NAN
    nats: float = NAN
    step: float = NAN
    loss: float = NAN
    median: float = NAN


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
                figures = (shares[at], gaps[at], at + 1, reference[at], np.median(shares))
                differences.append(StepDifference(*map(float, figures)))
    return max(differences, default=StepDifference())


def largest_rerun_difference(runs: pd.DataFrame, steps: Steps) -> StepDifference:
    """Return the largest difference between reruns of the same strategy and seed, which is due to the machine alone."""
    ended = runs[runs["status_state"] == "ok"]
    reruns = ended.groupby(["arm", "seed"], dropna=False)["run"].apply(list)
    return largest_step_difference((pair for same in reruns for pair in itertools.combinations(same, 2)), steps)


def _has_trained(strategies: Iterable[StrategyRuns]) -> bool:
    runs = pd.concat([arm.ok_runs for arm in strategies])
    return not (runs["steps"] <= runs["warmup_steps"]).all()


def _diverged_seeds(arm: StrategyRuns) -> list[int]:
    """Return the seeds that diverged to NaN while the baseline's run trained to its end."""
    runs = arm.workload_runs
    trained = runs.loc[(runs["arm"] == arm.baseline) & (runs["status_state"] == "ok"), "seed"]
    lost = arm.runs[(arm.runs["status_state"] == "failed") & (arm.runs[_CONFOUND] == "")]
    lost = lost[(lost["status_cause"] == "not finite") & lost["seed"].isin(trained)]
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
    # Of the largest difference in a step.
    step: float = NAN
    median: float = NAN


def _compare_losses(strategies: Sequence[StrategyRuns], steps: Steps) -> list[_LossComparison]:
    """Compare each strategy with the baseline step by step; by seeds if dropout masks differ between strategies."""
    chance = _CHANCE * largest_rerun_difference(strategies[0].workload_runs, steps).ratio
    rows = []
    for arm in (arm for arm in strategies if arm.baseline is not None and not arm.is_baseline):
        test, margin = _test(arm), step_margin(str(arm.value("precision")))
        if _diverged_seeds(arm):
            rows.append(_LossComparison(arm, math.inf, margin, NAN, "other", test, "end"))
        elif not arm.is_fair(_CONFOUND):
            continue
        elif not has_dropout(arm.ok_runs):
            largest = largest_step_difference(paired_runs(arm.workload_runs, arm.name, arm.baseline or ""), steps)
            if not math.isnan(largest.ratio):
                verdict: Verdict = "same" if largest.ratio <= margin else "open" if largest.ratio <= chance else "other"
                reducible = _reducible_fraction(margin, largest.loss, arm.ok_runs["floor_loss"])
                at = (largest.step, largest.median)
                rows.append(_LossComparison(arm, largest.ratio, margin, reducible, verdict, test, "steps", *at))
        elif test.mean_difference is not None and (base := test.margin / LOSS_MARGIN) > 0:
            is_other = arm.differences(_EVALUATION)[arm.name, arm.baseline or ""].is_significant
            verdict = "same" if test.verdict == "equivalent" else "other" if is_other else "open"
            reducible = _reducible_fraction(LOSS_MARGIN, base, arm.ok_runs["floor_eval_loss"])
            fraction = abs(test.mean_difference) / base
            rows.append(_LossComparison(arm, fraction, LOSS_MARGIN, reducible, verdict, test, "seeds"))
    return rows


def _test(arm: StrategyRuns) -> Equivalence:
    pairs = paired(arm.workload_runs, _EVALUATION, arm.name, arm.baseline or "", form=np.asarray)
    return equivalence_test(pairs["value"].tolist(), pairs["baseline"].tolist())


def _reducible_fraction(fraction: float, loss: float, floors: pd.Series) -> float:
    """Return a fraction of the loss as a fraction of the loss above its floor; NaN if the floor is unknown."""
    floor = first_known_value(floors)
    return fraction * loss / (loss - floor) if floor is not None and loss > floor else NAN


def answer(records: Records) -> Answer | None:
    """Return whether the losses differ, per workload; None without a comparison."""
    steps = steps_by_run(real_runs(records))
    # Runs without a step after the warm-up are for memory: their losses have hardly moved.
    grouped = {workload: group for workload, group in workloads(records).items() if _has_trained(group)}
    compared = {workload: _compare_losses(group, steps) for workload, group in grouped.items()}
    by_workload = {workload: rows for workload, rows in compared.items() if rows}
    if not by_workload:
        return None
    reruns = {
        workload: largest_rerun_difference(grouped[workload][0].workload_runs, steps).ratio for workload in by_workload
    }
    comparisons = list(itertools.chain(*by_workload.values()))
    table = pd.DataFrame([_table_row(rows, reruns[workload]) for workload, rows in by_workload.items()])
    in_table = {id(row.arm) for row in comparisons}
    alone = [arm.name for group in grouped.values() for arm in fair_arms(group, _CONFOUND) if id(arm) not in in_table]
    notes = [*_footnotes(comparisons), *_rerun_notes(by_workload, reruns)]
    if alone:
        notes.append(caption("loss", "not_compared", names=format_names(alone)))
    is_offloaded = any(row.arm.is_offloaded for row in comparisons)
    return Answer(
        table.loc[:, (table != NOT_MEASURED).any()],
        _headlines(comparisons),
        (*notes, *arm_notes(itertools.chain(*grouped.values()), _CONFOUND)),
        title="" if is_offloaded else "Does sharding change the loss?",
        subject=_find_largest(comparisons).arm.workload,
    )


def _table_row(rows: Sequence[_LossComparison], rerun: float) -> Row:
    """Return the comparisons of a workload, and the largest of them."""
    worst = max(rows, key=lambda row: row.difference)
    tests = [row.test for row in rows if row.test.verdict != "no test"]
    # The margin of a test is in nats.
    means = [abs(test.mean_difference or 0) / test.margin * LOSS_MARGIN for test in tests if test.margin]
    equivalent = sum(test.verdict == "equivalent" for test in tests)
    return {
        "Workload": worst.arm.workload,
        "Baseline": worst.arm.baseline,
        "Same loss": f"{sum(row.verdict == 'same' for row in rows)} of {len(rows)}",
        "Inconclusive": sum(row.verdict == "open" for row in rows) or NOT_MEASURED,
        "Worst strategy": worst.arm.name,
        "Max difference": _difference_text(worst),
        "At step": format_or_dash(worst.step, "{:.0f}".format),
        "Median of its steps": format_or_dash(worst.median, percent),
        "Rerun": format_or_dash(rerun, percent),
        "Margin": percent(worst.margin),
        "Equivalent": f"{equivalent} of {len(tests)}" if tests else "one seed",
        "Means differ by": percent(max(means)) if means else NOT_MEASURED,
    }


def _difference_text(row: _LossComparison) -> str:
    return "NaN" if math.isinf(row.difference) else size_text(row.difference, row.margin)


def _is_plain(baseline: str) -> bool:
    """Whether a baseline is plain training by this project's trainer."""
    name = read_arm(baseline)
    return name.strategy in BASELINES and not name.settings


def _find_largest(comparisons: Sequence[_LossComparison]) -> _LossComparison:
    """Return the largest difference; from plain training, unless a strategy differs from another one."""
    plain = [row for row in comparisons if _is_plain(str(row.arm.baseline))]
    is_same = all(row.verdict == "same" for row in comparisons)
    return max(plain if plain and is_same else comparisons, key=lambda row: row.difference)


def _headlines(comparisons: Sequence[_LossComparison]) -> tuple[Headline, Headline]:
    largest = _find_largest(comparisons)
    same = sum(row.verdict == "same" for row in comparisons)
    scope = describe_scope({row.arm.workload: [row.arm] for row in comparisons})
    return (
        Headline(
            _difference_text(largest),
            caption("loss", largest.by, baseline=largest.arm.baseline),
            largest.arm.name,
            largest.arm.workload,
            f"margin {percent(largest.margin)}",
            n=largest.arm.ok_runs["seed"].nunique(),
        ),
        Headline(f"{same} of {len(comparisons)}", caption("loss", "same"), scope=scope),
    )


def _footnotes(comparisons: Sequence[_LossComparison]) -> tuple[str, ...]:
    by_steps = [row for row in comparisons if row.by == "steps"]
    reducible = [row.reducible_margin for row in comparisons if row.reducible_margin > 0]
    return footnotes(
        "loss",
        {
            "at_any_step": bool(by_steps),
            "norm": _is_of_the_norm(_find_largest(comparisons)),
            "reducible": bool(reducible),
            "tested": any(row.test.verdict != "no test" for row in comparisons),
            "dropout": any(row.by == "seeds" for row in comparisons),
            "half": any(row.margin > LOSS_MARGIN for row in by_steps),
        },
        margin=percent(LOSS_MARGIN),
        claimed=f"{100 * CLAIMED_DIFFERENCE:.2f} %",
        reducible=percent(max(reducible, default=0)),
        least=MIN_SAMPLE,
        half=percent(BF16_SPACING),
    )


def _is_of_the_norm(row: _LossComparison) -> bool:
    """Whether a difference near its margin is of a stage of ZeRO that clips gradients in fp32."""
    is_near = row.by == "steps" and row.difference > _NARROW * row.margin
    clips = bool(row.arm.value("zero_stage") and row.arm.value("gradient_clipping"))
    return is_near and clips and row.arm.value("precision") == "fp32"


def _rerun_notes(by_workload: Mapping[str, Sequence[_LossComparison]], reruns: Mapping[str, float]) -> Iterator[str]:
    """Yield what reruns show of the differences above the margin, each text once."""
    beyond = {
        workload: [row.verdict for row in rows if row.by == "steps" and row.verdict != "same"]
        for workload, rows in by_workload.items()
    }
    has_reruns = {workload: not math.isnan(rerun) for workload, rerun in reruns.items()}
    if any(verdicts and not has_reruns[workload] for workload, verdicts in beyond.items()):
        yield caption("loss", "no_reruns")
    if any("open" in verdicts and has_reruns[workload] for workload, verdicts in beyond.items()):
        yield caption("loss", "chance", chance=_CHANCE)


def size_text(difference: float, margin: float) -> str:
    """Return the difference in percent, with a third decimal if it would read as the margin."""
    text = percent(difference)
    return text if text != percent(margin) else f"{100 * difference:.3f} %"


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


QUESTION = Question(
    "loss",
    "Do ZeRO and offload change the loss?",
    answer,
    tables={"loss": loss_table},
    figures=("loss", "loss_difference"),
    notebook="loss_curves",
)
