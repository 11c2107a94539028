"""Memory that is locked in place, as DeepSpeed does for NVMe: how much it locks, and whether that is allowed here."""

from __future__ import annotations

import ctypes
import mmap

from study.spec.strategies import Strategy

_MLOCK_ONFAULT = 1
_FP32_BYTES = 4


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
