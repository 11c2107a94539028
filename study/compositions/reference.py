"""The training of a combination in one process of plain PyTorch, and how far rounding alone moves it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from study.compositions import tiny_model
from study.compositions.features import Combination
from study.compositions.trace import FigureTrace, Place, plain_name, watch_modules

if TYPE_CHECKING:
    import torch

# Copies of the reference whose first weights, and the gradients of whose micro-batches, differ by a rounding error.
PERTURBED_COPIES = 3
# A figure may differ from the reference by this multiple of the copies' differences, and at least by these halves of a
# unit in the last place: sums in another order.
TIMES_THE_COPIES = 6.0
MIN_HALF_ULPS = 16.0
# A weight is rounded once, up or down: by 2^-7 of it at most in bf16.
MIN_HALF_ULPS_OF_WEIGHT = 4.0
# Stages of weights.
_WEIGHTS = ("weight", "resumed")
# Adam's bias correction in 32 bits, as DeepSpeed's optimizers have it: half a unit in the last place of 0.999, divided
# by 1 - 0.999. The copies' rates differ by it.
BIAS_CORRECTION = 2.0**-24 / (1 - 0.999)
# Rows that change the result; the others change only its computation. Combinations with equal levels here share one
# reference.
_ROWS_THAT_COUNT = ("optimizer", "precision", "accumulation", "clipping", "trained", "tie", "schedule", "batch")


def reference_key(combination: Combination) -> str:
    """Return the key of a combination's reference: every level that changes it."""
    levels = [combination.level(row) for row in _ROWS_THAT_COUNT]
    like = {
        "fused_adamw": "adamw",
        "cpu_adam": "adamw",
        "no_sync": "accumulation",
        "config_accumulation": "accumulation",
        "autocast_modules": "autocast",
    }
    if combination.has("schedule"):
        levels.append(combination.level("loop"))
    experts = "ep" if combination.has("ep") else "dense"
    return "-".join([*(like.get(level, level) for level in levels), experts, str(combination.data_ranks)])


@dataclasses.dataclass
class PlainReference:
    """The exact training, the allowed difference of each place, and the gradient of every micro-batch of step 1.

    Its ranks are those with different samples.
    """

    traces: dict[int, FigureTrace]
    allowed: dict[int, dict[Place, float]]
    # By rank and micro-batch: the gradients of the first step by tensor, before they are averaged.
    shares: dict[tuple[int, int], dict[str, np.ndarray[Any, Any]]]

    def expand_ranks(self, combination: Combination) -> PlainReference:
        """Return it with the traces of every rank: ranks of a group share one."""
        data_ranks = {rank: combination.data_rank(rank) for rank in range(combination.ranks)}
        traces = {rank: self.traces[data_rank] for rank, data_rank in data_ranks.items()}
        allowed = {rank: self.allowed[data_rank] for rank, data_rank in data_ranks.items()}
        return PlainReference(traces, allowed, self.shares)


def make_reference(combination: Combination, seed: int = 0) -> PlainReference:
    """Train the combination in this process, once exactly and in perturbed copies.

    The seed is that of the initial weights and the samples.
    """
    exact = _PlainTraining(combination, seed, perturbation=None)
    exact.train()
    copies = [_PlainTraining(combination, seed, perturbation=number) for number in range(PERTURBED_COPIES)]
    for training in copies:
        training.train()
    rounding = _rounding(combination)
    allowed = {
        rank: {
            place: max(
                rounding * (MIN_HALF_ULPS_OF_WEIGHT if place.stage in _WEIGHTS else MIN_HALF_ULPS),
                TIMES_THE_COPIES * max(difference(copy_.traces[rank].figures[place], value) for copy_ in copies),
                _rounding_of_weight(trace, place, value),
            )
            for place, value in trace.figures.items()
        }
        for rank, trace in exact.traces.items()
    }
    return PlainReference(exact.traces, allowed, exact.shares)


def _rounding_of_weight(trace: FigureTrace, place: Place, update: np.ndarray[Any, Any]) -> float:
    """Return the part of an update that is a last place of its fp32 weight, which may be rounded either way."""
    if place.stage != "update":
        return 0.0
    weight = trace.figures[Place(place.step, "weight", place.tensor)]
    size = float(np.linalg.norm(update))
    return 2.0**-23 * float(np.linalg.norm(weight)) / size if size else 0.0


