"""Memory snapshots of a backward pass and of the step after it: gradients, and the engine's buffers for them.

In the engines' own order: the last parameter first, each gradient into the bucket, a full bucket reduced and freed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from study.predictor.request import FP32_BYTES, Request, same_for_any_micro_batch
from study.predictor.shape import BEFORE, ModelShape, Parameter
from study.predictor.state import accumulated_bytes, flat_elements, own_shards, shard_elements, sub_groups

# deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE: stage 0 reduces so many numbers at once.
STAGE0_BUCKET = 500_000_000
# runtime/zero/utils.py, get_norm_dtype: each gradient is made fp64 for its norm.
NORM_BYTES = 8


class Snapshot(NamedTuple):
    """While the gradient of a tensor comes, or of a layer; `step`: after the backward pass."""

    # As in Parameter.
    place: int
    grads: float
    buffers: float
    step: bool = False
    param: Parameter | None = None
    # It has come, and nothing was done with it yet.
    arrival: bool = False


def snapshots_of(request: Request) -> list[Snapshot]:
    """Snapshots of the last micro-batch of a step: with accumulation earlier gradients are there already."""
    # Checkpointed or not, gradients come in the same order.
    return _snapshots_of(dataclasses.replace(request, gradient_checkpointing=False))


@same_for_any_micro_batch
def _snapshots_of(request: Request) -> list[Snapshot]:
    stage = request.strategy.zero_stage
    if request.strategy.is_fsdp:
        return list(_fsdp(request))
    if stage in (None, 0):
        snapshots = _unsharded(request)
    else:
        snapshots = {1: _stage1, 2: _stage2, 3: _stage3}[request.settings.stage](request)
    return list(_with_tied(request, snapshots) if has_tied_gradients(request.shape) else snapshots)


def has_tied_gradients(shape: ModelShape) -> bool:
    """A frozen embedding has none."""
    return shape.tied and shape.tensors[0].trained


def _with_tied(request: Request, snapshots: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """The head's gradient of a tied embedding waits all through the backward pass; then autograd adds up both.

    Three tensors of the vocabulary are there then: its InputBuffer does not add in place.
    """
    embedding = request.shape.params[0]
    size, waits = embedding.elements * float(request.weight_bytes), True
    for snapshot in snapshots:
        extra = size if waits else 0.0
        if snapshot.param is embedding:
            extra, waits = (2 * size if snapshot.arrival else 0.0), False
        yield snapshot if snapshot.step or not extra else snapshot._replace(grads=snapshot.grads + extra)


def _torch_step(request: Request, elements: float, buffers: float) -> Snapshot:
    """The optimizer without an engine, or with stage 0: fp32 gradients for its masters, and what AdamW makes."""
    weight = request.weight_bytes
    stepped = weight if request.pure else FP32_BYTES
    grads = elements * (weight + (stepped if stepped != weight else 0))
    made = request.step_copies * elements * stepped
    return Snapshot(BEFORE, float(grads), buffers + made, step=True)


def _fsdp(request: Request) -> Iterator[Snapshot]:
    """FSDP2 in torch's order (_fsdp_param_group.py of torch 2.13): each layer is a group, gathered unpartitioned, its
    gradients unpartitioned until they are scattered, the next group on its way.

    With accumulation no micro-batch but the last scatters: unpartitioned gradients of all layers are there by then.
    """
    sizes: dict[int, int] = {}
    # Of frozen weights there are no gradients.
    trained: dict[int, int] = {}
    first: dict[int, int] = {}
    for param in request.shape.params:
        sizes[param.place] = sizes.get(param.place, 0) + param.elements
        trained[param.place] = trained.get(param.place, 0) + param.elements * param.trained
        if param.elements > param.rows and param.trained:
            first[param.place] = param.elements
    ranks = request.ranks_per_replica or request.box.ranks
    # Where FSDP itself computes in 16 bits it gathers them; it reduces in the type of its parts.
    own = request.weight_bytes
    weight = 2 if request.fsdp_gathers_16_bits else own
    # An untied embedding is a group of its own.
    embedding = sizes.get(BEFORE, 0)
    root = sizes.get(request.shape.layers, 0) + (embedding if request.shape.tied else 0)
    part = request.shape.trained_parameters / ranks
    accumulated = accumulated_bytes(request)
    grads = accumulated
    copies = 1 if request.box.gathers_into_copies else 0
    waiting = request.shape.params[0].elements if has_tied_gradients(request.shape) else 0
    # What the gradients of the layer before are scattered from, until those of this one are.
    held, top = 0.0, sizes[request.shape.layers - 1]
    # The last layer comes while the root's own backward pass begins.
    yield Snapshot(request.shape.layers, grads, float(weight * (root + (1 + copies) * top)))
    yield Snapshot(request.shape.layers, grads, float(weight * (root + top + waiting)))
    for place in reversed(range(request.shape.layers)):
        size, made, following = sizes[place], trained[place], sizes[place - 1] if place else 0
        # The root group stays whole, and the head's gradient of a tied embedding waits.
        whole = float(weight * (root + waiting))
        # New gradients are added to those of earlier micro-batches one by one.
        new = 0.0 if accumulated else float(weight * made)
        # What has come is copied into the weights; then the next layer's comes, and then the first gradient.
        yield Snapshot(place, grads, whole + held + weight * (size + max(size, (1 + copies) * following)))
        yield Snapshot(place, grads, whole + held + weight * (size + following + first[place]))
        # All of the layer's gradients, none of its activations.
        yield Snapshot(place - 1, grads, whole + held + new + weight * (size + following))
        # The weights are gone, and so is the last copy, before the gradients are copied.
        held = float(own * made)
        copied = max(weight, copies * own) * made - (weight * made - new)
        yield Snapshot(place - 1, grads, whole + held + weight * following + copied)
        grads += made / ranks * own - (weight * made - new)
    last = root + (0 if request.shape.tied else embedding)
    made = last if request.shape.params[0].trained else trained[request.shape.layers]
    # Both gradients of a tied embedding are there and their sum.
    yield Snapshot(BEFORE, grads, held + weight * (last + 3 * waiting))
    copied = max(weight, copies * own) - (weight if accumulated else 0)
    yield Snapshot(BEFORE, grads, float(own + copied) * made)
    if request.shape.lora_rank:
        # Of frozen weights nothing in the backward pass is as large as where the forward pass begins: what came is kept
        # besides its copy until the first layer has come, too (FSDPCommContext.all_gather_state).
        came = 2 * root if request.shape.tied else root + 2 * embedding
        yield Snapshot(BEFORE, accumulated, float(weight * (came + (1 + copies) * sizes[0])))
    yield _torch_step(request, part, 0.0)


def _unsharded(request: Request) -> Iterator[Snapshot]:
    """single, DDP and DeepSpeed's stage 0. DDP has every gradient a second time, in its buckets."""
    weight, total = request.weight_bytes, request.shape.trained_parameters
    buffers = float(total * weight) if request.strategy.name == "ddp" else 0.0
    grads = 0.0
    for param in reversed(request.shape.trained_params):
        size = float(param.elements * weight)
        grads += size
        held = total * weight + size if request.accumulation > 1 else grads
        yield Snapshot(param.place, held, buffers, param=param, arrival=True)
    if request.strategy.zero_stage == 0 and request.box.ranks > 1:
        yield Snapshot(BEFORE, float(total * weight), float(min(total, STAGE0_BUCKET) * weight), step=True)
    yield _torch_step(request, total, buffers)


