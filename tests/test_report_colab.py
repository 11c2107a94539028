"""The Colab notebook takes a Python with nothing in it to a report."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

from study.record.directory import read_status
from study.report.site.build import NOTEBOOKS
from study.spec.strategies import REPOSITORY

COLAB = NOTEBOOKS / "colab.ipynb"
# The operators above all: two installations that share their folder rebuild them in turns.
_THIS_INSTALLATION = {"PYTHONPATH", "VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR"}
# Next to nothing: what this test looks at is the way there.
SUITE = {
    "name": "way", "description": "a test's",
    "fixed": {"scale": "laptop", "task": "gpt-wikitext", "max_steps": 6, "seq_length": 16, "train_samples": 64,
              "eval_samples": 8, "global_batch_size": 4, "logging_steps": 1, "time_limit_s": 900},
    "grids": [{"axes": {"strategy": ["single", "ddp", "zero2"]}}],
}  # fmt: skip


def call(*command: str | Path, **run: object) -> None:
    result = subprocess.run([str(part) for part in command], text=True, capture_output=True, check=False, **run)  # type: ignore[call-overload]
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_its_parameters_say_where_the_project_comes_from_what_to_run_and_for_how_long():
    parameters = papermill.inspect_notebook(str(COLAB))
    assert set(parameters) == {"source", "suite", "only", "time_budget", "work_dir"}


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_it_takes_a_clean_virtual_environment_to_a_report(tmp_path):
    archive, suite, bare = tmp_path / "zero-study.tar.gz", tmp_path / "way.yaml", tmp_path / "venv"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPOSITORY, capture_output=True, check=True
    ).stdout.decode()
    with tarfile.open(archive, "w:gz") as tar:
        for name in filter(None, tracked.split("\0")):
            if (REPOSITORY / name).exists():
                tar.add(REPOSITORY / name, f"zero-study/{name}")
    suite.write_text(yaml.safe_dump(SUITE))
    call(sys.executable, "-m", "venv", bare)
    python = bare / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "-c", REPOSITORY / "constraints.txt", "papermill", "ipykernel")
    parameters = {
        "source": archive,
        "suite": suite,
        "only": "*-2x-*",
        "time_budget": "20m",
        "work_dir": tmp_path / "work",
    }
    chosen = [str(part) for name, value in parameters.items() for part in ("-p", name, value)]
    output = tmp_path / "out.ipynb"
    environment = {name: value for name, value in os.environ.items() if name not in _THIS_INSTALLATION}
    call(
        python, "-m", "papermill", COLAB, output, *chosen, "--execution-timeout", "2400", cwd=tmp_path, env=environment
    )
    printed = nbformat.read(output, as_version=4)
    shown = [output for cell in printed.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in one.get("data", {}) for one in shown) >= 4
    assert any("ddp" in one.get("data", {}).get("text/markdown", "") for one in shown)
    with zipfile.ZipFile(tmp_path / "work" / "report.zip") as report:
        assert {"index.html", "summary.md", "runs.parquet", "loss_curves.html"} <= set(report.namelist())
    index = (tmp_path / "work" / "report" / "index.html").read_text()
    assert "zero2" in index
    # `only` was obeyed, and what it left was trained.
    states = {file.parent.name: read_status(file.parent)["state"] for file in (tmp_path / "work").rglob("status.json")}
    assert len(states) == 2
    assert not any("-single-" in run for run in states)
    assert set(states.values()) == {"ok"}


def archive_of(file: Path, **members: str) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            # Of one and the same time: an archive that was made anew is another project.
            archive.writestr(zipfile.ZipInfo(name.replace("__", "/")), text)
    return file


def project_of(source: str | Path, work: Path) -> subprocess.CompletedProcess[str]:
    """The notebook's cells up to the one that finds the project."""
    cells = {cell.id: cell.source for cell in nbformat.read(COLAB, as_version=4).cells}
    code = "\n".join([cells["parameters"], f"source, work_dir = {str(source)!r}, {str(work)!r}"])
    code = "\n".join([code, cells["gpu"], cells["project"]])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=work.parent, check=False)


def test_each_source_is_the_project_that_is_installed(tmp_path: Path) -> None:
    source, work = tmp_path / "zero-study.zip", tmp_path / "work"
    found = []
    for text in ("old", "new", "new"):
        archive_of(source, **{"zero-study__study__train.py": text, "zero-study__docs__study__train.py": "a copy"})
        result = project_of(source, work)
        assert result.returncode == 0, result.stderr
        found.append(Path(result.stdout.split("the project is ")[1].strip()))
        assert (found[-1] / "study" / "train.py").read_text() == text
        assert ("fetched before" in result.stdout) is (len(found) == 3)
    assert found[1] == found[2] != found[0]
    # A folder is taken where it is.
    assert project_of(found[0], work).stdout.endswith(f"the project is {found[0]}\n")


@pytest.mark.parametrize("damage", ["other", "torn", "text", "folder", "empty"])
def test_a_source_without_the_project_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    source, work = tmp_path / "zero-study.zip", tmp_path / "work"
    archive_of(source, **{"zero-study__study__train.py": "x" * 1000})
    if damage == "other":
        archive_of(source, thesis__chapter="years of work")
    elif damage == "folder":
        source.unlink()
        source.mkdir()
    else:
        whole = source.read_bytes()
        source.write_bytes({"torn": whole[: len(whole) // 2], "text": b"not an archive", "empty": b""}[damage])
    result = project_of(source, work)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert str(source) in line
    assert ("no whole .zip" if damage in ("torn", "text", "empty") else "holds no study/train.py") in line
    # What was refused is not taken for a project the next time.
    assert list(work.iterdir()) == []
