"""How a run ended and what helps: one answer for an exception in a run and for what a dead process printed."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from study.config.errors import RunFailed, Unsupported, UserError, first_line
from study.records.schema import State

SMALLER_ON_THE_DEVICE = "use a smaller --per_device_train_batch_size, or a strategy that shards or offloads more"
SMALLER_ON_THE_HOST = "use a smaller model or batch, fewer ranks, or a strategy that offloads less"

# As torch, the CUDA libraries and NCCL say it; NCCL speaks of an unhandled error first, and of memory in its last line.
_DEVICE_MEMORY = re.compile(
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|Triton Error \[CUDA\]: out of memory|"
    r"CU(BLAS|DNN)_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION|ALLOC)_FAILED"
)
# CUDA says the same of its own memory and of host memory that it could not lock in place for a copy.
_CUDA_MEMORY = re.compile(
    r"CUDA (driver )?error: out of memory|cudaErrorMemoryAllocation|Cuda failure (\d+ )?'out of memory'"
)
# cuBLAS says this where its workspace has no room, and after an index that was out of range, too.
_NO_HANDLE = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED")
_LOCKING = re.compile(r", in \w*(pin_memory|pinned)\b|cudaHost(Alloc|Register)")
# Where so much of the device was free, it was not the device. CUDA's own blocks are smaller.
_ENOUGH_GIB = 2
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|std::bad_alloc|Cannot allocate memory|\bMemoryError\b|"
    r"can't start new thread|pthread_create failed|failed to map segment from shared object|unable to mmap|"
    r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"
)
# NCCL's ranks meet there, and torch hands tensors to other processes there.
_SHARED_MEMORY = re.compile(
    r"(/dev/shm|shared memory|unable to write to file </torch_).*No space left on device|insufficient shared memory"
)
# What helps a run that has no checkpoint.
AGAIN = "run it again"
MORE_SHARED_MEMORY = "mount -o remount,size=1g /dev/shm (or docker run --shm-size=1g)"
# torch's writer of archives knows only that it did not get on.
_DISK = re.compile(
    r"No space left on device|Disk quota exceeded|inline_container.*(unexpected pos|failed writing)|iostream error"
)
# Of what study/run says where a loss or all gradients were no numbers.
_DIVERGED = re.compile(r"the (evaluation )?loss is (NaN|infinite|not a number)|gradients (are|were) not finite")
DEVICE_RAN_OUT = "the device's memory ran out"
_RAN_OUT: tuple[tuple[re.Pattern[str], State, str, str], ...] = (
    (_DEVICE_MEMORY, "oom", DEVICE_RAN_OUT, SMALLER_ON_THE_DEVICE),
    (_NO_HANDLE, "oom", DEVICE_RAN_OUT, SMALLER_ON_THE_DEVICE),
    (
        _CUDA_MEMORY,
        "oom",
        "the device's memory, or host memory that can be locked in place, ran out",
        f"{SMALLER_ON_THE_DEVICE}; on the host: {SMALLER_ON_THE_HOST}",
    ),
    (_HOST_MEMORY, "oom", "the host's memory or a limit on the process ran out", SMALLER_ON_THE_HOST),
    (_SHARED_MEMORY, "failed", "/dev/shm is full", MORE_SHARED_MEMORY),
    (_DISK, "failed", "the disk is full", f"free some space, and {AGAIN}"),
)


@dataclasses.dataclass(frozen=True)
class FreeMemory:
    """Memory that was free when a run ended; None for a device that was not asked."""

    device_gib: float | None
    host_gib: float

    def __str__(self) -> str:
        device = "" if self.device_gib is None else f"{self.device_gib:.1f} GiB of the device and "
        return f"{device}{self.host_gib:.1f} GiB of the host were free"


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended, as in status.json: the state, the reason, and a hint."""

    state: State
    reason: str
    hint: str = ""

    @property
    def why(self) -> str:
        return f"{self.reason} ({self.hint})" if self.hint else self.reason


def has_diverged(reason: str) -> bool:
    return _DIVERGED.search(reason) is not None


class Terminated(BaseException):
    """SIGTERM as an exception, so that the record is closed on the way out."""


@contextmanager
def raising_on(error: BaseException, *numbers: signal.Signals) -> Iterator[None]:
    """Raise an exception on any of these signals; a second signal is ignored."""

    def stop(number: int, frame: Any) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise error

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending_of_text(text: str, frames: str = "", free: FreeMemory | None = None) -> Ending | None:
    """Recognize memory or disk that ran out, in the words of any library; None for any other failure.

    `frames` are those of the traceback.
    """
    for words, state, what, hint in _RAN_OUT:
        if found := words.search(text):
            device_is_free = free is not None and (free.device_gib or 0) > _ENOUGH_GIB
            if words is _NO_HANDLE and (device_is_free or free is None):
                continue
            if words is _CUDA_MEMORY and (device_is_free or _LOCKING.search(frames)):
                what, hint = "no more host memory could be locked in place", SMALLER_ON_THE_HOST
            start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
            line = text[start : end if end >= 0 else None].strip()[:500]
            left = f"; {free}" if free and state == "oom" else ""
            return Ending(state, f"{what} ({line}{left})", hint)
    return None


def ending_of(error: BaseException, alone: bool = False, free: FreeMemory | None = None) -> Ending:
    """Return how a run ended with an exception. `alone` is a single process; `free` is the memory left then."""
    if isinstance(error, UserError):
        return Ending("unsupported" if isinstance(error, Unsupported) else "failed", error.problem, error.fix)
    if isinstance(error, RunFailed):
        return Ending("failed", error.reason, error.hint)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", "stopped from the keyboard", AGAIN)
    if isinstance(error, Terminated):
        # A signal does not say who sent it.
        or_launcher = "" if alone else ", or by the launcher because another rank died"
        return Ending("interrupted", f"ended by SIGTERM: from outside{or_launcher}", AGAIN)
    # Python names the folder of a module, and a record is for others too.
    named = f"{type(error).__name__}: {first_line(error).replace(sys.prefix + os.sep, '')[:500]}"
    # Pinned host memory, cuBLAS and NCCL report what ran out as plain RuntimeErrors; torch's own type says it all.
    if type(error).__name__ == "OutOfMemoryError":
        return ending_of_text(str(error), free=free) or Ending("oom", named, SMALLER_ON_THE_DEVICE)
    own = ("SafetensorError", "CheckpointException")
    if isinstance(error, (RuntimeError, MemoryError, OSError)) or type(error).__name__ in own:
        frames = "".join(traceback.format_tb(error.__traceback__))
        if ending := ending_of_text(f"{named}\n{error}", frames, free):
            return ending
    return Ending("failed", named, "the traceback is in log.txt")
