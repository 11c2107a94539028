"""What to use on this box, from what ran on it; no finer than what is known of chance."""

from __future__ import annotations

import dataclasses

import pandas as pd

from study.report.questions.cells import NOT_MEASURED, known, names
from study.report.questions.comparing import notes_on, workloads
from study.report.questions.question import Answer, Question
from study.report.questions.time import STEP
from study.report.records.arms import NAN, Arm, has_no_gpu, one_value, peak_gib
from study.report.records.frames import Records, real
from study.report.records.statistics import noise_floor, paired, percent, seeds_needed

# What asks for nothing beyond torch, and wins where the others are no faster.
_PLAIN = ("single", "ddp")


def answer(records: Records) -> Answer | None:
    runs = real(records).runs
    # A profiled run tells where time goes; nobody should train so.
    found = workloads(dataclasses.replace(records, runs=runs[~runs["profile_steps"].fillna(0).gt(0)]))
    rows, fastest, sure = [], [], []
    for workload, of_it in found.items():
        timed = [arm for arm in of_it if arm.is_fair() and not pd.isna(arm.median(STEP))]
        if timed:
            ranked = sorted(timed, key=lambda arm: arm.median(STEP))
            floor = noise_floor(of_it[0].beside, STEP).share
            use = "not judged" if floor is None else _plainest(ranked, floor)
            rows.append({"Workload": workload, "Use": use, **_figures(ranked, floor)})
            fastest.append(ranked[0].name)
            sure += [] if floor is None else [use]
    if not rows:
        return None
    sentence = f"{names(sure)}: the plainest of those that no arm beats by more than like runs differ." if sure else ""
    if len(sure) < len(rows):
        sentence = f"Fastest: {names(fastest)}; but with one run each differences are not judged."
    notes = ["For this model, batch and length; one that does not fit may turn the order around."]
    arms = [arm for of_it in found.values() for arm in of_it]
    if any(has_no_gpu(arm.beside) for arm in arms):
        notes.append("There is no GPU on this box: what a stage costs or saves on one is not known from these records.")
    table = pd.DataFrame(rows)
    return Answer(sentence, table.loc[:, (table != NOT_MEASURED).any()], (*notes, *notes_on(arms)))


def _slower(arm: Arm, fastest: Arm) -> float:
    return arm.median(STEP) / fastest.median(STEP) - 1


def _plainest(ranked: list[Arm], floor: float) -> str:
    """Of those that are as fast as the fastest, where a difference up to the floor may be chance."""
    as_fast = [arm for arm in ranked if _slower(arm, ranked[0]) <= floor]
    return next((arm for arm in as_fast if one_value(arm.runs["strategy"]) in _PLAIN), ranked[0]).name


def _figures(ranked: list[Arm], floor: float | None) -> dict[str, object]:
    first, lead = ranked[0], _slower(ranked[1], ranked[0]) if len(ranked) > 1 else NAN
    peaks = [(peak, arm.name) for arm in ranked if not pd.isna(peak := peak_gib(arm)[0])]
    return {
        "Fastest": f"{first.name}, {1e3 * first.median(STEP):,.1f} ms (n = {len(first.ended)})",
        "Ahead by": known(lead, percent),
        "Like runs differ by": "not known" if floor is None else percent(floor),
        "Pairs to be sure": NOT_MEASURED if floor is None or not lead > 0 else _pairs(ranked, lead, floor),
        "Lowest peak": "{1}, {0:.2f} GiB".format(*min(peaks)) if peaks else NOT_MEASURED,
    }


def _pairs(ranked: list[Arm], lead: float, floor: float) -> str:
    """With which the lead of the fastest would be seen four times in five."""
    pairs = paired(ranked[0].beside, STEP, ranked[1].name, ranked[0].name)
    spread = float((pairs["value"] / pairs["baseline"]).std()) if len(pairs) > 1 else 0.0
    needed = seeds_needed(lead, spread or floor)
    return f"{needed}" if needed else "over ten thousand"


QUESTION = Question(
    name="advice",
    title="Which configuration should I use on this box?",
    answer=answer,
    nothing="Nothing can be recommended: no run with a time ended well.",
    tables={},
)
