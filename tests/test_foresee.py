"""What a dry run predicts of each cell, and the warning of what cannot fit before any time is spent."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from study.cli import main
from study.config.strategies import WITH_TEAMS
from study.host.box import Box
from study.predictor.floor import ANY_DEVICE
from study.predictor.memory import predict_memory
from study.predictor.request import Hardware as Ranks
from study.predictor.runs import request_for
from study.sweep.cell import Cell
from study.sweep.foresee import Foresight, foresight, is_certain_to_run_out, needs_of, warnings
from study.sweep.plan import plan_cells
from study.sweep.search import example_of
from study.sweep.slices import missing_here
from study.sweep.suite_file import read_suite
from sweeps import TINY, box_for, cells_of, gpu_suites_with_cells, shipped, write_suite

GIB = 2**30


def test_a_dry_run_tells_memory_time_and_outcome_of_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3_cpu"], "model_name_or_path": ["gpt-tiny", "gpt2"]})
    arguments = ["run", str(file), "--runs-dir", str(tmp_path), "--dry-run"]
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
        assert "  # predicted: 2 ranks need as many GPUs, of which T4 has 1, " in line


def test_hardware_is_for_a_dry_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_suite(tmp_path, {"strategy": ["ddp"]})
    assert main(["run", str(file), "--runs-dir", str(tmp_path), "--hardware", "T4"]) == 2
    assert "add --dry-run" in capsys.readouterr().err
    assert main(["run", str(file), "--runs-dir", str(tmp_path), "--dry-run", "--hardware", "T5"]) == 2
    assert "did you mean T4" in capsys.readouterr().err


@pytest.mark.parametrize("name", gpu_suites_with_cells())
def test_cells_that_are_predicted_to_run_out_of_memory_are_marked_so_and_no_others(name: str) -> None:
    """By the lower end of the peak's interval, on the smallest GPU that the suite takes; or with certainty."""
    wanted, box = shipped()[name].requires, box_for(name)
    ahead = Foresight(shipped()[name], box, {}, None)
    for cell in cells_of(name):
        device = cell.config.device_memory_cap_gib or wanted.gpu_memory_gib
        nodes = box.nodes_for(cell.world_size) or 1
        is_certain = is_certain_to_run_out(needs_of(cell), device, wanted.host_memory_gib, nodes)
        request = ahead.request(cell)
        low = predict_memory(request).peak_reserved.low if request else None
        runs_out = is_certain or (low is not None and low > device * GIB)
        assert runs_out == (cell.expect == "oom"), cell.id
    assert not list(warnings(cells_of(name), box))


@pytest.mark.parametrize("name", sorted({part.suite for part in shipped()["one_gpu"].slices}))
def test_a_rented_suite_fits_the_gpu_it_asks_for_and_asks_for_a_large_one_only_where_it_must(name: str) -> None:
    """Six of them had kept an H100 from all that measures speed."""
    suite = shipped()[name]
    # As NVML shows one of 80 GB.
    h100 = Box((81559 / 1024,), suite.requires.host_memory_gib)
    ahead = Foresight(suite, box_for(name), {}, None)
    told = {cell.id: ahead.told(cell) for cell in cells_of(name) if cell.expect is None}
    if suite.requires.gpu_memory_gib <= h100.gpu_memory_gib[0]:
        assert missing_here(suite, h100) is None
        assert {cell: said for cell, said in told.items() if not said.endswith(", fits")} == {}
    else:
        found = (re.search(r"([\d.]+) GiB a rank", said) for said in told.values())
        caps = [example_of(cell).config.device_memory_cap_gib or 0 for cell in plan_cells(suite, h100)]
        assert max([*caps, *(float(one[1]) for one in found if one)]) > h100.gpu_memory_gib[0]


