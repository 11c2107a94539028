"""Moments of a backward pass and of the step after it: what a rank holds of gradients and of the engine's buffers."""

from __future__ import annotations

from typing import NamedTuple

from study.predict.request import ModelShape, Request
from study.predict.state import BEFORE, FP32_BYTES, Piece, weight_bytes


class Moment(NamedTuple):
    """While the gradient of a tensor comes, or of a layer; `step`: after the backward pass."""

    # As in Piece.
    place: int
    grads: float
    buffers: float
    step: bool = False
    piece: Piece | None = None
    # It has come, and nothing was done with it yet.
    arrival: bool = False
    # Of gradients and buffers, what lies in blocks that the C library keeps.
    small: float = 0.0


def has_tied_gradients(shape: ModelShape) -> bool:
    """Of a frozen embedding there are none."""
    return shape.tied and shape.tensors[0].trained


def torch_step(request: Request, elements: float, buffers: float, small: float = 0.0) -> Moment:
    """The optimizer without an engine, or with stage 0: fp32 gradients for its masters, and what AdamW makes."""
    weight = weight_bytes(request)
    stepped = weight if request.pure else FP32_BYTES
    grads = elements * (weight + (stepped if stepped != weight else 0))
    made = request.step_copies * elements * stepped
    return Moment(BEFORE, float(grads), buffers + made, step=True, small=small)
