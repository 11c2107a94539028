"""What the host allows and how it hands out memory, settled without torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

from study.errors import UserError
from study.spec.strategies import Strategy

# Overrides how much memory the box seems to have.
HOST_MEMORY_VARIABLE = "ZERO_STUDY_HOST_MEMORY_GIB"
_MLOCK_ONFAULT = 1
_FP32_BYTES = 4
# malloc.h's numbers for these, and the largest threshold that glibc takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def stated_host_memory_gib() -> float | None:
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
    return stated


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
    if strategy.offload_device("param") == "nvme":
        assert strategy.deepspeed is not None
        section = strategy.deepspeed["zero_optimization"]["offload_param"]
        return int(section["buffer_count"] * section["buffer_size"] * _FP32_BYTES)
    # The optimizer's buffers grow with the model; a tiny one's were refused under a limit of 8 MiB.
    return 16 * 2**20 if strategy.uses_nvme else 0


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one.

    By default it hands large blocks back and is given them anew, page by page, at every step. How often depends on
    which addresses a process happened to get, so two runs of one thing differ by percents for no reason of theirs.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