def test_what_nobody_predicts_is_named_and_copies_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"strategy": ["hsdp", "zero3_hpz", "tp"], "world_size": [4]}
    file = write_suite(tmp_path, plain, {**TINY, "model_name_or_path": "gpt-tiny"})
    assert main(["run", str(file), "--runs-dir", str(tmp_path), "--dry-run"]) == 0
    said = [line.split("  # predicted: ")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(said) == 3
    assert sum(line.startswith("no memory for tp, whose ranks share") for line in said) == 1
    assert sum(" GiB a rank, " in line for line in said) == 2
    tiny = {**TINY, "model_name_or_path": "gpt-tiny"}
    # A rank above the model's width is peft's to take.
    for rank in (8, 300):
        lora = {"strategy": ["ddp"], "peft": ["none", "lora"]}
        file = write_suite(tmp_path, lora, tiny | {"lora_rank": rank})
        assert main(["run", str(file), "--runs-dir", str(tmp_path), "--dry-run"]) == 0
        said = re.findall(r"predicted: ([\d.]+) GiB a rank", capsys.readouterr().out)
        assert len(said) == 2
        assert (float(said[1]) < float(said[0])) == (rank == 8)
    file = write_suite(tmp_path, {"strategy": ["ddp"]}, tiny | {"optimizer": "muon", "max_grad_norm": 0})
    assert main(["run", str(file), "--runs-dir", str(tmp_path), "--dry-run"]) == 0
    assert "predicted: no memory for muon" in capsys.readouterr().out


@pytest.mark.parametrize("name", gpu_suites_with_cells())
def test_a_prediction_is_never_below_what_is_certain(name: str) -> None:
    ahead = foresight(shipped()[name], Box((), 16.0), {}, None)
    for cell in cells_of(name):
        needs = needs_of(cell)
        assert needs is not None
        if cell.strategy in WITH_TEAMS:
            continue
        predicted = float(ahead.told(cell).removeprefix("predicted: ").split(" GiB")[0])
        assert predicted >= 0.99 * needs.device_bytes / GIB, cell.id


@pytest.mark.parametrize("device_gib", [0.0, 16.0])
def test_nor_is_it_of_what_is_compiled_drops_out_or_has_no_gpu(tmp_path: Path, device_gib: float) -> None:
    axes = {"model_name_or_path": ["gpt2-xl", "llama-tiny"], "torch_compile": [False, True], "dropout": [0.0, 0.1]}
    fixed = {**TINY, "strategy": "zero3", "precision": "bf16", "global_batch_size": 32, "seq_length": 1024}
    suite = read_suite(write_suite(tmp_path, {**axes, "gradient_checkpointing": [False, True]}, fixed))
    device = replace(ANY_DEVICE, memory_gib=device_gib)
    for cell in plan_cells(suite, Box((), 16.0)):
        assert isinstance(cell, Cell)
        batch = cell.plan.per_device_train_batch_size, cell.plan.gradient_accumulation_steps
        memory = predict_memory(request_for(cell.strategy, cell.config, Ranks("any", device, cell.ranks), *batch))
        needs = needs_of(cell, on_gpu=device_gib > 0)
        assert needs is not None
        assert memory.peak_allocated.value >= needs.device_bytes, cell.id


def test_a_sweep_warns_of_what_cannot_fit_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {**TINY, "model_name_or_path": "gpt-175b"}
    file = write_suite(tmp_path, {"strategy": ["single", "zero3"]}, fixed)
    # No time for any cell: the warnings come all the same.
    assert main(["run", str(file), "--runs-dir", str(tmp_path / "runs"), "--time-budget", "0s"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 2
    assert all("is certain to run out of memory: a rank needs at least" in line for line in said)
    expected = write_suite(tmp_path, {"strategy": ["single"]}, {**fixed, "expect": "oom"})
    assert main(["run", str(expected), "--runs-dir", str(tmp_path / "runs"), "--time-budget", "0s"]) == 0
    assert "warning: " not in capsys.readouterr().err
