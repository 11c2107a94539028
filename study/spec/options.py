"""Options of a run that DeepSpeed takes as settings, and that no strategy's file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from study.spec.config import RunConfig


def settings_of_options(config: RunConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whole sections, to put in place of those in `settings`."""
    found: dict[str, Any] = {}
    if config.bf16_states:
        found["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if config.optimizer == "muon" and settings["zero_optimization"]["stage"] == 3:
        # DeepSpeed refuses Muon beside it.
        found["zero_optimization"] = {**settings["zero_optimization"], "reduce_scatter": False}
    return found
