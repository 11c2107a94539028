"""The passes of a program's model within an optimizer step: their inputs, outputs and upstream gradients."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from study.receipt.plain_copy import read_buffers

# A loss that transformers' Trainer divides by the tokens of all micro-batches has this argument.
_TOKENS = "num_items_in_batch"
# torch's number of the running backward pass if there is none.
_NO_BACKWARD = -1


@dataclasses.dataclass
class RecordedPass:
    """One forward pass of the model, and the gradients with which the backward pass began at its outputs."""

    args: Any
    kwargs: Any
    random_state: tuple[torch.Tensor, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    # Device type, whether it is on, and its type, as the model's first layer had it.
    autocast: tuple[str, bool, torch.dtype] | None = None
    outputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    upstream: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def losses(self) -> list[str]:
        """Names of the outputs that are one number and were backpropagated."""
        return [name for name in self.upstream if self.outputs[name].numel() == 1]

    @property
    def divides_by_tokens(self) -> bool:
        return isinstance(self.kwargs, Mapping) and self.kwargs.get(_TOKENS) is not None

    def hash_inputs(self) -> str:
        digest = hashlib.sha256()
        for leaf in tree_leaves((self.args, dict(self.kwargs))):
            if isinstance(leaf, torch.Tensor):
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class PassRecorder:
    """Hooks on a model that note its passes, until `take` returns those of a step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._passes: list[RecordedPass] = []
        self._open: RecordedPass | None = None
        # Not first: FSDP2's hook casts the inputs.
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True)
        # A module that was called outside of the model's pass.
        self.outside: str | None = None
        for name, module in model.named_modules():
            if module is not model:
                module.register_forward_pre_hook(functools.partial(self._enter_module, name), prepend=True)

    def take(self) -> list[RecordedPass]:
        """Return the passes since the last call that were backpropagated."""
        passes, self._passes = self._passes, []
        return [it for it in passes if it.upstream]

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open = None
        if not torch.is_grad_enabled():
            return
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._open = RecordedPass(
            args=tree_map(_keep, args),
            kwargs=tree_map(_keep, kwargs),
            random_state=(torch.get_rng_state(), cuda),
            buffers=read_buffers(module),
        )

    def _enter_module(self, name: str, *_: Any) -> None:
        if self._open is None:
            # Gradient checkpointing calls modules again in the backward pass.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == _NO_BACKWARD:
                self.outside = name
        elif self._open.autocast is None:
            self._open.autocast = read_autocast(self._device)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        recorded, self._open = self._open, None
        if recorded is None:
            return None
        recorded.autocast = recorded.autocast or read_autocast(self._device)
        self._passes.append(recorded)

        def follow(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            # Gradients that reach a copy of the output are those from outside of the model. A view would lose its hook
            # if the program changes the loss in place, as transformers' Trainer does.
            outside = tensor.clone()
            recorded.outputs[name] = tensor.detach()
            outside.register_hook(lambda gradient: _note(recorded.upstream, name, gradient))
            return outside

        return map_tensors(output, follow)


def _note(upstream: dict[str, torch.Tensor], name: str, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        # DDP's outermost function passes on that an output was not used.
        return
    earlier = upstream.get(name)
    upstream[name] = gradient.detach().clone() if earlier is None else earlier + gradient.detach()


def _keep(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def read_autocast(device: torch.device) -> tuple[str, bool, torch.dtype]:
    kind = device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def map_tensors(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """Return a model's output with other tensors; each has a name such as `loss` or `1`."""
    place = f"{name}." if name else ""
    if isinstance(value, torch.Tensor):
        return change(name or "output", value)
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key in list(value):
            changed[key] = map_tensors(value[key], change, f"{place}{key}")
        return changed
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change, f"{place}{number}") for number, item in enumerate(value, start=1)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            setattr(changed, field.name, map_tensors(getattr(value, field.name), change, f"{place}{field.name}"))
        return changed
    return value


def named_tensors(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's output by name."""
    tensors: dict[str, torch.Tensor] = {}

    def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors[name] = tensor
        return tensor

    map_tensors(value, note)
    return tensors


def loss_weights(passes: list[RecordedPass]) -> Iterator[float]:
    """Yield the weight with which each micro-batch's loss was backpropagated."""
    for recorded in passes:
        for name in recorded.losses[:1]:
            yield float(recorded.upstream[name])
