"""The questions that people bring to forums about a file of settings, answered for this one in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from study.predict.explain import on_host, whole_elements
from study.predict.explain_case import Case
from study.predict.memory import predict_memory
from study.predict.request import Memory
from study.predict.state import kept_whole, sub_groups

_MOST_RANKS = 1024
# A part that does not fall to two thirds on twice as many ranks is not shared among them.
_FALLS_TO = 2 / 3


@dataclasses.dataclass(frozen=True)
class Answer:
    question: str
    short: str
    because: tuple[str, ...]
    # Bytes, or counts of ranks.
    figures: Mapping[str, float]


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def answers(case: Case) -> list[Answer]:
    found = []
    if case.stage and case.ranks > 1:
        found.append(stages(case))
    if case.file.distributed_type != "NO":
        found.append(ranks(case))
    if case.stage >= 2 and case.offload("offload_optimizer"):
        found.append(host(case))
    if case.stage == 3 and (optimizer := case.offload("offload_optimizer")) and optimizer["device"] == "cpu":
        found.append(ratio(case))
    return found


def _held(case: Case) -> Memory:
    return predict_memory(case.request)


def _with_either_stage(case: Case, ranks: int | None = None, **zero: Any) -> tuple[Case, Case]:
    """Stage 2 has no other place for parameters, and cannot offload a part of its optimizer."""
    optimizer = case.offload("offload_optimizer")
    common = {"offload_param": None, "offload_optimizer": optimizer and {**optimizer, "ratio": 1.0}, **zero}
    return case.at(ranks, stage=2, **common), case.at(ranks, stage=3, **common)


def stages(case: Case) -> Answer:
    second, third = map(_held, _with_either_stage(case))
    before, after = second.peak_allocated.value, third.peak_allocated.value
    turns, count = None, case.ranks
    while after >= before and count < _MOST_RANKS and turns is None:
        count *= 2
        at = [_held(each).peak_allocated.value for each in _with_either_stage(case, count)]
        turns = count if at[1] < at[0] else None
    short = f"{'yes' if after >= before else 'no'}: stage 2 peaks at {gib(before)} and stage 3 at {gib(after)}"
    if turns:
        short += f"; from {turns} ranks on stage 3 holds less"
    parts = ("parameters", "gradients", "optimizer", "buffers")
    shares = (f"{part} {gib(second.device_parts[part])} and {gib(third.device_parts[part])}" for part in parts)
    because = ["at their peaks stage 2 and stage 3 hold " + ", ".join(shares), *_reasons(_with_either_stage(case)[1])]
    figures = {"stage_2": before, "stage_3": after, **({"less_from_ranks": float(turns)} if turns else {})}
    return Answer("Does stage 3 hold more than stage 2 here?", short, tuple(because), figures)


def _reasons(third: Case) -> list[str]:
    found, elements, bucket = [], third.shape.parameters, third.zero["reduce_bucket_size"]
    kept = sum(piece.elements for piece in kept_whole(third.request, third.settings))
    if whole := whole_elements(third):
        of_all = whole / elements
        found.append(
            f"stage 3 gathers {whole:,} elements at once, {of_all:.0%} of the model, with what they are copied out of:"
            " prefetching goes ahead up to stage3_max_live_parameters, and stage3_max_reuse_distance keeps what is used"
            " again"
        )
    if bucket >= elements:
        found.append(
            f"reduce_bucket_size ({bucket:,.0f}) holds all of this model's gradients, so neither stage saves any"
        )
    elif third.largest.elements > bucket:
        largest = third.largest.elements
        found.append(
            f"{third.largest.name} ({largest:,}) does not fit into reduce_bucket_size ({bucket:,.0f}): its gradient"
            f" waits whole, {gib(largest * third.weight)}; a bucket of {largest:,} takes it in"
        )
    if kept:
        found.append(f"{kept:,} elements in small tensors stay whole, {gib(kept * third.weight)} on every rank")
    return found


def ranks(case: Case) -> Answer:
    """Of half as many, of as many, and of twice as many."""
    counts = sorted({max(case.ranks // 2, 1), case.ranks, 2 * case.ranks})
    memories = {count: _held(case.at(count)) for count in counts}
    now, twice = memories[case.ranks], memories[2 * case.ranks]
    fixed = [
        (part, size) for part, size in sorted(now.device_parts.items(), key=lambda item: -item[1])
        if size > 2**20 and twice.device_parts.get(part, 0) > _FALLS_TO * size
    ]  # fmt: skip
    because = [f"what does not fall with more ranks: {', '.join(f'{part} {gib(size)}' for part, size in fixed)}"]
    because.append("activations go by the micro-batch of one rank: more ranks train more samples, and hold no less")
    bucket = case.zero.get("reduce_bucket_size", 0)
    if case.stage and bucket >= case.shape.parameters:
        because.append(f"the bucket is {bucket:,.0f} elements wide whatever the model and the ranks")
    if not case.stage and not case.request.strategy.is_fsdp:
        because.append("without ZeRO every rank has a copy of the whole state")
    if case.request.strategy.mesh is not None:
        because.append(f"each copy is of {case.request.ranks_of_a_copy} ranks: more ranks are more copies")
    peaks = {count: memory.peak_allocated.value for count, memory in memories.items()}
    said = ", ".join(f"{count} ranks {gib(peak)}" for count, peak in peaks.items())
    figures = {f"ranks_{count}": peak for count, peak in peaks.items()}
    return Answer("Why do more ranks not hold less?", said, tuple(because), figures)


def host(case: Case) -> Answer:
    optimizer = {**(case.offload("offload_optimizer") or {}), "device": "cpu", "ratio": 1.0}
    cases = _with_either_stage(case, offload_optimizer=optimizer)
    second, third = map(_held, cases)
    peaks = [memory.host_peak.value for memory in (second, third)]
    per_node, largest = case.request.box.gpus_per_node, case.largest.elements
    moments = ", ".join(
        f"{name} {gib(second.host_parts[name])} and {gib(third.host_parts[name])}" for name in ("load", "train", "save")
    )
    because = (
        f"outside stage 3 each of a node's {per_node} processes makes the whole model in fp32 before it moves it,"
        f" {gib(4 * case.shape.parameters)} each; stage 3 splits each tensor as it is made",
        f"stage 2 keeps a locked copy of the largest tensor beside its part, {gib(largest * case.weight)} a rank,"
        " and, with accumulation, the gradients of its part as whole tensors",
        "locked memory is handed out in powers of two, so a part just above one takes twice as much",
        f"state alone is {gib(second.host_parts['state'])} and {gib(third.host_parts['state'])} on a node",
    )
    return Answer(
        "Does offload with stage 2 want more host memory than with stage 3?",
        f"{'yes' if peaks[0] > peaks[1] else 'no'}: {gib(peaks[0])} and {gib(peaks[1])} on a node ({moments})",
        because, {"stage_2": peaks[0], "stage_3": peaks[1]},
    )  # fmt: skip


def ratio(case: Case) -> Answer:
    optimizer, count = case.offload("offload_optimizer"), len(sub_groups(case.request, case.settings))
    moves = {
        asked: on_host(case.at(offload_optimizer={**(optimizer or {}), "ratio": asked})) / count
        for asked in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    said = ", ".join(f"{asked:g} sends {share:.0%}" for asked, share in moves.items())
    because = [
        f"the optimizer moves by whole sub-groups, the first ones stay on the device, and a rank has {count} here"
    ]
    if count == 1:
        because.append(
            f"sub_group_size ({case.zero['sub_group_size']:,.0f}) holds a rank's whole part, so any ratio above 0 is 1:"
            f" {case.shape.parameters // case.ranks // 10:,} would make ten of them"
        )
    figures = {f"ratio_{asked:g}": share for asked, share in moves.items()}
    return Answer("What does `ratio` move?", f"to the host: {said}", tuple(because), figures)
