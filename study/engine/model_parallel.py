"""Checks of model-parallel and replica groups before a run, and their introspection in the live engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig
from study.config.launch_context import Launch
from study.config.strategies import MIN_RANKS_WITH_REPLICAS as LEAST_RANKS
from study.config.strategies import Strategy
from study.engine.sequence_parallel import check_sequence, uses_context_parallelism, uses_ulysses
from study.engine.tensor_parallel import autotp_size, check_autotp, check_tensors, is_divided
from study.workloads.presets import FAMILY_OF_TASK

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedConfig


def check_group(
    config: RunConfig, launch: Launch, architecture: PreTrainedConfig, saved_world_size: int | None = None
) -> None:
    """Raise UserError if the group cannot train this model, or resume what `saved_world_size` ranks have saved."""
    strategy, group = launch.strategy, launch.strategy.group
    if group is None:
        return
    if saved_world_size not in (None, launch.world_size) and (group.divides, strategy.zero_stage) != ("sequence", 3):
        # DeepSpeed's universal checkpoint expects different tensors on each rank of a group, and their files are
        # missing.
        problem = f"a checkpoint of {strategy.name} resumes only with the world size that saved it, {saved_world_size}"
        raise UserError(problem, f"use --num_processes {saved_world_size}")
    if config.optimizer == "muon":
        raise UserError(f"--optimizer muon: {strategy.name} has not been shown to train with it", "leave it out")
    if group.divides == "tensors":
        if config.peft != "none":
            problem = f"--peft {config.peft}: {strategy.name} divides tensors, but does not divide adapters"
            raise UserError(problem, "leave it out")
        if strategy.deepspeed is not None:
            check_autotp(config, architecture, strategy.name, group.ranks)
        else:
            check_tensors(config, launch, architecture)
        return
    if FAMILY_OF_TASK[config.task] != "causal-lm":
        problem = f"{strategy.name} divides the tokens of causal models, and --task {config.task} has none"
        raise UserError(problem, "use --task gpt-wikitext, or a strategy that does not divide samples")
    check_sequence(config, architecture, strategy.name, group.ranks, is_context=group.divides == "context")


def read_group(accelerator: Accelerator, model: Any) -> dict[str, Any] | None:
    """Return the live group's kind, its size and the number of ranks that shard its state; None without a group."""
    import torch.distributed as dist

    from study.metrics.inventory import dtensor_type

    if autotp_size(accelerator) > 1 or uses_ulysses(accelerator):
        from deepspeed.utils import groups

        divides: str | None = "sequence"
        if uses_ulysses(accelerator):
            ranks = groups._get_sequence_parallel_world_size()
        else:
            divides = "tensors" if any(map(is_divided, model.module.parameters())) else None
            ranks = groups.get_tensor_model_parallel_world_size()
        state_over = dist.get_world_size(model.optimizer.dp_process_group) if model.zero_optimization() else 1
        return {"divides": divides, "ranks": ranks, "state_over": state_over}
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, dtensor_type())}
    if uses_context_parallelism(accelerator):
        ranks = accelerator._cp_context.keywords["mesh"].size()
        return {"divides": "context", "ranks": ranks, "state_over": _only({mesh.size() for mesh in meshes})}
    # FSDP2's parameters are DTensors as well, of meshes with other names.
    sizes = {mesh.size() for mesh in meshes if mesh.mesh_dim_names == ("tp",)}
    return {"divides": "tensors", "ranks": _only(sizes), "state_over": 1} if sizes else None


def check_replicas(launch: Launch, strategy: Strategy, gpus: int) -> None:
    """Raise UserError if the world size is not the number of replicas times the ranks of each."""
    ranks = launch.world_size
    if (per_replica := launch.ranks_per_replica(strategy)) is None:
        return
    if strategy.custom_settings:
        replicas = strategy.mesh[0] if strategy.mesh else None
        if per_replica == 1 or ranks % per_replica or replicas not in (None, ranks // per_replica):
            shape = f"{per_replica} ranks" if replicas is None else f"{replicas} replicas of {per_replica} ranks"
            problem = f"{strategy.name} needs {shape}, but the world size is {ranks}"
            raise UserError(problem, "make its sizes match --num_processes")
    elif ranks < LEAST_RANKS or ranks % 2:
        needs = f"{strategy.name} needs an even number of ranks from {LEAST_RANKS} up, for two replicas of two or more"
        if launch.virtual:
            raise Unsupported(f"{needs}; {ranks} were requested", f"use {max(LEAST_RANKS, ranks + ranks % 2)}")
        has_enough_gpus = gpus == 0 or gpus * launch.machines >= LEAST_RANKS
        raise Unsupported(
            f"{needs}; {ranks} {'was' if ranks == 1 else 'were'} launched",
            f"run: {launch.command(-(-LEAST_RANKS // launch.machines), launch.machines)}"
            if has_enough_gpus
            else f"use {'fsdp2' if strategy.is_fsdp else 'zero3'}, which has one replica",
        )


def read_hpz_replicas(engine: Any) -> dict[str, Any]:
    """Return stage 3's secondary partition (hpZ), read from the live groups that gather it; empty without one."""
    groups = {
        (parameter.ds_secondary_tensor_num_of_groups, parameter.ds_zero_param_process_group)
        for parameter in engine.module.parameters()
        if getattr(parameter, "ds_zero_param_process_group", None) is not None
    }
    return _replicas({(copies, group.size()) for copies, group in groups})


def read_fsdp_replicas(model: torch.nn.Module) -> dict[str, Any]:
    """Return FSDP2's replicas and the ranks of each, read from its device meshes; empty without replicas."""
    from study.metrics.inventory import dtensor_type

    layouts = set()
    for parameter in model.parameters():
        if isinstance(parameter, dtensor_type()):
            from torch.distributed.tensor import Replicate

            sizes = list(zip(parameter.device_mesh.shape, parameter.placements, strict=True))
            copies = math.prod(size for size, placed in sizes if isinstance(placed, Replicate))
            layouts.add((copies, math.prod(size for size, placed in sizes if placed.is_shard())))
    return _replicas(layouts) if any(copies > 1 for copies, _ in layouts) else {}


def _replicas(layouts: set[tuple[int, int]]) -> dict[str, Any]:
    shapes = [{"copies": copies, "ranks_of_a_copy": ranks} for copies, ranks in sorted(layouts)]
    return {"copies": _only(shapes)} if shapes else {}


def _only(values: Any) -> Any:
    """Return the value that all parameters share; if they differ a list, which equals no request."""
    return next(iter(values)) if len(values) == 1 else sorted(values, key=str)
