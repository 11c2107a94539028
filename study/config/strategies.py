"""The strategies: their names, and their files in accelerate_configs/.

A strategy is one Accelerate YAML, and a DeepSpeed JSON for what YAML cannot say. How to add one is in
accelerate_configs/README.md. Whether the live engine did what the file asks is study/engine/audit.py's to say.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from study.config.errors import UserError, clip
from study.config.flags import RunConfig
from study.config.registry import REGISTRY
from study.config.strategy_names import (
    SHIPPED,
    apply_overrides,
    config_digest,
    normalize_deepspeed_config,
    normalize_fsdp_config,
    normalize_plain_config,
    parse_overrides,
    read_mesh_sizes,
    requested_mesh,
)

# Options of a run that are settings of DeepSpeed, and in no strategy's file.


def settings_of_options(config: RunConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whole sections, to put in place of those in `settings`."""
    found: dict[str, Any] = {}
    if config.bf16_states:
        found["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if config.optimizer == "muon" and settings["zero_optimization"]["stage"] == 3:
        # DeepSpeed refuses Muon beside it.
        found["zero_optimization"] = {**settings["zero_optimization"], "reduce_scatter": False}
    return found


# The files of accelerate_configs/, read and refused where they are none.


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        document = copy.deepcopy(_parsed(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} is not readable as YAML ({error})", "fix the file") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is not a mapping", "fix the file")
    return document


@functools.cache
def _parsed(text: str) -> Any:
    """Advice and validation ask for the same few files a thousand times, and YAML is slow to read."""
    return yaml.safe_load(text)


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
    assert isinstance(zero, dict)
    for what in ("offload_optimizer", "offload_param"):
        section = zero.get(what)
        device = section.get("device") if isinstance(section, dict) else None
        if section is not None and device not in ("none", "cpu", "nvme"):
            raise UserError(
                f"{file}: zero_optimization.{what} names no device", 'write it as {"device": "cpu"}, nvme or none'
            )
    return document


# Ranks that work on the same samples together. To all other strategies a rank is alone with its samples.

# What the ranks of a group divide among themselves: the tensors of each layer, or the tokens of each sample, which
# attention then brings together by all-to-all (sequence) or by passing keys and values around (context).
Divided = Literal["tensors", "sequence", "context"]
_DIVIDED_BY: dict[str, Divided] = {"tp_size": "tensors", "sp_size": "sequence", "cp_size": "context"}


@dataclasses.dataclass(frozen=True)
class ModelParallelGroup:
    """Consecutive ranks, as the engines lay them out."""

    divides: Divided
    ranks: int


def parse_group(asked: Mapping[str, Any]) -> ModelParallelGroup | None:
    """From what a launched file asks for: the sizes of its parallelism_config, or DeepSpeed's `tensor_parallel`."""
    sizes = {key: asked[key] for key in _DIVIDED_BY if asked.get(key, 1) > 1}
    section = asked.get("tensor_parallel")
    if isinstance(section, Mapping) and isinstance(size := section.get("autotp_size"), int) and size > 1:
        sizes["tp_size"] = size
    if len(sizes) > 1:
        raise UserError(f"the launched files have {' and '.join(sizes)}", "keep one of them")
    return next((ModelParallelGroup(_DIVIDED_BY[key], size) for key, size in sizes.items()), None)


REPOSITORY = Path(__file__).resolve().parents[2]
STRATEGY_DIRECTORY = REPOSITORY / "accelerate_configs"
STRATEGY_NAMES = tuple(REGISTRY)
STUDIED_STRATEGIES = tuple(name for name, row in REGISTRY.items() if row.kind == "studied")
WITH_REPLICAS = tuple(name for name, row in REGISTRY.items() if row.kind == "replicas")
WITH_GROUPS = tuple(name for name, row in REGISTRY.items() if row.kind == "groups")
# Two replicas, and two ranks for each.
MIN_RANKS_WITH_REPLICAS = 4
# A setting of DeepSpeed's that does nothing by itself, and that the study sees to.
PARTITION_ACTIVATIONS_KEY = "activation_checkpointing.partition_activations"
# deepspeed/runtime/zero/offload_config.py: buffers that parameters on NVMe go through, and the elements of each.
_SWAP_BUFFERS = {"buffer_count": 5, "buffer_size": 100_000_000}
# Where nobody says it: of a virtual job, and in arithmetic.
DEFAULT_RANKS_PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to shard and offload the model state, as its file asks for it."""

    name: str
    distributed_type: str
    # The two mappings are left out of the hash, and equality compares them.
    deepspeed: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    # What a file of the user's own asks for; the record has it.
    custom_settings: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    # FSDP: the replicas of the state, and over how many ranks each is sharded.
    mesh: tuple[int, int] | None = None
    # Where ranks work on the same samples together.
    group: ModelParallelGroup | None = None

    @property
    def group_size(self) -> int:
        return self.group.ranks if self.group else 1

    @property
    def is_fsdp(self) -> bool:
        return self.distributed_type == "FSDP"

    @property
    def zero_stage(self) -> int | None:
        return self.deepspeed["zero_optimization"]["stage"] if self.deepspeed else None

    def ranks_per_replica(self, world_size: int, per_machine: int = DEFAULT_RANKS_PER_NODE) -> int | None:
        """Return over how many ranks hsdp shards a replica, or zero3_hpz its second one; None for all other strategies.

        The shipped files say it for four ranks, and fit themselves to any others. Your own are taken at their word.
        """
        zero = self.deepspeed["zero_optimization"] if self.deepspeed else None
        asked = self.mesh[1] if self.mesh else zero.get("zero_hpz_partition_size") if isinstance(zero, dict) else None
        if type(asked) is not int or (asked < 2 and not self.mesh):
            return None
        # The engine takes as many as there are, if more are asked for (deepspeed/utils/groups.py).
        return min(asked, world_size) if self.custom_settings else ranks_per_replica(world_size, per_machine)

    def offload_device(self, what: str) -> str | None:
        """Return where `optimizer` or `param` is offloaded to: cpu, nvme or None."""
        section = self.deepspeed["zero_optimization"].get(f"offload_{what}") if self.deepspeed else None
        device = section.get("device", "none") if section else "none"
        return None if device == "none" else device

    def with_group_size(self, size: int | None) -> Strategy:
        """Return the strategy with another group size; None leaves the file's."""
        if size is None:
            return self
        if self.group is None:
            raise UserError(
                f"--group_size {size}: {self.name} has no model-parallel groups",
                "leave it out, or launch a strategy with model-parallel groups",
            )
        return dataclasses.replace(self, group=dataclasses.replace(self.group, ranks=size))

    @property
    def swap_buffers(self) -> tuple[int, int] | None:
        """Return the count and elements of the buffers for parameters on NVMe; None without such parameters."""
        if self.deepspeed is None or self.offload_device("param") != "nvme":
            return None
        found = []
        for key, default in _SWAP_BUFFERS.items():
            value = self.deepspeed["zero_optimization"]["offload_param"].get(key, default)
            if type(value) not in (int, float) or not 1 <= value < math.inf:
                raise UserError(f"offload_param.{key} of {self.name} is {clip(value)}", "use a whole number from 1 up")
            found.append(int(value))
        return found[0], found[1]

    def with_swap_buffers(self, largest_part: int) -> Strategy:
        """Return the strategy with NVMe buffers of at least so many elements, which DeepSpeed asserts."""
        if self.swap_buffers is None or self.swap_buffers[1] >= largest_part:
            return self
        # Whole pages of a direct read.
        size = -(-largest_part // 1024) * 1024
        return dataclasses.replace(
            self,
            deepspeed=apply_overrides(self.deepspeed or {}, (f"zero_optimization.offload_param.buffer_size={size}",)),
        )

    def with_overrides(self, config: RunConfig) -> Strategy:
        """Return the strategy with the settings that a run asks for instead of the file's."""
        resized = self.with_group_size(config.group_size)
        if self.deepspeed is None:
            return resized
        asked = apply_overrides(
            {**self.deepspeed, **settings_of_options(config, self.deepspeed)}, config.engine_override
        )
        sizes_are_asked = "zero_optimization.zero_hpz_partition_size" in parse_overrides(config.engine_override)
        own_settings = asked if sizes_are_asked else self.custom_settings
        return dataclasses.replace(resized, deepspeed=asked, custom_settings=own_settings)

    @property
    def offloads(self) -> bool:
        return self.offload_device("optimizer") is not None or self.offload_device("param") is not None

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_device("optimizer"), self.offload_device("param"))

    def _check_checkpointing(self, config: RunConfig) -> None:
        if self.deepspeed is None:
            return
        section, key = PARTITION_ACTIVATIONS_KEY.split(".")
        asked = apply_overrides(self.deepspeed, config.engine_override).get(section) or {}
        if asked in ({}, {key: False}):
            return
        problem = f"DeepSpeed's {section} does nothing by itself"
        if asked != {key: True}:
            raise UserError(f"{problem}, and of its keys the study sees to {key} alone", "leave the others out")
        if self.group is None or self.group.divides != "tensors":
            raise UserError(f"{problem}, and under {self.name} no ranks share a layer's activations", "use zero*_tp")
        if not config.gradient_checkpointing:
            raise UserError(
                f"{problem}, and without checkpoints there is nothing to keep in parts", "add --gradient_checkpointing"
            )

    def check_engine_flags(self, config: RunConfig) -> None:
        """Refuse flags that only DeepSpeed can serve, where it does not run, and what it serves wrongly."""
        self._check_checkpointing(config)
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
        if self.zero_stage and self.group and self.group.divides == "tensors":
            for flag, is_asked, why in (
                ("optimizer muon", config.optimizer == "muon", "cuts matrices that Muon must see whole"),
                ("peft lora", config.peft == "lora", "divides layers by names that adapters change"),
            ):
                if is_asked:
                    raise UserError(f"--{flag}: {self.name} {why}", "leave it out, or use a strategy without _tp")
        if config.optimizer == "muon" and (self.is_fsdp or offloads):
            why = "cuts matrices that Muon must see whole" if self.is_fsdp else "steps AdamW on the host"
            raise UserError(f"--optimizer muon: {self.name} {why}", "use single, ddp, or zero0 to zero3")


def ranks_per_replica(world_size: int, per_machine: int) -> int:
    """The ranks of one machine, whose links are the fast ones; on one machine, half of its ranks."""
    spans_machines = 1 < per_machine < world_size and world_size % per_machine == 0
    return per_machine if spans_machines else world_size // 2


def resolve_repository_path(path: str) -> Path:
    """A relative path is looked for here, then from the repository's root."""
    here = Path(path)
    return here if here.exists() else REPOSITORY / path


def read_strategy(name: str) -> Strategy:
    """A strategy by name, from its files, which must ask for what the name means."""
    if name not in STRATEGY_NAMES:
        raise UserError(f"no strategy is called {name!r}", f"use one of {', '.join(STRATEGY_NAMES)}")
    if not STRATEGY_DIRECTORY.is_dir():
        raise UserError(
            "this installation has no accelerate_configs/, which lies in the repository",
            "clone the repository, and run `pip install -e .` in it",
        )
    document = read_yaml(STRATEGY_DIRECTORY / f"{name}.yaml")
    deepspeed = document.get("deepspeed_config")
    settings = read_deepspeed_json(REPOSITORY / deepspeed["deepspeed_config_file"]) if deepspeed else None
    asked = normalize_strategy_files(document, settings) if name in SHIPPED else {}
    if asked and config_digest(asked) != SHIPPED[name]:
        raise UserError(
            f"accelerate_configs/ asks for something else under the name {name} than this study does",
            f"restore {name}.yaml and its JSON, and give your own settings files of their own",
        )
    return Strategy(name, document["distributed_type"], settings, mesh=requested_mesh(asked), group=parse_group(asked))


def normalize_strategy_files(document: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings for `name_strategy`, before anything is launched."""
    mesh = read_mesh_sizes({key.upper(): str(value) for key, value in document.get("parallelism_config", {}).items()})
    if settings is not None:
        return normalize_deepspeed_config(settings, document["deepspeed_config"].get("zero3_init_flag", True), mesh)
    if "fsdp_config" not in document:
        return normalize_plain_config(mesh)
    sections = {**document["fsdp_config"], **document.get("parallelism_config", {})}
    return normalize_fsdp_config({key.upper(): str(value) for key, value in sections.items()}, mesh)
