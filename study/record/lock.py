"""A lock on a file that the kernel holds for one process, and that dies with it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Whoever asks whether a lock is free takes it for an instant.
_PATIENCE_S = 0.5
_open_descriptors: set[int] = set()


class Held(Exception):
    """Another process holds the lock; what it wrote into the file, as far as it has by now."""

    def __init__(self, holder: Mapping[str, Any]):
        self.holder = holder
        super().__init__(f"held by {dict(holder)}")


class FileLock:
    """The file stays when the lock is gone: to delete it would let two processes lock two files of one name."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        _open_descriptors.add(descriptor)

    @classmethod
    def take(cls, file: Path, about: Mapping[str, Any]) -> FileLock:
        """Raises Held where another holds it, and OSError where the file system lets nobody lock."""
        # Not inheritable, as every descriptor that Python opens: a program that is started does not hold the lock.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(descriptor, _PATIENCE_S)
        except BaseException:
            os.close(descriptor)
            raise
        # What it says is a courtesy: on a full disk the lock is as good without.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            said = {"pid": os.getpid(), "host": platform.node(), **about}
            os.pwrite(descriptor, f"{json.dumps(said)}\n".encode(), 0)
        return cls(descriptor)

    def is_on(self, file: Path) -> bool:
        """Is it still this file that has the name?"""
        try:
            return os.path.samestat(os.fstat(self._descriptor), file.stat())
        except OSError:
            return False

    def release(self) -> None:
        if self._descriptor in _open_descriptors:
            _open_descriptors.remove(self._descriptor)
            os.close(self._descriptor)


def take_left(file: Path) -> FileLock | None:
    """The lock of a file that is there and that nobody holds any more; leaves what the file says."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        _lock(descriptor, 0)
    except (Held, OSError):
        os.close(descriptor)
        return None
    lock = FileLock(descriptor)
    if not lock.is_on(file):
        lock.release()
        return None
    return lock


def holder_of(file: Path) -> Mapping[str, Any] | None:
    """What the process says that holds the lock; None where nobody does."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        _lock(descriptor, _PATIENCE_S)
    except Held as held:
        return held.holder
    finally:
        os.close(descriptor)
    return None


def read_holder(file: Path) -> Mapping[str, Any]:
    """What the last holder wrote; empty where it has not yet, or not what belongs there."""
    try:
        return _parsed(file.read_bytes())
    except OSError:
        return {}


def _lock(descriptor: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Held(_parsed(os.pread(descriptor, 4096, 0))) from None
        time.sleep(0.05)


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _let_go_in_a_child() -> None:
    """A forked process would keep the lock when its parent is gone. To close releases nothing that the parent holds."""
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_let_go_in_a_child)
