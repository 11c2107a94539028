"""Time of a step by part: forward, backward, optimizer and waiting for data, from hooks in measured steps alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

from study.metrics.clock import elapsed_s, time_mark, wait_for
from study.metrics.state import base_optimizer
from study.receipt.document import Phase
from study.receipt.failures import Failures

RANGE = "zero-study receipt: "


class PartTimer:
    """Meter of one step's parts: open() before its data is loaded, close() after it.

    On CUDA a part is the time between two events on the stream that computes; elsewhere, of the host's clock. Waiting
    for data is the host's time.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device, failures: Failures) -> None:
        self.phase: Phase = "between"
        self.micro_batches = 0
        self.samples: int | None = None
        self.sequence_length: int | None = None
        self.total_s = 0.0
        self.after_backward: Callable[[], None] = lambda: None
        self.on_phase: Callable[[Phase], None] = lambda _: None
        self._model, self._optimizer, self._device, self._failures = model, optimizer, device, failures
        self._hooks = contextlib.ExitStack()
        self._spans: list[tuple[str, Any, Any]] = []
        self._open_parts: list[tuple[str, Any, Any]] = []
        self._data_s = 0.0
        self._loading = 0
        self._opened = 0.0
        self._thread = threading.get_ident()

    def open(self) -> None:
        """Put the hooks on, and begin the step."""
        hooks = self._hooks
        hooks.callback(
            self._model.register_forward_pre_hook(self._enter_forward, prepend=True, with_kwargs=True).remove
        )
        hooks.callback(self._model.register_forward_hook(self._leave_forward).remove)
        hooks.enter_context(_around(torch.autograd, "backward", self._begin_backward, self._end_backward))
        if hasattr(self._model, "zero_optimization_stage"):
            hooks.enter_context(_around(self._model, "backward", self._begin_backward, self._end_backward))
            hooks.enter_context(_around(self._model, "step", self._begin_step, self._end_step))
        elif isinstance(base := base_optimizer(self._optimizer), torch.optim.Optimizer):
            hooks.callback(base.register_step_pre_hook(lambda *_: self._begin_step()).remove)
            hooks.callback(base.register_step_post_hook(lambda *_: self._end_step()).remove)
        hooks.enter_context(_around(dataloader._BaseDataLoaderIter, "__next__", self.begin_data, self.end_data))
        wait_for(self._device)
        self._opened = time.perf_counter()

    def close(self) -> None:
        """End the step, and take the hooks off."""
        self._hooks.close()
        wait_for(self._device)
        self.total_s = time.perf_counter() - self._opened

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part of the closed step; `rest` is the time outside of all parts."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for part, begin, end in self._spans:
            seconds[part] += elapsed_s(begin, end)
        parts = {part: seconds[part] for part in ("forward", "backward", "optimizer")}
        parts["data"] = self._data_s
        return parts | {"rest": max(0.0, self.total_s - sum(parts.values()))}

    def begin_data(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._loading == 0:
            self._data_began = time.perf_counter()
        self._loading += 1

    def end_data(self) -> None:
        if threading.get_ident() != self._thread:
            return
        self._loading -= 1
        if self._loading == 0:
            self._data_s += time.perf_counter() - self._data_began

    def _enter_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        with self._failures.caught("timing the forward pass"):
            self.micro_batches += 1
            self._read_inputs(args, kwargs)
            self._begin("forward")

    def _leave_forward(self, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._end("forward")

    def _read_inputs(self, args: Any, kwargs: Any) -> None:
        """Read samples and tokens from the model's input: the tokens by their name, else the first tensor."""
        tokens_by_name = [
            kwargs[name] for name in ("input_ids", "inputs_embeds", "inputs") if kwargs.get(name) is not None
        ]
        tensors = [
            leaf
            for leaf in tree_leaves((tokens_by_name, args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        if not tensors:
            return
        self.samples = tensors[0].shape[0]
        is_text = bool(tokens_by_name) or not tensors[0].is_floating_point()
        self.sequence_length = tensors[0].shape[1] if is_text and tensors[0].dim() > 1 else None

    def _begin_backward(self) -> None:
        self._begin("backward")

    def _end_backward(self) -> None:
        self._end("backward")
        if not self._open_parts:
            with self._failures.caught("counting a micro-batch's reductions"):
                self.after_backward()

    def _begin_step(self) -> None:
        self._begin("optimizer")

    def _end_step(self) -> None:
        self._end("optimizer")

    def _begin(self, part: Phase) -> None:
        with self._failures.caught(f"timing the {part} part"):
            # A part inside another one, such as a backward pass of a recomputation, belongs to the outer one.
            labels = record_function(RANGE + part)
            if not self._open_parts:
                self._enter_phase(part)
                labels.__enter__()
            self._open_parts.append((part, time_mark(self._device), labels))

    def _end(self, part: Phase) -> None:
        with self._failures.caught(f"timing the {part} part"):
            if not self._open_parts or self._open_parts[-1][0] != part:
                return
            _, begin, labels = self._open_parts.pop()
            if not self._open_parts:
                labels.__exit__(None, None, None)
                self._spans.append((part, begin, time_mark(self._device)))
                self._enter_phase("between")

    def _enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.on_phase(phase)


@contextlib.contextmanager
def _around(owner: Any, name: str, begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around an attribute of a module, a class or an instance, until the context ends."""
    original, local_value = getattr(owner, name), vars(owner).get(name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            return original(*args, **kwargs)
        finally:
            end()

    setattr(owner, name, timed)
    try:
        yield
    finally:
        # It may have been wrapped again meanwhile.
        if vars(owner).get(name) is timed:
            if local_value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, local_value)
