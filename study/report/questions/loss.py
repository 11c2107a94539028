"""Losses of strategies compared with the workload's baseline, seed by seed, and their curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from study.config.text import NOT_MEASURED, percent
from study.records.fairness import has_dropout
from study.records.frames import Records, real_runs, steps_by_run
from study.records.outcome import has_diverged
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
from study.records.workloads import BASELINES
from study.report.document import Answer, Question, format_names, format_or_dash, paragraphs
from study.report.questions.comparison import arm_notes, arm_table, fair_arms, real_arms, workloads
from study.report.questions.memory import format_scope

_CONFOUND, _EVALUATION = "confounded_loss", "eval_loss_final"
# Differences up to this multiple of the reruns' are not evidence: more pairs have a larger maximum.
_CHANCE = 2.0
# A difference above this fraction of its margin is explained, by these first steps.
_NARROW, _EARLY = 0.5, 20
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
                rows.append(_LossComparison(arm, largest.ratio, margin, reducible, verdict, test, "steps"))
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


def _by_run(row: _LossComparison, steps: Steps) -> list[tuple[StepDifference, tuple[str, str]]]:
    """Return the largest difference of each run and its reference, the largest first."""
    pairs = paired_runs(row.arm.workload_runs, row.arm.name, row.arm.baseline or "")
    differences = ((largest_step_difference([pair], steps), pair) for pair in pairs)
    return sorted((entry for entry in differences if entry[0].ratio >= 0), reverse=True)


def _early_differences(pair: tuple[str, str], steps: Steps) -> list[float]:
    """Return how far norm and loss of a run and its reference differ in the first steps."""
    run, reference = (steps[name].iloc[:_EARLY].reset_index() for name in pair)
    return [(run[name] / reference[name] - 1).abs().max() for name in ("grad_norm", "loss")]


def _seed(row: _LossComparison, run: str) -> int:
    runs = row.arm.workload_runs
    return int(runs.loc[runs["run"] == run, "seed"].iloc[0])


def _similar(largest: _LossComparison, rows: Iterable[_LossComparison], seed: int, steps: Steps) -> dict[str, str]:
    """Return the largest difference of other strategies that differ as far from the baseline, in a run of this seed."""
    similar = dict[str, str]()
    for row in rows:
        is_other = row is not largest and row.by == "steps" and row.arm.workload == largest.arm.workload
        if is_other and row.difference > _NARROW * row.margin:
            difference, (run, _) = _by_run(row, steps)[0]
            if _seed(row, run) == seed:
                similar[row.arm.name] = size_text(difference.ratio, row.margin)
    return similar


def answer(records: Records) -> Answer | None:  # noqa: PLR0914
    """Return whether the losses differ, per workload; None without a comparison."""
    steps = steps_by_run(real_runs(records))
    # Runs without a step after the warm-up are for memory: their losses have hardly moved.
    grouped = {workload: group for workload, group in workloads(records).items() if _has_trained(group)}
    by_workload = {workload: _compare_losses(group, steps) for workload, group in grouped.items()}
    comparisons = list(itertools.chain(*by_workload.values()))
    if not comparisons:
        return None
    rows, asides = list[Row](), list[str]()
    for workload, group in by_workload.items():
        if group:
            worst = max(group, key=lambda row: row.difference)
            rerun = largest_rerun_difference(grouped[workload][0].workload_runs, steps).ratio
            beyond = [row.verdict for row in group if row.by == "steps" and row.verdict != "same"]
            if beyond and math.isnan(rerun):
                asides.append("There are no reruns, so the run-to-run variation of the loss is unknown.")
            elif "open" in beyond:
                asides.append(f"Inconclusive: above the margin, but below {_CHANCE:g} times the difference of reruns.")
            tested = [row.test.verdict == "equivalent" for row in group if row.test.verdict != "no test"]
            rows.append(
                {
                    "Workload": workload,
                    "Same loss": f"{sum(row.verdict == 'same' for row in group)} of {len(group)}",
                    "Worst strategy": worst.arm.name,
                    "Max difference": "NaN"
                    if math.isinf(worst.difference)
                    else size_text(worst.difference, worst.margin),
                    "Rerun": format_or_dash(rerun, percent),
                    "Margin": percent(worst.margin),
                    "Equivalent": f"{sum(tested)} of {len(tested)}" if tested else "one seed",
                }
            )
    table = pd.DataFrame(rows)
    in_table = {id(row.arm) for row in comparisons}
    alone = [arm.name for group in grouped.values() for arm in fair_arms(group, _CONFOUND) if id(arm) not in in_table]
    if alone:
        asides.append(f"Not compared, because the baseline has no run with any of their seeds: {format_names(alone)}.")
    different, unsure = ([row for row in comparisons if row.verdict == verdict] for verdict in ("other", "open"))
    most = max(different, key=lambda row: row.difference / row.margin, default=None)
    # Plain training first, unless a strategy differs from another one.
    rest = [] if different or unsure else comparisons
    plain = [row for row in rest if str(row.arm.baseline).split(" ")[0] in BASELINES]
    largest = max(plain or comparisons, key=lambda row: row.difference)
    others = [row for row in comparisons if row not in plain] if plain else []
    tests = [row.test for row in comparisons if row.test.verdict != "no test"]
    # The margin of a test is in nats.
    differences = [abs(test.mean_difference or 0) / test.margin * LOSS_MARGIN for test in tests if test.margin]
    is_narrow = plain and largest.by == "steps" and largest.difference > _NARROW * largest.margin
    runs = _by_run(largest, steps) if is_narrow else []
    early = _early_differences(runs[0][1], steps) if runs else []
    seed = _seed(largest, runs[0][1][0]) if runs else 0
    similar = _similar(largest, plain, seed, steps) if runs else {}
    sentence, words, *notes = paragraphs(
        "loss_answer.j2",
        comparisons=comparisons,
        different=different,
        unsure=unsure,
        worst=most,
        percent=percent,
        bases=lambda rows: format_names([row.arm.baseline for row in rows]).replace(" and ", " or "),
        others=others,
        diverged=_diverged_seeds(most.arm) if most and math.isinf(most.difference) else [],
        largest=largest,
        size=size_text(largest.difference, largest.margin),
        size_eval=percent(max(differences, default=0)),
        tests=tests,
        by_run=[difference for difference, _ in runs],
        seed=seed,
        similar=similar,
        early=early,
        most_seeds=max(row.arm.ok_runs["seed"].nunique() for row in comparisons),
        first_steps=_EARLY,
        plain_names=BASELINES,
        margin=LOSS_MARGIN,
        claimed=CLAIMED_DIFFERENCE,
        reducible=[margin for row in comparisons if (margin := row.reducible_margin) > 0],
        min_sample=MIN_SAMPLE,
        scope=format_scope({row.arm.workload: [row.arm] for row in comparisons}),
        bf16_spacing=BF16_SPACING,
    )
    notes += [*dict.fromkeys(asides), *arm_notes(itertools.chain(*grouped.values()), _CONFOUND)]
    numbers = [(size_text(largest.difference, largest.margin), words)] if math.isfinite(largest.difference) else []
    table = table.loc[:, (table != NOT_MEASURED).any()]
    is_offloaded = any(row.arm.is_offloaded for row in comparisons)
    title = "" if is_offloaded else "Does sharding change the loss?"
    return Answer(sentence, table, tuple(notes), numbers, title, largest.arm.workload)


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
