"""Gradients on their way: what a rank holds of them, and in which buffers, while the backward pass goes on.

The engines' own order: the last parameter first, each gradient into the bucket, a full bucket reduced and let go of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from study.host.memory import LARGEST_KEPT_BYTES
from study.predictor.request import ModelShape, Request, same_for_any_micro_batch
from study.predictor.state import (
    BEFORE,
    FP32_BYTES,
    EngineSettings,
    Piece,
    engine_settings,
    flat_elements,
    master_bytes,
    own_parts,
    own_pieces,
    part_elements,
    pieces_of,
    sub_groups,
    trained_of,
    weight_bytes,
)

# deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE: stage 0 reduces so many numbers at once.
STAGE0_BUCKET = 500_000_000


# Moments of a backward pass and of the step after it: what a rank holds of gradients and of the engine's buffers.


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


# FSDP2's gathers, gradients and copies in a backward pass: torch's order, _fsdp_param_group.py of torch 2.13.


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


# By least squares over validation/kept.yaml: gaps, as a share of the most that lies in small blocks at once, and copies
# of all weights, flat as ranks send them to each other where they have shards. Why so many is not known: with
# one heap for all threads (MALLOC_ARENA_MAX=1) there were more. Of a model of 204 MiB there were none.
GAPS, COPIES = 0.54, 8.4


# What the C library keeps of the blocks that a process without a GPU frees.
# Runs tell it to, for the sake of their times (study/host/environment.py). Blocks of 32 MiB and more always go back; of
# smaller ones it keeps what there ever was, with gaps between.


def kept_by_c_library(size: float) -> float:
    return size if size < LARGEST_KEPT_BYTES else 0.0


def kept_bytes(request: Request, most_in_small_blocks: float) -> float:
    sends_shards = request.box.ranks > 1 and (bool(request.strategy.zero_stage) or request.strategy.is_fsdp)
    is_whole = request.strategy.zero_stage == 3 or request.strategy.is_fsdp
    # Stages 1 and 2 send what is trained, and leave frozen weights where they are.
    sent = request.shape.parameters if is_whole else request.shape.trained_parameters
    weights = float(sent * weight_bytes(request))
    return GAPS * most_in_small_blocks + (COPIES * kept_by_c_library(weights) if sends_shards else 0.0)


def small_activations(request: Request, parts: dict[str, float]) -> float:
    tokens, shape = request.micro_batch * request.sequence_length, request.shape
    widths = {
        "activations": shape.inner,
        "attention": shape.heads * request.sequence_length,
        "logits": shape.vocabulary,
    }
    return sum(parts.get(name, 0.0) for name, width in widths.items() if kept_by_c_library(4.0 * tokens * width))


# runtime/zero/utils.py, get_norm_dtype: each gradient is made fp64 for its norm.
NORM_BYTES = 8


class _Bucket:
    """The buffer that gradients are copied into. Of memory that nobody wrote to, a process holds nothing."""

    def __init__(self, request: Request, settings: EngineSettings, width: int) -> None:
        self.width, self.settings = width, settings
        self.written = 0
        self.filled = self.waiting = self.count = 0
        self.copies = 2 if settings.overlaps and settings.stage < 3 else 1
        self.lazily = request.box.in_host_memory
        # Where the optimizer is offloaded, the norm of each is taken when it is copied out of the bucket.
        copied_out = settings.optimizer is not None and settings.stage < 3
        self.own = {id(piece): kept for piece, kept in own_parts(request)} if copied_out else {}
        self.norm = 0

    def is_full_with(self, piece: Piece) -> bool:
        return self.filled + piece.elements > self.settings.reduce_bucket and self.filled > 0

    def add(self, piece: Piece) -> None:
        if self.filled + piece.elements > self.settings.reduce_bucket:
            # Larger than the bucket: it stays where it is.
            self.waiting += piece.elements
        self.filled, self.count = self.filled + piece.elements, self.count + 1
        self.written = max(self.written, self.filled - self.waiting)
        self.norm = max(self.norm, self.own.get(id(piece), 0) * NORM_BYTES)

    def empty(self) -> None:
        self.filled = self.waiting = self.count = self.norm = 0

    @property
    def bytes(self) -> float:
        if not self.settings.contiguous_gradients:
            return 0.0
        elements = self.written if self.lazily else self.settings.reduce_bucket * self.copies
        return float(elements * self.width)


@same_for_any_micro_batch
def standing_bucket(request: Request, settings: EngineSettings) -> float:
    """Stage 3's bucket is there from the start."""
    bucket = _Bucket(request, settings, weight_bytes(request))
    for piece in reversed(trained_of(request.shape)):
        if bucket.is_full_with(piece):
            bucket.empty()
        bucket.add(piece)
    return bucket.bytes


def moments_of(request: Request) -> list[Moment]:
    """Of the last micro-batch of a step: with accumulation gradients of the earlier ones are there already."""
    # Checkpointed or not, gradients come in the same order.
    return _moments_of(dataclasses.replace(request, gradient_checkpointing=False))


