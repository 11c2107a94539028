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
