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
from study.host.slurm import is_array_task
from study.record.lock import FileLock

LOCK_NAME = "sweep.lock"
MARKER = "ZERO_STUDY_SWEEP_DIRECTORY"
_PATIENCE_S = 20.0


def only_sweep(directory: Path) -> FileLock:
    """The tasks of a job array may share it: they take one cell's folder at a time, and leave those that are taken."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        what = f"another sweep is at work in {directory}"
        return FileLock(directory / LOCK_NAME, what, shared=is_array_task())
    except OSError as error:
        raise UserError(
            f"{directory} is not writable ({error.strerror})", "let --runs-dir name a folder that you may write"
        ) from None


def marker_of(directory: Path) -> str:
    """Of another Slurm job's processes on this machine that job takes care."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{directory.resolve()}{f'#{job}' if job else ''}"


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
    wanted = marker_of(directory)
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.pid != os.getpid()]
