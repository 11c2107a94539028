"""Where a report goes: it is put there whole, and a file that no report made is never deleted and never written over.

A report lists its files with their digests. What the list does not name, or what has changed since, is somebody's.
"""

from __future__ import annotations

import base64
import fcntl
import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.parquet as pq

from study.errors import UserError
from study.report.records.frames import RUNS_FILE, STEPS_FILE
from study.report.records.rows import STEP_COLUMNS

FIGURES = "figures"
LIST = "files.json"
_MADE_BY = "study report"
_MEND = "move it elsewhere, or name another folder"
# What Jupyter and a file browser leave in any folder they have shown.
_LEFT_BY_OTHERS = {".DS_Store", ".ipynb_checkpoints"}
# Of every page since the first: nothing is loaded from outside.
_PAGE_MARK = b"content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\""
_INDEX_TITLE = re.compile(r"<title>(.*) · zero-study</title>")


def write_list(folder: Path) -> None:
    files = {name: _sha256(file) for name, file in sorted(_plain_files(folder).items()) if name != LIST}
    text = json.dumps({"made_by": _MADE_BY, "files": files}, indent=1)
    (folder / LIST).write_text(text + "\n", encoding="utf-8")


def place_of(output: Path) -> Path:
    """A link to a folder stays one, and `.` has no name to put a report under."""
    return output.resolve() if output.is_symlink() or output.name in ("", "..") else output


def check_place(output: Path, wanted: Iterable[str], built: Path | None = None) -> None:
    """Refuses what a report may not replace; `built` is the folder with the wanted files, once there is one."""
    if not os.path.lexists(output):
        return
    if not output.is_dir():
        raise UserError(f"--output {output} is a file", "name a folder")
    own = own_files(output)
    foreign = sorted(file.name for file in output.iterdir() if file.name not in own | _LEFT_BY_OTHERS)
    # A folder that is no report might be anybody's: a home, a repository.
    if foreign and not own:
        raise UserError(
            f"--output {output} holds {foreign[0]}, which is no part of a report", "name a folder of its own"
        )
    for name in sorted(wanted):
        place = output / name
        if name == FIGURES:
            in_the_way = os.path.lexists(place) and not _is_real_folder(place)
        else:
            in_the_way = name not in own and os.path.lexists(place) and not (built and _same(place, built / name))
        if in_the_way:
            raise UserError(f"--output {output} holds {name}, which is not as a report wrote it", _MEND)


def put_in_place(folder: Path, output: Path, say: Callable[[str], None]) -> None:
    """Two renames: a reader sees the old report or the new one, and never half of one."""
    write_list(folder)
    with _alone_in(output.parent):
        _bring_back(output, say)
        wanted = _plain_files(folder)
        check_place(output, {*wanted, *((FIGURES,) if (folder / FIGURES).exists() else ())}, folder)
        before = Path(tempfile.mkdtemp(prefix=f".{output.name}.before-", dir=output.parent))
        try:
            if output.exists():
                output.replace(before / output.name)
            folder.replace(output)
        except OSError as error:
            raise UserError(f"--output {output} cannot be replaced ({error.strerror})", "name another") from None
        finally:
            _settle(before, output, say)


def finish_earlier(output: Path, say: Callable[[str], None]) -> None:
    """What a killed process was about to do, so that nothing of the user's stays hidden."""
    output = place_of(output)
    # Where that cannot be done, the build says so.
    with suppress(OSError), _alone_in(output.parent):
        _bring_back(output, say)


def own_files(folder: Path) -> set[str]:
    """The files in it that a report made and nobody has changed, by name; never a link, nor anything behind one."""
    files = _plain_files(folder)
    listed = _listed(files[LIST]) if LIST in files else None
    if listed is None:
        return _recognised(files)
    # Tables are made again by hand too, with `python -m study.report.records.frames`.
    return {LIST} | {
        name for name, file in files.items()
        if (name in listed and listed[name] == _sha256(file)) or _is_table(name, file)
    }  # fmt: skip


