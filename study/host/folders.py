"""Check the folders that a run writes to, and the process of a command; errors take one line."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.config.text import format_bytes
from study.records.lock import HOST, SWAP_PREFIX, FileLock, LockHeldError, read_lock_owner


def content_digest(file: Path) -> str:
    """Return a digest that detects accidental changes, not deliberate ones, five times as fast as SHA-256."""
    import xxhash

    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        block = memoryview(bytearray(1 << 20))
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def with_digest(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with a new digest of its content; equal to the document if that was not modified."""
    plain = json.loads(json.dumps({key: value for key, value in document.items() if key != "own_sha256"}))
    return plain | {"own_sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` if the block succeeds; for one process at a time."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


# Beginning of the line that announces the compilation of an operator; a sweep prints it, too.
COMPILES = "compiling DeepSpeed's operator"


def resolve_path(text: str) -> Path:
    """Return the folder of a path, without reading it: `new/..` is its parent."""
    try:
        folder = Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: no user with a home folder has that name here", "write the full path") from None
    return folder.resolve() if ".." in folder.parts else folder


def nearest_existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def check_disk_space(
    folder: Path,
    wanted_bytes: float,
    what: str,
    fix: str = "free some, or set ZERO_STUDY_CACHE to a folder on a larger disk",
    error: type[UserError] = UserError,
) -> None:
    """Raise an error if the disk lacks space. By default a sweep tries again, because space may become free."""
    free = shutil.disk_usage(nearest_existing(folder)).free
    if free < wanted_bytes:
        raise error(f"{what} needs {format_bytes(wanted_bytes)}, and {folder} has {format_bytes(free)} free", fix)


def folder_argument(text: str) -> Path:
    """Return a folder for argparse; an empty text is an error, as it would mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} has characters that cannot be printed on a line")
    folder = resolve_path(text)
    if folder.exists() and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return folder


def cache_directory() -> Path:
    """Return the folder of initial weights and operators: ZERO_STUDY_CACHE, if it is not empty, or a default."""
    fix = "set ZERO_STUDY_CACHE to a folder that you may write"
    if variable := os.environ.get("ZERO_STUDY_CACHE"):
        folder = resolve_path(variable)
    # The standard ignores relative paths: https://specifications.freedesktop.org/basedir-spec
    elif (xdg := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        folder = xdg / "zero-study"
    elif (home := home_folder()) is not None:
        folder = home / ".cache" / "zero-study"
    else:
        raise UserError("the cache has no place: this user has no home folder", fix)
    check_writable(folder, f"the cache {folder}", fix)
    return folder


def home_folder() -> Path | None:
    """Return the user's home; None without one, as for a user ID that is unknown in a container."""
    if home := os.environ.get("HOME"):
        return Path(home)
    # The Python of a browser, which the calculator uses, has no such module.
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def check_writable(folder: Path, what: str, fix: str) -> None:
    """Raise UserError if a folder cannot be created or written. An unnamed file tests its nearest existing parent."""
    try:
        existing = nearest_existing(folder)
        if not existing.is_dir():
            raise UserError(f"{what} cannot be a folder: {existing} is a file", fix)
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"{what} is not writable ({error.strerror})", fix) from None


def check_process() -> None:
    """Make both streams write any character; raise UserError for a wrong OMP_NUM_THREADS."""
    for stream in (sys.stdout, sys.stderr):
        # Characters outside the terminal's encoding are written as escapes.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Accelerate would end in a traceback.
    if not re.fullmatch(r"\d+", threads := os.environ.get("OMP_NUM_THREADS", "1")):
        raise UserError(f"OMP_NUM_THREADS is {threads[:20]!r}, not a whole number", "unset it, or set it to one")


# Swap folders of NVMe strategies: each process creates one, and deletes only that one. The user's folder may have other
# content: only folders with this project's prefix and marker are deleted, if no live process has locked the marker.
_MARKER = "made-by-zero-study.lock"


@contextlib.contextmanager
def swap_folder(nvme_folder: Path) -> Iterator[Path]:
    """Yield a new folder for this process, which is deleted at the end."""
    nvme_folder = nvme_folder.resolve()
    nvme_folder.mkdir(parents=True, exist_ok=True)
    remove_stale_swap_folders(nvme_folder)
    folder = Path(tempfile.mkdtemp(prefix=SWAP_PREFIX, dir=nvme_folder))
    # It is locked before it gets its name, so that every visible marker is locked.
    unnamed = folder / f"{_MARKER}.new"
    with FileLock(unnamed, f"{folder} is in use"):
        unnamed.rename(folder / _MARKER)
        try:
            yield folder
        finally:
            _remove(folder)
            # Another rank of this run may have failed for the same reason, such as a full disk.
            remove_stale_swap_folders(nvme_folder)


def remove_stale_swap_folders(nvme_folder: Path) -> None:
    """Remove the files of killed processes, which are as large as the model."""
    for folder in nvme_folder.glob(f"{SWAP_PREFIX}*"):
        marker = folder / _MARKER
        # On a shared file system a lock may be visible only on its machine.
        if folder.is_symlink() or read_lock_owner(marker).get("host") != HOST:
            continue
        with (
            contextlib.suppress(LockHeldError, OSError),
            FileLock(marker, f"{folder} is in use", create=False, patience_s=0),
        ):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Delete the folder, its marker last, so that a later attempt finds the rest."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _MARKER:
                entry.unlink()
        if [entry.name for entry in folder.iterdir()] == [_MARKER]:
            (folder / _MARKER).unlink()
            folder.rmdir()
