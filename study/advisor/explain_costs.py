"""Memory of a rank that each setting of a user's config accounts for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from study.advisor.explain_case import ConfigCase
from study.advisor.user_settings import ZERO, known_settings
from study.predictor.request import FP32_BYTES
from study.predictor.state import persistent_params, sub_groups
from study.predictor.zero3_gathers import simulate_gathers


@dataclasses.dataclass(frozen=True)
class SettingCost:
    """Memory of one rank that a setting accounts for, in bytes."""

    key: str
    value: Any
    # False if it is the engine's default.
    is_said: bool
    device: float
    host: float
    nvme: float
    says: str


def costs(case: ConfigCase) -> list[SettingCost]:
    """Return the memory that each setting accounts for, the largest first."""
    if case.file.deepspeed is None:
        return []
    setting_costs = [*_stage_costs(case), *(_stage3_costs(case) if case.stage == 3 else ()), *_offload_costs(case)]
    return sorted(setting_costs, key=lambda cost: -(cost.device + cost.host + cost.nvme))


def _cost(case: ConfigCase, key: str, reason: str, device: float = 0, host: float = 0, nvme: float = 0) -> SettingCost:
    value: Any = case.zero
    for part in key.split("."):
        value = value[part]
    names = {key, key.removeprefix("stage3_")}
    # A deprecated switch sets an offload's device, and other settings by an older name.
    now = key.removesuffix(".device")
    names |= {old for old, entry in known_settings()[ZERO].items() if entry.get("is_now") == now}
    is_said = {f"{ZERO}.{name}" for name in names} & {*case.file.explicit_keys}
    return SettingCost(f"{ZERO}.{key}", value, bool(is_said), device, host, nvme, reason)


def bucket_bytes(case: ConfigCase) -> float:
    """Return the device memory that buckets reserve, in bytes, full or not."""
    settings = case.request.settings
    if case.stage == 0 or not settings.contiguous_gradients:
        return 0.0
    buckets = 2 if settings.overlap_comm and case.stage < 3 else 1
    return float(buckets * settings.reduce_bucket_size * case.weight)


def _stage_costs(case: ConfigCase) -> Iterator[SettingCost]:
    # Without offloads, whose own rows have the state that they move.
    state, count = case.at(offload_optimizer=None, offload_param=None).state, case.request.full_shape.parameters
    parameters, gradients, optimizer = (
        size / count for size in (state.params_device, state.grads_device, state.optimizer_device)
    )
    reason = (
        f"for each of {count:,} parameters a rank's device has {parameters:.4g} bytes of weights, {gradients:.4g} of"
        f" gradients and {optimizer:.4g} of optimizer"
    )
    yield _cost(case, "stage", reason, state.device)
    if case.stage == 0:
        return
    size, reserved = case.zero["reduce_bucket_size"], bucket_bytes(case)
    reason = f"{size:,.0f} elements of {case.weight} bytes are reserved, full or not"
    if reserved > size * case.weight:
        reason += ", twice: overlap_comm fills one while the other is reduced"
    if size >= case.shape.parameters:
        reason += "; all of this model's gradients fit, so they are there at once and no gradient is released early"
    yield _cost(case, "reduce_bucket_size", reason, reserved)
    largest = case.largest.elements
    # Stage 1 keeps all gradients unpartitioned, which its own row has.
    if largest > size and case.stage > 1:
        reason = f"the gradient of {case.largest.name} ({largest:,}) is larger, and stays unpartitioned outside it"
        yield _cost(case, "reduce_bucket_size", reason, float(largest * case.weight))


def _stage3_costs(case: ConfigCase) -> Iterator[SettingCost]:
    elements, weight = case.request.stored.parameters, case.weight
    persistent = sum(param.elements for param in persistent_params(case.request))
    threshold = case.zero["stage3_param_persistence_threshold"]
    reason = f"tensors of up to {threshold:,.0f} elements stay unpartitioned, {persistent:,} elements of this model"
    yield _cost(case, "stage3_param_persistence_threshold", reason, persistent * weight * (1 - 1 / case.data_ranks))
    released = case.at(stage3_max_live_parameters=0, stage3_max_reuse_distance=0)
    gathers, least = simulate_gathers(case.request), simulate_gathers(released.request).gathered_at_once
    reason = (
        f"{gathers.gathered_at_once:,} elements are gathered at once: the current layer, prefetched ones, and those"
        " reused soon; the figure includes the buffers that they are copied from"
    )
    if least < gathers.gathered_at_once:
        reason += f"; {least:,} elements with this and stage3_max_live_parameters at 0, and each is gathered twice"
    yield _cost(case, "stage3_max_reuse_distance", reason, gathers.max_live_elements * weight)
    if (group := min(case.zero["zero_hpz_partition_size"], case.ranks)) > 1:
        reason = f"each {group:,.0f} ranks have a secondary partition of all weights"
        yield _cost(case, "zero_hpz_partition_size", reason, elements * weight / group)
    if case.zero["stage3_gather_16bit_weights_on_model_save"]:
        reason = "when the model is saved, the first rank has all of its weights in host memory"
        yield _cost(case, "stage3_gather_16bit_weights_on_model_save", reason, host=elements * weight)
    # If the optimizer is offloaded, a rank's device has no such gradients.
    if not case.offload("offload_optimizer"):
        groups = sub_groups(case.request)
        reason = f"a step makes fp32 gradients of one of {len(groups)} sub-groups at a time, {max(groups):,} elements"
        yield _cost(case, "sub_group_size", reason, max(groups) * FP32_BYTES)


def _offload_costs(case: ConfigCase) -> Iterator[SettingCost]:
    def moved(before: ConfigCase, after: ConfigCase) -> tuple[float, float, float]:
        old, new = before.state, after.state
        return new.device - old.device, new.host - old.host, new.nvme - old.nvme

    optimizer = case.offload("offload_optimizer")
    if optimizer is not None and case.stage:
        whole_optimizer = case.at(offload_param=None, offload_optimizer={**optimizer, "ratio": 1.0})
        reason = "the optimizer is moved off the device, and gradients go to the same place"
        before = whole_optimizer.at(offload_optimizer=None)
        yield _cost(case, "offload_optimizer.device", reason, *moved(before, whole_optimizer))
        groups = sub_groups(case.request)
        if optimizer["device"] == "nvme" and case.stage == 3:
            reason = f"these buffers of the largest sub-group, {max(groups):,} elements in fp32, are pinned host memory"
            size = optimizer["buffer_count"] * max(groups) * FP32_BYTES
            yield _cost(case, "offload_optimizer.buffer_count", reason, host=size)
        elif optimizer["ratio"] < 1 and case.stage == 3:
            remaining = int((1 - optimizer["ratio"]) * len(groups))
            reason = f"whole sub-groups move, {remaining} of a rank's {len(groups)} stay on the device"
            figures = moved(whole_optimizer, case.at(offload_param=None))
            yield _cost(case, "offload_optimizer.ratio", reason, *figures)
    parameters = case.offload("offload_param")
    if parameters is not None and case.stage == 3:
        reason = "this rank's shard of the weights is moved off the device"
        yield _cost(case, "offload_param.device", reason, *moved(case.at(offload_param=None), case))
        if parameters["device"] == "nvme":
            reason = f"these buffers of {parameters['buffer_size']:,.0f} elements are pinned host memory"
            size = parameters["buffer_count"] * parameters["buffer_size"] * case.weight
            yield _cost(case, "offload_param.buffer_count", reason, host=size)
