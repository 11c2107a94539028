"""Ranks that work on the same samples together: refused where they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from study.errors import UserError
from study.models.presets import FAMILY_OF_TASK
from study.run import context, tensors
from study.spec.config import RunConfig
from study.spec.launched import Launch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_team(config: RunConfig, launch: Launch, architecture: PreTrainedConfig) -> None:
    """What cannot be divided is refused before anything is written."""
    strategy, team = launch.strategy, launch.strategy.team
    if team is None:
        return
    if team.divides == "tensors":
        tensors.check_tensors(config, launch, architecture)
        return
    if FAMILY_OF_TASK[config.task] != "causal-lm":
        raise UserError(
            f"{strategy.name} divides the tokens of causal models, and --task {config.task} has none",
            "use --task gpt-wikitext, or a strategy that leaves samples whole",
        )
    context.check_divisible(config, architecture, strategy.name, team.ranks)
