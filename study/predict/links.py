"""How long a collective takes on a box: measured tables, interpolated, since no one latency and bandwidth fit them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import study.theory
from study.predict.request import Box
from study.spec.yaml_sections import read_own

Collective = Literal["all_reduce", "all_gather", "reduce", "reduce_scatter"]

# NVLink's figure of the device whose table is used, GB/s: others are scaled by their own links.
_LINKS_OF_TABLE = {"A100": 300.0, "H200": 450.0}
# Without the switches' own sums, all eight of an H200 node are as fast as four.
_SWITCHES_ADD_ABOVE = 4


def collective_s(box: Box, collective: Collective, payload_bytes: float) -> float:
    """One call over all ranks. The payload is the whole tensor: what is reduced, gathered, or scattered."""
    ranks = box.ranks
    if ranks == 1 or payload_bytes <= 0:
        return 0.0
    # In nccl-tests' terms: a reduction to one rank passes all of it over every link of a chain.
    share = 1 if collective == "reduce" else (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
    return share * payload_bytes / (1e9 * bus_bandwidth_gb_per_s(box, collective, payload_bytes))


def bus_bandwidth_gb_per_s(box: Box, collective: Collective, payload_bytes: float) -> float:
    within = _within_a_node(box, collective, payload_bytes)
    return within if box.nodes == 1 else min(within, _between_nodes(box, payload_bytes))


def _within_a_node(box: Box, collective: Collective, payload_bytes: float) -> float:
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


def _between_nodes(box: Box, payload_bytes: float) -> float:
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
    return dict(read_own(Path(study.theory.__file__).with_name("collectives.yaml").read_text(encoding="utf-8")))
