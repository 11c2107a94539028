"""How much memory this box has: the one answer for suites, for the doctor and for virtual ranks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import psutil

from study.errors import UserError
from study.host.cgroups import memory_limits

# Overrides how much memory the box seems to have.
HOST_MEMORY_VARIABLE = "ZERO_STUDY_HOST_MEMORY_GIB"
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """What this process may use of the host's memory: the smallest of what the box and each cgroup above it allow."""

    total_bytes: float
    available_bytes: float
    # The tightest limit of a container or a job; None where the box itself is the limit.
    cgroup_limit_bytes: float | None = None

    @property
    def total_gib(self) -> float:
        return self.total_bytes / GIB

    @property
    def available_gib(self) -> float:
        return self.available_bytes / GIB


def host_memory(root: Path = Path("/")) -> HostMemory:
    """`root` is where `proc` and `sys` are."""
    if (stated := _stated_bytes()) is not None:
        return HostMemory(stated, stated)
    box = psutil.virtual_memory()
    limits = [limit for limit in memory_limits(root) if limit.total_bytes < box.total]
    if not limits:
        return HostMemory(box.total, box.available)
    total = min(limit.total_bytes for limit in limits)
    return HostMemory(total, min(box.available, *(limit.available_bytes for limit in limits)), total)


def _stated_bytes() -> float | None:
    """What the user says of this box; a virtual machine that grows shows less than it will have."""
    text = os.environ.get(HOST_MEMORY_VARIABLE)
    if text is None:
        return None
    try:
        stated = float(text)
    except ValueError:
        stated = 0.0
    if not 0 < stated < float("inf"):
        raise UserError(f"{HOST_MEMORY_VARIABLE} is {text!r}", "use a number of GiB, or unset it")
    return stated * GIB
