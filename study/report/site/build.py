"""`study report`: every notebook over the records, and one page that opens with what they found."""

from __future__ import annotations

import base64
import errno
import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbconvert
import nbformat
import pandas as pd
import papermill
from jinja2 import FileSystemLoader
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from markupsafe import Markup
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from study.config.errors import UserError
from study.config.strategies import REPOSITORY
from study.records.frames import RUNS_FILE, STEPS_FILE, Records, write_parquet
from study.report.questions import QUESTIONS, answers
from study.report.questions.claims import Resting
from study.report.questions.question import Answer, Question
from study.report.questions.time import noise_fact
from study.report.site import page
from study.report.site.place import FIGURES, LIST, check_place, put_in_place
from study.report.site.show import as_png

START_LIMIT_S = 120
_ERROR_TAG = "papermill-error-cell-tag"


class NotebookFailed(Exception):
    """A cell raised, ran out of time or lost its kernel; what ran before it is in the written notebook."""


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the running Python, whatever the `python3` is that Jupyter knows on this machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
                   "--HistoryManager.enabled=False", "--log-level=CRITICAL"]  # fmt: skip
        environment = {"PYTHONHASHSEED": "0", "IPYTHONDIR": _no_profile().name}
        return KernelSpec(argv=command, language="python", display_name="Python 3", env=environment)


@functools.cache
def _no_profile() -> tempfile.TemporaryDirectory[str]:
    """A user's own would run its start-up files in every notebook, and may be where nothing can be written."""
    return tempfile.TemporaryDirectory(prefix="zero-study-ipython-")


def execute(notebook: Path, output: Path, parameters: Mapping[str, Any], folder: Path, time_limit_s: float) -> None:
    """Runs `notebook` with `folder` as its working directory and writes it, with its outputs, to `output`."""
    known = papermill.inspect_notebook(str(notebook))
    if unknown := sorted(set(parameters) - set(known)):
        raise UserError(
            f"{notebook.name} has no parameter {', '.join(unknown)}", f"it knows {', '.join(sorted(known)) or 'none'}"
        )
    deadline = time.monotonic() + time_limit_s
    try:
        papermill.execute_notebook(
            str(notebook), str(output), parameters=dict(parameters), progress_bar=False,
            # Not `cwd`: that moves this whole process, and notebooks run side by side.
            resources={"metadata": {"path": str(folder)}},
            start_timeout=START_LIMIT_S, kernel_manager_class=ThisInterpreter,
            timeout_func=lambda _cell: max(1, int(deadline - time.monotonic())),
        )  # fmt: skip
    except PapermillExecutionError as error:
        raise NotebookFailed(f"{_place(output, error.cell_index)}: {error.ename}: {error.evalue}") from None
    except CellTimeoutError:
        raise NotebookFailed(f"{_place(output)}: the notebook has had its {time_limit_s:.0f} s") from None
    except DeadKernelError:
        raise NotebookFailed(f"{_place(output)}: the kernel died") from None
    finally:
        if output.exists():
            _settle(output)


def _place(output: Path, index: int | None = None) -> str:
    """The cell that failed by number, name and first line: by papermill's index, else the last one it started."""
    cells = _own_cells(nbformat.read(output, as_version=4))
    if index is None:
        started = [place for place, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("start_time")]
        index = started[-1] if started else 0
    cell = cells[index]
    first_line = next(iter(cell.source.splitlines()), "")
    return f"cell {index + 1} ({cell.id}, `{first_line[:80]}`)"


