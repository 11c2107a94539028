"""`study report`: every notebook over the records, and one page that opens with what they found."""

from __future__ import annotations

import base64
import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbconvert
import nbformat
import pandas as pd
from jinja2 import FileSystemLoader
from markupsafe import Markup

from study.errors import UserError
from study.report.questions import QUESTIONS, answers
from study.report.questions.claims import Resting
from study.report.questions.question import Answer, Question
from study.report.questions.time import noise_fact
from study.report.records.frames import RUNS_FILE, STEPS_FILE, Records, write_parquet
from study.report.site import page
from study.report.site.execute import NotebookFailed, execute
from study.report.site.place import FIGURES, LIST, check_place, put_in_place
from study.report.site.show import as_png
from study.spec.strategies import REPOSITORY

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
