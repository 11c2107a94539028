"""Several nodes: their memory together, the variables of a job, and messages of a failed node."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import yaml

from engines import ROOT
from study.config.errors import UserError
from study.host.machine import Machine
from study.host.memory import OomCounts
from study.host.slurm import Job, current_job
from study.records.lock import LockHeldError
from study.sweep.cell import srun_command
from study.sweep.cell_outcome import ExitEvidence
from study.sweep.launch import lock_sweep_directory, with_supervisor
from study.sweep.plan import missing_requirement, plan_cells, plan_suite
from study.sweep.search import representative_cell
from study.sweep.suite_file import Requirements, Suite, read_suite
from sweeps import write_suite

TWO_OF_EIGHT = Machine((80.0,) * 16, 1024.0, nodes=2)
JOB = Job("42", ("gpu-1", "gpu-2"), 96)
MESSAGES = yaml.safe_load((ROOT / "tests/data/slurm_messages.yaml").read_text())


@pytest.mark.parametrize(
    ("box", "ranks", "nodes"),
    [
        (TWO_OF_EIGHT, 16, 2),
        (TWO_OF_EIGHT, 8, 1),
        (TWO_OF_EIGHT, 1, 1),
        (TWO_OF_EIGHT, 12, 2),
        (TWO_OF_EIGHT, 15, None),
        (TWO_OF_EIGHT, 32, None),
        (Machine((80.0,) * 8, 1.0), 16, None),
        (Machine((), 16.0, nodes=2), 2, 2),
        (Machine((), 16.0, nodes=2), 3, 1),
        (Machine((), 16.0), 64, 1),
    ],
)
def test_a_run_uses_the_fewest_nodes_with_its_gpus_or_without_gpus_as_many_as_divide_it(box, ranks, nodes) -> None:
    assert box.nodes_for(ranks) == nodes


def test_a_suite_plans_for_all_gpus_of_a_job_and_may_require_so_many_on_each_node(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, {"strategy": "zero3"}, {"task": "gpt-wikitext", "global_batch_size": 16})
    assert [representative_cell(cell).world_size for cell in plan_cells(read_suite(suite), TWO_OF_EIGHT)] == [16]
    assert missing_requirement(Suite("many", "", Requirements(16, 8)), TWO_OF_EIGHT) is None
    refusal = missing_requirement(Suite("many", "", Requirements(16, 16)), TWO_OF_EIGHT)
    assert "many needs 16 GPUs on each node, and here are 2 nodes of 8 GPUs -> " in str(refusal)


def test_one_step_starts_a_supervised_launcher_on_each_node(monkeypatch) -> None:
    monkeypatch.setattr("study.sweep.cell.node_address", lambda node: f"{node}.example")
    command = srun_command(JOB, 2, ["accelerate", "launch"], ["study/train.py", "--data", "my file"])
    *srun, shell, _, line = command
    assert srun[:4] == ["srun", "--nodelist=gpu-1,gpu-2", "--nodes=2", "--ntasks=2"]
    assert "--cpus-per-task=96" in srun
    place = r"--num_machines 2 --main_process_ip gpu-1\.example --main_process_port (\d+)"
    start = rf"exec accelerate launch {place} --machine_rank \"\$SLURM_NODEID\" study/train.py --data 'my file'"
    match = re.fullmatch(start, line)
    assert match, line
    started = with_supervisor(command)
    assert (started[: len(srun)], started[len(srun) + 2 :]) == (srun, ["--on-a-node", shell, "-c", line])
    with socket.create_server(("", int(match[1]))):
        # A port that is in use is not chosen.
        assert f"--main_process_port {match[1]} " not in srun_command(JOB, 2, ["accelerate", "launch"], [])[-1]


def test_a_job_of_one_node_on_that_node_needs_no_slurm_and_others_need_its_commands(monkeypatch) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    assert current_job({}) is None
    assert current_job(job) is None
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="scontrol is not on PATH"):
        current_job(job | {"SLURMD_NODENAME": "login"})
    monkeypatch.setattr("study.host.slurm._hostnames", lambda listed: ("n1", "n2"))
    monkeypatch.setattr("shutil.which", lambda command: command)
    for listed, least in {"96": 96, "96(x2)": 96, "128(x2),64": 64, "": 1}.items():
        job_found = current_job(job | {"SLURMD_NODENAME": "login", "SLURM_JOB_CPUS_PER_NODE": listed})
        assert job_found == Job("7", ("n1", "n2"), least)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_slurm_and_of_other_nodes_decide_how_a_run_ended(message: dict[str, str]) -> None:
    # srun exits with 137 if a launcher itself was killed, as the kernel once did while the launcher imported torch.
    status = 137 if "2 1671" in message["printed"] else 1
    ending = ExitEvidence(status, None, 5.0, None, None, message["printed"], "", OomCounts(0, 0)).ending
    assert (ending.state, message["says"] in ending.reason) == (message["state"], True), ending


def test_only_tasks_of_one_array_share_a_folder_of_records(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    with lock_sweep_directory(tmp_path), lock_sweep_directory(tmp_path):
        monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
        with pytest.raises(LockHeldError):
            lock_sweep_directory(tmp_path)


def test_a_smaller_job_runs_the_cells_of_a_larger_suite_that_fit(tmp_path: Path) -> None:
    box, half_a_node = Machine((80.0,) * 16, 128.0, nodes=2), Machine((80.0,) * 4, 128.0)
    for job_box, only in ((box, ["world_size=16"]), (half_a_node, ["world_size=4"])):
        (part,) = plan_suite("scaling", job_box, tmp_path, only).slices
        assert missing_requirement(part.suite, job_box, part.cells) is None
    (unfiltered,) = plan_suite("scaling", box, tmp_path).slices
    refusal = missing_requirement(unfiltered.suite, box, unfiltered.cells)
    assert "scaling needs 32 GPUs, and this machine shows 16 -> " in str(refusal)
