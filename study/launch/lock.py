"""One sweep per directory, and nothing left of the one before.

The lock is the kernel's, so it dies with its holder. The processes of a run carry the directory in their environment:
should a sweep and the supervisor of its run both be killed, the next sweep finds what they left and ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from study.errors import UserError
from study.record.directory import utc_now

LOCK_NAME = "sweep.lock"
MARKER = "ZERO_STUDY_SWEEP_DIRECTORY"
_PATIENCE_S = 20.0


@contextmanager
def only_sweep(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"{directory} is not writable ({error.strerror})", "let --runs-dir name a folder that you may write"
        ) from None
    with os.fdopen(handle, "r+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(*_who_holds_it(directory, stream.read())) from None
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps({"pid": os.getpid(), "started_at": utc_now()}) + "\n")
        stream.flush()
        yield


def _who_holds_it(directory: Path, text: str) -> tuple[str, str]:
    try:
        holder = json.loads(text)
        who, fix = f"pid {holder['pid']}, since {holder['started_at']}", f"wait for it, or run: kill {holder['pid']}"
    except (ValueError, KeyError, TypeError):
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
