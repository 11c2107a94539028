"""Outcome of a run with a hint, from an exception or from the output of a dead process."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from study.config.errors import NotFinite, RunFailed, Unsupported, UserError, first_line
from study.records import older
from study.records.schema import EndCause, State

DEVICE_OOM_HINT = "use a smaller --per_device_train_batch_size, or a strategy that shards or offloads more"
HOST_OOM_HINT = "use a smaller model or batch, fewer ranks, or a strategy that offloads less"

# Messages of torch, the CUDA libraries and NCCL. NCCL mentions memory only in its last line, after an unhandled error.
_DEVICE_MEMORY = re.compile(
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|Triton Error \[CUDA\]: out of memory|"
    r"CU(BLAS|DNN)_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION|ALLOC)_FAILED"
)
# CUDA uses the same message for device memory and for host memory that it could not pin.
_CUDA_MEMORY = re.compile(
    r"CUDA (driver )?error: out of memory|cudaErrorMemoryAllocation|Cuda failure (\d+ )?'out of memory'"
)
# cuBLAS raises this if its workspace does not fit, and also after an index out of range.
_NO_HANDLE = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED")
_LOCKING = re.compile(r", in \w*(pin_memory|pinned)\b|cudaHost(Alloc|Register)")
# With more free device memory than this, the device did not run out of it: CUDA allocates smaller blocks.
_ENOUGH_GIB = 2
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|std::bad_alloc|Cannot allocate memory|\bMemoryError\b|"
    r"can't start new thread|pthread_create failed|failed to map segment from shared object|unable to mmap|"
    r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"
)
# NCCL and torch exchange data between processes through /dev/shm.
_SHARED_MEMORY = re.compile(
    r"(/dev/shm|shared memory|unable to write to file </torch_).*No space left on device|insufficient shared memory"
)
# Hint for a run without a checkpoint.
RETRY_HINT = "run it again"
MORE_SHARED_MEMORY = "mount -o remount,size=1g /dev/shm (or docker run --shm-size=1g)"
# torch's archive writer reports a full disk only as a failed write.
_DISK = re.compile(
    r"No space left on device|Disk quota exceeded|inline_container.*(unexpected pos|failed writing)|iostream error"
)
# Messages of gloo and NCCL in a rank whose peer is gone. Another error of such words is an OSError, as of a download.
_LOST_PEER = re.compile(r"Connection (reset|closed) by peer|remote process exit(ed|ing)|Broken pipe")
_DEVICE_RAN_OUT = "the device's memory ran out"
_RAN_OUT: tuple[tuple[re.Pattern[str], EndCause, State, str, str], ...] = (
    (_DEVICE_MEMORY, "device memory", "oom", _DEVICE_RAN_OUT, DEVICE_OOM_HINT),
    (_NO_HANDLE, "device memory", "oom", _DEVICE_RAN_OUT, DEVICE_OOM_HINT),
    (
        _CUDA_MEMORY,
        "device or locked memory",
        "oom",
        "the device's memory, or host memory that can be locked in place, ran out",
        f"{DEVICE_OOM_HINT}; on the host: {HOST_OOM_HINT}",
    ),
    (_HOST_MEMORY, "host memory", "oom", "the host's memory or a limit on the process ran out", HOST_OOM_HINT),
    (_SHARED_MEMORY, "shared memory", "failed", "/dev/shm is full", MORE_SHARED_MEMORY),
    (_DISK, "disk", "failed", "the disk is full", f"free some space, and {RETRY_HINT}"),
)


@dataclasses.dataclass(frozen=True)
class FreeMemory:
    """Free memory at the end of a run; None for the device if it was not read."""

    device_gib: float | None
    host_gib: float

    def __str__(self) -> str:
        device = "" if self.device_gib is None else f"{self.device_gib:.1f} GiB of the device and "
        return f"{device}{self.host_gib:.1f} GiB of the host were free"


# Another run would end in the same state: these cells are answered, and run again only with --retry.
FINAL_STATES: frozenset[str] = frozenset({"ok", "unsupported", "oom", "timeout"})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a run, as in status.json. A cell without one is active, damaged or to do."""

    state: str
    reason: str = ""
    hint: str = ""
    cause: EndCause | None = None
    # The step of the first training loss that is not finite.
    not_finite_step: int | None = None

    @property
    def why(self) -> str:
        return f"{self.reason} ({self.hint})" if self.hint else self.reason

    def is_final(self, retry: bool) -> bool:
        """Whether `study run` would not run the cell again."""
        # A damaged record may be of a newer version, so only --retry replaces it.
        return self.state == "ok" or (not retry and self.state in {*FINAL_STATES, "damaged"})


