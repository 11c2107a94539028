"""More than one copy of the state, each within a part of the ranks: refused where it cannot be, else read back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from study.errors import Unsupported, UserError
from study.spec.config import RunConfig
from study.spec.launched import Launch
from study.spec.strategies import LEAST_RANKS_WITH_COPIES as LEAST_RANKS

if TYPE_CHECKING:
    import torch


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
    from study.measure.inventory import dtensor_type

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
