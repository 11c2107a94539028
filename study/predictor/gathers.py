"""Parameters that stage 3 unshards at once, and how often it gathers them: its own rules over the calls of modules.

partitioned_param_coordinator.py of deepspeed 0.19: what a module needs is gathered when it is called, then what the
next ones need until the prefetch bucket is full or too many are live; after the call it frees what is not needed
again within `stage3_max_reuse_distance` elements, and has not been looked at for a later call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from study.predictor.families import Tree
from study.predictor.request import Request
from study.predictor.shape import BEFORE, INFIX, ModelShape, Parameter
from study.predictor.state import persistent_params, unshards

# The modules of each family as they are called: stage 3 gathers ahead at every one of them, also where it has no
# parameters of its own.


@dataclasses.dataclass(frozen=True)
class Call:
    """A module that runs, with its own parameters."""

    place: int
    params: tuple[Parameter, ...]
    # After it, whoever needs them next.
    releases: tuple[Parameter, ...] = ()


# What reads a layer's own input, through no more than a norm.
_READS_INPUT = (
    "query", "key", "value", "c_attn", "q_proj", "k_proj", "v_proj", "query_key_value", "Wqkv", "fc_in",
    "post_attention_layernorm", "dense_h_to_4h",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Node:
    call: Call
    children: tuple[_Node, ...] = ()

    def calls(self, backward: bool = False) -> list[Call]:
        """A module around others comes before them in both directions."""
        children = self.children[::-1] if backward else self.children
        return [self.call, *(call for child in children for call in child.calls(backward))]


@functools.lru_cache(maxsize=64)
def calls_of(shape: ModelShape, recomputes: bool) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Forward and backward. A layer that is recomputed runs forward again before its backward pass."""
    owned: dict[tuple[int, str], list[Parameter]] = {}
    for param in shape.params:
        owned.setdefault((param.place, param.name.rpartition(".")[0]), []).append(param)

    def node(tree: str | Tree, place: int) -> _Node:
        if isinstance(tree, str):
            own = _Node(Call(place, tuple(owned.get((place, tree), ()))))
            adapters = [owned.get((place, f"{tree}{INFIX}{letter}"), ()) for letter in "AB"]
            if not all(adapters):
                return own
            # peft's layer around the model's own; its dropout is a module, too.
            around = (own, _Node(Call(place, ())), *(_Node(Call(place, tuple(params))) for params in adapters))
            return _Node(Call(place, ()), around)
        return _Node(Call(place, ()), tuple(node(child, place) for child in tree))

    (before, layer, after), end = shape.table.calls, shape.layers
    layers = tuple(node(layer, number) for number in range(shape.layers))
    inside = (*(node(tree, BEFORE) for tree in before), *layers, *(node(tree, end) for tree in after))
    if shape.family == "sequence-classification":
        heads: tuple[_Node, ...] = (node("-", end), node("classifier", end))
    else:
        # A tied head is the embedding once more.
        tied = owned[BEFORE, str(before[0])] if shape.tied else []
        heads = (_Node(Call(end, (*tied, *owned.get((end, "lm_head"), ())))),)
    root = _Node(Call(end, ()), (_Node(Call(end, ()), inside), *heads))
    # Where layers are recomputed, transformers makes the embedding of words have a gradient.
    without = set[int]() if recomputes else _without_gradient(root.calls())
    backward = [call for call in root.calls(backward=True) if id(call) not in without]
    if recomputes and shape.lora_rank:
        backward = list(_recomputing_frozen(backward, {number: one.calls() for number, one in enumerate(layers)}))
    elif recomputes:
        first = {number: one.calls()[0] for number, one in enumerate(layers)}
        again = {id(call): layers[number].calls() for number, call in first.items()}
        backward = [each for call in backward for each in (*again.get(id(call), ()), call)]
    return tuple(root.calls()), tuple(backward)


