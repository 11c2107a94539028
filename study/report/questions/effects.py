"""Question 1 for one workload: what each arm did to loss, memory, traffic and time, in sentences."""

from __future__ import annotations

import dataclasses

import pandas as pd

from study.report.questions.scaling_tables import same_stage
from study.report.records.arms import MIB, Arm, has_no_gpu, one_value, peak_gib, state_bytes, state_mib
from study.report.records.statistics import paired_ratio, percent
from study.report.records.workloads import BASELINES


def compared(found: list[Arm], confound: str = "confounded") -> list[Arm]:
    """The arms that ended well and break no invariant, but the baseline."""
    return [arm for arm in found if arm.baseline is not None and not arm.is_baseline and arm.is_fair(confound)]


def reference(found: list[Arm]) -> Arm | None:
    """What state, traffic and time are held against: DDP on the most ranks it ran on, else the baseline."""
    ended = [arm for arm in found if len(arm.ended)]
    ddp = [arm for arm in ended if arm.name.split(" ")[0] == "ddp" and ", " not in arm.name]
    chosen = sorted(ddp, key=_ranks, reverse=True) or [arm for arm in ended if arm.is_baseline]
    return chosen[0] if chosen else None


def plain_reference(found: list[Arm]) -> Arm | None:
    """The same, where it is training without ZeRO."""
    base = reference(found)
    return base if base is not None and one_value(base.ended["strategy"]) in BASELINES else None


def _ranks(arm: Arm) -> int:
    return int(one_value(arm.ended["world_size"]))


def headline(found: list[Arm]) -> str:
    """The stages and the offload in two sentences."""
    base = reference(found)
    if base is None:
        return ""
    stages = [arm for arm in compared_with(base, found) if one_value(arm.ended["zero_stage"]) and not moves_state(arm)]
    said = []
    for name, share, unit in (
        ("hold", lambda arm: 100 * state_mib(arm) / state_mib(base), f"% of the model state of `{base.name}`"),
        ("send", lambda arm: _times(arm, base, "comm_bytes_per_step"), "times its bytes"),
        ("take", lambda arm: _times(arm, base, "step_time_s_median"), "times its step time"),
    ):
        shares = [share(arm) for arm in stages]
        if shares and not any(map(pd.isna, shares)):
            digits = 0 if name == "hold" else 2
            said.append(f"{name} {listed([f'{value:.{digits}f}' for value in shares])} {unit}")
    sentences = []
    if said:
        names = listed([f"`{arm.name}`" for arm in stages])
        if len(stages) == 1:
            said = [told.replace(" ", "s ", 1) for told in said]
        sentences.append(f"{names} {listed(said)} (n = {min(len(arm.ended) for arm in stages)} each).")
    offloads = [change for arm in compared(found) if (change := offload_change(arm)) is not None]
    if offloads:
        freed, slower = ([getattr(change, key) for change in offloads] for key in ("freed", "slower"))
        names = listed([f"`{change.arm}`" for change in offloads])
        where = ", which is the same memory as the host's on this box," if has_no_gpu(base.beside) else ""
        sentences.append(
            f"Moving state off the device ({names}) frees {_span(freed)} of the state there{where} and changes the step"
            f" time by {_span(slower, signed=True)}."
        )
    return " ".join(sentences)


