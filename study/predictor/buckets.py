"""Memory snapshots of gradients and their buffers on one rank, during the backward pass and the optimizer step.

The order is that of the engines: gradients arrive from the last parameter on, each is copied into the bucket, and a
full bucket is reduced and freed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from study.predictor.request import FP32_BYTES, Request, cache_by_request
from study.predictor.shape import BEFORE, ModelShape, Parameter
from study.predictor.state import (
    FlatUnit,
    accumulated_bytes,
    adapter_units,
    flat_elements,
    flat_units,
    fsdp_shards,
    rank0_shards,
    reduced_bytes,
    shards_of_model,
    sub_groups,
    undivided_gradient_elements,
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
        has_units = request.shape.lora_rank is not None and not request.has_mixed_units
        first_version = _fsdp1_adapters if has_units else _fsdp1
        if request.fsdp_unwrapped:
            first_version = _fsdp1_unwrapped
        snapshots = (first_version if request.fsdp_version == 1 else _fsdp2)(request)
    else:
        snapshots = by_stage[request.strategy.zero_stage](request)
        snapshots = _with_tied(request, snapshots) if has_tied_gradients(request.shape) else snapshots
    if undivided := undivided_gradient_elements(request):
        snapshots = _with_undivided(request, undivided, snapshots)
    adapts_some = request.shape.lora_targets or request.shape.lora_dora
    return list(_before_gradients(snapshots) if adapts_some else snapshots)


def _with_undivided(request: Request, elements: int, snapshots: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """Add an embedding's gradient that a tensor-parallel group does not divide: to the end of the step; with a rank's
    part of it if that is then added to the gradient of a tied output layer or reduced by FSDP."""
    stays = not (request.strategy.is_fsdp or request.shape.tied)
    copied = 0 if stays else request.shape.embedding.elements
    size = (elements + copied) * float(request.gathered_bytes)
    for snapshot in snapshots:
        has_arrived = snapshot.place == BEFORE and (stays if snapshot.step else not snapshot.between)
        yield snapshot._replace(grads=snapshot.grads + size) if has_arrived else snapshot


def _before_gradients(snapshots: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """Add the beginning of each layer's backward pass: with adapters on some modules no gradient arrives until it has
    passed the others, and DoRA's norms are recomputed before it."""
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


def _torch_step(request: Request, elements: float, buffers: float, trained: float | None = None) -> Snapshot:
    """Optimizer step without an engine, or with stage 0: fp32 gradients for the masters, and AdamW's temporaries.

    `elements` have gradients; the optimizer has `trained` of them, by default all.
    """
    trained = elements if trained is None else trained
    weight = request.adapter_bytes
    stepped = weight if request.pure else FP32_BYTES
    grads = elements * weight + trained * (stepped if stepped != weight else 0)
    return Snapshot(BEFORE, float(grads), buffers + request.step_copies * trained * stepped, step=True)


def _arrivals(
    shape: ModelShape, find_place: Callable[[Parameter], int], params: Sequence[Parameter] | None = None
) -> dict[int, list[tuple[Parameter, int]]]:
    """Return by place the parameters in the order of their gradients, each with the elements that have arrived;
    without `params` of the trained ones."""
    places: dict[int, list[tuple[Parameter, int]]] = {place: [] for place in range(BEFORE, shape.layers + 1)}
    for param in reversed(shape.trained_params if params is None else params):
        arrived = places[find_place(param)]
        arrived.append((param, param.elements + (arrived[-1][1] if arrived else 0)))
    return places


# The backward pass of a layer under FSDP: allocations in each snapshot. gloo adds a copy of the weights
# that it gathers (of the next layer) and of the gradients that it reduces; NCCL does not.
#
#     FSDP2                            gathered    gradients    reduced
#     root, or all that is kept        ########    #########    #######
#     weights of the layer             ########    #########
#     buffer that they are copied of   ########                            then the next layer, if that is larger
#     weights of the next layer                    #########    #######
#     gradients of the layer                       #########    #######
#     input of the reduction           ########    #########    #######    the layer's above, then its own
#
# FSDP2 pads all of these but the gradients to as many rows of each tensor as ranks, or a multiple: the output of the
# gather, the weights that are copied out of it (init_all_gather_outputs in _fsdp_param.py), and the input of the
# reduction (foreach_reduce in _fsdp_collectives.py). The 8 rows of a tensor of 8 experts are 64 on 64 ranks.
#
#     FSDP1                            gathered    gradients    concatenated    reduced
#     root, or all that is kept        ########    #########    ############    #######
#     weights of the layer             ########    #########    ############
#     weights of the next layer        ########    #########    ############    #######
#     gradients of the layer                       #########    ############
#     their concatenation                                       ############    #######
#     shard of the gradients                                                    #######


