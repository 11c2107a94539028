"""What each setting of a user's file costs one rank of N."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from study.predict.explain_case import Case
from study.predict.user_settings import ZERO
from study.theory.memory import MASTER_BYTES, MOMENTS_BYTES


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
    says = (
        f"for each of {count:,} parameters a rank's device holds {state.params_device:.4g} bytes of weights,"
        f" {state.grads_device:.4g} of gradients and {state.optimizer_device:.4g} of optimizer"
    )
    return _cost(case, "stage", says, count * state.device)


def bucket_bytes(case: Case) -> float:
    """What is reserved for reducing gradients, full or not."""
    is_forced = case.stage < 3 and case.offload("offload_optimizer") is not None
    if case.stage == 0 or not (case.zero["contiguous_gradients"] or is_forced):
        return 0.0
    buffers = 2 if case.zero["overlap_comm"] and case.stage < 3 else 1
    return float(buffers * case.zero["reduce_bucket_size"] * case.weight)


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
    if case.largest > size:
        name = max(case.shape.tensors, key=lambda tensor: tensor.elements).name
        says = f"the gradient of {name} ({case.largest:,}) is larger than the bucket, and waits outside it, whole"
        found += [dataclasses.replace(found[0], device=float(case.largest * case.weight), says=says)]
    return found


def persistent_elements(case: Case) -> int:
    """In the engine's order, as far as the limit for the model goes."""
    limit, kept = case.zero["stage3_model_persistence_threshold"], 0
    for tensor in case.shape.tensors:
        for _ in range(tensor.count):
            if tensor.elements <= case.zero["stage3_param_persistence_threshold"] and tensor.elements + kept <= limit:
                kept += tensor.elements
    return kept


def gathered_elements(case: Case) -> float:
    """At most: the layer at work, and what is kept for its next use.

    The way to its next use and back is counted. Prefetching goes ahead until so many are live, and keeps them too.
    """
    layer = sum(tensor.elements for tensor in case.shape.tensors if tensor.in_layer)
    ahead = case.zero["stage3_prefetch_bucket_size"]
    kept = max(case.zero["stage3_max_reuse_distance"] / 2, case.zero["stage3_max_live_parameters"] if ahead else 0)
    return float(min(case.shape.parameters, max(layer, case.largest) + kept))


def _stage3(case: Case) -> list[Cost]:
    if case.stage != 3:
        return []
    kept, threshold = persistent_elements(case), case.zero["stage3_param_persistence_threshold"]
    says = f"tensors of up to {threshold:,.0f} elements stay whole on every rank, {kept:,} elements of this model"
    found = _cost(case, "stage3_param_persistence_threshold", says, kept * case.weight * (1 - 1 / case.ranks))
    gathered = gathered_elements(case)
    says = "all parameters of this model may be" if gathered >= case.shape.parameters else f"up to {gathered:,.0f} are"
    says += " whole at once: those of the layer at work, and those that are used again soon"
    found += _cost(case, "stage3_max_reuse_distance", says, gathered * case.weight)
    if case.zero["stage3_gather_16bit_weights_on_model_save"]:
        says = "when the model is saved, the first rank has all of its weights in host memory"
        size = case.shape.parameters * case.weight
        found += _cost(case, "stage3_gather_16bit_weights_on_model_save", says, host=size)
    return found + _step(case)


def sub_groups(case: Case) -> int:
    """Of one rank's part. The engine closes one with the tensor that fills it."""
    limit, groups, filled = case.zero["sub_group_size"], 0, 0
    sizes = [-(-tensor.elements // case.ranks) for tensor in case.shape.tensors for _ in range(tensor.count)]
    if limit >= sum(sizes):
        return 1
    for size in sizes:
        filled += size
        if filled >= limit:
            groups, filled = groups + 1, 0
    return groups + (filled > 0)


def _step(case: Case) -> list[Cost]:
    """With its optimizer on the host a rank's device has no such gradients."""
    if case.offload("offload_optimizer"):
        return []
    elements = min(case.share, case.zero["sub_group_size"])
    says = (
        f"a step makes fp32 gradients of one sub-group at a time, {elements:,.0f} elements; {sub_groups(case)} in all"
    )
    return _cost(case, "sub_group_size", says, elements * MASTER_BYTES)


def on_host_share(case: Case) -> float:
    """Of the optimizer, by `ratio`: whole sub-groups move."""
    optimizer, count = case.offload("offload_optimizer"), sub_groups(case)
    assert optimizer is not None
    return 1 - int((1 - optimizer["ratio"]) * count) / count


def _moved(before: Case, after: Case) -> tuple[float, float, float]:
    """Bytes of state on the device, on the host and on the drive."""
    one, other, count = before.state, after.state, before.shape.parameters
    device, host, nvme = other.device - one.device, other.host - one.host, other.nvme - one.nvme
    return count * device, count * host, count * nvme


def _offloaded_optimizer(case: Case) -> list[Cost]:
    optimizer = case.offload("offload_optimizer")
    if optimizer is None or case.stage == 0:
        return []
    share = (MASTER_BYTES + MOMENTS_BYTES) * case.share
    all_of_it = case.at(offload_param=None, offload_optimizer={**optimizer, "ratio": 1.0})
    moved = _moved(all_of_it.at(offload_optimizer=None), all_of_it)
    says = f"{share:,.0f} bytes of optimizer leave the device, and gradients wait where it is"
    found = _cost(case, "offload_optimizer.device", says, *moved)
    if optimizer["device"] == "nvme" and case.stage == 3:
        elements = min(case.share, case.zero["sub_group_size"])
        size = optimizer["buffer_count"] * elements * MASTER_BYTES
        says = f"so many buffers of the largest sub-group, {elements:,.0f} elements in fp32, are locked in host memory"
        found += _cost(case, "offload_optimizer.buffer_count", says, host=size)
    elif optimizer["ratio"] < 1 and case.stage == 3:
        back = 1 - on_host_share(case)
        says = f"whole sub-groups move, of which a rank has {sub_groups(case)}: {back:.0%} of the optimizer stays"
        found += _cost(case, "offload_optimizer.ratio", says, back * share, -back * share)
    return found


def _offloaded_parameters(case: Case) -> list[Cost]:
    parameters = case.offload("offload_param")
    if parameters is None or case.stage != 3:
        return []
    whole = case.at(offload_param=None)
    says = "this rank's part of the weights leaves the device"
    found = _cost(case, "offload_param.device", says, *_moved(whole, case))
    if parameters["device"] == "nvme":
        says = f"so many buffers of {parameters['buffer_size']:,.0f} elements are locked in host memory"
        size = parameters["buffer_count"] * parameters["buffer_size"] * case.weight
        found += _cost(case, "offload_param.buffer_count", says, host=size)
        kept = min(parameters["max_in_cpu"], case.share) * case.weight
        found += _cost(case, "offload_param.max_in_cpu", "so many weights stay in host memory", host=kept)
    return found


_RULES: tuple[Callable[[Case], list[Cost]], ...] = (
    _stage,
    _bucket,
    _stage3,
    _offloaded_optimizer,
    _offloaded_parameters,
)
