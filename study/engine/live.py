"""What the live engine holds and does, read from its own objects. study/engine/audit.py judges it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from study.config.errors import Unsupported, UserError
from study.config.flags import BatchPlan, RunConfig
from study.config.launched import Launch
from study.config.strategies import LEAST_RANKS_WITH_COPIES as LEAST_RANKS
from study.engine import context_parallel as context
from study.engine import tensor_parallel as tensors

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


# More than one copy of the state, each within a part of the ranks: refused where it cannot be, else read back.


def check_copies(config: RunConfig, launch: Launch, gpus: int) -> None:
    """The copies and the ranks of each must be the job's."""
    strategy, ranks, of_a_copy = launch.strategy.overridden(config), launch.world_size, launch.ranks_of_a_copy(config)
    if of_a_copy is None:
        return
    if strategy.own_settings:
        copies = strategy.mesh[0] if strategy.mesh else None
        if of_a_copy == 1 or ranks % of_a_copy or copies not in (None, ranks // of_a_copy):
            shape = f"{of_a_copy} ranks" if copies is None else f"{copies} copies of {of_a_copy} ranks"
            problem = f"{strategy.name} asks for {shape}, which {ranks} ranks are not"
            raise UserError(problem, "let its sizes fit --num_processes")
    elif ranks < LEAST_RANKS or ranks % 2:
        if launch.virtual:
            raise Unsupported(
                f"{strategy.name} takes an even number of ranks from {LEAST_RANKS} up, and {ranks} were asked for",
                f"ask for {max(LEAST_RANKS, ranks + ranks % 2)}",
            )
        fits_here = gpus == 0 or gpus * launch.machines >= LEAST_RANKS
        raise Unsupported(
            f"{strategy.name} takes an even number of ranks from {LEAST_RANKS} up: two parts of the job, each with a"
            f" copy over two ranks or more, and {ranks} {'was' if ranks == 1 else 'were'} launched",
            f"run: {launch.command(-(-LEAST_RANKS // launch.machines), launch.machines)}"
            if fits_here
            else f"use {'fsdp2' if strategy.is_fsdp else 'zero3'}, which has one copy",
        )


def second_copy(engine: Any) -> dict[str, Any]:
    """Of stage 3's parameters, by the live groups that it is gathered in: empty without one."""
    groups = {
        (parameter.ds_secondary_tensor_num_of_groups, parameter.ds_zero_param_process_group)
        for parameter in engine.module.parameters()
        if getattr(parameter, "ds_zero_param_process_group", None) is not None
    }
    return {"copies": _only({(copies, group.size()) for copies, group in groups})} if groups else {}


def sharded_copies(model: torch.nn.Module) -> dict[str, Any]:
    """How FSDP2 lays its parameters over the ranks; empty where all ranks share one copy."""
    from study.metrics.inventory import dtensor_type

    if not (tensor_type := dtensor_type()):
        return {}
    from torch.distributed.tensor import Replicate

    found = set()
    for parameter in model.parameters():
        if isinstance(parameter, tensor_type):
            sizes = list(zip(parameter.device_mesh.shape, parameter.placements, strict=True))
            copies = math.prod(size for size, placed in sizes if isinstance(placed, Replicate))
            found.add((copies, math.prod(size for size, placed in sizes if placed.is_shard())))
    return {"copies": _only(found)} if any(copies > 1 for copies, _ in found) else {}


def _only(found: set[tuple[int, int]]) -> Any:
    """What all parameters have in common; else what there is, which nobody asked for."""
    shapes = [{"copies": copies, "ranks_of_a_copy": ranks} for copies, ranks in sorted(found)]
    return shapes[0] if len(shapes) == 1 else shapes


# Of DeepSpeed's ZeRO settings, those that change what is held and what is sent.
BUCKET_KEYS = (
    "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "prefetch_bucket_size",
    "param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size",
    "use_multi_rank_bucket_allreduce", "reduce_scatter", "contiguous_gradients", "round_robin_gradients",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
)  # fmt: skip


def read_deepspeed(engine: Any) -> dict[str, Any]:
    zero = engine._config.zero_config
    # Null is what this release does not have.
    buckets = {key: getattr(zero, key, None) for key in BUCKET_KEYS}
    offload, nvme_paths = {}, set()
    for key in ("offload_optimizer", "offload_param"):
        section = getattr(zero, key)
        device = getattr(section.device, "value", section.device) if section is not None else "none"
        offload[key] = None if device == "none" else device
        if device == "nvme":
            nvme_paths.add(str(section.nvme_path))
            if key == "offload_param":
                # The run makes the file's larger where a rank's part of the largest parameter is.
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
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        **offload,
        "nvme_path": ", ".join(sorted(nvme_paths)) or None,
        "precision": precision,
        "param_dtype": dtype_name(next(engine.module.parameters()).dtype),
        "bf16_states": _has_bf16_states(engine),
        "gradient_clipping": float(engine.gradient_clipping()),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "per_device_train_batch_size": engine.train_micro_batch_size_per_gpu(),
        "buckets": buckets,
        **second_copy(engine),
    }


