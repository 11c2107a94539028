"""The launch of this process: its strategy and its rank, from the variables that `accelerate launch` exported."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from study.config import strategies
from study.config.errors import UserError
from study.config.strategies import Strategy

# Variables that `accelerate launch` exports if the file sets them, and inherits from the shell if it does not.
_SAID_BY_THE_FILE = re.compile(
    r"ACCELERATE_(USE_(DEEPSPEED|FSDP|MEGATRON_LM|SAGEMAKER|PARALLELISM_CONFIG)|DEEPSPEED_\w+|CONFIG_DS_FIELDS"
    r"|GRADIENT_\w+|TORCH_DEVICE|DOWNCAST_BF16)|(FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_\w+"
)
# Rank and size of a process without a launcher: Accelerate treats LOCAL_RANK and MPI's sizes as a launch.
_PLACE_ALONE = {"RANK": "0", "LOCAL_RANK": "-1"} | dict.fromkeys(
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), "1"
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """The strategy of this process, and its rank."""

    strategy: Strategy
    world_size: int
    rank: int
    local_rank: int
    local_world_size: int
    # Whether one process runs one of `world_size` ranks alone.
    virtual: bool = False

    def ranks_per_replica(self, strategy: Strategy) -> int | None:
        """Ranks over which hsdp or zero3_hpz shards a replica, given the overridden strategy; None for other ones."""
        return strategy.ranks_per_replica(self.world_size, self.ranks_per_machine)

    @property
    def ranks_per_machine(self) -> int:
        return strategies.DEFAULT_RANKS_PER_NODE if self.virtual else self.local_world_size

    @property
    def group_index(self) -> int:
        return self.rank // self.strategy.group_size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's record."""
        return self.virtual or self.rank == 0

    @property
    def machines(self) -> int:
        return 1 if self.virtual else self.world_size // self.local_world_size

    def command(self, num_processes: int, machines: int = 1) -> str:
        """Return a command that launches this run with another number of ranks per machine."""
        # Accelerate does not export which file was launched.
        file = "YOUR_FILE" if self.strategy.custom_settings else self.strategy.name
        place = ""
        if machines > 1:
            rank, address, port = (os.environ.get(name) for name in ("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"))
            place = (
                f"--num_machines {machines} --machine_rank {rank}"
                f" --main_process_ip {address} --main_process_port {port} "
            )
        return (
            f"accelerate launch --config_file accelerate_configs/{file}.yaml {place}"
            f"--num_processes {num_processes * machines} study/train.py {shlex.join(sys.argv[1:])}"
        ).strip()


def virtual_launch(launch: Launch, world_size: int, rank: int) -> Launch:
    """Return the launch of this process as one rank of a virtual job."""
    if launch.strategy.name == "single":
        raise UserError("single has one rank and cannot run as a virtual rank", "launch another strategy's file")
    if launch.world_size > 1:
        problem = f"a virtual rank is one process, but {launch.world_size} were launched"
        raise UserError(problem, f"run: {launch.command(1)}")
    return dataclasses.replace(launch, world_size=world_size, rank=rank, virtual=True)


def read_launch(environment: Mapping[str, str] = os.environ, shell: Mapping[str, str] | None = None) -> Launch:
    """Read strategy and rank from the exported variables; `shell`, the launcher's own, shows what is left over."""
    if shell is not None:
        _check_stale_launch_variables(environment, shell)
    world_size = int(environment.get("WORLD_SIZE", 1))
    return Launch(
        strategy=strategies.launched_strategy(environment, world_size > 1 or "TORCHELASTIC_RUN_ID" in environment),
        world_size=world_size,
        rank=int(environment.get("RANK", 0)),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
    )


def read_launcher_environment() -> dict[str, str]:
    """Return the launcher's environment, without the variables that it set for its children; {} if unreadable."""
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}  # no Linux, or another user's launcher
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if entry)


def _check_stale_launch_variables(environment: Mapping[str, str], shell: Mapping[str, str]) -> None:
    """Raise if the shell sets a variable of the launcher: it could select another strategy than the launched file."""
    before = shell
    # torch's launcher sets a separate file for each process.
    error_file, inherited_file = (variables.get("TORCHELASTIC_ERROR_FILE") for variables in (environment, shell))
    if "TORCHELASTIC_RUN_ID" not in environment or (error_file is not None and error_file == inherited_file):
        shell = {**shell, **environment}
        leftovers = [name for name, alone in _PLACE_ALONE.items() if environment.get(name, alone) != alone]
    else:
        leftovers = []
    leftovers += sorted(name for name in shell if _SAID_BY_THE_FILE.fullmatch(name))
    if shell.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        # `single` would train on the CPU while the GPU is idle, and its record would name the GPU.
        # `accelerate launch` exports a precision, and this variable if its flag or file sets it.
        if "ACCELERATE_MIXED_PRECISION" in environment and "ACCELERATE_USE_CPU" not in before:
            raise UserError("the launch asks for --cpu or use_cpu", "leave it out, or hide GPUs: CUDA_VISIBLE_DEVICES=")
        leftovers.append("ACCELERATE_USE_CPU")
    if leftovers:
        problem = f"the environment variable {leftovers[0]} is set, but not by the launched file"
        raise UserError(problem, f"run: unset {' '.join(leftovers)}")
