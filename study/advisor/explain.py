"""What each setting of a user's file costs one rank of N."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from study.advisor.explain_case import ConfigCase
from study.advisor.user_settings import ZERO
from study.predictor.gathers import gathers_of
from study.predictor.memory import predict_memory
from study.predictor.request import Memory
from study.predictor.state import FP32_BYTES, kept_whole, sub_groups


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes of one rank that are there because of a setting."""

    key: str
    value: Any
    # False where it is the engine's default.
    is_said: bool
    device: float
    host: float
    nvme: float
    says: str


def costs(case: ConfigCase) -> list[Cost]:
    """Largest first."""
    if case.file.deepspeed is None:
        return []
    found = [cost for rule in _RULES for cost in rule(case)]
    return sorted(found, key=lambda cost: -(cost.device + cost.host + cost.nvme))


def _cost(case: ConfigCase, key: str, says: str, device: float = 0, host: float = 0, nvme: float = 0) -> list[Cost]:
    value: Any = case.zero
    for part in key.split("."):
        value = value[part]
    return [Cost(f"{ZERO}.{key}", value, f"{ZERO}.{key}" in case.file.given, device, host, nvme, says)]


def _stage(case: ConfigCase) -> list[Cost]:
    # The offloads' own lines say where it goes.
    state, count = case.at(offload_optimizer=None, offload_param=None).state, case.shape.parameters
    each = (size / count for size in (state.params_device, state.grads_device, state.optimizer_device))
    says = (
        "for each of {:,} parameters a rank's device holds {:.4g} bytes of weights, {:.4g} of gradients and {:.4g} of"
    )
    return _cost(case, "stage", f"{says.format(count, *each)} optimizer", state.device)


def bucket_bytes(case: ConfigCase) -> float:
    """Of a GPU's memory, full or not."""
    if case.stage == 0 or not case.settings.contiguous_gradients:
        return 0.0
    copies = 2 if case.settings.overlaps and case.stage < 3 else 1
    return float(copies * case.settings.reduce_bucket * case.weight)


def _bucket(case: ConfigCase) -> list[Cost]:
    if case.stage == 0:
        return []
    size, elements = case.zero["reduce_bucket_size"], case.shape.parameters
    reserved = bucket_bytes(case)
    says = f"{size:,.0f} elements of {case.weight} bytes are reserved, full or not"
    if reserved > size * case.weight:
        says += ", twice: overlap_comm fills one while the other is reduced"
    if size >= elements:
        says += "; all of this model's gradients fit in, so they are there at once and nothing of them is saved"
    found = _cost(case, "reduce_bucket_size", says, reserved)
    if case.largest.elements > size:
        says = f"the gradient of {case.largest.name} ({case.largest.elements:,}) is larger, and waits outside it, whole"
        found += [dataclasses.replace(found[0], device=float(case.largest.elements * case.weight), says=says)]
    return found


def whole_elements(case: ConfigCase) -> int:
    """The most of stage 3's parameters that are whole at once, with the buffers that they are gathered into."""
    return gathers_of(case.request, case.settings).most


