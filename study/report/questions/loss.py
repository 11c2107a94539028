"""Do the arms train the same model? Seed by seed against the workload's baseline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from study.records.arms import NAN, Arm, Row, one_value
from study.records.fairness import has_dropout
from study.records.frames import Records, real, steps_by_run
from study.records.outcome import has_diverged
from study.records.statistics import BF16_SPACING, LOSS_MARGIN, Equivalence, equivalence, paired, paired_runs, percent
from study.report.plots.loss import loss_curves, loss_differences
from study.report.questions.comparing import Comparison, compared, notes_on, real_arms, table_of, workloads
from study.report.questions.question import NOT_MEASURED, Answer, Question, known, names

_CONFOUND, _EVALUATION = "confounded_loss", "eval_loss_final"
Steps = dict[str, pd.DataFrame]
Verdict = Literal["same", "other", "open"]


def step_margin(precision: str) -> float:
    """Of the baseline and of all that is compared with it: another precision is a confound."""
    return max(LOSS_MARGIN, BF16_SPACING) if precision.startswith("bf16") else LOSS_MARGIN


def _test(arm: Arm) -> Equivalence:
    assert arm.baseline is not None
    pairs = paired(arm.beside, _EVALUATION, arm.name, arm.baseline, form=np.asarray)
    return equivalence(pairs["value"].tolist(), pairs["baseline"].tolist())


class StepDifference(NamedTuple):
    """The largest, as a share of the other's loss at that step."""

    share: float = NAN
    nats: float = NAN
    step: float = NAN
    loss: float = NAN

    def of_the_reducible(self, share: float, floor: float) -> float:
        """A share of that loss as one of what training can still take off it; NaN where no floor is known."""
        above = self.loss - floor
        return share * self.loss / above if above > 0 else NAN


def largest_step_difference(pairs: Iterable[tuple[str, str]], steps: Steps) -> StepDifference:
    """Over pairs of runs; the second of each is the one that the first is held against."""
    found = []
    for pair in pairs:
        if all(run in steps for run in pair):
            mine, its = (steps[run]["loss"].to_numpy() for run in pair)
            count = min(len(mine), len(its))
            apart, whole = np.abs(mine[:count] - its[:count]), np.abs(its[:count])
            # A loss of exactly nothing has no shares. Runs with a step that has no loss are not compared.
            shares = np.divide(apart, whole, out=np.where(apart > 0, np.inf, apart), where=whole > 0)
            if count and not np.isnan(shares).any():
                at = int(np.argmax(shares))
                found.append(StepDifference(float(shares[at]), float(apart[at]), at + 1, float(whole[at])))
    return max(found, default=StepDifference())


# So many times as far as one arm is from itself proves nothing: more pairs than there are repeats have a further one.
_CHANCE = 2.0


def same_arm_twice(beside: pd.DataFrame, steps: Steps) -> StepDifference:
    """Of any arm with one seed, run again: what the machine alone does to a loss."""
    ended = beside[beside["status_state"] == "ok"]
    again = ended.groupby(["arm", "seed"], dropna=False)["run"].apply(list)
    return largest_step_difference((pair for runs in again for pair in itertools.combinations(runs, 2)), steps)


def _diverged_seeds(arm: Arm) -> list[int]:
    """Those of which a run ended on what is no number, and the baseline's went on."""
    beside = arm.beside
    trained = beside.loc[(beside["arm"] == arm.baseline) & (beside["status_state"] == "ok"), "seed"]
    lost = arm.runs[(arm.runs["status_state"] == "failed") & (arm.runs[_CONFOUND] == "")]
    lost = lost[lost["status_reason"].fillna("").map(has_diverged) & lost["seed"].isin(trained)]
    return sorted({int(seed) for seed in lost["seed"]})


class _Compared(NamedTuple):
    arm: Arm
    # How far it is off, and how far it may be, as shares of the baseline's loss there. Infinite: it is no number.
    off: float
    margin: float
    # The margin as a share of the loss above the known floor.
    of_the_reducible: float
    verdict: Verdict
    test: Equivalence
    by: Literal["steps", "seeds", "end"]


