"""`study report`: pages of questions with their figures and tables, and every notebook executed on the records."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from markupsafe import Markup
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError

from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.records.frames import RUNS_FILE, STEPS_FILE, Records, write_parquet
from study.report.document import Answer, PageSection, Picture, Question, link_html, page_html, page_markdown
from study.report.facts import ClaimRow, caption
from study.report.questions import answers
from study.report.site.publishing import FIGURES, IMAGES, LIST, new_report
from study.report.site.reading import read_reading
from study.sweep.fork_server import ForkServer

START_LIMIT_S = 120
_KERNELS = Path(__file__).with_name("kernels.py")
_STARTING = threading.Lock()
# Its name among papermill's engines.
_ENGINE = "zero-study"
_ERROR_TAG = "papermill-error-cell-tag"
# Rows of a table in a summary, which is tracked.
_MAX_ROWS = 120


class NotebookFailed(Exception):
    """A cell raised, timed out or lost its kernel; the notebook on disk has the output of the cells before it."""


class ThisInterpreter(AsyncKernelManager):
    """Kernel manager that starts the running Python, whatever kernel `python3` is on this machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """Return the kernel's command and environment."""
        options = ["-f", "{connection_file}", "--HistoryManager.enabled=False", "--log-level=CRITICAL"]
        # Notebooks run concurrently, and the first one starts the server.
        with _STARTING:
            command = _kernel_server().script_command(str(_KERNELS), options)
        # Warnings contain paths of this machine.
        environment = {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", "IPYTHONDIR": _no_profile().name}
        return KernelSpec(argv=command, language="python", display_name="Python 3", env=environment)


@functools.cache
def _no_profile() -> tempfile.TemporaryDirectory[str]:
    """Return an empty IPython profile: a user's would run its start-up files, and may be in a read-only folder."""
    return tempfile.TemporaryDirectory(prefix="zero-study-ipython-")


@functools.cache
def _kernel_server() -> ForkServer:
    """Return the server whose forks are kernels; it ends with this process."""
    server = ForkServer(program=str(_KERNELS))
    # In a process of multiprocessing, which skips the handlers of `atexit`, too.
    Finalize(None, server.close, exitpriority=1)
    return server


class _SavedAtTheEnd(NBClientEngine):
    """Papermill's engine, which writes the notebook before and after each cell, with all images until then."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: NotebookExecutionManager, kernel_name: str, **options: Any) -> Any:
        """Execute the cells; papermill writes the notebook when they have ended, and when one of them breaks off."""
        output, nb_man.output_path = nb_man.output_path, None
        try:
            return super().execute_managed_notebook(nb_man, kernel_name, **options)
        finally:
            nb_man.output_path = output


papermill_engines.register(_ENGINE, _SavedAtTheEnd)


def execute(notebook: Path, output: Path, parameters: Mapping[str, Any], folder: Path, time_limit_s: float) -> None:
    """Run `notebook` with `folder` as its working directory and write it, with its outputs, to `output`."""
    deadline = time.monotonic() + time_limit_s
    try:
        papermill.execute_notebook(
            str(notebook),
            str(output),
            parameters=dict(parameters),
            engine_name=_ENGINE,
            progress_bar=False,
            start_timeout=START_LIMIT_S,
            # Not `cwd`, which changes the folder of the whole process: notebooks run concurrently.
            resources={"metadata": {"path": str(folder)}},
            kernel_manager_class=ThisInterpreter,
            # Killed: asked to exit, one kernel in four hangs for 3.5 s.
            shutdown_kernel="immediate",
            timeout_func=lambda _cell: max(1, int(deadline - time.monotonic())),
        )
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
    """Return number, name and first line of the failed cell: papermill's index, else the last cell that started."""
    cells = _notebook_cells(nbformat.read(output, as_version=4))
    if index is None:
        started = [place for place, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("start_time")]
        index = started[-1] if started else 0
    cell = cells[index]
    first_line = next(iter(cell.source.splitlines()), "")
    return f"cell {index + 1} ({cell.id}, `{first_line[:80]}`)"


def _notebook_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the cells without the two that papermill puts before a failed one."""
    return [cell for cell in notebook.cells if _ERROR_TAG not in cell.metadata.get("tags", [])]


def _settle(output: Path) -> None:
    """Remove times, paths and random ids, so that the same records give the same notebook."""
    notebook = nbformat.read(output, as_version=4)
    notebook.metadata.pop("papermill", None)
    notebook.cells = _notebook_cells(notebook)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = "injected-parameters"
    nbformat.write(notebook, output)


NOTEBOOKS = REPOSITORY / "notebooks"
TIME_LIMIT_S = 600.0
# Concurrent kernels; each uses a CPU core and half a gigabyte.
KERNELS = 2


def build(
    records: Records,
    suite: str,
    output: Path,
    *,
    claims: Sequence[ClaimRow] = (),
    notebooks: Path = NOTEBOOKS,
    time_limit_s: float = TIME_LIMIT_S,
    say: Callable[[str], None] = lambda _line: None,
    facts: Sequence[str] = (),
    title: str = "",
    kernels: int = KERNELS,
    reading: Path | None = None,
) -> dict[str, str]:
    """Build the report in a folder next to `output` and move it there; return the reason of each failed notebook.

    `title` is that of the first page, by default the suite's name, `facts` are lines for its head that the records do
    not have, and `kernels` is the number of notebooks that run at once. The reading is in the folder
    `reading`, by default `output`.
    """
    if records.runs.empty and not records.refused and not records.remaining:
        raise UserError(f"{suite} has no record", f"run: study run {suite}")
    answered = answers(records, claims, suite)
    section = read_reading(reading or output, answered)
    names = list(dict.fromkeys(question.notebook for question in answered if question.notebook))
    # Figures are checked when the report is published.
    wanted = {"index.html", "summary.md", RUNS_FILE, STEPS_FILE, LIST, *((FIGURES, IMAGES) if names else ())}
    wanted |= {f"{name}.{kind}" for name in names for kind in ("ipynb", "html")}
    with new_report(output, wanted) as folder:
        write_parquet(records, folder)
        failures = run_notebooks(names, notebooks, folder, time_limit_s, say, kernels)
        _write_pages(records, suite, folder, answered, failures, facts, title or suite, section)
    return failures


def run_notebooks(
    names: Sequence[str],
    notebooks: Path,
    folder: Path,
    time_limit_s: float,
    say: Callable[[str], None],
    kernels: int = KERNELS,
) -> dict[str, str]:
    """Execute notebooks on the records in `folder`, and write them there; return the reason of each failed one."""

    def run(name: str) -> str:
        failure = ""
        try:
            execute(notebooks / f"{name}.ipynb", folder / f"{name}.ipynb", {"records_dir": "."}, folder, time_limit_s)
        except NotebookFailed as error:
            failure = str(error)
        say(f"{name}: {f'failed in {failure}' if failure else 'done'}")
        return failure

    with ThreadPoolExecutor(kernels) as pool:
        return {name: failure for name, failure in zip(names, pool.map(run, names), strict=True) if failure}


def _write_pages(
    records: Records,
    suite: str,
    folder: Path,
    answered: Mapping[Question, Answer],
    failures: Mapping[str, str],
    facts: Sequence[str],
    title: str,
    reading: PageSection | None,
) -> None:
    # The title and the question of a page are the first cell of its notebook.
    heads, figures = dict[str, list[str]](), dict[str, list[Picture]]()
    for name in dict.fromkeys(question.notebook for question in answered if question.notebook):
        first = nbformat.read(folder / f"{name}.ipynb", as_version=4).cells[0].source
        heads[name] = [part.strip("# \n") for part in first.split("\n", 1)]
        figures |= take_figures(folder / f"{name}.ipynb")
    drawn = {question: [one for name in question.figures for one in figures.get(name, ())] for question in answered}
    cards = [_card(question, answer, drawn[question], records) for question, answer in answered.items()]
    in_summary = {picture.name for card in cards for picture in card.drawings}
    page = functools.partial(
        page_html,
        suite=suite,
        pages={"index": "Overview", **{name: head for name, (head, _) in heads.items()}},
        all_reports=".." if folder.resolve().parent.name == "reports" else "",
    )
    texts = _first_page(records, answered, cards, failures, facts, title, page, reading)
    for name, (_, words) in heads.items():
        chosen = [question for question in answered if question.notebook == name]
        sections = [part for one in chosen for part in _details(one, answered[one], drawn[one], records, in_summary)]
        failure = failures.get(name)
        texts[f"{name}.html"] = page("page.html.j2", current=name, lead=words, sections=sections, failure=failure)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    write_figures(itertools.chain(*drawn.values()), folder, in_summary)


def _first_page(
    records: Records,
    answered: Mapping[Question, Answer],
    cards: Sequence[PageSection],
    failures: Mapping[str, str],
    facts: Sequence[str],
    title: str,
    page: Callable[..., str],
    reading: PageSection | None,
) -> dict[str, str]:
    """Return the first page as Markdown and as HTML, by file."""
    lists = list(_left_out(records, failures))
    environment = _environment(records)
    numbers = [
        (number.value, number.words) for answer in answered.values() if answer.leads for number in answer.headlines
    ]
    lead = PageSection(sentence=" · ".join([*environment.values(), *facts]))
    html = page(
        "index.html.j2",
        current="index",
        title=title,
        facts=facts,
        readings=[reading] if reading else [],
        cards=cards,
        lists=lists,
        numbers=numbers,
        environment=pd.DataFrame(environment.items(), columns=["", " "]),
    )
    first = [lead, reading] if reading else [lead]
    markdown = page_markdown(title, [*first, *_shorten_cards(answered, cards), *lists], numbers)
    return {"summary.md": markdown, "index.html": html}


def _left_out(records: Records, failures: Mapping[str, str]) -> Iterator[PageSection]:
    """Yield the notebooks that failed and the records that are excluded, if any."""
    failed = [f"`{name}`: {why}" for name, why in failures.items()]
    if failed:
        yield PageSection("Notebooks that did not finish", notes=failed, classes="left-out")
    if records.refused:
        text = "They are in no figure and no table."
        yield PageSection("Records left out", text, notes=records.refused, classes="left-out")


def take_figures(notebook: Path) -> dict[str, list[Picture]]:
    """Return the figures of an executed notebook by name, numbered; it keeps only their PNG images."""
    figures: dict[str, list[Picture]] = {}
    document = nbformat.read(notebook, as_version=4)
    for output in (output for cell in document.cells for output in cell.get("outputs", [])):
        if name := output.get("metadata", {}).get("figure"):
            images = figures.setdefault(name, [])
            png, svg = base64.b64decode(output.data["image/png"]), output.data.pop("image/svg+xml")
            images.append(Picture(f"{name}_{len(images) + 1}", png, svg, output.data["text/plain"]))
    nbformat.write(document, notebook)
    return figures


def write_figures(pictures: Iterable[Picture], folder: Path, in_summary: Container[str]) -> None:
    """Write the figures as files of a report; those of its summary are in a separate folder."""
    for picture in pictures:
        png, svg = (folder / name for name in picture_files(picture, in_summary))
        for file in (png, svg):
            file.parent.mkdir(exist_ok=True)
        png.write_bytes(picture.png)
        svg.write_text(picture.svg, encoding="utf-8")


def picture_files(picture: Picture, in_summary: Container[str]) -> tuple[str, str]:
    """Return the names of a figure's PNG and SVG files."""
    return f"{IMAGES}/{picture.name}.png", f"{FIGURES if picture.name in in_summary else IMAGES}/{picture.name}.svg"


def _card(question: Question, answer: Answer, drawn: Sequence[Picture], records: Records) -> PageSection:
    """Return a question's section of the first page; its tables are folded there if it has no page."""
    tables = {} if question.notebook else {name: make(records) for name, make in question.tables.items()}
    more = link_html("Figures and details", f"{question.notebook}.html")
    shown = [picture for picture in drawn if picture.name.rpartition("_")[0] in question.figures[:1]]
    shown.sort(key=lambda picture: f", {answer.subject}: " not in picture.alt)
    return PageSection(
        answer.title or question.title,
        headlines=answer.headlines,
        table=answer.table,
        notes=answer.notes,
        drawings=shown[:1],
        tables={f"{_words(name)} in full": table for name, table in tables.items() if not table.empty},
        classes="card",
        anchor=question.name,
        below=Markup('<p class="more">{}</p>').format(more) if question.notebook else Markup(""),
    )


def _shorten_cards(questions: Iterable[Question], cards: Iterable[PageSection]) -> Iterator[PageSection]:
    """Yield the sections with the beginning of tables that are too long for the summary."""
    for question, card in zip(questions, cards, strict=True):
        tables = card.tables if question.tables_in_summary else {}
        notes = card.notes
        if any(len(table) > _MAX_ROWS for table in tables.values()):
            notes = (*notes, caption("runs", "shortened", count=_MAX_ROWS))
        shortened = {title: table.head(_MAX_ROWS) for title, table in tables.items()}
        yield dataclasses.replace(card, notes=notes, tables=shortened)


def _details(
    question: Question, answer: Answer, drawn: Sequence[Picture], records: Records, in_summary: Container[str]
) -> Iterator[PageSection]:
    """Yield the sections of a question's page: all figures, then all tables."""
    files = [file for picture in drawn for file in picture_files(picture, in_summary)]
    links = Markup(" ").join(link_html(file.rpartition("/")[2], file) for file in files)
    yield PageSection(
        answer.title or question.title,
        headlines=answer.headlines,
        notes=answer.notes,
        drawings=drawn,
        anchor=question.name,
        below=Markup('<p class="files">{}</p>').format(links),
    )
    for name, make in question.tables.items():
        if not (table := make(records)).empty:
            yield PageSection(_words(name), table=table, level=3)


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _environment(records: Records) -> dict[str, str]:
    """Return the runs, the hardware, the versions and the days."""
    runs = records.runs
    if runs.empty:
        return {"Runs": "no run yet" if records.remaining and not records.refused else "no readable run"}
    states = runs["status_state"].value_counts()
    outcomes = "".join(f", {count} {state}" for state, count in states.items() if state != "ok")
    days = sorted({str(start)[:10] for start in runs["status_started_at"].dropna()})
    devices = runs["devices"].dropna().map(lambda names: ", ".join(json.loads(names)) or "no accelerator")
    parts = {
        "Runs": [f"{len(runs)} runs{outcomes}"],
        "Processor": _few(runs["cpu"]),
        "Accelerator": _few(devices),
        "PyTorch": _few(runs["torch_version"], "torch "),
        "Engine": _few(runs["deepspeed_version"], "DeepSpeed "),
        "Days": [" to ".join(dict.fromkeys((days[0], days[-1])))],
    }
    return {name: " · ".join(texts) for name, texts in parts.items() if texts}


def _few(values: pd.Series, name: str = "") -> list[str]:
    """Return the two most frequent values, each after the name, and the number of others."""
    texts = [str(value) for value in values.dropna().value_counts().index]
    return [*(name + text for text in texts[:2]), *([f"{len(texts) - 2} more"] if len(texts) > 2 else [])]
