"""Folders that a run writes to: refused in one line where it could not."""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import tempfile
from pathlib import Path

from study.errors import UserError

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