@dataclasses.dataclass(frozen=True)
class _FsdpWidths:
    """Bytes per element under FSDP, and over how many ranks it shards."""

    # If FSDP itself computes in 16 bits, it gathers 16 bits, and reduces them unless its policy sets fp32.
    gathered: int
    sent: int
    shard: int
    ranks: int
    # Buffers of the same size that gloo adds to a collective.
    copies: int
    # Reduced gradients move to the host.
    offloads: bool
    # Bytes of unpartitioned gradients of earlier micro-batches if only the last one reduces, and of reduced ones.
    accumulated: float
    reduced: float

    @property
    def earlier(self) -> float:
        """Bytes of gradients of earlier micro-batches."""
        return self.accumulated + self.reduced

    def shard_growth(self, elements: float) -> float:
        """Return the bytes by which a reduction grows the gradients on the device: none if it adds to existing ones."""
        return 0.0 if self.offloads or self.reduced else self.shard * elements / self.ranks


def _fsdp_widths(request: Request) -> _FsdpWidths:
    return _FsdpWidths(
        gathered=request.gathered_bytes,
        sent=request.reduced_bytes_per_element,
        shard=request.weight_bytes,
        ranks=request.fsdp_ranks,
        copies=int(request.box.gloo_copies_gathers),
        offloads=request.fsdp_offloads,
        accumulated=accumulated_bytes(request),
        reduced=reduced_bytes(request),
    )


class _Beside(NamedTuple):
    """Elements that are gathered next to a group in its backward pass."""

    # The root, and the groups below if FSDP keeps them gathered.
    resident: int
    # The next group of the backward pass, unless it is still gathered.
    following: int


def _find_neighbours(request: Request, sizes: Mapping[int, int], groups: range, root: int) -> dict[int, _Beside]:
    """Return the elements gathered next to each group and the place after the last; `root`: elements of the root."""
    neighbours = dict[int, _Beside]()
    below = root
    following = 0
    for place in (*groups, groups.stop):
        neighbours[place] = _Beside(below, 0) if request.fsdp_keeps_gathered else _Beside(root, following)
        following = sizes[place] if place in groups else 0
        below += following
    return neighbours


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Elements of a group's gradients under FSDP2: as they arrive, and with the padding of their reduction."""

    elements: int = 0
    padded: int = 0

    def __add__(self, more: _Gradients) -> _Gradients:
        return _Gradients(self.elements + more.elements, self.padded + more.padded)


@dataclasses.dataclass(frozen=True)
class _Fsdp2Root:
    """Elements of the root of FSDP2 if embedding and head are in it: from its first use to its last gradient."""

    size: int
    trained: _Gradients
    # The head's gradient, which waits for those of the embedding.
    head: int
    # All of its gradients, for a tied embedding with the sum of both.
    gradients: int


