"""All-gathers of ZeRO-3, simulated by its coordinator's rules: parameters that are live at once, elements gathered.

partitioned_param_coordinator.py of deepspeed 0.19: a call of a module gathers its parameters, then prefetches those of
the next modules until the prefetch bucket is full or too many are live. After the call it frees the parameters that
are not used again within `stage3_max_reuse_distance` elements and were not visited for a later call.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from study.predictor.request import Request, cache_by_request
from study.predictor.shape import BEFORE, Call, ModelShape, calls_without_gradient
from study.predictor.state import flat_units, persistent_params, shards_by_rows, unshards


@functools.lru_cache(maxsize=64)
def module_call_order(shape: ModelShape, recomputes: bool) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Return the calls of the forward and the backward pass; a recomputed layer repeats its forward calls."""
    root, all_layers = shape.module_calls()
    layers = {place: layer for place, layer in all_layers.items() if shape.recomputes(place)}
    # With gradient checkpointing transformers makes the word embedding's output require a gradient.
    has_input_gradient = shape.has_input_gradients(recomputes) if shape.frozen_modules else recomputes
    without = set[int]() if has_input_gradient else calls_without_gradient(root.flat(), shape.looked_up)
    backward = [call for call in root.flat(backward=True) if id(call) not in without]
    if recomputes and shape.lora_rank:
        backward = list(_recomputing_frozen(backward, {place: layer.flat() for place, layer in layers.items()}))
    elif recomputes:
        flat = {place: layer.flat() for place, layer in layers.items() if id(layer) not in without}
        frozen = {place: calls for place, calls in flat.items() if not _is_trained(calls)}
        repeated = {id(layers[place]): calls for place, calls in flat.items() if place not in frozen}
        backward = [step for call in backward for step in (*repeated.get(id(call), ()), call)]
        backward = list(_recomputing_frozen(backward, frozen))
    return tuple(root.flat()), tuple(backward)


def _is_trained(calls: Sequence[Call]) -> bool:
    """Whether calls have a trained parameter."""
    return any(param.trained for call in calls for param in call.params)


def _recomputing_frozen(backward: Sequence[Call], layers: dict[int, list[Call]]) -> Iterator[Call]:
    """Yield the backward calls; the last adapter's call of a layer triggers its recomputation, or the last call at all
    of a layer without adapters. The frozen parameters that the recomputation gathers are freed with that call's module
    (update_recompute_parameters), so the rest of the backward pass gathers them once more."""
    triggers = {
        id(call)
        for calls in layers.values()
        for call in calls
        if call.params and _is_trained([call]) == _is_trained(calls)
    }
    for call in backward:
        yield call
        if call.place in layers and id(call) in triggers:
            *recomputed, last = layers.pop(call.place)
            frozen = (param for layer_call in (*recomputed, last) for param in layer_call.params if not param.trained)
            yield from (*recomputed, dataclasses.replace(last, releases=tuple(frozen)))


@dataclasses.dataclass(frozen=True)
class GatherTrace:
    """All-gathers of one micro-batch, in elements."""

    # Output of all gathers of one forward and backward pass, padded.
    elements: int = 0
    # Peak of unsharded elements at each place, forward and backward. The forward pass has only places that exceed every
    # later one.
    live_forward: dict[int, int] = dataclasses.field(default_factory=dict)
    live_backward: dict[int, int] = dataclasses.field(default_factory=dict)
    # After the head has run and its gather buffers were released.
    live_at_end: int = 0
    # By parameter index: before its gradient arrives, while its module is gathered; and after the arrival, when the
    # gather buffers were released.
    live_before: dict[int, int] = dataclasses.field(default_factory=dict)
    live_at: dict[int, int] = dataclasses.field(default_factory=dict)
    # Peak of gathered parameters, without gather buffers.
    gathered_at_once: int = 0

    @property
    def max_live_elements(self) -> int:
        """Peak of unsharded elements over both passes."""
        return max([*self.live_forward.values(), *self.live_backward.values()], default=0)


@dataclasses.dataclass
class _Group:
    """Parameters that are gathered into one buffer. The first use copies all of them out; the buffer stays until the
    last use."""

    size: int
    pending: set[int]
    is_open: bool = False