def _stage3(case: ConfigCase) -> list[Cost]:
    if case.stage != 3:
        return []
    kept = sum(piece.elements for piece in kept_whole(case.request, case.settings))
    threshold = case.zero["stage3_param_persistence_threshold"]
    says = f"tensors of up to {threshold:,.0f} elements stay whole on every rank, {kept:,} elements of this model"
    found = _cost(case, "stage3_param_persistence_threshold", says, kept * case.weight * (1 - 1 / case.ranks))
    whole = whole_elements(case)
    says = f"{whole:,} elements are gathered at once: the layer at work, what comes next, what is used again soon"
    least = whole_elements(case.at(**{"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}))
    if least < whole:
        says += f"; {least:,} with this and stage3_max_live_parameters at 0, and each is gathered twice"
    found += _cost(case, "stage3_max_reuse_distance", says, whole * case.weight)
    if (group := min(case.zero["zero_hpz_partition_size"], case.ranks)) > 1:
        says = f"each {group:,.0f} ranks hold a second set of all weights"
        found += _cost(case, "zero_hpz_partition_size", says, case.shape.parameters * case.weight / group)
    if case.zero["stage3_gather_16bit_weights_on_model_save"]:
        says = "when the model is saved, the first rank has all of its weights in host memory"
        size = case.shape.parameters * case.weight
        found += _cost(case, "stage3_gather_16bit_weights_on_model_save", says, host=size)
    return found + _step(case)


def _step(case: ConfigCase) -> list[Cost]:
    """With its optimizer on the host a rank's device has no such gradients."""
    if case.offload("offload_optimizer"):
        return []
    groups = sub_groups(case.request, case.settings)
    says = f"a step makes fp32 gradients of one sub-group at a time, {max(groups):,} elements; a rank has {len(groups)}"
    return _cost(case, "sub_group_size", says, max(groups) * FP32_BYTES)


def _moved(before: ConfigCase, after: ConfigCase) -> tuple[float, float, float]:
    """Bytes of state on the device, on the host and on the drive."""
    one, other = before.state, after.state
    return other.device - one.device, other.host - one.host, other.nvme - one.nvme


def _offloaded_optimizer(case: ConfigCase) -> list[Cost]:
    optimizer = case.offload("offload_optimizer")
    if optimizer is None or case.stage == 0:
        return []
    all_of_it = case.at(offload_param=None, offload_optimizer={**optimizer, "ratio": 1.0})
    says = "the optimizer leaves the device, and gradients wait where it is"
    found = _cost(case, "offload_optimizer.device", says, *_moved(all_of_it.at(offload_optimizer=None), all_of_it))
    groups = sub_groups(case.request, case.settings)
    if optimizer["device"] == "nvme" and case.stage == 3:
        size = optimizer["buffer_count"] * max(groups) * FP32_BYTES
        says = f"so many buffers of the largest sub-group, {max(groups):,} elements in fp32, are locked in host memory"
        found += _cost(case, "offload_optimizer.buffer_count", says, host=size)
    elif optimizer["ratio"] < 1 and case.stage == 3:
        stays = len(groups) - on_host(case)
        says = (
            f"whole sub-groups move, of which a rank has {len(groups)}: {stays} stay{'s' * (stays == 1)} on the device"
        )
        found += _cost(case, "offload_optimizer.ratio", says, *_moved(all_of_it, case.at(offload_param=None)))
    return found


def on_host(case: ConfigCase) -> int:
    """Sub-groups whose optimizer `ratio` sends there."""
    optimizer, count = case.offload("offload_optimizer"), len(sub_groups(case.request, case.settings))
    assert optimizer is not None
    return count - int((1 - optimizer["ratio"]) * count)


def _offloaded_parameters(case: ConfigCase) -> list[Cost]:
    parameters = case.offload("offload_param")
    if parameters is None or case.stage != 3:
        return []
    says = "this rank's part of the weights leaves the device"
    found = _cost(case, "offload_param.device", says, *_moved(case.at(offload_param=None), case))
    if parameters["device"] == "nvme":
        says = f"so many buffers of {parameters['buffer_size']:,.0f} elements are locked in host memory"
        size = parameters["buffer_count"] * parameters["buffer_size"] * case.weight
        found += _cost(case, "offload_param.buffer_count", says, host=size)
    return found


_RULES: tuple[Callable[[ConfigCase], list[Cost]], ...] = (
    _stage,
    _bucket,
    _stage3,
    _offloaded_optimizer,
    _offloaded_parameters,
)


# The questions that people bring to forums about a file of settings, answered for this one in bytes.

_MOST_RANKS = 1024
# A part that does not fall to two thirds on twice as many ranks is not shared among them.
_FALLS_TO = 2 / 3


@dataclasses.dataclass(frozen=True)
class Explanation:
    question: str
    short: str
    because: tuple[str, ...]
    # Bytes, or counts of ranks.
    figures: Mapping[str, float]


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def answers(case: ConfigCase) -> list[Explanation]:
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


def _held(case: ConfigCase) -> Memory:
    return predict_memory(case.request)


def _with_either_stage(case: ConfigCase, ranks: int | None = None, **zero: Any) -> tuple[ConfigCase, ConfigCase]:
    """Stage 2 has no other place for parameters, and cannot offload a part of its optimizer."""
    optimizer = case.offload("offload_optimizer")
    common = {"offload_param": None, "offload_optimizer": optimizer and {**optimizer, "ratio": 1.0}, **zero}
    return case.at(ranks, stage=2, **common), case.at(ranks, stage=3, **common)


def stages(case: ConfigCase) -> Explanation:
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
    return Explanation("Does stage 3 hold more than stage 2 here?", short, tuple(because), figures)


def _reasons(third: ConfigCase) -> list[str]:
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


def ranks(case: ConfigCase) -> Explanation:
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
    return Explanation("Why do more ranks not hold less?", said, tuple(because), figures)


def host(case: ConfigCase) -> Explanation:
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
    return Explanation(
        "Does offload with stage 2 want more host memory than with stage 3?",
        f"{'yes' if peaks[0] > peaks[1] else 'no'}: {gib(peaks[0])} and {gib(peaks[1])} on a node ({moments})",
        because, {"stage_2": peaks[0], "stage_3": peaks[1]},
    )  # fmt: skip


def ratio(case: ConfigCase) -> Explanation:
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
    return Explanation("What does `ratio` move?", f"to the host: {said}", tuple(because), figures)
