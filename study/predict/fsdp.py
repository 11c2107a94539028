"""FSDP2's gathers, gradients and copies in a backward pass: torch's order, _fsdp_param_group.py of torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator

from study.predict.moments import Moment, has_tied_gradients, torch_step
from study.predict.request import Request
from study.predict.state import BEFORE, pieces_of, weight_bytes


def accumulated_bytes(request: Request) -> float:
    """Whole gradients between two micro-batches: Accelerate turns FSDP2's reduction off until the last one."""
    if request.accumulation == 1:
        return 0.0
    width = 2 if request.fsdp_gathers_16_bits else weight_bytes(request)
    return float(request.shape.trained_parameters * width)


def fsdp_moments(request: Request) -> Iterator[Moment]:
    """Each layer is a group: gathered whole, its gradients whole until they are scattered, the next one on its way.

    With accumulation no micro-batch but the last scatters: whole gradients of all layers are there by then.
    """
    sizes: dict[int, int] = {}
    # Of frozen weights there are no gradients.
    trained: dict[int, int] = {}
    first: dict[int, int] = {}
    for piece in pieces_of(request.shape):
        sizes[piece.place] = sizes.get(piece.place, 0) + piece.elements
        trained[piece.place] = trained.get(piece.place, 0) + piece.elements * piece.trained
        if piece.elements > piece.rows and piece.trained:
            first[piece.place] = piece.elements
    ranks = request.ranks_of_a_copy or request.box.ranks
    # Where FSDP itself computes in 16 bits it gathers them; it reduces in the type of its parts.
    own = weight_bytes(request)
    weight = 2 if request.fsdp_gathers_16_bits else own
    # An untied embedding is a group of its own.
    embedding = sizes.get(BEFORE, 0)
    root = sizes.get(request.shape.layers, 0) + (embedding if request.shape.tied else 0)
    part = request.shape.trained_parameters / ranks
    accumulated = accumulated_bytes(request)
    grads = accumulated
    copies = 1 if request.box.gathers_into_copies else 0
    waiting = pieces_of(request.shape)[0].elements if has_tied_gradients(request.shape) else 0
    # What the gradients of the layer before are scattered from, until those of this one are.
    held, top = 0.0, sizes[request.shape.layers - 1]
    # The last layer comes while the root's own backward pass begins.
    yield Moment(request.shape.layers, grads, float(weight * (root + (1 + copies) * top)))
    yield Moment(request.shape.layers, grads, float(weight * (root + top + waiting)))
    for place in reversed(range(request.shape.layers)):
        size, made, following = sizes[place], trained[place], sizes[place - 1] if place else 0
        # The root group stays whole, and the head's gradient of a tied embedding waits.
        whole = float(weight * (root + waiting))
        # New gradients are added to those of earlier micro-batches one by one.
        new = 0.0 if accumulated else float(weight * made)
        # What has come is copied into the weights; then the next layer's comes, and then the first gradient.
        yield Moment(place, grads, whole + held + weight * (size + max(size, (1 + copies) * following)))
        yield Moment(place, grads, whole + held + weight * (size + following + first[place]))
        # All of the layer's gradients, none of its activations.
        yield Moment(place - 1, grads, whole + held + new + weight * (size + following))
        # The weights are gone, and so is the last copy, before the gradients are copied.
        held = float(own * made)
        copied = max(weight, copies * own) * made - (weight * made - new)
        yield Moment(place - 1, grads, whole + held + weight * following + copied)
        grads += made / ranks * own - (weight * made - new)
    last = root + (0 if request.shape.tied else embedding)
    made = last if pieces_of(request.shape)[0].trained else trained[request.shape.layers]
    # Both gradients of a tied embedding are there and their sum.
    yield Moment(BEFORE, grads, held + weight * (last + 3 * waiting))
    copied = max(weight, copies * own) - (weight if accumulated else 0)
    yield Moment(BEFORE, grads, float(own + copied) * made)
    if request.shape.lora_rank:
        # Of frozen weights nothing in the backward pass is as large as where the forward pass begins: what came is kept
        # beside its copy until the first layer has come, too (FSDPCommContext.all_gather_state).
        came = 2 * root if request.shape.tied else root + 2 * embedding
        yield Moment(BEFORE, accumulated, float(weight * (came + (1 + copies) * sizes[0])))
    yield torch_step(request, part, 0.0)
