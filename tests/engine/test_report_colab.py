"""The notebook for Colab from an installed wheel to its report."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import nbformat
import pytest

from study.config.places import REPOSITORY
from study.records.directory import read_status
from study.report.site.build import NOTEBOOKS
from sweeps import TINY, write_suite

COLAB = NOTEBOOKS / "colab.ipynb"

# Above all the operators: two installations that share their folder rebuild them in turns.
_THIS_INSTALLATION = {"PYTHONPATH", "VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR"}


def call(*command: str | Path, **run: object) -> None:
    result = subprocess.run([str(part) for part in command], text=True, capture_output=True, check=False, **run)  # type: ignore[call-overload]
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_it_leads_from_an_installed_wheel_to_a_report(tmp_path):
    archive, bare = tmp_path / "zero-study.tar.gz", tmp_path / "venv"
    suite = write_suite(tmp_path, {"strategy": ["single", "ddp", "zero2"]}, TINY | {"max_steps": 6})
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPOSITORY, capture_output=True, check=True
    ).stdout.decode()
    with tarfile.open(archive, "w:gz") as tar:
        for name in filter(None, tracked.split("\0")):
            if (REPOSITORY / name).exists():
                tar.add(REPOSITORY / name, f"zero-study/{name}")
    call(sys.executable, "-m", "venv", bare)
    python = bare / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "-c", REPOSITORY / "constraints.txt")
    call(*pip, "papermill", "ipykernel", archive)
    archive.unlink()
    parameters = {"suite": suite, "only": "*-2x-*", "time_budget": "20m", "work_dir": tmp_path / "work"}
    chosen = [str(part) for name, value in parameters.items() for part in ("-p", name, value)]
    output = tmp_path / "out.ipynb"
    environment = {name: value for name, value in os.environ.items() if name not in _THIS_INSTALLATION}
    call(
        python, "-m", "papermill", COLAB, output, *chosen, "--execution-timeout", "2400", cwd=tmp_path, env=environment
    )
    printed = nbformat.read(output, as_version=4)
    outputs = [output for cell in printed.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in item.get("data", {}) for item in outputs) >= 4
    assert any("ddp" in item.get("data", {}).get("text/markdown", "") for item in outputs)
    with zipfile.ZipFile(tmp_path / "work" / "report.zip") as report:
        assert {"index.html", "summary.md", "runs.parquet", "loss_curves.html"} <= set(report.namelist())
    index = (tmp_path / "work" / "report" / "index.html").read_text()
    assert "zero2" in index
    # `only` takes effect, and the remaining cells were trained.
    states = {file.parent.name: read_status(file.parent)["state"] for file in (tmp_path / "work").rglob("status.json")}
    assert len(states) == 2
    assert not any("-single-" in run for run in states)
    assert set(states.values()) == {"ok"}
