"""What each setting of a user's file costs one rank of N."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from study.predict.explain_case import Case
from study.predict.gathers import gathers_of
from study.predict.state import FP32_BYTES, kept_whole, sub_groups
from study.predict.user_settings import ZERO


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


def costs(case: Case) -> list[Cost]:
    """Largest first."""
    if case.file.deepspeed is None:
        return []
    found = [cost for rule in _RULES for cost in rule(case)]
    return sorted(found, key=lambda cost: -(cost.device + cost.host + cost.nvme))


def _cost(case: Case, key: str, says: str, device: float = 0, host: float = 0, nvme: float = 0) -> list[Cost]:
    value: Any = case.zero
    for part in key.split("."):
        value = value[part]
    return [Cost(f"{ZERO}.{key}", value, f"{ZERO}.{key}" in case.file.given, device, host, nvme, says)]


def _stage(case: Case) -> list[Cost]:
    # Where offloads move it to is told with them.
    state, count = case.at(offload_optimizer=None, offload_param=None).state, case.shape.parameters
    each = (size / count for size in (state.params_device, state.grads_device, state.optimizer_device))
    says = (
        "for each of {:,} parameters a rank's device holds {:.4g} bytes of weights, {:.4g} of gradients and {:.4g} of"
    )
    return _cost(case, "stage", f"{says.format(count, *each)} optimizer", state.device)


def bucket_bytes(case: Case) -> float:
    """Of a GPU's memory, full or not."""
    if case.stage == 0 or not case.settings.contiguous_gradients:
        return 0.0
    copies = 2 if case.settings.overlaps and case.stage < 3 else 1
    return float(copies * case.settings.reduce_bucket * case.weight)


def _bucket(case: Case) -> list[Cost]:
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


def whole_elements(case: Case) -> int:
    """The most of stage 3's parameters that are whole at once, with the buffers that they are gathered into."""
    return gathers_of(case.request, case.settings).most


def _stage3(case: Case) -> list[Cost]:
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


def _step(case: Case) -> list[Cost]:
    """With its optimizer on the host a rank's device has no such gradients."""
    if case.offload("offload_optimizer"):
        return []
    groups = sub_groups(case.request, case.settings)
    says = f"a step makes fp32 gradients of one sub-group at a time, {max(groups):,} elements; a rank has {len(groups)}"
    return _cost(case, "sub_group_size", says, max(groups) * FP32_BYTES)


def _moved(before: Case, after: Case) -> tuple[float, float, float]:
    """Bytes of state on the device, on the host and on the drive."""
    one, other = before.state, after.state
    return other.device - one.device, other.host - one.host, other.nvme - one.nvme


def _offloaded_optimizer(case: Case) -> list[Cost]:
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


def on_host(case: Case) -> int:
    """Sub-groups whose optimizer `ratio` sends there."""
    optimizer, count = case.offload("offload_optimizer"), len(sub_groups(case.request, case.settings))
    assert optimizer is not None
    return count - int((1 - optimizer["ratio"]) * count)


def _offloaded_parameters(case: Case) -> list[Cost]:
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


_RULES: tuple[Callable[[Case], list[Cost]], ...] = (
    _stage,
    _bucket,
    _stage3,
    _offloaded_optimizer,
    _offloaded_parameters,
)
