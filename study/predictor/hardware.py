"""What a device could do at best, from study/predictor/hardware.yaml, and the share of it that a run reached."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import get_args

from study.config.flags import Precision
from study.config.yaml_sections import read_own

# Where nobody said what the driver shows: as of A100 and V100.
_SHOWN = 0.985


@dataclasses.dataclass(frozen=True)
class Device:
    """One entry of hardware.yaml; data-sheet figures, dense."""

    name: str
    pattern: str
    peak_tflops: dict[str, float | None]
    memory_bandwidth_gb_per_s: float
    memory_gib: float
    # Best matrix product that was measured, by precision; what is missing was not published.
    matmul_tflops: dict[str, float] = dataclasses.field(default_factory=dict)
    # One direction, of one device.
    pcie_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None
    # What the driver shows of memory_gib.
    visible_gib: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "visible_gib", self.visible_gib or _SHOWN * self.memory_gib)


@functools.cache
def known_devices() -> tuple[Device, ...]:
    entries = read_own(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))
    return tuple(Device(**entry) for entry in entries)


def find_device(device_name: str) -> Device | None:
    """By the name that torch.cuda.get_device_name or NVML gives; None if it is not listed, as any CPU."""
    if "MIG" in device_name:  # a slice of a device; its share of the figures is not published with the name
        return None
    return next((device for device in known_devices() if re.search(device.pattern, device_name)), None)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak dense FLOP/s for the matrix multiplications of a run in `precision`; None where it is not known.

    fp32 means the CUDA cores: study/engine/setup.py keeps tf32 off.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"unknown precision {precision!r}")
    device = find_device(device_name)
    if device is None:
        return None
    tflops = device.peak_tflops[precision.removesuffix("-engine")]
    return None if tflops is None else tflops * 1e12


def mfu(flops_per_step: float, step_time_s: float, world_size: int, device_name: str, precision: str) -> float | None:
    """Model FLOPs utilization: the model's FLOPs of one step over all ranks, against all devices' peak in that time."""
    peak = peak_flops(device_name, precision)
    return None if peak is None else flops_per_step / (step_time_s * world_size * peak)
