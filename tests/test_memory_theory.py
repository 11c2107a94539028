"""The memory formulas, compared with real models and engines, and applied to every cell planned for a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from study.cli import main
from study.config.flags import RunConfig, resolve_config
from study.host.machine import Machine
from study.predictor.hardware import to_box
from study.predictor.request import request_for
from study.predictor.shape import shape_of_preset
from study.predictor.time import predict_time
from study.records.directory import RunWriter
from study.sweep.plan import plan_suite
from study.sweep.search import representative_cell
from study.workloads.architecture import model_size
from study.workloads.presets import PRESETS
from sweeps import gpu_suites, gpu_suites_with_cells, planned, planned_cells, shipped, write_suite

# Transfer rates of a common NVMe drive.
DRIVE_GB_PER_S = 2.0
# Whole GiB that a card of 80 GB reports.
CARD_OF_80_GB_GIB = 79


def make_config(preset, name):
    config = RunConfig(scale="laptop", model_name_or_path=name, dropout=0.0)
    return resolve_config(config if preset.model_type == "bert" else replace(config, task="gpt-wikitext"), False)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_are_counted_as_the_model_has_them(name):
    preset = PRESETS[name].with_layers(3)
    assert shape_of_preset(preset).parameters == model_size(make_config(preset, preset.name)).parameters


@pytest.mark.parametrize("name", gpu_suites_with_cells())
def test_a_cell_with_nvme_offload_ends_within_its_time_limit(name):
    rates: dict[str, Any] = {"nvme_read_gb_per_s": DRIVE_GB_PER_S, "nvme_write_gb_per_s": DRIVE_GB_PER_S}
    for cell in planned_cells(name):
        steps = cell.total_steps or cell.config.total_steps(800)
        box = replace(to_box(f"{cell.ranks // cell.world_size}x{cell.world_size}xA100"), **rates)
        batch = cell.plan.per_device_train_batch_size, cell.plan.gradient_accumulation_steps
        seconds = steps * predict_time(request_for(cell.strategy, cell.config, box, *batch)).parts["nvme"]
        assert seconds <= (seconds if cell.expected_s is None else cell.expected_s) <= 0.8 * cell.time_limit_s, cell.id


@pytest.mark.parametrize("name", gpu_suites())
def test_a_suite_requires_the_memory_that_it_needs_and_no_larger_gpu_for_its_caps(name):
    """An 80 GiB cap among those of 16 and 40 once ruled out cards of 80 GB for all of them."""
    requires = shipped()[name].requires
    assert requires.gpu_memory_gib
    assert requires.host_memory_gib or all(cell.expect for cell in planned_cells(name))
    all_caps = {representative_cell(cell).config.device_memory_cap_gib for cell in planned(name)}
    if caps := {cap for cap in all_caps if cap is not None}:
        assert max(caps) < requires.gpu_memory_gib <= max(caps) + 1
        assert len({cap < CARD_OF_80_GB_GIB for cap in caps}) == 1


def test_a_cell_expected_to_run_out_of_memory_is_no_failure_and_marked_in_a_dry_run(tmp_path, capsys):
    file = write_suite(tmp_path, {"strategy": ["single", "ddp"]}, overrides=[
        {"where": {"strategy": "single"}, "fixed": {"expect": "oom"}},
    ])  # fmt: skip
    arguments = [str(file), "--runs_dir", str(tmp_path / "runs")]
    assert main(["run", *arguments, "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in lines:
        assert line.endswith("# expected to run out of memory") == ("single.yaml" in line)
    (part,) = plan_suite(str(file), Machine((), 16.0), tmp_path / "runs").slices
    folders = {representative_cell(cell).strategy: part.root / cell.id for cell in part.cells}
    RunWriter(folders["single"]).close("oom", "made up")
    RunWriter(folders["ddp"]).close("unsupported", "made up")
    assert main(["run", *arguments]) == 0
    RunWriter(folders["ddp"]).close("oom", "made up")
    assert main(["run", *arguments]) == 1
