"""The strategies: their names, their files in accelerate_configs/, and the flags that they support.

A strategy is one Accelerate YAML, and a DeepSpeed JSON for settings that the YAML cannot express. How to add one is in
accelerate_configs/README.md. study/engine/audit.py compares the live engine with the file.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from study.config import other_names, strategy_names
from study.config.errors import UserError, clip, did_you_mean
from study.config.flags import RunConfig
from study.config.places import REPOSITORY
from study.config.precisions import computing_type
from study.config.registry import REGISTRY
from study.config.strategy_names import apply_overrides, parse_overrides
from study.config.yaml_sections import load_package_yaml


def settings_of_options(config: RunConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed sections that replace those of `settings`, for options that no strategy's file sets."""
    sections: dict[str, Any] = {}
    if config.bf16_states:
        sections["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if config.optimizer == "muon" and settings["zero_optimization"]["stage"] == 3:
        # DeepSpeed rejects Muon with reduce_scatter.
        sections["zero_optimization"] = {**settings["zero_optimization"], "reduce_scatter": False}
    return sections


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML mapping; raise UserError if the file is not one."""
    try:
        document = copy.deepcopy(_parsed(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} is not readable as YAML ({error})", "fix the file") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is not a mapping", "fix the file")
    return document


@functools.cache
def _parsed(text: str) -> Any:
    """Return a parsed document, cached: advice and validation read the same few files a thousand times."""
    try:
        return load_package_yaml(text)
    except yaml.YAMLError:
        # Its messages are better.
        return yaml.safe_load(text)


def read_deepspeed_json(file: Path) -> dict[str, Any]:
    """Read a DeepSpeed config; raise UserError if it has no ZeRO stage or no valid offload device."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist", "run from the repository root, with accelerate_configs/") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable as JSON ({error})", "fix the file") from None
    zero = document.get("zero_optimization") if isinstance(document, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if type(stage) is not int or stage not in range(4):
        raise UserError(f"{file} sets no ZeRO stage", "set zero_optimization.stage to 0, 1, 2 or 3")
    assert isinstance(zero, dict)
    for what in ("offload_optimizer", "offload_param"):
        section = zero.get(what)
        device = section.get("device") if isinstance(section, dict) else None
        if section is not None and device not in ("none", "cpu", "nvme"):
            problem = f"{file}: zero_optimization.{what} sets no valid device"
            raise UserError(problem, 'write it as {"device": "cpu"}, nvme or none')
    return document


# Dimension that a model-parallel group splits: the tensors of each layer, or the tokens of each sample, whose attention
# communicates by all-to-all (sequence) or by passing keys and values in a ring (context).
Divided = Literal["tensors", "sequence", "context"]
_DIVIDED_BY: dict[str, Divided] = {"tp_size": "tensors", "sp_size": "sequence", "cp_size": "context"}


@dataclasses.dataclass(frozen=True)
class ModelParallelGroup:
    """Consecutive ranks that process the same samples together."""

    divides: Divided
    ranks: int


def parse_group(normalized: Mapping[str, Any]) -> ModelParallelGroup | None:
    """Return the group of a launched file's parallelism_config or DeepSpeed's `tensor_parallel`; None without one."""
    sizes = {key: normalized[key] for key in _DIVIDED_BY if normalized.get(key, 1) > 1}
    section = normalized.get("tensor_parallel")
    if isinstance(section, Mapping) and isinstance(size := section.get("autotp_size"), int) and size > 1:
        sizes["tp_size"] = size
    if len(sizes) > 1:
        raise UserError(f"the launched files have {' and '.join(sizes)}", "keep one of them")
    return next((ModelParallelGroup(_DIVIDED_BY[key], size) for key, size in sizes.items()), None)


STRATEGY_DIRECTORY = REPOSITORY / "accelerate_configs"
STRATEGY_NAMES = tuple(REGISTRY)
STUDIED_STRATEGIES = tuple(name for name, row in REGISTRY.items() if row.kind == "studied")
WITH_REPLICAS = tuple(name for name, row in REGISTRY.items() if row.kind == "replicas")
WITH_TENSOR_GROUPS = tuple(name for name, row in REGISTRY.items() if row.kind == "tensor groups")
WITH_TOKEN_GROUPS = tuple(name for name, row in REGISTRY.items() if row.kind == "token groups")
WITH_GROUPS = tuple(name for name in STRATEGY_NAMES if name in (*WITH_TENSOR_GROUPS, *WITH_TOKEN_GROUPS))
# Two replicas of two ranks each.
MIN_RANKS_WITH_REPLICAS = 4
# A DeepSpeed setting that has no effect until the study applies it to the checkpoints.
PARTITION_ACTIVATIONS_KEY = "activation_checkpointing.partition_activations"
# deepspeed/runtime/zero/offload_config.py: number of buffers for parameters on NVMe, and elements of each.
_SWAP_BUFFERS = {"buffer_count": 5, "buffer_size": 100_000_000}
# Default for virtual jobs and for predictions.
DEFAULT_RANKS_PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to shard and offload the model state, as configured in its file."""

    name: str
    distributed_type: str
    # The two mappings are left out of the hash, and equality compares them.
    deepspeed: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    # Normalized settings of a user's file, for the record; None for a strategy of the study.
    custom_settings: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    # FSDP: number of replicas of the state, and of ranks that share one.
    mesh: tuple[int, int] | None = None
    # None if each rank has separate samples.
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

    def ranks_per_replica(self, world_size: int, per_machine: int) -> int | None:
        """Return the ranks per replica of hsdp, or per secondary partition of zero3_hpz; None for other strategies.

        The files of the study are written for four ranks and adapt to other numbers; a user's file is used as given.
        """
        zero = self.deepspeed["zero_optimization"] if self.deepspeed else None
        ranks = self.mesh[1] if self.mesh else zero.get("zero_hpz_partition_size") if isinstance(zero, dict) else None
        if type(ranks) is not int or (ranks < 2 and not self.mesh):
            return None
        if self.custom_settings:
            # DeepSpeed uses all ranks if the file sets more than there are (deepspeed/utils/groups.py).
            return min(ranks, world_size)
        # Those of a machine, whose links are fast, or half of a single machine.
        spans_machines = 1 < per_machine < world_size and world_size % per_machine == 0
        return per_machine if spans_machines else world_size // 2

    def offload_device(self, what: str) -> str | None:
        """Return the device to which `optimizer` or `param` is offloaded: cpu or nvme; None if it is not."""
        section = self.deepspeed["zero_optimization"].get(f"offload_{what}") if self.deepspeed else None
        device = section.get("device", "none") if section else "none"
        return None if device == "none" else device

    def with_group_size(self, size: int | None) -> Strategy:
        """Return the strategy with another group size; None keeps the file's."""
        if size is None:
            return self
        if self.group is None:
            problem = f"--group_size {size}: {self.name} has no model-parallel groups"
            raise UserError(problem, "leave it out, or launch a strategy with model-parallel groups")
        return dataclasses.replace(self, group=dataclasses.replace(self.group, ranks=size))

    def with_tensor_parallelism(self, ranks: int) -> Strategy:
        """Return the strategy whose groups of this many ranks divide the tensors of each layer; under DeepSpeed by its
        AutoTP."""
        settings = self.deepspeed
        if settings is not None:
            settings = {**settings, "tensor_parallel": {**settings.get("tensor_parallel", {}), "autotp_size": ranks}}
        return dataclasses.replace(self, deepspeed=settings, group=ModelParallelGroup("tensors", ranks))

    @property
    def swap_buffers(self) -> tuple[int, int] | None:
        """Return the count and elements of the buffers for parameters on NVMe; None without such parameters."""
        if self.deepspeed is None or self.offload_device("param") != "nvme":
            return None
        sizes = []
        for key, default in _SWAP_BUFFERS.items():
            value = self.deepspeed["zero_optimization"]["offload_param"].get(key, default)
            if type(value) not in (int, float) or not 1 <= value < math.inf:
                raise UserError(f"offload_param.{key} of {self.name} is {clip(value)}", "use a whole number from 1 up")
            sizes.append(int(value))
        return sizes[0], sizes[1]

    def with_swap_buffers(self, largest_part: int) -> Strategy:
        """Return the strategy with NVMe buffers of at least this many elements, which DeepSpeed asserts."""
        if self.swap_buffers is None or self.swap_buffers[1] >= largest_part:
            return self
        # Direct reads need whole pages.
        override = f"zero_optimization.offload_param.buffer_size={-(-largest_part // 1024) * 1024}"
        return dataclasses.replace(self, deepspeed=apply_overrides(self.deepspeed or {}, (override,)))

    def with_overrides(self, config: RunConfig) -> Strategy:
        resized = self.with_group_size(config.group_size)
        if self.deepspeed is None:
            return resized
        requested = {**self.deepspeed, **settings_of_options(config, self.deepspeed)}
        settings = apply_overrides(requested, config.engine_override)
        overrides_hpz = "zero_optimization.zero_hpz_partition_size" in parse_overrides(config.engine_override)
        own_settings = settings if overrides_hpz else self.custom_settings
        return dataclasses.replace(resized, deepspeed=settings, custom_settings=own_settings)

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
        values = apply_overrides(self.deepspeed, config.engine_override).get(section) or {}
        if values in ({}, {key: False}):
            return
        problem = f"DeepSpeed's {section} does nothing by itself"
        if values != {key: True}:
            raise UserError(f"{problem}, and the study supports only its key {key}", "leave the other keys out")
        if self.group is None or self.group.divides != "tensors":
            raise UserError(f"{problem}, and under {self.name} no ranks share a layer's activations", "use zero*_tp")
        if not config.gradient_checkpointing:
            fix = "add --gradient_checkpointing"
            raise UserError(f"{problem}, and without checkpoints there are no activations to partition", fix)

    def check_engine_flags(self, config: RunConfig) -> None:
        """Raise for flags that need DeepSpeed under another engine, and for those that DeepSpeed handles wrongly."""
        self._check_checkpointing(config)
        precision, stage = config.precision or "", self.zero_stage
        plain = computing_type(precision)
        offloads = self.offload_device("optimizer") is not None
        splits_tensors = bool(stage) and self.group is not None and self.group.divides == "tensors"
        without_deepspeed, without_tp = "or use a zero* strategy", "leave it out, or use a strategy without _tp"
        for is_wrong, problem, fix in (
            # It never lowers the loss scale there either: after one overflow, all steps are skipped.
            (
                precision == "fp16" and stage,
                f"--precision fp16 is autocast, and DeepSpeed's stage {stage} clips gradients before unscaling them",
                "use --precision fp16-engine, which is DeepSpeed's own fp16, or --precision bf16",
            ),
            (
                precision == "fp16-engine" and stage == 0,
                "DeepSpeed's own fp16 at stage 0 divides gradients by a loss scale, "
                "but does not multiply the loss by it",
                "use --precision fp16, which is autocast, or another zero* strategy",
            ),
            (
                self.deepspeed is None and precision != plain,
                f"--precision {precision} is DeepSpeed's own {plain}, and {self.name} runs without it",
                f"use --precision {plain}, {without_deepspeed}",
            ),
            (
                self.deepspeed is None and config.engine_override,
                f"--engine_override sets DeepSpeed keys, and {self.name} runs without it",
                f"leave it out, {without_deepspeed}",
            ),
            (
                config.bf16_states and (not stage or offloads),
                f"--bf16_states needs DeepSpeed's stages 1 to 3 without offload, not {self.name}",
                "leave it out, or use zero1, zero2 or zero3",
            ),
            (
                config.optimizer == "muon" and splits_tensors,
                f"--optimizer muon: {self.name} shards matrices that Muon needs unsharded",
                without_tp,
            ),
            (
                config.peft == "lora" and splits_tensors,
                f"--peft lora: {self.name} shards layers by names that adapters change",
                without_tp,
            ),
            (
                config.optimizer == "muon" and self.is_fsdp,
                f"--optimizer muon: {self.name} shards matrices that Muon needs unsharded",
                "use single, ddp, or zero0 to zero3",
            ),
            (
                config.optimizer == "muon" and offloads,
                f"--optimizer muon: {self.name} steps AdamW on the host",
                "use single, ddp, or zero0 to zero3",
            ),
        ):
            if is_wrong:
                raise UserError(problem, fix)


def resolve_repository_path(path: str) -> Path:
    """Return a path relative to the working directory, or to REPOSITORY if it does not exist there."""
    local = Path(path)
    return local if local.exists() else REPOSITORY / path


# DeepSpeed numbers stages, which people write as stage2, zero-stage-2 or z2; with an offload zero2_offload.
_NUMBERED = re.compile(r"(?:deepspeed|ds|zero|stage|z|[\W_])*([0-3])([\W_]*offload)?", re.IGNORECASE)


def spelled_strategy(name: str) -> str:
    """Return the strategy of another spelling, such as ZeRO-3, zero2-cpu or stage 3; any other name as it is."""
    letters = re.sub(r"[\W_]", "", name.lower())
    same = [strategy for strategy in STRATEGY_NAMES if strategy.replace("_", "") == letters]
    stage = _NUMBERED.fullmatch(name)
    if not same and stage and not stage[2]:
        return f"zero{stage[1]}"
    return same[0] if same else name


def read_strategy(name: str) -> Strategy:
    """Return a strategy by name; raise if its files do not have the settings of that name."""
    if name not in STRATEGY_NAMES:
        stage = _NUMBERED.fullmatch(name)
        likely = f"zero{stage[1]}{'_cpu' if stage[2] else ''}" if stage else name
        similar = did_you_mean(likely, STRATEGY_NAMES)
        if (meant := other_names.find_strategies(name)) is not None:
            similar = f"did you mean {' or '.join(meant)}? " if meant else ""
        fix = f"{similar}{os.path.relpath(STRATEGY_DIRECTORY)}/ has a file for each strategy; another file:"
        fix += " study explain FILE MODEL"
        raise UserError(f"there is no strategy {clip(name)}", fix)
    document = read_yaml(STRATEGY_DIRECTORY / f"{name}.yaml")
    strategy = launched_strategy(exported_variables(document), document["distributed_type"] != "NO")
    if strategy.name != name:
        problem = f"the files of {name} in accelerate_configs/ do not have the study's settings"
        raise UserError(problem, f"restore {name}.yaml and its JSON, and put custom settings into separate files")
    return strategy


def exported_variables(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that `accelerate launch` exports for a file of accelerate_configs/."""
    variables = {}
    for section, switch in (("fsdp_config", "FSDP"), ("parallelism_config", "PARALLELISM_CONFIG")):
        if section in document:
            variables[f"ACCELERATE_USE_{switch}"] = "true"
            variables |= {key.upper(): str(value) for key, value in document[section].items()}
    if engine := document.get("deepspeed_config"):
        variables |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPOSITORY / engine["deepspeed_config_file"]),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(engine.get("zero3_init_flag", True)),
        }
    return variables


def launched_strategy(exported: Mapping[str, str], is_distributed: bool) -> Strategy:
    """Return the strategy of a file, from the variables that `accelerate launch` exports for it."""
    has_mesh = _is_used(exported, "PARALLELISM_CONFIG")
    if _is_used(exported, "MEGATRON_LM"):
        problem = "the launched Accelerate file has a megatron_lm section, which no strategy supports"
        raise UserError(problem, "leave it out")
    mesh = strategy_names.read_mesh_sizes(exported) if has_mesh else {}
    if _is_used(exported, "DEEPSPEED"):
        engine = _launched_deepspeed(exported, mesh)
    elif _is_used(exported, "FSDP"):
        engine = _launched_fsdp(exported, mesh)
    elif has_mesh:
        normalized = strategy_names.supported_sizes({"tp_size"}, mesh, "a MULTI_GPU file")
        engine = _LaunchedEngine("MULTI_GPU", normalized)
    else:
        return Strategy("ddp", "MULTI_GPU") if is_distributed else Strategy("single", "NO")
    replicas = engine.normalized.get("dp_replicate_size")
    group = parse_group(engine.normalized)
    if has_mesh and engine.deepspeed is None and replicas is None and group is None:
        raise UserError("the launched Accelerate file has a parallelism_config of one replica", "leave it out")
    name = strategy_names.name_strategy(engine.normalized, engine.file)
    return Strategy(
        name,
        engine.distributed_type,
        engine.deepspeed,
        None if name in strategy_names.SHIPPED else engine.normalized,
        (replicas, engine.normalized.get("dp_shard_size", 1)) if replicas else None,
        group,
    )


def _is_used(exported: Mapping[str, str], section: str) -> bool:
    """Whether a launched file has a section."""
    return exported.get(f"ACCELERATE_USE_{section}", "false").lower() == "true"


@dataclasses.dataclass(frozen=True)
class _LaunchedEngine:
    """The engine that a launched file selects, with its settings in the form of strategy_names.py."""

    distributed_type: str
    normalized: dict[str, Any]
    # Content of a DeepSpeed JSON, and that file.
    deepspeed: dict[str, Any] | None = None
    file: Path | None = None


def _launched_deepspeed(exported: Mapping[str, str], mesh: Mapping[str, int]) -> _LaunchedEngine:
    if not (path := exported.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")):
        fix = "launch with a file of accelerate_configs/, which sets every value in a DeepSpeed JSON"
        raise UserError("the launched Accelerate file has no deepspeed_config_file", fix)
    file = resolve_repository_path(path)
    settings = read_deepspeed_json(file)
    zero3_init = exported.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true").lower() == "true"
    normalized = strategy_names.normalize_deepspeed_config(settings, zero3_init, mesh)
    return _LaunchedEngine("DEEPSPEED", normalized, settings, file)


def _launched_fsdp(exported: Mapping[str, str], mesh: Mapping[str, int]) -> _LaunchedEngine:
    if exported.get("FSDP_VERSION") != "2":
        raise UserError("the launched Accelerate file asks for FSDP version 1", "set fsdp_version: 2")
    return _LaunchedEngine("FSDP", strategy_names.normalize_fsdp_config(exported, mesh))