class _Coordinator:
    """DeepSpeed's parameter coordinator: simulates gathers and releases of parameter indices over module calls."""

    def __init__(
        self, trace: Sequence[Call], persistent: frozenset[int], limits: tuple[int, int, int], alone: bool, gloo: bool
    ) -> None:
        self.prefetch_bucket, self.max_live, self.max_reuse_distance = limits
        self.alone, self.gloo = alone, gloo
        # Gathers of each parameter.
        self.counts = Counter[int]()
        self.elements = {param.index: param.elements for call in trace for param in call.params}
        self.sharded = [tuple(param.index for param in call.params if param.index not in persistent) for call in trace]
        self.released_after = [tuple(param.index for param in call.releases) for call in trace]
        self.order = [(at, param) for at, params in enumerate(self.sharded) for param in params]
        self.place = 0
        # The latest call for which a parameter was visited.
        self.seen: dict[int, int] = {}
        self.live: set[int] = set()
        self.together: list[_Group] = []
        self.total = self.gathered_at_once = 0
        self.sums = [0, *itertools.accumulate(sum(param.elements for param in call.params) for call in trace)]
        # The calls that use each parameter, in order.
        self.uses = defaultdict[int, list[int]](list)
        for at, param in self.order:
            self.uses[param].append(at)

    def gather(self, params: Iterable[int]) -> int:
        """Gather the missing parameters, and return their number of elements."""
        missing = [param for param in params if param not in self.live]
        if not missing:
            return 0
        size = 0
        for param in missing:
            size += self.elements[param]
            self.counts[param] += 1
        self.live.update(missing)
        # A single rank copies each parameter separately.
        if len(missing) > 1 and not self.alone:
            self.together.append(_Group(size, set(missing)))
        self.total += size
        self.gathered_at_once = max(self.gathered_at_once, self.total)
        return size

    def call(self, at: int) -> int:
        """Return the peak of unsharded elements while call `at` runs, copies included."""
        gathered = self.gather(self.sharded[at])
        # gloo gathers into a copy of the full tensor.
        peak = self.total + (gathered if self.gloo else 0)
        # Elements that are allocated twice while the module runs.
        copied = self._read_groups(self.sharded[at]) if self.together else 0
        while self.place < len(self.order) and self.order[self.place][0] <= at:
            when, param = self.order[self.place]
            self.seen[param] = when
            self.place += 1
        budget = min(self.max_live - self.total, self.prefetch_bucket)
        # An ordered set.
        coming: dict[int, None] = {}
        elements = 0
        while self.place < len(self.order) and elements < budget:
            when, param = self.order[self.place]
            self.place += 1
            self.seen[param] = max(self.seen.get(param, 0), when)
            if param not in self.live and param not in coming:
                coming[param] = None
                elements += self.elements[param]
        gathered = self.gather(coming)
        return max(peak, self.total + copied + (gathered if self.gloo else 0))

    def _read_groups(self, params: Sequence[int]) -> int:
        """Copy parameters out of their buffers; return the elements of the buffers that are in use meanwhile."""
        if not params:
            return self._in_buffers()
        used, copied, remaining = set(params), 0, list[_Group]()
        for group in self.together:
            group.is_open = group.is_open or not group.pending.isdisjoint(used)
            copied += group.size if group.is_open else 0
            group.pending -= used
            if group.pending:
                remaining.append(group)
        self.together = remaining
        return copied

    @property
    def settled(self) -> int:
        """Unsharded elements after a module's gathers have completed, with buffers that are not fully used yet.

        On a GPU, too: a block that waits for a stream (record_stream) is reserved and no longer counts as allocated
        (free in CUDACachingAllocator.cpp), as the bytes of virtual_gemma confirm on an H200.
        """
        return self.total + self._in_buffers()

    def _in_buffers(self) -> int:
        """Return the elements of the buffers that are in use."""
        return sum(group.size for group in self.together if group.is_open) if self.together else 0

    def release(self, at: int) -> None:
        """Free the parameters of call `at` that have no use within the reuse distance."""
        if not (self.released_after[at] or self.sharded[at]):
            return
        released = list(self.released_after[at])
        for param in self.sharded[at]:
            if self.seen[param] > at + 1:
                continue
            uses = self.uses[param]
            following = bisect.bisect_right(uses, at)
            next_call = uses[following] if following < len(uses) else None
            is_near = next_call is not None and self.sums[next_call] - self.sums[at + 1] < self.max_reuse_distance
            if not is_near:
                released.append(param)
        freed = self.live.intersection(released)
        self.live -= freed
        self.total -= sum(self.elements[param] for param in freed)


def simulate_gathers(request: Request, trains: bool = True) -> GatherTrace:
    """Return the all-gathers of one micro-batch, without `trains` of a forward pass alone; empty if stage 3 does not
    unshard parameters."""
    if not unshards(request):
        return GatherTrace()
    settings, box = request.settings, request.box
    limits = (
        settings.stage3_prefetch_bucket_size,
        settings.stage3_max_live_parameters,
        settings.stage3_max_reuse_distance,
    )
    return _gathers(
        request.stored,
        trains,
        request.gradient_checkpointing,
        request.data_ranks,
        box.gloo_copies_gathers,
        limits,
        _persistent_indexes(request),
    )


