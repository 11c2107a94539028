"""Question 1, loss: how closely the arms of each workload follow plain training, in numbers and in sentences."""

from __future__ import annotations

import dataclasses

import pandas as pd

from study.report.questions.effects import compared, listed
from study.report.questions.tables import largest_step_difference
from study.report.records.arms import Arm, one_value
from study.report.records.statistics import BF16_SPACING, LOSS_MARGIN, Equivalence, equivalence, paired, percent

_BASELINE = "their baseline"


@dataclasses.dataclass(frozen=True)
class LossComparison:
    """The arms of one workload beside its baseline."""

    workload: str
    baseline: str
    same: tuple[str, ...]
    apart: tuple[str, ...]
    # As shares of the loss training ended at: what a step may differ by, and the largest difference; where that was.
    margin: float
    largest: float
    share: float
    worst: str
    step: int
    evaluation: float
    pairs: int
    tests: tuple[Equivalence, ...]

    def text(self) -> str:
        plain, count = f"`{self.baseline}`", len(self.same) + len(self.apart)
        if not self.apart:
            every = f"all {count} arms that can be compared with {plain} follow"
            lead = f"{every if count > 1 else f'`{self.same[0]}` follows'} the loss of {plain} step for step"
        elif self.same:
            apart = listed([f"`{name}`" for name in self.apart])
            lead = f"{len(self.same)} of {count} arms follow the loss of {plain} step for step, and {apart} not"
        else:
            lead = f"no arm follows the loss of {plain} step for step"
        pairs = f"{self.pairs} pair{'s'[: self.pairs > 1]} of runs"
        evaluated = f"in the final evaluation it is {self.evaluation:.2g} (n = {pairs})"
        return (
            f"{lead}: the largest difference in any step is {self.largest:.2g}, {percent(self.share)} of the loss"
            f" (`{self.worst}`, step {self.step}; up to {percent(self.margin)} is the same);"
            f" {evaluated if self.pairs else 'nothing was evaluated'}."
            f" {tested(self.tests)}"
        )


def compare_losses(found: list[Arm], steps: pd.DataFrame) -> LossComparison | None:
    """None where no two arms can be compared."""
    fair = compared(found, "confounded_loss")
    if not fair:
        return None
    baseline = str(fair[0].baseline)
    wanted = steps[steps["run"].isin(fair[0].beside["run"])]
    by_run = {str(run): rows for run, rows in wanted.groupby("run", sort=False)}
    gaps = [(*largest_step_difference(arm, by_run), arm) for arm in fair]
    gaps = [entry for entry in gaps if not pd.isna(entry[0])]
    if not gaps:
        return None
    largest, step, worst = max(gaps, key=lambda entry: entry[0])
    scale = next(abs(arm.median("train_loss_final")) for arm in found if arm.is_baseline)
    margin = step_margin(next(one_value(arm.ended["precision"]) for arm in found if arm.is_baseline))
    evaluated = [paired(arm.beside, "eval_loss_final", arm.name, baseline) for arm in fair]
    return LossComparison(
        workload=found[0].workload,
        baseline=baseline,
        same=tuple(arm.name for gap, _, arm in gaps if gap <= margin * scale),
        apart=tuple(arm.name for gap, _, arm in gaps if gap > margin * scale),
        margin=margin,
        largest=largest,
        share=largest / scale if scale else float("nan"),
        worst=worst.name,
        step=int(step),
        evaluation=max((_largest_gap(pairs) for pairs in evaluated if len(pairs)), default=float("nan")),
        pairs=sum(map(len, evaluated)),
        tests=tuple(equivalence(pairs["value"].tolist(), pairs["baseline"].tolist()) for pairs in evaluated),
    )


def step_margin(precision: str) -> float:
    """Of the baseline and of all that is compared with it: another precision is a confound."""
    return max(LOSS_MARGIN, BF16_SPACING) if precision.startswith("bf16") else LOSS_MARGIN


def _largest_gap(pairs: pd.DataFrame) -> float:
    return float((pairs["value"] - pairs["baseline"]).abs().max())


def tested(verdicts: tuple[Equivalence, ...]) -> str:
    margin = percent(LOSS_MARGIN)
    told = [verdict for verdict in verdicts if verdict.verdict != "no test"]
    if not told:
        return f"One run each: no interval, and no test of equivalence (its margin is {margin} of the loss)."
    shown = sum(verdict.verdict == "equivalent" for verdict in told)
    runs = sorted({verdict.n for verdict in told})
    n = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    return f"Two one-sided tests with a margin of {margin} show {shown} of {len(told)} arms equivalent (n = {n} pairs)."


def losses_in_short(comparisons: list[LossComparison]) -> str:
    """All workloads in three sentences."""
    if not comparisons:
        return "Loss: no two arms can be compared."
    arms = sum(len(comparison.same) + len(comparison.apart) for comparison in comparisons)
    worst = max(comparisons, key=lambda comparison: comparison.share / comparison.margin)
    where = f"`{worst.worst}`, {worst.workload}, step {worst.step}; up to {percent(worst.margin)} is the same"
    tests = tested(tuple(verdict for comparison in comparisons for verdict in comparison.tests))
    apart = [f"`{name}` ({comparison.workload})" for comparison in comparisons for name in comparison.apart]
    if not apart:
        every = (
            f"All {arms} arms that can be compared follow" if arms > 1 else "The one arm that can be compared follows"
        )
        lead = f"Loss: unchanged. {every} {_BASELINE} step for step"
        return f"{lead}, within {percent(worst.share)} of the loss ({where}). {tests}"
    lead = f"Loss: {arms - len(apart)} of {arms} arms follow {_BASELINE} step for step; not so"
    return f"{lead} {listed(apart)}. The furthest is {percent(worst.share)} of the loss ({where}). {tests}"
