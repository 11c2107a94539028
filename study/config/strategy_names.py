"""Names of runs, derived from the settings of the launched file and not from its file name.

A record counts as `zero3` only if the launched file has exactly the settings of this study's zero3. Any other file
gets a custom name, which changes with every setting: two versions of one file are never pooled.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import UserError, clip
from study.config.registry import REGISTRY

SHIPPED = {name: row.digest for name, row in REGISTRY.items() if row.digest}
# A run's flags override these keys of the file.
BATCH_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
_SET_BY_FLAGS = BATCH_KEYS | {"gradient_clipping"}
# Settings that change an FSDP2 run, with Accelerate's defaults. backward_prefetch has no effect in FSDP2.
_FSDP_DEFAULTS = {
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_MIN_NUM_PARAMS": "",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_IGNORED_MODULES": "",
}
_SWITCHES = {key for key, default in _FSDP_DEFAULTS.items() if default in ("true", "false")}
_USABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


def normalize_deepspeed_config(
    settings: Mapping[str, Any], zero3_init: bool, mesh: Mapping[str, int]
) -> dict[str, Any]:
    """Return the DeepSpeed settings that identify a strategy, without those that flags set and the NVMe folder."""
    normalized = {key: value for key, value in copy.deepcopy(dict(settings)).items() if key not in _SET_BY_FLAGS}
    zero = normalized["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section):
            zero[section].pop("nvme_path", None)
    if zero["stage"] == 3:
        normalized["zero3_init_flag"] = zero3_init
    return normalized | supported_sizes({"sp_size"}, mesh, "a DeepSpeed file")


def normalize_fsdp_config(exported: Mapping[str, str], mesh: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings that identify an FSDP strategy, from the variables that `accelerate launch` exports."""
    normalized: dict[str, Any] = {key: exported.get(key, default) for key, default in _FSDP_DEFAULTS.items()}
    for key in _SWITCHES:
        if normalized[key].lower() not in ("true", "false"):
            raise UserError(f"the launched Accelerate file has {key.lower()}: {normalized[key]}", "set true or false")
        normalized[key] = normalized[key].lower() == "true"
    if normalized["FSDP_AUTO_WRAP_POLICY"] != "SIZE_BASED_WRAP":
        del normalized["FSDP_MIN_NUM_PARAMS"]
    elif not normalized["FSDP_MIN_NUM_PARAMS"].isdecimal():
        # Accelerate's default, 100000000.0, fails too.
        raise UserError(
            "the launched Accelerate file has fsdp_auto_wrap_policy: SIZE_BASED_WRAP and no whole fsdp_min_num_params",
            "set fsdp_min_num_params: 100000000, or use TRANSFORMER_BASED_WRAP",
        )
    # Named after Accelerate's variable or the file's key. Without either, the trainer wraps the model's blocks.
    classes = exported.get("FSDP_TRANSFORMER_CLS_TO_WRAP") or exported.get("FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP")
    if normalized["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP" and classes:
        normalized["FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP"] = sorted(name.strip() for name in classes.split(","))
    sizes: dict[str, Any] = supported_sizes({"dp_replicate_size", "dp_shard_size", "cp_size"}, mesh, "an FSDP file")
    if "cp_size" in sizes:
        sizes["cp_comm_strategy"] = exported.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
    if set(sizes) == {"dp_shard_size"}:
        sizes = {}  # alone it is the number of ranks, as without the section
    return {key.lower(): value for key, value in normalized.items()} | sizes


def read_mesh_sizes(exported: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes of Accelerate's parallelism_config, from the variables that `accelerate launch` exports."""
    sizes = {}
    for key in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP"):
        text = exported.get(f"PARALLELISM_CONFIG_{key}_SIZE", "1")
        if not (text.isascii() and text.isdecimal() and 0 < int(text) < 10**6):
            problem = f"the launched Accelerate file has {key.lower()}_size: {text[:20]}"
            raise UserError(problem, "set a whole number from 1 up")
        if int(text) > 1:
            sizes[f"{key.lower()}_size"] = int(text)
    return sizes


def supported_sizes(supported: set[str], sizes: Mapping[str, int], file: str) -> dict[str, int]:
    """Return the sizes of a parallelism_config; UserError if this kind of file does not support one of them."""
    if unsupported := [key for key in sizes if key not in supported]:
        problem = f"the launched Accelerate file has {unsupported[0]}: {sizes[unsupported[0]]}, not supported in {file}"
        raise UserError(problem, "leave it out")
    return dict(sizes)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def name_strategy(normalized: Mapping[str, Any], file: Path | None = None) -> str:
    """Return the strategy that has these settings, else a custom name. `file` is the DeepSpeed JSON."""
    # It ignores the order of keys, and whether a number is 500000000 or 5e8.
    digest = hashlib.sha256(json.dumps(_plain(normalized), sort_keys=True).encode()).hexdigest()[:8]
    if (shipped := next((name for name, entry in SHIPPED.items() if entry == digest), None)) is not None:
        return shipped
    if file is None:
        kinds = {"hsdp": "dp_replicate_size", "cp": "cp_size", "tp": "tp_size"}
        return f"{next((name for name, key in kinds.items() if key in normalized), 'fsdp2')}-custom-{digest}"
    if not _USABLE.fullmatch(file.stem):
        problem = f"a run would be named after the DeepSpeed JSON {file.name!r}"
        raise UserError(problem, "give the file a name of up to 40 letters, digits, - and _")
    stage = normalized["zero_optimization"]["stage"]
    names_its_stage = re.match(rf"zero{stage}(?!\d)", file.stem) or not re.match(r"zero\d|ddp|single|fsdp", file.stem)
    prefix = f"zero{stage}-custom" if file.stem in SHIPPED or not names_its_stage else file.stem
    return f"{prefix}-{digest}"


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `a.b=5e6` items of --engine_override as a mapping from dotted key to value."""
    parsed: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        try:
            value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError):
            value = None
        if not (equals and all(key.split("."))) or value is None:
            problem = f"--engine_override {clip(item)} is not KEY=JSON"
            raise UserError(problem, "write it as zero_optimization.reduce_bucket_size=5000000")
        for earlier in parsed:
            if f"{key}.".startswith(f"{earlier}.") or f"{earlier}.".startswith(f"{key}."):
                raise UserError(f"--engine_override sets both {earlier} and {key}", "leave one of them out")
        parsed[key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return parsed


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not finite")
    return float(text)


def apply_overrides(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of DeepSpeed settings with the overrides set."""
    changed = copy.deepcopy(dict(settings))
    for key, value in parse_overrides(overrides).items():
        *sections, last = key.split(".")
        node = changed
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(f"--engine_override {key}: {section} is a value, not a section", "fix the key")
        node[last] = value
    return changed
