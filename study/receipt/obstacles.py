"""Trainings that have no plain training to compare with, and the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from study.receipt.live_engine import find_groups, find_kind

# Settings of DeepSpeed under which its functions return the gradients of other weights, or none.
_UNREADABLE = ("zenflow", "round_robin_gradients")
FP16 = "fp16 scales the loss: run it in fp32 or bf16"


class NotComparable(Exception):
    """The reason why a program is not compared with plain training."""


def find_obstacle(model: Any, inner: nn.Module) -> str | None:
    """Return why a model's training is not compared with plain training; None if it can be."""
    if any(_is_compiled(module) for module in (model, *model.modules())):
        return "torch.compile rounds otherwise, and draws other random numbers: run it without"
    if any(parameter.dtype is torch.float16 for parameter in inner.parameters()):
        return FP16
    if any(getattr(parameter, "allreduce", True) is False for parameter in inner.parameters()):
        return "experts that are divided among the ranks have other weights on each: run it without"
    if find_groups(model).ranks_of_a_sample > 1:
        return "tensor-, context- or sequence-parallel groups divide the passes: run it without"
    kind = find_kind(model)
    if kind == "fsdp1" and not getattr(model, "_use_orig_params", False):
        return "FSDP without use_orig_params has no gradient of a single tensor: set use_orig_params"
    return _deepspeed_obstacle(model) if kind == "deepspeed" else None


def _is_compiled(module: Any) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _deepspeed_obstacle(engine: Any) -> str | None:
    zero = engine._config._param_dict.get("zero_optimization", {})
    if setting := next((key for key in _UNREADABLE if zero.get(key)), None):
        return f"DeepSpeed's functions do not return gradients under {setting}: run it without"
    return None
