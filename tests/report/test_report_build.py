from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import psutil
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report_folders import committed, contents, drawn, few, laptop, read_committed
from study import cli
from study.claims.command import dependent_claims
from study.claims.ledger import Ledger, committed_ledger, read_ledger
from study.config.places import REPOSITORY
from study.host.machine import detect_machine
from study.records.frames import Records, read_parquet, read_runs
from study.report import canvas
from study.report.canvas import as_svg
from study.report.questions import QUESTIONS, answers
from study.report.site import command
from study.report.site.build import NOTEBOOKS, NotebookFailed, build, execute
from study.sweep.cell import Cell
from study.sweep.plan import plan_cells
from study.sweep.suite_file import read_suite
from sweeps import write_suite
from synthetic_records import write_run
from tools.count_bytes import summary

# Some of the laptop's records.
NAMES = ("loss_curves", "offload", "peak_memory", "runtime", "single_vs_multi")
# Notebooks that some report in git executes; `what_fits`, `claims` and `prediction` are tested elsewhere.
OF_REPORTS = {*NAMES, "batch_size", "model_size", "neighbours", "releases", "scaling", "virtual_cluster"}
FIGURE = """
from study.report import canvas
figure, _ = canvas.sheet(2)
before = 1
display(canvas.Drawing(figure, "the finding <b>", "offload"))
"""


def notebook(file: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_markdown_cell("# A title\n\nA lead.")]
    cells.append(nbformat.v4.new_code_cell('records_dir = "reports/laptop"', metadata={"tags": ["parameters"]}))
    cells += [nbformat.v4.new_code_cell(source, id=f"cell-{place}") for place, source in enumerate(sources)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), file)
    return file


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the notebooks that a report needs: one fails, and the others do little."""
    folder = tmp_path_factory.mktemp("notebooks")
    for name in NAMES:
        notebook(folder / f"{name}.ipynb", *((FIGURE, "before / 0") if name == "offload" else ("2 + 2",)))
    return folder


@pytest.fixture(scope="module")
def built(notebooks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Build a report with them; return its folder and the failed notebooks."""
    folder = tmp_path_factory.mktemp("built") / "report"
    return folder, build(few(), "laptop", folder, notebooks=notebooks)


def read(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=4)


def test_notebooks_in_git_have_no_output_take_parameters_and_show_their_own_code() -> None:
    files = {file.stem: file for file in NOTEBOOKS.glob("*.ipynb")}
    assert files.keys() == {*OF_REPORTS, "autopsy", "claims", "colab", "prediction", "what_fits"}
    for name, file in files.items():
        document = read(file)
        nbformat.validate(document)
        assert (document.nbformat, document.nbformat_minor) == (4, 5)
        assert document.metadata.kernelspec.name == "python3"
        code = [cell for cell in document.cells if cell.cell_type == "code"]
        assert all(cell.outputs == [] and cell.execution_count is None for cell in code), name
        assert [cell.metadata.get("tags") for cell in document.cells].count(["parameters"]) == 1
        text = "\n".join(cell.source for cell in code)
        assert name == "colab" or any(word in text for word in ("groupby(", "crosstab(", ".tables[", "_table(")), name
        # A page has the figures of its notebook: their names are those of its questions.
        figures = {figure for question in QUESTIONS if question.notebook == name for figure in question.figures}
        assert set(re.findall(r"""name["']?[=:] ?["'](\w+)["']""", text)) >= figures


REPORTS = sorted(file.parent.name for file in (REPOSITORY / "reports").glob("*/runs.parquet"))


def draw_in_process(
    records: Records, in_summary: set[str], names: list[str], notebooks: Path, folder: Path, *_: Any
) -> dict[str, str]:
    """Run notebooks in this process, with images and shifted labels only of the figures that the summary shows."""
    spread, labeled = canvas._spread_labels, list[tuple[Figure, Axes]]()
    for name in names:
        counts: collections.Counter[str] = collections.Counter()
        document = read(notebooks / f"{name}.ipynb")
        cell = nbformat.v4.new_code_cell()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(canvas, "_spread_labels", lambda figure, axes: labeled.append((figure, axes)))
            drawings = drawn(name, records, folder)
        for drawing in drawings:
            counts[drawing.name] += 1
            svg = ""
            if f"{drawing.name}_{counts[drawing.name]}" in in_summary:
                for axes in (axes for figure, axes in labeled if figure is drawing.figure):
                    spread(drawing.figure, axes)
                svg = as_svg(drawing.figure)
            data = {"image/png": "", "image/svg+xml": svg, "text/plain": drawing.alt}
            metadata = {"figure": drawing.name}
            cell.outputs.append(nbformat.v4.new_output("display_data", data=data, metadata=metadata))
        document.cells.append(cell)
        nbformat.write(document, folder / f"{name}.ipynb")
        labeled.clear()
    return {}


