"""The folder that a run works in: that it is no one else's, and that one run at a time is at work there."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.record.directory import is_part_of, utc_now
from study.record.lock import FileLock, Held, holder_of, read_holder

LOCK_NAME = ".zero-study-run.lock"
# A run may swap to the very folder that it writes to.
SWAP_PREFIX = "zero-study-swap-"
# Read once: an orphan has another parent. Every rank of a launch on one machine has the same.
_LAUNCHER_PID = os.getppid()


def refuse_files_of_others(folder: Path, what: str, fix: str) -> None:
    """A folder with files and without status.json is no run's, and nothing is written there or taken away."""
    if not folder.is_dir() or (folder / "status.json").exists():
        return
    if any(not _is_leftover(file) for file in folder.iterdir()):
        raise UserError(f"{what} holds files, and none is a run's", fix)


def _is_leftover(file: Path) -> bool:
    """What a run leaves that was killed before its very first status was whole."""
    return file.name == LOCK_NAME or is_part_of(file.name, "status.json") or file.name.startswith(SWAP_PREFIX)


def refuse_folder_at_work(folder: Path, what: str) -> None:
    """A first look, which leaves no file; `take_folder` decides."""
    with _lockable(what):
        holder = holder_of(folder / LOCK_NAME)
    if holder is not None:
        raise UserError(*_at_work(what, holder))


def take_folder(folder: Path, what: str) -> FileLock:
    """Held until it is released or the process ends, however it ends."""
    about = {"started_at": utc_now(), "launcher_pid": _LAUNCHER_PID}
    try:
        with _lockable(what):
            folder.mkdir(parents=True, exist_ok=True)
            return FileLock.take(folder / LOCK_NAME, about)
    except Held as held:
        raise UserError(*_at_work(what, held.holder)) from None


@contextmanager
def _lockable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} cannot be locked for one run alone ({error.strerror})",
            "make room, or name a folder that you may write, on a drive with file locks",
        ) from None


def is_taken_by_this_launch(folder: Path) -> bool:
    """For the ranks beside the main process: is it theirs that was the last to take the folder?"""
    holder = read_holder(folder / LOCK_NAME)
    return (holder.get("host"), holder.get("launcher_pid")) == (platform.node(), _LAUNCHER_PID)


def _at_work(what: str, holder: Mapping[str, Any]) -> tuple[str, str]:
    pid, since = holder.get("pid"), holder.get("started_at")
    if pid is None:
        return f"another run has just begun in {what}", "wait for it, or name another folder"
    return (
        f"another run is at work in {what}: pid {pid} on {holder.get('host')}, since {since}",
        f"wait for it, end it (kill {pid}), or name another folder",
    )
