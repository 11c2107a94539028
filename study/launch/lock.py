"""One sweep per directory, and nothing left of the one before.

The lock is the kernel's, so it dies with its holder. The processes of a run carry the directory in their environment:
should a sweep and the supervisor of its run both be killed, the next sweep finds what they left and ends it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from study.errors import UserError
from study.record.lock import FileLock

LOCK_NAME = "sweep.lock"
MARKER = "ZERO_STUDY_SWEEP_DIRECTORY"
_PATIENCE_S = 20.0


def only_sweep(directory: Path) -> FileLock:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return FileLock(directory / LOCK_NAME, f"another sweep is at work in {directory}")
    except OSError as error:
        raise UserError(
            f"{directory} is not writable ({error.strerror})", "let --runs-dir name a folder that you may write"
        ) from None


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
