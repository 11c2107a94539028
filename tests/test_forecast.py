"""Predictions of a dry run, and warnings of cells that cannot fit before any time is spent."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from study.cli import main
from study.host.machine import Machine
from study.sweep.forecast import Forecast, oom_warnings
from study.sweep.plan import missing_requirement, plan_cells
from study.sweep.search import representative_cell
from sweeps import TINY, box_for, gpu_suites_with_cells, planned_cells, shipped, write_suite

GIB = 2**30


def test_a_dry_run_predicts_memory_time_and_outcome_of_each_cell_and_hardware_needs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3_cpu"], "model_name_or_path": ["gpt-tiny", "gpt2"]})
    arguments = ["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]
    assert main(arguments) == 0
    without_hardware = capsys.readouterr().out.splitlines()
    assert len(without_hardware) == 4
    assert list(tmp_path.iterdir()) == [file]
    for line in without_hardware:
        assert shlex.split(line)[1:3] == ["launch", "--config_file"]
        assert " GiB a rank, " in line.split("  # predicted: ")[1]
        assert line.endswith("no time without --hardware, fits")
    assert main([*arguments, "--hardware", "2xT4"]) == 0
    with_hardware = capsys.readouterr().out.splitlines()
    assert all(" (of 16), " in line and " s a step, " in line and line.endswith(", fits") for line in with_hardware)
    assert [line.split("  # ")[0] for line in with_hardware] == [line.split("  # ")[0] for line in without_hardware]
    assert not any("need as many GPUs" in line for line in with_hardware)
    assert main([*arguments, "--hardware", "T4"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert "  # predicted: 2 ranks need as many GPUs, and T4 has 1, " in line
    for wrong, says in ([*arguments[:-1], "--hardware", "T4"], "add --dry_run"), (
        [*arguments, "--hardware", "T5"], "did you mean T4",
    ):  # fmt: skip
        assert main(wrong) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", gpu_suites_with_cells())
def test_cells_that_demonstrate_out_of_memory_and_no_others_are_too_large_by_the_lower_ends(name: str) -> None:
    """The forecast uses the smallest GPU that the suite allows."""
    forecast = Forecast(shipped()[name], box_for(name), {}, None)
    for cell in planned_cells(name):
        assert bool(forecast.too_large(cell)) == (cell.expect == "oom"), cell.id
    assert not list(oom_warnings(planned_cells(name), box_for(name)))


@pytest.mark.parametrize("name", sorted({part.suite for part in shipped()["one_gpu"].slices}))
def test_a_rented_suite_fits_the_gpu_it_requires_and_requires_a_large_one_only_if_needed(name: str) -> None:
    suite = shipped()[name]
    # The memory that NVML reports for 80 GB.
    h100 = Machine((81559 / 1024,), suite.requires.host_memory_gib)
    ahead = Forecast(suite, box_for(name), {}, None)
    described = {cell.id: ", ".join(ahead.describe(cell)) for cell in planned_cells(name) if cell.expect is None}
    if suite.requires.gpu_memory_gib <= h100.gpu_memory_gib[0]:
        assert missing_requirement(suite, h100) is None
        assert {cell: text for cell, text in described.items() if not text.endswith(", fits")} == {}
    else:
        needs = (re.search(r"([\d.]+) GiB a rank", text) for text in described.values())
        caps = [representative_cell(cell).config.device_memory_cap_gib or 0 for cell in plan_cells(suite, h100)]
        assert max([*caps, *(float(match[1]) for match in needs if match)]) > h100.gpu_memory_gib[0]


def test_cells_without_a_prediction_are_named_and_replicas_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"strategy": ["hsdp", "zero3_hpz", "tp"], "world_size": [4]}
    fixed = {**TINY, "model_name_or_path": "gpt-tiny"}
    file = write_suite(tmp_path, plain, fixed)
    assert main(["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]) == 0
    predictions = [line.split("  # predicted: ")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(predictions) == 3
    assert sum(line.startswith("no memory for tp, whose ranks share") for line in predictions) == 1
    assert sum(" GiB a rank, " in line for line in predictions) == 2
    file = write_suite(tmp_path, {"strategy": ["ddp"]}, {**fixed, "optimizer": "muon", "max_grad_norm": 0})
    assert main(["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]) == 0
    assert "predicted: no memory for muon" in capsys.readouterr().out


def test_a_sweep_warns_of_cells_that_cannot_fit_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = {**TINY, "model_name_or_path": "gpt-175b"}
    file = write_suite(tmp_path, {"strategy": ["single", "zero3"]}, fixed)
    # Without time for any cell, the warnings are still printed.
    assert main(["run", str(file), "--runs_dir", str(tmp_path / "runs"), "--time_budget", "0s"]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 2
    assert all("is predicted to run out of memory: a rank needs about" in line for line in warned)
    expected = write_suite(tmp_path, {"strategy": ["single"]}, {**fixed, "expect": "oom"})
    assert main(["run", str(expected), "--runs_dir", str(tmp_path / "runs"), "--time_budget", "0s"]) == 0
    assert "warning: " not in capsys.readouterr().err
