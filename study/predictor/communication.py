"""Communication of one rank in an optimizer step: ring bytes, as study/metrics/traffic.py counts them, and seconds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from study.config.yaml_sections import read_own
from study.predictor.gathers import gathers_of
from study.predictor.hardware import Hardware
from study.predictor.request import FP32_BYTES, Request
from study.predictor.state import flat_elements, persistent_params, shard_elements

# How long a collective takes on a box: measured tables, interpolated, since no one latency and bandwidth fit them.

Collective = Literal["all_reduce", "all_gather", "reduce", "reduce_scatter"]

# NVLink's figure of the device whose table is used, GB/s: others are scaled by their own links.
_LINKS_OF_TABLE = {"A100": 300.0, "H200": 450.0}
# Without the switches' own sums, all eight of an H200 node are as fast as four.
_SWITCHES_ADD_ABOVE = 4


def collective_s(box: Hardware, collective: Collective, payload_bytes: float) -> float:
    """One call over all ranks. The payload is the whole tensor: what is reduced, gathered, or scattered."""
    ranks = box.ranks
    if ranks == 1 or payload_bytes <= 0:
        return 0.0
    # In nccl-tests' terms: a reduction to one rank passes all of it over every link of a chain.
    share = 1 if collective == "reduce" else (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
    return share * payload_bytes / (1e9 * bus_bandwidth_gb_per_s(box, collective, payload_bytes))


def bus_bandwidth_gb_per_s(box: Hardware, collective: Collective, payload_bytes: float) -> float:
    within = _within_a_node(box, collective, payload_bytes)
    return within if box.nodes == 1 else min(within, _between_nodes(box, payload_bytes))


def _within_a_node(box: Hardware, collective: Collective, payload_bytes: float) -> float:
    tables = _tables()
    if (links := box.device.nvlink_gb_per_s or box.device.pcie_gb_per_s) is None:
        raise ValueError(f"{box.device.name} has no links in hardware.yaml")
    if box.meets_over_pcie:
        table, cards = tables["one_node"]["A100"], max(box.gpus_per_node, min(tables["pcie"]))
        return links * _interpolated(tables["pcie"], cards) * _interpolated(table, payload_bytes) / max(table.values())
    name = "H200" if (box.device.nvlink_gb_per_s or 0) >= _LINKS_OF_TABLE["H200"] else "A100"
    measured = _interpolated(tables["one_node"][name], payload_bytes)
    if collective != "all_reduce" or box.gpus_per_node <= _SWITCHES_ADD_ABOVE:
        measured = min(measured, tables["ring_limit"].get(name, math.inf))
    return measured * min(1.0, links / _LINKS_OF_TABLE[name])


def _between_nodes(box: Hardware, payload_bytes: float) -> float:
    """Measured with eight devices in a node, each with a card of its own: of fewer, each card carries as much more."""
    tables = _tables()
    size, cards = tables["by_nodes_payload"], min(1.0, box.gpus_per_node / 8)
    grown = _interpolated(tables["four_nodes"], payload_bytes / cards) / _interpolated(tables["four_nodes"], size)
    network = box.network_gb_per_s / tables["by_nodes_network_gb_per_s"]
    return _interpolated(tables["by_nodes"], box.nodes) * grown * network * cards


def _interpolated(table: Mapping[float, float], place: float) -> float:
    """Straight lines between the points of a doubly logarithmic plot; constant beyond its ends."""
    points = sorted(table)
    if place <= points[0]:
        # Below the first row a call takes as long as there.
        return table[points[0]] * place / points[0]
    if place >= points[-1]:
        return table[points[-1]]
    index = next(index for index, point in enumerate(points) if point >= place)
    low, high = points[index - 1], points[index]
    share = math.log(place / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(table[low]) + share * math.log(table[high]))


@functools.cache
def _tables() -> dict[str, Any]:
    return dict(read_own(Path(__file__).with_name("collectives.yaml").read_text(encoding="utf-8")))


# Seconds of communication in an optimizer step: overlapped with compute, and exposed.

_DDP_BUCKET_BYTES = 25 * 2**20


@dataclasses.dataclass(frozen=True)
class Exchange:
    overlapped: float
    exposed: float

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.overlapped + other.overlapped, self.exposed + other.exposed)


def exchange_of(request: Request, forward: float, backward: float) -> Exchange:
    """`forward` and `backward` are the seconds of one micro-batch's passes, behind which there is room."""
    strategy, stage = request.strategy, request.strategy.zero_stage
    if request.box.ranks == 1 or strategy.name == "single":
        return Exchange(0.0, 0.0)
    if strategy.is_fsdp or stage == 3:
        return _sharded(request, forward, backward)
    total = request.shape.trained_parameters * request.weight_bytes
    if stage is None:
        last = _calls_s(request.box, "all_reduce", _DDP_BUCKET_BYTES, _DDP_BUCKET_BYTES)
        return _overlap(_calls_s(request.box, "all_reduce", total, _DDP_BUCKET_BYTES), backward, last)
    settings = request.settings
    bucket = settings.reduce_bucket * request.weight_bytes
    if stage == 0:
        return Exchange(0.0, _calls_s(request.box, "all_reduce", total, bucket))
    times = request.accumulation if stage == 2 else 1
    reduced = times * _calls_s(request.box, settings.gradients_by, total, bucket)
    room = times * backward if settings.overlaps else 0.0
    # In one call, whatever allgather_bucket_size says.
    return _overlap(reduced, room, 0.0) + Exchange(0.0, collective_s(request.box, "all_gather", total))


