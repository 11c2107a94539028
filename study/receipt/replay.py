"""Plain training of the passes that an engine's ranks have made: gradients without an engine, and the allowed rounding.

Each rank repeats its passes on a plain copy of the model with the weights of rank 0 and the random numbers that they
had; the mean over ranks is one all-reduce. This is one process that takes the micro-batches of all ranks one after the
other, computed by all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from study.compositions.reference import MIN_HALF_ULPS, PERTURBED_COPIES, TIMES_THE_COPIES
from study.engine.audit import uses_tf32
from study.receipt.passes import RecordedPass, named_tensors
from study.receipt.plain_copy import load_buffers
from study.receipt.whole_tensors import Tensors

# Half a unit in the last place.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
_TF32_ROUNDING = 2.0**-11
# A figure that differs by less is not a multiple of the reference.
_SAME_FACTOR = 5e-3
# Elements of a tensor by which the micro-batches in its gradient are identified.
_MAX_ELEMENTS = 65_536


@dataclasses.dataclass
class PlainStep:
    """One step of plain training, and by how much rounding may move each figure."""

    # Means over all ranks.
    gradients: Tensors
    # Of each of this rank's passes, by name.
    outputs: list[Tensors]
    allowed_gradients: dict[str, float]
    allowed_outputs: list[dict[str, float]]
    allowed_norm: float

    @property
    def norm(self) -> float:
        return total_norm(self.gradients)


class PlainReplay:
    """A plain copy of the model, which repeats passes."""

    def __init__(self, plain: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._plain, self._device = plain, device
        self._parameters = parameters
        self._trained = {name: it for name, it in parameters.items() if it.requires_grad}
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def run(self, weights: Tensors, passes: list[RecordedPass]) -> PlainStep:
        """Return the exact step, and how far perturbed weights and gradients move it."""
        rounding = self.rounding(passes)
        gradients, outputs = self._run_once(weights, passes, None, rounding)
        least = MIN_HALF_ULPS * rounding
        allowed = dict.fromkeys(gradients, least)
        allowed_outputs = [dict.fromkeys(output, least) for output in outputs]
        allowed_norm = least
        for seed in range(PERTURBED_COPIES):
            moved, moved_outputs = self._run_once(weights, passes, seed, rounding)
            raise_allowed(allowed, moved, gradients)
            for bounds, output, exact in zip(allowed_outputs, moved_outputs, outputs, strict=True):
                raise_allowed(bounds, output, exact)
            norm = total_norm(gradients)
            allowed_norm = max(allowed_norm, TIMES_THE_COPIES * abs(total_norm(moved) - norm) / (norm or 1.0))
        return PlainStep(gradients, outputs, allowed, allowed_outputs, allowed_norm)

    def rounding(self, passes: list[RecordedPass]) -> float:
        """Return half a unit in the last place of the coarsest type in which the passes compute."""
        dtypes = {parameter.dtype for parameter in self._trained.values()}
        dtypes |= {recorded.autocast[2] for recorded in passes if recorded.autocast and recorded.autocast[1]}
        coarsest = max(ROUNDING.get(dtype, 0.0) for dtype in dtypes)
        return max(coarsest, _TF32_ROUNDING) if self._may_use_tf32 else coarsest

    @property
    def _may_use_tf32(self) -> bool:
        if self._device.type != "cuda":
            return False
        # By default cuDNN's convolutions do, and matrix products do not.
        has_convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in self._plain.modules())
        return has_convolutions or uses_tf32()

    def split_gradient(self, weights: Tensors, passes: list[RecordedPass], name: str) -> torch.Tensor:
        """Return the gradient of one tensor by rank, micro-batch and (some) element, before the mean."""
        counts = torch.tensor([len(passes)], device=self._device)
        most = int(self._reduce(counts, "MAX"))
        size = len(sample(self._trained[name]))
        parts = torch.zeros(self.ranks, most, size, device=self._device)
        self._load(weights, None, 0.0)
        for place, recorded in enumerate(passes):
            self._plain.zero_grad(set_to_none=True)
            self._repeat(recorded)
            gradient = self._trained[name].grad
            if gradient is not None:
                parts[self.rank, place] = sample(gradient)
        self._plain.zero_grad(set_to_none=True)
        return self._reduce(parts, "SUM")

    def _run_once(
        self, weights: Tensors, passes: list[RecordedPass], seed: int | None, rounding: float
    ) -> tuple[Tensors, list[Tensors]]:
        noise = None if seed is None else torch.Generator(self._device).manual_seed(seed)
        self._load(weights, noise, rounding)
        total = {
            name: torch.zeros(it.shape, dtype=_at_least_fp32(it.dtype), device=self._device)
            for name, it in self._trained.items()
        }
        outputs = []
        for recorded in passes:
            self._plain.zero_grad(set_to_none=True)
            outputs.append(self._repeat(recorded))
            for name, parameter in self._trained.items():
                if parameter.grad is not None:
                    total[name] += perturbed(parameter.grad.to(total[name].dtype), noise, rounding)
        self._plain.zero_grad(set_to_none=True)
        return {name: self._reduce(gradient, "SUM") / self.ranks for name, gradient in total.items()}, outputs

    def _load(self, weights: Tensors, noise: torch.Generator | None, rounding: float) -> None:
        """Set the weights of the copy; of a perturbed one each trained element moves by up to a unit."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                weight = weights[name].to(self._device)
                parameter.data.copy_(perturbed(weight, noise, rounding) if name in self._trained else weight)

    def _repeat(self, recorded: RecordedPass) -> Tensors:
        """Repeat one pass forward and backward; return its outputs."""
        load_buffers(self._plain, recorded.buffers)
        with torch.enable_grad(), _random_state(recorded, self._device):
            with _autocast(recorded):
                outputs = named_tensors(self._plain(*recorded.args, **recorded.kwargs))
            roots = {name: outputs[name].to(upstream.dtype) for name, upstream in recorded.upstream.items()}
            torch.autograd.backward(list(roots.values()), list(recorded.upstream.values()))
        return {name: outputs[name].detach().to(output.dtype) for name, output in recorded.outputs.items()}

    def _reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        if self.ranks > 1:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        return tensor


