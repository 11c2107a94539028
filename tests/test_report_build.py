"""`study report` builds complete reports or none, names a failed cell, and does not touch the user's files."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from report_folders import committed, contents, few, laptop
from study import cli
from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.host.machine import detect_machine
from study.records.frames import Records, read_runs, write_parquet
from study.report.questions import QUESTIONS, answers
from study.report.site import command
from study.report.site.build import NOTEBOOKS, NotebookFailed, build, execute
from study.sweep.cell import Cell
from study.sweep.plan import plan_cells
from study.sweep.suite_file import read_suite
from sweeps import write_suite
from synthetic_records import write_run

# Some of the laptop's records.
NAMES = ("loss_curves", "offload", "peak_memory", "runtime", "single_vs_multi")
# Other parameters of each notebook than its own; without a folder, records of four strategies or of a search.
OTHERS: dict[str, dict[str, Any]] = {
    "batch_size": {"records_dir": "reports/claims", "baseline": "zero2"}, "claims": {"finding": "holds"},
    "loss_curves": {"baseline": "zero2"},
    "model_size": {"records_dir": "reports/claims", "baseline": "zero3_cpu_optimizer"},
    "neighbours": {"records_dir": "reports/virtual_neighbours", "baseline": "zero1"}, "offload": {"baseline": "ddp"},
    "peak_memory": {"baseline": "zero2"}, "prediction": {}, "releases": {"strategy": "zero2"},
    "runtime": {"baseline": "single"}, "scaling": {"fewest": 2},
    "single_vs_multi": {"baseline": "zero2"}, "virtual_cluster": {"records_dir": "reports/virtual_lora"},
    "what_fits": {},
}  # fmt: skip
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


def searches() -> Records:
    """Return probes of one search for the largest micro-batch."""
    records = laptop()
    about = {"id": "a-r1", "axis": "largest_micro_batch", "last": 2}
    notes = [json.dumps([about | {"place": place}]) for place in range(3)]
    runs = records.runs.head(3).assign(searches=notes, per_device_train_batch_size=[4, 8, 16])
    runs.loc[2, "status_state"] = "oom"
    return dataclasses.replace(records, runs=runs, steps=records.steps[records.steps["run"].isin(runs["run"][:2])])


def test_every_notebook_has_other_parameters_here() -> None:
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == {*OTHERS, "colab"}


@pytest.mark.parametrize("name", [*OTHERS, "colab"])
def test_a_notebook_in_git_has_no_output_takes_parameters_and_shows_its_own_code(name: str) -> None:
    file = NOTEBOOKS / f"{name}.ipynb"
    document = read(file)
    nbformat.validate(document)
    assert (document.nbformat, document.nbformat_minor) == (4, 5)
    assert document.metadata.kernelspec.name == "python3"
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert [cell.metadata.get("tags") for cell in document.cells].count(["parameters"]) == 1
    parameters = papermill.inspect_notebook(str(file))
    if name not in ("colab", "claims", "prediction"):
        assert "records_dir" in parameters
    if name != "colab":
        text = "\n".join(cell.source for cell in code)
        assert "plt.show()" in text or "display(canvas.finish(" in text
        assert any(word in text for word in ("groupby(", "pivot_table(", "crosstab("))
        # A page has the figures of its notebook: their names are those of its questions.
        figures = {figure for question in QUESTIONS if question.notebook == name for figure in question.figures}
        assert set(re.findall(r"""name["']?[=:] ?["'](\w+)["']""", text)) >= figures


@pytest.mark.parametrize("name", OTHERS)
def test_a_notebook_runs_with_other_parameters_and_draws(name: str, tmp_path: Path) -> None:
    parameters = dict(OTHERS[name])
    if name in (*NAMES, "what_fits"):
        write_parquet(searches() if name == "what_fits" else few(), tmp_path / "records")
        parameters["records_dir"] = str(tmp_path / "records")
    execute(NOTEBOOKS / f"{name}.ipynb", tmp_path / "out.ipynb", parameters, NOTEBOOKS, 120)
    outputs = [output for cell in read(tmp_path / "out.ipynb").cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type in ("error", "stream")]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("text/html" in output.get("data", {}) for output in outputs)
    if "baseline" in parameters:
        findings = [output.data["text/plain"] for output in outputs if output.get("metadata", {}).get("figure")]
        assert any(parameters["baseline"] in finding for finding in findings)


def test_an_unknown_notebook_parameter_is_an_error(tmp_path):
    file = notebook(tmp_path / "a.ipynb", "1")
    with pytest.raises(UserError, match=r"a\.ipynb has no parameter record_dir"):
        execute(file, tmp_path / "out.ipynb", {"record_dir": "x"}, tmp_path, 60)


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


@pytest.mark.parametrize(
    ("sources", "limit_s", "words"),
    [
        (("1", "import time", "time.sleep(60)"), 3,
         r"cell 5 \(cell-2, `time.sleep\(60\)`\): the notebook has had its 3 s"),
        (("import os", "os._exit(3)"), 60, r"\(cell-1, `os._exit\(3\)`\): the kernel died"),
    ],
)  # fmt: skip
def test_a_notebook_that_is_ended_names_its_cell(sources, limit_s, words, tmp_path):
    with pytest.raises(NotebookFailed, match=words):
        execute(notebook(tmp_path / "a.ipynb", *sources), tmp_path / "out.ipynb", {}, tmp_path, limit_s)


def test_a_failing_notebook_names_its_cell_and_leaves_the_others_built(built):
    report, failures = built
    (failure,) = failures.items()
    assert failure[0] == "offload"
    assert "(cell-1, `before / 0`): ZeroDivisionError" in failure[1]
    index = (report / "index.html").read_text()
    assert "Notebooks that did not finish" in index
    for name in ("index.html", "offload.html", "summary.md"):
        assert "ZeroDivisionError" in (report / name).read_text()
    # A page has the figures that its notebook drew before it failed, and every table, which needs no kernel.
    assert {file.name for file in (report / "figures").iterdir()} == {"offload_1.png", "offload_1.svg"}
    for name in NAMES:
        page = (report / f"{name}.html").read_text()
        assert page.count("<img ") == (name == "offload")
        assert page.count("the finding &lt;b&gt;") == (name == "offload")
        for question in (question for question in answers(few()) if question.notebook == name):
            assert question.title in page
            assert page.count("<table>") >= len(question.tables)
    assert [file.name for file in report.parent.iterdir()] == ["report"]


def test_a_place_that_cannot_be_written_is_refused_in_one_line():
    with pytest.raises(UserError, match="--output /proc/report is not writable"):
        build(few(), "laptop", Path("/proc/report"))


def test_a_build_that_breaks_leaves_the_old_report(tmp_path):
    output = committed(tmp_path)
    before = contents(output)
    with pytest.raises(FileNotFoundError):
        build(few(), "laptop", output, notebooks=tmp_path / "nowhere")
    assert contents(output) == before
    assert [file.name for file in tmp_path.iterdir()] == ["report"]


def test_a_report_is_rebuilt_and_leaves_every_file_that_it_did_not_make(built, notebooks, tmp_path):
    output = committed(tmp_path)
    user_files = {"figures/my_own_figure.png", "notes.txt", "mine/index.html"}
    (output / "mine").mkdir(exist_ok=True)
    (output / "figures" / "gone_1.png").write_bytes(figure := (output / "figures" / "loss_1.png").read_bytes())
    listed = json.loads((output / "files.json").read_text())
    listed["files"]["figures/gone_1.png"] = listed["files"]["figures/loss_1.png"]
    (output / "files.json").write_text(json.dumps(listed))
    assert figure
    for name in user_files:
        (output / name).write_text("mine")
    build(few(), "laptop", output, notebooks=notebooks)
    after, first = contents(output), contents(built[0])
    assert {name for name, content in after.items() if content == b"mine"} == user_files
    # A file that only the earlier report had is removed.
    assert set(after) - user_files == {*json.loads(after["files.json"])["files"], "files.json"} == set(first)
    # The same records give the same report: a traceback has a random name in it, and the list has its digest.
    assert {name for name in first if first[name] != after[name]} <= {"offload.html", "offload.ipynb", "files.json"}
    assert [file.name for file in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "no suite is named 'nosuch'"),
        (["laptop", "--output", "file"], "argument --output: file is not a folder"),
        (["colab"], "there are no records of colab: neither runs/colab nor reports/colab/runs.parquet is there"),
        (["broken"], "runs.parquet is not readable"),
        (["empty"], "empty has no record"),
        (["laptop", "--only", "x"], "unrecognized arguments"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "reports" / "broken").mkdir(parents=True)
    (tmp_path / "reports" / "broken" / "runs.parquet").write_text("no parquet")
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    write_parquet(laptop(), tmp_path / "reports" / "laptop")
    assert cli.main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert words in line
    assert "To fix it: " in line


def test_a_report_of_an_incomplete_suite_lists_missing_runs(tmp_path):
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3"]})
    facts = []
    for cell in plan_cells(read_suite(file), detect_machine()):
        assert isinstance(cell, Cell)
        write_run(tmp_path / "runs" / "tiny", cell.strategy, name=cell.id)
        facts.append(command._facts_of_suite(str(file), tmp_path / "runs", read_runs(tmp_path / "runs")))
    assert facts == [["1 of 2 runs have no record yet"], []]
    write_run(tmp_path / "runs" / "tiny", name="of-another-suite")
    (others_fact,) = command._facts_of_suite(str(file), tmp_path / "runs", read_runs(tmp_path / "runs"))
    assert "runs in the folder tiny that are not cells of this suite: 1, such as of-another-suite" in others_fact


def test_records_decide_if_no_suite_file_is_left(tmp_path, monkeypatch):
    """Records are found by a bare name in runs/ or reports/, or by the name in a suite file; run directories come
    first.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports" / "gone").mkdir(parents=True)
    suite = tmp_path / "file.yaml"
    suite.write_text(
        (REPOSITORY / "study" / "suites" / "laptop.yaml").read_text().replace("name: laptop", "name: mine")
    )
    names = [command.name_and_plan(name, Path("runs"))[0] for name in ("gone", "laptop", str(suite))]
    assert names == ["gone", "laptop", "mine"]


def test_refused_records_alone_still_give_a_report_that_lists_them(notebooks, tmp_path):
    empty = dataclasses.replace(
        laptop(), runs=laptop().runs.iloc[:0], steps=laptop().steps.iloc[:0], refused=("a/status.json: is missing",)
    )
    build(empty, "laptop", tmp_path / "report", notebooks=notebooks)
    assert "a/status.json: is missing" in (tmp_path / "report" / "index.html").read_text()
