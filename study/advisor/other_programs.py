"""Files of programs whose settings `study explain` does not read, by their keys, and the question to ask instead."""

from __future__ import annotations

import re
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
# Keys of ms-swift's arguments (swift/arguments/, at 3602360a) and of its 3.x that no other trainer here has.
_OF_SWIFT = {
    *("train_type", "tuner_type", "tuner_backend", "attn_impl", "agent_template", "rlhf_type", "quant_bits"),
    *("freeze_vit", "freeze_llm", "freeze_aligner", "split_dataset_ratio", "truncation_strategy"),
    *("external_plugins", "custom_register_path", "use_hf", "add_version"),
}
# Files that it ships (swift/config/), by the names that its key deepspeed takes.
_SWIFTS_ENGINES = {
    "zero0": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero2_offload": "zero2_cpu",
    "zero3": "zero3",
    "zero3_offload": "zero3_cpu",
}
# Its keys of a whole number, and the flags of `study predict`.
_SWIFTS_COUNTS = {
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "seq_length",
}
_SWIFTS_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_OF_COMPOSER = {"device_train_microbatch_size", "global_train_batch_size", "max_duration"}
_OF_LIGHTNINGS_TRAINER = {"strategy", "devices", "accelerator", "precision", "max_epochs", "num_nodes"}


def _has_key(document: Mapping[str, Any], key: str) -> bool:
    """Whether a section has a key."""
    return any(isinstance(section, Mapping) and key in section for section in document.values())


def _is_of_lightning(document: Mapping[str, Any]) -> bool:
    trainer = document.get("trainer")
    return isinstance(trainer, Mapping) and not _OF_LIGHTNINGS_TRAINER.isdisjoint(trainer)


def _is_of_swift(document: Mapping[str, Any]) -> bool:
    names_its_model = {"model", "torch_dtype"} <= document.keys() and "model_name_or_path" not in document
    # Composer's model is a section.
    return not _OF_SWIFT.isdisjoint(document) or (names_its_model and isinstance(document["model"], str))


_PROGRAMS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "ms-swift": _is_of_swift,
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
    if program == "ms-swift":
        question = f"study predict MODEL {_swift_flags(document)} --hardware BOX"
        if _divided_ranks(document) > 1 and not _is_predicted_over_ranks(document, _swift_strategy(document)):
            question += "; sequence_parallel_size is predicted at stage 3 alone"
        raise WrongFile(name, "is a file of ms-swift, which is not read", question)
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


def _swift_flags(document: Mapping[str, Any]) -> str:
    """Return the flags that an ms-swift file amounts to. Without a type of tuner it trains adapters of rank 8."""
    strategy = _swift_strategy(document)
    flags = [f"--strategy {strategy}"]
    if document.get("tuner_type", document.get("train_type", "lora")) != "full":
        rank = document.get("lora_rank", 8)
        flags += ["--peft lora", f"--lora_rank {rank if type(rank) is int else 'R'}", "--lora_targets all-linear"]
        flags += ["--quantization 4bit"] if document.get("quant_bits") in (4, "4") else []
    flags += [f"--{flag} {document[key]}" for key, flag in _SWIFTS_COUNTS.items() if type(document.get(key)) is int]
    flags += [f"--sp {_divided_ranks(document)}"] if _is_predicted_over_ranks(document, strategy) else []
    precision = _SWIFTS_PRECISIONS.get(str(document.get("torch_dtype")))
    flags += [f"--precision {precision}"] if precision else []
    flags += ["--attn_implementation flash_attention_2"] if "flash" in str(document.get("attn_impl")) else []
    flags += ["--gradient_checkpointing"] if document.get("gradient_checkpointing", True) is True else []
    return " ".join(flags)


def _divided_ranks(document: Mapping[str, Any]) -> int:
    """Return the ranks of an ms-swift file that divide the tokens of a sample."""
    ranks = document.get("sequence_parallel_size")
    return ranks if type(ranks) is int else 1


def _is_predicted_over_ranks(document: Mapping[str, Any], strategy: str) -> bool:
    return _divided_ranks(document) > 1 and strategy in ("zero3", "zero3_cpu")


def _swift_strategy(document: Mapping[str, Any]) -> str:
    if setting := document.get("deepspeed"):
        name = str(setting).rpartition("/")[2].removesuffix(".json")
        return _SWIFTS_ENGINES.get(name, "STRATEGY")
    return "fsdp2" if document.get("fsdp") else "ddp"


def _lightning_strategy(document: Mapping[str, Any]) -> str:
    strategy = document["trainer"].get("strategy")
    if isinstance(strategy, Mapping) and str(strategy.get("class_path")).endswith("DeepSpeedStrategy"):
        return _with_settings(strategy.get("init_args") or {})
    return OF_LIGHTNING.get(str(strategy), "STRATEGY")


# A notebook's JSON escapes the quotes.
_NAMED_STRATEGY = re.compile(r"""\bstrategy\s*=\s*\\?["'](\w+)""")
_MADE_STRATEGY = re.compile(r"\b(DeepSpeed|FSDP|DDP)Strategy\(([^)]*)")
_STAGE = re.compile(r"\bstage\s*=\s*([0-3])")


def script_strategy(text: str) -> str | None:
    """Return the flags of the strategy that a script gives Lightning's Trainer; STRATEGY if it names several, None if
    it names none that Lightning has."""
    strategies = [OF_LIGHTNING[name] for name in _NAMED_STRATEGY.findall(text) if name in OF_LIGHTNING]
    strategies += [_made_strategy(*match) for match in _MADE_STRATEGY.findall(text)]
    if not strategies:
        return None
    return strategies[0] if len(set(strategies)) == 1 else "STRATEGY"


def _made_strategy(kind: str, arguments: str) -> str:
    if kind != "DeepSpeed":
        return OF_LIGHTNING[kind.lower()]
    settings: dict[str, Any] = {
        name: re.search(rf"\b{name}\s*=\s*True", arguments) is not None
        for name in ("offload_parameters", "offload_optimizer")
    }
    if stage := _STAGE.search(arguments):
        settings["stage"] = int(stage[1])
    # Its settings may be in a file, or in a mapping.
    return "STRATEGY" if re.search(r"\bconfig\s*=", arguments) else _with_settings(settings)


def _with_settings(settings: Mapping[str, Any]) -> str:
    """Return the strategy of arguments of Lightning's DeepSpeedStrategy, whose stage is 2 by default."""
    stage = settings.get("stage", 2)
    if settings.get("offload_parameters"):
        return "zero3_cpu"
    if settings.get("offload_optimizer"):
        return "zero3_cpu_optimizer" if stage == 3 else "zero2_cpu"
    return f"zero{stage}"
