"""The Slurm job that this process is in, told by its environment, and steps over the job's nodes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from study.config.errors import UserError
from study.host.box import Box, this_box

_COMMANDS = ("scontrol", "srun")
_ASK_S = 60


@dataclasses.dataclass(frozen=True)
class Job:
    id: str
    # In the job's own order.
    nodes: tuple[str, ...]
    # Of the smallest node.
    cores_per_node: int

    def step(self, nodes: int) -> list[str]:
        """`srun` for one task on each of the job's first nodes, with all that the job has there."""
        return [
            "srun", f"--nodelist={','.join(self.nodes[:nodes])}", f"--nodes={nodes}", f"--ntasks={nodes}",
            # Left to itself, a task has one core, a process manager that Accelerate takes for a launch, and an
            # environment that `sbatch --export=NONE` has emptied.
            "--ntasks-per-node=1", f"--cpus-per-task={self.cores_per_node}", "--cpu-bind=none", "--mpi=none",
            "--export=ALL", "--overlap", "--kill-on-bad-exit=1", "--wait=60",
        ]  # fmt: skip


def this_job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """None outside of a job, and in a job of one node on that very node, where nothing needs Slurm."""
    id, listed = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not id or not listed or listed == environment.get("SLURMD_NODENAME"):
        return None
    if missing := [command for command in _COMMANDS if not shutil.which(command)]:
        raise UserError(
            f"this Slurm job is on {listed}, and {missing[0]} is not on PATH here",
            "let PATH name the folder of Slurm's commands, or take a job of one node and start this there",
        )
    return Job(
        id=id,
        nodes=_hostnames(listed),
        cores_per_node=_least_cores(environment.get("SLURM_JOB_CPUS_PER_NODE", "1")),
    )


def is_in_job() -> bool:
    return "SLURM_JOB_ID" in os.environ


def is_array_task() -> bool:
    return "SLURM_ARRAY_JOB_ID" in os.environ


def refuse_to_be_one_of_many_tasks() -> None:
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "SLURM_STEP_ID" in os.environ:
        raise UserError(
            f"this is one of {tasks} tasks that srun started, and each would run the suite",
            "start it once, without srun: it starts its runs on all nodes by itself",
        )


@functools.cache
def _hostnames(listed: str) -> tuple[str, ...]:
    return tuple(_answer("scontrol", "show", "hostnames", listed).split())


@functools.cache
def address_of(node: str) -> str:
    """As Slurm knows it: not every cluster's names are known to a resolver."""
    found = re.search(r"\bNodeAddr=(\S+)", _answer("scontrol", "show", "node", node))
    return found[1] if found else node


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UserError(
            f"Slurm does not answer `{' '.join(command)}` ({(said or ['no word'])[-1]})", "ask who runs the cluster"
        ) from None


def _least_cores(per_node: str) -> int:
    """SLURM_JOB_CPUS_PER_NODE is such as `96(x2),64`."""
    return min((int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", per_node)), default=1)


def run_on_nodes(job: Job, command: Sequence[str], timeout_s: float) -> str:
    """What a short command printed, on all nodes together. A node where it fails is refused with its own words."""
    try:
        answer = subprocess.run(
            [*job.step(len(job.nodes)), *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(
            f"not all of {', '.join(job.nodes)} answered within {timeout_s:.0f} s", "look at what srun says there"
        ) from None
    if answer.returncode:
        said = [line for line in answer.stderr.splitlines() if "srun:" not in line] or answer.stderr.splitlines()
        raise UserError(
            f"a step on {', '.join(job.nodes)} fails: {(said or ['it says nothing'])[-1][:300]}",
            "let every node see this repository and its Python under the same paths",
        )
    return answer.stdout


# What the nodes of a Slurm job have together, each asked by a step over all of them.

# A cold file system may take its time to show Python on the last node.
_PATIENCE_S = 180
_MARK = "zero-study: node "
_LINE = 500


@dataclasses.dataclass(frozen=True)
class Node:
    """As `study/host/node.py` describes it."""

    place: int
    name: str
    gpus: list[str]
    gpu_memory_gib: list[float]
    host_memory_gib: float
    cores: int
    processor: str
    # Of the folders asked about, those that it sees.
    sees: list[str]
    cache: str
    operators: list[str]
    weights: list[str]
    networks: list[str]


def allocated_box() -> Box:
    """All nodes of the job, or this machine. As if each node had what the smallest has: a run takes the same of all."""
    if (job := this_job()) is None:
        return this_box()
    nodes = ask_nodes(job)
    fewest = min(len(node.gpu_memory_gib) for node in nodes)
    gpus = tuple(size for node in nodes for size in node.gpu_memory_gib[:fewest])
    return Box(gpus, min(node.host_memory_gib for node in nodes), len(nodes))


def refuse_unshared(job: Job, folder: Path) -> None:
    """Tried with a file whose name no node can have heard of before."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".zero-study-nodes-") as file:
        blind = [node.name for node in ask_nodes(job, (file.name,)) if not node.sees]
    if blind:
        raise UserError(
            f"{', '.join(blind)} does not see {folder}, where the records are kept",
            "let --runs-dir name a folder that all nodes of the job share",
        )


@functools.cache
def ask_nodes(job: Job, folders: Sequence[str] = ()) -> list[Node]:
    printed = run_on_nodes(job, [sys.executable, "-m", "study.host.node", *folders], _PATIENCE_S)
    said: dict[int, str] = {}
    for place, part in re.findall(rf"^{_MARK}(\d+) (.*)$", printed, re.MULTILINE):
        said[int(place)] = said.get(int(place), "") + part
    return [Node(**json.loads(said[place])) for place in sorted(said)]


def print_node(node: Node) -> None:
    """In short lines: srun mixes those of two nodes where they are longer than 1024 characters."""
    text = json.dumps(dataclasses.asdict(node))
    for start in range(0, len(text), _LINE):
        print(f"{_MARK}{node.place} {text[start : start + _LINE]}", flush=True)
