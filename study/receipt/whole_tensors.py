"""Whole weights, masters and gradients of a model in an engine, by plain name. Reading is a collective of all ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from study.compositions.trace import plain_name
from study.metrics.inventory import dtensor_type, fsdp_groups
from study.metrics.state import base_optimizer
from study.receipt.live_engine import find_kind
from study.receipt.obstacles import NotComparable

Tensors = dict[str, torch.Tensor]


class WholeTensors:
    """Tensors of a model that no engine shards: under DDP, or without an engine."""

    # Whether the gradient at the optimizer's step is the one before clipping.
    is_unclipped = False

    def __init__(self, model: Any, inner: nn.Module, optimizer: Any) -> None:
        self.model, self.inner, self.optimizer = model, inner, base_optimizer(optimizer)
        with self.gathered():
            self.parameters = {plain_name(name): parameter for name, parameter in inner.named_parameters()}
        self.trained = {name: it for name, it in self.parameters.items() if it.requires_grad}

    @contextlib.contextmanager
    def gathered(self, gradients: bool = False) -> Iterator[None]:
        """Enclose reading, if the engine gathers all tensors at once."""
        yield

    def shape(self, parameter: Any) -> torch.Size:
        """Return the shape of a whole parameter."""
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The type to which the engine casts weights for the passes; None if it casts none."""
        return None

    def weight(self, parameter: Any) -> torch.Tensor:
        full_weight: torch.Tensor = parameter.detach()
        return full_weight

    def read_weights(self) -> Tensors:
        """Return all weights as this rank's passes have them."""
        with self.gathered():
            weights = {name: self.weight(parameter) for name, parameter in self.parameters.items()}
            dtype = self.compute_dtype
            return weights if dtype is None else {name: weight.to(dtype) for name, weight in weights.items()}

    def read_masters(self) -> Tensors | None:
        """Return copies of the trained weights as the optimizer has them; None if they cannot be read."""
        with self.gathered():
            return {name: self.weight(parameter).clone() for name, parameter in self.trained.items()}

    def read_gradients(self) -> Tensors:
        """Return the gradients of the trained weights; a weight without one is left out."""
        with self.gathered(gradients=True):
            gradients = {name: self.gradient(parameter) for name, parameter in self.trained.items()}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def gradient(self, parameter: Any) -> torch.Tensor | None:
        return None if parameter.grad is None else self.gather(parameter.grad)

    def gather(self, tensor: Any) -> torch.Tensor:
        """Return the whole of a tensor that this engine may have sharded."""
        result: torch.Tensor = tensor.detach()
        return result

    def find_groups(self) -> dict[str, int] | None:
        """Return the optimizer's parameter group of each trained weight; None if one is in no group."""
        groups = self._places()
        return None if len(groups) < len(self.trained) else groups

    def find_ungrouped(self) -> list[str]:
        """Return the trained weights that the optimizer does not have."""
        groups = self._places()
        return [name for name in self.trained if name not in groups]

    def _places(self) -> dict[str, int]:
        places = {id(parameter): number for number, group in enumerate(self._grouped()) for parameter in group}
        return {name: places[id(parameter)] for name, parameter in self.trained.items() if id(parameter) in places}

    def _grouped(self) -> list[list[Any]]:
        return [group["params"] for group in self.optimizer.param_groups]


class Fsdp2Tensors(WholeTensors):
    """Tensors that FSDP2 shards."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        dtypes = {group.mp_policy.param_dtype for group in fsdp_groups(self.model)}
        if len(dtypes) > 1:
            raise NotComparable("its groups compute in several types: give them one mp_policy")
        return next(iter(dtypes), None)

    @contextlib.contextmanager
    def gathered(self, gradients: bool = False) -> Iterator[None]:
        # After a pass the outermost group may still be gathered, in the type of the passes.
        module: Any
        for module in self.inner.modules():
            if hasattr(module, "_get_fsdp_state"):
                module.reshard()
        yield

    def weight(self, parameter: Any) -> torch.Tensor:
        return self.gather(parameter)

    def gather(self, tensor: Any) -> torch.Tensor:
        result: torch.Tensor = tensor.detach()
        return result.full_tensor() if isinstance(result, dtensor_type()) else result


class Fsdp1Tensors(WholeTensors):
    """Tensors that FSDP's first version shards, with use_orig_params."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        policy = getattr(self.model, "mixed_precision", None)
        return None if policy is None else policy.param_dtype

    @contextlib.contextmanager
    def gathered(self, gradients: bool = False) -> Iterator[None]:
        fsdp = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
        with fsdp.summon_full_params(self.model, with_grads=gradients, writeback=False):
            yield

    def weight(self, parameter: Any) -> torch.Tensor:
        full_weight: torch.Tensor = parameter.detach().clone()
        return full_weight

    def gather(self, tensor: Any) -> torch.Tensor:
        result: torch.Tensor = tensor.detach().clone()
        return result


class DeepSpeedTensors(WholeTensors):
    """Tensors of a DeepSpeed engine at any stage."""

    is_unclipped = True

    def weight(self, parameter: Any) -> torch.Tensor:
        import deepspeed

        if not hasattr(parameter, "ds_id"):
            return super().weight(parameter)
        with deepspeed.zero.GatheredParameters([parameter]):
            full_weight: torch.Tensor = parameter.detach().clone()
        return full_weight

    def gradient(self, parameter: Any) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        gradient: torch.Tensor | None = safe_get_full_grad(parameter)
        return None if gradient is None else gradient.detach()

    def read_masters(self) -> Tensors | None:
        from deepspeed.utils import safe_get_full_fp32_param

        masters: Tensors = {}
        for name, parameter in self.trained.items():
            master = safe_get_full_fp32_param(parameter)
            if master is None and parameter.dtype is torch.float32:
                # Stage 0 in fp32 has no masters.
                master = parameter
            if master is None:
                return None
            masters[name] = master.detach().reshape(self.shape(parameter)).clone()
        return masters

    def _grouped(self) -> list[list[Any]]:
        engine = self.model.optimizer
        if hasattr(engine, "sub_group_to_group_id"):
            groups: list[list[Any]] = [[] for _ in self.optimizer.param_groups]
            for place, parameters in enumerate(engine.fp16_groups):
                groups[engine.sub_group_to_group_id[place]] += parameters
            return groups
        return getattr(engine, "bit16_groups", None) or super()._grouped()


def whole_tensors(model: Any, inner: nn.Module, optimizer: Any) -> WholeTensors:
    """Return the reader of a model's engine."""
    kinds: dict[str, type[WholeTensors]] = {
        "deepspeed": DeepSpeedTensors,
        "fsdp2": Fsdp2Tensors,
        "fsdp1": Fsdp1Tensors,
    }
    return kinds.get(find_kind(model), WholeTensors)(model, inner, optimizer)
