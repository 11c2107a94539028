"""Do the arms train the same model? Paired by seed and repeat against the workload's baseline."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from study.report.plots.loss import loss_curves, loss_differences
from study.report.questions.comparing import compared, notes_on, table_of, workloads
from study.report.questions.question import Answer, Question
from study.report.records.arms import NAN, Arm, Row, one_value
from study.report.records.frames import Records, real, steps_by_run
from study.report.records.statistics import BF16_SPACING, LOSS_MARGIN, Equivalence, equivalence, paired, percent

_CONFOUND = "confounded_loss"


@dataclasses.dataclass(frozen=True)
class LossComparison:
    """The arms of one workload beside its baseline; differences are shares of the loss that training ended at."""

    workload: str
    # The largest difference in any step, by arm.
    differences: dict[str, float]
    # Up to this a step's loss is the same.
    margin: float
    tests: tuple[Equivalence, ...]

    @property
    def apart(self) -> list[str]:
        return [name for name, difference in self.differences.items() if difference > self.margin]

    @property
    def furthest(self) -> str:
        return max(self.differences, key=lambda name: self.differences[name])


def compare_losses(found: list[Arm], steps: dict[str, pd.DataFrame]) -> LossComparison | None:
    """None where no two arms can be compared."""
    base = next((arm for arm in found if arm.is_baseline), None)
    if base is None:
        return None
    scale = abs(base.median("train_loss_final"))
    gaps = [(arm, largest_step_difference(arm, steps)[0]) for arm in compared(found, _CONFOUND)]
    known = [(arm, gap / scale) for arm, gap in gaps if not pd.isna(gap) and scale]
    if not known:
        return None
    return LossComparison(
        workload=base.workload,
        differences={arm.name: share for arm, share in known},
        margin=step_margin(one_value(base.ended["precision"])),
        tests=tuple(_test(arm) for arm, _ in known),
    )


def step_margin(precision: str) -> float:
    """Of the baseline and of all that is compared with it: another precision is a confound."""
    return max(LOSS_MARGIN, BF16_SPACING) if precision.startswith("bf16") else LOSS_MARGIN


def _test(arm: Arm) -> Equivalence:
    assert arm.baseline is not None
    pairs = paired(arm.beside, "eval_loss_final", arm.name, arm.baseline)
    return equivalence(pairs["value"].tolist(), pairs["baseline"].tolist())


def largest_step_difference(arm: Arm, steps: dict[str, pd.DataFrame]) -> tuple[float, float]:
    """Over all pairs of runs of a seed and repeat, and the step where it was; NaN without a pair."""
    assert arm.baseline is not None
    pairs = paired(arm.beside, "steps", arm.name, arm.baseline)
    found: list[tuple[float, float]] = []
    for mine, other in zip(pairs["run"], pairs["run_baseline"], strict=True):
        if mine in steps and other in steps:
            one, two = (steps[run]["loss"].to_numpy() for run in (mine, other))
            count = min(len(one), len(two))
            differences = np.abs(one[:count] - two[:count])
            if count and not np.isnan(differences).all():
                found.append((float(np.nanmax(differences)), float(np.nanargmax(differences)) + 1))
    return max(found, default=(NAN, NAN))


def answer(records: Records) -> Answer | None:
    found = workloads(records)
    steps = steps_by_run(real(records))
    comparisons = [each for arms in found.values() if (each := compare_losses(arms, steps)) is not None]
    if not comparisons:
        return None
    count = sum(len(each.differences) for each in comparisons)
    apart = sum(len(each.apart) for each in comparisons)
    worst = max(comparisons, key=lambda each: each.differences[each.furthest] / each.margin)
    off = percent(worst.differences[worst.furthest])
    sentence = (
        f"Yes, in {apart} of {count} arms: `{worst.furthest}` is {off} off the loss of its baseline."
        if apart
        else f"No: the loss of all {count} arms that can be compared stays within {off} of their baseline's."
    )
    rows = [
        {
            "Workload": each.workload,
            "Same loss": f"{len(each.differences) - len(each.apart)} of {len(each.differences)}",
            "Furthest arm": each.furthest,
            "Off by": percent(each.differences[each.furthest]),
            "Margin": percent(each.margin),
            "Test of equivalence": _shown(each.tests),
        }
        for each in comparisons
    ]
    return Answer(sentence, pd.DataFrame(rows), notes_on([arm for arms in found.values() for arm in arms], _CONFOUND))


def _shown(tests: tuple[Equivalence, ...]) -> str:
    tested = [test for test in tests if test.verdict != "no test"]
    if not tested:
        return "one run each: no test"
    pairs = sorted({test.n for test in tested})
    equivalent = sum(test.verdict == "equivalent" for test in tested)
    return f"{equivalent} of {len(tested)} arms (n = {'-'.join(str(n) for n in dict.fromkeys((pairs[0], pairs[-1])))})"


def loss_table(records: Records) -> pd.DataFrame:
    records = real(records)
    steps = steps_by_run(records)
    return table_of(
        records.runs,
        lambda arm: {
            "Train loss, first": arm.median("train_loss_first"),
            "Train loss, last": arm.median("train_loss_final"),
            "Eval loss": arm.median("eval_loss_final"),
            "Accuracy": arm.median("eval_accuracy"),
            "Perplexity": arm.median("eval_perplexity"),
            **_against_baseline(arm, steps),
        },
        _CONFOUND,
    )


def _against_baseline(arm: Arm, steps: dict[str, pd.DataFrame]) -> Row:
    if arm.baseline is None or arm.is_baseline:
        word = "baseline" if arm.is_baseline else "no baseline"
        return {"Largest difference in a step": NAN, "at step": NAN, "Equivalent": word}
    largest, at = largest_step_difference(arm, steps)
    return {"Largest difference in a step": largest, "at step": at, "Equivalent": _test(arm).text()}


QUESTION = Question(
    name="loss",
    title="Do ZeRO and offload change the loss?",
    answer=answer,
    nothing="No two arms of a workload here have losses that can be compared.",
    tables={"loss": loss_table},
    figures={"loss_curves": loss_curves, "loss_differences": loss_differences},
    notebook="loss_curves",
)
