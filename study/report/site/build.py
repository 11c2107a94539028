"""`study report`: every notebook over the records, and one page that opens with what they found."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import nbconvert
import nbformat
import pandas as pd
from jinja2 import DictLoader

from study.errors import UserError
from study.report.questions import QUESTIONS, answers
from study.report.questions.question import Answer, Question
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
# Code is one click away; figures side by side where there is room.
_BODY = """
{%- extends 'basic/index.html.j2' -%}
{% block input_group -%}<details class="code"><summary>code</summary>{{ super() }}</details>{%- endblock %}
{% block output %}
<div class="{{ 'picture' if 'image/png' in output.get('data', {}) else 'words' }}">{{ super() }}</div>
{% endblock %}
"""


class Built(NamedTuple):
    page: Path
    failures: dict[str, str]
    refused: int


class Content(NamedTuple):
    """What the first page says."""

    facts: list[str]
    cards: list[page.Card]
    unanswered: list[Question]
    refused: tuple[str, ...]


def build(
    records: Records, suite: str, output: Path, *, notebooks: Path = NOTEBOOKS, time_limit_s: float = TIME_LIMIT_S,
    say: Callable[[str], None] = lambda _line: None,
) -> Built:  # fmt: skip
    """Builds the report beside `output` and puts it there whole; `failures` are the notebooks that broke, and where."""
    if records.runs.empty and not records.refused and not records.remaining:
        raise UserError(f"{suite} has no record", f"run: study run {suite}")
    found = answers(records)
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
        cards = [_card(question, answer, records) for question, answer in found.items()]
        unanswered = [question for question in QUESTIONS if question not in found]
        content = Content(_facts(records), cards, unanswered, records.refused)
        # Each notebook reads its own.
        del records
        failures = _run_notebooks(names, notebooks, folder, time_limit_s, say)
        _write_pages(names, content, suite, folder, failures)
        put_in_place(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Built(output / "index.html", failures, len(content.refused))


def _wanted(names: Sequence[str]) -> set[str]:
    """What is known before notebooks run; their figures are looked at when the report is put in place."""
    return {"index.html", "summary.md", RUNS_FILE, STEPS_FILE, LIST, *((FIGURES,) if names else ()),
            *(f"{name}.{kind}" for name in names for kind in ("ipynb", "html"))}  # fmt: skip


def _card(question: Question, answer: Answer, records: Records) -> page.Card:
    drawings = question.figures[question.first_figure](records) if question.first_figure else []
    picture = page.Picture(as_png(drawings[0].figure), drawings[0].alt) if drawings else None
    tables = {} if question.notebook else {name: make(records) for name, make in question.tables.items()}
    return page.Card(question, answer, picture, {name: table for name, table in tables.items() if not table.empty})


def _run_notebooks(
    names: Sequence[str], notebooks: Path, folder: Path, time_limit_s: float, say: Callable[[str], None]
) -> dict[str, str]:
    parameters = {"records_dir": ".", "figures_dir": FIGURES}

    def run(name: str) -> str:
        try:
            execute(notebooks / f"{name}.ipynb", folder / f"{name}.ipynb", parameters, folder, time_limit_s)
        except NotebookFailed as failure:
            return str(failure)
        return ""

    failures = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for name, failure in zip(names, pool.map(run, names), strict=True):
            say(f"{name}: {f'failed in {failure}' if failure else 'done'}")
            if failure:
                failures[name] = failure
    return failures


def _write_pages(names: Sequence[str], content: Content, suite: str, folder: Path, failures: Mapping[str, str]) -> None:
    notebooks = {name: nbformat.read(folder / f"{name}.ipynb", as_version=4) for name in names}
    # The first line of the first cell.
    titles = {name: notebook.cells[0].source.partition("\n")[0].lstrip("# ") for name, notebook in notebooks.items()}
    exporter = nbconvert.HTMLExporter(
        template_name="basic", template_file="study.html.j2", extra_loaders=[DictLoader({"study.html.j2": _BODY})],
        exclude_input_prompt=True, exclude_output_prompt=True,
    )  # fmt: skip
    for name, notebook in notebooks.items():
        body, _ = exporter.from_notebook_node(notebook)
        text = page.notebook_page(
            suite, titles[name], body, failure=failures.get(name, ""), notebook=f"{name}.ipynb",
            pages=_pages(suite, titles, name),
        )  # fmt: skip
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    index = page.index_page(
        suite, **content._asdict(), failures=sorted(failures.items()), notebooks=names,
        pages=_pages(suite, titles, "index"),
    )  # fmt: skip
    (folder / "index.html").write_text(index, encoding="utf-8")
    (folder / "summary.md").write_text(page.summary_markdown(suite, *content, failures), encoding="utf-8")


def _pages(suite: str, titles: Mapping[str, str], current: str) -> list[dict[str, Any]]:
    places = {"index": suite, **titles}
    return [{"href": f"{name}.html", "title": title, "current": name == current} for name, title in places.items()]


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
    ]


def _few(values: pd.Series) -> list[str]:
    """The two most frequent: a page's head is no place for a list."""
    return [str(value) for value in values.dropna().value_counts().index[:2]]