def _own_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Without the two that papermill puts before one that failed."""
    return [cell for cell in notebook.cells if _ERROR_TAG not in cell.metadata.get("tags", [])]


def _settle(output: Path) -> None:
    """Leaves out clocks, paths and random names: the same records give the same notebook."""
    notebook = nbformat.read(output, as_version=4)
    notebook.metadata.pop("papermill", None)
    notebook.cells = _own_cells(notebook)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = "injected-parameters"
    nbformat.write(notebook, output)


NOTEBOOKS = REPOSITORY / "notebooks"
TIME_LIMIT_S = 600.0
# A kernel keeps one core busy, and half a gigabyte.
_AT_ONCE = 2


def build(
    records: Records, suite: str, output: Path, *, resting: Sequence[Resting] = (), notebooks: Path = NOTEBOOKS,
    time_limit_s: float = TIME_LIMIT_S, say: Callable[[str], None] = lambda _line: None, facts: Sequence[str] = (),
) -> dict[str, str]:  # fmt: skip
    """Builds the report beside `output` and then puts it there; returns the notebooks that broke, and where. `facts`
    stand at its head, and are in no record."""
    if records.runs.empty and not records.refused and not records.remaining:
        raise UserError(f"{suite} has no record", f"run: study run {suite}")
    found = answers(records, resting)
    names = list(dict.fromkeys(question.notebook for question in found if question.notebook))
    try:
        check_place(output, _wanted(names))
        # On the same drive, also where the output is a link to a folder.
        target = output.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    except OSError as error:
        raise UserError(f"--output {output} is not writable ({error.strerror})", "name another") from None
    try:
        write_parquet(records, folder)
        content: dict[str, Any] = {
            "facts": [*facts, *_facts(records)],
            "cards": [_card(question, answer, records) for question, answer in found.items()],
            "unanswered": [question for question in QUESTIONS if question not in found],
            "refused": records.refused,
            "failures": _run_notebooks(names, notebooks, folder, time_limit_s, say),
        }
        _write_pages(names, suite, folder, content)
        put_in_place(folder, output)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"the report cannot be written to {output} ({error.strerror})", "make room there") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return dict(content["failures"])


def _wanted(names: Sequence[str]) -> set[str]:
    """What is known before notebooks run; their figures are looked at when the report is put in place."""
    return {"index.html", "summary.md", RUNS_FILE, STEPS_FILE, LIST, *((FIGURES,) if names else ()),
            *(f"{name}.{kind}" for name in names for kind in ("ipynb", "html"))}  # fmt: skip


def _card(question: Question, answer: Answer, records: Records) -> page.Card:
    drawings = question.figures[question.first_figure](records) if question.first_figure else []
    tables = {} if question.notebook else {name: make(records) for name, make in question.tables.items()}
    return page.Card(
        question, answer, {name: table for name, table in tables.items() if not table.empty},
        picture=base64.b64encode(as_png(drawings[0].figure)).decode() if drawings else "",
        alt=drawings[0].alt if drawings else "",
    )  # fmt: skip


def _run_notebooks(
    names: Sequence[str], notebooks: Path, folder: Path, time_limit_s: float, say: Callable[[str], None]
) -> dict[str, str]:
    def run(name: str) -> str:
        parameters = {"records_dir": ".", "figures_dir": FIGURES}
        failure = ""
        try:
            execute(notebooks / f"{name}.ipynb", folder / f"{name}.ipynb", parameters, folder, time_limit_s)
        except NotebookFailed as error:
            failure = str(error)
        say(f"{name}: {f'failed in {failure}' if failure else 'done'}")
        return failure

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {name: failure for name, failure in zip(names, pool.map(run, names), strict=True) if failure}


def _write_pages(names: Sequence[str], suite: str, folder: Path, content: Mapping[str, Any]) -> None:
    notebooks = {name: nbformat.read(folder / f"{name}.ipynb", as_version=4) for name in names}
    # The first line of the first cell.
    titles = {name: notebook.cells[0].source.partition("\n")[0].lstrip("# ") for name, notebook in notebooks.items()}
    pages = {"index": suite, **titles}
    texts = {
        "index.html": page.page_html("index.html.j2", suite, pages, "index", **content),
        "summary.md": page.summary_markdown(suite, **content),
    }
    for name, notebook in notebooks.items():
        body = body_of(notebook)
        failure = content["failures"].get(name)
        texts[f"{name}.html"] = page.page_html("notebook.html.j2", suite, pages, name, body=body, failure=failure)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


def body_of(notebook: nbformat.NotebookNode) -> Markup:
    """A notebook as it ran, for a page around it."""
    exporter = nbconvert.HTMLExporter(
        template_name="basic", template_file="cells.html.j2", extra_loaders=[FileSystemLoader(page.TEMPLATES)],
        exclude_input_prompt=True, exclude_output_prompt=True,
    )  # fmt: skip
    return Markup(exporter.from_notebook_node(notebook)[0])


def _facts(records: Records) -> list[str]:
    """What was run, on what and when, in a line."""
    runs = records.runs
    if runs.empty:
        return ["no run yet" if records.remaining and not records.refused else "no readable run"]
    states = runs["status_state"].value_counts()
    others = "".join(f", {count} {state}" for state, count in states.items() if state != "ok")
    days = sorted({str(start)[:10] for start in runs["status_started_at"].dropna()})
    return [
        f"{len(runs)} runs{others}",
        *_few(runs["cpu"]),
        *("no accelerator" if names == "[]" else ", ".join(json.loads(names)) for names in _few(runs["devices"])),
        *(f"torch {version}" for version in _few(runs["torch_version"])),
        *(f"DeepSpeed {version}" for version in _few(runs["deepspeed_version"])),
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        *noise_fact(records),
    ]


def _few(values: pd.Series) -> list[str]:
    """The two most frequent: a page's head is no place for a list."""
    return [str(value) for value in values.dropna().value_counts().index[:2]]