def _plain_files(folder: Path) -> dict[str, Path]:
    """At the two places where a report has files."""
    places = [folder, *([folder / FIGURES] if _is_real_folder(folder / FIGURES) else [])]
    return {
        file.relative_to(folder).as_posix(): file
        for place in places for file in place.iterdir() if file.is_file() and not file.is_symlink()
    }  # fmt: skip


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _listed(file: Path) -> dict[str, str] | None:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("made_by") != _MADE_BY:
        return None
    files = document.get("files")
    return files if isinstance(files, dict) else None


def _recognised(files: dict[str, Path]) -> set[str]:
    """Of a report without a list, which earlier versions made: what has their marks, or is copied in a page."""
    own = {name for name, file in files.items() if _has_mark(name, file)}
    if "index.html" not in own:
        return own
    index = files["index.html"].read_text(encoding="utf-8", errors="replace")
    title = _INDEX_TITLE.search(index)
    if title and "summary.md" in files and _starts_with(files["summary.md"], f"# {title[1]}\n".encode()):
        own.add("summary.md")
    pages = "".join(files[name].read_text(encoding="utf-8", errors="replace") for name in own if name.endswith(".html"))
    for name, file in files.items():
        vector = name.removesuffix(".png") + ".svg"
        if not (name.startswith(f"{FIGURES}/") and name.endswith(".png")):
            continue
        if base64.b64encode(file.read_bytes()).decode() in pages:
            own.add(name)
            if vector in files and b'<g id="figure_1">' in files[vector].read_bytes():
                own.add(vector)
    return own


def _has_mark(name: str, file: Path) -> bool:
    if "/" in name:
        return False
    if file.suffix == ".html":
        return _PAGE_MARK in file.read_bytes()
    if file.suffix == ".ipynb":
        return b'"id": "injected-parameters"' in file.read_bytes()
    return _is_table(name, file)


def _is_table(name: str, file: Path) -> bool:
    if name not in (RUNS_FILE, STEPS_FILE):
        return False
    try:
        schema = pq.read_schema(file)
    except (OSError, ValueError):
        return False
    return "run" in schema.names if name == RUNS_FILE else set(STEP_COLUMNS) <= set(schema.names)


def _starts_with(file: Path, start: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(start)) == start


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and not one.is_symlink() and one.read_bytes() == other.read_bytes()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two reports that end at once would move each other's folders. The lock is the kernel's, and leaves no file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network drives have no locks.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _bring_back(output: Path, say: Callable[[str], None]) -> None:
    for before in output.parent.glob(f".{glob.escape(output.name)}.before-*"):
        if _is_real_folder(before):
            _settle(before, output, say)


def _settle(before: Path, output: Path, say: Callable[[str], None]) -> None:
    """Of a report that was set aside: back where there is no new one, else what is not its own moves to the new one."""
    old = before / output.name
    if _is_real_folder(old) and not os.path.lexists(output):
        old.replace(output)
    elif _is_real_folder(old):
        own = own_files(old)
        for name in _others(old, own):
            with suppress(OSError):
                if not os.path.lexists(output / name):
                    (output / name).parent.mkdir(exist_ok=True)
                    (old / name).rename(output / name)
        # The list goes last: what is left by a process that is killed here is still known.
        for name in sorted(own, key=lambda name: name == LIST):
            with suppress(OSError):
                (old / name).unlink()
        for folder in (old / FIGURES, old):
            with suppress(OSError):
                folder.rmdir()
    with suppress(OSError):
        before.rmdir()
    if before.exists():
        say(f"notice: what was in {output} and could not stay there is in {before}")


def _others(folder: Path, own: set[str]) -> list[str]:
    figures = folder / FIGURES
    inside = [f"{FIGURES}/{file.name}" for file in figures.iterdir()] if _is_real_folder(figures) else []
    top = [file.name for file in folder.iterdir() if not (file == figures and _is_real_folder(figures))]
    return [name for name in (*top, *inside) if name not in own]
