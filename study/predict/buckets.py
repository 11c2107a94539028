"""Gradients on their way: what a rank holds of them, and in which buffers, while the backward pass goes on.

The engines' own order: the last parameter first, each gradient into the bucket, a full bucket reduced and let go of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from study.predict.request import Request
from study.predict.settings import EngineSettings, engine_settings
from study.predict.state import FP32_BYTES, Piece, flat_elements, own_pieces, part_elements, pieces_of, weight_bytes

# deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE: stage 0 reduces so many numbers at once.
STAGE0_BUCKET = 500_000_000


@dataclasses.dataclass(frozen=True)
class Moment:
    """While the gradients of one layer come, or of what is outside the layers; `step`: after the backward pass."""

    layer: int | None
    grads: float
    buffers: float
    step: bool = False


def bucket_bytes(request: Request, settings: EngineSettings) -> float:
    """The buffer itself. A process in host memory has of it only what is written."""
    elements = settings.reduce_bucket
    if request.box.in_host_memory:
        elements = min(elements, request.shape.parameters)
    copies = 2 if settings.overlaps and settings.stage < 3 else 1
    return float(elements * weight_bytes(request) * copies) if settings.contiguous_gradients else 0.0


def moments_of(request: Request) -> list[Moment]:
    """Of the last micro-batch of a step: with accumulation gradients of the earlier ones are there already."""
    stage = request.strategy.zero_stage
    if request.strategy.is_fsdp:
        return list(_fsdp(request))
    if stage in (None, 0):
        return list(_whole(request))
    settings = engine_settings(request.strategy, request.shape.hidden)
    return list({1: _stage1, 2: _stage2, 3: _stage3}[settings.stage](request, settings))


def _whole(request: Request) -> Iterator[Moment]:
    """single, DDP and DeepSpeed's stage 0. DDP has every gradient a second time, in its buckets."""
    weight, total = weight_bytes(request), request.shape.parameters
    buffers = float(total * FP32_BYTES) if request.strategy.name == "ddp" else 0.0
    grads = 0.0
    for piece in reversed(pieces_of(request.shape)):
        if request.accumulation == 1:
            grads += piece.elements * weight
            yield Moment(piece.layer, grads, buffers)
        else:
            yield Moment(piece.layer, float(total * weight), buffers + piece.elements * weight)
    if request.strategy.zero_stage == 0 and request.box.ranks > 1:
        flat = min(total, STAGE0_BUCKET) * weight
        yield Moment(None, float(total * weight), float(flat), step=True)
    if weight == 2:
        yield Moment(None, float(total * (weight + FP32_BYTES)), buffers, step=True)


def _fsdp(request: Request) -> Iterator[Moment]:
    """Each layer is a group: gathered whole, its gradients whole until they are scattered, the next one on its way."""
    sizes: dict[int | None, int] = {}
    for piece in pieces_of(request.shape):
        sizes[piece.layer] = sizes.get(piece.layer, 0) + piece.elements
    ranks, done = request.box.ranks, 0.0
    root = sizes.get(None, 0)
    kept = request.shape.parameters / ranks * FP32_BYTES if request.accumulation > 1 else 0.0
    layers: list[int | None] = [None, *reversed(range(request.shape.layers)), None]
    for at, layer in enumerate(layers):
        size = sizes.get(layer, 0)
        following = sizes.get(layers[at + 1], 0) if at + 1 < len(layers) else 0
        # The root group stays whole; of a layer the weights, the next one's, its gradients and their copy to scatter.
        whole = root if layer is not None else 0
        buffers = FP32_BYTES * (whole + size + following + (2 * size if layer is not None else size))
        done += size / ranks * FP32_BYTES if layer is not None or at else 0.0
        yield Moment(layer, kept or done, float(buffers))


def _own(request: Request) -> list[tuple[Piece, bool]]:
    """Backwards, each with whether rank 0 keeps some of it."""
    own = set(map(id, own_pieces(request)))
    return [(piece, id(piece) in own) for piece in reversed(pieces_of(request.shape))]


def _copied(elements: int, request: Request, settings: EngineSettings, weight: int) -> float:
    """Reduced to everybody, a bucket is flattened: copied, unless one rank owns all of it."""
    return float(elements * weight) if settings.reduces_to_all and request.box.ranks > 1 else 0.0