class _Fsdp2:
    """A step of FSDP2 in torch's order (_fsdp_param_group.py of torch 2.13).

    Each layer is a group that is gathered while the next group is prefetched; its gradients stay unpartitioned until
    they are reduce-scattered. Accelerate makes a group of the norm and the head, with a tied embedding
    (fsdp2_prepare_model); an untied embedding is a group.
    """

    def __init__(self, request: Request) -> None:
        shape = request.shape
        self.request = request
        self.width = _fsdp_widths(request)
        # The place of the norm and the head.
        self.top = shape.layers
        self.arrivals = _arrivals(shape, lambda param: param.place)
        self.trained = dict.fromkeys(self.arrivals, _Gradients())
        # Gathered, with padding.
        self.sizes = dict.fromkeys(self.arrivals, 0)
        for param in shape.trained_params:
            self.trained[param.place] += _Gradients(param.elements, param.gathered_by_rows(self.width.ranks))
        for param in request.stored.params:
            self.sizes[param.place] += param.gathered_by_rows(self.width.ranks)
        has_root = shape.tied or request.fsdp_whole_root
        self.root = self._joined_root() if has_root else None
        self.groups = range(self.top) if has_root else range(BEFORE, self.top + 1)
        self.neighbours = _find_neighbours(request, self.sizes, self.groups, self.root.size if self.root else 0)
        self.waiting_head = self.root.head if self.root else 0

    def _joined_root(self) -> _Fsdp2Root:
        shape = self.request.shape
        tied_head = shape.embedding.elements if has_tied_gradients(shape) else 0
        head = tied_head if shape.tied else self.trained[self.top].elements
        return _Fsdp2Root(
            size=self.sizes[self.top] + self.sizes[BEFORE],
            trained=self.trained[self.top] + self.trained[BEFORE],
            head=head,
            gradients=self.trained[BEFORE].elements + (2 if shape.tied else 1) * head,
        )

    def snapshots(self) -> Iterator[Snapshot]:
        grads = self.width.earlier
        # Input of the previous group's reduction, freed after this group's.
        reducing = 0.0
        yield from self._at_the_loss(grads)
        for place in reversed(self.groups):
            yield from self._arriving(place, grads, reducing)
            reducing = float(self.width.sent * self.trained[place].padded)
            yield self._reducing(place, grads, reducing)
            grads += self._shard_bytes(place) - self._freed_bytes(self.trained[place])
        if self.root is not None:
            yield from self._end_of_root(self.root, grads, reducing)
        yield from self._forward()
        yield self._step()

    def _step(self) -> Snapshot:
        on_device = 0.0 if self.width.offloads else fsdp_shards(self.request).trained
        return _torch_step(self.request, on_device, 0.0)

    def _at_the_loss(self, grads: float) -> Iterator[Snapshot]:
        """Yield the loss's gradient, and then the gather of the last layer."""
        weight, neighbours = self.width.gathered, self.neighbours[self.top]
        tail = 0 if self.root else self.sizes[self.top]
        begun = float(weight * (neighbours.resident + tail))
        yield Snapshot(self.top, grads, begun)
        yield Snapshot(self.top, grads, begun + weight * (1 + self.width.copies) * neighbours.following)
        yield Snapshot(self.top, grads, begun + weight * (neighbours.following + self.waiting_head))

    def _arriving(self, place: int, grads: float, reducing: float) -> Iterator[Snapshot]:
        """Yield a group's gather and the arrival of its gradients."""
        weight, size, neighbours = self.width.gathered, self.sizes[place], self.neighbours[place]
        base = float(weight * (neighbours.resident + self.waiting_head)) + reducing
        if place < self.top and not self.request.fsdp_keeps_gathered:
            # The gathered buffer is copied into the weights; then the next group arrives, and then the gradients.
            next_gather = (1 + self.width.copies) * neighbours.following
            yield Snapshot(place, grads, base + weight * (size + max(size, next_gather)))
        for param, arrived in self.arrivals[place]:
            # New gradients are added to those of earlier micro-batches one by one.
            waiting = param.elements if self.width.accumulated else arrived
            yield Snapshot(place, grads, base + weight * (size + neighbours.following + waiting), param=param)

    def _reducing(self, place: int, grads: float, reducing: float) -> Snapshot:
        """Return a group's reduction; the weights and the previous input are freed before gradients are copied."""
        weight, neighbours = self.width.gathered, self.neighbours[place]
        base = float(weight * (neighbours.resident + self.waiting_head)) + reducing
        buffers = base + weight * neighbours.following + self._copied_bytes(self.trained[place])
        buffers += self._output_bytes(self.trained[place])
        return Snapshot(max(place - 1, BEFORE), grads, buffers, between=True)

    def _end_of_root(self, root: _Fsdp2Root, grads: float, reducing: float) -> Iterator[Snapshot]:
        """Yield the root's last gradient and its reduction."""
        weight = self.width.gathered
        yield Snapshot(BEFORE, grads, reducing + weight * (root.size + root.gradients))
        reduced = self.width.sent * root.trained.padded + self._copied_bytes(root.trained)
        yield Snapshot(BEFORE, grads, reduced + self._output_bytes(root.trained))

    def _forward(self) -> Iterator[Snapshot]:
        """Yield the forward pass. It keeps the buffer of a gather, which it copies into the weights, until the next
        group's copies are made (FSDPCommContext.all_gather_state). Most is gathered when the last group is, or with
        frozen weights the first layer, after the embedding."""
        weight, earlier, last = self.width.gathered, self.width.earlier, self.groups[-1]
        previous = self.sizes[last - 1] if last > self.groups.start else 0
        most = self.neighbours[last].resident + (2 + self.width.copies) * self.sizes[last] + previous
        yield Snapshot(last - 1, earlier, float(weight * most), between=True)
        if self.request.shape.lora_rank:
            embedding = self.root.size if self.root else self.sizes[BEFORE]
            first_layer = (1 + self.width.copies) * self.sizes[0]
            yield Snapshot(BEFORE, earlier, float(weight * (2 * embedding + first_layer)))

    def _copied_bytes(self, trained: _Gradients) -> float:
        """Return the bytes of gradients while they are copied into the input of the reduction, or gloo's copy of it;
        those of earlier micro-batches are counted among the accumulated ones."""
        copied = max(self.width.gathered * trained.elements, self.width.copies * self.width.sent * trained.padded)
        return copied - self._freed_bytes(trained)

    def _output_bytes(self, trained: _Gradients) -> float:
        """Return the bytes of a reduction's output, which is there before the copied gradients are freed, and of its
        copy in the shards' type."""
        is_cast = self.width.sent < self.width.shard
        return (self.width.sent + self.width.shard * is_cast) * trained.padded / self.width.ranks

    def _freed_bytes(self, trained: _Gradients) -> float:
        """Return the accumulated bytes that a reduction frees."""
        return float(self.width.gathered * trained.elements) if self.width.accumulated else 0.0

    def _shard_bytes(self, place: int) -> float:
        """Return the bytes of a group's reduced gradients on the device."""
        return self.width.shard_growth(self.trained[place].padded)


