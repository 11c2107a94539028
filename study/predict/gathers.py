"""Which parameters stage 3 holds whole, and how often it gathers them: its own rules over the calls of modules.

partitioned_param_coordinator.py of deepspeed 0.19: what a module needs is gathered when it is called, then what the
next ones need until the prefetch bucket is full or too many are live; after the call it lets go of what is not needed
again within `stage3_max_reuse_distance` elements, and has not been looked at for a later call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from study.host.memory import LARGEST_KEPT_BYTES
from study.predict.modules import Call, calls_of
from study.predict.request import Request
from study.predict.settings import EngineSettings
from study.predict.state import BEFORE, Piece, kept_whole, makes_whole, weight_bytes


@dataclasses.dataclass(frozen=True)
class Gathers:
    """Of one micro-batch, in elements."""

    # Put out by all gathers of one forward and backward pass, padded, and how many calls these are.
    elements: int = 0
    calls: int = 0
    # The most that is whole at once at each place, forward and backward, and of that what lies in small tensors. Of the
    # forward pass only places after which there is less.
    live_forward: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    live_backward: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    # When the head has run, and what it was gathered through has been let go of.
    live_at_end: tuple[int, int] = (0, 0)
    # Just before the gradient of each tensor comes, by the tensor's id, while its module is made whole; and when it is
    # there, and what the gathers went through has been let go of.
    live_before: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    live_at: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    # The most parameters that are gathered at once, without the buffers that they come through.
    gathered_at_once: int = 0

    @property
    def most(self) -> int:
        return max((live for live, _ in [*self.live_forward.values(), *self.live_backward.values()]), default=0)


@dataclasses.dataclass
class _Group:
    """Gathered into one buffer. The first use copies all of it out, and the buffer stays until the last."""

    size: int
    left: set[int]
    is_open: bool = False


_KNOWN: dict[tuple[Any, ...], Gathers] = {}


class _Coordinator:
    def __init__(self, trace: Sequence[Call], whole: set[int], settings: EngineSettings, request: Request) -> None:
        self.settings, self.ranks, self.gloo = settings, request.box.ranks, request.box.gathers_into_copies
        self.sharded = [tuple(piece for piece in call.pieces if id(piece) not in whole) for call in trace]
        self.let_go_after = [tuple(piece for piece in call.lets_go if id(piece) not in whole) for call in trace]
        self.order = [(at, piece) for at, pieces in enumerate(self.sharded) for piece in pieces]
        self.place = 0
        # The latest call that a piece was looked at for.
        self.seen: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.together: list[_Group] = []
        self.total = self.gathered = self.gathered_at_once = self.calls = self.small = 0
        self.smaller_than = LARGEST_KEPT_BYTES / weight_bytes(request)
        self.sums = [0]
        for call in trace:
            self.sums.append(self.sums[-1] + sum(piece.elements for piece in call.pieces))
        self.next_use = _next_use(self.sharded)

    def gather(self, pieces: Sequence[Piece]) -> int:
        """The elements that come."""
        missing = [piece for piece in pieces if id(piece) not in self.live]
        size = sum(piece.elements for piece in missing)
        for piece in missing:
            self.live[id(piece)] = piece.elements
            self.small += piece.elements if piece.elements < self.smaller_than else 0
            self.gathered += math.ceil(piece.elements / self.ranks) * self.ranks
        # One rank copies each by itself.
        if len(missing) > 1 and self.ranks > 1:
            self.together.append(_Group(size, {id(piece) for piece in missing}))
        self.total += size
        self.gathered_at_once = max(self.gathered_at_once, self.total)
        self.calls += bool(missing)
        return size

    def copied(self, at: int) -> int:
        """Elements that are there twice while module `at` runs."""
        used, found = {id(piece) for piece in self.sharded[at]}, 0
        for group in self.together:
            group.is_open = group.is_open or bool(group.left & used)
            found += group.size if group.is_open else 0
            group.left -= used
        self.together = [group for group in self.together if group.left]
        return found

    def call(self, at: int) -> int:
        """Elements that are whole at the most while module `at` runs, copies of them included."""
        came = self.gather(self.sharded[at])
        # gloo gathers into a copy of the whole.
        peak = self.total + (came if self.gloo else 0)
        copied = self.copied(at)
        while self.place < len(self.order) and self.order[self.place][0] <= at:
            self.seen[id(self.order[self.place][1])] = self.order[self.place][0]
            self.place += 1
        room = min(self.settings.max_live - self.total, self.settings.prefetch_bucket)
        coming: list[Piece] = []
        elements = 0
        while self.place < len(self.order) and elements < room:
            when, piece = self.order[self.place]
            self.place += 1
            self.seen[id(piece)] = max(self.seen.get(id(piece), 0), when)
            if id(piece) not in self.live and piece not in coming:
                coming.append(piece)
                elements += piece.elements
        came = self.gather(coming)
        return max(peak, self.total + copied + (came if self.gloo else 0))

    @property
    def settled(self) -> int:
        """Elements that are whole once a module's own are there, with the buffers that are still to be copied out."""
        return self.total + sum(group.size for group in self.together if group.is_open)

    def release(self, at: int) -> None:
        for piece in self.sharded[at]:
            again = self.next_use[at].get(id(piece))
            near = again is not None and self.sums[again] - self.sums[at + 1] < self.settings.max_reuse_distance
            if id(piece) in self.live and not near and self.seen[id(piece)] <= at + 1:
                self.let_go(piece)
        for piece in self.let_go_after[at]:
            if id(piece) in self.live:
                self.let_go(piece)

    def let_go(self, piece: Piece) -> None:
        self.total -= self.live.pop(id(piece))
        self.small -= piece.elements if piece.elements < self.smaller_than else 0


