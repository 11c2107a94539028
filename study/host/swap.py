"""The folders that NVMe strategies swap into: each process makes one of its own, and deletes that one alone.

The folder that a user names may hold whatever it holds. What is deleted there has this project's prefix and marker, and
nobody alive holds the marker's lock.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import tempfile
from pathlib import Path

from study.record.folder import SWAP_PREFIX
from study.record.lock import FileLock, read_holder, take_left

_MARKER = "made-by-zero-study.lock"


class SwapFolder:
    """A new folder, held as long as its process lives."""

    def __init__(self, path: Path, lock: FileLock):
        self.path, self._lock = path, lock

    @classmethod
    def make(cls, drive: Path) -> SwapFolder:
        drive = drive.resolve()
        drive.mkdir(parents=True, exist_ok=True)
        remove_left_folders(drive)
        path = Path(tempfile.mkdtemp(prefix=SWAP_PREFIX, dir=drive))
        # Locked before it has its name: who finds the marker finds it held.
        unnamed = path / f"{_MARKER}.new"
        lock = FileLock.take(unnamed, {})
        unnamed.rename(path / _MARKER)
        return cls(path, lock)

    def remove(self) -> None:
        _remove(self.path)
        self._lock.release()


def _is_swap_folder(path: Path) -> bool:
    return path.name.startswith(SWAP_PREFIX) and path.is_dir() and not path.is_symlink()


def remove_left_folders(drive: Path) -> None:
    """A killed process leaves its files, and they are as large as the model."""
    for folder in drive.glob(f"{SWAP_PREFIX}*"):
        marker = folder / _MARKER
        if not _is_swap_folder(folder) or not marker.is_file():
            continue
        # On a drive that machines share, a lock may be known to its own machine alone.
        if read_holder(marker).get("host") != platform.node():
            continue
        if lock := take_left(marker):
            _remove(folder)
            lock.release()


def _remove(folder: Path) -> None:
    """The marker goes last, so that what cannot be deleted now can be later."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _MARKER:
                entry.unlink()
        if [entry.name for entry in folder.iterdir()] == [_MARKER]:
            (folder / _MARKER).unlink()
            folder.rmdir()
