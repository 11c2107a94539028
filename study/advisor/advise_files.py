"""The Accelerate file and the DeepSpeed file of what is advised, which `accelerate launch` takes as they are."""

from __future__ import annotations

import copy
import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from study.advisor.advise import Option
from study.config.errors import UserError
from study.config.strategies import STRATEGY_DIRECTORY, read_yaml
from study.predictor.request import Request
from study.workloads.presets import find_preset

_PORT = 29500


@dataclasses.dataclass(frozen=True)
class Files:
    accelerate: Path
    deepspeed: Path | None
    # As a user's own program is launched, and as this study's is, if it can train that.
    command: str
    of_study: str | None


def write_files(option: Option, folder: Path, nvme_path: str, model: str) -> Files:
    """`model` is what was asked for, as it was said."""
    request = option.request
    stem = f"{option.name}-fitted"
    settings = _settings(option, nvme_path)
    inner = None if settings is None else folder / f"{stem}.json"
    outer = folder / f"{stem}.yaml"
    texts = {outer: yaml.safe_dump(_launcher(option, inner), sort_keys=False)}
    if inner is not None:
        texts[inner] = json.dumps(settings, indent=2) + "\n"
    _write(folder, texts)
    launch = ["accelerate", "launch", "--config_file", str(outer)]
    return Files(outer, inner, shlex.join([*launch, "YOUR_PROGRAM.py"]), _of_study(request, model, launch))


def _of_study(request: Request, model: str, launch: Sequence[str]) -> str | None:
    """This study's trainer has no loss in chunks, and takes no model that is nothing but sizes or their file."""
    preset = find_preset(model)
    if request.chunked_loss or "=" in model or Path(model).expanduser().is_file():
        return None
    task = "gpt-wikitext" if request.shape.family == "causal-lm" else "bert-imdb"
    flags = ["--task", task, "--model_name_or_path", model]
    flags += ["--weights", "random"] * (preset is not None and not preset.has_published_weights)
    flags += ["--precision", request.precision, "--seq_length", str(request.sequence_length)]
    flags += ["--per_device_train_batch_size", str(request.micro_batch)]
    flags += ["--global_batch_size", str(request.micro_batch * request.accumulation * request.box.ranks)]
    flags += ["--gradient_checkpointing"] * request.gradient_checkpointing
    if request.shape.lora_rank:
        flags += ["--peft", "lora", "--lora_rank", str(request.shape.lora_rank)]
    return shlex.join([*launch, "study/train.py", *flags])


def _settings(option: Option, nvme_path: str) -> dict[str, Any] | None:
    """With the precision in it: a JSON beside which Accelerate's file says one is refused."""
    request = option.request
    if request.strategy.deepspeed is None:
        return None
    settings: dict[str, Any] = copy.deepcopy(dict(request.strategy.deepspeed))
    if request.precision.endswith("-engine"):
        settings[request.precision.removesuffix("-engine")] = {"enabled": True}
    for what in ("offload_optimizer", "offload_param"):
        section = settings["zero_optimization"].get(what)
        if section and section["device"] == "nvme":
            section["nvme_path"] = nvme_path
    return settings


def _launcher(option: Option, inner: Path | None) -> dict[str, Any]:
    request = option.request
    document = read_yaml(STRATEGY_DIRECTORY / f"{option.name}.yaml")
    document |= {"num_machines": request.box.nodes, "num_processes": request.box.ranks}
    if request.box.nodes > 1:
        # Each machine's number and the first one's address are given with the launch.
        document["main_process_port"] = _PORT
    if request.strategy.mesh is not None:
        shards = request.ranks_of_a_copy or request.box.ranks
        document["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": request.box.ranks // shards,
            "parallelism_config_dp_shard_size": shards,
        }
    if inner is None:
        document["mixed_precision"] = "no" if request.precision == "fp32" else request.precision
    else:
        document["deepspeed_config"]["deepspeed_config_file"] = str(inner)
    return document


def _write(folder: Path, texts: dict[Path, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            if file.exists() and file.read_text(encoding="utf-8") != text:
                raise UserError(f"{file} is there already, and says something else", "name another --output")
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"the files cannot be written to {folder} ({reason})", "name another --output") from None
