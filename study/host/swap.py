"""The folders that NVMe strategies swap into: each process makes one of its own, and deletes that one alone.

The folder that a user names may hold whatever it holds. What is deleted there has this project's prefix and marker, and
nobody alive holds the marker's lock.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from study.errors import Unsupported
from study.host.folders import free_bytes
from study.host.memory import GIB
from study.record.folder import SWAP_PREFIX
from study.record.lock import HOST, FileLock, Held, read_holder

_MARKER = "made-by-zero-study.lock"


def refuse_full_drive(drive: Path, wanted_bytes: float, what: str) -> None:
    """DeepSpeed aborts the process where its writes fail. What dead runs left there is cleared away first."""
    remove_left_folders(drive)
    free = free_bytes(drive)
    if free < wanted_bytes:
        raise Unsupported(
            f"--nvme_path {drive} has {free / GIB:.1f} GiB free, and {what} takes {wanted_bytes / GIB:.1f} GiB there",
            "name a folder on a larger drive, or make room",
        )


@contextlib.contextmanager
def swap_folder(drive: Path) -> Iterator[Path]:
    """A new folder, this process's own until it ends."""
    drive = drive.resolve()
    drive.mkdir(parents=True, exist_ok=True)
    remove_left_folders(drive)
    folder = Path(tempfile.mkdtemp(prefix=SWAP_PREFIX, dir=drive))
    # Locked before it has its name: who finds the marker finds it held.
    unnamed = folder / f"{_MARKER}.new"
    with FileLock(unnamed, f"{folder} is in use"):
        unnamed.rename(folder / _MARKER)
        try:
            yield folder
        finally:
            _remove(folder)
            # Another rank of this run may have died of what ends this one, such as a full drive.
            remove_left_folders(drive)


def remove_left_folders(drive: Path) -> None:
    """A killed process leaves its files, and they are as large as the model."""
    for folder in drive.glob(f"{SWAP_PREFIX}*"):
        marker = folder / _MARKER
        # On a drive that machines share, a lock may be known to its own machine alone.
        if folder.is_symlink() or read_holder(marker).get("host") != HOST:
            continue
        with contextlib.suppress(Held, OSError), FileLock(marker, f"{folder} is in use", create=False, patience_s=0):
            _remove(folder)


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