def gathers_of(request: Request, settings: EngineSettings) -> Gathers:
    """It does not depend on the micro-batch, so a search over those asks once."""
    if not makes_whole(request, settings):
        return Gathers()
    key = (
        request.shape, settings, request.gradient_checkpointing, request.box.gathers_into_copies, request.box.ranks,
        weight_bytes(request),
    )  # fmt: skip
    if key not in _KNOWN:
        if len(_KNOWN) > 512:
            _KNOWN.clear()
        _KNOWN[key] = _gathers(request, settings)
    return _KNOWN[key]


def _gathers(request: Request, settings: EngineSettings) -> Gathers:
    forward, backward = calls_of(request.shape, request.gradient_checkpointing)
    whole = {id(piece) for piece in kept_whole(request, settings)}
    trace = (*forward, *backward)
    coordinator = _Coordinator(trace, whole, settings, request)
    live_forward: dict[int, tuple[int, int]] = {}
    live_backward: dict[int, tuple[int, int]] = {}
    live_before: dict[int, tuple[int, int]] = {}
    live_at: dict[int, tuple[int, int]] = {}
    place, since, at_end = BEFORE, (0, 0), (0, 0)
    for at, call in enumerate(trace):
        live, settled = (coordinator.call(at), coordinator.small), (coordinator.settled, coordinator.small)
        if at < len(forward):
            # What is around all layers is called before them.
            place = call.place if call.pieces else place
            live_forward[place] = max(live_forward.get(place, (0, 0)), live)
            at_end = settled
        else:
            live_backward[call.place] = max(live_backward.get(call.place, (0, 0)), live)
            # While frozen weights are whole no gradient comes: the next one stands for them.
            most = max(since, live)
            is_frozen = any(not piece.trained for piece in call.pieces)
            since = most if is_frozen else (0, 0) if call.pieces else since
            live_before |= dict.fromkeys(map(id, call.pieces), most)
            live_at |= dict.fromkeys(map(id, call.pieces), settled)
        coordinator.release(at)
    if not coordinator.gloo:
        # Two published rows of GPUs say that what the head was gathered through is there beside the logits (0.3 % off,
        # and 1.0 without). Why is not known: a block that waits for a stream (record_stream) is reserved, and no more.
        at_end = max(live_forward.values())
        live_forward = {request.shape.layers: at_end}
    return Gathers(
        coordinator.gathered,
        coordinator.calls,
        _before_less(live_forward),
        live_backward,
        at_end,
        live_before,
        live_at,
        coordinator.gathered_at_once,
    )


def _before_less(live: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """What a place keeps only grows, so one that has no more than a later one decides nothing."""
    kept, most = dict[int, tuple[int, int]](), (-1, -1)
    for place in sorted(live, reverse=True):
        larger = max(most[0], live[place][0]), max(most[1], live[place][1])
        if larger != most:
            kept[place], most = live[place], larger
    return kept


def _next_use(sharded: Sequence[Sequence[Piece]]) -> list[dict[int, int]]:
    coming: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for at in reversed(range(len(sharded))):
        found.append({id(piece): coming[id(piece)] for piece in sharded[at] if id(piece) in coming})
        coming |= dict.fromkeys(map(id, sharded[at]), at)
    return found[::-1]
