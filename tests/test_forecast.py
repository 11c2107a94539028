"""Predictions of a dry run, and warnings of cells that cannot fit before any time is spent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from study.cli import main
from study.host.box import Box
from study.sweep.forecast import Forecast, warnings
from study.sweep.plan import missing_here, plan_cells
from study.sweep.search import example_of
from sweeps import TINY, box_for, cells_of, gpu_suites_with_cells, shipped, write_suite

GIB = 2**30


def test_a_dry_run_predicts_memory_time_and_outcome_of_each_cell_and_hardware_needs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3_cpu"], "model_name_or_path": ["gpt-tiny", "gpt2"]})
    arguments = ["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]
    assert main(arguments) == 0
    here = capsys.readouterr().out.splitlines()
    assert len(here) == 4
    for line in here:
        assert " GiB a rank, " in line.split("  # predicted: ")[1]
        assert line.endswith("no time without --hardware, fits")
    assert main([*arguments, "--hardware", "2xT4"]) == 0
    there = capsys.readouterr().out.splitlines()
    assert all(" of 16, " in line and " s a step, " in line and line.endswith(", fits") for line in there)
    assert [line.split("  # ")[0] for line in there] == [line.split("  # ")[0] for line in here]
    assert not any("need as many GPUs" in line for line in there)
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
    """On the smallest GPU of the suite."""
    forecast = Forecast(shipped()[name], box_for(name), {}, None)
    for cell in cells_of(name):
        assert bool(forecast.too_large(cell)) == (cell.expect == "oom"), cell.id
    assert not list(warnings(cells_of(name), box_for(name)))


@pytest.mark.parametrize("name", sorted({part.suite for part in shipped()["one_gpu"].slices}))
def test_a_rented_suite_fits_the_gpu_it_asks_for_and_asks_for_a_large_one_only_where_it_must(name: str) -> None:
    suite = shipped()[name]
    # As NVML shows one of 80 GB.
    h100 = Box((81559 / 1024,), suite.requires.host_memory_gib)
    ahead = Forecast(suite, box_for(name), {}, None)
    described = {cell.id: ahead.describe(cell) for cell in cells_of(name) if cell.expect is None}
    if suite.requires.gpu_memory_gib <= h100.gpu_memory_gib[0]:
        assert missing_here(suite, h100) is None
        assert {cell: said for cell, said in described.items() if not said.endswith(", fits")} == {}
    else:
        found = (re.search(r"([\d.]+) GiB a rank", said) for said in described.values())
        caps = [example_of(cell).config.device_memory_cap_gib or 0 for cell in plan_cells(suite, h100)]
        assert max([*caps, *(float(one[1]) for one in found if one)]) > h100.gpu_memory_gib[0]


def test_what_has_no_prediction_is_named_and_replicas_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"strategy": ["hsdp", "zero3_hpz", "tp"], "world_size": [4]}
    file = write_suite(tmp_path, plain, {**TINY, "model_name_or_path": "gpt-tiny"})
    assert main(["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]) == 0
    said = [line.split("  # predicted: ")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(said) == 3
    assert sum(line.startswith("no memory for tp, whose ranks share") for line in said) == 1
    assert sum(" GiB a rank, " in line for line in said) == 2
    tiny = {**TINY, "model_name_or_path": "gpt-tiny"}
    # A rank above the model's width is peft's to take.
    for rank in (8, 300):
        lora = {"strategy": ["ddp"], "peft": ["none", "lora"]}
        file = write_suite(tmp_path, lora, tiny | {"lora_rank": rank})
        assert main(["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]) == 0
        said = re.findall(r"predicted: ([\d.]+) GiB a rank", capsys.readouterr().out)
        assert len(said) == 2
        assert (float(said[1]) < float(said[0])) == (rank == 8)
    file = write_suite(tmp_path, {"strategy": ["ddp"]}, tiny | {"optimizer": "muon", "max_grad_norm": 0})
    assert main(["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]) == 0
    assert "predicted: no memory for muon" in capsys.readouterr().out


def test_a_sweep_warns_of_what_cannot_fit_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {**TINY, "model_name_or_path": "gpt-175b"}
    file = write_suite(tmp_path, {"strategy": ["single", "zero3"]}, fixed)
    # No time for any cell: the warnings come all the same.
    assert main(["run", str(file), "--runs_dir", str(tmp_path / "runs"), "--time_budget", "0s"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 2
    assert all("is predicted to run out of memory: a rank needs about" in line for line in said)
    expected = write_suite(tmp_path, {"strategy": ["single"]}, {**fixed, "expect": "oom"})
    assert main(["run", str(expected), "--runs_dir", str(tmp_path / "runs"), "--time_budget", "0s"]) == 0
    assert "warning: " not in capsys.readouterr().err