def _recomputing_frozen(backward: Sequence[Call], layers: dict[int, list[Call]]) -> Iterator[Call]:
    """A layer runs again once its last adapter wants what it took. What is frozen of it is booked to that adapter's
    module, and freed with it (update_recompute_parameters): the rest of the backward pass gathers it once more."""
    for call in backward:
        yield call
        if call.place in layers and any(param.trained for param in call.params):
            *again, last = layers.pop(call.place)
            frozen = (param for one in (*again, last) for param in one.params if not param.trained)
            yield from (*again, dataclasses.replace(last, releases=tuple(frozen)))


def _without_gradient(forward: Sequence[Call]) -> set[int]:
    """Calls without a backward pass, since nothing before them is trained: parameter_offload.py hooks a module's
    output, and that has no gradient."""
    found: set[int] = set()
    seen = False
    for call in forward:
        seen = seen or any(param.trained for param in call.params)
        if call.params and not call.params[0].trained:
            module = call.params[0].name.rpartition(".")[0]
            if not seen or (call.place == 0 and module in _READS_INPUT):
                found.add(id(call))
    return found


@dataclasses.dataclass(frozen=True)
class Gathers:
    """Gathers of one micro-batch, in elements."""

    # Put out by all gathers of one forward and backward pass, padded.
    elements: int = 0
    # The most that is unsharded at each place, forward and backward. Of the forward pass only places after which there
    # is less.
    live_forward: dict[int, int] = dataclasses.field(default_factory=dict)
    live_backward: dict[int, int] = dataclasses.field(default_factory=dict)
    # When the head has run, and what it was gathered through has been released.
    live_at_end: int = 0
    # Just before the gradient of each parameter comes, by its index, while its module is gathered; and when it is
    # there, and what the gathers went through has been released.
    live_before: dict[int, int] = dataclasses.field(default_factory=dict)
    live_at: dict[int, int] = dataclasses.field(default_factory=dict)
    # The most parameters that are gathered at once, without the buffers that they come through.
    gathered_at_once: int = 0

    @property
    def most(self) -> int:
        return max([*self.live_forward.values(), *self.live_backward.values()], default=0)


@dataclasses.dataclass
class _Group:
    """Gathered into one buffer. The first use copies all of it out, and the buffer stays until the last."""

    size: int
    left: set[Parameter]
    is_open: bool = False


class _Coordinator:
    def __init__(
        self,
        trace: Sequence[Call],
        persistent: frozenset[Parameter],
        room: tuple[int, int, int],
        ranks: int,
        gloo: bool,
    ) -> None:
        self.prefetch_bucket, self.max_live, self.max_reuse_distance = room
        self.ranks, self.gloo = ranks, gloo
        self.sharded = [tuple(param for param in call.params if param not in persistent) for call in trace]
        self.released_after = [tuple(param for param in call.releases if param not in persistent) for call in trace]
        self.order = [(at, param) for at, params in enumerate(self.sharded) for param in params]
        self.place = 0
        # The latest call that a parameter was looked at for.
        self.seen: dict[Parameter, int] = {}
        self.live: set[Parameter] = set()
        self.together: list[_Group] = []
        self.total = self.gathered = self.gathered_at_once = 0
        self.sums = [0, *itertools.accumulate(sum(param.elements for param in call.params) for call in trace)]
        # By call, the next one that uses each of its parameters.
        self.next_use = list[dict[Parameter, int]]()
        coming = dict[Parameter, int]()
        for at, params in reversed(list(enumerate(self.sharded))):
            self.next_use.append({param: coming[param] for param in params if param in coming})
            coming |= dict.fromkeys(params, at)
        self.next_use.reverse()

    def gather(self, params: Iterable[Parameter]) -> int:
        """Gather what is missing, and return its elements."""
        missing = [param for param in params if param not in self.live]
        size = sum(param.elements for param in missing)
        self.live.update(missing)
        self.gathered += sum(math.ceil(param.elements / self.ranks) * self.ranks for param in missing)
        # One rank copies each by itself.
        if len(missing) > 1 and self.ranks > 1:
            self.together.append(_Group(size, set(missing)))
        self.total += size
        self.gathered_at_once = max(self.gathered_at_once, self.total)
        return size

    def call(self, at: int) -> int:
        """Return the most elements that are unsharded while module `at` runs, copies of them included."""
        came = self.gather(self.sharded[at])
        # gloo gathers into a copy of the whole.
        peak = self.total + (came if self.gloo else 0)
        # Elements that are there twice while the module runs.
        used, copied = set(self.sharded[at]), 0
        for group in self.together:
            group.is_open = group.is_open or bool(group.left & used)
            copied += group.size if group.is_open else 0
            group.left -= used
        self.together = [group for group in self.together if group.left]
        while self.place < len(self.order) and self.order[self.place][0] <= at:
            when, param = self.order[self.place]
            self.seen[param] = when
            self.place += 1
        room = min(self.max_live - self.total, self.prefetch_bucket)
        # Ordered, each once.
        coming: dict[Parameter, None] = {}
        elements = 0
        while self.place < len(self.order) and elements < room:
            when, param = self.order[self.place]
            self.place += 1
            self.seen[param] = max(self.seen.get(param, 0), when)
            if param not in self.live and param not in coming:
                coming[param] = None
                elements += param.elements
        came = self.gather(coming)
        return max(peak, self.total + copied + (came if self.gloo else 0))

    @property
    def settled(self) -> int:
        """Elements that are unsharded once a module's own are, with the buffers that are still to be copied out."""
        return self.total + sum(group.size for group in self.together if group.is_open)

    def release(self, at: int) -> None:
        released = list(self.released_after[at])
        for param in self.sharded[at]:
            again = self.next_use[at].get(param)
            near = again is not None and self.sums[again] - self.sums[at + 1] < self.max_reuse_distance
            if not near and self.seen[param] <= at + 1:
                released.append(param)
        gone = self.live.intersection(released)
        self.live -= gone
        self.total -= sum(param.elements for param in gone)


