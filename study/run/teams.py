"""Ranks that work on the same samples together: refused where they cannot, and read back from the live engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.errors import UserError
from study.models.presets import FAMILY_OF_TASK
from study.run import autotp, context, sequence, tensors
from study.spec.config import RunConfig
from study.spec.launched import Launch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig


def check_team(config: RunConfig, launch: Launch, architecture: PreTrainedConfig, saved_by: int | None = None) -> None:
    """What cannot be divided is refused before anything is written. `saved_by` is of a checkpoint to go on from."""
    strategy, team = launch.strategy, launch.strategy.team
    if team is None:
        return
    if saved_by not in (None, launch.world_size) and (team.divides, strategy.zero_stage) != ("sequence", 3):
        # DeepSpeed's universal checkpoint takes a team for ranks that hold other tensors, and misses their files.
        raise UserError(
            f"a checkpoint of {strategy.name} goes on with as many ranks as saved it, which were {saved_by}",
            f"use --num_processes {saved_by}",
        )
    if config.optimizer == "muon":
        raise UserError(f"--optimizer muon: {strategy.name} has not been shown to train with it", "leave it out")
    if team.divides == "tensors":
        if config.peft != "none":
            raise UserError(
                f"--peft {config.peft}: {strategy.name} divides tensors beside which adapters stand whole",
                "leave it out",
            )
        if strategy.deepspeed is not None:
            autotp.check_divisible(config, architecture, strategy.name, team.ranks)
        else:
            tensors.check_tensors(config, launch, architecture)
        return
    if FAMILY_OF_TASK[config.task] != "causal-lm":
        raise UserError(
            f"{strategy.name} divides the tokens of causal models, and --task {config.task} has none",
            "use --task gpt-wikitext, or a strategy that leaves samples whole",
        )
    kind = context if team.divides == "context" else sequence
    kind.check_divisible(config, architecture, strategy.name, team.ranks)


def asked_team(launch: Launch) -> dict[str, Any]:
    strategy = launch.strategy
    assert strategy.team is not None
    divided = strategy.is_fsdp or bool(strategy.zero_stage)
    ranks = launch.world_size // (strategy.team_size if strategy.team.divides == "tensors" else 1)
    return {"divides": strategy.team.divides, "ranks": strategy.team_size, "state_over": ranks if divided else 1}


def live_team(accelerator: Accelerator, engine: Any) -> dict[str, Any] | None:
    """What a team divides, its ranks, and over how many ranks each part of the state is divided further."""
    import torch.distributed as dist

    kind = next((kind for kind in (sequence, autotp) if kind.divides(accelerator)), None)
    if kind is None:
        return None
    divides, ranks = kind.live_team(engine)
    state_over = dist.get_world_size(engine.optimizer.dp_process_group) if engine.zero_optimization() else 1
    return {"divides": divides, "ranks": ranks, "state_over": state_over}
