"""Activations and FLOPs of a micro-batch, counted by the table of families or traced for a class outside it."""

from __future__ import annotations

from study.predictor.activations import Activations
from study.predictor.products import forward_flops, matmuls
from study.predictor.request import Request
from study.predictor.shape import trains_head
from study.predictor.table_activations import count_activations
from study.predictor.traced_activations import trace


def predict_activations(request: Request) -> Activations:
    """Return the activations of a micro-batch."""
    return trace(request).activations if request.shape.is_traced else count_activations(request)


def missing_figures(request: Request) -> str | None:
    """Return what could not be traced, and why; None if nothing is missing."""
    return trace(request).missing if request.shape.is_traced else None


def model_flops(request: Request) -> int:
    """FLOPs of one optimizer step of one rank, or its part of those of its tensor-parallel group. A frozen matrix has
    one product in the backward pass instead of two."""
    shape, length = request.full_shape, request.sequence_length
    if shape.is_traced:
        traced = trace(request)
        return round((traced.forward + traced.backward) * request.accumulation)
    flops = 3 * forward_flops(shape, length)
    if shape.lora_rank:
        # The layers' frozen weights in flat parameters with trained ones have gradients, too.
        in_layers = [product for product in matmuls(shape) if product.in_layer and not request.has_mixed_units]
        head = [product for product in matmuls(shape) if not (product.in_layer or trains_head(shape))]
        flops -= sum(2 * length * product.inner * product.out * product.count for product in (*in_layers, *head))
    return flops * request.micro_batch * request.accumulation // request.tensor_ranks


def hardware_flops(request: Request) -> int:
    """Model FLOPs plus recomputation; a fused attention's recomputation in its backward kernel is not counted."""
    sequences = request.micro_batch * request.accumulation
    if request.shape.is_traced:
        recomputed = round(trace(request).layers_forward / request.micro_batch)
    else:
        recomputed = forward_flops(request.shape, request.sequence_length, in_layers_only=True)
    return model_flops(request) + (
        recomputed * sequences // request.checkpoint_every if request.gradient_checkpointing else 0
    )
