"""How much memory this box has, how much of it may be locked in place, and how often it ran out.

A container or a job has what its cgroup (version 1 or 2) allows it, and those above that one.
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

# What Linux lets this process have: the files of its control group (version 1 or 2), and of those above that one.


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Its own cgroup of this controller and those above it, as far as they can be seen. `root` has `proc` and `sys`."""
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


def allowed_cores(root: Path) -> float:
    """How many cores' worth of time the tightest of them gives; infinite without a limit."""
    shares = [float("inf")]
    for folder in cgroups(root, "cpu"):
        quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # version 1, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
        # Version 1 says -1 where there is no limit.
        if quota > 0 and period > 0:
            shares.append(quota / period)
    return min(shares)


def available_cores(root: Path = Path("/")) -> int:
    """Those that this process may run on, or as many as its container's share of time is worth.

    More threads than that are stopped together for the rest of each period. `root` is where `proc` and `sys` are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, allowed_cores(root))))


def counter(file: Path, name: str) -> int:
    try:
        rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


def number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


# Overrides how much memory the box seems to have.
HOST_MEMORY_VARIABLE = "ZERO_STUDY_HOST_MEMORY_GIB"
GIB, MIB = 2**30, 2**20
# Interpreter, torch, DeepSpeed and their libraries, of each process that has a GPU.
LIBRARIES_BYTES = 1.2 * GIB
# Blocks below this stay with the C library of a process when they are freed (glibc's largest threshold of mmap).
LARGEST_KEPT_BYTES = 32 * MIB
_MLOCK_ONFAULT = 1
_FP32_BYTES = 4


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
    limits = [limit for limit in _limits(root) if limit[0] < box.total]
    if not limits:
        return HostMemory(box.total, box.available)
    total, available = map(min, zip(*limits, strict=True))
    return HostMemory(total, min(box.available, available), total)


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


@dataclasses.dataclass(frozen=True)
class OomCounts:
    """The kernel's counters. Inside a cgroup both grow when a process is killed, whoever's memory ran out."""

    killed: int
    cgroup_limit_hit: int

    def __sub__(self, before: OomCounts) -> OomCounts:
        return OomCounts(self.killed - before.killed, self.cgroup_limit_hit - before.cgroup_limit_hit)


def oom_counts(root: Path = Path("/")) -> OomCounts:
    """Counters of this process's cgroup and of the host; 0 where the kernel keeps none."""
    killed = counter(root / "proc/vmstat", "oom_kill")
    limit_hit = 0
    for folder in cgroups(root, "memory"):
        killed += counter(folder / "memory.events", "oom_kill") + counter(folder / "memory.oom_control", "oom_kill")
        limit_hit += counter(folder / "memory.events", "oom") + number(folder / "memory.failcnt")
    return OomCounts(killed, limit_hit)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes in all and bytes left, of this process's cgroup and of those above it."""
    for folder in cgroups(root, "memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            # "max" is no number, and without a limit version 1 shows a huge one.
            if total := number(folder / limit):
                # The kernel drops cached files before it refuses memory.
                used = number(folder / usage) - counter(folder / "memory.stat", cache)
                yield total, max(0, total - used)


def can_lock(size: int) -> bool:
    """Tried, because root and CAP_IPC_LOCK stand above `ulimit -l`; locked on fault, so that it takes no memory."""
    try:
        with mmap.mmap(-1, size) as area:
            start = ctypes.c_char.from_buffer(area)
            lock = ctypes.CDLL(None).mlock2
            refused = lock(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), _MLOCK_ONFAULT)
            del start
    except OSError:  # not even that much address space
        return False
    return not refused


def locked_bytes(strategy: Strategy) -> int:
    """What DeepSpeed locks for NVMe on each rank before it trains: its buffers for fp32 parameters, or little."""
    if strategy.swap_buffers is not None:
        return math.prod(strategy.swap_buffers) * _FP32_BYTES
    # The optimizer's buffers grow with the model; a tiny one's were refused under a limit of 8 MiB.
    return 16 * 2**20 if strategy.uses_nvme else 0
