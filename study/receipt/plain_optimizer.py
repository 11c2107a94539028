"""The optimizer step of plain training: torch's own class with the settings of the program's live optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from study.compositions.reference import BIAS_CORRECTION, TIMES_THE_COPIES
from study.receipt.replay import ROUNDING, perturbed, relative_difference
from study.receipt.whole_tensors import Tensors

# They change each element by itself, so that shards of a tensor are updated as the whole is.
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_OF_DEEPSPEED = ("DeepSpeedCPUAdam", "FusedAdam")
# How an optimizer is computed, not what.
_COMPUTATION = ("capturable", "differentiable", "foreach", "fused")
_COPIES = 2


def plain_class(optimizer: Any) -> type[torch.optim.Optimizer] | None:
    """Return torch's class with an optimizer's updates; None if none has them."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE:
        return kind
    if kind.__module__.startswith("deepspeed") and kind.__name__ in _OF_DEEPSPEED:
        return torch.optim.AdamW if optimizer.adam_w_mode else torch.optim.Adam
    return None


class PlainOptimizer:
    """Torch's optimizer over clones of the trained weights, and perturbed clones of it."""

    def __init__(self, optimizer: Any, groups: Mapping[str, int], masters: Tensors) -> None:
        self._live = optimizer
        self._settings: list[dict[str, Any]] = []
        kind = plain_class(optimizer)
        assert kind is not None
        self._copies = [_OptimizerCopy(kind, optimizer, groups, masters) for _ in range(1 + _COPIES)]

    def note_settings(self) -> None:
        """Take the settings of the next step: DeepSpeed's engine also steps the scheduler within its step."""
        self._settings = [
            {key: value for key, value in group.items() if key not in _COMPUTATION} for group in self._live.param_groups
        ]

    def step(self, before: Tensors, gradients: Tensors, rounding: float) -> tuple[Tensors, dict[str, float]]:
        """Return the masters after a step from `before`, and by how much rounding may move each update."""
        exact = self._copies[0].step(self._settings, before, gradients, 1.0)
        allowed: dict[str, float] = {}
        for name, weight in exact.items():
            update = float(torch.linalg.vector_norm((weight - before[name]).float()))
            # The weight itself is rounded once.
            rounded = 2 * ROUNDING.get(weight.dtype, 0.0) * float(torch.linalg.vector_norm(weight.float()))
            allowed[name] = rounded / update if update else 0.0
        for seed, moved_copy in enumerate(self._copies[1:]):
            noise = torch.Generator(next(iter(before.values())).device).manual_seed(seed)
            moved = {name: perturbed(gradient, noise, rounding) for name, gradient in gradients.items()}
            after = moved_copy.step(self._settings, before, moved, 1.0 + BIAS_CORRECTION * (-1) ** seed)
            for name, weight in exact.items():
                distance = relative_difference(after[name] - before[name], weight - before[name])
                allowed[name] = max(allowed[name], TIMES_THE_COPIES * distance)
        return exact, allowed


class _OptimizerCopy:
    """One optimizer of torch over its own parameters."""

    def __init__(
        self, kind: type[torch.optim.Optimizer], live: Any, groups: Mapping[str, int], masters: Tensors
    ) -> None:
        self._parameters = {name: nn.Parameter(weight.clone()) for name, weight in masters.items()}
        accepted = inspect.signature(kind).parameters
        self._numbers = sorted(set(groups.values()))
        rows = []
        for number in self._numbers:
            settings = {key: value for key, value in live.param_groups[number].items() if key in accepted}
            rows.append(
                {key: value for key, value in settings.items() if key not in (*_COMPUTATION, "params")}
                | {"params": [self._parameters[name] for name, place in groups.items() if place == number]}
            )
        self._optimizer = kind(rows)  # type: ignore[call-arg]

    def step(
        self, settings: Sequence[Mapping[str, Any]], before: Tensors, gradients: Tensors, rate_factor: float
    ) -> Tensors:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(before[name])
                gradient = gradients.get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
        for group, number in zip(self._optimizer.param_groups, self._numbers, strict=True):
            group.update({key: value for key, value in settings[number].items() if key in group and key != "params"})
            group["lr"] = float(group["lr"]) * rate_factor
        self._optimizer.step()
        return {name: parameter.detach() for name, parameter in self._parameters.items()}
