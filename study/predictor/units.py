"""Figures of hardware with their units as people write them: 141GB, 4.8TB/s, 0.989PFLOPS, 400Gb/s."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Literal

# GiB, TFLOP/s and GB/s.
Quantity = Literal["memory", "rate", "speed"]

# Factors by prefix, to giga and to tera. Memory is sold in units that are called GB and are GiB.
_GIGA = {"M": 1e-3, "G": 1.0, "T": 1e3}
_BINARY = {"M": 2.0**20 / 1e9, "G": 2.0**30 / 1e9, "T": 2.0**40 / 1e9}
_TERA = {"G": 1e-3, "T": 1.0, "P": 1e3, "E": 1e6}


def parse_quantity(text: str, quantity: Quantity) -> float | None:
    """Return a figure in GiB, TFLOP/s or GB/s; None without a number above 0 or with a unit that is not known."""
    number = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})? *([a-zA-Z/]*)", text.strip())
    if number is None:
        return None
    factor = _factor(number[3], quantity) if number[3] else 1.0
    value = float(number[1] + (number[2] or ""))
    return None if factor is None or value == 0 else value * factor


def _factor(unit: str, quantity: Quantity) -> float | None:
    """Return the factor of a unit; None if it is not known."""
    if quantity == "memory":
        size = re.fullmatch("([MGT])(I?)B?", unit.upper())
        if size is None:
            return None
        return {"M": 1 / 1024, "G": 1.0, "T": 1024.0}[size[1]] if size[2] else _GIGA[size[1]]
    if quantity == "rate":
        rate = re.fullmatch("([GTPE])(F(LOPS?)?(/S)?)?", unit.upper())
        return _TERA[rate[1]] if rate else None
    # A small b is a bit, and in lower case throughout only `gbps` is a unit that people mean bits by.
    bits = re.fullmatch("([MGT])(b|bit|bits)(/s|ps)|([mgt])bps", unit)
    if bits is not None:
        return _GIGA[(bits[1] or bits[4]).upper()] / 8
    size = re.fullmatch("([MGT])(i?)(B(/s|/S|ps)?)?", unit)
    if size is None:
        return None
    return (_BINARY if size[2] else _GIGA)[size[1]]


def parse_speed(text: str) -> float:
    """Parse a bandwidth in GB/s, as an argparse type: 50, 50GB/s, 400Gb/s and 400Gbps are the same."""
    value = parse_quantity(text, "speed")
    if value is None and re.fullmatch("[EFHNX]DR[0-9]*", text.strip(), re.IGNORECASE):
        problem = f"{text.strip()} is a kind of InfiniBand: write the rate of a card, divided by the GPUs that share it"
        raise argparse.ArgumentTypeError(f"{problem}, such as 50Gb/s for HDR (200Gb/s) and four GPUs")
    if value is None or value >= 1e6:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a bandwidth such as 50, 50GB/s or 400Gb/s")
    return value


@dataclasses.dataclass(frozen=True)
class NetworkSpeed:
    """Bandwidth in GB/s to other nodes: of a GPU, or of a node whose GPUs share it."""

    gb_per_s: float
    is_of_node: bool = False

    def __str__(self) -> str:
        return f"{self.gb_per_s:g}{'GB/s/node' if self.is_of_node else ''}"

    def per_gpu(self, gpus_per_node: int) -> float:
        return self.gb_per_s / gpus_per_node if self.is_of_node else self.gb_per_s


def parse_network_speed(text: str) -> NetworkSpeed:
    """Parse the bandwidth of a GPU to other nodes, or of a node, as an argparse type: 50, 400Gb/s, 100Gb/s/node."""
    speed = text.strip().removesuffix("/node")
    return NetworkSpeed(parse_speed(speed), is_of_node=speed != text.strip())
