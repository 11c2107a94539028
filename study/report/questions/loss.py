"""Do the arms train the same model? Paired by seed and repeat against the workload's baseline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pandas as pd

from study.report.plots.loss import loss_curves, loss_differences
from study.report.questions.comparing import compared, notes_on, real_arms, table_of, workloads
from study.report.questions.question import Answer, Question
from study.report.records.arms import NAN, Arm, Row, one_value
from study.report.records.frames import Records, real, steps_by_run
from study.report.records.statistics import BF16_SPACING, LOSS_MARGIN, Equivalence, equivalence, paired, percent

_CONFOUND = "confounded_loss"


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


def _compared_losses(records: Records) -> pd.DataFrame:
    """Each arm beside its baseline: the largest difference in a step, as a share of the loss that training ended at."""
    steps, rows = steps_by_run(real(records)), []
    for workload, found in workloads(records).items():
        bases = [arm for arm in found if arm.is_baseline]
        for base, arm in itertools.product(bases[:1], compared(found, _CONFOUND)):
            scale, gap = abs(base.median("train_loss_final")), largest_step_difference(arm, steps)[0]
            if scale and not pd.isna(gap / scale):
                margin = step_margin(one_value(base.ended["precision"]))
                rows.append((workload, arm.name, gap / scale, margin, gap / scale / margin, _test(arm)))
    return pd.DataFrame(rows, columns=["workload", "arm", "off", "margin", "in margins", "test"])


def answer(records: Records) -> Answer | None:
    every = _compared_losses(records)
    if every.empty:
        return None
    worst = every.loc[every["in margins"].idxmax()]
    if apart := int((every["in margins"] > 1).sum()):
        said = f"`{worst['arm']}` is {percent(worst['off'])} off the loss of its baseline"
        sentence = f"Yes, in {apart} of {len(every)} arms: {said}."
    else:
        said = f"stays within {percent(worst['off'])} of their baseline's"
        sentence = f"No: the loss of all {len(every)} arms that can be compared {said}."
    rows = []
    for workload, of_it in every.groupby("workload", sort=False):
        furthest = of_it.loc[of_it["off"].idxmax()]
        rows.append({
            "Workload": workload,
            "Same loss": f"{(of_it['in margins'] <= 1).sum()} of {len(of_it)}",
            "Furthest arm": furthest["arm"],
            "Off by": percent(furthest["off"]),
            "Margin": percent(furthest["margin"]),
            "Test of equivalence": _shown(of_it["test"]),
        })  # fmt: skip
    return Answer(sentence, pd.DataFrame(rows), notes_on(itertools.chain(*workloads(records).values()), _CONFOUND))


def _shown(tests: Iterable[Equivalence]) -> str:
    tested = [test for test in tests if test.verdict != "no test"]
    if not tested:
        return "one run each: no test"
    pairs = sorted({test.n for test in tested})
    equivalent = sum(test.verdict == "equivalent" for test in tested)
    return f"{equivalent} of {len(tested)} arms (n = {'-'.join(str(n) for n in dict.fromkeys((pairs[0], pairs[-1])))})"


def loss_table(records: Records) -> pd.DataFrame:
    steps = steps_by_run(real(records))
    return table_of(
        real_arms(records),
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
