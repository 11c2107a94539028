"""What accelerate_configs/ holds: read it, lint it, and tell which of its files this process was launched with.

A strategy is one Accelerate YAML, with a DeepSpeed JSON beside it for what YAML cannot say. Nothing here imports
torch: the check whether the live engine did what the file asks is study/run/engine.py's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from study.errors import UserError
from study.spec.config import RunConfig

REPOSITORY = Path(__file__).resolve().parents[2]
STRATEGY_DIRECTORY = REPOSITORY / "accelerate_configs"
STRATEGY_NAMES = (
    "single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu_optimizer", "zero3_cpu",
    "zero3_nvme_optimizer", "zero3_nvme", "zero3_cpu_nvme", "fsdp2",
)  # fmt: skip

# What each name promises: the stage, and where the optimizer's state and the parameters live.
_PROMISES: dict[str, tuple[int, str | None, str | None]] = {
    "zero0": (0, None, None), "zero1": (1, None, None), "zero2": (2, None, None), "zero3": (3, None, None),
    "zero2_cpu": (2, "cpu", None), "zero3_cpu_optimizer": (3, "cpu", None), "zero3_cpu": (3, "cpu", "cpu"),
    "zero3_nvme_optimizer": (3, "nvme", None), "zero3_nvme": (3, "nvme", "nvme"), "zero3_cpu_nvme": (3, "cpu", "nvme"),
}  # fmt: skip
_DISTRIBUTED_TYPES = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"} | dict.fromkeys(_PROMISES, "DEEPSPEED")
_DEEPSPEED_CONFIG_KEYS = {"deepspeed_config_file", "deepspeed_multinode_launcher", "zero3_init_flag"}
_FSDP_CONFIG_KEYS = {
    "fsdp_version", "fsdp_auto_wrap_policy", "fsdp_reshard_after_forward", "fsdp_offload_params",
    "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing", "fsdp_state_dict_type",
}  # fmt: skip
# Keys in which strategies may differ; everything else in the files must be the same everywhere.
_STRATEGY_KEYS = {"distributed_type", "num_processes", "deepspeed_config", "fsdp_config"}
# Keys whose DeepSpeed default would otherwise decide a comparison unseen (buckets above all).
_ZERO_KEYS = {
    "stage", "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "round_robin_gradients",
}  # fmt: skip
_STAGE3_KEYS = {
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip
_OFFLOAD_KEYS = {
    "offload_optimizer": {
        "cpu": {"device", "pin_memory"},
        "nvme": {"device", "pin_memory", "nvme_path", "buffer_count"},
    },
    "offload_param": {
        "cpu": {"device", "pin_memory"},
        "nvme": {"device", "pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu"},
    },
}
_ROOT_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "zero_force_ds_cpu_optimizer",
}  # fmt: skip
# DeepSpeed's default, larger than most models here: they stay gathered between forward and backward pass.
_MAX_REUSE_DISTANCE = 1_000_000_000
_FROM_THE_RUN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to hold and move the model's state, as its file asks for it."""

    name: str
    distributed_type: str
    deepspeed: Mapping[str, Any] | None = None

    @property
    def zero_stage(self) -> int | None:
        return self.deepspeed["zero_optimization"]["stage"] if self.deepspeed else None

    def offload_device(self, what: str) -> str | None:
        """Where `optimizer` or `param` is offloaded to: cpu, nvme or None."""
        section = self.deepspeed["zero_optimization"].get(f"offload_{what}") if self.deepspeed else None
        device = section["device"] if section else "none"
        return None if device == "none" else device

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_device("optimizer"), self.offload_device("param"))

    def check_engine_flags(self, config: RunConfig) -> None:
        """Refuse what only DeepSpeed could do, where there is none of it."""
        if self.deepspeed is not None:
            return
        if config.precision == "bf16-engine":
            raise UserError(
                f"--precision bf16-engine is DeepSpeed's own bf16, and {self.name} runs without it",
                "use --precision bf16, or a zero* strategy",
            )
        if config.engine_override:
            raise UserError(
                f"--engine_override sets DeepSpeed keys, and {self.name} runs without it",
                "leave it out, or use a zero* strategy",
            )


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher told this process: the strategy, and who it is among how many."""

    strategy: Strategy
    world_size: int
    rank: int
    local_rank: int
    local_world_size: int
    # One process stands for one rank of `world_size`, and there are no others.
    virtual: bool = False

    @property
    def is_main(self) -> bool:
        return self.virtual or self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    def command(self, num_processes: int) -> str:
        """This very run as a command to paste, with another number of ranks."""
        arguments = " ".join(shlex.quote(argument) for argument in sys.argv[1:])
        return (
            f"accelerate launch --config_file accelerate_configs/{self.strategy.name}.yaml "
            f"--num_processes {num_processes} study/train.py {arguments}"
        ).strip()


def virtual_launch(launch: Launch, world_size: int, rank: int) -> Launch:
    """This one process as one rank of many."""
    if launch.strategy.name == "single":
        raise UserError("single is one rank alone, and cannot be one of many", "launch another strategy's file")
    if launch.world_size > 1:
        raise UserError(
            f"a virtual rank is one process, and {launch.world_size} were launched", f"run: {launch.command(1)}"
        )
    return dataclasses.replace(launch, world_size=world_size, rank=rank, virtual=True)


def this_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read back which strategy this process was launched with, from what `accelerate launch` exported."""
    world_size = int(environment.get("WORLD_SIZE", 1))
    return Launch(
        strategy=_launched_strategy(environment, world_size),
        world_size=world_size,
        rank=int(environment.get("RANK", 0)),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
    )


