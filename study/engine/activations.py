"""ZeRO-R's partitioned activations: of what checkpointing keeps for the backward pass, each rank of a team a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from study.config.strategies import KEEPS_PARTS


def are_partitioned(settings: Mapping[str, Any]) -> bool:
    section, key = KEEPS_PARTS.split(".")
    return bool(settings.get(section, {}).get(key))


def partition_activations(model: Any) -> None:
    """The models of transformers checkpoint by torch, whatever DeepSpeed's settings say: they are told another way."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.checkpointing.configure(groups, partition_activations=True)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint_in_parts)


def checkpoint_in_parts(layer: Callable[..., Any], hidden: Any, *rest: Any) -> Any:
    import deepspeed
    import torch

    kind = hidden.device.type
    # DeepSpeed computes the layer again outside of what its forward pass computes in.
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))

    def compute(states: Any) -> Any:
        with autocast:
            return layer(states, *rest)

    # The hidden states alone are its argument: DeepSpeed hands others over twice where activations are partitioned.
    return deepspeed.checkpointing.checkpoint(compute, hidden)


def live_partition(model: Any) -> bool:
    """Whether the layers go through it, and it divides what they keep."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    return checkpoint_in_parts in functions and bool(checkpointing.PARTITION_ACTIVATIONS)
