"""A cell: one run of a suite, and the command that launches it."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Literal

from study.config import places, strategies
from study.config.flags import BatchPlan, RunConfig
from study.host.slurm import Job, current_job, job_resources, node_address

Trainer = Literal["study", "hf_trainer", "bare_loop"]
_SCRIPTS: dict[Trainer, str] = {
    "study": "train.py",
    "hf_trainer": "experiments/baselines/hf_trainer.py",
    "bare_loop": "experiments/baselines/bare_loop.py",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a suite."""

    strategy: str
    world_size: int
    config: RunConfig
    # The suite's settings, without the defaults of study/train.py.
    requested: RunConfig
    repeat: int
    time_limit_s: float = 3600.0
    # The suite's estimate, used until a record has a measurement.
    expected_s: float | None = None
    trainer: Trainer = "study"
    # Set if the cell demonstrates that the suite's hardware runs out of memory.
    expect: Literal["oom"] | None = None
    # A name in study/releases/stacks.yaml; None for the installed releases.
    stack: str | None = None

    @functools.cached_property
    def id(self) -> str:
        return f"{self.config.run_id(self.arm, self.ranks)}-r{self.repeat}"

    @property
    def ranks(self) -> int:
        """World size of the measured job; a virtual rank itself is launched as a single process."""
        return self.config.virtual_world_size or self.world_size

    @property
    def plan(self) -> BatchPlan:
        """Batch plan of the run; raises UserError if the batch does not divide over the ranks."""
        group_size = strategies.read_strategy(self.strategy).with_group_size(self.config.group_size).group_size
        return self.config.batch_plan(self.ranks, group_size)

    @property
    def arm(self) -> str:
        """The strategy, with the trainer if it is not study/train.py, `virtual` for a virtual rank, and the stack."""
        marks = [self.trainer] * (self.trainer != "study") + ["virtual"] * bool(self.config.virtual_world_size)
        marks += [f"ds{self.stack}"] * bool(self.stack)
        return "-".join([self.strategy, *marks])

    @property
    def total_steps(self) -> int | None:
        is_set = self.config.max_steps or self.config.train_samples
        return self.config.total_steps(self.config.train_samples or self.config.global_batch_size) if is_set else None

    def flags(self, output_dir: Path) -> list[str]:
        flags = []
        for field in dataclasses.fields(RunConfig):
            value = getattr(self.requested, field.name)
            if value == field.default and field.name != "task":
                continue
            if isinstance(value, bool):
                flags.append(f"--{field.name}" if value else f"--no-{field.name}")
            elif isinstance(value, tuple):
                flags += [f"--{field.name}={item}" for item in value]
            else:
                flags += [f"--{field.name}", str(value)]
        return [*flags, "--output_dir", str(output_dir)]


def launch_command(cell: Cell, output_dir: Path, *extra_flags: str) -> list[str]:
    """Return the command that launches the cell from WORKING_FOLDER."""
    processes = [] if cell.strategy == "single" else ["--num_processes", str(cell.world_size)]
    configuration = str(_shortest(strategies.STRATEGY_DIRECTORY / f"{cell.strategy}.yaml"))
    launcher = [accelerate(), "launch", "--config_file", configuration, *processes]
    script = [str(_shortest(places.PACKAGE / _SCRIPTS[cell.trainer])), *cell.flags(_shortest(output_dir)), *extra_flags]
    if (job := current_job()) is None:
        return [*launcher, *script]
    # The sweep rejects a cell that needs more nodes; its command shows all of the job's nodes.
    return srun_command(job, job_resources().nodes_for(cell.world_size) or len(job.nodes), launcher, script)


def srun_command(job: Job, nodes: int, launcher: list[str], script: list[str]) -> list[str]:
    """Return an `srun` command that starts a launcher on each node."""
    if nodes == 1:
        return [*job.srun_command(1), *launcher, *script]
    rendezvous = ["--num_machines", str(nodes), "--main_process_ip", node_address(job.nodes[0])]
    # Jobs may share this node, which is the main process's in a batch script.
    with socket.create_server(("", 0)) as free:
        rendezvous += ["--main_process_port", str(free.getsockname()[1])]
    # The rank of a node is set only in the environment of the step, so a shell on the node reads it.
    line = f"exec {shlex.join([*launcher, *rendezvous])}"
    return [*job.srun_command(nodes), "bash", "-c", f'{line} --machine_rank "$SLURM_NODEID" {shlex.join(script)}']


def _shortest(path: Path) -> Path:
    """Return the path relative to the folder in which every command runs, if it is below it."""
    path, root = path.absolute(), places.WORKING_FOLDER.absolute()
    return path.relative_to(root) if path.is_relative_to(root) else path


def accelerate() -> str:
    """Return `accelerate` if it is this installation's script on PATH, else the path of the script.

    Without Accelerate it is the command too: a dry run prints it, and a sweep checks the packages before it starts one.
    """
    installed = Path(sys.executable).parent / "accelerate"
    on_path = shutil.which("accelerate")
    if on_path and (not installed.exists() or Path(on_path).samefile(installed)):
        return "accelerate"
    return str(_shortest(installed)) if installed.exists() else "accelerate"
