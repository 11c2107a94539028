"""The strategies: their names, their files in accelerate_configs/, and which of them launched this process.

A strategy is one Accelerate YAML, with a DeepSpeed JSON beside it for what YAML cannot say. How to add one is in
accelerate_configs/README.md. Whether the live engine did what the file asks is study/run/audit.py's to say.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.spec.config import RunConfig
from study.spec.names import (
    SHIPPED,
    asked_of_deepspeed,
    asked_of_fsdp,
    asked_without_engine,
    digest_of,
    mesh_asked,
    mesh_of,
    name_of,
)  # fmt: skip
from study.spec.options import settings_of_options
from study.spec.overrides import override, parse_overrides
from study.spec.strategy_files import read_deepspeed_json, read_yaml
from study.spec.team import Team, team_of

REPOSITORY = Path(__file__).resolve().parents[2]
STRATEGY_DIRECTORY = REPOSITORY / "accelerate_configs"
# What `strategy: all` means in a suite. The set stays as it is, so that a suite's reports stay comparable.
STUDIED_STRATEGIES = (
    "single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu_optimizer", "zero3_cpu",
    "zero3_nvme_optimizer", "zero3_nvme", "zero3_cpu_nvme", "fsdp2",
)  # fmt: skip
# Those that a suite names one by one. They hold more than one copy, each within a part of the ranks.
WITH_COPIES = ("hsdp", "zero3_hpz")
# Whose ranks work on the same samples together.
WITH_TEAMS = ("tp",)
STRATEGY_NAMES = (*STUDIED_STRATEGIES, *WITH_COPIES, *WITH_TEAMS)
# What `accelerate launch` tells its ranks of the file, and leaves as it finds it where the file does not say it.
_SAID_BY_THE_FILE = re.compile(
    r"ACCELERATE_(USE_(DEEPSPEED|FSDP|MEGATRON_LM|SAGEMAKER|PARALLELISM_CONFIG)|DEEPSPEED_\w+|CONFIG_DS_FIELDS"
    r"|GRADIENT_\w+|TORCH_DEVICE|DOWNCAST_BF16)|(FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_\w+"
)
# A process's place, where nobody launched it: Accelerate takes any LOCAL_RANK for a launch, and MPI's sizes.
_PLACE_ALONE = {"RANK": "0", "LOCAL_RANK": "-1"} | dict.fromkeys(
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), "1"
)
# Where nobody says it: of a virtual job, and in arithmetic.
RANKS_OF_A_MACHINE = 8
_UNSET_IT = "unset it: `accelerate launch` sets it itself"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to hold and move the model's state, as its file asks for it."""

    name: str
    distributed_type: str
    deepspeed: Mapping[str, Any] | None = None
    # What a file asks for that is none of this study's: the record tells it.
    own_settings: Mapping[str, Any] | None = None
    # Of FSDP: how many copies of the state there are, and over how many ranks each is sharded.
    mesh: tuple[int, int] | None = None
    # Where ranks work on the same samples together.
    team: Team | None = None

    @property
    def team_size(self) -> int:
        return self.team.ranks if self.team else 1

    @property
    def is_fsdp(self) -> bool:
        return self.distributed_type == "FSDP"

    @property
    def zero_stage(self) -> int | None:
        return self.deepspeed["zero_optimization"]["stage"] if self.deepspeed else None

    def ranks_of_a_copy(self, world_size: int, per_machine: int = RANKS_OF_A_MACHINE) -> int | None:
        """Over how many ranks hsdp shards a copy, or zero3_hpz its second one; None for all other strategies.

        The shipped files say it for four ranks, and fit themselves to any others. Your own are taken at their word.
        """
        zero = self.deepspeed["zero_optimization"] if self.deepspeed else None
        asked = self.mesh[1] if self.mesh else zero.get("zero_hpz_partition_size") if isinstance(zero, dict) else None
        if type(asked) is not int or (asked < 2 and not self.mesh):
            return None
        return asked if self.own_settings else ranks_of_a_copy(world_size, per_machine)

    def offload_device(self, what: str) -> str | None:
        """Where `optimizer` or `param` is offloaded to: cpu, nvme or None."""
        section = self.deepspeed["zero_optimization"].get(f"offload_{what}") if self.deepspeed else None
        device = section["device"] if section else "none"
        return None if device == "none" else device

    def with_team(self, size: int | None) -> Strategy:
        """As --team_size asks; None leaves the file's."""
        if size is None:
            return self
        if self.team is None:
            raise UserError(
                f"--team_size {size}: under {self.name} no ranks share their samples",
                "leave it out, or launch a strategy with teams",
            )
        return dataclasses.replace(self, team=dataclasses.replace(self.team, ranks=size))

    def overridden(self, config: RunConfig) -> Strategy:
        """With the settings that a run asks for instead of the file's."""
        resized = self.with_team(config.team_size)
        if self.deepspeed is None:
            return resized
        asked = override({**self.deepspeed, **settings_of_options(config, self.deepspeed)}, config.engine_override)
        sizes_are_asked = "zero_optimization.zero_hpz_partition_size" in parse_overrides(config.engine_override)
        return dataclasses.replace(
            resized, deepspeed=asked, own_settings=asked if sizes_are_asked else self.own_settings
        )

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_device("optimizer"), self.offload_device("param"))

    def check_engine_flags(self, config: RunConfig) -> None:
        """Refuse flags that only DeepSpeed can serve, where it does not run, and what it serves wrongly."""
        precision = config.precision or ""
        if precision == "fp16" and self.zero_stage:
            # Nor does it ever lower the loss scale there: once a step overflows, all are skipped.
            raise UserError(
                f"--precision fp16 is autocast, and DeepSpeed's stage {self.zero_stage} clips gradients under it that"
                " are still scaled",
                "use --precision fp16-engine, which is DeepSpeed's own fp16, or --precision bf16",
            )
        if precision == "fp16-engine" and self.zero_stage == 0:
            raise UserError(
                "DeepSpeed's own fp16 at stage 0 divides gradients by a loss scale that the loss was never multiplied"
                " by",
                "use --precision fp16, which is autocast, or another zero* strategy",
            )
        if self.deepspeed is None and precision.endswith("-engine"):
            plain = precision.removesuffix("-engine")
            problem, fix = f"--precision {precision} is DeepSpeed's own {plain}", f"use --precision {plain}"
        elif self.deepspeed is None and config.engine_override:
            problem, fix = "--engine_override sets DeepSpeed keys", "leave it out"
        else:
            self._check_options(config)
            return
        raise UserError(f"{problem}, and {self.name} runs without it", f"{fix}, or use a zero* strategy")

    def _check_options(self, config: RunConfig) -> None:
        offloads = self.offload_device("optimizer") is not None
        if config.bf16_states and (not self.zero_stage or offloads):
            raise UserError(
                f"--bf16_states is DeepSpeed's, of stages 1 to 3 without offload, and not {self.name}'s",
                "leave it out, or use zero1, zero2 or zero3",
            )
        if config.optimizer == "muon" and (self.is_fsdp or offloads):
            why = "cuts matrices that Muon must see whole" if self.is_fsdp else "steps AdamW on the host"
            raise UserError(f"--optimizer muon: {self.name} {why}", "use single, ddp, or zero0 to zero3")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher told this process: the strategy, and its place among the ranks."""

    strategy: Strategy
    world_size: int
    rank: int
    local_rank: int
    local_world_size: int
    # One process stands for one rank of `world_size`, and there are no others.
    virtual: bool = False

    def ranks_of_a_copy(self, config: RunConfig) -> int | None:
        return self.strategy.overridden(config).ranks_of_a_copy(self.world_size, self.ranks_per_machine)

    @property
    def ranks_per_machine(self) -> int:
        return RANKS_OF_A_MACHINE if self.virtual else self.local_world_size

    @property
    def team(self) -> int:
        """Which of the teams this rank is in."""
        return self.rank // self.strategy.team_size

    @property
    def leads_its_team(self) -> bool:
        return self.rank % self.strategy.team_size == 0

    @property
    def is_main(self) -> bool:
        return self.virtual or self.rank == 0

    @property
    def machines(self) -> int:
        return 1 if self.virtual else self.world_size // self.local_world_size

    def command(self, num_processes: int, machines: int = 1) -> str:
        """This very run as a command to paste, with another number of ranks on each machine."""
        # Accelerate does not tell a rank which file was launched.
        file = "YOUR_FILE" if self.strategy.own_settings else self.strategy.name
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


def ranks_of_a_copy(world_size: int, per_machine: int) -> int:
    """The ranks of one machine, whose links are the fast ones; on one machine, half of its ranks."""
    spans_machines = 1 < per_machine < world_size and world_size % per_machine == 0
    return per_machine if spans_machines else world_size // 2


def virtual_launch(launch: Launch, world_size: int, rank: int) -> Launch:
    """This one process as one rank of many."""
    if launch.strategy.name == "single":
        raise UserError("single is one rank alone, and cannot be one of many", "launch another strategy's file")
    if launch.world_size > 1:
        raise UserError(
            f"a virtual rank is one process, and {launch.world_size} were launched", f"run: {launch.command(1)}"
        )
    return dataclasses.replace(launch, world_size=world_size, rank=rank, virtual=True)


def this_launch(environment: Mapping[str, str] = os.environ, shell: Mapping[str, str] | None = None) -> Launch:
    """Which strategy this process was launched with, and its place, from what `accelerate launch` exported.

    `shell` is the environment that the launcher itself was started with; without it nothing is known to be left over.
    """
    if shell is not None:
        _refuse_what_no_launcher_set(environment, shell)
    world_size = _number(environment, "WORLD_SIZE", default=1, least=1)
    launch = Launch(
        strategy=_launched_strategy(environment, world_size),
        world_size=world_size,
        rank=_number(environment, "RANK", default=0),
        local_rank=_number(environment, "LOCAL_RANK", default=0),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", default=world_size, least=1),
    )
    for name, place, ranks in (
        ("RANK", launch.rank, world_size), ("LOCAL_RANK", launch.local_rank, launch.local_world_size),
        ("LOCAL_WORLD_SIZE", launch.local_world_size - 1, world_size),
    ):  # fmt: skip
        if place >= ranks:
            raise UserError(f"the environment variable {name} is {environment[name]} among {ranks} ranks", _UNSET_IT)
    return launch


def shell_environment() -> dict[str, str]:
    """What the launcher was started with: a process keeps that to itself, whatever it sets for its children."""
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}  # no Linux, or another user's launcher
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if entry)


def _refuse_what_no_launcher_set(environment: Mapping[str, str], shell: Mapping[str, str]) -> None:
    """Left over in a shell, such a variable would let another strategy train than the launched file says."""
    # One for each process that torch's launcher starts.
    own, inherited = (said.get("TORCHELASTIC_ERROR_FILE") for said in (environment, shell))
    if "TORCHELASTIC_RUN_ID" not in environment or (own is not None and own == inherited):
        shell = {**shell, **environment}
        left = [name for name, alone in _PLACE_ALONE.items() if environment.get(name, alone) != alone]
    else:
        left = []
    left += sorted(name for name in shell if _SAID_BY_THE_FILE.fullmatch(name))
    if shell.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        # `single` would train on a processor beside an idle GPU, and its record tell of the GPU.
        left.append("ACCELERATE_USE_CPU")
    if left:
        raise UserError(
            f"the environment variable {left[0]} is set, and not by the launched file", f"run: unset {' '.join(left)}"
        )


def _number(environment: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = environment.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise UserError(f"the environment variable {name} is {text[:20]!r}", _UNSET_IT)
    return int(text)


def _launched_strategy(environment: Mapping[str, str], world_size: int) -> Strategy:
    has_mesh, has_megatron, has_deepspeed, has_fsdp = (
        environment.get(f"ACCELERATE_USE_{section}", "false").lower() == "true"
        for section in ("PARALLELISM_CONFIG", "MEGATRON_LM", "DEEPSPEED", "FSDP")
    )
    if has_megatron:
        raise UserError("the launched Accelerate file has a megatron_lm, which no strategy here has", "leave it out")
    mesh = mesh_asked(environment) if has_mesh else {}
    if has_deepspeed:
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        if not file:
            raise UserError(
                "the launched Accelerate file has no deepspeed_config_file",
                "launch with a file of accelerate_configs/, which keeps every value in a DeepSpeed JSON",
            )
        settings = read_deepspeed_json(Path(file))
        zero3_init = environment.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true").lower() == "true"
        asked = asked_of_deepspeed(settings, zero3_init, mesh)
        return _named(name_of(asked, Path(file)), "DEEPSPEED", settings, asked)
    if has_fsdp:
        if environment.get("FSDP_VERSION") != "2":
            raise UserError("the launched Accelerate file asks for FSDP version 1", "set fsdp_version: 2")
        asked = asked_of_fsdp(environment, mesh)
        if has_mesh and mesh_of(asked) is None and team_of(asked) is None:
            raise UserError("the launched Accelerate file has a parallelism_config of one copy", "leave it out")
        return _named(name_of(asked), "FSDP", None, asked)
    if mesh:
        asked = asked_without_engine(mesh)
        return _named(name_of(asked), "MULTI_GPU", None, asked)
    if world_size > 1 or "TORCHELASTIC_RUN_ID" in environment:
        return Strategy("ddp", "MULTI_GPU")
    return Strategy("single", "NO")


def _named(
    name: str,
    distributed_type: str,
    settings: Mapping[str, Any] | None,
    asked: Mapping[str, Any],
) -> Strategy:
    own = None if name in SHIPPED else asked
    return Strategy(name, distributed_type, settings, own, mesh_of(asked), team_of(asked))


def read_strategy(name: str) -> Strategy:
    """A strategy by name, from its files, which must ask for what the name means."""
    if name not in STRATEGY_NAMES:
        raise UserError(f"no strategy is called {name!r}", f"use one of {', '.join(STRATEGY_NAMES)}")
    document = read_yaml(STRATEGY_DIRECTORY / f"{name}.yaml")
    deepspeed = document.get("deepspeed_config")
    settings = read_deepspeed_json(REPOSITORY / deepspeed["deepspeed_config_file"]) if deepspeed else None
    asked = asked_of_files(document, settings) if name in SHIPPED else {}
    if asked and digest_of(asked) != SHIPPED[name]:
        raise UserError(
            f"accelerate_configs/ asks for something else under the name {name} than this study does",
            f"restore {name}.yaml and its JSON, and give your own settings files of their own",
        )
    return Strategy(name, document["distributed_type"], settings, mesh=mesh_of(asked), team=team_of(asked))


def asked_of_files(document: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """As `name_of` takes it, before anything is launched."""
    mesh = mesh_asked({key.upper(): str(value) for key, value in document.get("parallelism_config", {}).items()})
    if settings is not None:
        return asked_of_deepspeed(settings, document["deepspeed_config"].get("zero3_init_flag", True), mesh)
    if "fsdp_config" not in document:
        return asked_without_engine(mesh)
    return asked_of_fsdp({key.upper(): str(value) for key, value in document["fsdp_config"].items()}, mesh)