def _fsdp2(request: Request) -> Iterator[Snapshot]:
    return (_Fsdp2Unwrapped if request.fsdp_unwrapped else _Fsdp2)(request).snapshots()


def _fsdp1(request: Request) -> Iterator[Snapshot]:
    """Snapshots of FSDP1 in torch's order (_runtime_utils.py of torch 2.13): a layer is gathered while the gradients of
    the one above it arrive. The gradients of a flat parameter wait for the last of them, are concatenated, and
    reduce-scattered. The root's tensors wait for the embedding's gradient."""
    shape = request.shape
    units = flat_units(request)
    width = _fsdp_widths(request)
    top = shape.layers
    weight = width.gathered
    # Gradients of frozen weights arrive in a flat parameter that has trained ones.
    arrived = [param for param in request.stored.params if units[shape.find_layer(param)].with_gradients]
    arrivals = _arrivals(shape, shape.find_layer, arrived if request.has_mixed_units else None)
    neighbours = _find_neighbours(request, _unit_sizes(units), range(top), units[BEFORE].size)
    pending = _root_arrivals(shape, arrivals[BEFORE])
    grads = width.earlier
    waiting = float(weight * pending[top])
    # The backward pass begins with a gather of the last layer, before the loss's gradient.
    begun = float(weight * (neighbours[top].resident + neighbours[top].following))
    yield Snapshot(top, grads, begun)
    yield Snapshot(top, grads + waiting, begun + weight * width.copies * neighbours[top].following)
    for place in reversed(range(top)):
        waiting += weight * pending[place]
        yield from _fsdp1_unit(place, units[place], neighbours[place], width, arrivals[place], grads + waiting)
        grads += _fsdp1_reduced(units[place], width)
    # Both gradients of a tied embedding are concatenated with the others.
    tied = pending[top] if shape.tied else 0
    yield from _fsdp1_root(units[BEFORE], tied, width, grads)
    on_device = (
        0.0 if width.offloads else sum(unit.size for unit in units.values() if unit.with_gradients) / width.ranks
    )
    stepped = sum(size for unit in units.values() if unit.with_gradients for size in unit.local)
    yield _torch_step(request, on_device, 0.0, stepped if request.has_mixed_units else None)


def _unit_sizes(units: Mapping[int, FlatUnit]) -> dict[int, int]:
    return {place: unit.size for place, unit in units.items()}