def _launched_strategy(environment: Mapping[str, str], world_size: int) -> Strategy:
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        if not file:
            raise UserError(
                "the launched Accelerate file has no deepspeed_config_file",
                "launch with a file of accelerate_configs/, which keeps every value in a DeepSpeed JSON",
            )
        return Strategy(Path(file).stem, "DEEPSPEED", read_deepspeed_json(Path(file)))
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if environment.get("FSDP_VERSION") != "2":
            raise UserError("the launched Accelerate file asks for FSDP version 1", "set fsdp_version: 2")
        return Strategy("fsdp2", "FSDP")
    if world_size > 1 or "TORCHELASTIC_RUN_ID" in environment:
        return Strategy("ddp", "MULTI_GPU")
    return Strategy("single", "NO")


def read_deepspeed_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} is not there", "run from the repository root, where accelerate_configs/ is") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable as JSON ({error})", "fix the file") from None
    zero = document.get("zero_optimization") if isinstance(document, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if type(stage) is not int or stage not in range(4):
        raise UserError(f"{file} names no ZeRO stage", "set zero_optimization.stage to 0, 1, 2 or 3")
    return document


def read_strategy(name: str, directory: Path = STRATEGY_DIRECTORY) -> Strategy:
    """A strategy by name, from its YAML file."""
    if name not in STRATEGY_NAMES:
        raise UserError(f"no strategy is called {name!r}", f"use one of {', '.join(STRATEGY_NAMES)}")
    document = _read_yaml(directory / f"{name}.yaml")
    deepspeed = document.get("deepspeed_config")
    if deepspeed is None:
        return Strategy(name, document["distributed_type"])
    file = directory.parent / deepspeed["deepspeed_config_file"]
    return Strategy(name, document["distributed_type"], read_deepspeed_json(file))


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} is not readable as YAML ({error})", "fix the file") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is not a mapping", "fix the file")
    return document


def lint(directory: Path = STRATEGY_DIRECTORY) -> Iterator[str]:
    """Every way in which the files differ that they must not, and every value left to a hidden default."""
    documents: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for names, folder, read, into in (
        (STRATEGY_NAMES, directory, _read_yaml, documents),
        (tuple(_PROMISES), directory / "deepspeed", read_deepspeed_json, settings),
    ):
        suffix = "yaml" if into is documents else "json"
        for name in sorted({file.stem for file in folder.glob(f"*.{suffix}")} - set(names)):
            yield f"{name}.{suffix} is not a strategy"
        for name in names:
            try:
                into[name] = read(folder / f"{name}.{suffix}")
            except UserError as error:
                yield f"{name}.{suffix}: {error.problem}"
    same: dict[str, tuple[str, Any]] = {}
    for name, document in documents.items():
        yield from _lint_yaml(name, document)
        yield from _differences(f"{name}.yaml", _without(document, _STRATEGY_KEYS), same)
    for key in sorted(same):
        for name, document in documents.items():
            if key not in document:
                yield f"{name}.yaml: {key} is missing, {same[key][0]} has it"
    shared: dict[str, tuple[str, Any]] = {}
    for name, values in settings.items():
        yield from _lint_keys(name, values, values["zero_optimization"])
        yield from _differences(f"{name}.json", _comparable(values), shared)


