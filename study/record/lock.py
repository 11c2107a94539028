"""A lock on a file that the kernel holds for one process, and that dies with it."""

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

from study.errors import UserError
from study.record.directory import utc_now

# Read once: an orphan has another parent. Every rank of a launch on one machine has the same.
LAUNCHER_PID = os.getppid()
# Locks lie in folders that are handed on, and a host's name is nobody's business there.


def digest_of_host(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


HOST = digest_of_host(platform.node())
_open_descriptors: set[int] = set()


class Held(UserError):
    """Another process holds the lock: who it is, as far as it has written that by now."""

    def __init__(self, what: str, holder: dict[str, Any]):
        if "pid" not in holder:
            super().__init__(f"{what}: it has just begun", "wait for it, or name another folder")
            return
        where = "this machine" if holder.get("host") == HOST else "another machine"
        super().__init__(
            f"{what}: pid {holder['pid']} on {where}, since {holder.get('started_at')}",
            f"wait for it, end it (kill {holder['pid']}), or name another folder",
        )


def read_holder(file: Path) -> dict[str, Any]:
    """What the last holder wrote; empty where it has not yet, or not what belongs there."""
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


class FileLock(contextlib.AbstractContextManager["FileLock"]):
    """The file stays when the lock is gone: to delete it would let two processes lock two files of one name."""

    def __init__(self, file: Path, what: str, *, create: bool = True, shared: bool = False, patience_s: float = 0.5):
        """Raises Held where another holds it, and OSError where the file system lets nobody lock.

        With `create` the file says from now on who holds it. All who want it shared may hold it together. Whoever asks
        whether a lock is free takes it for an instant, hence the patience.
        """
        # Not inheritable, as every descriptor that Python opens: a program that is started does not hold the lock.
        self._kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o644)
        _open_descriptors.add(self._descriptor)
        deadline = time.monotonic() + patience_s
        try:
            while not self._is_locked():
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

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._descriptor, self._kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        if self._descriptor in _open_descriptors:
            _open_descriptors.remove(self._descriptor)
            os.close(self._descriptor)

    def __exit__(self, *error: object) -> None:
        self.release()


def _let_go_in_a_child() -> None:
    """A forked process would keep the lock when its parent is gone. To close releases nothing that the parent holds."""
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_let_go_in_a_child)