class _Bucket:
    """The buffer that gradients are copied into. A process has no memory for pages that were never written."""

    def __init__(self, request: Request, width: int) -> None:
        settings = request.settings
        self.width, self.settings = width, settings
        self.written = 0
        self.filled = self.waiting = self.count = 0
        self.copies = 2 if settings.overlaps and settings.stage < 3 else 1
        self.lazily = request.box.in_host_memory
        self.is_alone = request.box.ranks == 1
        # Where the optimizer is offloaded, the norm of each is taken when it is copied out of the bucket.
        copied_out = settings.optimizer is not None and settings.stage < 3
        self.own = dict(own_shards(request)) if copied_out else {}
        self.norm = 0

    def is_full_with(self, param: Parameter) -> bool:
        return self.filled + param.elements > self.settings.reduce_bucket and self.filled > 0

    def add(self, param: Parameter) -> None:
        if self.filled + param.elements > self.settings.reduce_bucket:
            # Larger than the bucket: it stays where it is.
            self.waiting += param.elements
        self.filled, self.count = self.filled + param.elements, self.count + 1
        self.written = max(self.written, self.filled - self.waiting)
        self.norm = max(self.norm, self.own.get(param, 0) * NORM_BYTES)

    def empty(self) -> None:
        self.filled = self.waiting = self.count = self.norm = 0

    @property
    def bytes(self) -> float:
        if not self.settings.contiguous_gradients:
            return 0.0
        elements = self.written if self.lazily else self.settings.reduce_bucket * self.copies
        return float(elements * self.width)

    @property
    def reduced_bytes(self) -> float:
        """Stages 1 and 2: reduced to everybody, a bucket is flattened, which copies it; sent to each owner, its parts
        are not. After that the parts that go to the host are made fp64, one by one."""
        flattens = self.settings.reduces_to_all and not (self.is_alone and self.count == 1)
        return float(max(self.filled * self.width if flattens else 0, self.norm))


