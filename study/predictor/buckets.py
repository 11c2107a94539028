"""Memory snapshots of gradients and their buffers on one rank, during the backward pass and the optimizer step.

The order is that of the engines: gradients arrive from the last parameter on, each is copied into the bucket, and a
full bucket is reduced and freed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from study.predictor.request import FP32_BYTES, Request, cache_by_request
from study.predictor.shape import BEFORE, ModelShape, Parameter
from study.predictor.state import (
    accumulated_bytes,
    adapter_units,
    flat_elements,
    flat_units,
    rank0_shards,
    shards_of_model,
    sub_groups,
)

# deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE: elements that stage 0 reduces in one call.
STAGE0_BUCKET = 500_000_000
# runtime/zero/utils.py, get_norm_dtype: each gradient is cast to fp64 for its norm.
NORM_BYTES = 8


class Snapshot(NamedTuple):
    """Gradient memory when the gradient of a tensor or layer arrives; with `step`, after the backward pass."""

    # Same meaning as `Parameter.place`.
    place: int
    grads: float
    buffers: float
    step: bool = False
    param: Parameter | None = None
    # The gradient has arrived and is not in the bucket yet.
    arrival: bool = False
    # Before the backward pass of the layer `place`, which has no temporaries yet.
    between: bool = False


@cache_by_request
def gradient_snapshots(request: Request) -> list[Snapshot]:
    """Return the snapshots of a step's last micro-batch, with the gradients accumulated so far."""
    by_stage = {None: _unsharded, 0: _unsharded, 1: _stage1, 2: _stage2, 3: _stage3}
    if request.strategy.is_fsdp:
        first_version = _fsdp1 if request.shape.lora_rank is None else _fsdp1_adapters
        snapshots = (first_version if request.fsdp_version == 1 else _fsdp)(request)
    else:
        snapshots = by_stage[request.strategy.zero_stage](request)
        snapshots = _with_tied(request, snapshots) if has_tied_gradients(request.shape) else snapshots
    return list(_before_gradients(snapshots) if request.shape.lora_targets else snapshots)