def _root_arrivals(shape: ModelShape, arrivals: Iterable[tuple[Parameter, int]]) -> dict[int, int]:
    """Return the elements of the root's gradients by the place at which they arrive."""
    pending = dict.fromkeys(range(BEFORE, shape.layers + 1), 0)
    for param, _ in arrivals:
        pending[param.place] += param.elements
    if has_tied_gradients(shape):
        pending[shape.layers] += shape.embedding.elements
    return pending


def _fsdp1_unit(
    place: int,
    unit: FlatUnit,
    neighbours: _Beside,
    width: _FsdpWidths,
    arrivals: Iterable[tuple[Parameter, int]],
    grads: float,
) -> Iterator[Snapshot]:
    """Yield a layer's gather, the arrival of its gradients, their concatenation and their reduction."""
    weight = width.gathered
    gathered = weight * float(neighbours.resident + unit.size + neighbours.following)
    yield Snapshot(place, grads, gathered + weight * width.copies * neighbours.following)
    for param, arrived in arrivals:
        yield Snapshot(place, grads, gathered + weight * arrived, param=param)
    yield Snapshot(place - 1, grads, gathered + 2 * weight * unit.with_gradients, between=True)
    reduced = weight * unit.size * (width.copies + 1 / width.ranks)
    yield Snapshot(place - 1, grads, gathered + reduced, between=True)


def _fsdp1_reduced(unit: FlatUnit, width: _FsdpWidths) -> float:
    """Return the bytes by which a layer's reduction changes those of the gradients."""
    freed = width.gathered * unit.with_gradients if width.accumulated else 0.0
    return width.shard_growth(unit.with_gradients) - freed


def _fsdp1_root(root: FlatUnit, tied: int, width: _FsdpWidths, grads: float) -> Iterator[Snapshot]:
    """Yield all gradients of the root with their concatenation, and the reduction."""
    weight = width.gathered
    yield Snapshot(BEFORE, grads, weight * root.size + weight * float(2 * root.with_gradients + tied))
    if root.with_gradients:
        yield Snapshot(BEFORE, grads, weight * (root.size + (1 + width.copies + 1 / width.ranks) * root.size))


def _fsdp1_unwrapped(request: Request) -> Iterator[Snapshot]:
    """Snapshots of FSDP1 without a policy: the model is one flat parameter, which stays gathered, and whose gradients
    wait for the last of them."""
    shape = request.shape
    width = _fsdp_widths(request)
    weight = width.gathered
    unit = flat_units(request)[BEFORE]
    gathered = float(weight * unit.size)
    yield Snapshot(shape.layers, width.earlier, gathered)
    tied = shape.embedding.elements if has_tied_gradients(shape) else 0
    waiting = tied
    for place, arrivals in sorted(_arrivals(shape, lambda param: param.place).items(), reverse=True):
        for param, arrived in arrivals:
            yield Snapshot(place, width.earlier, gathered + weight * (waiting + arrived), param=param)
        waiting += arrivals[-1][1] if arrivals else 0
    yield from _fsdp1_root(unit, tied, width, width.earlier)
    # The gather before the first layer.
    yield Snapshot(BEFORE, width.earlier, gathered * (1 + width.copies), between=True)
    yield _torch_step(request, 0.0 if width.offloads else unit.size / width.ranks, 0.0)


