"""Accelerate files and DeepSpeed JSONs for `accelerate launch`: of a recommended strategy, and of `study configs`."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from study.advisor.advise import Option
from study.advisor.request_text import precision_name
from study.config.errors import UserError
from study.config.precisions import computing_type, in_engine
from study.config.strategies import (
    STRATEGY_DIRECTORY,
    STRATEGY_NAMES,
    Strategy,
    read_strategy,
    read_yaml,
    spelled_strategy,
)
from study.host.folders import folder_argument
from study.predictor.request import Request
from study.workloads.presets import find_known, find_preset

CONFIGS_EPILOG = """\
A file refers to its DeepSpeed JSON by its full path, so it can be launched from any folder:
accelerate launch --config_file DIR/zero3.yaml YOUR_PROGRAM.py, or -m study.train.
"""
# fsdp_config of version 1 that is what accelerate_configs/fsdp2.yaml is of version 2.
_FSDP1 = {
    "fsdp_version": 1,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_use_orig_params": True,
    "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
SAVES_SHARDS = (
    "To save a model of stage 3 by accelerator.save_model, set stage3_gather_16bit_weights_on_model_save to true in the"
    " JSON file: the first rank then has all weights in host memory"
)
SUMS_WITHIN_GROUPS = (
    "with the loss of DeepSpeed's and Accelerate's documents, gradients are too large by the ranks that share a"
    " sequence (docs/compositions.md): divide your loss by that number, or use ulysses_zero3; study/train.py averages"
    " gradients itself"
)
# Settings that depend on the machines, by strategy.
_SIZED_BY_MACHINES = {
    "zero3_hpz": "zero_hpz_partition_size to the GPUs of one machine",
    "hsdp": (
        "parallelism_config_dp_replicate_size to the machines, parallelism_config_dp_shard_size to the GPUs of one"
    ),
}


@dataclasses.dataclass(frozen=True)
class AdvisedFiles:
    """Files of the recommended strategy, and the launch commands of the user's program, and of study/train.py if it can
    train the same."""

    accelerate: Path
    deepspeed: Path | None
    command: str
    of_study: str | None


def write_files(option: Option, folder: Path, nvme_path: str, model: str) -> AdvisedFiles:
    """Write the files of an option and return them; `model` is --model_name_or_path."""
    request = option.request
    outer = folder / f"{option.name}-fitted.yaml"
    settings: Any = copy.deepcopy(request.strategy.deepspeed)
    changes: dict[str, Any] = {"num_machines": request.box.nodes, "num_processes": request.box.ranks}
    if request.box.nodes > 1:
        # The rank of the machine and the main address are flags of the launch, below.
        changes["main_process_port"] = 29500
    if request.strategy.mesh is not None:
        shards = request.ranks_per_replica or request.box.ranks
        changes["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": request.box.ranks // shards,
            "parallelism_config_dp_shard_size": shards,
        }
    if request.strategy.is_fsdp and request.fsdp_version == 1:
        outer = folder / "fsdp1-fitted.yaml"
        changes["fsdp_config"] = _FSDP1
    precision = precision_name(request)
    if settings is None:
        changes["mixed_precision"] = "no" if precision == "fp32" else precision
    else:
        # Accelerate refuses a precision in its own file if there is a DeepSpeed JSON.
        if in_engine(precision):
            settings[computing_type(precision)] = {"enabled": True}
        for what in ("offload_optimizer", "offload_param"):
            section = settings["zero_optimization"].get(what)
            if section and section["device"] == "nvme":
                section["nvme_path"] = nvme_path
    texts = _strategy_texts(option.name, outer, settings, changes)
    _write_texts(texts, folder, "--output")
    inner = None if settings is None else outer.with_suffix(".json")
    launch = ["accelerate", "launch", "--config_file", str(outer)]
    if request.box.nodes > 1:
        launch += ["--machine_rank", "RANK", "--main_process_ip", "ADDRESS"]
    return AdvisedFiles(outer, inner, shlex.join([*launch, "YOUR_PROGRAM.py"]), _study_command(request, model, launch))


def add_configs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study configs`."""
    parser.add_argument("folder", type=folder_argument, metavar="DIR", help="the folder to write; created if missing")
    parser.add_argument("names", nargs="*", default=(), metavar="NAME", help="strategies; default: all")


