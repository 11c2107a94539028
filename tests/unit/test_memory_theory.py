"""The memory formulas, compared with real models and engines, and applied to every cell planned for a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from study.cli import main
from study.config.places import REPOSITORY
from study.host.machine import Machine
from study.predictor.hardware import to_box
from study.predictor.models import model_shape
from study.predictor.request import request_for
from study.predictor.time import predict_time
from study.records.directory import RunWriter
from study.records.outcome import Outcome
from study.sweep.plan import plan_suite
from study.sweep.search import representative_cell
from sweeps import gpu_suites, gpu_suites_with_cells, planned, planned_cells, shipped, write_suite

# Transfer rates of a common NVMe drive.
DRIVE_GB_PER_S = 2.0


PARAMETERS = yaml.safe_load((REPOSITORY / "tests/data/published_parameters.yaml").read_text())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_is_predicted_with_its_published_parameters(name):
    assert model_shape(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", gpu_suites_with_cells())
def test_a_cell_with_nvme_offload_ends_within_its_time_limit(name):
    for cell in planned_cells(name):
        steps = cell.total_steps or cell.config.total_steps(800)
        box = to_box(f"{cell.ranks // cell.world_size}x{cell.world_size}xA100")
        box = replace(box, nvme_read_gb_per_s=DRIVE_GB_PER_S, nvme_write_gb_per_s=DRIVE_GB_PER_S)
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
        # A card of 80 GB reports 79 GiB.
        assert len({cap < 79 for cap in caps}) == 1


def test_a_cell_expected_to_run_out_of_memory_is_no_failure_and_marked_in_a_dry_run(tmp_path, capsys):
    expected = [{"where": {"strategy": "single"}, "fixed": {"expect": "oom"}}]
    file = write_suite(tmp_path, {"strategy": ["single", "ddp"]}, overrides=expected)
    arguments = [str(file), "--runs_dir", str(tmp_path / "runs")]
    assert main(["run", *arguments, "--dry_run"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert line.endswith("# expected to run out of memory") == ("single.yaml" in line)
    (part,) = plan_suite(str(file), Machine((), 16.0), tmp_path / "runs").slices
    folders = {representative_cell(cell).strategy: part.root / cell.id for cell in part.cells}
    RunWriter(folders["single"]).close(Outcome("oom", "made up"))
    RunWriter(folders["ddp"]).close(Outcome("unsupported", "made up"))
    assert main(["run", *arguments]) == 0
    RunWriter(folders["ddp"]).close(Outcome("oom", "made up"))
    assert main(["run", *arguments]) == 1