@pytest.mark.parametrize("name", REPORTS)
def test_a_summary_in_git_is_rebuilt_from_its_records(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    source, records = REPOSITORY / "reports" / name, read_committed(REPOSITORY / "reports" / name)
    listed = json.loads((source / "files.json").read_text())["files"]
    in_summary = {Path(file).stem for file in listed if file.startswith("figures/")}
    drawing = functools.partial(draw_in_process, records, in_summary)
    monkeypatch.setattr("study.report.site.build.run_notebooks", drawing)
    # A claim rests on the records of several reports.
    monkeypatch.setattr("study.claims.evidence.read_parquet", read_committed)
    claims = dependent_claims(records, name, source)
    build(records, name, tmp_path / name, claims=claims, title=command.title_of(name), reading=source)
    advice = f"rebuild it: python tools/reports.py {name}"
    assert (tmp_path / name / "summary.md").read_text() == (source / "summary.md").read_text(), advice
    assert listed.keys() == json.loads((tmp_path / name / "files.json").read_text())["files"].keys(), advice
    assert listed == {file: sha256((source / file).read_bytes()).hexdigest() for file in listed}, advice
    for figure in sorted(file for file in listed if file.startswith("figures/")):
        # CPUs differ in the last digits of coordinates.
        before, after = (
            re.findall(r"<text[^>]*>([^<]*)<", (folder / figure).read_text()) for folder in (source, tmp_path / name)
        )
        assert before, figure
        assert before == after, advice


def test_the_summary_of_traffic_is_rebuilt_from_its_table() -> None:
    folder = REPOSITORY / "reports" / "traffic"
    rows = pd.read_csv(folder / "bytes.csv")
    assert (folder / "summary.md").read_text(encoding="utf-8") == summary(rows), (
        "python tools/count_bytes.py --markdown"
    )


def test_the_reports_of_a_build_read_the_ledger_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[None] = []

    def read_and_count() -> Ledger:
        reads.append(None)
        return read_ledger()

    monkeypatch.setattr("study.claims.ledger.read_ledger", read_and_count)
    committed_ledger.cache_clear()
    for name in ("virtual_models", "virtual_tuning"):
        folder = REPOSITORY / "reports" / name
        dependent_claims(read_parquet(folder), name, folder)
    assert len(reads) == 1


def test_a_notebook_is_written_when_it_begins_and_ends_and_its_kernel_has_been_imported(tmp_path, monkeypatch):
    writes: list[str] = []

    def write_and_count(document: nbformat.NotebookNode, path: str) -> None:
        writes.append(path)
        nbformat.write(document, path)

    for module in ("engines", "execute"):
        monkeypatch.setattr(f"papermill.{module}.write_ipynb", write_and_count)
    # The last library that kernels are forked with; what follows it, the kernel's start has imported.
    begin = "import sys; modules = list(sys.modules)"
    cells = (begin, "modules[modules.index('PIL.PpmImagePlugin') + 1 :]", *map(str, range(9)))
    output = tmp_path / "out.ipynb"
    execute(notebook(tmp_path / "a.ipynb", *cells), output, {}, tmp_path, 60)
    assert writes == [str(output)] * 3
    imported = read(output).cells[3].outputs[0].data["text/plain"]
    assert not re.findall(r"'(?:IPython|ipykernel|debugpy|matplotlib|pandas|study)[.\w]*'", imported), imported


def test_a_folder_that_a_killed_build_left_is_no_report() -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "reports.py"))
    remains = REPOSITORY / "reports" / ".laptop.building-of-a-test"
    remains.mkdir()
    try:
        shutil.copy(REPOSITORY / "reports" / "laptop" / "runs.parquet", remains)
        assert {*REPORTS} <= {*tool["names"]()}
        assert remains.name not in tool["names"]()
    finally:
        shutil.rmtree(remains)


