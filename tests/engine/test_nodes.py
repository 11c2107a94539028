"""The job file for rented machines, run as two machines on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engines import ONE_THREAD, ROOT
from runs import FLAGS
from study.records.directory import read_run


@pytest.mark.long
def test_rented_machines_run_one_strategy_after_the_other_as_one_machine_does(tmp_path, get_run):
    task, flags = yaml.safe_load((ROOT / "cluster/study.sky.yaml").read_text()), [*FLAGS, "--task", "gpt-wikitext"]
    settings = {"STRATEGIES": "ddp", "FLAGS": " ".join(flags), "RUNS": str(tmp_path), "SUITE": "laptop"}
    assert settings.keys() == task["envs"].keys()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    job = settings | {
        "PATH": path,
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
    }
    machines = []
    for rank in ("0", "1"):
        environment = os.environ | ONE_THREAD | job | {"SKYPILOT_NODE_RANK": rank}
        machines.append(subprocess.Popen(["bash", "-c", task["run"]], cwd=ROOT, env=environment))
    assert [machine.wait(240) for machine in machines] == [0, 0]
    run, expected = read_run(tmp_path / "sky" / "ddp"), get_run("ddp", "--task", "gpt-wikitext")
    assert [row["loss"] for row in run.steps] == pytest.approx([row["loss"] for row in expected.steps], rel=1e-6)
    assert len(run.environment["other_machines"]) == 1
