"""Kernel file locks: one process owns a lock, and the kernel releases it when the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.records.directory import is_partial_write, read_status, utc_now
from study.records.schema import RecordError

# Read at import, because an orphaned process gets another parent. All ranks of a launch on one machine share it.
LAUNCHER_PID = os.getppid()


def digest_of_host(name: str) -> str:
    """Return a digest of a host name: lock files are in folders that users share, so they contain no host names."""
    return hashlib.sha256(name.encode()).hexdigest()[:12]


HOST = digest_of_host(platform.node())
_open_descriptors: set[int] = set()


class LockHeldError(UserError):
    """Another process owns the lock; names it if the lock file does."""

    def __init__(self, what: str, holder: dict[str, Any]):
        if "pid" not in holder:
            super().__init__(f"{what}: its lock names no process", "wait for it, or name another folder")
            return
        where = "this machine" if holder.get("host") == HOST else "another machine"
        super().__init__(
            f"{what}: pid {holder['pid']} on {where}, since {holder.get('started_at')}",
            f"wait for it, end it (kill {holder['pid']}), or name another folder",
        )


def read_lock_owner(file: Path) -> dict[str, Any]:
    """Read the last owner of a lock from its file; empty if the file is missing or damaged."""
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


class FileLock(contextlib.AbstractContextManager["FileLock"]):
    """Lock on a file. Its release keeps the file: deleting it would let two processes lock two files of one name."""

    def __init__(self, file: Path, what: str, *, create: bool = True, shared: bool = False, patience_s: float = 0.5):
        """Lock the file; raises LockHeldError if another process owns it, and OSError on a file system without locks.

        `create` creates the file and writes the owner to it. Several processes can own a `shared` lock. A process that
        tests a lock owns it for an instant, hence `patience_s`.
        """
        # Python opens descriptors as not inheritable, so child programs do not own the lock.
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o644)
        _open_descriptors.add(self._descriptor)
        deadline = time.monotonic() + patience_s
        try:
            while True:
                try:
                    fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise LockHeldError(what, read_lock_owner(file)) from None
                time.sleep(0.05)
        except BaseException:
            self.release()
            raise
        if create:
            owner = {"pid": os.getpid(), "host": HOST, "launcher_pid": LAUNCHER_PID, "started_at": utc_now()}
            # Optional: on a full disk the lock works without it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{json.dumps(owner)}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor in _open_descriptors:
            _open_descriptors.remove(self._descriptor)
            os.close(self._descriptor)

    def __exit__(self, *error: object) -> None:
        self.release()


def _close_in_child() -> None:
    """Close the locks in a forked child, which would otherwise keep them after its parent ends."""
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


# Run directories: only one run at a time may use one, and it must not contain files of the user.

LOCK_NAME = ".zero-study-run.lock"
CHECKPOINTS = "checkpoints"
# A run may swap to its own run directory.
SWAP_PREFIX = "zero-study-swap-"


def check_is_run_directory(folder: Path, what: str, fix: str) -> None:
    """Raise UserError if a folder has files but no status.json of a run, so that no file of the user is overwritten."""
    if not folder.is_dir():
        return
    # Logs and checkpoints are written in place. All other files are renamed into place, which replaces a link.
    in_place = ("log*.txt", f"{CHECKPOINTS}/step_*", f"{CHECKPOINTS}/step_*/**/*")
    if link := next((file for name in in_place for file in folder.glob(name) if file.is_symlink()), None):
        where = link.relative_to(folder)
        raise UserError(f"{what} contains {where}, a link: the run would write to its target", "remove the link")
    if (folder / LOCK_NAME).is_file() and (folder / "status.json").is_file():
        return
    try:
        read_status(folder)
    except RecordError as error:
        if error.file.is_file():
            raise UserError(f"{what} is not a run directory: {error}", fix) from None
        for name in (file.name for file in folder.iterdir()):
            # A run that was killed before it wrote its first status leaves these.
            if not (name == LOCK_NAME or is_partial_write(name, "status.json") or name.startswith(SWAP_PREFIX)):
                raise UserError(f"{what} contains files, but no run", fix) from None


def check_not_active(folder: Path, what: str) -> None:
    """Raise UserError if a running process owns the folder. It creates no file; `lock_run_directory` checks again."""
    if (folder / LOCK_NAME).exists():
        lock_run_directory(folder, what, create=False).release()


def is_run_active(folder: Path) -> bool:
    """Whether a run is active in the folder; False if this process may only read it."""
    try:
        check_not_active(folder, str(folder))
    except UserError as why:
        return isinstance(why, LockHeldError)
    return False


def lock_run_directory(folder: Path, what: str, *, create: bool = True) -> FileLock:
    """Lock a run directory until the lock is released or the process ends; raises UserError."""
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / LOCK_NAME, f"another run is active in {what}", create=create)
    except FileExistsError:
        raise UserError(f"{what} is a file or a broken link", "name a folder") from None
    except OSError as error:
        fix = "free disk space, or name a writable folder on a file system with file locks"
        raise UserError(f"{what} cannot be locked ({error.strerror})", fix) from None


def is_locked_by_current_launch(folder: Path) -> bool:
    """Whether this rank's launch was the last to lock the run directory."""
    holder = read_lock_owner(folder / LOCK_NAME)
    return (holder.get("host"), holder.get("launcher_pid")) == (HOST, LAUNCHER_PID)
