"""Introspection of the live engine: its settings, read from its objects and compared in study/engine/audit.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.config.flags import BatchPlan, RunConfig
from study.engine.model_parallel import read_fsdp_replicas, read_group, read_hpz_replicas

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


# DeepSpeed's ZeRO settings that change memory and communication.
BUCKET_KEYS = (
    "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "prefetch_bucket_size",
    "param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size",
    "use_multi_rank_bucket_allreduce", "reduce_scatter", "contiguous_gradients", "round_robin_gradients",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
)  # fmt: skip


def read_engine(accelerator: Accelerator, model: Any, config: RunConfig, plan: BatchPlan) -> dict[str, Any]:
    """Return the live settings of DeepSpeed, FSDP or DDP as entries of engine.json."""
    group = read_group(accelerator, model)
    live = {} if group is None else {"model_parallel_group": group}
    if hasattr(model, "zero_optimization_stage"):
        return live | _read_deepspeed(model)
    from torch.nn.parallel import DistributedDataParallel

    from study.metrics.inventory import dtensor_type

    # Tensor parallelism divides parameters too, but never gathers them.
    is_tensor_parallel = group is not None and group["divides"] == "tensors"
    has_shards = any(isinstance(parameter, dtensor_type()) for parameter in model.parameters())
    return {
        **live,
        **dict.fromkeys(("zero_stage", "offload_optimizer", "offload_param", "nvme_path")),
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "param_dtype": dtype_name(next(model.parameters()).dtype),
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "buckets": {"ddp_bucket_bytes": model.bucket_bytes_cap} if isinstance(model, DistributedDataParallel) else {},
        **_read_fsdp(model),
        "fully_sharded": has_shards and not is_tensor_parallel,
        **(read_fsdp_replicas(model) if group is None else {}),
        # Without an engine the training loop sets these two: there is no second source to read.
        "gradient_clipping": config.max_grad_norm,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
    }


def _read_deepspeed(engine: Any) -> dict[str, Any]:
    zero = engine._config.zero_config
    # None: this release has no such setting.
    buckets = {key: getattr(zero, key, None) for key in BUCKET_KEYS}
    offload, nvme_paths = {}, set()
    for key in ("offload_optimizer", "offload_param"):
        section = getattr(zero, key)
        device = getattr(section.device, "value", section.device) if section is not None else "none"
        offload[key] = None if device == "none" else device
        if device == "nvme":
            nvme_paths.add(str(section.nvme_path))
            if key == "offload_param":
                # The run enlarges the file's value if a rank's part of the largest parameter needs it.
                buckets["offload_param.buffer_size"] = section.buffer_size
    if engine.bfloat16_enabled():
        precision = "bf16-engine"
    elif engine.fp16_enabled():
        precision = "fp16-engine"
    elif hasattr(engine, "torch_autocast_enabled") and engine.torch_autocast_enabled():
        autocast = dtype_name(engine.torch_autocast_dtype())
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(autocast, autocast)
    else:
        precision = "fp32"
    # Master weights are fp32 or bf16; Adam creates its moments in the same dtype.
    groups = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    masters = {dtype_name(master.dtype) for name in groups for master in getattr(engine.optimizer, name, [])}
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        **offload,
        "nvme_path": ", ".join(sorted(nvme_paths)) or None,
        "precision": precision,
        "param_dtype": dtype_name(next(engine.module.parameters()).dtype),
        "bf16_states": masters == {"bfloat16"},
        "gradient_clipping": float(engine.gradient_clipping()),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "per_device_train_batch_size": engine.train_micro_batch_size_per_gpu(),
        "buckets": buckets,
        **read_hpz_replicas(engine),
    }


def _read_fsdp(model: torch.nn.Module) -> dict[str, Any]:
    """Return FSDP2's settings from its private states, as torch has no public access; empty without FSDP2."""
    from torch.distributed import fsdp
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    if not hasattr(fsdp, "FSDPModule"):
        return {}  # an older torch

    # Modules that are sharded together share a state. The first is the whole model's. By default torch leaves it
    # gathered after the forward pass, and sets that flag only when the first pass begins.
    module_states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, fsdp.FSDPModule))
    states = list({id(state): state for state in module_states}.values())
    if not states:
        return {}
    groups = [group for state in states for group in state._fsdp_param_groups]
    gathered = states[0]._fsdp_param_groups if states[0]._auto_reshard_after_forward else []
    resharded = [group for group in groups if group.post_forward_mesh_info is not None and group not in gathered]
    return {
        "fsdp_groups": len(groups),
        "fsdp_resharded_groups": len(resharded),
        "fsdp_reshard_after_forward": bool(resharded),
        "fsdp_offload_params": any(isinstance(group.offload_policy, fsdp.CPUOffloadPolicy) for group in groups),
        "fsdp_activation_checkpointing": any(isinstance(module, ActivationWrapper) for module in model.modules()),
    }


def uses_tf32() -> bool:
    """Whether torch computes fp32 matrix products in TF32."""
    import torch

    matmul = torch.backends.cuda.matmul
    # Before 2.9 torch has only the older switch; from 2.9 on the older one may contradict the newer.
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
