"""What to use on this box, from what ran on it; no finer than what is known of chance."""

from __future__ import annotations

import dataclasses

import pandas as pd

from study.report.questions.cells import NOT_MEASURED, names
from study.report.questions.comparing import notes_on, workloads
from study.report.questions.question import Answer, Question
from study.report.questions.time import STEP
from study.report.records.arms import Arm, has_no_gpu, one_value, peak_gib
from study.report.records.frames import Records, real
from study.report.records.statistics import noise_floor, paired, percent, seeds_needed

# What asks for nothing beyond torch, and wins where the others are no faster.
_PLAIN = ("single", "ddp")


@dataclasses.dataclass(frozen=True)
class Advice:
    """Of one workload; `chosen` is None where nothing tells chance from a difference."""

    workload: str
    chosen: Arm | None
    # Arms that can be compared, the fastest first.
    ranked: list[Arm]
    floor: float | None

    @property
    def lead(self) -> float:
        """Of the fastest before the next, as a share of its time."""
        return _slower(self.ranked[1], self.ranked[0]) if len(self.ranked) > 1 else float("nan")


def advice_of(found: list[Arm]) -> Advice | None:
    timed = [arm for arm in found if arm.is_fair() and not pd.isna(arm.median(STEP))]
    if not timed:
        return None
    ranked = sorted(timed, key=lambda arm: arm.median(STEP))
    floor = noise_floor(found[0].beside, STEP).share
    chosen = None
    if floor is not None:
        as_fast = [arm for arm in ranked if _slower(arm, ranked[0]) <= floor]
        chosen = next((arm for arm in as_fast if one_value(arm.runs["strategy"]) in _PLAIN), ranked[0])
    return Advice(found[0].workload, chosen, ranked, floor)


def _slower(arm: Arm, fastest: Arm) -> float:
    return arm.median(STEP) / fastest.median(STEP) - 1


def answer(records: Records) -> Answer | None:
    runs = real(records).runs
    # A profiled run tells where time goes; nobody should train so.
    records = dataclasses.replace(records, runs=runs[~runs["profile_steps"].fillna(0).gt(0)])
    found = workloads(records)
    given = [advice for arms in found.values() if (advice := advice_of(arms)) is not None]
    if not given:
        return None
    sure = [advice.chosen.name for advice in given if advice.chosen is not None]
    fastest = names([advice.ranked[0].name for advice in given])
    if len(sure) < len(given):
        sentence = f"Fastest: {fastest}; but with one run each differences are not judged."
    else:
        sentence = f"{names(sure)}: the plainest of those that no arm beats by more than like runs differ."
    arms = [arm for each in found.values() for arm in each]
    notes = ["For this model, batch and length; one that does not fit may turn the order around."]
    if any(has_no_gpu(arm.beside) for arm in arms):
        notes.append("There is no GPU on this box: what a stage costs or saves on one is not known from these records.")
    return Answer(sentence, _table(given), (*notes, *notes_on(arms)))


def _table(given: list[Advice]) -> pd.DataFrame:
    table = pd.DataFrame([_row(advice) for advice in given])
    return table.loc[:, (table != NOT_MEASURED).any()]


def _row(advice: Advice) -> dict[str, object]:
    fastest = advice.ranked[0]
    peaks = [(peak, arm.name) for arm in advice.ranked if not pd.isna(peak := peak_gib(arm)[0])]
    lowest, leanest = min(peaks, default=(float("nan"), "-"))
    return {
        "Workload": advice.workload,
        "Use": advice.chosen.name if advice.chosen else "not judged",
        "Fastest": f"{fastest.name}, {1e3 * fastest.median(STEP):,.1f} ms (n = {len(fastest.ended)})",
        "Ahead by": "-" if pd.isna(advice.lead) else percent(advice.lead),
        "Like runs differ by": "not known" if advice.floor is None else percent(advice.floor),
        "Pairs to be sure": _pairs(advice),
        "Lowest peak": f"{leanest}, {lowest:.2f} GiB" if peaks else "-",
    }


def _pairs(advice: Advice) -> str:
    """With which the lead of the fastest would be seen four times in five."""
    if advice.floor is None or not advice.lead > 0:
        return "-"
    first, second = advice.ranked[:2]
    pairs = paired(first.beside, STEP, second.name, first.name)
    spread = float((pairs["value"] / pairs["baseline"]).std()) if len(pairs) > 1 else 0.0
    needed = seeds_needed(advice.lead, spread or advice.floor)
    return f"{needed}" if needed else "over ten thousand"


QUESTION = Question(
    name="advice",
    title="Which configuration should I use on this box?",
    answer=answer,
    nothing="Nothing can be recommended: no run with a time ended well.",
    tables={},
)