def difference(value: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """Return the norm of the difference relative to that of the reference; infinite if a figure is not finite."""
    if value.shape != reference.shape or not np.isfinite(value).all():
        return float("inf")
    size = float(np.linalg.norm(reference))
    distance = float(np.linalg.norm(value - reference))
    return distance / size if size else (float("inf") if distance else 0.0)


def _rounding(combination: Combination) -> float:
    """Half a unit in the last place of the type in which gradients travel."""
    return {"fp32": 2.0**-24, "fp16": 2.0**-11}.get(combination.level("precision"), 2.0**-9)


class _PlainTraining:
    """Every rank's micro-batches, one after the other, with the mean of their gradients."""

    def __init__(self, combination: Combination, seed: int, perturbation: int | None):
        import torch

        self._combination, self._seed = combination, seed
        self.traces = {rank: FigureTrace() for rank in range(combination.data_ranks)}
        self.shares: dict[tuple[int, int], dict[str, np.ndarray[Any, Any]]] = {}
        self._masters = tiny_model.make_model(combination, seed)
        self._noise = None if perturbation is None else torch.Generator().manual_seed(perturbation)
        with torch.no_grad():
            for weight in self._masters.parameters():
                self._perturb(weight)
        self._weights = self._masters
        if self._dtype is not None:
            self._weights = copy.deepcopy(self._masters).to(self._dtype)
        self._optimizer = _Optimizers(combination, self._masters)
        self._rate_factor = 1.0
        if perturbation is not None and not combination.has("sgd"):
            self._rate_factor += BIAS_CORRECTION * (-1) ** perturbation
        self._place: tuple[int, int] | None = None
        for rank, trace in self.traces.items():
            watch_modules(self._weights, trace, functools.partial(self._find_place, rank))

    def _perturb(self, tensor: torch.Tensor) -> None:
        """Move each element of a tensor by up to a unit in its last place, in a perturbed copy."""
        import torch

        if self._noise is not None:
            noise = 2 * torch.rand(tensor.shape, generator=self._noise) - 1
            tensor.mul_(1 + 2 * _rounding(self._combination) * noise)

    def _find_place(self, rank: int, module: str) -> Place | None:
        if self._place is None or self._place[1] != rank:
            return None
        return Place(self._place[0], "forward", module)

    @property
    def _dtype(self) -> torch.dtype | None:
        """The type of the weights that compute, if it is not that of the masters."""
        import torch

        types = {"bf16": torch.bfloat16, "fp32_accumulation": torch.bfloat16, "fp16": torch.float16}
        return types.get(self._combination.level("precision"))

    def train(self) -> None:
        for step in range(1, tiny_model.STEPS + 1):
            gradients = self._gradients(step)
            self._update(step, gradients)
            self._evaluate(step)

    def _gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Return the mean gradients of a step, and note losses and shares."""
        combination = self._combination
        ranks, micro_steps = combination.data_ranks, combination.micro_steps
        total: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            rank_sums: dict[str, torch.Tensor] = {}
            for micro_step in range(micro_steps):
                batch = tiny_model.make_batch(combination, step, micro_step, rank, ranks, seed=self._seed)
                self._place = (step, rank) if micro_step == 0 else None
                loss = self._loss(batch)
                self._place = None
                self.traces[rank].note(Place(step, "loss", f"micro-batch {micro_step + 1}"), loss)
                self._weights.zero_grad()
                scale = tiny_model.LOSS_SCALE if combination.has("fp16") else 1.0
                (loss * scale).backward()
                gradients = {
                    name: weight.grad.float() / scale
                    for name, weight in self._weights.named_parameters()
                    if weight.grad is not None
                }
                if step == 1:
                    self.shares[rank, micro_step] = {
                        plain_name(name): gradient.double().numpy() for name, gradient in gradients.items()
                    }
                for name, gradient in gradients.items():
                    # Engines add micro-batches in other orders, which matters if they cancel each other.
                    self._perturb(gradient)
                    mean = gradient / (ranks * micro_steps)
                    total[name] = total[name] + mean if name in total else mean
                    rank_sums[name] = (
                        rank_sums[name] + gradient / micro_steps if name in rank_sums else gradient / micro_steps
                    )
            for name, gradient in rank_sums.items():
                self.traces[rank].note(Place(step, "local gradient", plain_name(name)), gradient)
        return total

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        import torch

        with torch.autocast("cpu", torch.bfloat16, enabled=self._combination.has("autocast", "autocast_modules")):
            loss: torch.Tensor = self._weights(**batch).loss
        return loss

    def _update(self, step: int, gradients: dict[str, torch.Tensor]) -> None:
        import torch

        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()]))
        clip = 1.0
        if self._combination.has("clipping"):
            clip = min(1.0, tiny_model.MAX_NORM / (float(norm) + 1e-6))
        before = {name: weight.detach().clone() for name, weight in self._masters.named_parameters()}
        for name, weight in self._masters.named_parameters():
            weight.grad = gradients[name] * clip if name in gradients else None
        self._optimizer.step(step, self._rate_factor)
        with torch.no_grad():
            if self._weights is not self._masters:
                for weight, master in zip(self._weights.parameters(), self._masters.parameters(), strict=True):
                    weight.copy_(master)
        for trace in self.traces.values():
            for name, gradient in gradients.items():
                trace.note(Place(step, "gradient", plain_name(name)), gradient)
            trace.note(Place(step, "norm"), norm)
            self._note_weights(trace, step, before)

    def _note_weights(self, trace: FigureTrace, step: int, before: Mapping[str, torch.Tensor]) -> None:
        """Note each update, as the difference to the weights before the step, and each weight after it."""
        for name, master in self._masters.named_parameters():
            if master.requires_grad:
                trace.note(Place(step, "update", plain_name(name)), master - before[name])
        for name, weight in self._weights.named_parameters():
            trace.note(Place(step, "weight", plain_name(name)), weight)
            if step == tiny_model.RESUMED_AFTER:
                trace.note(Place(step, "resumed", plain_name(name)), weight)

    def _evaluate(self, step: int) -> None:
        import torch

        self._weights.eval()
        with torch.no_grad():
            for rank, trace in self.traces.items():
                ranks = self._combination.data_ranks
                batch = tiny_model.make_batch(self._combination, 0, step, rank, ranks, seed=self._seed)
                trace.note(Place(step, "evaluation"), self._loss(batch))
        self._weights.train()


class _Optimizers:
    """The optimizer of a combination over fp32 weights, with Muon written out."""

    def __init__(self, combination: Combination, model: torch.nn.Module):
        import torch

        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._combination = combination
        self._matrices: dict[torch.nn.Parameter, torch.Tensor] = {}
        if combination.has("muon", "config_muon"):
            self._matrices = {
                weight: torch.zeros_like(weight)
                for name, weight in trained.items()
                if tiny_model.is_hidden_matrix(name)
            }
        rest = [weight for weight in trained.values() if weight not in self._matrices]
        self._rest: torch.optim.Optimizer | None = None
        if not rest:
            # With adapters Muon trains everything.
            return
        if combination.has("sgd"):
            self._rest = torch.optim.SGD(rest, momentum=tiny_model.MOMENTUM, weight_decay=tiny_model.WEIGHT_DECAY)
        else:
            self._rest = torch.optim.AdamW(rest, eps=tiny_model.EPSILON, weight_decay=tiny_model.WEIGHT_DECAY)

    def step(self, step: int, rate_factor: float) -> None:
        import torch

        rate = rate_factor * tiny_model.learning_rate(self._combination, step)
        highest = tiny_model.LEARNING_RATE
        if self._combination.has("config_muon"):
            highest *= tiny_model.MUON_RATE_FACTOR
        matrix_rate = rate_factor * tiny_model.learning_rate(self._combination, step, highest)

        if self._rest is not None:
            for group in self._rest.param_groups:
                group["lr"] = rate
            self._rest.step()
        with torch.no_grad():
            for weight, momentum in self._matrices.items():
                assert weight.grad is not None
                momentum.lerp_(weight.grad, 1 - tiny_model.MUON_MOMENTUM)
                update = _orthogonalized(weight.grad.lerp(momentum, tiny_model.MUON_MOMENTUM))
                rows, columns = weight.shape
                weight.mul_(1 - matrix_rate * tiny_model.WEIGHT_DECAY)
                weight.sub_(matrix_rate * max(1.0, rows / columns) ** 0.5 * update)


def _orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Muon's Newton-Schulz iteration in fp32."""
    result = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    result = result / (result.norm() + 1e-7)
    for _ in range(5):
        square = result @ result.T
        result = 3.4445 * result + (-4.7750 * square + 2.0315 * square @ square) @ result
    return result.T if matrix.shape[0] > matrix.shape[1] else result