def _times(arm: Arm, base: Arm, figure: str) -> float:
    whole = base.median(figure)
    return arm.median(figure) / whole if whole > 0 else float("nan")


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _span(shares: list[float], signed: bool = False) -> str:
    low, high = (percent(edge, signed) for edge in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def memory_sentences(found: list[Arm]) -> list[str]:
    base = reference(found)
    ended = [arm for arm in found if len(arm.ended)]
    if base is None or pd.isna(state_mib(base)):
        return []
    whole, device = state_mib(base), state_bytes(base.ended, ("device",))
    others = [arm for arm in compared_with(base, ended) if not pd.isna(state_mib(arm))]
    shares = ", ".join(
        f"`{arm.name}` {state_mib(arm) / whole:.0%}"
        + (f" ({state_bytes(arm.ended, ('device',)) / device:.0%} on the device)" if moves_state(arm) else "")
        for arm in others
    )
    sentences = []
    if shares:
        sentences.append(f"model state of the fullest rank, `{base.name}` = 100 % ({whole:,.1f} MiB): {shares}.")
    peaks = [(peak_gib(arm), arm) for arm in ended if not pd.isna(peak_gib(arm)[0])]
    if peaks:
        (low, what), least = min(peaks, key=lambda entry: entry[0][0])
        (high, _), most = max(peaks, key=lambda entry: entry[0][0])
        (own, _) = peak_gib(base)
        sentence = (
            f"the peak of the {what} is lowest under `{least.name}` ({low:.2f} GiB) and highest under `{most.name}`"
            f" ({high:.2f} GiB){'' if base in (least, most) else f'; `{base.name}` took {own:.2f} GiB'}."
        )
        higher = [arm.name for (peak, _), arm in peaks if peak > own and state_mib(arm) < 0.99 * whole]
        if higher:
            names = ", ".join(f"`{name}`" for name in higher)
            sentence += f" Less state did not mean a lower peak: {names} held less and peaked higher."
        sentences.append(sentence)
    return sentences


def moves_state(arm: Arm) -> bool:
    return any(one_value(arm.ended[f"offload_{what}"]) for what in ("optimizer", "param"))


def compared_with(base: Arm, found: list[Arm]) -> list[Arm]:
    """The others on as many ranks without a broken invariant."""
    ranks = one_value(base.ended["world_size"])
    others = [arm for arm in found if arm.name != base.name and arm.is_fair()]
    return [arm for arm in others if one_value(arm.ended["world_size"]) == ranks]


def traffic_sentence(found: list[Arm]) -> str:
    base = reference(found)
    ended = [arm for arm in found if len(arm.ended)]
    if base is None or not base.median("comm_bytes_per_step") > 0:
        return ""
    sent = base.median("comm_bytes_per_step")
    groups: dict[str, list[str]] = {}
    for arm in compared_with(base, ended):
        if not pd.isna(arm.median("comm_bytes_per_step")):
            groups.setdefault(f"{arm.median('comm_bytes_per_step') / sent:.1f}", []).append(f"`{arm.name}`")
    told = "; ".join(f"{multiple}x: {', '.join(names)}" for multiple, names in sorted(groups.items(), key=_by_multiple))
    return f"one step sends {sent / MIB:,.1f} MiB per rank under `{base.name}`; beside it {told}." if told else ""


def _by_multiple(item: tuple[str, list[str]]) -> float:
    return float(item[0])


def time_sentence(found: list[Arm]) -> str:
    base = reference(found)
    if base is None or pd.isna(base.median("step_time_s_median")):
        return ""
    said = []
    single = next((arm for arm in found if arm.name == "single" and len(arm.ended)), None)
    beside = compared_with(base, found)
    known = {arm.name for arm in (base, *beside)}
    for arm in [*([single] if single and single.name not in known else []), *beside]:
        if not len(arm.ended):
            continue
        ratio = paired_ratio(arm.beside, "step_time_s_median", arm.name, base.name)
        if ratio.n:
            bounds = "" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
            said.append((ratio.center, f"`{arm.name}` {ratio.center:.2f}x{bounds}"))
    if not said:
        return ""
    n = len(base.ended)
    told = ", ".join(text for _, text in sorted(said))
    step_ms = 1e3 * base.median("step_time_s_median")
    return f"a step takes {step_ms:,.1f} ms under `{base.name}` (n = {n}); beside it {told}."


@dataclasses.dataclass(frozen=True)
class OffloadChange:
    """What an arm that moves state off the device does beside the same stage that keeps it there; shares."""

    arm: str
    plain: str
    freed: float
    slower: float
    n: int


def offload_change(arm: Arm) -> OffloadChange | None:
    if not moves_state(arm) or (plain := same_stage(arm)) is None:
        return None
    ratio = paired_ratio(arm.beside, "step_time_s_median", arm.name, plain)
    kept = arm.beside[(arm.beside["arm"] == plain) & (arm.beside["status_state"] == "ok")]
    freed = 1 - state_bytes(arm.ended, ("device",)) / state_bytes(kept, ("device",))
    if not ratio.n or pd.isna(freed):
        return None
    return OffloadChange(arm.name, plain, freed, ratio.center - 1, ratio.n)


def offload_sentences(found: list[Arm]) -> list[str]:
    changes = [change for arm in compared(found) if (change := offload_change(arm)) is not None]
    if not changes:
        return []
    told = "; ".join(
        f"`{change.arm}` frees {change.freed:.0%} of the device state of `{change.plain}`, step time"
        f" {percent(change.slower, signed=True)} (n = {change.n})"
        for change in changes
    )
    note = ""
    if has_no_gpu(found[0].beside):
        note = " There is no GPU here, so device and host are the same memory: this frees nothing on this box."
    return [f"offload: {told}.{note}"]