def _lint_yaml(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    for key, value in (
        ("distributed_type", _DISTRIBUTED_TYPES[name]),
        ("num_processes", 1 if name == "single" else 2),
    ):
        if document.get(key) != value:
            yield f"{name}.yaml: {key} is {document.get(key)!r}, not {value!r}"
    for key, wanted in (
        ("deepspeed_config", _DEEPSPEED_CONFIG_KEYS if name in _PROMISES else None),
        ("fsdp_config", _FSDP_CONFIG_KEYS if name == "fsdp2" else None),
    ):
        section = document.get(key)
        if (None if section is None else set(section)) != wanted:
            yield f"{name}.yaml: {key} holds {sorted(section or ())}, not {sorted(wanted or ())}"
    if name in _PROMISES:
        section = document.get("deepspeed_config") or {}
        for key, value in (
            ("deepspeed_config_file", f"accelerate_configs/deepspeed/{name}.json"),
            ("deepspeed_multinode_launcher", "standard"),
            ("zero3_init_flag", _PROMISES[name][0] == 3),
        ):
            if section.get(key) != value:
                yield f"{name}.yaml: {key} is {section.get(key)!r}, not {value!r}"


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal wherever it is there; offload settings are compared among the same kind of offload."""
    values = _without(settings, {"zero_optimization"})
    for key, value in settings["zero_optimization"].items():
        if key in _OFFLOAD_KEYS:
            device = value.get("device") if isinstance(value, Mapping) else None
            values |= dict(_leaves(value, f"zero_optimization.{key}[{device}].")) if device else {}
        # These two follow from the stage and from where the parameters are; everything else must be equal.
        elif key not in {"stage", "overlap_comm", "stage3_max_reuse_distance"}:
            values[f"zero_optimization.{key}"] = value
    return values


def _differences(file: str, values: Mapping[str, Any], shared: dict[str, tuple[str, Any]]) -> Iterator[str]:
    for key, value in values.items():
        first_file, first = shared.setdefault(key, (file, value))
        if value != first or type(value) is not type(first):
            yield f"{file}: {key} is {value!r}, {first_file} says {first!r}"


def _lint_keys(name: str, settings: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
    stage, *devices = _PROMISES[name]
    if zero["stage"] != stage:
        yield f"{name}.json: zero_optimization.stage is {zero['stage']}, not {stage}"
    wanted = _ZERO_KEYS | (_STAGE3_KEYS if zero["stage"] == 3 else set())
    for key in sorted(wanted - set(zero)):
        yield f"{name}.json: zero_optimization.{key} is left to a hidden default"
    for key in sorted(set(zero) - wanted - set(_OFFLOAD_KEYS)):
        yield f"{name}.json: zero_optimization.{key} does not belong there"
    if (zero["stage"] == 3) is not zero.get("overlap_comm"):
        yield f"{name}.json: zero_optimization.overlap_comm is not DeepSpeed's default for its stage"
    # A parameter from NVMe occupies one of few swap buffers until it is released, so none may wait for its next use.
    distance = 0 if devices[1] == "nvme" else _MAX_REUSE_DISTANCE
    if zero["stage"] == 3 and zero.get("stage3_max_reuse_distance") != distance:
        yield f"{name}.json: zero_optimization.stage3_max_reuse_distance is not {distance}"
    for (key, by_device), device in zip(_OFFLOAD_KEYS.items(), devices, strict=True):
        section = zero.get(key) or {}
        found = section.get("device") if isinstance(section, Mapping) else section
        if found != device:
            yield f"{name}.json: zero_optimization.{key}.device is {found!r}, not {device!r}"
        elif device and set(section) != by_device[device]:
            yield f"{name}.json: zero_optimization.{key} holds {sorted(section)}, not {sorted(by_device[device])}"
    nvme = "nvme" in devices
    expected_root = _ROOT_KEYS | {"zero_optimization"} | ({"aio"} if nvme else set())
    for key in sorted(set(settings) ^ expected_root):
        yield f"{name}.json: {key} is {'unexpected' if key in settings else 'left to a hidden default'}"
    for path, value in _leaves(settings):
        if value == "auto" and path not in _FROM_THE_RUN:
            yield f"{name}.json: {path} is auto, which hides its value"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _without(document: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}
