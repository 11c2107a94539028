"""Which arm is held against which, and the small table in which arms of several workloads stand side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pandas as pd

from study.records.arms import Arm, Row, arms, comparable, frame, moves_state, one_value, same_stage
from study.records.frames import Records, real
from study.records.statistics import NOT_TOLD_APART, SMALLEST_SAMPLE, Difference, by_seed, differences, noise, percent
from study.records.workloads import BASELINES, strategy_order
from study.report.questions.question import NOT_MEASURED, Answer, cell_text, known, names

# So many workloads stand side by side on the first screen, and so many notes below them.
_MOST_WORKLOADS, _MOST_NOTES = 2, 6
_CONFOUNDED = " †"
UNSURE = "~ "
Workloads = Mapping[str, Sequence[Arm]]
# What a column says of an arm, by its heading.
Columns = Mapping[str, Callable[[Arm], str | float]]


def real_arms(records: Records) -> Iterator[Arm]:
    """Those that trained on devices that were there."""
    return arms(real(records).runs)


def workloads(records: Records) -> dict[str, list[Arm]]:
    """The arms of each workload in which a run ended well."""
    grouped: dict[str, list[Arm]] = {}
    for arm in real_arms(records):
        grouped.setdefault(arm.workload, []).append(arm)
    return {workload: found for workload, found in grouped.items() if any(len(arm.ended) for arm in found)}


def compared(found: Iterable[Arm], confound: str = "confounded") -> list[Arm]:
    """The arms that ended well and break no invariant, but the baseline."""
    return [arm for arm in found if arm.baseline is not None and not arm.is_baseline and arm.is_fair(confound)]


def reference(found: Sequence[Arm]) -> Arm | None:
    """What state, traffic and time are held against: DDP on the most ranks it ran on, if it breaks no invariant, else
    the baseline."""
    ddp = [arm for arm in found if arm.name.split(" ")[0] == "ddp" and ", " not in arm.name and arm.is_fair()]
    return max(ddp, key=ranks, default=next((arm for arm in found if arm.is_baseline and len(arm.ended)), None))


def trains_plainly(arm: Arm) -> bool:
    return one_value(arm.runs["strategy"]) in BASELINES


def ranks(arm: Arm) -> int:
    return int(one_value(arm.runs["world_size"]) or 0)


@dataclasses.dataclass(frozen=True)
class BesideReference:
    """The workloads whose reference has a figure, and how many times it the sharding arms have."""

    workloads: dict[str, list[Arm]]
    bases: dict[str, Arm]
    figure: Callable[[Arm], float]
    # Under a plain training it is the same on any number of ranks, as a rank's state is.
    on_any_ranks: bool = False

    @property
    def sharding(self) -> list[Arm]:
        """None that breaks an invariant, or moves its state off the device."""
        return [
            arm for workload, base in self.bases.items() for arm in self.workloads[workload]
            if arm.name != base.name and arm.is_fair() and not moves_state(arm) and not trains_plainly(arm)
            and (ranks(arm) == ranks(base) or (self.on_any_ranks and trains_plainly(base)))
        ]  # fmt: skip

    def ratio(self, arm: Arm) -> float:
        return self.figure(arm) / self.figure(self.bases[arm.workload])

    @property
    def ratios(self) -> list[tuple[float, Arm]]:
        """From the smallest to the largest, each with its arm."""
        found = [(ratio, arm) for arm in self.sharding if not pd.isna(ratio := self.ratio(arm))]
        return sorted(found, key=lambda entry: (entry[0], entry[1].name))

    @property
    def names(self) -> str:
        return names([base.name for base in self.bases.values()])

    @property
    def plain_names(self) -> str:
        return self.names.replace("`", "")

    def cell(self, form: Callable[[float], str]) -> Callable[[Arm], str]:
        return lambda arm: known(self.ratio(arm), form)

    def answer(self, sentence: str, what: str, columns: Columns, *notes: str) -> Answer:
        sentence = sentence or f"No sharding arm here can be compared with {self.names} in {what}."
        return side_by_side(sentence, first_screen(self.workloads), columns, *notes)


def beside_reference(
    records: Records, figure: Callable[[Arm], float], on_any_ranks: bool = False
) -> BesideReference | None:
    """None where no reference has the figure."""
    found = workloads(records)
    bases = {workload: base for workload, arms in found.items() if (base := reference(arms)) and figure(base) > 0}
    if not bases:
        return None
    return BesideReference({workload: found[workload] for workload in bases}, bases, figure, on_any_ranks)


class Comparison:
    """One figure of each arm beside another arm's, and whether the two are told apart; each workload is a family."""

    def __init__(self, found: Workloads, figure: str, base_of: Callable[[Arm], str | None]):
        self._base_of = base_of
        self._differences: dict[tuple[str, str], Difference] = {}
        for workload, of_it in found.items():
            bases = {
                arm.name: base for arm in of_it if len(arm.ended) and (base := base_of(arm)) not in (None, arm.name)
            }
            of_pairs = differences(of_it[0].beside, figure, bases.items()) if bases else {}
            self._differences |= {(workload, name): found for (name, _), found in of_pairs.items()}

    def of(self, arm: Arm) -> Difference | None:
        return self._differences.get((arm.workload, arm.name))

    def apart(self, arms: Iterable[Arm]) -> list[tuple[float, Arm]]:
        """The ratios of those whose difference survives noise, from the smallest on."""
        judged = [
            (difference.ratio.center, arm) for arm in arms if (difference := self.of(arm)) and difference.is_told_apart
        ]
        return sorted(judged, key=lambda entry: entry[0])

    def cell(self, form: Callable[[float], str]) -> Callable[[Arm], str]:
        """With its interval, and a sign before what is not told apart from noise."""

        def said(arm: Arm) -> str:
            difference = self.of(arm)
            if difference is None:
                return form(1.0) if arm.name == self._base_of(arm) else NOT_MEASURED
            if not difference.ratio.n:
                return NOT_MEASURED
            return (UNSURE if difference.is_unsure else "") + difference.ratio.brief(form)

        return said

    @property
    def notes(self) -> tuple[str, ...]:
        unsure = any(difference.is_unsure for difference in self._differences.values())
        return (f"{UNSURE.strip()}: {NOT_TOLD_APART}.",) if unsure else ()


