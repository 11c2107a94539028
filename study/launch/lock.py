"""One sweep per directory, and nothing left of the one before.

The lock is the kernel's, so it dies with its holder. The processes of a run carry the directory in their environment:
should a sweep and the supervisor of its run both be killed, the next sweep finds what they left and ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from study.errors import UserError
from study.record.directory import utc_now
from study.record.lock import FileLock, Held

LOCK_NAME = "sweep.lock"
MARKER = "ZERO_STUDY_SWEEP_DIRECTORY"
_PATIENCE_S = 20.0


@contextmanager
def only_sweep(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock.take(directory / LOCK_NAME, {"started_at": utc_now()})
    except Held as held:
        raise UserError(*_who_holds_it(directory, held.holder)) from None
    except OSError as error:
        raise UserError(
            f"{directory} is not writable ({error.strerror})", "let --runs-dir name a folder that you may write"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _who_holds_it(directory: Path, holder: Mapping[str, Any]) -> tuple[str, str]:
    try:
        who, fix = f"pid {holder['pid']}, since {holder['started_at']}", f"wait for it, or run: kill {holder['pid']}"
    except KeyError:
        who, fix = "a sweep that has just begun", "wait for it"
    return f"another sweep works on {directory}: {who}", fix


def end_leftovers(directory: Path) -> int:
    """End every process of an earlier sweep on this directory; returns how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_S
    while leftovers := _processes_of(directory):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in leftovers)
            raise UserError(f"processes of an earlier sweep on {directory} cannot be ended: {pids}", "restart the box")
        for process in leftovers:
            ended.add(process.pid)
            try:
                process.kill()
            except psutil.Error:
                continue
        time.sleep(0.05)
    return len(ended)


def _processes_of(directory: Path) -> list[psutil.Process]:
    wanted = str(directory.resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.pid != os.getpid()]
