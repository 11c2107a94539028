"""Files of programs whose settings `study explain` does not read, by their keys, and the question to ask instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from study.config.errors import WrongFile

# Lightning's names of strategies (lightning/pytorch/strategies/deepspeed.py, fsdp.py and ddp.py), and this project's.
OF_LIGHTNING = {
    "ddp": "ddp",
    "fsdp": "fsdp2 --fsdp_version 1",
    "deepspeed": "zero2",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_2_offload": "zero2_cpu",
    "deepspeed_stage_3": "zero3",
    "deepspeed_stage_3_offload": "zero3_cpu",
    "deepspeed_stage_3_offload_nvme": "zero3_nvme",
}
_OF_COMPOSER = {"device_train_microbatch_size", "global_train_batch_size", "max_duration"}
_OF_LIGHTNINGS_TRAINER = {"strategy", "devices", "accelerator", "precision", "max_epochs", "num_nodes"}


def _has_key(document: Mapping[str, Any], key: str) -> bool:
    """Whether a section has a key."""
    return any(isinstance(section, Mapping) and key in section for section in document.values())


def _is_of_lightning(document: Mapping[str, Any]) -> bool:
    trainer = document.get("trainer")
    return isinstance(trainer, Mapping) and not _OF_LIGHTNINGS_TRAINER.isdisjoint(trainer)


_PROGRAMS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "torchtune": lambda document: _has_key(document, "_component_"),
    "NeMo or another program of Hydra": lambda document: _has_key(document, "_target_"),
    "Lightning": _is_of_lightning,
    "Composer": lambda document: not _OF_COMPOSER.isdisjoint(document),
}


def check_program(name: str, document: Mapping[str, Any]) -> None:
    """Raise UserError for the file of another program."""
    program = next((program for program, has_its_keys in _PROGRAMS.items() if has_its_keys(document)), None)
    if program is None:
        return
    strategy = _lightning_strategy(document) if program == "Lightning" else "fsdp2"
    adapters, flags = "", "batch and precision"
    if program == "torchtune" and (adapters := _torchtune_adapters(document)):
        flags = "batch, precision and modules with adapters"
    question = f"study predict MODEL --strategy {strategy}{adapters} --hardware BOX, with its {flags} as flags"
    raise WrongFile(name, f"is a file of {program}, which is not read", question)


def _torchtune_adapters(document: Mapping[str, Any]) -> str:
    """Return the flags of the adapters that a torchtune file trains, whose builder is lora_llama3_8b or qlora_...;
    empty for full training."""
    model = document.get("model")
    builder = str(model.get("_component_", "")).rpartition(".")[2] if isinstance(model, Mapping) else ""
    if not builder.startswith(("lora_", "qlora_")):
        return ""
    assert isinstance(model, Mapping)
    rank = model.get("lora_rank")
    # torchtune's adapters have the type of the weights.
    flags = " --peft lora" + (f" --lora_rank {rank}" if type(rank) is int else "") + " --adapters_in_16_bits"
    return flags + " --quantization 4bit" * builder.startswith("qlora_")


def _lightning_strategy(document: Mapping[str, Any]) -> str:
    strategy = document["trainer"].get("strategy")
    if isinstance(strategy, Mapping) and str(strategy.get("class_path")).endswith("DeepSpeedStrategy"):
        return _with_settings(strategy.get("init_args") or {})
    return OF_LIGHTNING.get(str(strategy), "STRATEGY")


def _with_settings(settings: Mapping[str, Any]) -> str:
    """Return the strategy of arguments of Lightning's DeepSpeedStrategy, whose stage is 2 by default."""
    stage = settings.get("stage", 2)
    if settings.get("offload_parameters"):
        return "zero3_cpu"
    if settings.get("offload_optimizer"):
        return "zero3_cpu_optimizer" if stage == 3 else "zero2_cpu"
    return f"zero{stage}"
