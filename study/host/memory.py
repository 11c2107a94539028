"""Memory and cores of this box, memory that may be locked, and how often memory ran out.

Limits of a container or a job are those of its cgroup (version 1 or 2) and of the cgroups above. `root` is the folder
of `proc` and `sys`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from study.config.errors import UserError
from study.config.strategies import Strategy

# Overrides the memory that the box shows.
HOST_MEMORY_VARIABLE = "ZERO_STUDY_HOST_MEMORY_GIB"
GIB, MIB = 2**30, 2**20
# Interpreter, torch, DeepSpeed and their libraries, of each process that has a GPU.
LIBRARIES_BYTES = 1.2 * GIB
# Smaller blocks stay with the C library of a process when they are freed (glibc's largest threshold of mmap).
MALLOC_MMAP_THRESHOLD_MAX_BYTES = 32 * MIB
_MLOCK_ONFAULT = 1
_FP32_BYTES = 4


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup of the controller and those above it, as far as they are visible."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = top / path.lstrip("/")
        yield from (own, *(above for above in own.parents if above.is_relative_to(top)))


def available_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on, or as many as its container's share of CPU time is worth.

    With more threads, all are stopped together for the rest of each period.
    """
    shares: list[float] = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in _cgroups(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # version 1, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
        # Version 1 has -1 without a limit.
        if quota > 0 and period > 0:
            shares.append(quota / period)
    return max(1, math.floor(min(shares)))


def _counter(file: Path, name: str) -> int:
    try:
        rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Host memory that this process may use: the minimum of the box and of each cgroup above it."""

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
    """Return the memory that the user states, as for a virtual machine that grows, or that the box shows."""
    if (text := os.environ.get(HOST_MEMORY_VARIABLE)) is not None:
        with contextlib.suppress(ValueError):
            if 0 < (stated := float(text)) < math.inf:
                return HostMemory(stated * GIB, stated * GIB)
        raise UserError(f"{HOST_MEMORY_VARIABLE} is {text!r}", "use a number of GiB, or unset it")
    box = psutil.virtual_memory()
    limits = []
    for folder in _cgroups(root, "memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            # Without a limit, version 2 has "max" and version 1 a huge number.
            if 0 < (total := _number(folder / limit)) < box.total:
                # The kernel drops cached files before it refuses memory.
                used = _number(folder / usage) - _counter(folder / "memory.stat", cache)
                limits.append((total, max(0, total - used)))
    if not limits:
        return HostMemory(box.total, box.available)
    total, available = map(min, zip(*limits, strict=True))
    return HostMemory(total, min(box.available, available), total)


@dataclasses.dataclass(frozen=True)
class OomCounts:
    """The kernel's counters. In a cgroup both grow when a process is killed, whichever memory ran out."""

    killed: int
    cgroup_limit_hit: int

    def __sub__(self, before: OomCounts) -> OomCounts:
        return OomCounts(self.killed - before.killed, self.cgroup_limit_hit - before.cgroup_limit_hit)


def oom_counts(root: Path = Path("/")) -> OomCounts:
    """Counters of this process's cgroup and of the host; 0 where the kernel has none."""
    killed = _counter(root / "proc/vmstat", "oom_kill")
    limit_hit = 0
    for folder in _cgroups(root, "memory"):
        killed += _counter(folder / "memory.events", "oom_kill") + _counter(folder / "memory.oom_control", "oom_kill")
        limit_hit += _counter(folder / "memory.events", "oom") + _number(folder / "memory.failcnt")
    return OomCounts(killed, limit_hit)


def can_lock(size: int) -> bool:
    """Try it, because root and CAP_IPC_LOCK override `ulimit -l`; locked on fault, so that it uses no memory."""
    try:
        with mmap.mmap(-1, size) as area:
            start = ctypes.c_char.from_buffer(area)
            lock = ctypes.CDLL(None).mlock2
            refused = lock(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), _MLOCK_ONFAULT)
            del start
    except OSError:  # not even that much address space
        return False
    return not refused


def required_pinned_bytes(strategy: Strategy) -> int:
    """Bytes that DeepSpeed locks for NVMe on each rank before it trains: buffers for fp32 parameters, or few."""
    if strategy.swap_buffers is not None:
        return math.prod(strategy.swap_buffers) * _FP32_BYTES
    # The optimizer's buffers grow with the model; a tiny one's were refused under a limit of 8 MiB.
    return 16 * MIB if strategy.uses_nvme else 0
