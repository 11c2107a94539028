"""Measure the model state of one rank in bytes: parameters, gradients, optimizer state, and the engine's buffers.

It is read from the live objects, each storage counted once, and compared with a scan of every tensor storage alive in
the process. `device` is the memory in which the engine computes, `host` its offloaded state, `nvme` the swap files.
Without a GPU, device and host are the same RAM, and the engine's offload configuration decides between them. The
_claim_* functions below find the tensors of each engine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from study.host.stacks import unverified_pair
from study.metrics.inventory import (
    Inventory,
    find_gradients,
    fsdp_groups,
    gathers_in_flight,
    tensors_in,
    whole_storage,
)
from study.records.schema import STATE_KINDS, STATE_PLACES

# Names of claims among the buffers.
GATHERED, MODEL_BUFFERS, REDUCER_BUCKETS = "gathered_parameters", "model_buffers", "ddp_reducer_buckets"


def model_state_bytes(model: Any, optimizer: Any, device: torch.device, *, scan: bool = True) -> dict[str, Any]:
    """Read the state of this rank now; `StateWatch` calls this at the right instants."""
    engine, _ = _unwrap(model, optimizer)
    inventory = claim_model_state(model, optimizer, device)
    claims = {key: count for key, count in inventory.claims.items() if count}
    persistent = getattr(engine.optimizer, "persistent_parameters", []) if engine is not None else []
    return {
        "state_bytes": {kind: {place: inventory.total(kind, place) for place in STATE_PLACES} for kind in STATE_KINDS},
        "pieces": {".".join(key): count for key, count in claims.items() if key[0] != "buffers"},
        "buffer_bytes": {
            f"{name}.{place}": count for (kind, place, name), count in claims.items() if kind == "buffers"
        },
        # ZeRO-3 gathers parameters under the persistence threshold once and never frees them.
        "kept_whole": {
            "parameters": len(persistent),
            "elements": sum(parameter.ds_numel for parameter in persistent),
            "bytes": sum(count for key, count in claims.items() if key[2] == "kept_whole"),
            "threshold_elements": engine.zero_param_persistence_threshold() if persistent else None,
        },
        "grads_in_bucket_bytes": inventory.grads_in_bucket_bytes,
        "other_tensor_bytes": inventory.other_tensor_bytes() if scan else None,
    }


def claim_model_state(model: Any, optimizer: Any, device: torch.device, *, in_step: bool = False) -> Inventory:
    """Claim the state of this rank now. `in_step`: at any moment of a step, when parameters may be gathered."""
    engine, base = _unwrap(model, optimizer)
    if engine is None:
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps last
        inventory = Inventory(device)
        if in_step:
            _claim_gathered_fsdp(inventory, model)
        _claim_plain(inventory, model, base)
        # In a step DDP's reducer may hold its lock, for which its logging data would wait for ever.
        if not in_step:
            _claim_reducer(inventory, model)
    else:
        inventory = Inventory(torch.device(engine.device))
        if engine.zero_optimization_stage() == 3:
            if in_step:
                inventory.claim("buffers", GATHERED, [whole_storage(it) for it in gathers_in_flight(engine.module)])
            _claim_zero3(inventory, engine)
        elif hasattr(base, "single_partition_of_fp32_groups"):
            _claim_zero12(inventory, engine)
        elif isinstance(base, torch.optim.Optimizer):
            _claim_plain(inventory, engine.module, base)
        else:
            _claim_mixed_precision_wrapper(inventory, engine)
        model = engine.module
    scales = [vars(state) for state in find_quant_states(model)]
    # Those of double quantization are in a second state.
    inventory.claim("params", "scales", [scales, [vars(it["state2"]) for it in scales if it.get("state2") is not None]])
    inventory.claim("buffers", MODEL_BUFFERS, list(model.buffers()))
    return inventory


def find_quant_states(model: nn.Module) -> list[Any]:
    """Return shape, scales and code of each 4-bit weight of bitsandbytes."""
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    return [state for state in states if state is not None]


def _claim_gathered_fsdp(inventory: Inventory, model: nn.Module) -> None:
    """Claim what FSDP holds besides its shards: gathered parameters, and the inputs of reductions in flight.

    While parameters are gathered, `model.parameters()` are the gathered ones, so that the shards are claimed here too.
    """
    for group in fsdp_groups(model):
        in_flight = [group._all_gather_result, getattr(group.comm_ctx.all_gather_state, "all_gather_result", None)]
        inventory.claim("buffers", GATHERED, [getattr(result, "all_gather_output", None) for result in in_flight])
        reductions = getattr(group.comm_ctx, "reduce_scatter_states", None) or [
            getattr(group.comm_ctx, "reduce_scatter_state", None)
        ]
        inputs = [getattr(reduction, "reduce_scatter_input", None) for reduction in reductions]
        inventory.claim("buffers", "reduce_scatter_input", inputs)
        for param in group.fsdp_params:
            inventory.claim("params", "parameters", param._sharded_param_data)
            inventory.claim("grads", "gradients", getattr(param.sharded_param, "grad", None))
            inventory.claim("buffers", GATHERED, [param.all_gather_outputs, getattr(param, "_unsharded_param", None)])
    for flat in fsdp1_parameters(model):
        inventory.claim("params", "parameters", getattr(flat, "_local_shard", None))
        gathered = [getattr(flat, name, None) for name in ("_full_param_padded", "_full_prec_full_param_padded")]
        inventory.claim("buffers", GATHERED, [*gathered, getattr(flat, "_mp_shard", None)])
        inventory.claim("grads", "gradients", [getattr(flat, "_saved_grad_shard", None), flat.grad])


def fsdp1_parameters(model: nn.Module) -> list[Any]:
    """Return the flat parameters of FSDP's first version; empty under another engine."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    handles = [getattr(module, "_handle", None) for module in fsdp.FullyShardedDataParallel.fsdp_modules(model)]
    return [handle.flat_param for handle in handles if handle is not None]


