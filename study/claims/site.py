"""The page of all claims: the notebook as it ran, in one file that needs nothing outside itself."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat

from study.errors import UserError
from study.report.site.build import NOTEBOOKS, TIME_LIMIT_S, body_of
from study.report.site.execute import NotebookFailed, execute
from study.report.site.page import page_html
from study.spec.strategies import REPOSITORY

NOTEBOOK = NOTEBOOKS / "claims.ipynb"
# In a page that was written here, and so may be written over.
_MADE_HERE = "as <code>notebooks/claims.ipynb</code> ran"


def write_page(file: Path, reports_dir: Path = REPOSITORY / "reports") -> None:
    _check_place(file)
    inside = file.resolve().is_relative_to(REPOSITORY.resolve())
    links_from = os.path.relpath(file.resolve().parent, REPOSITORY.resolve()) if inside else ""
    with tempfile.TemporaryDirectory(prefix="zero-study-claims-") as folder:
        ran = Path(folder) / NOTEBOOK.name
        parameters = {"reports_dir": str(reports_dir.resolve()), "links_from": links_from}
        try:
            execute(NOTEBOOK, ran, parameters, Path(folder), TIME_LIMIT_S)
        except NotebookFailed as error:
            raise UserError(f"notebooks/{NOTEBOOK.name} did not finish: {error}", "fix what it says") from None
        notebook = nbformat.read(ran, as_version=4)
    # It would name a place of this machine.
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    title = notebook.cells[0].source.partition("\n")[0].lstrip("# ")
    text = page_html("claims.html.j2", "claims", {file.stem: title}, file.stem, body=body_of(notebook))
    beside = file.with_name(f".{file.name}.building")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"--page {file} is not writable ({error.strerror})", "name another file") from None


def _check_place(file: Path) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"--page {file} is no place for a file", "name a file in a folder that is there")
    try:
        if file.exists() and _MADE_HERE not in file.read_text(encoding="utf-8"):
            raise UserError(f"--page {file} is there, and no page of claims", "name another file, or remove it")
    except (OSError, ValueError):
        raise UserError(f"--page {file} is there, and not readable", "name another file, or remove it") from None