def write_configs(options: argparse.Namespace) -> int:
    """Write the Accelerate files of strategies for use with any script, and print their paths; return 0."""
    if str(options.folder) in STRATEGY_NAMES and not options.folder.exists():
        command = shlex.join(["study", "configs", "mine", str(options.folder), *options.names])
        raise UserError(f"{options.folder} is a strategy, and DIR comes first", f"for instance: {command}")
    folder, texts = options.folder.absolute(), dict[Path, str]()
    names = [spelled_strategy(name) for name in options.names] or STRATEGY_NAMES
    for name in names:
        texts |= _strategy_texts(name, folder / f"{name}.yaml", read_strategy(name).deepspeed, {})
    _write_texts(texts, folder, "DIR")
    print("\n".join(map(str, texts)))
    launched = next(file for file in texts if file.suffix == ".yaml")
    line = shlex.join(["accelerate", "launch", "--config_file", str(launched), "--num_processes", "GPUS"])
    # Standard output has paths alone, for scripts.
    print(f"launch: {line} YOUR_PROGRAM.py", file=sys.stderr)
    print("The precision is that of your program: Accelerator(mixed_precision=...), or bf16=True", file=sys.stderr)
    if any(file.suffix == ".json" and saves_shards(json.loads(text)) for file, text in texts.items()):
        print(SAVES_SHARDS, file=sys.stderr)
    for name, settings in _SIZED_BY_MACHINES.items():
        if name in names:
            print(f"{name}: set {settings}", file=sys.stderr)
    doubled = [name for name in names if _sums_within_groups(read_strategy(name))]
    if doubled:
        print(f"{', '.join(doubled)}: {SUMS_WITHIN_GROUPS}", file=sys.stderr)
    return 0


def _sums_within_groups(strategy: Strategy) -> bool:
    """Whether DeepSpeed sums gradients over the ranks that share a sequence, instead of averaging them."""
    return strategy.group is not None and strategy.group.divides == "sequence" and strategy.zero_stage in (1, 2)


def saves_shards(deepspeed: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed file keeps the weights sharded when the model is saved."""
    zero = deepspeed["zero_optimization"]
    return zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save", False)


def _strategy_texts(
    name: str, file: Path, deepspeed: Mapping[str, Any] | None, changes: dict[str, Any]
) -> dict[Path, str]:
    """Return a strategy's Accelerate file with these changes, and its DeepSpeed JSON next to it, by path."""
    texts, document = dict[Path, str](), read_yaml(STRATEGY_DIRECTORY / f"{name}.yaml") | changes
    if deepspeed is not None:
        inner = file.with_suffix(".json")
        document["deepspeed_config"]["deepspeed_config_file"] = str(inner.absolute())
        texts[inner] = json.dumps(deepspeed, indent=2) + "\n"
    return texts | {file: yaml.safe_dump(document, sort_keys=False)}


def _write_texts(texts: Mapping[Path, str], folder: Path, argument: str) -> None:
    """Write files into a folder; raise UserError that names the argument rather than change an existing file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            if file.exists() and file.read_bytes() != text.encode():
                raise UserError(f"{file} exists with other contents", f"name another {argument}")
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"the files cannot be written to {folder} ({error.strerror})"
        raise UserError(problem, f"name another {argument}") from None


def _study_command(request: Request, model: str, launch: list[str]) -> str | None:
    """Return the command that trains this with study/train.py; None if that would train something else.

    study/train.py has transformers' loss and 32-bit AdamW alone, cannot load a model given by its sizes, and gathers
    fp32 weights under FSDP, whose gradients it reduces once a step. It keeps fp32 weights without DeepSpeed, and adds
    adapters to all linear layers, without dropout.
    """
    shape = request.shape
    if shape.lora_targets or shape.lora_saved or shape.lora_dora or request.lora_dropout or shape.has_decoder:
        return None
    if shape.headless_class:
        return None
    if request.loss_kernel != "transformers":
        return None
    if request.optimizer != "adamw" or request.sync_each_batch or request.tensor_group is not None:
        return None
    preset, is_loaded = find_preset(model), "=" not in model and not Path(model).expanduser().is_file()
    if (known_model := find_known(model)) is not None:
        model = known_model.hub_id
    if request.pure or request.fsdp_gathers_16_bits or not is_loaded:
        return None
    task = "gpt-wikitext" if request.shape.family == "causal-lm" else "bert-imdb"
    flags = ["--task", task, "--model_name_or_path", model]
    flags += ["--weights", "random"] * (preset is not None and not preset.has_published_weights)
    flags += ["--precision", request.precision, "--seq_length", str(request.sequence_length)]
    flags += ["--per_device_train_batch_size", str(request.micro_batch)]
    flags += ["--global_batch_size", str(request.micro_batch * request.accumulation * request.box.ranks)]
    # The model's dropout stores masks, which the prediction does not include.
    flags += ["--attn_implementation", request.attention, "--dropout", "0"]
    flags += ["--gradient_checkpointing"] * request.gradient_checkpointing
    flags += ["--torch_compile"] * request.compiled
    if request.shape.lora_rank:
        flags += ["--peft", "lora", "--lora_rank", str(request.shape.lora_rank)]
    return shlex.join([*launch, "study/train.py", *flags])
