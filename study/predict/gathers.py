"""Which parameters stage 3 holds whole, and how often it gathers them: its own rules over the calls of modules.

partitioned_param_coordinator.py of deepspeed 0.19: what a module needs is gathered when it is called, then what the
next ones need until the prefetch bucket is full or too many are live; after the call it lets go of what is not needed
again within `stage3_max_reuse_distance` elements, and has not been looked at for a later call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from study.predict.modules import Call, calls_of
from study.predict.request import Request
from study.predict.settings import EngineSettings
from study.predict.state import Piece, kept_whole


@dataclasses.dataclass(frozen=True)
class Gathers:
    """Of one micro-batch, in elements."""

    # Put out by all gathers of one forward and backward pass, padded, and how many calls these are.
    elements: int = 0
    calls: int = 0
    # The most that is whole at once while each layer runs, forward and backward; the key None is outside the layers.
    live_forward: dict[int | None, int] = dataclasses.field(default_factory=dict)
    live_backward: dict[int | None, int] = dataclasses.field(default_factory=dict)


class _Coordinator:
    def __init__(self, trace: Sequence[Call], whole: set[int], settings: EngineSettings, ranks: int) -> None:
        self.settings, self.ranks = settings, ranks
        self.sharded = [tuple(piece for piece in call.pieces if id(piece) not in whole) for call in trace]
        self.order = [(at, piece) for at, pieces in enumerate(self.sharded) for piece in pieces]
        self.place = 0
        # The latest call that a piece was looked at for.
        self.seen: dict[int, int] = {}
        self.live: dict[int, int] = {}
        # Gathered together, and not yet copied out of the common buffer.
        self.together: dict[int, int] = {}
        self.total = self.gathered = self.calls = 0
        self.sums = [0]
        for call in trace:
            self.sums.append(self.sums[-1] + sum(piece.elements for piece in call.pieces))
        self.next_use = _next_use(self.sharded)

    def gather(self, pieces: Sequence[Piece]) -> None:
        missing = [piece for piece in pieces if id(piece) not in self.live]
        size = sum(piece.elements for piece in missing)
        for piece in missing:
            self.live[id(piece)] = piece.elements
            self.together[id(piece)] = size if len(missing) > 1 else 0
            self.gathered += math.ceil(piece.elements / self.ranks) * self.ranks
        self.total += size
        self.calls += bool(missing)

    def call(self, at: int) -> int:
        """Elements that are whole at the most while module `at` runs."""
        self.gather(self.sharded[at])
        copied = max((self.together.pop(id(piece), 0) for piece in self.sharded[at]), default=0)
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
        self.gather(coming)
        return self.total + copied

    def release(self, at: int) -> None:
        for piece in self.sharded[at]:
            again = self.next_use[at].get(id(piece))
            near = again is not None and self.sums[again] - self.sums[at + 1] < self.settings.max_reuse_distance
            if id(piece) in self.live and not near and self.seen[id(piece)] <= at + 1:
                self.total -= self.live.pop(id(piece))


def gathers_of(request: Request, settings: EngineSettings) -> Gathers:
    if request.box.ranks == 1:
        return Gathers()
    forward, backward = calls_of(request.shape, request.gradient_checkpointing)
    whole = {id(piece) for piece in kept_whole(request, settings)}
    trace = (*forward, *backward)
    coordinator = _Coordinator(trace, whole, settings, request.box.ranks)
    held: tuple[dict[int | None, int], dict[int | None, int]] = ({}, {})
    for at, call in enumerate(trace):
        live = coordinator.call(at)
        where = held[at >= len(forward)]
        where[call.layer] = max(where.get(call.layer, 0), live)
        coordinator.release(at)
    return Gathers(coordinator.gathered, coordinator.calls, *held)


def _next_use(sharded: Sequence[Sequence[Piece]]) -> list[dict[int, int]]:
    coming: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for at in reversed(range(len(sharded))):
        found.append({id(piece): coming[id(piece)] for piece in sharded[at] if id(piece) in coming})
        coming |= dict.fromkeys(map(id, sharded[at]), at)
    return found[::-1]
