"""Every suite for rented GPUs from end to end, with tiny models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from study.host.machine import detect_machine
from study.records.directory import read_run
from study.sweep.plan import plan_cells
from study.sweep.search import Search, cell_states
from study.sweep.suite_file import shrink_suite
from sweeps import ROOT, shipped


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted({part.suite for part in shipped()["one_gpu"].slices}))
def test_a_rented_suite_runs_from_end_to_end_with_tiny_models(tmp_path, name):
    """Suites for machines that are rented by the minute, with the commands that run there."""
    command = [sys.executable, "-m", "study.cli", "run", name, "--runs_dir", str(tmp_path), "--rehearse"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr
    root, cells = tmp_path / f"{name}-rehearsal", plan_cells(shrink_suite(shipped()[name]), detect_machine())
    for cell, record in cell_states(cells, root):
        assert record.state == "ok", f"{cell.id}: {record}"
        assert read_run(root / cell.id).engine["trainer"] == cell.trainer
    for search in (planned for planned in cells if isinstance(planned, Search)):
        assert search.what_fits(root).fits == search.last