def _compared_losses(found: Sequence[Arm], steps: Steps) -> list[_Compared]:
    """Each arm that can be compared: step by step or, where dropout draws other masks in each arm, by its seeds."""
    judged = Comparison({found[0].workload: found}, _EVALUATION, lambda arm: arm.baseline)
    chance = _CHANCE * same_arm_twice(found[0].beside, steps).share
    rows = []
    for arm in (arm for arm in found if arm.baseline is not None and not arm.is_baseline):
        if _diverged_seeds(arm):
            rows.append(_Compared(arm, math.inf, _margin(arm), NAN, "other", _test(arm), "end"))
        elif arm.is_fair(_CONFOUND):
            one = _by_seeds(arm, judged) if has_dropout(arm.ended) else _by_steps(arm, steps, chance)
            rows += [one] if one else []
    return rows


def _margin(arm: Arm) -> float:
    return step_margin(one_value(arm.runs["precision"]))


def _by_steps(arm: Arm, steps: Steps, chance: float) -> _Compared | None:
    there = largest_step_difference(paired_runs(arm.beside, arm.name, arm.baseline or ""), steps)
    if math.isnan(there.share):
        return None
    floor, margin = one_value(arm.ended["floor_loss"]), _margin(arm)
    verdict: Verdict = "same" if there.share <= margin else "open" if there.share <= chance else "other"
    of_it = there.of_the_reducible(margin, NAN if floor is None else floor)
    return _Compared(arm, there.share, margin, of_it, verdict, _test(arm), "steps")


def _by_seeds(arm: Arm, judged: Comparison) -> _Compared | None:
    test, difference = _test(arm), judged.of(arm)
    base = paired(arm.beside, _EVALUATION, arm.name, arm.baseline or "", form=np.asarray)["baseline"].mean()
    if test.mean_difference is None or not base > 0:
        return None
    floor, apart = one_value(arm.ended["floor_eval_loss"]), difference is not None and difference.is_told_apart
    verdict: Verdict = "same" if test.verdict == "equivalent" else "other" if apart else "open"
    of_it = StepDifference(loss=base).of_the_reducible(LOSS_MARGIN, NAN if floor is None else floor)
    return _Compared(arm, abs(test.mean_difference) / base, LOSS_MARGIN, of_it, verdict, test, "seeds")


def answer(records: Records) -> Answer | None:
    steps, found = steps_by_run(real(records)), workloads(records)
    by_workload = {workload: _compared_losses(of_it, steps) for workload, of_it in found.items()}
    every = list(itertools.chain(*by_workload.values()))
    if not every:
        return None
    rows, asides = list[Row](), list[str]()
    for workload, of_it in by_workload.items():
        if of_it:
            furthest = max(of_it, key=lambda one: one.off)
            again = same_arm_twice(found[workload][0].beside, steps).share
            far = [one.verdict for one in of_it if one.by == "steps" and one.verdict != "same"]
            if far and (math.isnan(again) or "open" in far):
                asides.append(_chance_words(again))
            rows.append({
                "Workload": workload,
                "Same loss": f"{sum(one.verdict == 'same' for one in of_it)} of {len(of_it)}",
                "Furthest arm": furthest.arm.name,
                "Off by": _off_text(furthest),
                "One arm twice": known(again, percent),
                "Margin": percent(furthest.margin),
                "Equivalent": _shown([one.test for one in of_it]),
            })  # fmt: skip
    table = pd.DataFrame(rows)
    judged = {id(one.arm) for one in every}
    alone = [arm.name for of_it in found.values() for arm in compared(of_it, _CONFOUND) if id(arm) not in judged]
    if alone:
        asides.append(f"Not compared, since no seed of theirs ended well under the baseline too: {names(alone)}.")
    notes = (*_notes(every), *dict.fromkeys(asides), *notes_on(itertools.chain(*found.values()), _CONFOUND))
    return Answer(_sentence(every), table.loc[:, (table != NOT_MEASURED).any()], notes)


