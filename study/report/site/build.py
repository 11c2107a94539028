"""`study report`: every notebook over the records, and one page that opens with what they found."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import nbconvert
import nbformat
import pandas as pd
from jinja2 import DictLoader
from PIL import Image

from study.errors import UserError
from study.report.questions import tables
from study.report.questions.finding import Finding
from study.report.questions.findings import findings
from study.report.questions.remaining import remaining_table
from study.report.records.frames import RUNS_FILE, STEPS_FILE, Records, probes, real, virtual, write_parquet
from study.report.site import page
from study.report.site.execute import NotebookFailed, execute
from study.report.site.place import FIGURES, LIST, check_place, place_of, put_in_place
from study.report.site.show import METADATA_KEY
from study.spec.strategies import REPOSITORY

NOTEBOOKS = REPOSITORY / "notebooks"
NAMES = ("loss_curves", "peak_memory", "runtime", "single_vs_multi", "batch_size", "model_size", "offload")
# Of a suite of virtual ranks, which has no losses and no times.
VIRTUAL_NAMES = ("virtual_cluster",)
# Of the probes of searches, which ask what fits and nothing else.
FITS_NAMES = ("what_fits",)
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


class Answers(NamedTuple):
    """What the index says beside its figures."""

    facts: list[str]
    findings: list[Finding]
    # By what stands above them.
    tables: dict[str, pd.DataFrame]
    refused: tuple[str, ...]


def build(
    records: Records, suite: str, output: Path, *, notebooks: Path = NOTEBOOKS, time_limit_s: float = TIME_LIMIT_S,
    say: Callable[[str], None] = lambda _line: None,
) -> Built:  # fmt: skip
    """Builds the report beside `output` and puts it there whole; `failures` are the notebooks that broke, and where."""
    if records.runs.empty and not records.refused and not records.remaining:
        raise UserError(f"{suite} has no record", f"run: study run {suite}")
    named, output = output, place_of(output)
    names = _names(records)
    try:
        check_place(output, _wanted(names))
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.building-", dir=output.parent))
    except OSError as error:
        raise UserError(f"--output {output} is not writable ({error.strerror})", "name another") from None
    try:
        folder.chmod(0o755)
        write_parquet(records, folder)
        answers = Answers(_facts(records), findings(records), _tables(names, records), records.refused)
        # Each notebook reads its own.
        del records
        failures = _run_notebooks(names, notebooks, folder, time_limit_s, say)
        _write_pages(names, answers, suite, folder, failures)
        put_in_place(folder, output, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Built(named / "index.html", failures, len(answers.refused))


def _names(records: Records) -> tuple[str, ...]:
    """The notebooks that these records give something to show. Of a study that has not begun there is none."""
    if records.runs.empty and records.remaining:
        return ()
    of_probes = FITS_NAMES if len(probes(records).runs) else ()
    of_virtual = VIRTUAL_NAMES if len(virtual(records).runs) else ()
    others = (*of_probes, *of_virtual)
    return (*NAMES, *others) if len(real(records).runs) or not others else others


def _wanted(names: Sequence[str]) -> set[str]:
    """What is known before notebooks run; their figures are looked at when the report is put in place."""
    return {"index.html", "summary.md", RUNS_FILE, STEPS_FILE, LIST, *((FIGURES,) if names else ()),
            *(f"{name}.{kind}" for name in names for kind in ("ipynb", "html"))}  # fmt: skip


def _tables(names: Sequence[str], records: Records) -> dict[str, pd.DataFrame]:
    found = {}
    if records.remaining:
        found["What is measured, and what remains"] = remaining_table(records.remaining)
    for some, title, table in (
        (NAMES, "Every run, in one table", "summary"),
        (FITS_NAMES, "Every search, in one table", "fits"),
        (VIRTUAL_NAMES, "Every virtual rank, in one table", "virtual_runs"),
    ):
        if set(some) <= set(names):
            found[title] = tables.TABLES[table](records)
    return found


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


def _write_pages(names: Sequence[str], answers: Answers, suite: str, folder: Path, failures: Mapping[str, str]) -> None:
    notebooks = {name: nbformat.read(folder / f"{name}.ipynb", as_version=4) for name in names}
    sections = [_section(name, notebook, folder) for name, notebook in notebooks.items()]
    exporter = nbconvert.HTMLExporter(
        template_name="basic", template_file="study.html.j2", extra_loaders=[DictLoader({"study.html.j2": _BODY})],
        exclude_input_prompt=True, exclude_output_prompt=True,
    )  # fmt: skip
    for section in sections:
        body, _ = exporter.from_notebook_node(notebooks[section.name])
        text = page.notebook_page(
            suite, section.title, body, failure=failures.get(section.name, ""), notebook=f"{section.name}.ipynb",
            pages=_pages(suite, sections, section.name),
        )  # fmt: skip
        (folder / f"{section.name}.html").write_text(text, encoding="utf-8")
    index = page.index_page(
        suite, facts=answers.facts, findings=answers.findings,
        tables={title: page.table_html(table) for title, table in answers.tables.items()},
        sections=sections, refused=answers.refused, failures=sorted(failures.items()),
        pages=_pages(suite, sections, "index"),
    )  # fmt: skip
    (folder / "index.html").write_text(index, encoding="utf-8")
    markdown = page.summary_markdown(suite, *answers, failures)
    (folder / "summary.md").write_text(markdown, encoding="utf-8")


def _pages(suite: str, sections: Sequence[page.Section], current: str) -> list[dict[str, Any]]:
    places = [("index", suite), *((section.name, section.title) for section in sections)]
    return [{"href": f"{name}.html", "title": title, "current": name == current} for name, title in places]


def _section(name: str, notebook: nbformat.NotebookNode, folder: Path) -> page.Section:
    """The notebook's own words and figures; its first cell is its title and a paragraph."""
    heading, _, rest = notebook.cells[0].source.partition("\n")
    lead = rest.strip().split("\n\n")[0].replace("\n", " ")
    notes = [output.metadata[METADATA_KEY] for output in _outputs(notebook) if METADATA_KEY in output.metadata]
    figures = [_figure(note, folder) for note in notes if "figure" in note]
    return page.Section(
        name,
        heading.lstrip("# "),
        lead,
        figures,
        list(dict.fromkeys(note["absent"] for note in notes if "absent" in note)),
    )


def _outputs(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    for cell in notebook.cells:
        yield from (output for output in cell.get("outputs", []) if "metadata" in output)


def _figure(note: Mapping[str, str], folder: Path) -> page.Figure:
    file = folder / FIGURES / f"{note['figure']}.png"
    with Image.open(file) as image:
        return page.Figure(note["figure"], note["alt"], file.read_bytes(), image.width // 2, image.height // 2)


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
