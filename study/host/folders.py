"""Folders that a run writes to: refused in one line where it could not."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import pwd
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study.config.errors import Unsupported, UserError
from study.host.memory import GIB
from study.records.lock import HOST, SWAP_PREFIX, FileLock, Held, read_holder


def content_digest(file: Path) -> str:
    """For what a disk, a copy or a hand may have changed. Against whoever wants to deceive it is none.

    Five times as fast as SHA-256 on a processor with instructions for that, and faster than any drive.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        block = memoryview(bytearray(1 << 20))
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """With a digest of what it says, instead of one that it has. It is as it was when that changes nothing."""
    plain = json.loads(json.dumps({key: value for key, value in document.items() if key != "own_sha256"}))
    return plain | {"own_sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """An empty folder beside it, which takes its name, and its place, when the block ends well.

    One process at a time. What a killed one left is deleted: half of a large model would fill the disk.
    """
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


# How the line begins that the compilation of an operator has on the terminal; a sweep passes it on.
COMPILES = "compiling DeepSpeed's operator"


def folder_named(text: str) -> Path:
    """The folder that is meant, before anything is asked of it: `new/..` is not a folder of its own."""
    try:
        folder = Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: nobody's home folder is known by that name here", "write the whole path") from None
    return folder.resolve() if ".." in folder.parts else folder


def free_bytes(folder: Path) -> int:
    """On its disk, whether or not the folder is there yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def refuse_full_disk(folder: Path, wanted_bytes: float, what: str) -> None:
    """Of the cache. Not `Unsupported`, which a sweep would take for a final answer: tomorrow there may be room."""
    if (free := free_bytes(folder)) < wanted_bytes:
        raise UserError(
            f"{what} takes {wanted_bytes / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free",
            "make room there, or let ZERO_STUDY_CACHE name a folder on a larger drive",
        )


def folder_argument(text: str) -> Path:
    """As argparse takes it. Left empty, as by a variable that is not set, it would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} holds what cannot be printed on a line")
    folder = folder_named(text)
    # Those of Path raise where a name is too long, or a folder on the way may not be entered.
    if os.path.exists(folder) and not os.path.isdir(folder):  # noqa: PTH110, PTH112
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return folder


def cache_directory() -> Path:
    """Where initial weights are kept between runs; ZERO_STUDY_CACHE moves it. An empty variable is none."""
    fix = "let ZERO_STUDY_CACHE name a folder that you may write"
    if own := os.environ.get("ZERO_STUDY_CACHE"):
        folder = folder_named(own)
    # A relative path is to be ignored there: https://specifications.freedesktop.org/basedir-spec
    elif (xdg := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        folder = xdg / "zero-study"
    elif (home := home_folder()) is not None:
        folder = home / ".cache" / "zero-study"
    else:
        raise UserError("the cache has no place: this user has no home folder", fix)
    refuse_unwritable(folder, f"the cache {folder}", fix)
    return folder


def home_folder() -> Path | None:
    """None where nobody knows one, as of a user whom a container was only given the number of."""
    try:
        return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def refuse_unwritable(folder: Path, what: str, fix: str) -> None:
    """Tried in the nearest folder that exists, with a file that has no name: a refused request leaves nothing."""
    try:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise UserError(f"{what} cannot be a folder: {existing} is a file", fix)
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"{what} is not writable ({error.strerror})", fix) from None


# What a command needs of its own process before it does anything: three streams, and a folder to stand in.


def check_process() -> None:
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # Closed, as by `>&-`. The next file to be opened would get its number, and what is printed.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
        # What a terminal of a narrow encoding cannot print is written as its number.
        stream = getattr(sys, name)
        if descriptor and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        Path.cwd()
    except OSError as error:
        # Left to itself the arithmetic library of torch ends the process, and says that it is not there.
        raise UserError(
            f"the folder in which this was started is not there ({error.strerror})", "change to one that is"
        ) from None
    # Accelerate reads it as a number, and would end in a traceback.
    if not re.fullmatch(r"\d+", threads := os.environ.get("OMP_NUM_THREADS", "1")):
        raise UserError(f"OMP_NUM_THREADS is {threads[:20]!r}, which is no number", "unset it, or set it to one")


# The folders that NVMe strategies swap into: each process makes one of its own, and deletes that one alone.
# The folder that a user names may hold whatever it holds. What is deleted there has this project's prefix and marker,
# and nobody alive holds the marker's lock.

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