class _Fsdp2Unwrapped(_Fsdp2):
    """A step of FSDP2 without a policy. Accelerate makes groups of the embedding and of norm and head all the same, and
    the layers are the root's, which torch keeps gathered from the first layer to the last gradient."""

    def snapshots(self) -> Iterator[Snapshot]:
        weight, grads = self.width.gathered, self.width.earlier
        layers = range(self.top)
        unsharded = sum(self.sizes[place] for place in layers)
        # A tied embedding is in the group of norm and head, an untied one is prefetched after them.
        embedding_group = self.root.size if self.root else self.sizes[BEFORE]
        reducing = 0.0
        if self.root is None:
            yield from self._tail(grads, float(weight * unsharded))
            reducing = float(self.width.sent * self.trained[self.top].padded)
            grads += self._shard_bytes(self.top) - self._freed_bytes(self.trained[self.top])
        else:
            yield Snapshot(self.top, grads, float(weight * (unsharded + embedding_group + self.waiting_head)))
        base = weight * (unsharded + embedding_group + self.waiting_head) + reducing
        waiting = _Gradients()
        for place in reversed(layers):
            for param, arrived in self.arrivals[place]:
                # New gradients are added to those of earlier micro-batches one by one.
                unreduced = param.elements if self.width.accumulated else waiting.elements + arrived
                yield Snapshot(place, grads, base + weight * unreduced, param=param)
            waiting += self.trained[place]
        yield from self._end(grads, reducing, unsharded, waiting)
        # The gathers before the first layer, of the layers, and of the embedding or its group: the buffer, the weights
        # that are copied out of it, and the shards that are cast to be sent.
        copies = 2 + self.width.copies
        sent = 1 / self.width.ranks if self.width.gathered < self.width.shard else 0.0
        yield Snapshot(BEFORE, self.width.earlier, float(weight * (copies + sent) * unsharded), between=True)
        if self.root is None:
            # The buffer of the layers is freed when the untied embedding has been gathered.
            gathers = float(copies * (unsharded + embedding_group))
        else:
            gathers = unsharded + (copies + sent) * embedding_group
        yield Snapshot(BEFORE, self.width.earlier, weight * gathers, between=True)
        yield self._step()

    def _tail(self, grads: float, unsharded: float) -> Iterator[Snapshot]:
        """Yield the loss's gradient, before it the gather of norm and head, their gradients and reduction."""
        weight, size = self.width.gathered, self.sizes[self.top]
        yield Snapshot(self.top, grads, unsharded + weight * size)
        yield Snapshot(self.top - 1, grads, unsharded + weight * (2 + self.width.copies) * size, between=True)
        for param, arrived in self.arrivals[self.top]:
            unreduced = param.elements if self.width.accumulated else arrived
            yield Snapshot(self.top, grads, unsharded + weight * (size + unreduced), param=param)
        trained = self.trained[self.top]
        buffers = unsharded + self.width.sent * trained.padded + self._copied_bytes(trained)
        yield Snapshot(self.top - 1, grads, buffers, between=True)

    def _end(self, grads: float, reducing: float, unsharded: int, waiting: _Gradients) -> Iterator[Snapshot]:
        """Yield the embedding's gradient, and the reductions: the root's first (_root_post_backward_final_callback)."""
        weight = self.width.gathered
        unreduced = 0 if self.width.accumulated else waiting.elements
        size = self.root.size if self.root else self.sizes[BEFORE]
        trained = self.root.trained if self.root else self.trained[BEFORE]
        arrived = self.root.gradients if self.root else trained.elements
        yield Snapshot(BEFORE, grads, reducing + weight * float(unsharded + size + unreduced + arrived))
        reduced = float(self.width.sent * waiting.padded)
        embedding_group = weight * (size + (0 if self.width.accumulated else trained.elements))
        yield Snapshot(BEFORE, grads, reduced + self._copied_bytes(waiting) + embedding_group)
        grads += self.width.shard_growth(waiting.padded) - self._freed_bytes(waiting)
        yield Snapshot(BEFORE, grads, reduced + self.width.sent * trained.padded + self._copied_bytes(trained))


def _fsdp1_adapters(request: Request) -> Iterator[Snapshot]:
    """Snapshots of FSDP1 with adapters, each of which is a unit: gathered for its own product, and its gradient is
    reduced as it arrives. A unit prefetches the one that was called before it (_get_handle_to_prefetch in torch's
    _runtime_utils.py), so the next layer's frozen unit is gathered with the first adapter of a layer, its last."""
    units = flat_units(request)
    width = _fsdp_widths(request)
    top = request.shape.layers
    arrivals = _arrivals(request.shape, request.shape.find_layer)
    root = units[BEFORE].size
    neighbours = _find_neighbours(request, _unit_sizes(units), range(top), root)
    grads = width.earlier
    begun = neighbours[top].resident + (1 + width.copies) * neighbours[top].following
    yield Snapshot(top, grads, float(width.gathered * begun))
    for place in reversed(range(top)):
        gathered = neighbours[place].resident + units[place].size
        prefetched = (1 + width.copies) * neighbours[place].following
        yield Snapshot(place, grads, float(width.gathered * gathered))
        grads = yield from _adapters_at(request, place, arrivals[place], grads, gathered, prefetched)
    yield from _adapters_at(request, BEFORE, arrivals[BEFORE], grads, root, 0)
    stepped = 0 if width.offloads else sum(unit.size for unit in adapter_units(request).values())
    yield _torch_step(request, stepped / width.ranks, 0.0)


