"""The tensors of each layer divided over the ranks of a team, by transformers and without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.workloads.tensor_plans import check_divisible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


def check_tensors(config: RunConfig, launch: Launch, architecture: PreTrainedConfig) -> None:
    """What cannot be divided, or cannot be used where tensors are, is refused before anything is written."""
    strategy, ranks = launch.strategy, launch.world_size
    if strategy.team_size != ranks:
        # Accelerate has copies beside it under FSDP alone.
        raise UserError(
            f"{strategy.name} divides tensors over a team of {strategy.team_size} ranks, and all {ranks} must be in it",
            f"add --team_size {ranks}" if ranks > 1 else "launch 2 ranks",
        )
    for flag, is_asked, why in (
        ("checkpointing_steps", config.checkpointing_steps, "Accelerate cannot save the parts"),
        ("resume_from_checkpoint", config.resume_from_checkpoint, "Accelerate cannot load the parts"),
        ("precision fp16", config.precision == "fp16", "torch unscales parts and whole tensors in no one call"),
        ("torch_compile", config.torch_compile, "GPT-2's parts are put together outside of what is compiled"),
    ):
        if is_asked:
            raise UserError(f"--{flag}: {strategy.name} divides tensors, and {why}", "leave it out")
    check_divisible(config, architecture, strategy)


def live_team(model: torch.nn.Module) -> dict[str, Any] | None:
    """From the parameters themselves: None where no tensor is divided but by FSDP2, which gathers what it divides."""
    from study.metrics.inventory import dtensor_type

    if not (tensor_type := dtensor_type()):
        return None
    meshes = {one.device_mesh for one in model.parameters() if isinstance(one, tensor_type)}
    sizes = {mesh.size() for mesh in meshes if mesh.mesh_dim_names == ("tp",)}
    if not sizes:
        return None
    return {"divides": "tensors", "ranks": sizes.pop() if len(sizes) == 1 else sorted(sizes), "state_over": 1}
