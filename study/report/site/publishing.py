"""The folder of a report: it replaces its own files, and never a file that no report made.

Its folder lists its files with their digests, in files.json the records, the summary and the figures of the summary,
which git keeps; in pages.json the pages, notebooks and images, which git ignores. A file that neither list names, or
that has changed since, is a user's. While files are replaced the lists have the old and the new ones: a report that is
killed there can be rebuilt.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow.parquet as pq

from study.config.errors import UserError
from study.records.frames import RUNS_FILE, STEPS_FILE

# Figures of the summary; other figures, and every figure as PNG.
FIGURES, IMAGES = "figures", "images"
# Sentences of the report's authors (study/report/site/reading.py), which no report replaces.
READING = "reading.md"
LIST, PAGES_LIST = "files.json", "pages.json"
# Files of a report that git ignores and `make reports` builds.
_PAGES = ("*.html", "*.ipynb", f"{IMAGES}/*")
_MADE_BY = "study report"
# A report can be rebuilt from copies of its tables alone: these columns identify them.
_TABLES = {RUNS_FILE: {"run", "status_state"}, STEPS_FILE: {"run", "step", "step_time_s"}}
# SHA-256 of each file by its name; while a report is replaced, two of them, separated by a space.
Digests = Mapping[str, str]


def check_place(output: Path, names: Iterable[str], built: Digests | None = None) -> None:
    """Raise UserError for files that a report may not replace; `built` has the digests of the new report's files."""
    if not os.path.lexists(output):
        return
    if not output.is_dir():
        raise UserError(f"--output {output} is a file", "name a folder")
    listed = _listed(output)
    lists = [] if listed is None else [LIST, PAGES_LIST]
    replaceable = {*_unchanged_files(output, _both(listed or {}, built or {})), *lists}
    # A folder without a report may be a home or a repository.
    foreign = sorted(file.name for file in output.iterdir() if file.name not in {*replaceable, READING})
    if listed is None and foreign:
        raise UserError(
            f"--output {output} has {foreign[0]}, and no {LIST} of a report",
            "name a separate folder, or remove the report of an earlier version",
        )
    for name in sorted(names):
        place = output / name
        is_own = _is_real_folder(place) if name in (FIGURES, IMAGES) else name in replaceable
        if os.path.lexists(place) and not is_own:
            raise UserError(
                f"--output {output} has {name}, which is not as a report wrote it",
                "move it elsewhere, or name another folder",
            )


@contextlib.contextmanager
def new_report(output: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield a folder next to `output` for a report with these files, and move them there in the end."""
    try:
        check_place(output, names)
        # On the same file system, even if the output is a link to a folder.
        target = output.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    except OSError as error:
        raise UserError(f"--output {output} is not writable ({error.strerror})", "name another") from None
    try:
        yield folder
        publish_report(folder, output)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"the report cannot be written to {output} ({error.strerror})", "make room there") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_report(folder: Path, output: Path) -> None:
    """Move each file of `folder` atomically, the first page last; then remove the other files of the earlier report."""
    new = {name: _sha256(file) for name, file in _plain_files(folder).items()}
    try:
        folders = {name.split("/")[0] for name in new if "/" in name}
        check_place(output, {*new, LIST, PAGES_LIST, *folders}, new)
        both = _both(_listed(output) or {}, new)
        output.mkdir(parents=True, exist_ok=True)
        _write_lists(both, folder, output)
        for name in sorted(new, key=lambda name: name == "index.html"):
            (output / name).parent.mkdir(exist_ok=True)
            (folder / name).replace(output / name)
        for name, file in _unchanged_files(output, both).items():
            if name not in new:
                file.unlink()
        _write_lists(new, folder, output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be replaced ({error.strerror})", "name another") from None


def _unchanged_files(folder: Path, digests: Digests) -> dict[str, Path]:
    """Return the files of the folder that a report wrote and that are unchanged since."""
    return {
        name: file
        for name, file in _plain_files(folder).items()
        if _sha256(file) in digests.get(name, "").split() or _is_table(name, file)
    }


def _plain_files(folder: Path) -> dict[str, Path]:
    """Return the files in the report's folders, without links or files behind them."""
    places = [folder, *(folder / name for name in (FIGURES, IMAGES) if _is_real_folder(folder / name))]
    return {
        file.relative_to(folder).as_posix(): file
        for place in places
        for file in place.iterdir()
        if file.is_file() and not file.is_symlink()
    }


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _listed(folder: Path) -> Digests | None:
    """Return the digests in the folder's lists; None if it has no list of a report."""
    committed = _read_list(folder / LIST)
    return None if committed is None else {**(_read_list(folder / PAGES_LIST) or {}), **committed}


def _read_list(file: Path) -> Digests | None:
    """Return the digests in a list; None if the file is not a list of a report."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        files = {name: str(digests) for name, digests in document["files"].items()}
        return files if document["made_by"] == _MADE_BY and not file.is_symlink() else None
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _both(old: Digests, new: Digests) -> Digests:
    return {name: f"{old.get(name, '')} {new.get(name, '')}".strip() for name in {**old, **new}}


def is_page(name: str) -> bool:
    """Whether a file of a report is made of its records and summary, so that git ignores it."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in _PAGES)


def _write_lists(files: Digests, folder: Path, output: Path) -> None:
    committed = {name: digests for name, digests in files.items() if not is_page(name)}
    pages = {name: digests for name, digests in files.items() if is_page(name)}
    for name, digests in ((LIST, committed), (PAGES_LIST, pages)):
        text = json.dumps({"made_by": _MADE_BY, "files": dict(sorted(digests.items()))}, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")
        (folder / name).replace(output / name)


def _is_table(name: str, file: Path) -> bool:
    try:
        return name in _TABLES and _TABLES[name] <= set(pq.read_schema(file).names)
    except (OSError, ValueError):
        return False


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