def _adapters_at(
    request: Request,
    place: int,
    arrivals: Iterable[tuple[Parameter, int]],
    grads: float,
    gathered: int,
    prefetched: int,
) -> Generator[Snapshot, None, float]:
    """Yield the gradients of a layer's adapters, the last one with the prefetched weights; return the bytes of
    gradients after them."""
    width, adapters = _fsdp_widths(request), adapter_units(request)
    reduced = [param for param, _ in arrivals if param.index in adapters]
    for param in reduced:
        size = adapters[param.index].size
        # The matrix, its gradient, and the input of the reduction.
        elements = gathered + (2 + width.copies) * size + (prefetched if param is reduced[-1] else 0)
        yield Snapshot(place, grads, float(width.gathered * elements), param=param)
        grads += 0 if width.offloads or width.reduced else size / width.ranks * request.bytes_per_weight(param)
    return grads


def _unsharded(request: Request) -> Iterator[Snapshot]:
    """Snapshots of single, DDP and DeepSpeed's stage 0. DDP stores every gradient a second time, in its buckets."""
    weight, total = request.adapter_bytes, request.shape.trained_parameters
    buffers = float(total * weight) if request.strategy.name == "ddp" else 0.0
    grads = 0.0
    for param in reversed(request.shape.trained_params):
        size = float(param.elements * request.bytes_per_weight(param))
        grads += size
        gradient_bytes = total * weight + size if request.accumulation > 1 else grads
        yield Snapshot(param.place, gradient_bytes, buffers, param=param, arrival=True)
    if request.strategy.zero_stage == 0 and request.data_ranks > 1:
        yield Snapshot(BEFORE, float(total * weight), float(min(total, STAGE0_BUCKET) * weight), step=True)
    yield _torch_step(request, total, buffers)


# The backward pass under DeepSpeed, from one full bucket to the next: allocations in each snapshot. Stage 1
# has the last two columns after the backward pass, in a walk over all gradients.
#
#                                      arrival    full, reduced    emptied
#     gradient that arrives            #######    #############    #######
#     gradients above the bucket size  #######    #############
#     bucket (twice with overlap)      #######    #############    #######
#     copy that is reduced                        #############
#     gradients of this rank           #######    #############    ####### + bucket's
#
# In the optimizer step the bucket stays, and a gradient's norm, fp32 gradients and AdamW's copies follow each other.


class _Bucket:
    """DeepSpeed's gradient bucket. In host memory only the pages that were written count."""

    def __init__(self, request: Request, width: int) -> None:
        self.width, self.settings = width, request.settings
        self.lazily, self.is_alone = request.box.is_cpu_only, request.data_ranks == 1
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
        local_bytes = accumulated = float(flat_elements(request) // request.data_ranks * FP32_BYTES)
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
    """Optimizer step of stages 1 and 2: the norm in fp64, the shard flattened and cast to fp32.

    Gradients that accumulate in fp32 are one tensor of the step's type already (_get_preflattened_grad_partition).
    """
    settings, weight, elements = request.settings, request.weight_bytes, flat_elements(request)
    stepped, shard = settings.master_bytes, elements // request.data_ranks
    if settings.optimizer is None:
        width = FP32_BYTES if settings.accumulates_in_fp32 else weight
        flattened = 0 if settings.accumulates_in_fp32 else shard * weight
        masters = shard * stepped if stepped != width else 0
        largest = min(shard, max(param.elements for param, _ in rank0_shards(request)))
        yield Snapshot(BEFORE, grads, float(largest * NORM_BYTES), step=True)
        yield Snapshot(BEFORE, grads, float(flattened + masters), step=True)
        if request.step_copies:
            remaining = 0.0 if masters or flattened else grads
            copies = float(request.step_copies * stepped * shard)
            yield Snapshot(BEFORE, remaining, masters + copies, step=True)
    if request.box.gloo_copies_gathers and request.data_ranks > 1:
        yield Snapshot(BEFORE, 0.0, float(elements * weight) + staging, step=True)


def _stage3(request: Request) -> Iterator[Snapshot]:
    """Snapshots of stage 3: each full bucket is reduce-scattered into the gradient shards."""
    settings = request.settings
    weight, ranks = request.weight_bytes, request.data_ranks
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
