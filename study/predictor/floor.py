"""What a rank must hold at least: model state per parameter, and what a backward pass cannot do without.

The limit of study/predictor/state.py for a large model, without what pads and rounds a small one. What does not fit by
it does not fit, and what fits by it may not.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from study.config.flags import Precision
from study.config.strategies import Strategy
from study.predictor.activations import activations_of
from study.predictor.hardware import Device
from study.predictor.request import ModelShape, Request, Tensor, box_of_ranks
from study.predictor.state import state_of

# So large that no padding shows, in so many tensors that a share of the sub-groups is a share of the model.
_ELEMENTS, _LAYERS = 2**50, 2**10
ANY_DEVICE = Device(
    name="any", pattern="any", peak_tflops={}, memory_bandwidth_gb_per_s=0.0, memory_gib=1.0
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Per parameter of the whole model, on one rank. The host's include gradients that wait there for the optimizer."""

    params_device: float
    grads_device: float
    optimizer_device: float
    host: float
    nvme: float
    # Through the drive in one optimizer step, and for every pass over the parameters.
    nvme_per_step: float
    nvme_per_pass: float

    @property
    def device(self) -> float:
        return self.params_device + self.grads_device + self.optimizer_device


def state_bytes(strategy: Strategy, precision: str, ranks: int, trained: bool = True) -> StateBytes:
    """The strategy's settings count with what a run overrides in them. Not `trained`: of frozen weights."""
    weights = (Tensor("weights.weight", _ELEMENTS // _LAYERS, _LAYERS, True, _ELEMENTS // _LAYERS, trained),)
    shape = ModelShape(
        name="large", model_type="llama", family="causal-lm", layers=_LAYERS, hidden=1, inner=1, heads=1,
        key_value_heads=1, head_dim=1, vocabulary=1, gated=True, tied=False, tensors=weights,
    )  # fmt: skip
    request = Request(
        shape, strategy, box_of_ranks("any", ANY_DEVICE, ranks), 1, 1, 1, cast(Precision, precision), False, "sdpa"
    )
    state = state_of(request, waiting=False)
    share = {name: value / shape.parameters for name, value in dataclasses.asdict(state).items()}
    stays = share["optimizer_nvme"] + share["grads_nvme"]
    return StateBytes(
        share["params_device"], share["grads_device"], share["optimizer_device"],
        host=state.host / shape.parameters, nvme=state.nvme / shape.parameters,
        nvme_per_step=2 * stays, nvme_per_pass=share["params_nvme"],
    )  # fmt: skip


def least_activation_bytes(request: Request) -> float:
    """What one micro-batch leaves for its backward pass, and the gradient of the logits that begins it."""
    kept = activations_of(request)
    layers = request.shape.layers
    loss = kept.logits + kept.logits_backward / 2
    if request.gradient_checkpointing:
        # A layer is made again when the loss is through.
        return layers * kept.checkpoint + max(kept.layer, loss)
    return layers * kept.layer + loss


def least_device_bytes(state: StateBytes, parameters: int, activations: float) -> float:
    """Gradients are complete when the activations are gone, so the larger of the two counts."""
    always = parameters * (state.params_device + state.optimizer_device)
    return always + max(activations, parameters * state.grads_device)


# What the ZeRO paper says (Rajbhandari et al., SC20, sections 3 and 7 and Table 1), as its formulas.

# Bytes of a parameter, the optimizer's being fp32 weights, momentum and variance (the paper's K); and the first stage
# that splits them.
KINDS = {"params": (2, 3), "grads": (2, 2), "optimizer": (12, 1)}


def split_by(kind: str, stage: int, ranks: int) -> int:
    return ranks if stage >= KINDS[kind][1] else 1


def papers_state_bytes(parameters: float, stage: int, ranks: int) -> float:
    """Model state per device under mixed-precision Adam; stage 0 is plain data parallelism."""
    return parameters * sum(size / split_by(kind, stage, ranks) for kind, (size, _) in KINDS.items())


def papers_traffic(stage: int, ranks: int) -> float:
    """What one rank sends in a step, as multiples of the model's weights, its gradients being of the same type.

    An all-reduce is a reduce-scatter and an all-gather. Stages 1 and 2 gather the updated weights instead of the
    gradients; stage 3 gathers them twice, for the forward and the backward pass.
    """
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks
