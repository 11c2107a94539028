"""Activation memory of one micro-batch: its parts, and the rules for counted and for traced models alike.

table_activations.py counts them for the families of the table, traced_activations.py has those of a traced class, and
micro_batch.py chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping

from study.config.precisions import in_engine
from study.predictor.losses import FP32, Head, LogitBytes, bytes_without_logits, logit_bytes
from study.predictor.request import FP32_BYTES, Request
from study.predictor.shape import trains_head


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Bytes of one of several similar layers that follow each other, as the fields of Activations."""

    layers: int
    saved: float
    checkpoint: float
    forward: float
    working: float
    # Of the stack's last output, which its layers' backward passes no longer need.
    tail: float
    # Inputs that all of its recomputed layers have: masks. And the gradients of those that its first layer computes for
    # the others, from the backward pass of the last one on: T5's position biases.
    shared: float = 0.0
    carried: float = 0.0
    # The part of `saved` that is the input, which a recomputed layer has as its checkpoint.
    input: float = 0.0


@dataclasses.dataclass(frozen=True)
class Activations:
    """Activation bytes of one micro-batch."""

    # Saved by one layer for its backward pass; `scores` is the attention scores' part of it.
    layer: float = 0.0
    scores: float = 0.0
    # Saved by a layer that is recomputed: its input.
    checkpoint: float = 0.0
    # The part of `layer` that is its input, which a recomputed layer has as its checkpoint.
    input: float = 0.0
    # Saved outside the layers, without the logits, and the part of it that the head's backward pass frees.
    outside: float = 0.0
    tail: float = 0.0
    # Peak temporary memory of one layer: in a forward pass that saves nothing, and in the backward pass.
    layer_forward: float = 0.0
    layer_working: float = 0.0
    # Log-probabilities in fp32 until the loss is computed.
    logits: float = 0.0
    # Peak temporary memory of the loss, forward and backward.
    logits_forward: float = 0.0
    logits_backward: float = 0.0
    # 16-bit copies of the weights that autocast makes: of one layer, and of the head.
    cast_layer: float = 0.0
    cast_head: float = 0.0
    # Part of a layer's copies that autocast caches until the forward pass ends: trained weights only (cached_cast).
    cast_cached: float = 0.0
    # Bytes of a layer's saved and temporary tensors that are freed once a gradient has arrived, by `phase`.
    freed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Temporary bytes of DoRA's norm of a weight in a forward pass, which do not grow with the micro-batch.
    weight_norm: float = 0.0
    # Layers of an encoder and a decoder, whose means or largest sizes are above; empty: all layers are equal.
    unequal_stacks: tuple[LayerStack, ...] = ()
    # By layer, a name of those whose activations in the backward pass are linear in their place; empty: all of a stack.
    layer_kinds: tuple[str, ...] = ()

    @functools.cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        if self.unequal_stacks:
            return self.unequal_stacks
        stack = LayerStack(
            layers=sys.maxsize,
            saved=self.layer,
            checkpoint=self.checkpoint,
            forward=self.layer_forward,
            working=self.layer_working,
            tail=self.tail,
            input=self.input,
        )
        return (stack,)

    def find_stack(self, place: int) -> LayerStack:
        """Return the stack of a layer."""
        *_, (stack, _) = self.first_layers(place + 1)
        return stack

    def first_layers(self, count: int) -> Iterator[tuple[LayerStack, int]]:
        """Yield the stacks of the first layers, with the number of these in each; at least one stack."""
        for stack in self.stacks:
            yield stack, min(count, stack.layers)
            count -= stack.layers
            if count <= 0:
                return

    def carried_at(self, place: int) -> float:
        """Return the bytes of gradients that layers above in the same stack have left."""
        stacks = [*self.first_layers(place + 1)]
        stack, count = stacks[-1]
        return stack.carried if count < stack.layers else 0.0

    def freed_before(self, place: int) -> float:
        """Return the bytes of the last outputs of a layer's stack and of those above it."""
        reached = sum(1 for _ in self.first_layers(place + 1))
        return sum(stack.tail for stack in self.stacks[reached - 1 :])


def is_fused(request: Request) -> bool:
    """Whether the prediction counts a fused attention kernel for the request."""
    return request.attention in request.shape.fused_attentions and not lacks_kernel(request)


def lacks_kernel(request: Request) -> bool:
    """Whether torch's attention has no fused kernel: on a CPU none has dropout (check_for_dropout in sdp_utils_cpp.h),
    and _scaled_dot_product_attention_math of attention.cpp takes its place."""
    return request.box.is_cpu_only and request.attention == "sdpa" and request.drops_attention


def computing_mode(request: Request) -> str:
    """Return the types of computation: fp32, 16 bits, or both as autocast decides."""
    if request.precision == "fp32":
        return "fp32"
    return "engine" if in_engine(request.precision) or not request.autocast else "autocast"


def saves_parameters(request: Request) -> bool:
    """Whether a linear layer saves its parameter for the backward pass, not autocast's copy: stage 3 replaces its
    function (linear.py of deepspeed 0.19, LinearFunctionForZeroStage3)."""
    return request.strategy.zero_stage == 3 and request.settings.memory_efficient_linear


def returns_fp32(request: Request) -> bool:
    """Whether a model's logits are fp32 outside of it: in mixed precision Accelerate makes them so
    (convert_outputs_to_fp32 in prepare_model), but for FSDP2, whose root casts them (output_dtype in Accelerate's
    set_mixed_precision)."""
    is_of_fsdp1 = request.strategy.is_fsdp and request.fsdp_version == 1 and not in_engine(request.precision)
    return computing_mode(request) == "autocast" or is_of_fsdp1


def loss_bytes(request: Request, logits: float, width: int) -> LogitBytes:
    """Return the bytes of the loss of this many logits."""
    if not logits:
        return LogitBytes(0.0, 0.0, 0.0)
    # Log-probabilities of fp32 logits take what their cross entropy does.
    is_upcast = request.loss_kernel == "log_softmax" and returns_fp32(request)
    per_logit = logit_bytes("transformers" if is_upcast else request.loss_kernel, width)
    if per_logit is None:
        shape = request.shape
        is_frozen = shape.lora_rank and not trains_head(shape)
        head = Head(
            tokens=request.micro_batch * request.sequence_length,
            hidden=shape.hidden,
            vocabulary=shape.vocabulary,
            width=width,
            matrix_width=FP32 if computing_mode(request) == "autocast" else width,
            is_trained=not is_frozen,
        )
        return LogitBytes(*map(float, bytes_without_logits(request.loss_kernel, head)))
    # The tanh that caps the logits saves its output (Gemma2ForCausalLM.forward).
    has_cap = request.loss_kernel == "transformers" and request.shape.caps_logits
    capped = width if has_cap else 0
    # Zeros, exponentials, their sum and its product are not fused (_nll_loss_and_log_softmax_backward in loss.py of
    # torch.distributed.tensor.parallel).
    divided = FP32_BYTES if request.stream_ranks > 1 else 0
    return LogitBytes(
        saved=logits * (per_logit.saved + capped),
        forward=logits * (per_logit.forward + capped),
        backward=logits * (per_logit.backward + divided),
    )
