"""A plain copy of a model that trains inside an engine: the same modules, without wrappers, shards and their hooks."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from study.compositions.trace import plain_name

# Hooks of these packages belong to an engine. Others, such as those of peft or of the program, are part of the model.
_ENGINES = ("accelerate", "deepspeed", "study", "torch.distributed")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# FSDP2 derives a class from that of the module.
_FSDP2_BASE = "FSDPModule"


def copy_plain(model: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """Return a model of plain modules that computes what `model` computes.

    `parameters` has the copy of each parameter by the id of the original. Settings that are neither modules nor tensors
    are shared with the original.
    """
    modules = list(model.modules())
    copies: dict[int, Any] = dict(parameters)
    for module in modules:
        kind = _plain_class(module)
        copies[id(module)] = kind.__new__(kind)
    for module in reversed(modules):
        if _is_wrapper(module):
            # Inner wrappers come later, and so are replaced first.
            copies[id(module)] = copies[id(module._fsdp_wrapped_module)]
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None:
                copies.setdefault(id(buffer), buffer.detach().clone())
    for module in modules:
        if not _is_wrapper(module):
            _fill(copies[id(module)], module, copies)
    copied: nn.Module = copies[id(model)]
    return copied


def _fill(copied: nn.Module, module: nn.Module, copies: Mapping[int, Any]) -> None:
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            # ZeRO-3 replaces this dictionary by one that gathers.
            attributes[name] = {key: copies.get(id(item), item) for key, item in value.items()}
        elif name in _HOOKS:
            attributes[name] = OrderedDict((key, hook) for key, hook in value.items() if not _is_of_engine(hook))
        elif name == "forward" and isinstance(value, types.FunctionType):
            # It may call the original.
            raise TypeError(f"{type(module).__name__}.forward is replaced by a function, which a copy cannot have")
        else:
            attributes[name] = _replace(value, copies)
    vars(copied).update(attributes)


def _replace(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return an attribute with the copies in place of modules, parameters and buffers."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, types.MethodType):
        # Accelerate replaces `forward` of one model by such a method.
        return types.MethodType(value.__func__, _replace(value.__self__, copies))
    if isinstance(value, functools.partial):
        # So do Accelerate's hooks of a device map.
        arguments = [_replace(item, copies) for item in value.args]
        return functools.partial(_replace(value.func, copies), *arguments, **_replace(value.keywords, copies))
    if type(value) in (list, tuple):
        return type(value)(_replace(item, copies) for item in value)
    if type(value) is dict:
        return {key: _replace(item, copies) for key, item in value.items()}
    return value


def _plain_class(module: nn.Module) -> Any:
    kind = type(module)
    bases = kind.__mro__
    return bases[2] if len(bases) > 2 and bases[1].__name__ == _FSDP2_BASE else kind


def _is_wrapper(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_of_engine(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    places = (getattr(hook, "__module__", ""), type(owner).__module__)
    return any(place == engine or place.startswith(f"{engine}.") for place in places for engine in _ENGINES)


def read_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's buffers by plain name."""
    return {plain_name(name): buffer.detach().clone() for name, buffer in model.named_buffers()}


def load_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Set the buffers of a copy to those of the original at some moment."""
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[plain_name(name)])