@same_for_any_micro_batch
def _moments_of(request: Request) -> list[Moment]:
    stage = request.strategy.zero_stage
    if request.strategy.is_fsdp:
        return list(fsdp_moments(request))
    if stage in (None, 0):
        moments = _whole(request)
    else:
        settings = engine_settings(request.strategy, request.shape.hidden)
        moments = {1: _stage1, 2: _stage2, 3: _stage3}[settings.stage](request, settings)
    return list(_with_tied(request, moments) if has_tied_gradients(request.shape) else moments)


def _with_tied(request: Request, moments: Iterator[Moment]) -> Iterator[Moment]:
    """The head's gradient of a tied embedding waits all through the backward pass; then autograd adds up both.

    Three tensors of the vocabulary are there then: its InputBuffer does not add in place.
    """
    embedding = pieces_of(request.shape)[0]
    size, waits = embedding.elements * float(weight_bytes(request)), True
    small = kept_by_c_library(size)
    for moment in moments:
        extra = size if waits else 0.0
        if moment.piece is embedding:
            extra, waits = (2 * size if moment.arrival else 0.0), False
        if not extra:
            yield moment
            continue
        yield moment._replace(grads=moment.grads + (0.0 if moment.step else extra), small=moment.small + small)


def _whole(request: Request) -> Iterator[Moment]:
    """single, DDP and DeepSpeed's stage 0. DDP has every gradient a second time, in its buckets."""
    weight, total = weight_bytes(request), request.shape.trained_parameters
    buffers = float(total * weight) if request.strategy.name == "ddp" else 0.0
    grads = small = 0.0
    for piece in reversed(trained_of(request.shape)):
        size = float(piece.elements * weight)
        again = request.accumulation > 1
        grads, small = grads + size, small + kept_by_c_library(size)
        held = total * weight + size if again else grads
        yield Moment(piece.place, held, buffers, piece=piece, arrival=True, small=small)
    if request.strategy.zero_stage == 0 and request.box.ranks > 1:
        flat = float(min(total, STAGE0_BUCKET) * weight)
        yield Moment(BEFORE, float(total * weight), flat, step=True, small=small)
    yield torch_step(request, total, buffers, small)


def _own(request: Request) -> list[tuple[Piece, bool]]:
    """Backwards, each with whether rank 0 keeps some of it."""
    own = set(map(id, own_pieces(request)))
    return [(piece, id(piece) in own) for piece in reversed(trained_of(request.shape))]


def _copied(bucket: _Bucket, request: Request) -> float:
    """Reduced to everybody, a bucket is flattened, which copies it; sent to each owner, its parts are not. After that
    the parts that go to the host are made fp64, one by one."""
    alone = request.box.ranks == 1 and bucket.count == 1
    flat = 0 if alone or not bucket.settings.reduces_to_all else bucket.filled * bucket.width
    return float(max(flat, bucket.norm))


def _stage2(request: Request, settings: EngineSettings) -> Iterator[Moment]:
    weight, offloaded = weight_bytes(request), settings.optimizer is not None
    part = flat_elements(request) // request.box.ranks
    # What this rank keeps is copied out of the bucket into one tensor, the last of its pieces whole.
    own = 0.0 if offloaded else float(sum(piece.elements for piece in own_pieces(request)) * weight)
    staging = request.shape.largest_trained * weight if offloaded else 0
    earlier = own if request.accumulation > 1 else 0.0
    if settings.accumulates_in_fp32 and not offloaded:
        own = earlier = float(part * FP32_BYTES)
    bucket, held, in_bucket = _Bucket(request, settings, weight), 0.0, 0
    for piece, mine in _own(request):
        size = float(piece.elements * weight)
        small, grads = kept_by_c_library(size), earlier + held + bucket.waiting * weight + size
        yield Moment(piece.place, grads, bucket.bytes + staging, piece=piece, arrival=True, small=small)
        if bucket.is_full_with(piece):
            copy = _copied(bucket, request)
            small += kept_by_c_library(copy)
            yield Moment(piece.place, grads, bucket.bytes + staging + copy, piece=piece, small=small)
            bucket.empty()
            # Memory that is asked for at once is written bit by bit.
            held = held + in_bucket if bucket.lazily else own if held or in_bucket else 0.0
            in_bucket = 0
        in_bucket += 0 if offloaded or not mine or settings.accumulates_in_fp32 else piece.elements * weight
        bucket.add(piece)
    waiting = bucket.waiting * float(weight)
    yield Moment(BEFORE, earlier + held + waiting, bucket.bytes + staging + _copied(bucket, request), step=True)
    yield Moment(BEFORE, earlier + own + waiting, bucket.bytes + staging, step=True)
    yield from _flat_step(request, settings, own + earlier, part, staging)


