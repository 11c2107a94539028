"""The folder that a run works in: that it is no one else's, and that one run at a time is at work there."""

from __future__ import annotations

from pathlib import Path

from study.errors import UserError
from study.record.directory import is_part_of, read_status
from study.record.lock import HOST, LAUNCHER_PID, FileLock, Held, read_holder
from study.record.schema import RecordError

LOCK_NAME = ".zero-study-run.lock"
CHECKPOINTS = "checkpoints"
# A run may swap to the very folder that it writes to.
SWAP_PREFIX = "zero-study-swap-"


def refuse_files_of_others(folder: Path, what: str, fix: str) -> None:
    """A folder with files and without a run's status.json is not a run's: nothing is written or deleted there."""
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
    """What a run leaves that was killed before its very first status was whole."""
    return file.name == LOCK_NAME or is_part_of(file.name, "status.json") or file.name.startswith(SWAP_PREFIX)


def refuse_folder_at_work(folder: Path, what: str) -> None:
    """A first look, which leaves no file; `take_folder` decides."""
    if (folder / LOCK_NAME).exists():
        take_folder(folder, what, create=False).release()


def is_at_work(folder: Path) -> bool:
    """A run that has not ended, as far as this process may ask: a folder that it may only read tells nothing."""
    try:
        refuse_folder_at_work(folder, str(folder))
    except UserError as why:
        return isinstance(why, Held)
    return False


def take_folder(folder: Path, what: str, *, create: bool = True) -> FileLock:
    """Held until it is released or the process ends, however it ends."""
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / LOCK_NAME, f"another run is at work in {what}", create=create)
    except FileExistsError:
        raise UserError(f"{what} is a file, or a link that leads nowhere", "name a folder") from None
    except OSError as error:
        raise UserError(
            f"{what} cannot be locked for one run alone ({error.strerror})",
            "make room, or name a folder that you may write, on a drive with file locks",
        ) from None


def is_taken_by_this_launch(folder: Path) -> bool:
    """For the ranks beside the main process: is it theirs that was the last to take the folder?"""
    holder = read_holder(folder / LOCK_NAME)
    return (holder.get("host"), holder.get("launcher_pid")) == (HOST, LAUNCHER_PID)
