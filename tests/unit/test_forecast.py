"""Predictions of a dry run, and warnings of cells that cannot fit before any time is spent."""

from __future__ import annotations

import re

import pytest

from study.cli import main
from study.host.machine import Machine
from study.predictor.memory import predict_memory
from study.predictor.time import fits
from study.sweep.forecast import Forecast, oom_warnings
from study.sweep.plan import missing_requirement, plan_cells
from study.sweep.search import representative_cell
from sweeps import TINY, box_for, gpu_suites_with_cells, planned_cells, shipped, write_suite


def test_a_dry_run_predicts_memory_time_and_outcome_of_each_cell_and_hardware_needs_it(tmp_path, capsys):
    file = write_suite(tmp_path, {"strategy": ["ddp", "zero3_cpu"], "model_name_or_path": ["gpt-tiny", "gpt2"]})
    arguments = ["run", str(file), "--runs_dir", str(tmp_path)]

    def lines(*flags: str) -> list[str]:
        assert main([*arguments, "--dry_run", *flags]) == 0
        return capsys.readouterr().out.splitlines()

    without_hardware, with_hardware = lines(), lines("--hardware", "2xT4")
    assert len(without_hardware) == 4
    for line, predicted in zip(without_hardware, with_hardware, strict=True):
        assert re.search("  # predicted: .* GiB a rank, .*no time without --hardware, fits$", line)
        assert re.search(r" \(of 16\), .* s a step, .*, fits$", predicted)
        assert predicted.split("  # ")[0] == line.split("  # ")[0]
    assert all("  # predicted: 2 ranks need as many GPUs, and T4 has 1, " in line for line in lines("--hardware", "T4"))
    assert main([*arguments, "--hardware", "T4"]) == 2
    assert "add --dry_run" in capsys.readouterr().err


@pytest.mark.parametrize("name", gpu_suites_with_cells())
def test_cells_that_may_run_out_of_memory_are_predicted_to_and_all_that_must_are_among_them(name: str) -> None:
    """The forecast uses the smallest GPU that the suite allows."""
    forecast = Forecast(box_for(name), {}, None)
    for cell in planned_cells(name):
        if cell.expect == "oom":
            request = forecast.request(cell)
            assert request is not None
            assert not fits(predict_memory(request), request.box), cell.id
        else:
            assert not forecast.too_large(cell), cell.id
    assert not list(oom_warnings(planned_cells(name), box_for(name)))


@pytest.mark.parametrize("name", sorted({part.suite for part in shipped()["one_gpu"].slices}))
def test_a_rented_suite_fits_the_gpu_it_requires_and_requires_a_large_one_only_if_needed(name: str) -> None:
    suite = shipped()[name]
    # The memory that NVML reports for 80 GB.
    h100 = Machine((81559 / 1024,), suite.requires.host_memory_gib)
    ahead = Forecast(box_for(name), {}, None)
    described = {cell.id: ", ".join(ahead.describe(cell)) for cell in planned_cells(name) if cell.expect is None}
    if suite.requires.gpu_memory_gib <= h100.gpu_memory_gib[0]:
        assert missing_requirement(suite, h100) is None
        assert {cell: text for cell, text in described.items() if not text.endswith(", fits")} == {}
    else:
        needs = map(float, re.findall(r"([\d.]+) GiB a rank", " ".join(described.values())))
        caps = [representative_cell(cell).config.device_memory_cap_gib or 0 for cell in plan_cells(suite, h100)]
        assert max([*caps, *needs]) > h100.gpu_memory_gib[0]


def test_cells_without_a_prediction_are_named_and_replicas_have_one(tmp_path, capsys):
    fixed = {**TINY, "model_name_or_path": "gpt-tiny"}
    for strategies, more, says in (
        (["hsdp", "zero3_hpz"], {}, " GiB a rank, "),
        (["tp"], {}, "no memory for tp, whose ranks share"),
        (["ddp"], {"optimizer": "muon", "max_grad_norm": 0}, "no memory for muon"),
    ):
        file = write_suite(tmp_path, {"strategy": strategies, "world_size": [4]}, {**fixed, **more})
        assert main(["run", str(file), "--runs_dir", str(tmp_path), "--dry_run"]) == 0
        predictions = [line.split("  # predicted: ")[1] for line in capsys.readouterr().out.splitlines()]
        assert [says in text for text in predictions] == [True] * len(strategies)


def test_a_sweep_warns_of_cells_that_cannot_fit_before_it_begins(tmp_path, capsys):
    fixed = {**TINY, "model_name_or_path": "gpt-175b"}
    for strategies, more, count in ((["single", "zero3"], {}, 2), (["single"], {"expect": "oom"}, 0)):
        file = write_suite(tmp_path, {"strategy": strategies}, {**fixed, **more})
        # Without time for any cell, the warnings are still printed.
        assert main(["run", str(file), "--runs_dir", str(tmp_path / "runs"), "--time_budget", "0s"]) == 0
        says = "is predicted to run out of memory: a rank needs about"
        assert len(re.findall(f"^warning: .*{says}", capsys.readouterr().err, re.MULTILINE)) == count