def noise_notes(found: Workloads, figure: str) -> tuple[str, ...]:
    """How far like runs differ, and what cannot be seen for it; once where all workloads say the same."""
    said: dict[str, list[str]] = {}
    for workload, of_it in found.items():
        said.setdefault(noise_words(of_it, figure), []).append(workload)
    return tuple(words if len(said) == 1 else f"{', '.join(of)}: {words}" for words, of in said.items())


def noise_words(of_it: Sequence[Arm], figure: str) -> str:
    runs = of_it[0].beside
    floor, seeds = noise(runs, figure), by_seed(runs, figure).count()
    if floor is None:
        return "One run of each arm: how far like runs differ is not known, so no difference in time is named."
    words = f"Like runs differ by {percent(floor.share)} (standard deviation, {floor.df} degrees of freedom)."
    samples, tested = (
        int(seeds.max()),
        sum(arm.is_fair() and seeds.get(arm.name, 0) >= SMALLEST_SAMPLE for arm in of_it),
    )
    smallest = floor.resolves(samples, tested - 1)
    if smallest is None:
        return f"{words} Fewer than three seeds tell no arms apart."
    return f"{words} With {samples} seeds a difference below {percent(smallest)} is missed more often than not."


def first_screen(found: Workloads) -> dict[str, list[Arm]]:
    """Without the arms whose offload is held against their own stage, which is a question of its own."""
    return {
        workload: [arm for arm in arms if not (moves_state(arm) and len(arm.ended) and same_stage(arm))]
        for workload, arms in found.items()
    }


def table_of(found: Iterable[Arm], figures: Callable[[Arm], Row], confound: str = "confounded") -> pd.DataFrame:
    """A row for each arm."""
    return frame(arm.row(figures(arm), confound) for arm in found)


def by_arms(found: Workloads) -> list[str]:
    """The workloads, that with most arms first."""
    return sorted(found, key=lambda workload: -len(found[workload]))


def side_by_side(sentence: str, found: Workloads, columns: Columns, *notes: str) -> Answer:
    """One row per arm, one column per figure and workload; and why some cells are no fair comparison or have no value.

    Of many workloads those with most arms.
    """
    chosen = by_arms(found)[:_MOST_WORKLOADS]
    shown = [arm for workload in chosen for arm in found[workload]]
    every = {arm.name: strategy_order(one_value(arm.runs["strategy"])) for arm in shown}
    order = sorted(every, key=lambda name: every[name])
    cells = {("", "Arm"): order}
    for workload in chosen:
        for heading, value in columns.items():
            said = {arm.name: _cell(arm, value, heading == next(iter(columns))) for arm in found[workload]}
            cells[workload, heading] = [said.get(name, NOT_MEASURED) for name in order]
    table = pd.DataFrame(cells)
    if len(chosen) == 1:
        table.columns = table.columns.droplevel(0)
    notes = (*notes, *notes_on(shown))
    if more := len(found) - len(chosen):
        notes = (*notes, f"In the details: {more} more of the workloads.")
    return Answer(sentence, table, notes)


def _cell(arm: Arm, value: Callable[[Arm], str | float], is_first: bool) -> str:
    if not len(arm.ended):
        return str(one_value(arm.runs["status_state"])) if is_first else NOT_MEASURED
    text = cell_text(value(arm))
    return text if arm.is_fair() or text == NOT_MEASURED else text + _CONFOUNDED


def notes_on(found: Iterable[Arm], confound: str = "confounded") -> tuple[str, ...]:
    """What breaks a comparison, and what did not end well: each reason once, with its arms."""
    reasons: dict[str, dict[str, None]] = {}
    for arm in found:
        if len(arm.ended) and not arm.is_fair(confound):
            said = comparable(arm.ended, arm.baseline, confound)
            reasons.setdefault(f"not a fair comparison{_CONFOUNDED}, {said}", {})[arm.name] = None
        lost = arm.runs[arm.runs["status_state"] != "ok"]
        for state, reason in zip(lost["status_state"], lost["status_reason"], strict=True):
            ended = f"ended {state}{f', {reason}' if isinstance(reason, str) and reason else ''}"
            reasons.setdefault(ended, {})[arm.name] = None
    notes = [f"{', '.join(f'`{name}`' for name in of_arms)}: {reason}." for reason, of_arms in reasons.items()]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"In the details: {len(notes) - _MOST_NOTES} more of these notes."]
    return tuple(notes)
