"""What to use on this box, from what ran on it; no finer than what is known of chance."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pandas as pd

from study.records.arms import Arm, fast_memory, has_no_gpu, state_mib
from study.records.frames import Records, real
from study.records.statistics import NOT_TOLD_APART, SMALLEST_SAMPLE, differences, noise, seeds_needed
from study.report.questions.comparing import notes_on, workloads
from study.report.questions.question import NOT_MEASURED, Answer, Question, names
from study.report.questions.time import STEP, step_s

_NOT_JUDGED = "not judged"


def answer(records: Records) -> Answer | None:
    runs = real(records).runs
    # A profiled run tells where time goes; nobody should train so.
    found = workloads(dataclasses.replace(records, runs=runs[~runs["profile_steps"].fillna(0).gt(0)]))
    rows, best, unjudged = [], [], []
    for workload, of_it in found.items():
        timed = [arm for arm in of_it if arm.is_fair() and not math.isnan(step_s(arm))]
        if timed:
            fastest = _fastest(timed)
            best += [fastest] if fastest else []
            unjudged += [arm.name for arm in timed if fastest and not _has_enough_seeds(arm)]
            rows.append({"Workload": workload, **_figures(timed, fastest)})
    if not rows:
        return None
    notes = ["For this model, batch and length; one that does not fit may turn the order around."]
    if unjudged:
        notes.append(f"Fewer than three seeds, so not judged: {names(unjudged)}.")
    arms = [arm for of_it in found.values() for arm in of_it]
    if any(has_no_gpu(arm.beside) for arm in arms):
        notes.append("There is no GPU on this box: what a stage costs or saves on one is not known from these records.")
    table, sentence = pd.DataFrame(rows), _sentence(best, len(rows), bool(unjudged))
    return Answer(sentence, table.loc[:, (table != NOT_MEASURED).any()], (*notes, *notes_on(arms)))


def _sentence(best: Sequence[Sequence[str]], workloads_timed: int, has_unjudged: bool) -> str:
    if len(best) < workloads_timed:
        return f"No advice on time: arms that ran with fewer than three seeds are {NOT_TOLD_APART}."
    everywhere = [name for name in best[0] if all(name in others for others in best)]
    where = "" if len(best) == 1 else " in every workload here"
    if not everywhere:
        return "No arm is among the fastest in every workload here: the table has those of each."
    of_those = "Of the arms with three seeds, " if has_unjudged else ""
    if all(list(others) == everywhere[:1] for others in best):
        return f"{of_those}`{everywhere[0]}` is the fastest{where}."
    nothing = "none" if has_unjudged else "Nothing"
    return f"{of_those}{nothing} is faster than {names(everywhere)} beyond noise{where}."


def _fastest(timed: Sequence[Arm]) -> list[str]:
    """The fastest and all that are not told apart from it, of those with enough seeds to say.

    Any arm may turn out the fastest, so every two arms are one family.
    """
    judged = [arm for arm in timed if _has_enough_seeds(arm)]
    if len(judged) < 2:
        return []
    ranked = [arm.name for arm in sorted(judged, key=step_s)]
    found = differences(timed[0].beside, STEP, itertools.combinations(ranked, 2))
    slower = {name for name in ranked[1:] if found[ranked[0], name].is_told_apart}
    return [arm.name for arm in judged if arm.name not in slower]


def _has_enough_seeds(arm: Arm) -> bool:
    return arm.middle(STEP).n >= SMALLEST_SAMPLE


def _figures(timed: Sequence[Arm], fastest: Sequence[str]) -> dict[str, object]:
    places = fast_memory(timed[0].beside)
    states = [(size, arm.name) for arm in timed if not math.isnan(size := state_mib(arm, places))]
    least = min(states, default=(0.0, ""))[0]
    steps = [f"{1e3 * step_s(arm):,.1f}" for arm in timed if arm.name in fastest]
    return {
        "Fastest, or as fast for all that is known": ", ".join(fastest) or _NOT_JUDGED,
        "Step, ms": ", ".join(steps) or NOT_MEASURED,
        "Seeds to tell two arms alone 5 % apart": _seeds(timed[0].beside),
        # Counted and not measured: one run is enough.
        "Least model state": f"{', '.join(name for size, name in states if size == least)}, {least:.1f} MiB"
        if states else NOT_MEASURED,
    }  # fmt: skip


def _seeds(beside: pd.DataFrame) -> str:
    """Where they are the only two, four times in five: each further pair of a family asks for more."""
    found = noise(beside, STEP)
    needed = None if found is None else seeds_needed(math.log(1.05), found.share * math.sqrt(2))
    return "not known" if found is None else f"{needed}" if needed else "over ten thousand"


QUESTION = Question(
    name="advice",
    title="Which configuration should I use on this box?",
    answer=answer,
    nothing="Nothing can be recommended: no run with a time ended well.",
    tables={},
)
