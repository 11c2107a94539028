"""Question 3 for one workload: what to use on this box, from what ran on it, and what that does not tell."""

from __future__ import annotations

import pandas as pd

from study.report.records.arms import Arm, has_no_gpu, one_value, peak_gib, state_bytes
from study.report.records.statistics import NoiseFloor, noise_floor, paired, paired_ratio, percent, seeds_needed

# What asks for nothing beyond torch, and wins where the others are no faster.
_PLAIN = ("single", "ddp")


def recommendation(found: list[Arm]) -> str:
    ranked = by_time(found)
    if not ranked:
        return "no arm that ended well can be compared in time, so none is recommended."
    floor = noise_floor(found[0].beside, "step_time_s_median")
    fastest = ranked[0]
    chosen = next((arm for arm in ranked if _strategy(arm) in _PLAIN and _as_fast(arm, fastest, floor)), fastest)
    step_ms = 1e3 * chosen.median("step_time_s_median")
    peak, what = peak_gib(chosen)
    memory = "" if pd.isna(peak) else f" with a peak of {peak:.2f} GiB of the {what}"
    told = f"use `{chosen.name}`: {step_ms:,.1f} ms a step{memory} (n = {len(chosen.ended)})"
    leaner = _leaner(chosen, ranked)
    return " ".join([f"{told}, {_sureness(chosen, ranked, floor)}", *leaner])


def by_time(found: list[Arm]) -> list[Arm]:
    timed = [arm for arm in found if arm.is_fair() and not pd.isna(arm.median("step_time_s_median"))]
    return sorted(timed, key=lambda arm: arm.median("step_time_s_median"))


def _strategy(arm: Arm) -> str:
    return str(one_value(arm.runs["strategy"]))


def _as_fast(arm: Arm, fastest: Arm, floor: NoiseFloor) -> bool:
    slower = arm.median("step_time_s_median") / fastest.median("step_time_s_median") - 1
    return slower <= (floor.share or 0.0)


def _leaner(chosen: Arm, ranked: list[Arm]) -> list[str]:
    """What to turn to where memory is short: the lowest peak, and the least state on the device."""
    said = []
    peaks = [arm for arm in ranked if not pd.isna(peak_gib(arm)[0])]
    if peaks and (least := min(peaks, key=lambda arm: peak_gib(arm)[0])) is not chosen:
        peak, what = peak_gib(least)
        said.append(f"`{least.name}` has the lowest peak of the {what} ({peak:.2f} GiB), {_cost(least, chosen)}.")
    own = state_bytes(chosen.ended, ("device",))
    if has_no_gpu(chosen.beside) or not own > 0:
        return said
    held = [arm for arm in ranked if not pd.isna(state_bytes(arm.ended, ("device",)))]
    lean = min(held, key=lambda arm: (state_bytes(arm.ended, ("device",)), arm.median("step_time_s_median")))
    share = state_bytes(lean.ended, ("device",)) / own
    if lean is not chosen and share < 1:
        said.append(f"`{lean.name}` keeps the least state on the device ({share:.0%} of it), {_cost(lean, chosen)}.")
    return said


def _cost(arm: Arm, chosen: Arm) -> str:
    ratio = paired_ratio(arm.beside, "step_time_s_median", arm.name, chosen.name)
    if not ratio.n:
        return "at a time that no pair of runs tells"
    return f"at {ratio.center:.2f} times the step time"


def _sureness(chosen: Arm, ranked: list[Arm], floor: NoiseFloor) -> str:
    rivals = [arm for arm in ranked if arm is not chosen]
    if not rivals:
        return "and nothing else ran beside it."
    lead = rivals[0].median("step_time_s_median") / chosen.median("step_time_s_median") - 1
    told = f"{percent(abs(lead))} {'ahead of' if lead >= 0 else 'behind'} `{rivals[0].name}`"
    if floor.share is None:
        return f"{told}. No arm ran twice, so how much of that is chance is not known."
    if abs(lead) <= floor.share:
        return f"{told}, which is inside noise: like runs differ by up to {percent(floor.share)}."
    return f"{told}, where like runs differ by up to {percent(floor.share)}."


def unknowns(found: list[Arm]) -> list[str]:
    said = []
    beside = found[0].beside
    ranked = by_time(found)
    floor = noise_floor(beside, "step_time_s_median")
    if len(ranked) > 1:
        first, second = ranked[0], ranked[1]
        lead = second.median("step_time_s_median") / first.median("step_time_s_median") - 1
        if floor.share is None:
            said.append(
                "nothing tells the spread between like runs: run the arms again with other seeds or repeats before"
                f" the order of `{first.name}` and `{second.name}` is relied on."
            )
        elif lead > 0:
            spread = _spread(first, second) or floor.share
            needed = seeds_needed(lead, spread)
            many = f"{needed} pairs of runs" if needed else "more than ten thousand pairs of runs"
            said.append(
                f"to see the lead of `{first.name}` before `{second.name}` ({percent(lead)}) four times in five would"
                f" take {many}, where pairs scatter by {percent(spread)}."
            )
    model = one_value(beside["model_name_or_path"])
    if has_no_gpu(beside):
        said.append("there is no GPU on this box: what a stage costs or saves on one is not known from these records.")
    said.append(
        f"this holds for {model} at this batch and length; a model that does not fit may turn the order around."
    )
    missing = [arm.name for arm in found if not len(arm.ended)]
    if missing:
        said.append(f"not known, because no run ended well: {', '.join(f'`{name}`' for name in missing)}.")
    return said


def _spread(first: Arm, second: Arm) -> float:
    """Standard deviation of the paired ratios of two arms; 0 where fewer than two pairs tell."""
    pairs = paired(first.beside, "step_time_s_median", second.name, first.name)
    return float((pairs["value"] / pairs["baseline"]).std()) if len(pairs) > 1 else 0.0