def _before_gradients(snapshots: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """Add the beginning of each layer's backward pass: with adapters on some modules no gradient arrives until it has
    passed the others."""
    reached = None
    for snapshot in snapshots:
        if snapshot.param is not None and snapshot.place != reached:
            yield Snapshot(snapshot.place, snapshot.grads, snapshot.buffers)
            reached = snapshot.place
        yield snapshot


def has_tied_gradients(shape: ModelShape) -> bool:
    """Whether a tied embedding receives two gradients; False if it is frozen."""
    return shape.tied and shape.embedding.trained


def _with_tied(request: Request, snapshots: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """Add the gradient of a tied head, which stays allocated until the embedding's gradient arrives. autograd then
    allocates a third tensor of that size for the sum: its InputBuffer does not add in place."""
    embedding = request.shape.embedding
    size, is_pending = embedding.elements * float(request.weight_bytes), True
    for snapshot in snapshots:
        head_bytes = size if is_pending else 0.0
        if snapshot.param is embedding:
            head_bytes, is_pending = (2 * size if snapshot.arrival else 0.0), False
        if snapshot.step or not head_bytes:
            yield snapshot
        else:
            place, grads, buffers, _, param, arrival, between = snapshot
            yield Snapshot(place, grads + head_bytes, buffers, False, param, arrival, between)


def _torch_step(request: Request, elements: float, buffers: float) -> Snapshot:
    """Optimizer step without an engine, or with stage 0: fp32 gradients for the masters, and AdamW's temporaries."""
    weight = request.adapter_bytes
    stepped = weight if request.pure else FP32_BYTES
    grads = elements * (weight + (stepped if stepped != weight else 0))
    return Snapshot(BEFORE, float(grads), buffers + request.step_copies * elements * stepped, step=True)


def _arrivals(shape: ModelShape, find_place: Callable[[Parameter], int]) -> dict[int, list[tuple[Parameter, int]]]:
    """Return by place the parameters in the order of their gradients, each with the elements that have arrived."""
    places: dict[int, list[tuple[Parameter, int]]] = {place: [] for place in range(BEFORE, shape.layers + 1)}
    for param in reversed(shape.trained_params):
        arrived = places[find_place(param)]
        arrived.append((param, param.elements + (arrived[-1][1] if arrived else 0)))
    return places


def _gathered(request: Request, sizes: dict[int, int], groups: range, root: int) -> tuple[dict[int, int], ...]:
    """Return by group, and for the place after the last, the elements that stay gathered, root and groups below, and
    those of the next group, which is gathered again."""
    following = [0, *(sizes[place] for place in groups)]
    resident = [root] * len(following)
    if request.fsdp_keeps_gathered:
        resident, following = list(itertools.accumulate(following[1:], initial=root)), [0] * len(following)
    places = range(groups.start, groups.stop + 1)
    return dict(zip(places, resident, strict=True)), dict(zip(places, following, strict=True))


def _fsdp(request: Request) -> Iterator[Snapshot]:  # noqa: PLR0914
    """Snapshots of FSDP2 in torch's order (_fsdp_param_group.py of torch 2.13): each layer is a group that is gathered
    while the next group is prefetched; its gradients stay unpartitioned until they are reduce-scattered. Accelerate
    makes a group of the norm and the head, with a tied embedding (fsdp2_prepare_model); an untied embedding is a group.
    With accumulation only the last micro-batch reduces: by then all layers have unpartitioned gradients."""
    shape, top, arrivals = request.shape, request.shape.layers, _arrivals(request.shape, lambda param: param.place)
    sizes = dict.fromkeys(arrivals, 0)
    for param in request.stored.params:
        sizes[param.place] += param.elements
    trained = {place: arrived[-1][1] if arrived else 0 for place, arrived in arrivals.items()}
    # If FSDP itself computes in 16 bits, it gathers 16 bits; it reduces in the type of its shards.
    weight, shard_width, ranks = request.gathered_bytes, request.weight_bytes, request.fsdp_ranks
    copies = int(request.box.gloo_copies_gathers)
    # A group of the embedding and the head is gathered from its first use to its last gradient. Until then the
    # gradient of the head waits, and then those of the embedding arrive: if it is tied, with their sum.
    groups, root, tail, head, at_end = range(BEFORE, top + 1), 0, sizes[top], 0, 0
    if shape.tied or request.fsdp_whole_root:
        groups, root, tail = range(top), sizes[top] + sizes[BEFORE], 0
        head = shape.embedding.elements * has_tied_gradients(shape) if shape.tied else trained[top]
        at_end = trained[BEFORE] + (2 if shape.tied else 1) * head
    resident, following = _gathered(request, sizes, groups, root)
    grads = accumulated = accumulated_bytes(request)
    # The last layer is gathered after the loss's gradient.
    begun = float(weight * (resident[top] + tail))
    yield Snapshot(top, grads, begun)
    yield Snapshot(top, grads, begun + weight * (1 + copies) * following[top])
    yield Snapshot(top, grads, begun + weight * (following[top] + head))
    # Reduce-scatter input of the previous group, freed after this group's reduction.
    reducing = 0.0
    for place in reversed(groups):
        size, new, after = sizes[place], trained[place], max(place - 1, BEFORE)
        base = float(weight * (resident[place] + head))
        if place < top and not request.fsdp_keeps_gathered:
            # The gathered buffer is copied into the weights; then the next group arrives, and then the gradients.
            yield Snapshot(place, grads, base + reducing + weight * (size + max(size, (1 + copies) * following[place])))
        for param, arrived in arrivals[place]:
            # New gradients are added to those of earlier micro-batches one by one.
            waiting = param.elements if accumulated else arrived
            yield Snapshot(place, grads, base + reducing + weight * (size + following[place] + waiting), param=param)
        # The weights and the previous reduction's input are freed before the gradients are copied.
        reducing, freed = float(shard_width * new), weight * new if accumulated else 0.0
        copied = max(weight, copies * shard_width) * new - freed
        yield Snapshot(after, grads, base + reducing + weight * following[place] + copied, between=True)
        # With an offload, reduced gradients move to the host for the optimizer's step.
        grads += (0 if request.fsdp_offloads else shard_width * new / ranks) - freed
    if root:
        new = trained[top] + trained[BEFORE]
        yield Snapshot(BEFORE, grads, reducing + weight * (root + at_end))
        copied = max(weight, copies * shard_width) - (weight if accumulated else 0)
        yield Snapshot(BEFORE, grads, float(shard_width + copied) * new)
    # The forward pass keeps the buffer of a gather, which it copies into the weights, until the next group's copies are
    # made (FSDPCommContext.all_gather_state). Most is gathered when the last group is, or with frozen weights the first
    # layer, after the embedding.
    last = groups[-1]
    most = resident[last] + (2 + copies) * sizes[last] + sizes.get(last - 1, 0) * (last > groups.start)
    yield Snapshot(last - 1, accumulated, float(weight * most), between=True)
    if shape.lora_rank:
        yield Snapshot(BEFORE, accumulated, float(weight * (2 * (root or sizes[BEFORE]) + (1 + copies) * sizes[0])))
    yield _torch_step(request, 0.0 if request.fsdp_offloads else shape.trained_parameters / ranks, 0.0)


def _fsdp1(request: Request) -> Iterator[Snapshot]:  # noqa: PLR0914
    """Snapshots of FSDP1 in torch's order (_runtime_utils.py of torch 2.13): a layer is gathered while the gradients of
    the one above it arrive. The gradients of a flat parameter wait for the last of them, are concatenated, and
    reduce-scattered. The root's tensors wait for the embedding's gradient."""
    shape, units, grads = request.shape, flat_units(request), accumulated_bytes(request)
    weight, shard_width, ranks = request.gathered_bytes, request.weight_bytes, request.fsdp_ranks
    root, top, copies = units[BEFORE], shape.layers, int(request.box.gloo_copies_gathers)
    arrivals, accumulated = _arrivals(shape, shape.find_layer), grads
    # Elements of the root's gradients, by the place at which they arrive.
    pending = dict.fromkeys(range(BEFORE, top + 1), 0)
    for param, _ in arrivals[BEFORE]:
        pending[param.place] += param.elements
    pending[top] += shape.embedding.elements if has_tied_gradients(shape) else 0
    waiting = float(weight * pending[top])
    resident, following = _gathered(request, {place: unit.size for place, unit in units.items()}, range(top), root.size)
    # The backward pass begins with a gather of the last layer, before the loss's gradient.
    begun = float(weight * (resident[top] + following[top]))
    yield Snapshot(top, grads, begun)
    yield Snapshot(top, grads + waiting, begun + weight * copies * following[top])
    for place in reversed(range(top)):
        unit, waiting = units[place], waiting + weight * pending[place]
        gathered = weight * float(resident[place] + unit.size + following[place])
        yield Snapshot(place, grads + waiting, gathered + weight * copies * following[place])
        for param, arrived in arrivals[place]:
            yield Snapshot(place, grads + waiting, gathered + weight * arrived, param=param)
        yield Snapshot(place - 1, grads + waiting, gathered + 2 * weight * unit.trained, between=True)
        reduced = weight * unit.size * (copies + 1 / ranks)
        yield Snapshot(place - 1, grads + waiting, gathered + reduced, between=True)
        on_device = 0 if request.fsdp_offloads else shard_width
        grads += unit.trained / ranks * on_device - (weight * unit.trained if accumulated else 0.0)
    # All gradients of the root, both of a tied embedding, and their concatenation.
    grads_of_root = weight * float(2 * root.trained + pending[top] * shape.tied)
    yield Snapshot(BEFORE, grads, weight * root.size + grads_of_root)
    yield Snapshot(BEFORE, grads, weight * (root.size + (1 + copies + 1 / ranks) * root.size))
    yield _torch_step(request, 0.0 if request.fsdp_offloads else sum(unit.size for unit in units.values()) / ranks, 0.0)


def _fsdp1_adapters(request: Request) -> Iterator[Snapshot]:  # noqa: PLR0914
    """Snapshots of FSDP1 with adapters, each of which is a unit: gathered for its own product, and its gradient is
    reduced as it arrives. A unit prefetches the one that was called before it (_get_handle_to_prefetch in torch's
    _runtime_utils.py), so the next layer's frozen unit is gathered with the first adapter of a layer, its last."""
    shape, units, adapters = request.shape, flat_units(request), adapter_units(request)
    weight, top, copies = request.gathered_bytes, shape.layers, int(request.box.gloo_copies_gathers)
    grads, arrivals, root = accumulated_bytes(request), _arrivals(shape, shape.find_layer), units[BEFORE].size
    resident, following = _gathered(request, {place: unit.size for place, unit in units.items()}, range(top), root)
    yield Snapshot(top, grads, float(weight * (resident[top] + (1 + copies) * following[top])))
    for place in (*reversed(range(top)), BEFORE):
        gathered = float(weight * root)
        if place != BEFORE:
            gathered = float(weight * (resident[place] + units[place].size))
            yield Snapshot(place, grads, gathered)
        arrived = [param for param, _ in arrivals[place] if param.index in adapters]
        for param in arrived:
            unit = adapters[param.index]
            prefetched = (1 + copies) * following.get(place, 0) if param is arrived[-1] else 0
            # The matrix, its gradient, and the input of the reduction.
            elements = (2 + copies) * unit.size + prefetched
            yield Snapshot(place, grads, gathered + weight * elements, param=param)
            grads += 0 if request.fsdp_offloads else unit.size / request.fsdp_ranks * request.adapter_bytes
    stepped = 0 if request.fsdp_offloads else sum(unit.size for unit in adapters.values())
    yield _torch_step(request, stepped / request.fsdp_ranks, 0.0)


def _unsharded(request: Request) -> Iterator[Snapshot]:
    """Snapshots of single, DDP and DeepSpeed's stage 0. DDP stores every gradient a second time, in its buckets."""
    weight, total = request.adapter_bytes, request.shape.trained_parameters
    buffers = float(total * weight) if request.strategy.name == "ddp" else 0.0
    grads = 0.0
    for param in reversed(request.shape.trained_params):
        size = float(param.elements * weight)
        grads += size
        gradient_bytes = total * weight + size if request.accumulation > 1 else grads
        yield Snapshot(param.place, gradient_bytes, buffers, param=param, arrival=True)
    if request.strategy.zero_stage == 0 and request.box.ranks > 1:
        yield Snapshot(BEFORE, float(total * weight), float(min(total, STAGE0_BUCKET) * weight), step=True)
    yield _torch_step(request, total, buffers)


class _Bucket:
    """DeepSpeed's gradient bucket. In host memory only the pages that were written count."""

    def __init__(self, request: Request, width: int) -> None:
        self.width, self.settings = width, request.settings
        self.lazily, self.is_alone = request.box.is_cpu_only, request.box.ranks == 1
        # With an offloaded optimizer the norm of each gradient is computed when it is copied out of the bucket.
        copied_out = self.settings.optimizer is not None and self.settings.stage < 3
        self.own = {param.index: size for param, size in rank0_shards(request)} if copied_out else {}
        self.written = self.filled = self.waiting = self.count = self.norm = 0

    def is_full_with(self, param: Parameter) -> bool:
        return self.filled + param.elements > self.settings.reduce_bucket_size and self.filled > 0

    def add(self, param: Parameter) -> None:
        if self.filled + param.elements > self.settings.reduce_bucket_size:
            # Larger than the bucket: not copied into it.
            self.waiting += param.elements
        self.filled, self.count = self.filled + param.elements, self.count + 1
        if self.lazily:
            self.written = max(self.written, self.filled - self.waiting)
        if self.own:
            self.norm = max(self.norm, self.own.get(param.index, 0) * NORM_BYTES)

    def empty(self) -> None:
        self.filled = self.waiting = self.count = self.norm = 0

    @property
    def bytes(self) -> float:
        if not self.settings.contiguous_gradients:
            return 0.0
        copies = 2 if self.settings.overlap_comm and self.settings.stage < 3 else 1
        return float((self.written if self.lazily else self.settings.reduce_bucket_size * copies) * self.width)

    @property
    def reduced_bytes(self) -> float:
        """Temporary bytes while stages 1 and 2 reduce the bucket: an all-reduce flattens it into a copy, and reduces to
        the owners do not. Gradients for an offloaded optimizer are then cast to fp64, one by one."""
        flattens = self.settings.use_multi_rank_bucket_allreduce and not (self.is_alone and self.count == 1)
        return float(max(self.filled * self.width if flattens else 0, self.norm))


@cache_by_request
def standing_bucket(request: Request) -> float:
    """Return the bytes of stage 3's bucket, which exists from the start."""
    bucket = _Bucket(request, request.weight_bytes)
    if bucket.lazily:
        for param in reversed(request.shape.trained_params):
            if bucket.is_full_with(param):
                bucket.empty()
            bucket.add(param)
    return bucket.bytes


def _stage1(request: Request) -> Iterator[Snapshot]:
    """Snapshots of stage 1: gradients stay unpartitioned during the backward pass, and are reduced after it."""
    settings = request.settings
    weight, total = request.weight_bytes, request.shape.trained_parameters
    width = FP32_BYTES if settings.accumulates_in_fp32 else weight
    offloaded = settings.optimizer is not None
    bucket, grads = _Bucket(request, width), 0.0
    staging = request.shape.largest_trained * weight if offloaded else 0
    for param in reversed(request.shape.trained_params):
        grads += param.elements * width
        gradient_bytes = float(total * width) + param.elements * weight if request.accumulation > 1 else grads
        yield Snapshot(param.place, gradient_bytes, bucket.bytes + staging, param=param, arrival=True)
    local_params, moved, gradient_bytes, in_bucket = {param for param, _ in rank0_shards(request)}, 0, 0.0, 0
    # Elements of this rank's gradients larger than the bucket: freed after the copy. Those of other ranks stay.
    local_large = 0

    def reduced() -> Iterator[Snapshot]:
        nonlocal gradient_bytes, in_bucket
        unsharded = float((total - moved) * width)
        yield Snapshot(BEFORE, unsharded + gradient_bytes, bucket.bytes + staging + bucket.reduced_bytes, step=True)
        gradient_bytes, in_bucket = gradient_bytes + (0 if offloaded else in_bucket * width), 0
        yield Snapshot(BEFORE, unsharded + gradient_bytes, bucket.bytes + staging, step=True)

    for param in request.shape.trained_params:
        if bucket.is_full_with(param):
            yield from reduced()
            bucket.empty()
            moved, local_large = moved + local_large, 0
        bucket.add(param)
        if param.elements <= settings.reduce_bucket_size:
            moved += param.elements
        elif param in local_params:
            local_large += param.elements
        in_bucket += param.elements if param in local_params else 0
    yield from reduced()
    yield from _flat_step(request, gradient_bytes, staging)


def _stage2(request: Request) -> Iterator[Snapshot]:
    """Snapshots of stage 2: gradients are reduced bucket by bucket during the backward pass."""
    settings = request.settings
    weight, offloaded = request.weight_bytes, settings.optimizer is not None
    local_params = {param for param, _ in rank0_shards(request)}
    # Gradients of this rank are copied out of the bucket into one tensor, the last parameter's unpartitioned.
    local_bytes = 0.0 if offloaded else float(sum(param.elements for param in local_params) * weight)
    staging = request.shape.largest_trained * weight if offloaded else 0
    accumulated = local_bytes if request.accumulation > 1 else 0.0
    if settings.accumulates_in_fp32 and not offloaded:
        local_bytes = accumulated = float(flat_elements(request) // request.box.ranks * FP32_BYTES)
    bucket, reduced, in_bucket = _Bucket(request, weight), 0.0, 0
    for param in reversed(request.shape.trained_params):
        grads = accumulated + reduced + bucket.waiting * weight + float(param.elements * weight)
        yield Snapshot(param.place, grads, bucket.bytes + staging, param=param, arrival=True)
        if bucket.is_full_with(param):
            yield Snapshot(param.place, grads, bucket.bytes + staging + bucket.reduced_bytes, param=param)
            bucket.empty()
            # The tensor is allocated at once and written step by step.
            reduced = reduced + in_bucket if bucket.lazily else local_bytes if reduced or in_bucket else 0.0
            in_bucket = 0
        if param in local_params and not offloaded and not settings.accumulates_in_fp32:
            in_bucket += param.elements * weight
        bucket.add(param)
    waiting = bucket.waiting * float(weight)
    yield Snapshot(BEFORE, accumulated + reduced + waiting, bucket.bytes + staging + bucket.reduced_bytes, step=True)
    yield Snapshot(BEFORE, accumulated + local_bytes + waiting, bucket.bytes + staging, step=True)
    yield from _flat_step(request, local_bytes + accumulated, staging)


def _flat_step(request: Request, grads: float, staging: float) -> Iterator[Snapshot]:
    """Optimizer step of stages 1 and 2: the norm in fp64, the shard flattened and cast to fp32."""
    weight, stepped, elements = request.weight_bytes, request.settings.master_bytes, flat_elements(request)
    shard = elements // request.box.ranks
    if request.settings.optimizer is None:
        masters = shard * stepped if stepped != weight else 0
        largest = min(shard, max(param.elements for param, _ in rank0_shards(request)))
        yield Snapshot(BEFORE, grads, float(largest * NORM_BYTES), step=True)
        yield Snapshot(BEFORE, grads, float(shard * weight + masters), step=True)
        if request.step_copies:
            yield Snapshot(BEFORE, 0.0, masters + float(request.step_copies * stepped * shard), step=True)
    if request.box.gloo_copies_gathers and request.box.ranks > 1:
        yield Snapshot(BEFORE, 0.0, float(elements * weight) + staging, step=True)


def _stage3(request: Request) -> Iterator[Snapshot]:
    """Snapshots of stage 3: each full bucket is reduce-scattered into the gradient shards."""
    settings = request.settings
    weight, ranks = request.weight_bytes, request.box.ranks
    grad_width = FP32_BYTES if settings.accumulates_in_fp32 else weight
    grads = 0.0
    if settings.optimizer is None:
        grads = float(shards_of_model(request.shape, ranks)[1] * grad_width)
    bucket, standing = _Bucket(request, weight), standing_bucket(request)

    def reduced() -> float:
        """Bytes while reduce_scatter_coalesced runs: it flattens all but a single gradient that needs no padding."""
        copies = int(not (bucket.count == 1 and bucket.filled % ranks == 0))
        copies += int(request.box.gloo_copies_gathers and ranks > 1)
        return standing + copies * bucket.filled * float(weight)

    for param in reversed(request.shape.trained_params):
        gradient_bytes = grads + bucket.waiting * weight + float(param.elements * weight)
        yield Snapshot(param.place, gradient_bytes, standing, param=param, arrival=True)
        if bucket.is_full_with(param):
            yield Snapshot(param.place, gradient_bytes, reduced(), param=param)
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
