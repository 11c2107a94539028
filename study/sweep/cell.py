"""A cell: one run of a study, and the command that a person would type for it."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import sys
from pathlib import Path
from typing import Literal

from study.config.errors import UserError
from study.config.flags import BatchPlan, RunConfig
from study.config.strategies import REPOSITORY, read_strategy
from study.host.slurm import allocated_box, this_job
from study.sweep.step import on_nodes

Trainer = Literal["study", "hf_trainer", "bare_loop"]
_SCRIPTS: dict[Trainer, str] = {
    "study": "study/train.py",
    "hf_trainer": "study/baselines/hf_trainer.py",
    "bare_loop": "study/baselines/bare_loop.py",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a suite."""

    strategy: str
    world_size: int
    config: RunConfig
    # What the suite says of it, without the defaults of study/train.py.
    asked: RunConfig
    repeat: int
    time_limit_s: float = 3600.0
    # The suite's own estimate, which holds until a record says better.
    expected_s: float | None = None
    trainer: Trainer = "study"
    # That a box which the suite is made for runs out of memory here, which is what the cell is there to show.
    expect: Literal["oom"] | None = None
    # The releases under which it runs, by their name in study/releases/stacks.yaml; None for the installed ones.
    stack: str | None = None

    @functools.cached_property
    def id(self) -> str:
        return f"{self.config.run_id(self.arm, self.ranks)}-r{self.repeat}"

    @property
    def ranks(self) -> int:
        """How many ranks the measured job has; of a virtual one a single process is launched."""
        return self.config.virtual_world_size or self.world_size

    @property
    def plan(self) -> BatchPlan:
        team_size = read_strategy(self.strategy).with_team(self.config.team_size).team_size
        return self.config.batch_plan(self.ranks, team_size)

    @property
    def arm(self) -> str:
        """The strategy, with its trainer where that is not the study's own, `virtual` for a virtual rank, its stack."""
        marks = [self.trainer] * (self.trainer != "study") + ["virtual"] * bool(self.config.virtual_world_size)
        marks += [f"ds{self.stack}"] * bool(self.stack)
        return "-".join([self.strategy, *marks])

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps; None where only the data tells."""
        known = self.config.max_steps or self.config.train_samples
        return self.config.total_steps(self.config.train_samples or self.config.global_batch_size) if known else None

    def flags(self, output_dir: Path) -> list[str]:
        """The command line of study/train.py that asks for exactly this run."""
        flags = []
        for field in dataclasses.fields(RunConfig):
            value = getattr(self.asked, field.name)
            if value == field.default and field.name != "task":
                continue
            if isinstance(value, bool):
                flags.append(f"--{field.name}" if value else f"--no-{field.name}")
            elif isinstance(value, tuple):
                flags += [f"--{field.name}={item}" for item in value]
            else:
                flags += [f"--{field.name}", str(value)]
        return [*flags, "--output_dir", str(output_dir)]

    @property
    def uses_nvme(self) -> bool:
        return read_strategy(self.strategy).uses_nvme


def launch_command(cell: Cell, output_dir: Path, *extra_flags: str) -> list[str]:
    """What a person would type in the repository root."""
    processes = [] if cell.strategy == "single" else ["--num_processes", str(cell.world_size)]
    configuration = f"accelerate_configs/{cell.strategy}.yaml"
    launcher = [accelerate(), "launch", "--config_file", configuration, *processes]
    script = [_SCRIPTS[cell.trainer], *cell.flags(_shortest(output_dir)), *extra_flags]
    if (job := this_job()) is None:
        return [*launcher, *script]
    # What does not fit is told by the sweep, and shown on all nodes.
    return on_nodes(job, allocated_box().nodes_for(cell.world_size) or len(job.nodes), launcher, script)


def _shortest(path: Path) -> Path:
    """As seen from the repository root, where every command runs."""
    path = path.absolute()
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path


def accelerate() -> str:
    """The word `accelerate` where the shell finds this installation's, else its path."""
    beside = Path(sys.executable).parent / "accelerate"
    found = shutil.which("accelerate")
    if found and (not beside.exists() or Path(found).samefile(beside)):
        return "accelerate"
    if beside.exists():
        return str(_shortest(beside))
    raise UserError("Accelerate is not installed here", "run: pip install -e '.[train]'")