def gathers_of(request: Request) -> Gathers:
    if not unshards(request):
        return Gathers()
    settings, box = request.settings, request.box
    room = settings.prefetch_bucket, settings.max_live, settings.max_reuse_distance
    return _gathers(
        request.shape, request.gradient_checkpointing, box.ranks, box.gathers_into_copies, room,
        frozenset(persistent_params(request)),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _gathers(
    shape: ModelShape, recomputes: bool, ranks: int, gloo: bool, room: tuple[int, int, int],
    persistent: frozenset[Parameter],
) -> Gathers:  # fmt: skip
    """Cached by what decides it, which many strategies share."""
    forward, backward = calls_of(shape, recomputes)
    trace = (*forward, *backward)
    coordinator = _Coordinator(trace, persistent, room, ranks, gloo)
    live_forward, live_backward, live_before, live_at = (dict[int, int]() for _ in range(4))
    place, since, at_end = BEFORE, 0, 0
    for at, call in enumerate(trace):
        live, settled = coordinator.call(at), coordinator.settled
        if at < len(forward):
            # What is around all layers is called before them.
            place = call.place if call.params else place
            live_forward[place] = max(live_forward.get(place, 0), live)
            at_end = settled
        else:
            live_backward[call.place] = max(live_backward.get(call.place, 0), live)
            # While frozen weights are unsharded no gradient comes: the next one stands for them.
            most = max(since, live)
            is_frozen = any(not param.trained for param in call.params)
            since = most if is_frozen else 0 if call.params else since
            live_before |= {param.index: most for param in call.params}
            live_at |= {param.index: settled for param in call.params}
        coordinator.release(at)
    if not gloo:
        # Two published rows of GPUs say that what the head was gathered through is there besides the logits (0.3 % off,
        # and 1.0 without). Why is not known: a block that waits for a stream (record_stream) is reserved, and no more.
        at_end = max(live_forward.values())
        live_forward = {shape.layers: at_end}
    # What a place keeps only grows, so one that has no more than a later one decides nothing.
    decisive, most = dict[int, int](), -1
    for place in sorted(live_forward, reverse=True):
        if live_forward[place] > most:
            decisive[place] = most = live_forward[place]
    return Gathers(
        coordinator.gathered, decisive, live_backward, at_end, live_before, live_at, coordinator.gathered_at_once
    )
