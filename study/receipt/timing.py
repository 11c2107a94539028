"""Time of a step by part: forward, backward, optimizer and waiting for data, from hooks in measured steps alone."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
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
from study.receipt.host_traffic import NvmeTimer, find_handle_types
from study.receipt.live_engine import find_inner, is_lightning

RANGE = "zero-study receipt: "


@dataclasses.dataclass
class _OpenPart:
    """A part of the step that has begun. It is counted unless it is inside another one."""

    part: Phase
    began: Any = None
    label: contextlib.AbstractContextManager[Any] | None = None

    @property
    def is_counted(self) -> bool:
        return self.label is not None


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
        # Of the model's outputs that the program keeps through the backward pass.
        self.kept_output_bytes = 0
        self.after_backward: Callable[[], None] = lambda: None
        self.on_phase: Callable[[Phase], None] = lambda _: None
        self._model, self._optimizer, self._device, self._failures = model, optimizer, device, failures
        # Lightning leaves the mode of DDP's wrapper at evaluation.
        self._inner = find_inner(model)
        self._hooks = contextlib.ExitStack()
        self._spans: list[tuple[str, Any, Any]] = []
        self._open_parts: list[_OpenPart] = []
        self._data_s = 0.0
        self._outputs: list[weakref.ref[torch.UntypedStorage]] = []
        self.nvme = NvmeTimer(lambda: "rest" if self.phase == "between" else self.phase)
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
        if is_lightning(self._model):
            # Without an engine's wrapper Lightning calls it in place of the model.
            hooks.enter_context(self._around_training_step())
        hooks.enter_context(_around(torch.autograd, "backward", self._begin_backward, self._end_backward))
        if hasattr(self._model, "zero_optimization_stage"):
            hooks.enter_context(_around(self._model, "backward", self._begin_backward, self._end_backward))
            hooks.enter_context(_around(self._model, "step", self._begin_step, self._end_step))
            for handle_type in find_handle_types(self._model):
                hooks.enter_context(self.nvme.around(handle_type))
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
        waited = self.nvme.waited_s
        parts = {part: max(0.0, seconds[part] - waited.get(part, 0.0)) for part in ("forward", "backward", "optimizer")}
        parts["offload"] = sum(waited.values())
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

    @contextlib.contextmanager
    def _around_training_step(self) -> Iterator[None]:
        model = self._model
        original: Any = model.training_step

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter_forward(model, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._leave_forward(model)

        model.training_step = timed  # type: ignore[assignment]
        try:
            yield
        finally:
            del model.training_step

    def _enter_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_training:
            return
        with self._failures.caught("timing the forward pass"):
            if not self._is_in_pass:
                self.micro_batches += 1
                self._read_inputs(args, kwargs)
            self._begin("forward")

    def _leave_forward(self, module: nn.Module, args: Any = (), output: Any = None) -> None:
        if not self._is_training:
            return
        self._end("forward")
        if not self._is_in_pass:
            with self._failures.caught("reading the outputs"):
                self._outputs = [
                    weakref.ref(leaf.untyped_storage())
                    for leaf in tree_leaves(output)
                    if isinstance(leaf, torch.Tensor) and leaf.numel() > 1
                ]

    @property
    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and bool(self._inner.training)

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
        if not self._is_in_pass:
            with self._failures.caught("counting a micro-batch's reductions"):
                self.after_backward()
            with self._failures.caught("reading the outputs"):
                # Autograd has freed its tensors by now: the program has the rest.
                storages = {id(storage): storage for reference in self._outputs if (storage := reference())}
                kept_bytes = sum(storage.nbytes() for storage in storages.values())
                self.kept_output_bytes = max(self.kept_output_bytes, kept_bytes)

    def _begin_step(self) -> None:
        self._begin("optimizer")

    def _end_step(self) -> None:
        self._end("optimizer")

    @property
    def _is_in_pass(self) -> bool:
        return any(opened.part != "optimizer" for opened in self._open_parts)

    def _begin(self, part: Phase) -> None:
        with self._failures.caught(f"timing the {part} part"):
            # A part inside another one, such as a backward pass of a recomputation, belongs to the outer one. The
            # passes of a closure that the optimizer calls, as Lightning's Trainer makes them, do not.
            outer = self._open_parts[-1] if self._open_parts else None
            is_of_closure = outer is not None and outer.part == "optimizer" and part != "optimizer"
            opened = _OpenPart(part)
            if outer is not None and is_of_closure:
                self._stop_counting(outer)
            if outer is None or is_of_closure:
                self._start_counting(opened)
            self._open_parts.append(opened)

    def _end(self, part: Phase) -> None:
        with self._failures.caught(f"timing the {part} part"):
            if not self._open_parts or self._open_parts[-1].part != part:
                return
            ended = self._open_parts.pop()
            if not ended.is_counted:
                return
            self._stop_counting(ended)
            if self._open_parts:
                # The optimizer, after a pass of its closure.
                self._start_counting(self._open_parts[-1])

    def _start_counting(self, opened: _OpenPart) -> None:
        self._enter_phase(opened.part)
        opened.label = record_function(RANGE + opened.part)
        opened.label.__enter__()
        opened.began = time_mark(self._device)

    def _stop_counting(self, opened: _OpenPart) -> None:
        assert opened.label is not None
        self._spans.append((opened.part, opened.began, time_mark(self._device)))
        opened.label.__exit__(None, None, None)
        opened.label = None
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
