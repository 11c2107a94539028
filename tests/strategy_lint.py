"""Every way in which the files of accelerate_configs/ differ that they must not, and every value left to a default.

A new strategy needs one line in STRATEGIES here. What else it needs: accelerate_configs/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.spec.strategies import STRATEGY_DIRECTORY, WITH_COPIES
from study.spec.strategy_files import read_deepspeed_json, read_yaml

# What each name means: the ZeRO stage, where the optimizer's state lives and where the parameters live.
STRATEGIES: dict[str, tuple[int | None, str | None, str | None]] = {
    "single": (None, None, None), "ddp": (None, None, None), "fsdp2": (None, None, None),
    "hsdp": (None, None, None), "zero3_hpz": (3, None, None), "tp": (None, None, None), "cp": (None, None, None),
    "ulysses_zero1": (1, None, None), "ulysses_zero2": (2, None, None), "ulysses_zero3": (3, None, None),
    "zero1_tp": (1, None, None), "zero2_tp": (2, None, None), "zero3_tp": (3, None, None),
    "zero0": (0, None, None), "zero1": (1, None, None), "zero2": (2, None, None), "zero3": (3, None, None),
    "zero2_cpu": (2, "cpu", None), "zero3_cpu_optimizer": (3, "cpu", None), "zero3_cpu": (3, "cpu", "cpu"),
    "zero3_nvme_optimizer": (3, "nvme", None), "zero3_nvme": (3, "nvme", "nvme"), "zero3_cpu_nvme": (3, "cpu", "nvme"),
}  # fmt: skip
WITH_DEEPSPEED = [name for name, (stage, _, _) in STRATEGIES.items() if stage is not None]
_DISTRIBUTED_TYPES = {
    "single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "hsdp": "FSDP", "tp": "MULTI_GPU", "cp": "FSDP",
} | dict.fromkeys(WITH_DEEPSPEED, "DEEPSPEED")  # fmt: skip
_DEEPSPEED_CONFIG_KEYS = {"deepspeed_config_file", "deepspeed_multinode_launcher", "zero3_init_flag"}
_FSDP_CONFIG_KEYS = {
    "fsdp_version", "fsdp_auto_wrap_policy", "fsdp_reshard_after_forward", "fsdp_offload_params",
    "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing", "fsdp_state_dict_type",
}  # fmt: skip
# Keys in which the YAML files may differ; everything else in them must be the same everywhere.
_YAML_KEYS_THAT_DIFFER = {
    "distributed_type", "num_processes", "deepspeed_config", "fsdp_config", "parallelism_config",
}  # fmt: skip
_SEQUENCE = {"parallelism_config_sp_size": 2, "parallelism_config_sp_backend": "deepspeed"}
_MESHES = {
    # Two copies, each over two ranks.
    "hsdp": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2},
    "tp": {"parallelism_config_tp_size": 2},
    "cp": {"parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "allgather"},
    "ulysses_zero1": _SEQUENCE, "ulysses_zero2": _SEQUENCE, "ulysses_zero3": _SEQUENCE,
}  # fmt: skip
_WITH_TENSORS = ("zero1_tp", "zero2_tp", "zero3_tp")
_TENSOR_PARALLEL = {"autotp_size": 2, "vocab_parallel_lm_head": False}
# Keys whose DeepSpeed default would otherwise decide a comparison unseen (buckets above all).
_ZERO_KEYS = {
    "stage", "contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "round_robin_gradients",
}  # fmt: skip
_STAGE3_KEYS = {
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip
_HPZ_KEYS = {"zero_hpz_partition_size"}
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
    "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip
# The run's flags decide these; Accelerate fills them in.
_MAY_BE_AUTO = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
# DeepSpeed's default, larger than most models here: they stay gathered between forward and backward pass.
_MAX_REUSE_DISTANCE = 1_000_000_000


def lint(directory: Path = STRATEGY_DIRECTORY) -> Iterator[str]:
    documents: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for names, folder, suffix, read, into in (
        (list(STRATEGIES), directory, "yaml", read_yaml, documents),
        (WITH_DEEPSPEED, directory / "deepspeed", "json", read_deepspeed_json, settings),
    ):
        for name in sorted({file.stem for file in folder.glob(f"*.{suffix}")} - set(names)):
            yield f"{name}.{suffix} is not a strategy"
        for name in names:
            try:
                into[name] = read(folder / f"{name}.{suffix}")
            except UserError as error:
                yield f"{name}.{suffix}: {error.problem}"
    seen: dict[str, tuple[str, Any]] = {}
    shared = {name: _without(document, _YAML_KEYS_THAT_DIFFER) for name, document in documents.items()}
    for name, document in documents.items():
        yield from _lint_yaml(name, document)
        yield from _differences(f"{name}.yaml", shared[name], seen)
    for key in sorted(seen):
        for name in shared:
            if key not in shared[name]:
                yield f"{name}.yaml: {key} is missing, {seen[key][0]} has it"
    seen = {}
    for name, values in settings.items():
        yield from _lint_json(name, values, values["zero_optimization"])
        yield from _differences(f"{name}.json", _comparable(values), seen)


def _lint_yaml(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    wanted = {"distributed_type": _DISTRIBUTED_TYPES[name], "num_processes": ranks_of(name)}
    deepspeed = document.get("deepspeed_config") or {}
    if name in WITH_DEEPSPEED:
        wanted |= {
            "deepspeed_config_file": f"accelerate_configs/deepspeed/{name}.json",
            "deepspeed_multinode_launcher": "standard",
            # transformers refuses to load a model in parts where its layers are to be divided.
            "zero3_init_flag": STRATEGIES[name][0] == 3 and name not in _WITH_TENSORS,
        }
    for key, value in wanted.items():
        found = (deepspeed if key in _DEEPSPEED_CONFIG_KEYS else document).get(key)
        if found != value:
            yield f"{name}.yaml: {key} is {found!r}, not {value!r}"
    for key, keys in (
        ("deepspeed_config", _DEEPSPEED_CONFIG_KEYS if name in WITH_DEEPSPEED else None),
        ("fsdp_config", _FSDP_CONFIG_KEYS if _DISTRIBUTED_TYPES[name] == "FSDP" else None),
    ):
        section = document.get(key)
        if (None if section is None else set(section)) != keys:
            yield f"{name}.yaml: {key} holds {sorted(section or ())}, not {sorted(keys or ())}"

    if (mesh := document.get("parallelism_config")) != _MESHES.get(name):
        yield f"{name}.yaml: parallelism_config is {mesh!r}"


def ranks_of(name: str) -> int:
    """As its file says."""
    if name == "single":
        return 1
    return 4 if name in WITH_COPIES else 2


def _own_root_keys(name: str) -> set[str]:
    return ({"aio"} if "nvme" in STRATEGIES[name] else set()) | (
        {"tensor_parallel"} if name in _WITH_TENSORS else set()
    )


def _lint_json(name: str, settings: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
    stage, *devices = STRATEGIES[name]
    if zero["stage"] != stage:
        yield f"{name}.json: zero_optimization.stage is {zero['stage']}, not {stage}"
    for section, prefix, wanted in (
        (settings, "", _ROOT_KEYS | _own_root_keys(name)),
        (
            _without(zero, set(_OFFLOAD_KEYS)),
            "zero_optimization.",
            _ZERO_KEYS | (_STAGE3_KEYS if stage == 3 else set()) | (_HPZ_KEYS if name == "zero3_hpz" else set()),
        ),
    ):
        for key in sorted(set(section) ^ wanted):
            yield f"{name}.json: {prefix}{key} is {'unexpected' if key in section else 'left to a hidden default'}"
    if name in _WITH_TENSORS and settings["tensor_parallel"] != _TENSOR_PARALLEL:
        yield f"{name}.json: tensor_parallel is {settings['tensor_parallel']!r}"
    if zero.get("zero_hpz_partition_size", 1) != (2 if name == "zero3_hpz" else 1):
        yield f"{name}.json: zero_optimization.zero_hpz_partition_size is {zero['zero_hpz_partition_size']!r}"
    if zero.get("overlap_comm") is not (zero["stage"] == 3):
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
    for path, value in _leaves(settings):
        if value == "auto" and path not in _MAY_BE_AUTO:
            yield f"{name}.json: {path} is auto, which hides its value"


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal wherever it is there; offload settings are compared among the same kind of offload."""
    values = _without(settings, {"zero_optimization"})
    for key, value in settings["zero_optimization"].items():
        if key in _OFFLOAD_KEYS:
            device = value.get("device") if isinstance(value, Mapping) else None
            values |= dict(_leaves(value, f"zero_optimization.{key}[{device}].")) if device else {}
        # The first three follow from the stage and from where the parameters are; everything else must be equal.
        elif key not in {"stage", "overlap_comm", "stage3_max_reuse_distance", *_HPZ_KEYS}:
            values[f"zero_optimization.{key}"] = value
    return values


def _differences(file: str, values: Mapping[str, Any], seen: dict[str, tuple[str, Any]]) -> Iterator[str]:
    for key, value in values.items():
        first_file, first = seen.setdefault(key, (file, value))
        if value != first or type(value) is not type(first):
            yield f"{file}: {key} is {value!r}, {first_file} says {first!r}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _without(document: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}