@contextlib.contextmanager
def _random_state(recorded: RecordedPass, device: torch.device) -> Iterator[None]:
    """Draw the random numbers that a pass had, and none of the program's."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        cpu, cuda = recorded.random_state
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield


def _autocast(recorded: RecordedPass) -> contextlib.AbstractContextManager[Any]:
    assert recorded.autocast is not None
    kind, is_on, dtype = recorded.autocast
    return torch.autocast(kind, dtype=dtype, enabled=True) if is_on else torch.autocast(kind, enabled=False)


def perturbed(tensor: torch.Tensor, noise: torch.Generator | None, rounding: float) -> torch.Tensor:
    """Return a tensor each of whose elements has moved by up to a unit in its last place; itself without noise."""
    if noise is None:
        return tensor
    factor = 2 * torch.rand(tensor.shape, generator=noise, device=tensor.device) - 1
    return tensor * (1 + 2 * rounding * factor).to(tensor.dtype)


def raise_allowed(allowed: dict[str, float], moved: Tensors, exact: Tensors) -> None:
    """Raise what rounding allows to a multiple of how far a perturbed copy has moved."""
    for name, bound in allowed.items():
        allowed[name] = max(bound, TIMES_THE_COPIES * relative_difference(moved[name], exact[name]))


def relative_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference relative to that of the reference; infinite if a figure is not finite."""
    if value.shape != reference.shape:
        return float("inf")
    exact = reference.to(_at_least_fp32(reference.dtype))
    distance = float(torch.linalg.vector_norm(value.to(exact) - exact))
    size = float(torch.linalg.vector_norm(exact))
    if not torch.isfinite(torch.tensor([distance, size])).all():
        return float("inf")
    if size == 0.0:
        return float("inf") if distance else 0.0
    return distance / size


def find_factor(value: torch.Tensor, reference: torch.Tensor, allowed: float) -> float | None:
    """Return c if the figure is c times the reference up to rounding, and neither 0 nor 1."""
    if value.shape != reference.shape:
        return None
    exact = reference.double().reshape(-1)
    actual = value.to(reference.device).double().reshape(-1)
    size = float(exact @ exact)
    if not size or not bool(torch.isfinite(actual).all()):
        return None
    factor = float(actual @ exact) / size
    rest = float(torch.linalg.vector_norm(actual - factor * exact)) / size**0.5
    if not factor or abs(factor - 1) < _SAME_FACTOR:
        return None
    return factor if rest <= max(allowed, 1e-3 * abs(factor)) else None


def total_norm(gradients: Tensors) -> float:
    norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements of a tensor, the same of each tensor of its shape, as one row."""
    flat = tensor.detach().float().reshape(-1)
    return flat[:: max(1, len(flat) // _MAX_ELEMENTS)]


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
