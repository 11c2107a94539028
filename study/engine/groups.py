"""Ranks that work on the same samples together: refused where they cannot, and read back from the live engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.engine import autotp
from study.engine import context_parallel as context
from study.engine import tensor_parallel as tensors
from study.engine import ulysses as sequence
from study.workloads.presets import FAMILY_OF_TASK

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor
    from transformers import PreTrainedConfig


# What a rank computes of its team's samples: the one seam between the loop and strategies that divide a sample.


@contextmanager
def own_part(accelerator: Accelerator, micro_batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The model's inputs on its device, for a forward and a backward pass within the block.

    Where each rank has all of its samples, or shares whole samples with its team, that is all of the micro-batch.
    """
    from accelerate.utils import send_to_device

    inputs = send_to_device(micro_batch, accelerator.device, non_blocking=True)
    if context.divides(accelerator):
        with context.own_tokens(accelerator, inputs) as own:
            yield own
    else:
        yield sequence.own_tokens(inputs) if sequence.divides(accelerator) else inputs


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