class SliceProgress(NamedTuple):
    """Progress of one slice of a suite: numbers of cells, the pending ones, and their expected seconds."""

    suite: str
    only: str
    planned: int
    ok: int
    # Cells with another final outcome, such as out of memory; each is a row of the report.
    other: int
    seconds: float
    # Ids, or for a report labels.
    left: Sequence[str]


def outcome_from_status(status: Mapping[str, Any]) -> Outcome:
    """Return the outcome in a status.json."""
    if "cause" in status:
        facts = older.EndFacts(status["cause"], status.get("not_finite_step"))
    else:
        facts = older.read_reason(status["reason"])
    return Outcome(status["state"], status["reason"], status["hint"], *facts)


class Terminated(BaseException):
    """SIGTERM as an exception, so that the run closes its record."""


@contextmanager
def raise_on_signals(error: BaseException, *numbers: signal.Signals) -> Iterator[None]:
    """Raise `error` on the first of these signals; later ones are ignored."""

    def stop(number: int, frame: Any) -> None:
        for signal_number in numbers:
            signal.signal(signal_number, signal.SIG_IGN)
        raise error

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def outcome_from_log(text: str, frames: str = "", free: FreeMemory | None = None) -> Outcome | None:
    """Recognize exhausted memory or disk in a message, or in the traceback's `frames`; None for other failures."""
    for words, cause, state, what, hint in _RAN_OUT:
        if match := words.search(text):
            device_is_free = free is not None and (free.device_gib or 0) > _ENOUGH_GIB
            if words is _NO_HANDLE and (device_is_free or free is None):
                continue
            if words is _CUDA_MEMORY and (device_is_free or _LOCKING.search(frames)):
                cause, what = "locked memory", "no more host memory could be locked in place"
                hint = HOST_OOM_HINT
            start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            line = text[start : end if end >= 0 else None].strip()[:500]
            free_text = f"; {free}" if free and state == "oom" else ""
            return Outcome(state, f"{what} ({line}{free_text})", hint, cause)
    return None


def outcome_from_exception(error: BaseException, alone: bool = False, free: FreeMemory | None = None) -> Outcome:
    """Return the outcome for an exception; `alone` is for a single process, `free` the free memory at that time."""
    if isinstance(error, UserError):
        return Outcome("unsupported" if isinstance(error, Unsupported) else "failed", error.problem, error.fix)
    if isinstance(error, NotFinite):
        return Outcome("failed", error.reason, error.hint, "not finite", error.step)
    if isinstance(error, RunFailed):
        return Outcome("failed", error.reason, error.hint)
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", "stopped from the keyboard", RETRY_HINT)
    if isinstance(error, Terminated):
        # The sender of a signal is unknown.
        or_launcher = "" if alone else ", or by the launcher because another rank died"
        return Outcome("interrupted", f"ended by SIGTERM: from outside{or_launcher}", RETRY_HINT, "SIGTERM")
    # Records are shared, so the folder of the Python installation is removed from the message.
    message = f"{type(error).__name__}: {first_line(error).replace(sys.prefix + os.sep, '')[:500]}"
    # Pinned memory, cuBLAS and NCCL raise plain RuntimeErrors; only torch has a type for exhausted memory.
    if type(error).__name__ == "OutOfMemoryError":
        return outcome_from_log(str(error), free=free) or Outcome("oom", message, DEVICE_OOM_HINT, "device memory")
    library_errors = ("SafetensorError", "CheckpointException")
    if isinstance(error, (RuntimeError, MemoryError, OSError)) or type(error).__name__ in library_errors:
        frames = "".join(traceback.format_tb(error.__traceback__))
        if ending := outcome_from_log(f"{message}\n{error}", frames, free):
            return ending
    if isinstance(error, RuntimeError) and not alone and _LOST_PEER.search(str(error)):
        return Outcome("failed", f"another rank died, and this one lost its connection ({message})", RETRY_HINT)
    return Outcome("failed", message, "the traceback is in log.txt")
