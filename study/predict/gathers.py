"""Which parameters stage 3 holds whole, and how often it gathers them: its own rules over the order of modules.

partitioned_param_coordinator.py: a module's parameters are gathered when it runs, the next ones ahead of it, and let go
of after it unless they are needed again within `stage3_max_reuse_distance` elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from study.predict.request import Request
from study.predict.settings import EngineSettings
from study.predict.state import Piece, kept_whole, pieces_of


@dataclasses.dataclass(frozen=True)
class Use:
    """A module that runs: its parameters that are sharded, and all of them."""

    layer: int | None
    sharded: tuple[Piece, ...]
    elements: int


@dataclasses.dataclass(frozen=True)
class Gathers:
    """Of one micro-batch, in elements."""

    # Put out by all gathers of one forward and backward pass, padded, and how many calls these are.
    elements: int
    calls: int
    # The most that is whole at once while each layer runs, forward and backward; the key None is outside the layers.
    live_forward: dict[int | None, int]
    live_backward: dict[int | None, int]


def uses_of(request: Request, settings: EngineSettings) -> tuple[list[Use], list[Use]]:
    """The order of modules forward and backward. A checkpointed layer runs forward again before its backward pass."""
    whole = {id(piece) for piece in kept_whole(request, settings)}
    modules: dict[str, list[Piece]] = {}
    for piece in pieces_of(request.shape):
        modules.setdefault(piece.module, []).append(piece)
    forward = [
        Use(parts[0].layer, tuple(p for p in parts if id(p) not in whole), sum(p.elements for p in parts))
        for parts in modules.values()
    ]
    if request.shape.tied:
        # The head is the embedding again.
        forward.append(forward[0])
    backward: list[Use] = []
    if request.gradient_checkpointing:
        by_layer: dict[int | None, list[Use]] = {}
        for use in forward:
            by_layer.setdefault(use.layer, []).append(use)
        outside = [use for use in forward if use.layer is None]
        first = next((at for at, use in enumerate(forward) if use.layer is not None), len(forward))
        after, before = outside[first:], outside[:first]
        backward += reversed(after)
        for layer in reversed(range(request.shape.layers)):
            backward += [*by_layer[layer], *reversed(by_layer[layer])]
        backward += reversed(before)
    else:
        backward += reversed(forward)
    return forward, backward


def gathers_of(request: Request, settings: EngineSettings) -> Gathers:
    ranks = request.box.ranks
    if ranks == 1:
        return Gathers(0, 0, {}, {})
    forward, backward = uses_of(request, settings)
    trace = [*forward, *backward]
    reach = _reach(trace, settings.max_reuse_distance)
    next_use = _next_use(trace)
    live: dict[int, int] = {}
    total = padded = calls = 0
    fetched: set[int] = set()
    held: tuple[dict[int | None, int], dict[int | None, int]] = ({}, {})
    ahead = 0
    for at, use in enumerate(trace):
        missing = [piece for piece in use.sharded if id(piece) not in live]
        if missing:
            calls += 1
        for piece in missing:
            live[id(piece)] = piece.elements
            total += piece.elements
            padded += math.ceil(piece.elements / ranks) * ranks
        # Ahead: until the prefetch bucket or the budget of live parameters is full.
        room = min(settings.max_live - total, settings.prefetch_bucket)
        coming, ahead = 0, max(ahead, at + 1)
        while ahead < len(trace) and coming < room:
            new = [piece for piece in trace[ahead].sharded if id(piece) not in live]
            for piece in new:
                live[id(piece)] = piece.elements
                total += piece.elements
                padded += math.ceil(piece.elements / ranks) * ranks
                coming += piece.elements
                fetched.add(id(piece))
            ahead += 1
        calls += bool(coming)
        where = held[at >= len(forward)]
        # What comes together is gathered into one buffer, and copied out of it.
        where[use.layer] = max(where.get(use.layer, 0), total + coming)
        for piece in use.sharded:
            again = next_use[at].get(id(piece))
            if (
                id(piece) in live
                and not (again is not None and again < reach[at])
                and not (again is not None and again < ahead)
            ):
                total -= live.pop(id(piece))
    return Gathers(padded, calls, *held)


def _reach(trace: Sequence[Use], distance: int) -> list[int]:
    """For each module, the first one after it that is out of reach."""
    sums = [0]
    for use in trace:
        sums.append(sums[-1] + use.elements)
    found, end = [], 0
    for at in range(len(trace)):
        end = max(end, at + 1)
        # DeepSpeed looks at the modules after this one until it has passed `distance` elements.
        while end < len(trace) and sums[end] - sums[at + 1] < distance:
            end += 1
        found.append(end)
    return found


def _next_use(trace: Sequence[Use]) -> list[dict[int, int]]:
    coming: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for at in reversed(range(len(trace))):
        use = trace[at]
        found.append({id(piece): coming[id(piece)] for piece in use.sharded if id(piece) in coming})
        coming |= dict.fromkeys(map(id, use.sharded), at)
    return found[::-1]
