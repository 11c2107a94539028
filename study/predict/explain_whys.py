"""The questions that people bring to forums about a file of settings, answered for this one in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from study.predict.explain import gathered_elements, on_host_share, persistent_elements, sub_groups
from study.predict.explain_case import Case
from study.predict.request import Memory

Held = Callable[[Case], Memory]
_MOST_RANKS = 1024
# A part that does not fall to two thirds on twice as many ranks is not shared among them.
_FALLS_TO = 2 / 3
_OFFLOADED = {"device": "cpu", "nvme_path": None, "buffer_count": 4, "pin_memory": True, "ratio": 1.0}


@dataclasses.dataclass(frozen=True)
class Answer:
    question: str
    short: str
    because: tuple[str, ...]
    # Bytes, or counts of ranks.
    figures: Mapping[str, float]


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def answers(case: Case, held: Held) -> list[Answer]:
    found = []
    if case.file.deepspeed is not None and case.stage and case.ranks > 1:
        found.append(stages(case, held))
    if case.strategy.name != "single":
        found.append(ranks(case, held))
    if case.stage >= 2 and case.offload("offload_optimizer"):
        found.append(host(case, held))
    if case.stage == 3 and (optimizer := case.offload("offload_optimizer")) and optimizer["device"] == "cpu":
        found.append(ratio(case))
    return found


def stages(case: Case, held: Held) -> Answer:
    """Stage 2 has no place for parameters but the device."""
    second, third = (held(case.at(stage=stage, offload_param=None)) for stage in (2, 3))
    before, after = second.peak_allocated.value, third.peak_allocated.value
    more = after >= before
    turns = None
    count = case.ranks
    while more and count < _MOST_RANKS and turns is None:
        count *= 2
        at = [held(case.at(count, stage=stage, offload_param=None)).peak_allocated.value for stage in (2, 3)]
        turns = count if at[1] < at[0] else None
    short = (
        f"{'yes' if more else 'no'}: stage 2 peaks at {gib(before)} and stage 3 at {gib(after)}"
        + (f"; from {turns} ranks on stage 3 holds less" if turns else "")
    )  # fmt: skip
    shares = (
        f"{part} {gib(second.device_parts.get(part, 0))} and {gib(third.device_parts.get(part, 0))}"
        for part in ("parameters", "gradients", "optimizer", "buffers")
    )
    because = ["stage 2 and stage 3 hold " + ", ".join(shares)]
    elements, bucket = case.shape.parameters, case.zero["reduce_bucket_size"]
    if gathered_elements(case) >= elements:
        because.append(
            "prefetching goes ahead up to stage3_max_live_parameters, and stage3_max_reuse_distance keeps what is used"
            f" again: together they reach over all {elements:,} parameters, so these may be whole at once. Lower both"
        )
    if bucket >= elements:
        because.append(
            f"reduce_bucket_size ({bucket:,.0f}) holds all of this model's gradients, so neither stage saves any"
        )
    elif case.largest > bucket:
        because.append(
            f"the largest tensor ({case.largest:,}) does not fit into reduce_bucket_size ({bucket:,.0f}): its gradient"
            f" waits whole, {gib(case.largest * case.weight)}; a bucket of {case.largest:,} takes it in"
        )
    if kept := persistent_elements(case):
        because.append(f"{kept:,} elements in small tensors stay whole, {gib(kept * case.weight)} on every rank")
    figures = {"stage_2": before, "stage_3": after, **({"less_from_ranks": float(turns)} if turns else {})}
    return Answer("Does stage 3 hold more than stage 2 here?", short, tuple(because), figures)


def ranks(case: Case, held: Held) -> Answer:
    """Of half as many, of as many, and of twice as many."""
    counts = sorted({max(case.ranks // 2, 1), case.ranks, 2 * case.ranks})
    memories = {count: held(case.at(count)) for count in counts}
    peaks = {count: memory.peak_allocated.value for count, memory in memories.items()}
    now, twice = memories[case.ranks], memories[2 * case.ranks]
    same = {
        part: size for part, size in now.device_parts.items()
        if size > 0 and twice.device_parts.get(part, 0) > _FALLS_TO * size
    }  # fmt: skip
    said = ", ".join(f"{count} ranks {gib(peak)}" for count, peak in peaks.items())
    fixed = sorted(same.items(), key=lambda item: -item[1])
    because = [f"what does not fall with more ranks: {', '.join(f'{part} {gib(size)}' for part, size in fixed)}"]
    if now.device_parts.get("activations"):
        because.append("activations go by the micro-batch of one rank: more ranks train more samples, and hold no less")
    bucket = case.zero.get("reduce_bucket_size", 0)
    if case.stage and bucket >= case.shape.parameters:
        because.append(f"the buckets are {bucket:,.0f} elements wide whatever the model and the ranks")
    if not case.stage and case.strategy.name != "fsdp2":
        because.append("without ZeRO every rank has a copy of the whole state")
    return Answer(
        "Why do more ranks not hold less?", said, tuple(because),
        {f"ranks_{count}": peak for count, peak in peaks.items()},
    )  # fmt: skip


def host(case: Case, held: Held) -> Answer:
    optimizer = {**_OFFLOADED, **(case.offload("offload_optimizer") or {}), "device": "cpu", "ratio": 1.0}
    second, third = (held(case.at(stage=stage, offload_param=None, offload_optimizer=optimizer)) for stage in (2, 3))
    peaks = [memory.host_peak.value for memory in (second, third)]
    more = "more" if peaks[0] > peaks[1] else "no more"
    whole = 4 * case.shape.parameters
    because = [
        f"outside stage 3 every process makes the whole model in host memory before it moves it: {gib(whole)} for each"
        f" rank of a machine in fp32, all at the same time. Stage 3 splits each tensor as it is made",
        f"stage 2 keeps a pinned copy of the largest tensor beside its part, {gib(case.largest * case.weight)} for each"
        " rank, and with accumulation each of its part's gradients whole, also where it owns an edge of one",
        f"once training goes on, both hold what the optimizer needs, {gib(16 * case.share)} for each rank",
    ]
    parts = ", ".join(
        f"{part} {gib(second.host_parts.get(part, 0))} and {gib(third.host_parts.get(part, 0))}"
        for part in second.host_parts
    )
    return Answer(
        "Does offload with stage 2 want more host memory than with stage 3?",
        f"{more}: {gib(peaks[0])} and {gib(peaks[1])} on one machine ({parts})",
        tuple(because), {"stage_2": peaks[0], "stage_3": peaks[1]},
    )  # fmt: skip


def ratio(case: Case) -> Answer:
    optimizer, count = case.offload("offload_optimizer"), sub_groups(case)
    moves = {
        asked: on_host_share(case.at(offload_optimizer={**(optimizer or {}), "ratio": asked}))
        for asked in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    said = ", ".join(f"{asked:g} leaves {1 - share:.0%}" for asked, share in moves.items())
    because = [
        f"the optimizer moves by whole sub-groups, the first of them stay on the device, and a rank has {count} here",
    ]
    if count == 1:
        because.append(
            f"sub_group_size ({case.zero['sub_group_size']:,.0f}) holds a rank's whole part ({case.share:,.0f}):"
            " any ratio above 0 is 1; set it to a tenth of the part to be able to choose"
        )
    return Answer(
        "What does `ratio` move?", f"of the optimizer on the device: {said}", tuple(because),
        {f"ratio_{asked:g}": share for asked, share in moves.items()},
    )  # fmt: skip