def _stage1(request: Request, settings: EngineSettings) -> Iterator[Moment]:
    """Every gradient stays whole until the backward pass has ended, and goes through the bucket then."""
    weight, total = weight_bytes(request), request.shape.trained_parameters
    width = FP32_BYTES if settings.accumulates_in_fp32 else weight
    offloaded = settings.optimizer is not None
    bucket, grads, small = _Bucket(request, settings, width), 0.0, 0.0
    staging = request.shape.largest_trained * weight if offloaded else 0
    for piece in reversed(trained_of(request.shape)):
        grads, small = grads + piece.elements * width, small + kept_by_c_library(piece.elements * width)
        held = float(total * width) + piece.elements * weight if request.accumulation > 1 else grads
        yield Moment(piece.place, held, bucket.bytes + staging, piece=piece, arrival=True, small=small)
    own, moved, held, in_bucket = set(map(id, own_pieces(request))), 0, 0.0, 0
    # Larger than the bucket, and this rank's own: it lets go of them once they are copied. The others stay.
    own_waiting: list[int] = []
    for piece in trained_of(request.shape):
        if bucket.is_full_with(piece):
            whole, copy = float((total - moved) * width), _copied(bucket, request)
            yield Moment(BEFORE, whole + held, bucket.bytes + staging + copy, step=True, small=small)
            held, in_bucket = held + (0 if offloaded else in_bucket * width), 0
            yield Moment(BEFORE, whole + held, bucket.bytes + staging, step=True, small=small)
            bucket.empty()
            moved, small = (
                moved + sum(own_waiting),
                small - sum(kept_by_c_library(size * width) for size in own_waiting),
            )
            own_waiting.clear()
        bucket.add(piece)
        if piece.elements <= settings.reduce_bucket:
            moved, small = moved + piece.elements, small - kept_by_c_library(piece.elements * width)
        elif id(piece) in own:
            own_waiting.append(piece.elements)
        in_bucket += piece.elements if id(piece) in own else 0
    whole, copy = float((total - moved) * width), _copied(bucket, request)
    yield Moment(BEFORE, whole + held, bucket.bytes + staging + copy, step=True, small=small)
    held += 0 if offloaded else in_bucket * width
    yield Moment(BEFORE, whole + held, bucket.bytes + staging, step=True, small=small)
    yield from _flat_step(request, settings, held, flat_elements(request) // request.box.ranks, staging)


def _flat_step(
    request: Request, settings: EngineSettings, kept: float, part: int, staging: float
) -> Iterator[Moment]:  # fmt: skip
    """The norm is taken in fp64; then the part's gradients are flattened, and made fp32 for the optimizer."""
    weight, stepped = weight_bytes(request), master_bytes(settings)
    if settings.optimizer is None:
        masters = part * stepped if stepped != weight else 0
        largest = min(part, max(piece.elements for piece in own_pieces(request)))
        yield Moment(BEFORE, kept, float(largest * NORM_BYTES), step=True)
        yield Moment(BEFORE, kept, float(part * weight + masters), step=True)
        if request.step_copies:
            yield Moment(BEFORE, 0.0, masters + float(request.step_copies * stepped * part), step=True)
    if request.box.gathers_into_copies and request.box.ranks > 1:
        yield Moment(BEFORE, 0.0, float(flat_elements(request) * weight) + staging, step=True)


def _stage3(request: Request, settings: EngineSettings) -> Iterator[Moment]:
    weight, ranks = weight_bytes(request), request.box.ranks
    kept = FP32_BYTES if settings.accumulates_in_fp32 else weight
    grads = 0.0 if settings.optimizer is not None else float(part_elements(request, trained_of(request.shape)) * kept)
    bucket, standing = _Bucket(request, settings, weight), standing_bucket(request, settings)

    def reduced() -> float:
        """reduce_scatter_coalesced makes one tensor of all but a single gradient that needs no padding."""
        copies = int(not (bucket.count == 1 and bucket.filled % ranks == 0))
        copies += int(request.box.gathers_into_copies and ranks > 1)
        return standing + copies * bucket.filled * float(weight)

    for piece in reversed(trained_of(request.shape)):
        size = float(piece.elements * weight)
        small, held = kept_by_c_library(size), grads + bucket.waiting * weight + size
        yield Moment(piece.place, held, standing, piece=piece, arrival=True, small=small)
        if bucket.is_full_with(piece):
            small += kept_by_c_library(reduced() - standing)
            yield Moment(piece.place, held, reduced(), piece=piece, small=small)
            bucket.empty()
        bucket.add(piece)
    yield Moment(BEFORE, grads + bucket.waiting * weight, reduced(), piece=piece)
    if settings.optimizer is None:
        largest = math.ceil(request.shape.largest_trained / ranks)
        yield Moment(BEFORE, grads, standing + largest * NORM_BYTES, step=True)
        group = max(sub_groups(request, settings))
        stepped = master_bytes(settings)
        masters = group * (stepped if stepped != weight else 0)
        yield Moment(BEFORE, grads, standing + group * float(weight) + masters, step=True)
        if request.step_copies:
            yield Moment(BEFORE, grads, standing + masters + float(request.step_copies * stepped * group), step=True)
