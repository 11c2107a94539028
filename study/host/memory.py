"""Read the memory and cores of this machine, the limit of pinned memory, and the kernel's out-of-memory counters.

Limits of a container or a job are those of its cgroup (version 1 or 2) and of its parents. `root` is the folder of
`proc` and `sys`.
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

from study.config import errors, strategies

# Overrides the detected host memory.
HOST_MEMORY_VARIABLE = "ZERO_STUDY_HOST_MEMORY_GIB"
GIB, MIB = 2**30, 2**20
# Resident memory of the interpreter, torch, CUDA and their libraries in a process with a GPU, before the first step and
# in steps; then the same with DeepSpeed and its process group. Measured on an H200 with torch 2.11: in steps 1.46 to
# 1.57 and 1.97 to 2.07 GiB (memory_init_host_gib and memory_steady_host_gib in reports/gpu and reports/gpu_fp16).
_LIBRARIES_BYTES = {False: (0.94 * GIB, 1.52 * GIB), True: (1.37 * GIB, 2.02 * GIB)}
# The C library caches smaller blocks when they are freed (glibc's maximum of the mmap threshold).
MALLOC_MMAP_THRESHOLD_MAX_BYTES = 32 * MIB
_MLOCK_ONFAULT = 1
_FP32_BYTES = 4


def libraries_bytes(has_deepspeed: bool, *, before_steps: bool = False) -> float:
    """Return the resident memory of the libraries in a process with a GPU."""
    return _LIBRARIES_BYTES[has_deepspeed][0 if before_steps else 1]


def kernel_text(file: Path) -> str:
    """Return the content of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup of the controller and its parents, as far as they are visible."""
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        cgroup = top / path.lstrip("/")
        yield from (cgroup, *(parent for parent in cgroup.parents if parent.is_relative_to(top)))


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, limited by the CPU quota of its container.

    With more threads the kernel stops all of them for the rest of each period.
    """
    limits: list[float] = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in _cgroups(root, "cpu"):
        version_1 = [kernel_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = kernel_text(folder / "cpu.max").split() or version_1
        # Without a limit, version 2 has "max" and version 1 has -1.
        if quota.isdigit():
            limits.append(int(quota) / int(period))
    return max(1, math.floor(min(limits)))


def _counter(file: Path, name: str) -> int:
    rows = (line.split() for line in kernel_text(file).splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)


def _number(file: Path) -> int:
    text = kernel_text(file)
    return int(text) if text.isdigit() else 0


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Host memory that this process may use: the minimum over the machine and its cgroups."""

    total_gib: float
    available_gib: float
    # Whether a container or a job has a lower limit than the machine.
    is_limited: bool = False


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory that the user sets, as for a virtual machine that grows, or the detected memory."""
    if (text := os.environ.get(HOST_MEMORY_VARIABLE)) is not None:
        with contextlib.suppress(ValueError):
            if 0 < (size_gib := float(text)) < math.inf:
                return HostMemory(size_gib, size_gib)
        raise errors.UserError(f"{HOST_MEMORY_VARIABLE} is {text!r}", "use a number of GiB, or unset it")
    # The Python of a browser, which the calculator uses, has no such module.
    import psutil

    machine = psutil.virtual_memory()
    limits = []
    for folder in _cgroups(root, "memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            # Without a limit, version 2 has "max" and version 1 a huge number.
            if 0 < (total := _number(folder / limit)) < machine.total:
                # The kernel drops cached files before an allocation fails.
                used = _number(folder / usage) - _counter(folder / "memory.stat", cache)
                limits.append((total, max(0, total - used)))
    if not limits:
        return HostMemory(machine.total / GIB, machine.available / GIB)
    total, available = map(min, zip(*limits, strict=True))
    return HostMemory(total / GIB, min(machine.available, available) / GIB, is_limited=True)


def wsl_limit(root: Path = Path("/")) -> str:
    """Return what limits the memory of Linux within Windows (WSL2), whose kernel names Microsoft; empty elsewhere."""
    if "microsoft" not in kernel_text(root / "proc" / "version").lower():
        return ""
    return "WSL2 has half of the memory of Windows by default: memory= under [wsl2] in its .wslconfig sets another part"


@dataclasses.dataclass(frozen=True)
class OomCounts:
    """Out-of-memory counters of the kernel. In a cgroup both grow when a process is killed, whichever limit was hit."""

    killed: int
    cgroup_limit_hit: int

    def __sub__(self, before: OomCounts) -> OomCounts:
        return OomCounts(self.killed - before.killed, self.cgroup_limit_hit - before.cgroup_limit_hit)


def oom_counts(root: Path = Path("/")) -> OomCounts:
    """Return the counters of this process's cgroups and of the host; 0 if the kernel has none."""
    killed = _counter(root / "proc/vmstat", "oom_kill")
    limit_hit = 0
    for folder in _cgroups(root, "memory"):
        killed += _counter(folder / "memory.events", "oom_kill") + _counter(folder / "memory.oom_control", "oom_kill")
        limit_hit += _counter(folder / "memory.events", "oom") + _number(folder / "memory.failcnt")
    return OomCounts(killed, limit_hit)


def can_lock(size: int) -> bool:
    """Whether `size` bytes can be locked; tried on fault, without memory, as CAP_IPC_LOCK overrides `ulimit -l`."""
    try:
        with mmap.mmap(-1, size) as area:
            start = ctypes.c_char.from_buffer(area)
            lock = ctypes.CDLL(None).mlock2
            error = lock(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), _MLOCK_ONFAULT)
            del start
    except OSError:  # not enough address space
        return False
    return not error


def required_pinned_bytes(strategy: strategies.Strategy) -> int:
    """Return the bytes that DeepSpeed pins for NVMe on each rank before training: fp32 parameter buffers, or few."""
    if strategy.swap_buffers is not None:
        return math.prod(strategy.swap_buffers) * _FP32_BYTES
    # The optimizer's buffers grow with the model; those of a tiny one failed with a limit of 8 MiB.
    return 16 * MIB if strategy.uses_nvme else 0