@same_for_any_micro_batch
def standing_bucket(request: Request) -> float:
    """Stage 3's bucket is there from the start."""
    bucket = _Bucket(request, request.weight_bytes)
    for param in reversed(request.shape.trained_params):
        if bucket.is_full_with(param):
            bucket.empty()
        bucket.add(param)
    return bucket.bytes


def _stage1(request: Request) -> Iterator[Snapshot]:
    """Every gradient stays unpartitioned until the backward pass has ended, and goes through the bucket then."""
    settings = request.settings
    weight, total = request.weight_bytes, request.shape.trained_parameters
    width = FP32_BYTES if settings.accumulates_in_fp32 else weight
    offloaded = settings.optimizer is not None
    bucket, grads = _Bucket(request, width), 0.0
    staging = request.shape.largest_trained * weight if offloaded else 0
    for param in reversed(request.shape.trained_params):
        grads += param.elements * width
        held = float(total * width) + param.elements * weight if request.accumulation > 1 else grads
        yield Snapshot(param.place, held, bucket.bytes + staging, param=param, arrival=True)
    own, moved, held, in_bucket = {param for param, _ in own_shards(request)}, 0, 0.0, 0
    # Larger than the bucket, and this rank's own: freed once they are copied. The others stay.
    own_waiting = 0

    def reduced() -> Iterator[Snapshot]:
        nonlocal held, in_bucket
        unsharded = float((total - moved) * width)
        yield Snapshot(BEFORE, unsharded + held, bucket.bytes + staging + bucket.reduced_bytes, step=True)
        held, in_bucket = held + (0 if offloaded else in_bucket * width), 0
        yield Snapshot(BEFORE, unsharded + held, bucket.bytes + staging, step=True)

    for param in request.shape.trained_params:
        if bucket.is_full_with(param):
            yield from reduced()
            bucket.empty()
            moved, own_waiting = moved + own_waiting, 0
        bucket.add(param)
        if param.elements <= settings.reduce_bucket:
            moved += param.elements
        elif param in own:
            own_waiting += param.elements
        in_bucket += param.elements if param in own else 0
    yield from reduced()
    yield from _flat_step(request, held, staging)


