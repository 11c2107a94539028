"""Find the Slurm job of this process by its environment, and start steps on the job's nodes.

`srun python -m study.host.slurm [FOLDER...]` describes each node of a job.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from study.config.errors import UserError
from study.host.folders import cache_directory
from study.host.machine import Machine, cpu_info, detect_machine, gpu_names, operator_build_folder
from study.host.memory import available_cores, kernel_text


@dataclasses.dataclass(frozen=True)
class Job:
    """A Slurm job, with its nodes."""

    id: str
    # In the job's order.
    nodes: tuple[str, ...]
    # Of the smallest node.
    cores_per_node: int

    def srun_command(self, nodes: int) -> list[str]:
        """Return `srun` for one task on each of the job's first nodes, with all of the job's resources there."""
        return [
            "srun",
            f"--nodelist={','.join(self.nodes[:nodes])}",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            # By default a task has one core, a process manager that Accelerate mistakes for its launcher, and an
            # environment that is empty under `sbatch --export=NONE`.
            "--ntasks-per-node=1",
            f"--cpus-per-task={self.cores_per_node}",
            "--cpu-bind=none",
            "--mpi=none",
            "--export=ALL",
            "--overlap",
            "--kill-on-bad-exit=1",
            "--wait=60",
        ]


def current_job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """Return the job; None outside of a job, and on the node of a one-node job, which does not need Slurm."""
    id, listed = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not id or not listed or listed == environment.get("SLURMD_NODENAME"):
        return None
    if missing := [command for command in ("scontrol", "srun") if not shutil.which(command)]:
        fix = "add the folder of Slurm's commands to PATH, or use a job of one node and start this there"
        raise UserError(f"this Slurm job is on {listed}, and {missing[0]} is not on PATH here", fix)
    # Such as `96(x2),64`.
    cores = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", environment.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    return Job(id, _hostnames(listed), min(map(int, cores), default=1))


def is_in_job() -> bool:
    """Whether this process runs in a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def is_array_task() -> bool:
    """Whether this process runs in a task of a Slurm array."""
    return "SLURM_ARRAY_JOB_ID" in os.environ


def check_single_slurm_task() -> None:
    """Raise UserError if srun started several tasks of this command."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "SLURM_STEP_ID" in os.environ:
        problem = f"this is one of {tasks} tasks that srun started, and each would run the suite"
        raise UserError(problem, "start it once, without srun: it starts its runs on all nodes by itself")


@functools.cache
def _hostnames(listed: str) -> tuple[str, ...]:
    return tuple(_answer("scontrol", "show", "hostnames", listed).split())


@functools.cache
def node_address(node: str) -> str:
    """Return Slurm's address of a node, since not every cluster can resolve the names of nodes."""
    match = re.search(r"\bNodeAddr=(\S+)", _answer("scontrol", "show", "node", node))
    return match[1] if match else node


def _answer(*command: str, timeout_s: float = 60, fix: str = "ask the cluster's administrators") -> str:
    """Return the output of a command of Slurm; raise UserError with its message if it fails."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        # srun reports only that a task failed.
        lines = [line for line in lines if "srun:" not in line] or lines or ["no message"]
        raise UserError(f"Slurm's `{' '.join(command[:4])}` failed ({lines[-1][:300]})", fix) from None


# On a cold file system Python may start slowly on the last node.
_PATIENCE_S = 180
_MARK = "zero-study: node "
_LINE = 500


# Resources of one node: the keys that describe_node prints.
Node = types.SimpleNamespace


def job_resources() -> Machine:
    """Return the resources of the job, or of this machine. Each node counts as the smallest: a run uses all alike."""
    if (job := current_job()) is None:
        return detect_machine()
    nodes = query_nodes(job)
    fewest = min(len(node.gpu_memory_gib) for node in nodes)
    gpus = tuple(size for node in nodes for size in node.gpu_memory_gib[:fewest])
    return Machine(gpus, min(node.host_memory_gib for node in nodes), len(nodes))


def check_shared_folder(job: Job, folder: Path) -> None:
    """Raise UserError if not all nodes see a folder; a file with a new name tests that."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".zero-study-nodes-") as file:
        blind = [node.name for node in query_nodes(job, (file.name,)) if not node.paths]
    if blind:
        problem = f"{', '.join(blind)} does not see {folder}, the folder of the records"
        raise UserError(problem, "set --runs_dir to a folder that all nodes of the job share")


@functools.cache
def query_nodes(job: Job, folders: Sequence[str] = ()) -> list[Node]:
    """Return the resources of the job's nodes, and which of the folders each sees."""
    printed = _answer(
        *job.srun_command(len(job.nodes)),
        sys.executable,
        "-m",
        "study.host.slurm",
        *folders,
        timeout_s=_PATIENCE_S,
        fix=f"mount this repository and its Python under the same paths on {', '.join(job.nodes)}",
    )
    texts: dict[int, str] = {}
    for place, part in re.findall(rf"^{_MARK}(\d+) (.*)$", printed, re.MULTILINE):
        texts[int(place)] = texts.get(int(place), "") + part
    return [Node(**json.loads(texts[place])) for place in sorted(texts)]


def describe_node(folders: list[str]) -> None:
    """Print this node in short lines, since srun mixes lines of more than 1024 characters of two nodes."""
    box, cache = detect_machine(), cache_directory()
    place = os.environ.get("SLURM_NODEID", "0")
    text = json.dumps(
        {
            "name": os.environ.get("SLURMD_NODENAME", platform.node()),
            "gpus": gpu_names(),
            "gpu_memory_gib": box.gpu_memory_gib,
            "host_memory_gib": box.host_memory_gib,
            "cores": available_cores(),
            "cpu": cpu_info().get("model name", platform.machine()),
            # The requested folders that exist on it.
            "paths": [folder for folder in folders if Path(folder).exists()],
            "operators": sorted(file.stem for file in operator_build_folder(cache).glob("*/*.so")),
            "weights": sorted(file.parent.name for file in (cache / "initial_weights").glob("*/initial_weights.json")),
            "networks": networks(),
        }
    )
    for start in range(0, len(text), _LINE):
        print(f"{_MARK}{place} {text[start : start + _LINE]}", flush=True)


def networks(root: Path = Path("/sys/class")) -> list[str]:
    """Return the active InfiniBand and RoCE ports with their rates; without any, Ethernet. `root` is sysfs."""
    ports = [
        f"{port.parents[1].name} {kernel_text(port / 'rate')}"
        for port in sorted(root.glob("infiniband/*/ports/*"))
        if "ACTIVE" in kernel_text(port / "state")
    ]
    links = [
        f"{link.name} {int(speed) / 1000:g} Gb/s"
        for link in sorted(root.glob("net/*"))
        if (speed := kernel_text(link / "speed")).isdecimal() and kernel_text(link / "operstate") == "up"
    ]
    return ports or links


if __name__ == "__main__":
    describe_node(sys.argv[1:])