def _sentence(every: Sequence[_Compared]) -> str:
    others, unsure = ([one for one in every if one.verdict == verdict] for verdict in ("other", "open"))
    count = len(every)
    if others:
        worst = max(others, key=lambda one: one.off / one.margin)
        said = f"`{worst.arm.name}` is {percent(worst.off)} off the loss of its baseline"
        if math.isinf(worst.off):
            seeds = ", ".join(map(str, _diverged_seeds(worst.arm)))
            said = f"`{worst.arm.name}` ended on a loss that is no number where its baseline trained (seed {seeds})"
        return f"Yes, in {len(others)} of {count} arms: {said}."
    off = percent(max(one.off for one in every))
    if not unsure:
        return f"No: the loss of all {count} arms that can be compared stays within {off} of their baseline's."
    return (
        f"Not known of {len(unsure)} of {count} arms: their losses are neither told apart from noise nor shown to be"
        f" equal; no arm is more than {off} off."
    )


def _chance_words(again: float) -> str:
    if math.isnan(again):
        return "Nothing ran twice, so how far chance alone moves a loss is not known."
    return f"Not known: off by more than the margin, and by no more than {_CHANCE:g} times what one arm is from itself."


def _off_text(one: _Compared) -> str:
    return "no number" if math.isinf(one.off) else percent(one.off)


def _notes(every: Sequence[_Compared]) -> Iterable[str]:
    if any(one.by == "steps" for one in every):
        yield "Off by: at the step where it is largest, of the baseline's loss at that step."
    if above := [one.of_the_reducible for one in every if not math.isnan(one.of_the_reducible)]:
        yield f"The margin is {percent(max(above))} at most of what training can still take off the loss there."
    if seeds := sorted({one.test.n for one in every if one.test.verdict != "no test"}):
        n = "-".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))
        yield f"Equivalent: by two one-sided tests of evaluation losses, seed by seed (n = {n})."
    if any(one.by == "seeds" for one in every):
        yield (
            "Where dropout is on, masks differ between arms and no step is compared: evaluation losses are, seed by"
            " seed."
        )
    if any(one.by == "steps" and one.margin > LOSS_MARGIN for one in every):
        yield (
            f"In bf16 a step may be off by {percent(BF16_SPACING)}, the spacing of bf16 numbers. The margin was"
            f" {percent(LOSS_MARGIN)} until an arm failed it, and was widened after that (reports/LOG.md, 2026-11-20)."
        )


def _shown(tests: Sequence[Equivalence]) -> str:
    tested = [test for test in tests if test.verdict != "no test"]
    return f"{sum(test.verdict == 'equivalent' for test in tested)} of {len(tested)}" if tested else "one seed"


def loss_table(records: Records) -> pd.DataFrame:
    steps = steps_by_run(real(records))
    return table_of(
        real_arms(records),
        lambda arm: {
            "Train loss, first": arm.learned("train_loss_first"),
            "Train loss, last": arm.learned("train_loss_final"),
            "Eval loss": arm.middle(_EVALUATION).text(4),
            "Accuracy": arm.learned("eval_accuracy"),
            "Perplexity": arm.learned("eval_perplexity"),
            **_against_baseline(arm, steps),
        },
        _CONFOUND,
    )


def _against_baseline(arm: Arm, steps: Steps) -> Row:
    if arm.baseline is None or arm.is_baseline:
        word = "baseline" if arm.is_baseline else "no baseline"
        return {"Largest difference in a step": NAN, "at step": NAN, "of the loss there": "-", "Equivalent": word}
    largest = StepDifference()
    if not has_dropout(arm.ended):
        largest = largest_step_difference(paired_runs(arm.beside, arm.name, arm.baseline), steps)
    return {
        "Largest difference in a step": largest.nats, "at step": largest.step,
        "of the loss there": known(largest.share, percent), "Equivalent": _test(arm).text(),
    }  # fmt: skip


QUESTION = Question(
    name="loss",
    title="Do ZeRO and offload change the loss?",
    answer=answer,
    nothing="No two arms of a workload here have losses that can be compared.",
    tables={"loss": loss_table},
    figures={"loss_curves": loss_curves, "loss_differences": loss_differences},
    notebook="loss_curves",
)