def _stage2(request: Request) -> Iterator[Snapshot]:
    settings = request.settings
    weight, offloaded = request.weight_bytes, settings.optimizer is not None
    mine = {param for param, _ in own_shards(request)}
    # What this rank keeps is copied out of the bucket into one tensor, the last of its params unpartitioned.
    own = 0.0 if offloaded else float(sum(param.elements for param in mine) * weight)
    staging = request.shape.largest_trained * weight if offloaded else 0
    earlier = own if request.accumulation > 1 else 0.0
    if settings.accumulates_in_fp32 and not offloaded:
        own = earlier = float(flat_elements(request) // request.box.ranks * FP32_BYTES)
    bucket, held, in_bucket = _Bucket(request, weight), 0.0, 0
    for param in reversed(request.shape.trained_params):
        grads = earlier + held + bucket.waiting * weight + float(param.elements * weight)
        yield Snapshot(param.place, grads, bucket.bytes + staging, param=param, arrival=True)
        if bucket.is_full_with(param):
            yield Snapshot(param.place, grads, bucket.bytes + staging + bucket.reduced_bytes, param=param)
            bucket.empty()
            # Memory that is asked for at once is written bit by bit.
            held = held + in_bucket if bucket.lazily else own if held or in_bucket else 0.0
            in_bucket = 0
        if param in mine and not offloaded and not settings.accumulates_in_fp32:
            in_bucket += param.elements * weight
        bucket.add(param)
    waiting = bucket.waiting * float(weight)
    yield Snapshot(BEFORE, earlier + held + waiting, bucket.bytes + staging + bucket.reduced_bytes, step=True)
    yield Snapshot(BEFORE, earlier + own + waiting, bucket.bytes + staging, step=True)
    yield from _flat_step(request, own + earlier, staging)


def _flat_step(request: Request, kept: float, staging: float) -> Iterator[Snapshot]:
    """The norm is taken in fp64; then the part's gradients are flattened, and made fp32 for the optimizer."""
    weight, stepped, elements = request.weight_bytes, request.settings.master_bytes, flat_elements(request)
    part = elements // request.box.ranks
    if request.settings.optimizer is None:
        masters = part * stepped if stepped != weight else 0
        largest = min(part, max(param.elements for param, _ in own_shards(request)))
        yield Snapshot(BEFORE, kept, float(largest * NORM_BYTES), step=True)
        yield Snapshot(BEFORE, kept, float(part * weight + masters), step=True)
        if request.step_copies:
            yield Snapshot(BEFORE, 0.0, masters + float(request.step_copies * stepped * part), step=True)
    if request.box.gathers_into_copies and request.box.ranks > 1:
        yield Snapshot(BEFORE, 0.0, float(elements * weight) + staging, step=True)


def _stage3(request: Request) -> Iterator[Snapshot]:
    settings = request.settings
    weight, ranks = request.weight_bytes, request.box.ranks
    kept = FP32_BYTES if settings.accumulates_in_fp32 else weight
    grads = 0.0
    if settings.optimizer is None:
        grads = float(shard_elements(request, request.shape.trained_params) * kept)
    bucket, standing = _Bucket(request, weight), standing_bucket(request)

    def reduced() -> float:
        """reduce_scatter_coalesced makes one tensor of all but a single gradient that needs no padding."""
        copies = int(not (bucket.count == 1 and bucket.filled % ranks == 0))
        copies += int(request.box.gathers_into_copies and ranks > 1)
        return standing + copies * bucket.filled * float(weight)

    for param in reversed(request.shape.trained_params):
        held = grads + bucket.waiting * weight + float(param.elements * weight)
        yield Snapshot(param.place, held, standing, param=param, arrival=True)
        if bucket.is_full_with(param):
            yield Snapshot(param.place, held, reduced(), param=param)
            bucket.empty()
        bucket.add(param)
    yield Snapshot(BEFORE, grads + bucket.waiting * weight, reduced(), param=param)
    if settings.optimizer is None:
        largest = math.ceil(request.shape.largest_trained / ranks)
        yield Snapshot(BEFORE, grads, standing + largest * NORM_BYTES, step=True)
        group, stepped = max(sub_groups(request)), settings.master_bytes
        masters = group * (stepped if stepped != weight else 0)
        yield Snapshot(BEFORE, grads, standing + group * float(weight) + masters, step=True)
        if request.step_copies:
            yield Snapshot(BEFORE, grads, standing + masters + float(request.step_copies * stepped * group), step=True)