def _has_bf16_states(engine: Any) -> bool:
    """The masters are there from the start, and Adam makes its moments like them."""
    groups = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    masters = [master for name in groups for master in getattr(engine.optimizer, name, [])]
    return bool(masters) and {dtype_name(master.dtype) for master in masters} == {"bfloat16"}


def read_plain(accelerator: Accelerator, model: Any, config: RunConfig, plan: BatchPlan) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    buckets = {"ddp_bucket_bytes": model.bucket_bytes_cap} if isinstance(model, DistributedDataParallel) else {}
    return {
        **dict.fromkeys(("zero_stage", "offload_optimizer", "offload_param", "nvme_path")),
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "param_dtype": dtype_name(next(model.parameters()).dtype),
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "buckets": buckets,
        **_read_fsdp(model),
        **_read_parts(accelerator, model),
        # Without an engine these two are the loop's own doing; there is no second opinion to read back.
        "gradient_clipping": config.max_grad_norm,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
    }


def _read_parts(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Any]:
    """Of tensors that are divided over ranks: gathered again by FSDP2, or never."""
    from study.metrics.inventory import dtensor_type

    if (team := tensors.live_team(model)) is not None:
        return {"fully_sharded": False, "team": team}
    if context.divides(accelerator):
        return {"fully_sharded": True, "team": context.live_team(accelerator, model)}
    is_divided = any(isinstance(parameter, dtensor_type()) for parameter in model.parameters())
    return {"fully_sharded": is_divided, **sharded_copies(model)}


def _read_fsdp(model: torch.nn.Module) -> dict[str, Any]:
    """What FSDP2 holds and sends by: empty without it. Torch tells none of it but from inside."""
    from torch.distributed import fsdp
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    if not hasattr(fsdp, "FSDPModule"):
        return {}  # an older torch

    # Modules that are sharded together share a state. The first is the whole model's, which torch leaves gathered after
    # the forward pass unless told otherwise, and says so only once that has begun.
    found = (module._get_fsdp_state() for module in model.modules() if isinstance(module, fsdp.FSDPModule))
    states = list({id(state): state for state in found}.values())
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


def asked_of_fsdp(accelerator: Accelerator) -> dict[str, Any]:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not getattr(accelerator, "is_fsdp2", False):
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy

    asked = {
        "fsdp_offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
    }
    # Where no block is wrapped there is nothing to let go of.
    if plugin.auto_wrap_policy:
        asked["fsdp_reshard_after_forward"] = bool(plugin.reshard_after_forward)
    return asked


def uses_tf32() -> bool:
    import torch

    matmul = torch.backends.cuda.matmul
    # Before 2.9 torch has the older switch alone; from then on that one may contradict the newer.
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