def _sharded(request: Request, forward: float, backward: float) -> Exchange:
    """Each layer is gathered for both passes, unless stage 3 has kept it: by hsdp within a replica group, by hpz
    after the first time within its group."""
    strategy, times = request.strategy, request.accumulation
    width, shape = 2.0 if request.fsdp_gathers_16_bits else float(request.weight_bytes), request.shape
    total, grads = shape.parameters * width, shape.trained_parameters * width
    chunk, grads_chunk = (size / (shape.layers + 1) for size in (total, grads))
    inner = _within(request.box, request.ranks_per_replica)
    outer = inner if strategy.is_fsdp else request.box
    settings = None if strategy.is_fsdp else request.settings
    again = max(0.0, gathers_of(request).elements * width - total) if settings else total
    first, second = _calls_s(outer, "all_gather", total, chunk), _calls_s(inner, "all_gather", again, chunk)
    scattered = _calls_s(outer, settings.gradients_by if settings else "reduce_scatter", grads, grads_chunk)
    groups = request.box.ranks // outer.ranks
    if groups > 1:
        scattered += _calls_s(
            _across(request.box, outer, groups), "all_reduce", grads / outer.ranks, grads_chunk / outer.ranks
        )
    can_hide = settings is None or settings.overlaps
    alone = _calls_s(outer, "all_gather", chunk, chunk)
    ahead = _overlap(times * first, times * forward * can_hide, alone)
    # FSDP2 reduces in the last micro-batch alone.
    reduced = scattered if strategy.is_fsdp else times * scattered
    return ahead + _overlap(times * second + reduced, times * backward * can_hide, alone)


