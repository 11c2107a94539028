"""Accelerate's Accelerator on CPU cores, with the engine of the launched file."""

from __future__ import annotations

import os
from typing import Any


def make_accelerator(accumulation: int, precision: str = "no") -> Any:
    """Return the launched file's Accelerator; on cores Accelerate needs help with FSDP and DeepSpeed."""
    from accelerate import Accelerator, DistributedType, PartialState

    state = PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, mixed_precision=precision)
    if (plugin := accelerator.state.deepspeed_plugin) is not None:
        zero = plugin.deepspeed_config["zero_optimization"]
        zero["reduce_bucket_size"] = 10_000
        if zero["stage"] == 3:
            zero["stage3_param_persistence_threshold"] = 100
    return accelerator