def test_a_notebook_runs_in_this_interpreter_without_a_profile_of_the_user(tmp_path, monkeypatch):
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps({"argv": ["false"], "language": "python", "display_name": "none"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", "/proc/not-writable")
    output = tmp_path / "out.ipynb"
    at_exit = f"import atexit, pathlib, sys; atexit.register(pathlib.Path({str(tmp_path / 'asked')!r}).touch)"
    execute(notebook(tmp_path / "a.ipynb", at_exit, "sys.executable"), output, {}, tmp_path, 60)
    assert not (tmp_path / "asked").exists(), "a kernel that is asked to exit sometimes hangs, so it is killed"
    assert read(output).cells[-1].outputs[0].data["text/plain"] == repr(sys.executable)


def test_a_notebook_that_is_ended_names_its_cell(tmp_path):
    for sources, limit_s, words in (
        (("1", "import time", "time.sleep(60)"), 3, r"cell 5 \(cell-2, `time.+`\): the notebook has had its 3 s"),
        (("import os", "os._exit(3)"), 60, r"\(cell-1, `os._exit\(3\)`\): the kernel died"),
    ):
        with pytest.raises(NotebookFailed, match=words):
            execute(notebook(tmp_path / "a.ipynb", *sources), tmp_path / "out.ipynb", {}, tmp_path, limit_s)


def test_a_kernel_ends_with_the_build_that_was_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    cell = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    file = notebook(tmp_path / "a.ipynb", cell)
    program = (
        "import sys; from pathlib import Path; from study.report.site.build import execute;"
        "folder = Path(sys.argv[1]); execute(folder / 'a.ipynb', folder / 'out.ipynb', {}, folder, 300)"
    )
    building = subprocess.Popen([sys.executable, "-c", program, str(file.parent)], cwd=REPOSITORY)
    try:
        wait_until(lambda: note.exists() and note.read_text() != "")
        kernel = int(note.read_text())
    finally:
        building.kill()
        building.wait()
    wait_until(lambda: not psutil.pid_exists(kernel))


def wait_until(is_so: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_failing_notebook_names_its_cell_and_leaves_the_others_built(built):
    report, failures = built
    assert list(failures) == ["offload"]
    assert "(cell-1, `before / 0`): ZeroDivisionError" in failures["offload"]
    assert "Notebooks that did not finish" in (report / "index.html").read_text()
    for name in ("index.html", "offload.html", "summary.md"):
        assert "ZeroDivisionError" in (report / name).read_text()
    # A page has the figures that its notebook drew before it failed, and every table, which needs no kernel.
    assert [file.name for file in (report / "figures").iterdir()] == ["offload_1.svg"]
    assert [file.name for file in (report / "images").iterdir()] == ["offload_1.png"]
    for name in NAMES:
        page = (report / f"{name}.html").read_text()
        assert page.count("<img ") == page.count("the finding &lt;b&gt;") == (name == "offload")
        for question in (question for question in answers(few()) if question.notebook == name):
            assert question.title in page
            assert page.count("<table>") >= len(question.tables)


def test_a_build_that_breaks_leaves_the_old_report(tmp_path):
    output = committed(tmp_path)
    before = contents(output)
    with pytest.raises(FileNotFoundError):
        build(few(), "laptop", output, notebooks=tmp_path / "nowhere")
    assert contents(output) == before
    assert [file.name for file in tmp_path.iterdir()] == ["report"]


def test_a_wrong_request_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (committed(tmp_path) / "index.html").write_text("mine")
    (tmp_path / "reports" / "broken").mkdir(parents=True)
    (tmp_path / "reports" / "broken" / "runs.parquet").write_text("no parquet")
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "reports" / "laptop").symlink_to(REPOSITORY / "reports" / "laptop")
    for arguments, words in {
        "laptop --output file": "argument --output: file is not a folder",
        "laptop --output /proc/report": "--output /proc/report is not writable",
        "laptop --output report": "--output report has index.html, which is not as a report wrote it",
        "laptop --runs_dir typo": "--runs_dir typo has no records of laptop",
        "colab": "there are no records of colab: neither runs/colab nor reports/colab/runs.parquet is there",
        "broken": "runs.parquet is not readable",
        "empty": "empty has no record",
    }.items():
        assert cli.main(["report", *arguments.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert "To fix it: " in line


def test_a_report_of_an_incomplete_suite_lists_missing_runs(tmp_path):
    file, runs, facts = write_suite(tmp_path, {"strategy": ["ddp", "zero3"]}), tmp_path / "runs", []
    for cell in plan_cells(read_suite(file), detect_machine()):
        assert isinstance(cell, Cell)
        write_run(runs / "tiny", cell.strategy, name=cell.id)
        facts.append(command._facts_of_suite(str(file), runs, read_runs(runs)))
    assert facts == [["1 of 2 runs have no record yet"], []]


def test_refused_records_alone_still_give_a_report_that_lists_them(notebooks, tmp_path):
    empty = dataclasses.replace(
        laptop(), runs=laptop().runs.iloc[:0], steps=laptop().steps.iloc[:0], refused=("a/status.json: is missing",)
    )
    build(empty, "laptop", tmp_path / "report", notebooks=notebooks)
    assert "a/status.json: is missing" in (tmp_path / "report" / "index.html").read_text()