def _stage2(request: Request, settings: EngineSettings) -> Iterator[Moment]:
    weight, offloaded = weight_bytes(request), settings.optimizer is not None
    bucket = bucket_bytes(request, settings)
    own = [piece for piece, mine in _own(request) if mine]
    kept = 0.0 if offloaded else sum(piece.elements for piece in own) * weight
    if offloaded:
        bucket += max(piece.elements for piece in pieces_of(request.shape)) * weight
    earlier = kept if request.accumulation > 1 and not offloaded else 0.0
    if settings.accumulates_in_fp32:
        kept, earlier = flat_elements(request) / request.box.ranks * FP32_BYTES, 0.0
    filled, held, waiting = 0, 0.0, 0
    has_own = False
    for piece, mine in _own(request):
        if filled + piece.elements > settings.reduce_bucket and filled:
            copy = _copied(filled, request, settings, weight)
            held = kept if has_own else held
            yield Moment(piece.layer, earlier + held + (waiting + piece.elements) * weight, bucket + copy)
            filled, waiting = 0, 0
        has_own = has_own or mine
        # One that is larger than the bucket stays where it is until the next one comes.
        waiting += piece.elements if piece.elements > settings.reduce_bucket else 0
        yield Moment(piece.layer, earlier + held + (waiting or piece.elements) * weight, bucket)
        filled += piece.elements
    copy = _copied(filled, request, settings, weight)
    yield Moment(None, earlier + kept + waiting * weight, bucket + copy, step=True)
    yield from _flat_step(request, kept + earlier, flat_elements(request) // request.box.ranks, offloaded)


def _stage1(request: Request, settings: EngineSettings) -> Iterator[Moment]:
    """Every gradient stays whole until the backward pass has ended, and goes through the bucket then."""
    weight, total = weight_bytes(request), request.shape.parameters
    width = FP32_BYTES if settings.accumulates_in_fp32 else weight
    bucket = bucket_bytes(request, settings) * width / weight
    grads = 0.0
    for piece in reversed(pieces_of(request.shape)):
        grads += piece.elements * width
        held = float(total * width) if request.accumulation > 1 else grads
        yield Moment(piece.layer, held, bucket + (piece.elements * weight if request.accumulation > 1 else 0))
    own = sum(piece.elements for piece, mine in _own(request) if mine) * width
    moved = filled = largest = 0
    for piece in pieces_of(request.shape):
        if filled + piece.elements > settings.reduce_bucket and filled:
            yield Moment(
                None, (total - moved) * width + own, bucket + _copied(filled, request, settings, width), step=True
            )
            filled = 0
        if piece.elements <= settings.reduce_bucket:
            moved += piece.elements
        filled += piece.elements
        largest = max(largest, filled)
    yield Moment(None, (total - moved) * width + own, bucket + _copied(filled, request, settings, width), step=True)
    offloaded = settings.optimizer is not None
    yield from _flat_step(request, own, flat_elements(request) // request.box.ranks, offloaded)


def _flat_step(request: Request, kept: float, part: int, offloaded: bool) -> Iterator[Moment]:
    """The part's gradients are flattened, and made fp32 for the optimizer."""
    if not offloaded:
        weight = weight_bytes(request)
        masters = part * FP32_BYTES if weight == 2 else 0
        yield Moment(None, kept, float(part * weight + masters), step=True)


def _stage3(request: Request, settings: EngineSettings) -> Iterator[Moment]:
    weight, ranks = weight_bytes(request), request.box.ranks
    bucket = bucket_bytes(request, settings)
    kept = FP32_BYTES if settings.accumulates_in_fp32 else weight
    grads = 0.0 if settings.optimizer is not None else float(part_elements(request) * kept)
    filled = waiting = count = 0
    for piece in reversed(pieces_of(request.shape)):
        if filled and filled + piece.elements > settings.reduce_bucket:
            # reduce_scatter_coalesced copies the bucket into one tensor, but for one gradient that needs no padding.
            copy = 0 if count == 1 and filled % ranks == 0 else filled
            yield Moment(piece.layer, grads + (waiting + piece.elements) * weight, bucket + copy * weight)
            filled = waiting = count = 0
        waiting += piece.elements if filled + piece.elements > settings.reduce_bucket else 0
        yield Moment(piece.layer, grads + (waiting or piece.elements) * weight, bucket)
        filled, count = filled + piece.elements, count + 1
    copy = 0 if count == 1 and filled % ranks == 0 else filled
    yield Moment(None, grads + waiting * weight, bucket + copy * weight, step=True)
    if settings.optimizer is None:
        largest = math.ceil(min(part_elements(request), settings.sub_group))
        yield Moment(None, grads, bucket + largest * (weight + (FP32_BYTES if weight == 2 else 0)), step=True)
