"""FSDP2's gathers, gradients and copies in a backward pass: torch's order, _fsdp_param_group.py of torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator

from study.predict.moments import Moment, torch_step
from study.predict.request import Request
from study.predict.state import BEFORE, pieces_of, weight_bytes


def fsdp_moments(request: Request) -> Iterator[Moment]:
    """Each layer is a group: gathered whole, its gradients whole until they are scattered, the next one on its way."""
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    for piece in pieces_of(request.shape):
        sizes[piece.place] = sizes.get(piece.place, 0) + piece.elements
        if piece.elements > piece.rows:
            first[piece.place] = piece.elements
    ranks, done = request.ranks_of_a_copy or request.box.ranks, 0.0
    # Where FSDP itself computes in 16 bits it gathers them; it reduces in the type of its parts.
    own = weight_bytes(request)
    weight = 2 if request.fsdp_gathers_16_bits else own
    # An untied embedding is a group of its own.
    embedding = sizes.get(BEFORE, 0)
    root = sizes.get(request.shape.layers, 0) + (embedding if request.shape.tied else 0)
    part = request.shape.parameters / ranks
    kept = part * own if request.accumulation > 1 else 0.0
    copies = 1 if request.box.gathers_into_copies else 0
    waiting = pieces_of(request.shape)[0].elements if request.shape.tied else 0
    # What the gradients of the layer before are scattered from, until those of this one are.
    held, top = 0.0, sizes[request.shape.layers - 1]
    # The last layer comes while the root's own backward pass begins.
    yield Moment(request.shape.layers, kept, float(weight * (root + (1 + copies) * top)))
    yield Moment(request.shape.layers, kept, float(weight * (root + top + waiting)))
    for place in reversed(range(request.shape.layers)):
        size, following = sizes[place], sizes[place - 1] if place else 0
        # The root group stays whole, and the head's gradient of a tied embedding waits.
        whole, grads = float(weight * (root + waiting)), kept or done
        # What has come is copied into the weights; then the next layer's comes, and then the first gradient.
        yield Moment(place, grads, whole + held + weight * (size + max(size, (1 + copies) * following)))
        yield Moment(place, grads, whole + held + weight * (size + following + first[place]))
        # All of the layer's gradients, none of its activations.
        yield Moment(place - 1, grads, whole + held + weight * (2 * size + following))
        # The weights are gone, and so is the last copy, before the gradients are copied.
        held = float(own * size)
        yield Moment(place - 1, grads, whole + held + weight * following + max(weight, copies * own) * size)
        done += size / ranks * own
    last = root + (0 if request.shape.tied else embedding)
    # Both gradients of a tied embedding are there and their sum.
    yield Moment(BEFORE, kept or done, held + weight * (last + 3 * waiting))
    yield Moment(BEFORE, kept or done, float(own + max(weight, copies * own)) * last)
    yield torch_step(request, part, 0.0)