def release_gathered(model: Any) -> None:
    """Release parameters that are still gathered after an evaluation: ZeRO-3's live ones and FSDP2's root."""
    engine, _ = _unwrap(model, None)
    if engine is not None and engine.zero_optimization_stage() == 3:
        # DeepSpeed calls this pair around a checkpoint; the state afterwards is as after an optimizer step.
        engine.optimizer.checkpoint_event_prologue()
        engine.optimizer.checkpoint_event_epilogue()
    for group in fsdp_groups(model):
        group.reshard()


class StateWatch:
    """Meter of the model state: `with StateWatch(...) as watch:` around one optimizer step; then `watch.report`.

    Gradients exist only from backward to the optimizer step, and a DeepSpeed engine steps inside
    `accelerator.backward`, so the state is read at the start of the step. Two engines have more gradients before that:
    ZeRO-1 has all unpartitioned gradients until backward has ended, and FSDP2 until the last micro-batch. Therefore
    gradients are also read after the backward pass of each micro-batch, and the largest figure counts. Optimizer state
    is read again after the step, since the first step creates it. Without an optimizer step, as when a loss scaler
    skips it, there is no report.
    """

    def __init__(self, model: Any, optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._hooks = contextlib.ExitStack()
        self._has_begun = False
        self._after_backward: dict[str, Any] | None = None
        self._before_step: dict[str, Any] | None = None
        # Missing attribute in an unverified release of the engine; then there is no report.
        self.unknown: str | None = None
        self.report: dict[str, Any] | None = None

    def __enter__(self) -> StateWatch:
        engine, base = _unwrap(self._model, self._optimizer)
        if engine is not None:
            self._hooks.enter_context(_before_call(engine, "allreduce_gradients", self._read_after_backward))
        else:
            # At the start of the next micro-batch, before FSDP gathers the root for it.
            hook = self._model.register_forward_pre_hook(self._read_between_micro_batches, prepend=True)
            self._hooks.callback(hook.remove)
        if isinstance(base, torch.optim.Optimizer):
            hook = base.register_step_pre_hook(lambda *_: self._read_state())
            self._hooks.callback(hook.remove)
        else:
            # DeepSpeed's wrappers have no hooks. Those of their base optimizer run too late: by then ZeRO-1 and 2 have
            # copied the gradients, and NVMe state has been swapped in.
            self._hooks.enter_context(_before_call(base, "step", self._read_state))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._hooks.close()
        after_step = self._read(scan=False) if kind is None and self._before_step is not None else None
        if self.unknown or self._before_step is None or after_step is None:
            return
        report = self._before_step
        state = report["state_bytes"]
        state["optimizer"] = _larger(state["optimizer"], after_step["state_bytes"]["optimizer"])
        report |= {"grads_before_step": state["grads"], "grads_after_backward": None, "grads_in_bucket_bytes": None}
        if (earlier := self._after_backward) is not None:
            report["grads_after_backward"] = earlier["state_bytes"]["grads"]
            report["grads_in_bucket_bytes"] = earlier["grads_in_bucket_bytes"]
            state["grads"] = _larger(state["grads"], earlier["state_bytes"]["grads"])
            report["buffer_bytes"] = _larger(report["buffer_bytes"], earlier["buffer_bytes"])
        self.report = report

    def _read_between_micro_batches(self, *_: Any) -> None:
        if self._has_begun:
            self._read_after_backward()
        self._has_begun = True

    def _read_after_backward(self) -> None:
        earlier, self._after_backward = self._after_backward, self._read(scan=False)
        if earlier and (now := self._after_backward):
            now["state_bytes"]["grads"] = _larger(now["state_bytes"]["grads"], earlier["state_bytes"]["grads"])
            now["buffer_bytes"] = _larger(now["buffer_bytes"], earlier["buffer_bytes"])

    def _read_state(self) -> None:
        if self._before_step is None:  # ZeRO-3 and parameter groups may step the base optimizer several times
            self._before_step = self._read()

    def _read(self, *, scan: bool = True) -> dict[str, Any] | None:
        if self.unknown:
            return None
        try:
            return model_state_bytes(self._model, self._optimizer, self._device, scan=scan)
        except AttributeError as error:
            if unverified_pair() is None:
                raise
            self.unknown = str(error)
            return None


def _claim_plain(inventory: Inventory, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Claim a bare module, DDP, FSDP2 (DTensors count by their local shard) or DeepSpeed's stage 0 in fp32."""
    inventory.claim("params", "parameters", list(model.parameters()))
    inventory.claim("grads", "gradients", [parameter.grad for parameter in model.parameters()])
    for param in (param for group in fsdp_groups(model) for param in group.fsdp_params):
        if hasattr(param, "_unsharded_param"):
            inventory.claim("grads", "unreduced", [param._unsharded_param.grad, param.unsharded_accumulated_grad])
    inventory.claim("optimizer", "states", list(optimizer.state.values()))


def _claim_reducer(inventory: Inventory, model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel) and not model.gradient_as_bucket_view:
        # The C++ reducer copies every gradient into buckets that Python cannot access.
        logged = model._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        inventory.add_unreachable(REDUCER_BUCKETS, [int(size) for size in sizes.split(",")])


def _reduce_buckets(zero: Any) -> list[Any]:
    """Return the buffers of the buckets: one bucket for each type; before 0.17.2 a single one."""
    if hasattr(zero, "ipg_buckets"):
        return [bucket.buffer for bucket in zero.ipg_buckets.values()]
    names = ("ipg_buffer", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer")
    return [getattr(zero, name, None) for name in names]


def _claim_zero12(inventory: Inventory, engine: Any) -> None:
    """Claim stages 1 and 2 (stage_1_and_2.py). The fp32 partition is always a clone, and counts as optimizer state."""
    zero = engine.optimizer
    offloaded = zero.cpu_offload
    parameters = list(engine.module.parameters())
    # Gradients inside the bucket wait for their reduction (reduce_independent_p_g_buckets_and_remove_grads).
    inventory.claim("buffers", "reduce_bucket", _reduce_buckets(zero))
    inventory.note_bucketed(parameters)
    inventory.claim("params", "flat_groups", zero.bit16_groups_flat)
    inventory.claim("params", "parameters", parameters)
    inventory.claim("optimizer", "fp32_partition", zero.single_partition_of_fp32_groups, offloaded)
    inventory.claim("optimizer", "states", list(zero.optimizer.state.values()), offloaded)
    partition_grads = [partition.grad for partition in zero.single_partition_of_fp32_groups]
    inventory.claim("grads", "fp32_partition_gradient", partition_grads, offloaded)
    inventory.claim("grads", "averaged_gradients", zero.averaged_gradients)
    inventory.claim("grads", "gradients", [find_gradients(parameter) for parameter in parameters])
    inventory.claim("grads", "accumulated_on_host", getattr(zero, "accumulated_grads_in_cpu", None), offloaded)
    for name in ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload"):
        inventory.claim("buffers", name, getattr(zero, name, None), offloaded)
    inventory.claim("buffers", "offload_staging", getattr(zero, "temp_grad_buffer_for_gpu_offload", None))
    # Muon has its momentum twice, so that a step can be skipped.
    staged = [momentum for momentum, _ in getattr(zero, "_muon_pending_momentum", {}).values()]
    inventory.claim("buffers", "staged_momentum", staged)
    _claim_muon_buffers(inventory, zero)


def _claim_zero3(inventory: Inventory, engine: Any) -> None:
    """Claim stage 3 (stage3.py). Its fp32 partition is a copy even of fp32 parameters, and counts as optimizer state.

    _create_fp32_partitions is meant to share the partition in that case, but compares a device with a string.
    """
    zero = engine.optimizer
    offload_params, offload_optimizer = zero.offload_param, zero.offload_optimizer
    parameters = list(engine.module.parameters())
    inventory.claim("buffers", "reduce_bucket", _reduce_buckets(zero))
    inventory.note_bucketed(parameters)
    swapper = next((p.nvme_swapper for p in parameters if getattr(p, "nvme_swapper", None) is not None), None)
    if swapper is not None:
        # First, so that a partition passing through a swap buffer is not counted in memory and on disk.
        inventory.claim("buffers", "nvme_parameter_swap", [swapper.buffers, swapper.partitioned_swap_buffer], True)
        on_disk = [p for p in parameters if p.ds_tensor.final_location == "nvme"]
        inventory.add_files("params", "swap_files", [swapper.id_to_path[p.ds_id] for p in on_disk])
    inventory.claim("params", "partitions", [p.ds_tensor for p in parameters], offload_params)
    # With zero_hpz_partition_size: created when a parameter is first freed, and deleted by the optimizer step.
    inventory.claim("params", "second_copy", [p.ds_secondary_tensor for p in parameters], offload_params)
    persistent = {id(p) for p in zero.persistent_parameters}
    inventory.claim("params", "kept_whole", [p.data for p in parameters if id(p) in persistent])
    inventory.claim("buffers", GATHERED, [p.data for p in parameters if id(p) not in persistent])
    inventory.claim("optimizer", "fp32_partitions", zero.fp32_partitioned_groups_flat, offload_optimizer)
    inventory.claim("optimizer", "states", list(zero.optimizer.state.values()), offload_optimizer)
    if (backup := getattr(zero, "backup_optimizer", None)) is not None:
        # It steps the sub-groups that `ratio` does not offload (_optimizer_step).
        inventory.claim("optimizer", "device_states", list(backup.state.values()))
    if zero.swap_optimizer:
        infos = zero.optimizer_swapper.swap_params_info.values()
        inventory.claim("buffers", "nvme_optimizer_swap", zero.optimizer_swapper.swap_buffer_manager.all_buffers, True)
        inventory.add_files("optimizer", "swap_files", [path for info in infos for path in _swap_paths(info)])
        inventory.claim("grads", "unswapped", [info.unswapped_gradients for info in infos], True)
        inventory.add_files("grads", "swap_files", [p for info in infos for p in info.get_swap_gradient_paths()])
    inventory.claim("grads", "partitions", zero.grad_partitions_flat_buffer, offload_optimizer)
    fp32_gradients = [partition.grad for partition in zero.fp32_partitioned_groups_flat]
    inventory.claim("grads", "fp32_partition_gradient", fp32_gradients, offload_optimizer)
    inventory.claim("grads", "gradients", [p.grad for p in parameters])
    inventory.claim("buffers", "host_parameter_memory", zero.param_groups_fp16_flat_cpu_memory, True)
    _claim_muon_buffers(inventory, zero)


def _swap_paths(info: Any) -> list[str]:
    """Return the files of a sub-group's optimizer state; before 0.16.9 they are an attribute."""
    paths: list[str] = info.get_swap_paths() if hasattr(info, "get_swap_paths") else info.swap_paths
    return paths


def _claim_muon_buffers(inventory: Inventory, zero: Any) -> None:
    buffers = getattr(zero, "_muon_allgather_buffers", {})
    inventory.claim("buffers", "gathered_for_muon", [[local, gathered] for local, gathered, _ in buffers.values()])


def _claim_mixed_precision_wrapper(inventory: Inventory, engine: Any) -> None:
    """Claim FP16_Optimizer, FP16_UnfusedOptimizer (stage 0) or BF16_Optimizer (stage 1 with fp32 accumulation)."""
    wrapper = engine.optimizer
    parameters = list(engine.module.parameters())
    inventory.claim("params", "parameters", parameters)
    for name in ("fp16_groups_flat", "bf16_groups_flat"):
        inventory.claim("params", "flat_groups", getattr(wrapper, name, None))
    inventory.claim("grads", "gradients", [find_gradients(parameter) for parameter in parameters])
    for name in ("fp32_groups_gradients_flat", "fp32_groups_gradient_flat_partition"):
        inventory.claim("grads", name, getattr(wrapper, name, None))
    masters = [
        getattr(wrapper, name, None) for name in ("fp32_groups_flat", "fp32_groups", "fp32_groups_flat_partition")
    ]
    inventory.claim("optimizer", "fp32_masters", masters)
    inventory.claim("grads", "fp32_gradients", [master.grad for master in tensors_in(masters)])
    inventory.claim("optimizer", "states", list(wrapper.optimizer.state.values()))


def _unwrap(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return the DeepSpeed engine or None, and the optimizer whose `step` does the update."""
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine):
        return model, model.optimizer
    return None, base_optimizer(optimizer)


def base_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _larger(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: max(first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}


@contextlib.contextmanager
def _before_call(owner: Any, name: str, action: Callable[[], None]) -> Iterator[None]:
    original, instance_attribute = getattr(owner, name), vars(owner).get(name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        if instance_attribute is None:
            delattr(owner, name)
        else:
            setattr(owner, name, instance_attribute)
