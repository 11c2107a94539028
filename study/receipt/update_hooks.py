"""Calls before and after each optimizer step of a program, with its gradients before clipping and its norm."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from study.metrics.inventory import dtensor_type
from study.receipt.live_engine import find_kind
from study.receipt.whole_tensors import WholeTensors

_EUCLIDEAN = 2.0


class UpdateHooks:
    """Hooks on one program's backward passes, clipping and optimizer, for the rest of the process."""

    def __init__(self, tensors: WholeTensors, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._tensors, self._before, self._after = tensors, before, after
        # While plain training runs, its backward passes are not the program's.
        self.is_paused = False
        # Backward passes within each other.
        self._depth = 0
        # Of the last total norm.
        self._is_euclidean = True
        # Why the program is not compared; None if it is.
        self.obstacle: str | None = None
        self.reset()
        if tensors.is_unclipped:
            self._wrap_engine_step()
        else:
            self._wrap_backward()
            tensors.optimizer.register_step_pre_hook(self._enter_step)
            tensors.optimizer.register_step_post_hook(lambda *_: after())
        self._watch_clipping()

    def reset(self) -> None:
        """Begin a step."""
        # Gradients after the last backward pass, as the engine has them.
        self.unclipped: dict[str, Any] = {}
        # Of clipping by norm.
        self.norm: float | None = None
        self.max_norm: float | None = None

    def _wrap_engine_step(self) -> None:
        """Enclose the step of a DeepSpeed engine; only that of the last micro-batch updates."""
        engine = self._tensors.model
        original = engine.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            is_update = engine.is_gradient_accumulation_boundary()
            if is_update:
                self.max_norm = engine.gradient_clipping() or None
                self._before()
            result = original(*args, **kwargs)
            if is_update:
                norm = engine.get_global_grad_norm()
                # Stage 0 in fp32 computes none.
                self.norm = float(norm) if norm is not None and float(norm) > 0 else None
                self._after()
            return result

        engine.step = step

    def _enter_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Compare before the update: at once, or after the closure in which Lightning's Trainer makes its passes."""
        # The optimizer itself is the first of the arguments.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before()
            return None
        calls = 0

        @functools.wraps(closure)
        def compared() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                self.obstacle = f"{type(optimizer).__name__} evaluates the loss several times in a step"
                return closure()
            result = closure()
            self._before()
            return result

        return args[:1], {**kwargs, "closure": compared}

    def _wrap_backward(self) -> None:
        """Keep the gradients after each backward pass: at the optimizer's step they may be clipped."""
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._depth += 1
            try:
                original(*args, **kwargs)
            finally:
                self._depth -= 1
            # Reentrant gradient checkpointing calls it within itself.
            if not self._depth and not self.is_paused:
                self._keep_gradients()

        torch.autograd.backward = backward

    def _keep_gradients(self) -> None:
        if find_kind(self._tensors.model) == "fsdp1":
            # Its gradients are parts of flat ones, which only a gather separates.
            return
        self.unclipped = {
            name: parameter.grad.detach().clone()
            for name, parameter in self._tensors.trained.items()
            if parameter.grad is not None
        }

    def _watch_clipping(self) -> None:
        """Note norm and limit of torch's clipping by norm, in the function that clip_grad_norm_ calls last."""
        module: Any = sys.modules["torch.nn.utils.clip_grad"]
        self._watch_kind_of_norm(module)
        # Releases of torch before 2.6 do not have it.
        if (original := getattr(module, "_clip_grads_with_norm_", None)) is not None:

            @functools.wraps(original)
            def clip(parameters: Any, max_norm: float, norm: Any, *rest: Any, **options: Any) -> None:
                listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                self._note_clipping(len([it for it in listed if it.grad is not None]), max_norm, norm)
                original(listed, max_norm, norm, *rest, **options)

            module._clip_grads_with_norm_ = clip
        if find_kind(self._tensors.model) == "fsdp1":
            self._wrap_clipping_of_fsdp1()

    def _watch_kind_of_norm(self, module: Any) -> None:
        original = getattr(module, "_get_total_norm", None)
        if original is None:
            return

        @functools.wraps(original)
        def total_norm(tensors: Any, norm_type: float = 2.0, *rest: Any, **options: Any) -> Any:
            self._is_euclidean = float(norm_type) == _EUCLIDEAN
            return original(tensors, norm_type, *rest, **options)

        module._get_total_norm = total_norm

    def _wrap_clipping_of_fsdp1(self) -> None:
        model = self._tensors.model
        original = model.clip_grad_norm_

        @functools.wraps(original)
        def clip(max_norm: float, norm_type: float = 2.0) -> Any:
            if float(norm_type) != _EUCLIDEAN:
                # The recorder ends the comparison before the update: nothing is raised in the program's own call.
                self.obstacle = f"FSDP1 clips by a norm of type {float(norm_type):g}: clip by 2, or not at all"
                return original(max_norm, norm_type)
            norm = original(max_norm, norm_type)
            self.norm, self.max_norm = float(norm), float(max_norm)
            return norm

        model.clip_grad_norm_ = clip

    def _note_clipping(self, count: int, max_norm: float, norm: Any) -> None:
        if self.is_paused or not self._is_euclidean or count < len(self.unclipped):
            # Another norm, or that of some of the gradients.
            return
        total = norm.full_tensor() if isinstance(norm, dtensor_type()) else norm
        self.norm, self.max_norm = float(total), float(max_norm)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor of clipping by norm, as torch and DeepSpeed compute it."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
