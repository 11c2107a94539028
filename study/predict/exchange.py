"""Seconds that ranks talk in an optimizer step: what hides behind computing, and what is waited for."""

from __future__ import annotations

import dataclasses

from study.predict.gathers import gathers_of
from study.predict.links import Collective, collective_s
from study.predict.request import Box, Request
from study.predict.settings import engine_settings
from study.predict.state import weight_bytes

_DDP_BUCKET_BYTES = 25 * 2**20


@dataclasses.dataclass(frozen=True)
class Exchange:
    hidden: float
    waited: float

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.hidden + other.hidden, self.waited + other.waited)


def exchange_of(request: Request, forward: float, backward: float) -> Exchange:
    """`forward` and `backward` are the seconds of one micro-batch's passes, behind which there is room."""
    strategy, stage = request.strategy, request.strategy.zero_stage
    if request.box.ranks == 1 or strategy.name == "single":
        return Exchange(0.0, 0.0)
    if strategy.is_fsdp or stage == 3:
        return _sharded(request, forward, backward)
    total = request.shape.trained_parameters * weight_bytes(request)
    if stage is None:
        last = _calls_s(request.box, "all_reduce", _DDP_BUCKET_BYTES, _DDP_BUCKET_BYTES)
        return _overlap(_calls_s(request.box, "all_reduce", total, _DDP_BUCKET_BYTES), backward, last)
    settings = engine_settings(strategy, request.shape.hidden)
    bucket = settings.reduce_bucket * weight_bytes(request)
    if stage == 0:
        return Exchange(0.0, _calls_s(request.box, "all_reduce", total, bucket))
    times = request.accumulation if stage == 2 else 1
    reduced = times * _calls_s(request.box, settings.gradients_by, total, bucket)
    room = times * backward if settings.overlaps else 0.0
    # In one call, whatever allgather_bucket_size says.
    return _overlap(reduced, room, 0.0) + Exchange(0.0, collective_s(request.box, "all_gather", total))


def _sharded(request: Request, forward: float, backward: float) -> Exchange:
    """Each layer is gathered for both passes, unless stage 3 has kept it: by hsdp within a copy, by hpz after the first
    time within its group."""
    strategy, times = request.strategy, request.accumulation
    width, shape = 2.0 if request.fsdp_gathers_16_bits else float(weight_bytes(request)), request.shape
    total, grads = shape.parameters * width, shape.trained_parameters * width
    chunk, grads_chunk = (size / (shape.layers + 1) for size in (total, grads))
    inner = _within(request.box, request.ranks_of_a_copy)
    outer = inner if strategy.is_fsdp else request.box
    settings = None if strategy.is_fsdp else engine_settings(strategy, request.shape.hidden)
    again = max(0.0, gathers_of(request, settings).elements * width - total) if settings else total
    first, second = _calls_s(outer, "all_gather", total, chunk), _calls_s(inner, "all_gather", again, chunk)
    scattered = _calls_s(outer, settings.gradients_by if settings else "reduce_scatter", grads, grads_chunk)
    copies = request.box.ranks // outer.ranks
    if copies > 1:
        scattered += _calls_s(
            _across(request.box, outer, copies), "all_reduce", grads / outer.ranks, grads_chunk / outer.ranks
        )
    can_hide = settings is None or settings.overlaps
    alone = _calls_s(outer, "all_gather", chunk, chunk)
    ahead = _overlap(times * first, times * forward * can_hide, alone)
    # FSDP2 reduces in the last micro-batch alone.
    reduced = scattered if strategy.is_fsdp else times * scattered
    return ahead + _overlap(times * second + reduced, times * backward * can_hide, alone)


def _within(box: Box, ranks: int | None) -> Box:
    """The box of a group of neighbours."""
    if ranks is None or ranks >= box.ranks:
        return box
    if ranks <= box.gpus_per_node:
        return dataclasses.replace(box, nodes=1, gpus_per_node=ranks)
    return dataclasses.replace(box, nodes=ranks // box.gpus_per_node)


def _across(box: Box, group: Box, copies: int) -> Box:
    """The ranks at one place of every copy: one of each machine, where a copy fills at least that."""
    if group.ranks < box.gpus_per_node and box.nodes == 1:
        return dataclasses.replace(box, gpus_per_node=copies)
    return dataclasses.replace(box, nodes=copies, gpus_per_node=1)


def _calls_s(box: Box, collective: Collective, total: float, chunk: float) -> float:
    """In calls of one chunk."""
    chunk = min(chunk, total)
    return total / chunk * collective_s(box, collective, chunk) if chunk else 0.0


def _overlap(sent: float, room: float, last: float) -> Exchange:
    """The last call has nothing left to hide behind."""
    hidden = max(0.0, min(sent - last, room))
    return Exchange(hidden, sent - hidden)
