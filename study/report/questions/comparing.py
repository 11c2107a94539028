"""Which arm is held against which, and the small table in which arms of several workloads stand side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from study.report.questions.cells import NOT_MEASURED, cell_text, known, names
from study.report.records.arms import NAN, Arm, Row, arms, comparable, frame, one_value, state_bytes
from study.report.records.frames import Records, real
from study.report.records.statistics import noise_floor, paired_ratio, percent
from study.report.records.workloads import BASELINES, strategy_order

# So many workloads stand side by side on the first screen, and so many notes below them.
_MOST_WORKLOADS, _MOST_NOTES = 2, 6
_CONFOUNDED = " †"
Workloads = Mapping[str, Sequence[Arm]]
# Of an arm and the one that it is held against.
Ratio = Callable[[Arm, Arm], float]
# What a column says of an arm, by its heading.
Columns = Mapping[str, Callable[[Arm], str | float]]


def workloads(records: Records) -> dict[str, list[Arm]]:
    """The arms of each workload in which a run ended well."""
    grouped: dict[str, list[Arm]] = {}
    for arm in arms(real(records).runs):
        grouped.setdefault(arm.workload, []).append(arm)
    return {workload: found for workload, found in grouped.items() if any(len(arm.ended) for arm in found)}


def compared(found: Iterable[Arm], confound: str = "confounded") -> list[Arm]:
    """The arms that ended well and break no invariant, but the baseline."""
    return [arm for arm in found if arm.baseline is not None and not arm.is_baseline and arm.is_fair(confound)]


def reference(found: Sequence[Arm]) -> Arm | None:
    """What state, traffic and time are held against: DDP on the most ranks it ran on, else the baseline."""
    ended = [arm for arm in found if len(arm.ended)]
    ddp = [arm for arm in ended if arm.name.split(" ")[0] == "ddp" and ", " not in arm.name]
    chosen = sorted(ddp, key=ranks, reverse=True) or [arm for arm in ended if arm.is_baseline]
    return chosen[0] if chosen else None


def plain_reference(found: Sequence[Arm]) -> Arm | None:
    """The same, where it is training without ZeRO."""
    base = reference(found)
    return base if base is not None and one_value(base.ended["strategy"]) in BASELINES else None


def compared_with(base: Arm, found: Iterable[Arm]) -> list[Arm]:
    """The others on as many ranks without a broken invariant."""
    return [arm for arm in found if arm.name != base.name and arm.is_fair() and ranks(arm) == ranks(base)]


def sharding(base: Arm, found: Iterable[Arm]) -> list[Arm]:
    """Of these the ones that shard state and keep it on the device."""
    return [
        arm
        for arm in compared_with(base, found)
        if not moves_state(arm) and one_value(arm.ended["strategy"]) not in BASELINES
    ]


def first_screen(found: Workloads) -> dict[str, list[Arm]]:
    """Without the arms whose offload is held against their own stage, which is a question of its own."""
    return {
        workload: [arm for arm in arms if not (moves_state(arm) and len(arm.ended) and same_stage(arm))]
        for workload, arms in found.items()
    }


def ranks(arm: Arm) -> int:
    return int(one_value(arm.ended["world_size"]))


def moves_state(arm: Arm) -> bool:
    return any(one_value(arm.runs[f"offload_{what}"]) for what in ("optimizer", "param"))


def same_stage(arm: Arm) -> str | None:
    """The arm of the same stage and ranks that keeps its state on the device."""
    stage, world = one_value(arm.runs["zero_stage"]), one_value(arm.runs["world_size"])
    beside = arm.beside
    plain = beside[
        (beside["zero_stage"] == stage) & (beside["world_size"] == world) & (beside["status_state"] == "ok")
        & beside["offload_optimizer"].isna() & beside["offload_param"].isna()
    ] if stage is not None else beside.iloc[:0]  # fmt: skip
    return None if plain.empty else str(plain["arm"].iloc[0])


def freed_share(arm: Arm, kept: str) -> float:
    """Of the model state that `kept` holds on the device, what this arm does not."""
    its = arm.beside[(arm.beside["arm"] == kept) & (arm.beside["status_state"] == "ok")]
    whole = state_bytes(its, ("device",))
    return 1 - state_bytes(arm.ended, ("device",)) / whole if whole > 0 else NAN


@dataclasses.dataclass(frozen=True)
class BesideReference:
    """The workloads whose reference has a figure, and how many times it the sharding arms have."""

    workloads: dict[str, list[Arm]]
    bases: dict[str, Arm]
    ratio: Ratio

    @property
    def ratios(self) -> list[tuple[float, str]]:
        """From the smallest to the largest, each with its arm."""
        of_arms = [
            (self.ratio(arm, base), arm.name)
            for workload, base in self.bases.items()
            for arm in sharding(base, self.workloads[workload])
        ]
        return sorted(entry for entry in of_arms if not pd.isna(entry[0]))

    @property
    def names(self) -> str:
        return names([base.name for base in self.bases.values()])

    def cell(self, form: Callable[[float], str]) -> Callable[[Arm], str]:
        return lambda arm: known(self.ratio(arm, self.bases[arm.workload]), form)


def beside_reference(
    records: Records, figure: Callable[[Arm], float], ratio: Ratio | None = None
) -> BesideReference | None:
    """None where no reference has the figure."""
    found = workloads(records)
    bases = {workload: base for workload, arms in found.items() if (base := reference(arms)) and figure(base) > 0}
    of_medians: Ratio = lambda arm, base: figure(arm) / figure(base)  # noqa: E731
    chosen = {workload: found[workload] for workload in bases}
    return BesideReference(chosen, bases, ratio or of_medians) if bases else None


def paired_times(figure: str) -> Ratio:
    """Each run beside its own partner; NaN without one."""

    def ratio(arm: Arm, base: Arm) -> float:
        return 1.0 if arm.name == base.name else paired_ratio(arm.beside, figure, arm.name, base.name).center

    return ratio


def table_of(runs: pd.DataFrame, figures: Callable[[Arm], Row], confound: str = "confounded") -> pd.DataFrame:
    """A row for each arm."""
    return frame(arm.row(figures(arm), confound) for arm in arms(runs))


def certainty(found: Iterable[Sequence[Arm]], figure: str) -> str:
    """How much of a difference may be chance, at the end of a sentence."""
    floors = [noise_floor(each[0].beside, figure).share for each in found]
    measured = [floor for floor in floors if floor is not None]
    if not measured:
        return "one run each: differences are not judged"
    once = ", and where arms ran once differences are not judged" if len(measured) < len(floors) else ""
    return f"like runs differ by up to {percent(max(measured))}{once}"


def side_by_side(
    found: Workloads, columns: Columns, confound: str = "confounded",
) -> tuple[pd.DataFrame, tuple[str, ...]]:  # fmt: skip
    """One row per arm, one column per figure and workload; and why some cells are no fair comparison or have no value.

    Of many workloads those with most arms.
    """
    chosen = sorted(found, key=lambda workload: -len(found[workload]))[:_MOST_WORKLOADS]
    by_name = {workload: {arm.name: arm for arm in found[workload]} for workload in chosen}
    every = {arm.name: one_value(arm.runs["strategy"]) for workload in chosen for arm in found[workload]}
    table: dict[tuple[str, str], list[str]] = {("", "Arm"): sorted(every, key=lambda name: strategy_order(every[name]))}
    for workload in chosen:
        for place, (heading, value) in enumerate(columns.items()):
            table[workload, heading] = [
                _cell(by_name[workload].get(name), value, place == 0, confound) for name in table["", "Arm"]
            ]
    frame = pd.DataFrame(table)
    if len(chosen) == 1:
        frame.columns = [heading for _, heading in frame.columns]
    notes = notes_on([arm for workload in chosen for arm in found[workload]], confound)
    if len(found) > len(chosen):
        notes = (*notes, f"{len(found) - len(chosen)} more workloads are in the details.")
    return frame, notes


def _cell(arm: Arm | None, value: Callable[[Arm], Any], is_first: bool, confound: str) -> str:
    if arm is None:
        return NOT_MEASURED
    if not len(arm.ended):
        return str(one_value(arm.runs["status_state"])) if is_first else NOT_MEASURED
    text = cell_text(value(arm))
    return text if arm.is_fair(confound) or text == NOT_MEASURED else text + _CONFOUNDED


def notes_on(found: Iterable[Arm], confound: str = "confounded") -> tuple[str, ...]:
    """What breaks a comparison, and what did not end well: each reason once, with its arms."""
    reasons: dict[str, dict[str, None]] = {}
    for arm in found:
        if len(arm.ended) and not arm.is_fair(confound):
            said = comparable(arm.ended, arm.baseline, confound)
            reasons.setdefault(f"not a fair comparison{_CONFOUNDED}, {said}", {})[arm.name] = None
        for (state, reason), _ in arm.runs[arm.runs["status_state"] != "ok"].groupby(
            ["status_state", "status_reason"], dropna=False
        ):
            reasons.setdefault(f"ended {state}{f', {reason}' if isinstance(reason, str) and reason else ''}", {})[
                arm.name
            ] = None
    notes = [f"{', '.join(f'`{name}`' for name in of_arms)}: {reason}." for reason, of_arms in reasons.items()]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES} more such notes are in the details."]
    return tuple(notes)
