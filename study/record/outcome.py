"""How a run ended, as data: an exception becomes a state, a reason and a hint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from study.errors import RunFailed, Unsupported, UserError
from study.record.directory import State
from study.record.out_of_memory import OF_THE_GPU, line_of


class Terminated(BaseException):
    """SIGTERM as an exception, so that the record is closed on the way out."""


@contextmanager
def raise_on_termination() -> Iterator[None]:
    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def classify(error: BaseException, alone: bool = False) -> tuple[State, str, str]:
    """State, one-line reason and one-line hint for status.json; `alone` where the run is a single process."""
    if isinstance(error, Unsupported):
        return "unsupported", error.problem, error.fix
    if isinstance(error, RunFailed):
        return "failed", error.reason, error.hint
    if isinstance(error, UserError):
        return "failed", error.problem, error.fix
    # Pinning host memory, cuBLAS and NCCL report a full GPU as errors of their own.
    found = OF_THE_GPU.search(str(error)) if isinstance(error, RuntimeError) else None
    if found or type(error).__name__ == "OutOfMemoryError":
        reason = _first_line(error) if found is None else line_of(str(error), found)
        return "oom", reason, "use a smaller --per_device_train_batch_size, or a strategy that shards more"
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    ):
        return "oom", f"the host's memory ran out ({_first_line(error)})", "use a smaller model, or fewer ranks"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "stopped from the keyboard", "run it again"
    if isinstance(error, Terminated):
        sender = "from outside" if alone else "a launcher sends it when another rank has died"
        return "interrupted", f"ended by SIGTERM: {sender}", "run it again"
    return "failed", f"{type(error).__name__}: {_first_line(error)}", "the traceback is in log.txt"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:500]