def _within(box: Hardware, ranks: int | None) -> Hardware:
    """The box of a group of neighbours."""
    if ranks is None or ranks >= box.ranks:
        return box
    if ranks <= box.gpus_per_node:
        return dataclasses.replace(box, nodes=1, gpus_per_node=ranks)
    return dataclasses.replace(box, nodes=ranks // box.gpus_per_node)


def _across(box: Hardware, group: Hardware, groups: int) -> Hardware:
    """The ranks at one place of every replica group: one of each machine, where a group fills at least that."""
    if group.ranks < box.gpus_per_node and box.nodes == 1:
        return dataclasses.replace(box, gpus_per_node=groups)
    return dataclasses.replace(box, nodes=groups, gpus_per_node=1)


def _calls_s(box: Hardware, collective: Collective, total: float, chunk: float) -> float:
    """Seconds of a total that is sent in calls of one chunk."""
    chunk = min(chunk, total)
    return total / chunk * collective_s(box, collective, chunk) if chunk else 0.0


def _overlap(sent: float, room: float, last: float) -> Exchange:
    """The last call has nothing left to hide behind."""
    hidden = max(0.0, min(sent - last, room))
    return Exchange(hidden, sent - hidden)


def payload_of(request: Request) -> dict[str, float]:
    """Bytes by collective: an all-reduce counts once, a gather by what it puts out. Without a few bytes of norms."""
    strategy, ranks = request.strategy, request.box.ranks
    if ranks == 1:
        return {}
    weight, total = request.weight_bytes, request.shape.trained_parameters
    if strategy.is_fsdp:
        return _fsdp(request)
    if strategy.zero_stage is None:
        # Accelerate's accumulation skips the all-reduce until the last micro-batch. Buffers of whole numbers, BERT's
        # positions and types, go out at every forward pass.
        rows = [one.rows for one in request.shape.tensors if one.name.startswith("position_embeddings")]
        buffers = 2 * 8 * sum(rows) * request.accumulation
        return {"all_reduce": float(total * FP32_BYTES)} | ({"broadcast": float(buffers)} if buffers else {})
    if strategy.zero_stage == 0:
        return {"all_reduce": float(total * weight)}
    settings = request.settings
    # Stage 1 reduces once a step, the later ones each micro-batch.
    times = 1 if settings.stage == 1 else request.accumulation
    if settings.stage < 3:
        reduced = float(total * weight * times)
        return {settings.gradients_by: reduced, "all_gather": float(flat_elements(request) * weight)}
    whole = shard_elements(request, persistent_params(request)) * ranks
    # Persistent parameters are gathered once, after the optimizer has changed them: frozen or not, since a step begins
    # by freeing all of them (stage3.py, _partition_all_parameters).
    gathered = gathers_of(request).elements * request.accumulation + whole
    scattered = shard_elements(request, request.shape.trained_params) * ranks * request.accumulation
    return {"all_gather": float(gathered * weight), settings.gradients_by: float(scattered * weight)}


def _fsdp(request: Request) -> dict[str, float]:
    """Each layer is gathered twice in a micro-batch, and so is an untied embedding: it has a group of its own."""
    ranks, params = request.ranks_per_replica or request.box.ranks, request.shape.params
    padded = [math.ceil(param.rows / ranks) * ranks * (param.elements // param.rows) for param in params]
    reduced = sum(size for param, size in zip(params, padded, strict=True) if param.trained)
    again = sum(
        size
        for param, size in zip(params, padded, strict=True)
        if 0 <= param.place < request.shape.layers or (param is params[0] and not request.shape.tied)
    )
    times, width = request.accumulation, 2 if request.fsdp_gathers_16_bits else FP32_BYTES
    # Gradients are reduced in the last micro-batch alone.
    found = {"all_gather": float((sum(padded) + again) * width * times), "reduce_scatter": float(reduced * width)}
    if ranks < request.box.ranks:
        # Replica groups sum the shard of each rank.
        found["all_reduce"] = float(reduced / ranks * width)
    return found


def sent_bytes(request: Request) -> float:
    """Ring bytes. hsdp gathers within a replica group, and sums over groups."""
    ranks, copy, payload = request.box.ranks, request.ranks_per_replica, payload_of(request)
    if ranks == 1:
        return 0.0
    gathering = summing = ranks
    near = 0.0
    if copy is not None and request.strategy.is_fsdp:
        gathering, summing = copy, ranks // copy
    elif copy is not None:
        # Under hpz a step's first gather of a tensor takes all ranks, and later ones those of a machine. What the
        # optimizer does not change keeps its second shard; persistent parameters are not gathered from that.
        whole = persistent_params(request)
        frozen = [param for param in whole if not param.trained]
        first = shard_elements(request, [*request.shape.trained_params, *frozen])
        again = payload["all_gather"] - first * ranks * request.weight_bytes
        payload["all_gather"] -= again
        near = again * (copy - 1) / copy
    share = (gathering - 1) / gathering
    factor = {"all_reduce": 2 * (summing - 1) / summing, "reduce": 1.0, "broadcast": 1.0}
    return near + sum(size * factor.get(name, share) for name, size in payload.items())