@cache_by_request
def _persistent_indexes(request: Request) -> frozenset[int]:
    return frozenset(param.index for param in persistent_params(request))


@functools.lru_cache(maxsize=512)
def _gathers(
    shape: ModelShape,
    trains: bool,
    recomputes: bool,
    ranks: int,
    gloo: bool,
    limits: tuple[int, int, int],
    persistent: frozenset[int],
) -> GatherTrace:
    """Return the gathers, whose shards have padding that depends on the number of ranks."""
    trace, counts = _simulated(shape, trains, recomputes, ranks == 1, gloo, limits, persistent)
    elements = {param.index: param.elements for param in shape.params}
    gathered = sum(count * math.ceil(elements[param] / ranks) * ranks for param, count in counts.items())
    return dataclasses.replace(trace, elements=gathered)


@functools.lru_cache(maxsize=512)
def _simulated(
    shape: ModelShape,
    trains: bool,
    recomputes: bool,
    alone: bool,
    gloo: bool,
    limits: tuple[int, int, int],
    persistent: frozenset[int],
) -> tuple[GatherTrace, Mapping[int, int]]:
    """Simulate the gathers, and count those of each parameter; cached by the inputs that matter, which many strategies
    and numbers of ranks share."""
    forward, backward = module_call_order(shape, recomputes)
    trace = (*forward, *backward) if trains else forward
    coordinator = _Coordinator(trace, persistent, limits, alone, gloo)
    live_forward, live_backward, live_before, live_at = (dict[int, int]() for _ in range(4))
    place, frozen_peak, at_end = BEFORE, 0, 0
    for at, call in enumerate(trace):
        live, settled = coordinator.call(at), coordinator.settled
        if at < len(forward):
            # Modules that contain the layers are called before them.
            place = call.place if call.params else place
            live_forward[place] = max(live_forward.get(place, 0), live)
            at_end = settled
        else:
            live_backward[call.place] = max(live_backward.get(call.place, 0), live)
            if call.params:
                # Gathers of frozen weights bring no gradient: their peak is attributed to the next gradient.
                most = max(frozen_peak, live)
                frozen_peak = most if any(not param.trained for param in call.params) else 0
                for param in call.params:
                    live_before[param.index] = most
                    live_at[param.index] = settled
        coordinator.release(at)
    simulated = GatherTrace(
        0,
        _without_earlier_smaller(live_forward),
        live_backward,
        at_end,
        live_before,
        live_at,
        coordinator.gathered_at_once,
    )
    return simulated, dict(coordinator.counts)


def _without_earlier_smaller(live_forward: Mapping[int, int]) -> dict[int, int]:
    """Return the places that can be the peak: saved activations only grow, so that a place with no more than a later
    one cannot be it."""
    decisive, most = dict[int, int](), -1
    for place in sorted(live_forward, reverse=True):
        if live_forward[place] > most:
            decisive[place] = most = live_forward[place]
    return decisive


def reference_gathers(request: Request) -> GatherTrace:
    """Return the gathers of a forward pass of TRL's reference model; `live_at_end` stays unsharded for good. Stage 3
    shards it as the trained model (prepare_deepspeed). Under FSDP2 it is one group, gathered into a buffer and copied
    (prepare_fsdp); version 1 keeps the unit of all outside the layers."""
    is_sharded = request.strategy.is_fsdp or request.strategy.zero_stage == 3
    if not (request.reference_model and is_sharded) or request.data_ranks == 1:
        return GatherTrace()
    if request.strategy.zero_stage == 3:
        return dataclasses.replace(simulate_gathers(request, trains=False), live_at_end=0)
    if request.fsdp_version == 1:
        sizes = {place: unit.size for place, unit in flat_units(request).items()}
        root = sizes.pop(BEFORE)
        units = [*sizes.values()]
        # Without a wrapping policy the root has all.
        live = root + (2 + request.box.gloo_copies_gathers) * max(units, default=0)
    else:
        root, units = 0, [shards_by_rows(request.shape, request.fsdp_ranks)[0] * request.fsdp_ranks]
        live = 2 * units[0]
    if request.fsdp_keeps_gathered:
        return GatherTrace(live_at_end=root + sum(units))
    return GatherTrace(sum(units), {BEFORE: live}, live_at_end=root)
