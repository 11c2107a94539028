"""File locks of the kernel: one process has it, and its end releases it."""

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
from study.records.directory import is_part_of, read_status, utc_now
from study.records.schema import RecordError

# Read once: an orphan has another parent. Every rank of a launch on one machine has the same.
LAUNCHER_PID = os.getppid()
# Locks lie in folders that are handed on, and a host's name is nobody's business there.


def digest_of_host(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


HOST = digest_of_host(platform.node())
_open_descriptors: set[int] = set()


class Held(UserError):
    """Another process has the lock: which one, if it has written that by now."""

    def __init__(self, what: str, holder: dict[str, Any]):
        if "pid" not in holder:
            super().__init__(f"{what}: its lock does not say which", "wait for it, or name another folder")
            return
        where = "this machine" if holder.get("host") == HOST else "another machine"
        super().__init__(
            f"{what}: pid {holder['pid']} on {where}, since {holder.get('started_at')}",
            f"wait for it, end it (kill {holder['pid']}), or name another folder",
        )


def read_holder(file: Path) -> dict[str, Any]:
    """Read what the last holder wrote; empty if it is missing or damaged."""
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


class FileLock(contextlib.AbstractContextManager["FileLock"]):
    """The file stays when the lock is gone: to delete it would let two processes lock two files of one name."""

    def __init__(
        self, file: Path, what: str, *, create: bool = True, shared: bool = False, with_folder: bool = False,
        patience_s: float = 0.5,
    ):  # fmt: skip
        """Raises Held where another holds it, and OSError where the file system lets nobody lock.

        `with_folder` locks the file's folder as well, so that deleting the file frees nothing.
        With `create` the file says from now on who holds it. All who want it shared may hold it together. Whoever asks
        whether a lock is free takes it for an instant, hence the patience.
        """
        # Not inheritable, as every descriptor that Python opens: a program that is started does not hold the lock.
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._file = file.absolute()
        self._descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o644)
        self._descriptors = [self._descriptor]
        if with_folder:
            self._descriptors.append(os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY))
        _open_descriptors.update(self._descriptors)
        deadline = time.monotonic() + patience_s
        try:
            for descriptor in self._descriptors:
                while not self._is_locked(descriptor):
                    if time.monotonic() >= deadline:
                        raise Held(what, read_holder(file))
                    time.sleep(0.05)
        except BaseException:
            self.release()
            raise
        if create:
            said = {"pid": os.getpid(), "host": HOST, "launcher_pid": LAUNCHER_PID, "started_at": utc_now()}
            # A courtesy: on a full disk the lock is as good without.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{json.dumps(said)}\n".encode(), 0)

    def _is_locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # NFS locks no folder. The file is locked by then.
            if descriptor == self._descriptor:
                raise
        return True

    def is_in_place(self) -> bool:
        """Whether its path still names the locked file: a renamed folder keeps its lock."""
        try:
            return os.path.samestat(self._file.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def release(self) -> None:
        for descriptor in _open_descriptors.intersection(self._descriptors):
            _open_descriptors.remove(descriptor)
            os.close(descriptor)

    def __exit__(self, *error: object) -> None:
        self.release()


def _close_in_child() -> None:
    """Close the locks in a forked child, which would keep them after its parent; the parent's stay locked."""
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


# The folder that a run works in: that it is no one else's, and that one run at a time is at work there.

LOCK_NAME = ".zero-study-run.lock"
CHECKPOINTS = "checkpoints"
# A run may swap to the very folder that it writes to.
SWAP_PREFIX = "zero-study-swap-"


def refuse_files_of_others(folder: Path, what: str, fix: str) -> None:
    """Refuse a folder with files and without a run's status.json: nothing is written or deleted there."""
    if not folder.is_dir():
        return
    # Whoever opens a pipe waits for its other end.
    if strange := [file.name for file in folder.iterdir() if file.exists() and not (file.is_file() or file.is_dir())]:
        raise UserError(f"{what} holds {strange[0]}, which is neither a file nor a folder", fix)
    # Logs and checkpoints are written in place. All else is put there under its name, which takes the place of a link.
    in_place = ("log*.txt", f"{CHECKPOINTS}/step_*", f"{CHECKPOINTS}/step_*/**/*")
    if link := next((file for name in in_place for file in folder.glob(name) if file.is_symlink()), None):
        where = link.relative_to(folder)
        raise UserError(f"{what} holds {where}, a link: what is written there would go elsewhere", "remove the link")
    if (folder / LOCK_NAME).is_file() and (folder / "status.json").is_file():
        return
    try:
        read_status(folder)
    except RecordError as error:
        if error.file.is_file():
            raise UserError(f"{what} is not a run's: {error}", fix) from None
        if any(not _is_leftover(file) for file in folder.iterdir()):
            raise UserError(f"{what} holds files, and none is a run's", fix) from None


def _is_leftover(file: Path) -> bool:
    """Whether a run left this file that was killed while it wrote its first status."""
    return file.name == LOCK_NAME or is_part_of(file.name, "status.json") or file.name.startswith(SWAP_PREFIX)


def refuse_folder_at_work(folder: Path, what: str) -> None:
    """Check early and without leaving a file; `take_folder` decides."""
    # Without the file, the lock on the folder is left; a folder that was never a run's has no status.
    if (folder / LOCK_NAME).exists():
        take_folder(folder, what, create=False).release()
    elif (folder / "status.json").exists():
        with contextlib.suppress(OSError):
            wanted = f"another run is at work in {what}"
            FileLock(folder / "status.json", wanted, create=False, with_folder=True).release()


def is_at_work(folder: Path) -> bool:
    """Whether a run has not ended; False for a folder that this process may only read."""
    try:
        refuse_folder_at_work(folder, str(folder))
    except UserError as why:
        return isinstance(why, Held)
    return False


def take_folder(folder: Path, what: str, *, create: bool = True) -> FileLock:
    """Lock a folder until the lock is released or the process ends, however it ends."""
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / LOCK_NAME, f"another run is at work in {what}", create=create, with_folder=True)
    except FileExistsError:
        raise UserError(f"{what} is a file, or a link that leads nowhere", "name a folder") from None
    except OSError as error:
        raise UserError(
            f"{what} cannot be locked for one run alone ({error.strerror})",
            "make room, or name a folder that you may write, on a file system with file locks",
        ) from None


def is_taken_by_this_launch(folder: Path) -> bool:
    """Whether the launch of this rank was the last to take the folder."""
    holder = read_holder(folder / LOCK_NAME)
    return (holder.get("host"), holder.get("launcher_pid")) == (HOST, LAUNCHER_PID)
