"""`study explain` of trainers' files: their keys, figures equal to those of `study predict`, and wrong values."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
import yaml
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from commands import parse
from engines import ROOT
from study.advisor import explain, explanation_text, predict_command
from study.advisor.calculator import Calculator
from study.advisor.explain_answers import find_answers
from study.advisor.explain_case import ACCUMULATION, ConfigCase
from study.advisor.explain_combinations import stored_answer, untested_line
from study.advisor.explain_findings import findings
from study.advisor.explain_releases import release_line
from study.advisor.explanation import ConfigExplanation
from study.advisor.long_features import over_ranks
from study.advisor.predict_command import PredictFlags, make_request
from study.advisor.trainer_files import WITHOUT, read_trainer_file, shipped_engines
from study.advisor.trainer_groups import NO_MAPPING
from study.advisor.trainer_keys import (
    HF_OPTIMIZERS,
    NO_TRL_KEYS,
    OTHER_FIELDS,
    REMOVED_HF_KEYS,
    REMOVED_TRL_KEYS,
    TRAINERS,
)
from study.advisor.trl_files import trl_keys
from study.advisor.user_settings import ZERO
from study.advisor.workload import Workload
from study.cli import main
from study.config.errors import UserError, did_you_mean
from study.config.flags import Parser
from study.config.text import rounded
from study.host.memory import GIB
from study.predictor.live import LiveShape
from study.predictor.memory import predict_memory
from study.predictor.request import Request
from study.predictor.state import predict_state
from study.predictor.time import device_bytes, predict_time
from study.releases.causes import read_causes
from tools.architectures import CONFIGS

FOLDER = ROOT / "tests" / "data" / "trainers"
BOX = ("--hardware", "8xH100")
RECOMPUTED = "--gradient_checkpointing"
FLASH = "--attn_implementation flash_attention_2"


def read(file: Path | str, *words: str) -> ConfigCase:
    """Return the case that `study explain` prints."""
    options = parse(explain, [str(file), *words])
    explain._check_flags(options)
    return explain.read_case(options)


def first_line(case: ConfigCase) -> str:
    return explanation_text.first_line(ConfigExplanation.explain(case))


def untested(case: ConfigCase) -> str | None:
    return untested_line(case, stored_answer(case))


def write(folder: Path, document: dict[str, Any], name: str = "trainer.yaml") -> Path:
    file = folder / name
    file.write_text(json.dumps(document) if file.suffix == ".json" else yaml.safe_dump(document, sort_keys=False))
    return file


def figures(request: Request) -> tuple[float, float, float, float]:
    memory = predict_memory(request)
    bound = device_bytes(memory, at_upper=True)
    return device_bytes(memory), bound, memory.host_peak.value, predict_time(request).step_s.value


def predicted(command: str) -> Request:
    return make_request(PredictFlags.from_options(parse(predict_command, command.split())))


def overrides(**settings: Any) -> str:
    return " ".join(f"--engine_override zero_optimization.{key}={json.dumps(value)}" for key, value in settings.items())


# Settings of ds_z3_config.json that are not those of this study's zero3, for a width of 4096.
DS_Z3 = overrides(
    overlap_comm=False,
    sub_group_size=10**9,
    reduce_bucket_size=4096**2,
    stage3_prefetch_bucket_size=int(0.9 * 4096**2),
    stage3_param_persistence_threshold=10 * 4096,
    stage3_max_live_parameters=10**9,
    stage3_max_reuse_distance=10**9,
    stage3_gather_16bit_weights_on_model_save=True,
)


@pytest.mark.parametrize(
    ("name", "words", "command"),
    [
        (
            "axolotl_fft_8b.yaml",
            "",
            f"llama-3.1-8b --strategy ddp --pure_bf16 --optimizer paged_adamw_8bit --seq_length 8192 --accumulation 8"
            f" {RECOMPUTED} {FLASH}",
        ),
        (
            "llama_factory_full_sft.yaml",
            "llama-3.1-8b",
            f"llama-3.1-8b --strategy zero3 --accumulation 2 --seq_length 2048 {RECOMPUTED} {DS_Z3}",
        ),
        (
            "llama_factory_qlora.yaml",
            "",
            "llama-3-8b --strategy ddp --peft lora --lora_rank 8 --lora_targets all-linear --quantization 4bit"
            f" --double_quant --accumulation 8 --seq_length 2048 {RECOMPUTED}",
        ),
        (
            "alignment_handbook_sft.yaml",
            "mistral-7b-v0.3",
            "mistral-7b-v0.3 --strategy ddp --pure_bf16 --micro_batch 16 --seq_length 2048 --loss_kernel trl"
            f" {RECOMPUTED} {FLASH}",
        ),
        # A pair is two sequences, and its weights are loaded in fp32 (torch_dtype: null).
        (
            "alignment_handbook_dpo.yaml",
            "mistral-7b-v0.3",
            "mistral-7b-v0.3 --strategy ddp --precision bf16 --autocast --with_reference --micro_batch 16"
            f" --accumulation 2 --seq_length 1024 --loss_kernel trl {RECOMPUTED}",
        ),
        # Flags win.
        (
            "axolotl_fft_8b.yaml",
            "gpt2-xl --seq_length 512 --accumulation 1 --optimizer lion",
            f"gpt2-xl --strategy ddp --pure_bf16 --optimizer lion --seq_length 512 {RECOMPUTED} {FLASH}",
        ),
    ],
)
def test_a_shipped_example_has_the_figures_of_predict(name: str, words: str, command: str) -> None:
    case = read(FOLDER / name, *words.split(), *BOX)
    assert figures(case.request) == figures(predicted(f"{command} {' '.join(BOX)}"))


def engine_and_flags(file: Path, engine: Path, model: str, flags: str) -> tuple[ConfigCase, ConfigCase]:
    return read(file, model, *BOX), read(engine, model, *flags.split(), *BOX)


def test_fsdp_of_a_trainer_is_that_of_the_accelerate_file(tmp_path: Path) -> None:
    document = yaml.safe_load((FOLDER / "axolotl_qlora_fsdp.yaml").read_text())
    settings = document["fsdp_config"]
    launch = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": settings}
    flags = (
        "--peft lora --lora_rank 32 --lora_targets all-linear --lora_dropout 0.05 --quantization 4bit --double_quant"
    )
    flags += f" --seq_length 2048 --accumulation 4 {RECOMPUTED} {FLASH}"
    trainer, accelerate = engine_and_flags(
        FOLDER / "axolotl_qlora_fsdp.yaml", write(tmp_path, launch, "fsdp.yaml"), "qwen2-7b", flags
    )
    assert figures(trainer.request) == figures(accelerate.request)
    assert (trainer.request.fsdp_version, trainer.request.fsdp_offloads) == (1, True)
    noted = {(Path(item.file).name, item.key, item.line) for item in trainer.findings if item.kind == "noted"}
    (crash,) = (item for item in trainer.findings if item.rule == "offloaded-4bit")
    assert "CUDA error: invalid argument" in crash.message
    # Version 1 alone, with the offload.
    for fsdp in ({"fsdp_version": 2}, {"fsdp_offload_params": False}):
        file = write(tmp_path, document | {"fsdp_config": settings | fsdp})
        assert "offloaded-4bit" not in {item.rule for item in read(file, *BOX).findings}
    lines = (FOLDER / "axolotl_qlora_fsdp.yaml").read_text().splitlines()
    key = "fsdp_offload_params"
    (line,) = (number for number, text in enumerate(lines, 1) if key in text)
    assert ("axolotl_qlora_fsdp.yaml", f"fsdp_config.{key}", line) in noted
    assert any(key == "sample_packing" for _, key, _ in noted)


@pytest.mark.parametrize(
    ("fsdp", "config", "changes"),
    [
        ("full_shard auto_wrap", {}, {}),
        (True, {"version": 1, "reshard_after_forward": "shard_grad_op"}, {"version": 1, "keeps": True}),
        ("shard_grad_op", {}, {"keeps": True}),
        (["full_shard", "offload"], {"fsdp_version": 2}, {"offloads": True}),
        ("hybrid_shard", {}, {"version": 1, "replicas": 2}),
        ("full_shard", {"activation_checkpointing": True}, {"checkpoints": True}),
        ("full_shard", {"auto_wrap_policy": "NO_WRAP"}, {"unwrapped": True}),
    ],
)
def test_fsdp_of_training_arguments_is_read(fsdp: Any, config: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    document = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "bf16": True, "fsdp": fsdp}
    request = read(write(tmp_path, document | {"fsdp_config": config}), "--hardware", "2x8xA100").request
    settings = {
        "version": request.fsdp_version,
        "keeps": request.fsdp_keeps_gathered,
        "offloads": request.fsdp_offloads,
        "replicas": request.box.ranks // request.fsdp_ranks,
        "checkpoints": request.gradient_checkpointing,
        "unwrapped": request.fsdp_unwrapped,
    }
    usual = dict.fromkeys(settings, False) | {"version": 2, "replicas": 1}
    assert settings == usual | changes
    # A path to the same settings.
    (tmp_path / "fsdp.json").write_text(json.dumps(config))
    file = write(tmp_path, document | {"fsdp_config": "fsdp.json"})
    assert read(file, "--hardware", "2x8xA100").request == request


AXOLOTL = {"base_model": "gpt2", "learning_rate": 2e-5, "sequence_len": 512, "micro_batch_size": 2}
FACTORY = {
    "model_name_or_path": "gpt2",
    "per_device_train_batch_size": 1,
    "finetuning_type": "full",
    "bf16": True,
    "cutoff_len": 1024,
}
ARGUMENTS = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 2, "bf16": True}


@pytest.mark.parametrize(
    ("trainer", "place"), [(name, place) for name, it in shipped_engines().items() for place in it["files"]]
)
def test_a_file_that_the_trainer_ships_is_taken_if_it_is_not_here(trainer: str, place: str, tmp_path: Path) -> None:
    document = AXOLOTL if trainer == "axolotl" else FACTORY
    case = read(write(tmp_path, document | {"deepspeed": f"/somewhere/{place}"}), *BOX)
    commit = shipped_engines()[trainer]["commit"]
    assert any(f"{trainer}'s own file of that name is taken, of commit {commit[:8]}" in line for line in case.read_from)
    # The file itself, in the trainer's folder, and in the working directory.
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(json.dumps(shipped_engines()[trainer]["files"][place]))
    by_path = read(write(tmp_path, document | {"deepspeed": place}), *BOX)
    assert not any("is not here" in line for line in by_path.read_from)
    assert figures(by_path.request) == figures(case.request)
    flags = "--micro_batch 2 --seq_length 512" if trainer == "axolotl" else f"--seq_length 1024 {RECOMPUTED}"
    by_engine = read(tmp_path / place, "gpt2", *flags.split(), "--precision", "bf16", *BOX)
    assert figures(by_engine.request) == figures(case.request)
    assert [item for item in by_path.findings if item.kind == "refused"] == []


def test_a_path_begins_at_the_file_or_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, stage in (("run", 1), ("here", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    monkeypatch.chdir(tmp_path / "here")
    file = write(tmp_path / "run", AXOLOTL | {"deepspeed": "ds.json"})
    assert read(file, *BOX).stage == 1
    (tmp_path / "run" / "ds.json").unlink()
    assert read(file, *BOX).stage == 2
    assert (
        read(file, "--engine", write(tmp_path, {"zero_optimization": {"stage": 3}}, "z3.json").as_posix(), *BOX).stage
        == 3
    )
    # Inline, under the keys of the trainer's file.
    settings = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, "stage_three": 1}}
    inline = write(tmp_path, AXOLOTL | {"deepspeed": settings})
    (refused,) = (item for item in read(inline, *BOX).findings if item.kind == "refused")
    assert (refused.key, refused.file) == ("deepspeed.zero_optimization.stage_three", str(inline))


def test_the_trainer_fills_in_auto_and_contradictions_are_its_errors(tmp_path: Path) -> None:
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
    }
    stage = {"zero_optimization": {"stage": 2}}
    case = read(write(tmp_path, ARGUMENTS | {"gradient_accumulation_steps": 4, "deepspeed": auto | stage}), *BOX)
    assert (case.request.micro_batch, case.request.accumulation, case.request.precision) == (2, 4, "bf16-engine")
    assert [item for item in case.findings if item.kind == "filled"] == []
    # Without bf16 the Trainer trains in fp32.
    plain = {key: value for key, value in ARGUMENTS.items() if key != "bf16"}
    assert (
        read(write(tmp_path, plain | {"deepspeed": auto | stage, "learning_rate": 1}), *BOX).request.precision == "fp32"
    )
    fixed = {"train_micro_batch_size_per_gpu": 3, "fp16": {"enabled": True}}
    case = read(write(tmp_path, ARGUMENTS | {"deepspeed": fixed | stage}), *BOX)
    refused = {item.key: item.says for item in case.findings if item.rule == "trainer"}
    assert refused.keys() == {"per_device_train_batch_size", "bf16"}
    assert all("the Trainer ends with an error" in says for says in refused.values())
    assert case.request.micro_batch == 3
    with pytest.raises(UserError, match="per_device_train_batch_size is 5"):
        read(write(tmp_path, ARGUMENTS | {"deepspeed": fixed | stage}), "--micro_batch", "5", *BOX)
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    document = ARGUMENTS | {"optim": "adamw_bnb_8bit", "deepspeed": {"zero_optimization": offload}}
    (conflict,) = (item for item in read(write(tmp_path, document), *BOX).findings if item.kind == "conflict")
    assert "the Trainer replace it by DeepSpeed's 32-bit Adam" in conflict.message
    assert conflict.key == "optim"


Z3, Z2 = ({"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"} for stage in (3, 2))
OFFLOAD = {"offload_params": True, "version": 1}
EIGHT_BITS = {"quantization_bit": 8, "finetuning_type": "lora"}
HQQ = {"quantization_bit": 4, "quantization_method": "hqq", "finetuning_type": "lora"}
BEST = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps"}
FSDP2_SHARDS = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}


@pytest.mark.parametrize(
    ("document", "key", "engine", "no_refusal"),
    [
        (FACTORY | {"pure_bf16": True}, "pure_bf16", {"deepspeed": Z3}, {"deepspeed": Z2}),
        (FACTORY | {"use_unsloth": True}, "use_unsloth", {"deepspeed": Z3}, {"deepspeed": Z2}),
        (FACTORY | {"use_galore": True}, "use_galore", {"deepspeed": Z2}, {"fsdp": "full_shard"}),
        (FACTORY | EIGHT_BITS, "quantization_bit", {"fsdp": "full_shard"}, {"deepspeed": Z2}),
        (FACTORY | EIGHT_BITS, "quantization_bit", {"deepspeed": Z3}, {}),
        (AXOLOTL | {"optimizer": "lion_8bit"}, "optimizer", {"fsdp_config": OFFLOAD}, {"fsdp_config": {"version": 2}}),
        (AXOLOTL | {"optimizer": "adamw_8bit"}, "optimizer", {"fsdp_version": 2, "fsdp_config": {"version": 2}}, {}),
        (ARGUMENTS | BEST, "save_only_model", {"deepspeed": Z3}, {"load_best_model_at_end": False}),
        (ARGUMENTS | BEST, "save_only_model", {"fsdp": "full_shard"}, {}),
        (ARGUMENTS | {"save_only_model": True}, "save_only_model", FSDP2_SHARDS, {"fsdp": "full_shard"}),
        (ARGUMENTS | {"auto_find_batch_size": True}, "auto_find_batch_size", {"deepspeed": Z3}, {"deepspeed": Z2}),
    ],
)
def test_what_a_trainer_refuses_with_an_engine_is_its_error(
    document: dict[str, Any], key: str, engine: dict[str, Any], no_refusal: dict[str, Any], tmp_path: Path
) -> None:
    case = read(write(tmp_path, document | engine), *BOX)
    (refused,) = (item for item in case.findings if item.kind == "refused")
    assert (refused.key, refused.rule) == (key, "trainer")
    assert first_line(case).startswith(f"Refused by the trainer: {key}. Apart from that: ")
    assert [
        item for item in read(write(tmp_path, document | no_refusal), *BOX).findings if item.kind == "refused"
    ] == []


@pytest.mark.parametrize(
    ("keys", "key", "no_refusal"),
    [
        ({"quantization_bit": 4}, "quantization_bit", {"finetuning_type": "lora"}),
        ({"quantization_bit": 4, "finetuning_type": "freeze"}, "quantization_bit", {"finetuning_type": "lora"}),
        ({**HQQ, "deepspeed": Z3}, "quantization_method", {"deepspeed": Z2}),
        ({**HQQ, "fsdp": "full_shard"}, "quantization_method", {"fsdp": ""}),
        ({"finetuning_type": "lora", "pissa_init": True, "deepspeed": Z3}, "pissa_init", {"deepspeed": Z2}),
        ({"predict_with_generate": True, "deepspeed": Z3}, "predict_with_generate", {"deepspeed": Z2}),
        ({"use_galore": True, "galore_layerwise": True}, "galore_layerwise", {"galore_layerwise": False}),
        ({"use_badam": True}, "use_badam", {"deepspeed": Z3}),
        ({"use_badam": True, "badam_mode": "ratio", "deepspeed": Z3}, "use_badam", {"badam_mode": "layer"}),
    ],
)
def test_keys_that_llama_factory_refuses_together_are_its_error(
    keys: dict[str, Any], key: str, no_refusal: dict[str, Any], tmp_path: Path
) -> None:
    case = read(write(tmp_path, FACTORY | keys), *BOX)
    assert first_line(case).startswith(f"Refused by the trainer: {key}. Apart from that: ")
    case = read(write(tmp_path, FACTORY | keys | no_refusal), *BOX)
    assert [item for item in case.findings if item.kind == "refused"] == []


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ({}, ("visual.patch_embed", "visual.blocks", "visual.merger")),
        ({"freeze_vision_tower": False}, ("visual.merger",)),
        ({"freeze_multi_modal_projector": "false"}, ("visual.patch_embed", "visual.blocks")),
        (
            {"freeze_language_model": True, "freeze_multi_modal_projector": False},
            ("visual.patch_embed", "visual.blocks", "language_model"),
        ),
        ({"finetuning_type": "lora"}, ()),
    ],
)
def test_llama_factory_trains_parts_of_a_model_of_images(
    keys: dict[str, Any], frozen: tuple[str, ...], tmp_path: Path
) -> None:
    settings = {"model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct", "finetuning_type": "full"}
    case = read(write(tmp_path, FACTORY | settings | keys), *BOX)
    assert case.shape.frozen_modules == frozen
    weights = [param for param in case.shape.params if not param.trained and not case.shape.lora_rank]
    inside = [param for param in case.shape.params if any(f".{name}." in f".{param.name}" for name in frozen)]
    assert weights == inside
    # Its own gradient checkpointing leaves a frozen layer alone.
    assert not case.shape.has_input_gradients(recomputes=True)


def write_llava(folder: Path) -> str:
    """Write the config.json of a tiny model of images and text, and return its folder."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llava", **CONFIGS["llava"]}))
    return str(model)


@pytest.mark.parametrize("target", ["all", "q_proj,v_proj"])
def test_llama_factory_leaves_the_tower_of_images_without_adapters(target: str, tmp_path: Path) -> None:
    document = FACTORY | {"model_name_or_path": write_llava(tmp_path), "finetuning_type": "lora", "lora_target": target}
    case = read(write(tmp_path, document), *BOX)
    trained = [param.name for param in case.shape.trained_params]
    assert trained
    assert all("language_model" in name for name in trained)
    unfrozen = read(write(tmp_path, document | {"freeze_vision_tower": False}), *BOX)
    assert any("vision_tower" in param.name for param in unfrozen.shape.trained_params)
    # A flag replaces the file's key, and a model of text has no such part.
    flags = read(write(tmp_path, document), "--lora_targets", "all-linear", *BOX)
    assert any("vision_tower" in param.name for param in flags.shape.trained_params)
    text_model = read(write(tmp_path, document | {"model_name_or_path": "gpt2", "lora_target": "all"}), *BOX)
    assert text_model.shape.lora_targets == ()


def test_axolotl_reads_images_with_a_processor_alone(tmp_path: Path) -> None:
    document = AXOLOTL | {"base_model": write_llava(tmp_path), "sequence_len": 64}
    for keys, text_only in (({}, True), ({"processor_type": "AutoProcessor"}, False)):
        shape = read(write(tmp_path, document | keys), *BOX).shape
        assert isinstance(shape, LiveShape)
        assert shape.text_only == text_only
    flagged = read(write(tmp_path, document | {"processor_type": "AutoProcessor"}), "--text_only", *BOX)
    assert flagged.memory == read(write(tmp_path, document), *BOX).memory


@pytest.mark.parametrize(
    "value", [r"model\.layers\.[\d]+\.(mlp|self_attn)\.(up|down|gate|q|k|v|o)_proj", ["all-linear"]]
)
def test_a_pattern_of_modules_is_matched_as_by_peft(value: Any, tmp_path: Path) -> None:
    document = AXOLOTL | {"base_model": "llama-3.2-1b", "adapter": "lora", "lora_target_linear": True}
    everywhere = read(write(tmp_path, document), *BOX)
    document = document | {"lora_target_linear": False, "lora_target_modules": value}
    case = read(write(tmp_path, document), *BOX)
    assert case.shape.trained_parameters == everywhere.shape.trained_parameters
    query = read(write(tmp_path, document | {"lora_target_modules": r".*\.q_proj"}), *BOX)
    assert query.shape.trained_parameters < everywhere.shape.trained_parameters
    # Adapters of some layers are not predicted, and of several names none is a pattern.
    for targets, words in (
        (r".*layers\.[0-7]\..*_proj", "the pattern has q_proj of 8 of 16 layers, which is not predicted"),
        ([".*_proj", "q_proj"], "peft takes none of several names as a pattern"),
    ):
        case = read(write(tmp_path, document | {"lora_target_modules": targets}), *BOX)
        (noted,) = [item for item in case.findings if item.key == "lora_target_modules"]
        assert noted.message.startswith(words)
        assert noted.message.endswith("counted as all linear layers")
        assert case.shape.trained_parameters == everywhere.shape.trained_parameters


def test_llama_factory_trains_all_of_a_model_of_text(tmp_path: Path) -> None:
    settings = {"model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "finetuning_type": "full"}
    case = read(write(tmp_path, FACTORY | settings | {"freeze_vision_tower": True}), *BOX)
    assert case.shape.frozen_modules == ()
    assert case.shape.frozen_parameters == 0


SWIFT = {"model": "Qwen/Qwen2.5-7B-Instruct", "max_length": 2048, "learning_rate": 1e-4, "output_dir": "out"}
SWIFTS_ADAPTERS = "--peft lora --lora_rank 8 --lora_targets all-linear"


@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        ({"train_type": "lora", "deepspeed": "zero2", "lora_rank": 8}, f"zero2 {SWIFTS_ADAPTERS} --seq_length 2048"),
        ({"tuner_type": "full", "deepspeed": "zero3_offload", "packing": True}, "zero3_cpu --seq_length 2048"),
        ({"torch_dtype": "bfloat16"}, f"ddp {SWIFTS_ADAPTERS} --seq_length 2048 --precision bf16"),
        ({"quant_bits": 4, "fsdp": "fsdp2"}, f"fsdp2 {SWIFTS_ADAPTERS} --quantization 4bit --seq_length 2048"),
        (
            {"train_type": "full", "deepspeed": "zero3", "sequence_parallel_size": 4},
            f"zero3 --seq_length 2048 --sp 4 {RECOMPUTED}",
        ),
    ],
)
def test_a_file_of_ms_swift_is_not_read_as_trl(keys: dict[str, Any], flags: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a file of ms-swift, which is not read") as refused:
        read(write(tmp_path, SWIFT | keys), *BOX)
    assert f"MODEL --strategy {flags}" in refused.value.fix
    command = refused.value.fix.removeprefix("study predict ").replace("BOX", "8xH100")
    assert predicted(command.replace("MODEL", "qwen2.5-7b")).shape.lora_rank == (8 if "lora" in flags else None)


def test_llama_factory_is_judged_by_the_deepspeed_that_it_requires(tmp_path: Path) -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "advice.md").read_text(encoding="utf-8").split())
    for trainer in TRAINERS:
        if trainer.newest_deepspeed:
            assert f"{trainer.name} requires DeepSpeed {trainer.newest_deepspeed} at most" in page
    file = write(tmp_path, FACTORY | {"gradient_accumulation_steps": 8, "deepspeed": Z2 | {ACCUMULATION: "auto"}})
    case = read(file, *BOX)
    line = release_line(case)
    assert (
        "DeepSpeed 0.18.4 (the newest that LLaMA-Factory requires; nothing checks it, so newer ones run, too)" in line
    )
    assert line.endswith("unless --release names others")
    case = read(file, *BOX, "--release", "deepspeed=0.19.8")
    assert not first_line(case).startswith("Trains")
    assert "0.19.8 (--release)" in release_line(case)
    # Without DeepSpeed there is none to name.
    assert "DeepSpeed" not in release_line(read(write(tmp_path, FACTORY), *BOX))


DIVIDED_TWICE, UNSCALED, LAST_ALONE = "divided-twice", "unscaled-in-no-sync", "last-micro-step-only"


@pytest.mark.parametrize(
    ("stage", "release", "fault", "fault_elsewhere"),
    [
        # The newest that LLaMA-Factory requires, and before it the one whose hook reads no scale_wrt_gas.
        (2, "", "", DIVIDED_TWICE),
        (2, "deepspeed=0.18.3", DIVIDED_TWICE, ""),
        (1, "deepspeed=0.19.5", "", DIVIDED_TWICE),
        (1, "deepspeed=0.19.5,transformers=4.48.3", DIVIDED_TWICE, ""),
        # The Trainer enters no no_sync, and used to.
        (1, "deepspeed=0.17.5", "", UNSCALED),
        (1, "deepspeed=0.17.5,transformers=4.47.0", UNSCALED, ""),
        # Every loop has it.
        (2, "deepspeed=0.17.6", LAST_ALONE, ""),
    ],
)
def test_a_fault_of_accelerates_own_loop_is_none_of_a_trainers_file(
    stage: int, release: str, fault: str, fault_elsewhere: str, tmp_path: Path
) -> None:
    """Files of LLaMA-Factory failed under the DeepSpeed that it requires."""
    titles = {cause.id: cause.title for cause in read_causes()}
    zero: dict[str, Any] = {**Z2, "zero_optimization": {"stage": stage}, ACCUMULATION: "auto"}
    keys = {"gradient_accumulation_steps": 8, "deepspeed": zero}
    case = read(write(tmp_path, FACTORY | keys), *BOX, *(("--release", release) if release else ()))
    assert first_line(case).startswith("Trains something else, silently") == bool(fault)
    wrong = [finding for finding in case.findings if finding.rule == "wrong-training"]
    assert [titles[fault] in finding.message for finding in wrong] == [True] * bool(fault)
    # The fix is of this loop.
    assert fault != LAST_ALONE or wrong[0].fix == "use DeepSpeed 0.18.4 or later"
    (noted,) = [finding.message for finding in case.findings if finding.rule == "other-loop"] or [""]
    assert bool(noted) == bool(fault_elsewhere)
    assert not noted or titles[fault_elsewhere] in noted


@pytest.mark.parametrize(
    ("stage", "line"),
    [(2, None), ("no DeepSpeed", "autocast in fp16 is in no stored run; run: study verify --precision fp16")],
)
def test_fp16_of_deepspeed_was_run_and_autocast_was_not(tmp_path: Path, stage: int | str, line: str | None) -> None:
    document = {name: value for name, value in ARGUMENTS.items() if name != "bf16"} | {"fp16": True}
    if stage == 2:
        document["deepspeed"] = Z2
    assert untested(read(write(tmp_path, document), *BOX)) == line


def test_stage_0_in_fp16_trains_something_else_since_the_release_that_no_longer_scales_the_loss(tmp_path: Path) -> None:
    settings = {"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 0}}
    document = {name: value for name, value in ARGUMENTS.items() if name != "bf16"}
    file = write(tmp_path, document | {"fp16": True, "deepspeed": settings})
    for release, is_wrong in (("0.18.2", False), ("0.18.3", True), ("0.19.8", True)):
        findings = read(file, *BOX, "--release", f"deepspeed={release}").findings
        wrong = [finding.fix for finding in findings if finding.rule == "wrong-training" and "fp16" in finding.key]
        assert wrong == ["use stage 1, or bf16"] * is_wrong, release


@pytest.mark.parametrize("key", ["galore_layerwise", "use_badam"])
def test_one_gpu_trains_what_several_refuse(key: str, tmp_path: Path) -> None:
    document = FACTORY | {"use_galore": key != "use_badam", key: True}
    assert [
        item for item in read(write(tmp_path, document), "--hardware", "1xH100").findings if item.kind == "refused"
    ] == []


def test_weights_of_another_quantization_are_not_called_those_of_bitsandbytes(tmp_path: Path) -> None:
    case = read(write(tmp_path, FACTORY | HQQ), *BOX)
    assert first_line(case).startswith("Without quantization_method (not modelled): ")
    case = read(write(tmp_path, FACTORY | HQQ | {"quantization_method": "bnb"}), *BOX)
    assert not first_line(case).startswith("Without")


def test_one_line_has_what_is_read_and_what_is_assumed(tmp_path: Path) -> None:
    document = AXOLOTL | {"adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_target_linear": True}
    document |= {"gradient_checkpointing": True, "gradient_accumulation_steps": 4}
    case = read(write(tmp_path, document), "--seq_length", "256", *BOX)
    first, flags, engine = case.read_from
    expected = (
        "(axolotl): gpt2, 512 tokens, micro-batch 2 x accumulation 4, QLoRA of rank 32 on all linear layers, bf16,"
    )
    assert f"{expected} gradient checkpointing; of these assumed" in first
    assert first.endswith("as axolotl does without a key: precision, double_quant")
    assert flags == "set by flags in its place: seq_length 256"
    assert engine.endswith("names no engine: DDP; --engine FILE adds that of the launcher")
    assert case.request.sequence_length == 256
    # Full training on the command line leaves adapters out.
    assert read(write(tmp_path, document), "--peft", "none", *BOX).shape.lora_rank is None


@pytest.mark.parametrize(
    ("document", "values"),
    [
        (AXOLOTL | {"rl": "dpo"}, {"reference_model": True, "micro_batch": 4, "pure": True}),
        (AXOLOTL | {"rl": "orpo"}, {"reference_model": False, "micro_batch": 4}),
        (AXOLOTL | {"rl": "dpo", "adapter": "lora"}, {"has_reference_copy": False, "micro_batch": 4}),
        (
            AXOLOTL | {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
            {"loss_kernel": "cut"},
        ),
        (AXOLOTL | {"liger_fused_linear_cross_entropy": True}, {"loss_kernel": "liger", "compiled": False}),
        (
            ARGUMENTS | {"dataset_name": "wikitext", "block_size": 300},
            {"sequence_length": 300, "gradient_checkpointing": False},
        ),
        (ARGUMENTS | {"task_name": "mrpc"}, {"sequence_length": 128, "gradient_checkpointing": False, "pure": False}),
        (ARGUMENTS | {"task_name": "mrpc", "max_seq_length": 64}, {"sequence_length": 64}),
        (ARGUMENTS | {"dataset_config_name": "wikitext-2-raw-v1"}, {"sequence_length": 1024}),
        (ARGUMENTS | {"max_source_length": 400, "max_target_length": 64}, {"sequence_length": 400}),
        (ARGUMENTS | {"mlm_probability": 0.15, "line_by_line": True}, {"sequence_length": 1024}),
        (ARGUMENTS | {"version_2_with_negative": True}, {"sequence_length": 384}),
        # TRL's own. DPO's keys without beta, and a reward model's.
        (ARGUMENTS | {"f_divergence_type": "js_divergence"}, {"reference_model": True, "micro_batch": 4}),
        (ARGUMENTS | {"sync_ref_model": False}, {"reference_model": True, "micro_batch": 4}),
        (ARGUMENTS | {"label_smoothing": 0.1, "max_length": 64}, {"reference_model": True, "micro_batch": 4}),
        (ARGUMENTS | {"loss_type": ["sigmoid"], "max_length": 64}, {"reference_model": True, "micro_batch": 4}),
        (ARGUMENTS | {"precompute_ref_log_probs": True}, {"reference_model": False, "micro_batch": 4}),
        (ARGUMENTS | {"center_rewards_coefficient": 0.01}, {"reference_model": False, "micro_batch": 4}),
        (ARGUMENTS | {"dataset_name": "a/b"}, {"sequence_length": 1024, "gradient_checkpointing": True}),
        # KTO's samples are single completions.
        (ARGUMENTS | {"beta": 0.1, "desirable_weight": 1.5}, {"reference_model": True, "micro_batch": 2}),
        (ARGUMENTS | {"beta": 0.1, "loss_type": "apo_zero_unpaired"}, {"reference_model": True, "micro_batch": 2}),
        (
            ARGUMENTS | {"undesirable_weight": 1.0, "precompute_ref_log_probs": True},
            {"reference_model": False, "micro_batch": 2},
        ),
        (AXOLOTL | {"liger_glu_activation": True}, {"loss_kernel": "transformers", "compiled": True}),
        (AXOLOTL | {"torch_compile": "auto"}, {"compiled": True}),
        (ARGUMENTS | {"torch_compile": True}, {"compiled": True}),
        (ARGUMENTS | {"torch_compile": False}, {"compiled": False}),
        (ARGUMENTS | {"torch_compile_mode": "max-autotune"}, {"compiled": True}),
        (ARGUMENTS | {"torch_compile_backend": "aot_eager"}, {"compiled": False}),
        (ARGUMENTS | {"use_liger_kernel": True}, {"loss_kernel": "liger", "compiled": True}),
        (AXOLOTL | {"bf16": False, "fp16": True}, {"precision": "fp16", "pure": False}),
        (AXOLOTL | {"bf16": False}, {"precision": "fp32", "pure": False}),
        (AXOLOTL | {"flash_attention": True, "gradient_checkpointing": "offload"}, {"gradient_checkpointing": True}),
        (FACTORY | {"disable_gradient_checkpointing": True}, {"gradient_checkpointing": False, "pure": False}),
        (FACTORY | {"pure_bf16": True}, {"pure": True, "precision": "bf16-engine"}),
        (
            FACTORY | {"stage": "dpo", "cutoff_len": 256},
            {"reference_model": True, "micro_batch": 2, "sequence_length": 256},
        ),
        (FACTORY | {"stage": "dpo", "pref_loss": "simpo"}, {"reference_model": False, "micro_batch": 2}),
        # Liger's other kernels stay.
        (FACTORY | {"stage": "dpo", "enable_liger_kernel": True}, {"loss_kernel": "batch_logps", "compiled": True}),
        (FACTORY | {"stage": "dpo", "pref_loss": "orpo"}, {"loss_kernel": "transformers"}),
        (FACTORY | {"stage": "rm", "enable_liger_kernel": True}, {"loss_kernel": "transformers", "compiled": True}),
        (FACTORY | {"stage": "pt", "enable_liger_kernel": True}, {"loss_kernel": "liger", "compiled": True}),
        (
            FACTORY | {"enable_liger_kernel": True, "flash_attn": "fa2"},
            {"attention": "flash_attention_2", "compiled": True},
        ),
        (FACTORY | {"finetuning_type": "lora", "quantization_bit": 4}, {"quantized": True, "double_quantized": True}),
        (FACTORY | {"finetuning_type": "lora", "quantization_bit": 8}, {"quantized": False, "in_8_bits": True}),
        (AXOLOTL | {"adapter": "lora", "load_in_8bit": True}, {"quantized": False, "in_8_bits": True}),
        # Without adapters no weight is frozen.
        (AXOLOTL | {"load_in_8bit": True}, {"in_8_bits": False}),
        (ARGUMENTS | {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "pure": False}),
        (ARGUMENTS | {"use_peft": True, "load_in_4bit": True}, {"lora_dropout": 0.05, "double_quantized": False}),
        (ARGUMENTS | {"max_length": 300, "torch_dtype": "bfloat16"}, {"sequence_length": 300, "pure": True}),
        (
            ARGUMENTS | {"beta": 0.1, "max_completion_length": 64},
            {"reference_model": True, "micro_batch": 2, "sequence_length": 576},
        ),
        (
            ARGUMENTS | {"num_generations": 8, "max_prompt_length": 100, "max_completion_length": 64},
            {"reference_model": False, "sequence_length": 164},
        ),
        (ARGUMENTS | {"num_generations": 8, "beta": 0.1, "use_peft": True}, {"has_reference_copy": False}),
    ],
)
def test_a_key_is_read_as_the_trainer_does(document: dict[str, Any], values: dict[str, Any], tmp_path: Path) -> None:
    request = read(write(tmp_path, document), *BOX).request
    assert {name: getattr(request, name) for name in values} == values


@pytest.mark.parametrize(
    ("trainer", "key"),
    [(it, key) for it in TRAINERS for key in it.not_modelled],
    ids=lambda it: getattr(it, "name", it),
)
def test_what_is_not_modelled_is_noted_by_name(trainer: Any, key: str, tmp_path: Path) -> None:
    documents = {"axolotl": AXOLOTL, "LLaMA-Factory": FACTORY, "TRL": ARGUMENTS | {"max_length": 512}}
    document = documents.get(trainer.name, ARGUMENTS)
    if trainer.name.startswith(("transformers'", "sentence")):
        document = ARGUMENTS | {min(trainer.marks): 1}
    if trainer.name.endswith("of text"):
        document |= {"max_seq_length": 64}
    for value, count in ((False, 0), (2, 1)):
        file = write(tmp_path, document | {key: value})
        read_file = read_trainer_file(str(file))
        assert read_file is not None
        assert read_file.trainer is trainer
        notes = [item for item in read_file.findings if item.key == key and item.rule in ("not-modelled", WITHOUT)]
        assert len(notes) == count
        assert all("not modelled" in item.message and item.line == len(document) + 1 for item in notes)


# Keys of a file next to a model and a dataset's name, the trainer, and the tokens of a sample that are read or assumed.
SCRIPTS = [
    ({"train_dir": "images"}, "run_image_classification.py", None),
    ({"image_column_name": "img", "label_column_name": "fine_label"}, "run_image_classification.py", None),
    ({"audio_column_name": "audio", "layerdrop": 0.0, "text_column_name": "sentence"}, "ctc.py", None),
    ({"audio_column_name": "audio", "freeze_encoder": False}, "seq2seq.py", None),
    ({"audio_column_name": "audio", "max_length_seconds": 1}, "run_audio_classification.py", None),
    ({"image_column": "image_path", "caption_column": "caption"}, "run_clip.py", 128),
    ({"task_name": "mrpc"}, "run_glue.py", 128),
    ({"task_name": "ner", "return_entity_level_metrics": True}, "run_ner.py", None),
    ({"text_column_names": "sentence", "train_file": "a.csv"}, "run_classification.py", 128),
    ({"train_file": "a.csv", "max_seq_length": 256}, "example script of text", 256),
    ({"train_file": "a.txt", "block_size": 256}, "run_clm.py", 256),
    ({"mlm_probability": 0.15, "train_file": "a.txt", "max_seq_length": 256}, "run_mlm.py", 256),
    ({"source_lang": "en", "target_lang": "ro", "source_prefix": "translate: "}, "run_translation.py", 1024),
    ({"summary_column": "highlights", "source_prefix": "summarize: "}, "run_summarization.py", 1024),
    ({"source_prefix": "summarize: "}, "run_translation.py or run_summarization.py", 1024),
    ({"batch_sampler": "no_duplicates"}, "sentence-transformers", None),
]


@pytest.mark.parametrize(("keys", "name", "length"), SCRIPTS)
def test_a_script_is_known_by_its_own_keys(keys: Any, name: str, length: int | None, tmp_path: Path) -> None:
    file = read_trainer_file(str(write(tmp_path, ARGUMENTS | {"dataset_name": "a/b"} | keys)))
    assert file is not None
    assert file.trainer.name.endswith(name)
    assert file.values.get("seq_length") == length
    assert not [item for item in file.findings if item.kind in ("refused", "ignored")]


def test_a_default_length_is_one_that_the_model_has(tmp_path: Path) -> None:
    glue = write(tmp_path, ARGUMENTS | {"task_name": "mrpc"}, "glue.yaml")
    lm = write(tmp_path, ARGUMENTS | {"line_by_line": True}, "lm.yaml")
    assert read(lm, "bert-base-uncased", *BOX).request.sequence_length == 512
    assert read(lm, "gpt2", *BOX).request.sequence_length == 1024
    assert read(glue, "bert-base-uncased", *BOX).request.sequence_length == 128
    # TRL's default, of a model that reads images.
    images = write(tmp_path, ARGUMENTS | {"dataset_name": "a/b"}, "images.yaml")
    write(tmp_path, {**CONFIGS["vit"], "model_type": "vit"}, "config.json")
    (line, *_) = read(images, str(tmp_path), *BOX).read_from
    assert "tokens" not in line
    with pytest.raises(UserError, match="512 positions, too few"):
        read(write(tmp_path, ARGUMENTS | {"line_by_line": True, "max_seq_length": 1024}), "bert-base-uncased", *BOX)


def test_a_classifiers_own_script_is_not_trl(tmp_path: Path) -> None:
    document = {"model_name_or_path": "bert-large-uncased", "per_device_train_batch_size": 16, "fp16": True}
    box = ("--hardware", "4xV100-16")
    glue = read(write(tmp_path, document | {"task_name": "mrpc", "max_seq_length": 256}), *box)
    for keys in ({"max_seq_length": 256}, {"max_length": 256, "dataset_name": "imdb"}):
        case = read(write(tmp_path, document | keys), *box)
        assert "example script of text" in case.read_from[0]
        assert not [item for item in case.findings if item.kind in ("refused", "ignored")]
        # TRL's default is gradient checkpointing, and it has no logits of words.
        assert not case.request.gradient_checkpointing
        assert figures(case.request) == figures(glue.request)
    assert (
        "(TRL)"
        in read(write(tmp_path, document | {"max_length": 256, "center_rewards_coefficient": 0.1}), *box).read_from[0]
    )
    assert "(TRL)" in read(write(tmp_path, ARGUMENTS | {"max_length": 256}), *box).read_from[0]


def test_what_a_script_adds_to_the_figures_or_changes_is_named_once(tmp_path: Path) -> None:
    masked = read(write(tmp_path, ARGUMENTS | {"mlm_probability": 0.15}), "bert-base-uncased", *BOX)
    assert first_line(masked).startswith("Without mlm_probability (not modelled): ")
    pairs = ARGUMENTS | {"batch_sampler": "no_duplicates", "gradient_accumulation_steps": 8}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    encoder = {**sizes, "model_type": "bert", "vocab_size": 256, "architectures": ["BertModel"]}
    (tmp_path / "encoder").mkdir()
    write(tmp_path / "encoder", encoder, "config.json")
    for model in ("bert-base-uncased", str(tmp_path / "encoder")):
        (note,) = (item for item in read(write(tmp_path, pairs), model, *BOX).findings if item.rule == "contrastive")
        assert "those of one micro-batch, not of 8" in note.message
    alone = read(write(tmp_path, pairs | {"gradient_accumulation_steps": 1}), "bert-base-uncased", *BOX)
    assert "contrastive" not in {item.rule for item in alone.findings}


def test_kto_needs_two_completions_in_a_micro_batch(tmp_path: Path) -> None:
    keys = {"beta": 0.1, "desirable_weight": 1.0}
    for size, loss, is_refused in ((1, "kto", True), (2, "kto", False), (1, "apo_zero_unpaired", False)):
        document = ARGUMENTS | keys | {"per_device_train_batch_size": size, "loss_type": loss}
        case = read(write(tmp_path, document), *BOX)
        refused = [item.key for item in case.findings if item.kind == "refused"]
        assert refused == ["per_device_train_batch_size"] * is_refused
        assert "KTO" in case.read_from[0]
        assert case.request.loss_kernel == "trl"


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_every_row_sets_a_field_of_the_workload(trainer: Any) -> None:
    fields = {*Workload.__dataclass_fields__, *OTHER_FIELDS, ""}
    assert {key.ours for key in trainer.keys} <= fields
    assert {*trainer.defaults, *trainer.lora_defaults} <= fields
    assert not {key.theirs for key in trainer.keys if key.ours} & trainer.not_modelled.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "sequence_len: many",
            "trainer.yaml:5: sequence_len is 'many'. To fix it: it should be a whole number from 1 up",
        ),
        ("micro_batch_size: 0", "micro_batch_size is 0. To fix it: it should be a whole number from 1 up"),
        ("gradient_checkpointing: 3", "it should be true or false"),
        ("adapter: 3", "adapter is 3. To fix it: it should be one of lora, qlora"),
        ("rl: [dpo]", "rl is ['dpo']. To fix it: it should be one of dpo, ipo,"),
        ("lora_dropout: 1.5\nadapter: lora", "it should be a number from 0 to below 1"),
        ("lora_target_modules: [3]\nadapter: lora", "it should be names of modules"),
        (
            "lora_target_modules: [nothing]\nadapter: lora",
            "trainer.yaml: gpt2 has no layer 'nothing' for lora_target_modules",
        ),
        ("optimizer: []", "it should be a name"),
        ("sequence_len: 5000", "gpt2 has 1024 positions"),
        ("deepspeed: ds.json", "sets deepspeed: 'ds.json', and there is no file of that name. To fix it: name it with"),
        ("deepspeed: zero3.json", "name it with --engine FILE, or write deepspeed_configs/zero3.json"),
        ("deepspeed: [3]", "it should be the path of a file, or its settings"),
        ("deepspeed: ../../trainer.yaml", "there is no file of that name"),
        ("deepspeed: trainer.yaml", "is the file of a trainer, not of an engine"),
        ("fsdp: [full_shards]", "fsdp has 'full_shards'. To fix it: it should be of full_shard"),
        ("fsdp_config: 3", "write its settings under fsdp_config"),
        ("fsdp_config: fsdp.json", "sets fsdp_config: 'fsdp.json', and there is no file of that name"),
        (
            "base_model: no-such-model",
            "trainer.yaml: base_model: unknown model 'no-such-model'. To fix it: name a model after",
        ),
        ("base_model: /models/no-such", "base_model: there is no folder /models/no-such"),
        ("base_model: [3]", "it should be a name"),
        ("x: !!python/object:os.system {}", "not YAML"),
    ],
)
def test_wrong_input_ends_in_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["base_model: gpt2", "learning_rate: 2.0e-5", "num_epochs: 1", "output_dir: out"]
    replaced_keys = {line.split(":")[0] for line in text.splitlines()}
    Path("trainer.yaml").write_text(
        "\n".join([*(line for line in lines if line.split(":")[0] not in replaced_keys), text])
    )
    assert main(["explain", "trainer.yaml", *BOX]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert len(output.err.strip().splitlines()) == 1


def test_the_model_is_that_of_the_file_or_of_the_command_line(tmp_path: Path) -> None:
    for model, shape in (
        ("NousResearch/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("/opt/models/Qwen/Qwen3-32B", "qwen3-32b"),
        ("https://huggingface.co/openai-community/gpt2", "gpt2"),
    ):
        file = write(tmp_path, AXOLOTL | {"base_model": model})
        assert read(file, *BOX).shape.name == shape
        assert read(file, "gpt2-xl", *BOX).shape.name == "gpt2-xl"
    with pytest.raises(UserError, match="names no model") as refusal:
        read(write(tmp_path, FACTORY | {"model_name_or_path": None}), *BOX)
    assert "name one after the file" in refusal.value.fix
    with pytest.raises(UserError, match="does not set the number of ranks"):
        read(write(tmp_path, AXOLOTL))
    assert read(write(tmp_path, AXOLOTL), "--world_size", "1").request.strategy.name == "single"


def test_the_launchers_file_is_the_engine_with_its_precision(tmp_path: Path) -> None:
    plain = {key: value for key, value in ARGUMENTS.items() if key != "bf16"} | {"learning_rate": 1, "max_steps": 2}
    flags = f"--micro_batch 2 {FLASH}"
    launches: tuple[dict[str, Any], ...] = (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP"}},
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        {"distributed_type": "MULTI_GPU"},
    )
    for launch in launches:
        engine = write(tmp_path, {**launch, "mixed_precision": "bf16", "num_processes": 8}, "launch.yaml")
        file = write(tmp_path, plain | {"attn_implementation": "flash_attention_2"})
        case = read(file, "--engine", str(engine), *BOX)
        assert figures(case.request) == figures(read(engine, "gpt2", *flags.split(), *BOX).request)
        assert case.request.precision.startswith("bf16")


def test_strict_refuses_a_trainers_file_or_leaves_it_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path, AXOLOTL | {"deepspeed": "deepspeed_configs/zero3.json"}))
    assert main(["explain", "--strict", file]) == 1
    assert "is the file of a trainer, not of an engine" in capsys.readouterr().out
    assert main(["explain", "--strict", "--skip_others", file]) == 0
    assert "0 configuration files checked, 1 other files skipped" in capsys.readouterr().out
    assert main(["explain", "--strict", file, "--engine", file]) == 2


def test_deepspeed_and_fsdp_together_are_refused_and_fsdp_config_alone_is_dropped(tmp_path: Path) -> None:
    engine = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    both = AXOLOTL | {"deepspeed": engine, "fsdp_config": {"version": 2}}
    case = read(write(tmp_path, both), *BOX)
    assert [item.key for item in case.findings if item.kind == "refused"] == ["fsdp_config"]
    assert case.stage == 1
    launch = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    fsdp = AXOLOTL | {"fsdp_config": {"version": 2}}
    case = read(write(tmp_path, fsdp), "--engine", str(write(tmp_path, launch, "launch.yaml")), *BOX)
    assert [item.key for item in case.findings if item.kind == "refused"] == []
    alone = read(write(tmp_path, ARGUMENTS | {"fsdp_config": {"version": 2}}), *BOX)
    assert [item.key for item in alone.findings if item.kind == "ignored"] == ["fsdp_config"]
    assert alone.request.strategy.name == "ddp"
    with pytest.raises(UserError, match="--engine is for the file of a trainer"):
        read(write(tmp_path, {"zero_optimization": {"stage": 1}}, "ds.json"), "gpt2", "--engine", "x.json", *BOX)


def test_the_calculator_explains_a_trainers_file_with_the_json_that_it_names() -> None:
    stage = b'{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}'
    trainer = yaml.safe_dump(AXOLOTL | {"deepspeed": "configs/mine.json"}).encode()
    words = json.dumps(["ax.yaml", "gpt2", *BOX])
    texts = {name: base64.b64encode(text).decode() for name, text in (("ax.yaml", trainer), ("mine.json", stage))}
    answer = json.loads(Calculator().explain(words, json.dumps(texts)))
    assert answer["first_line"].startswith("Fits in bf16")
    assert any("DeepSpeed, stage 3" in line for line in answer["subject"])
    del texts["mine.json"]
    refusal = json.loads(Calculator().explain(words, json.dumps(texts)))
    assert "choose that file, too" in json.dumps(refusal)


def test_the_page_and_the_json_say_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", str(FOLDER / "axolotl_lora_1b_ray.yml"), "gpt2-xl", "--lora_targets", "all-linear"]
    command += ["--seq_length", "1024", *BOX]
    assert main(command) == 0
    page = capsys.readouterr().out
    assert re.search(
        r"read from \S+axolotl_lora_1b_ray.yml \(axolotl\): NousResearch/Llama-3.2-1B as gpt2-xl, 2048 tokens", page
    )
    assert "axolotl's deepspeed_configs/zero3.json: DeepSpeed, stage 3, bf16-engine, one of 8 ranks" in page
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [line in page for line in document["read_from"]] == [True] * 3


@pytest.mark.parametrize(
    ("document", "key", "kind", "hint"),
    [
        (AXOLOTL, "adaptor", "ignored", "did you mean adapter?"),
        (AXOLOTL, "gradient_acumulation_steps", "ignored", "did you mean gradient_accumulation_steps?"),
        (FACTORY, "cutof_len", "refused", "did you mean cutoff_len?"),
        (ARGUMENTS | {"packing": False}, "max_lenght", "refused", "did you mean max_length?"),
        (ARGUMENTS, "per_device_train_batchsize", "refused", "did you mean per_device_train_batch_size?"),
    ],
)
def test_a_misspelt_key_is_named(document: dict[str, Any], key: str, kind: str, hint: str, tmp_path: Path) -> None:
    case = read(write(tmp_path, document | {key: 4}), *BOX)
    assert [(item.kind, item.fix) for item in case.findings if item.key == key] == [(kind, hint)]


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda it: it.name)
def test_keys_that_resemble_one_are_the_trainer_s_own(trainer: Any) -> None:
    assert not trainer.similar & trainer.read
    if trainer.name in ("TRL", "LLaMA-Factory", "TrainingArguments"):
        similar = {
            name
            for name in map(str, TrainingArguments.__dataclass_fields__)
            if name not in trainer.read and did_you_mean(name, trainer.read, 0.8)
        }
        assert similar <= trainer.similar
    if trainer.name == "TRL":
        accepted = trl_keys() - trainer.read - REMOVED_HF_KEYS.keys()
        assert {name for name in accepted if did_you_mean(name, trainer.read, 0.8)} <= trainer.similar


@pytest.mark.parametrize("key", ["gptq", "lora_target_parameters"])
def test_a_verdict_without_a_large_part_of_the_peak_says_so(key: str, tmp_path: Path, capsys) -> None:
    document = AXOLOTL | {"adapter": "lora", key: True}
    main(["explain", str(write(tmp_path, document)), *BOX])
    assert capsys.readouterr().out.startswith(f"Without {key} (not modelled): ")


@pytest.mark.parametrize(
    ("document", "key"),
    [
        (AXOLOTL | {"adapter": "lora", "base_model": "llama-3.1-8b"}, "lora_modules_to_save"),
        (FACTORY | {"finetuning_type": "lora", "model_name_or_path": "llama-3.1-8b"}, "additional_target"),
        (ARGUMENTS | {"use_peft": True, "model_name_or_path": "llama-3.1-8b"}, "lora_modules_to_save"),
    ],
)
def test_modules_that_a_trainer_saves_are_trained_copies(document: Any, key: str, tmp_path: Path) -> None:
    plain = read(write(tmp_path, document), *BOX)
    case = read(write(tmp_path, document | {key: ["embed_tokens", "lm_head", "norm"]}), *BOX)
    assert case.shape.lora_saved == ("embed_tokens", "lm_head")
    size = case.shape.embedding.elements
    assert case.shape.trained_parameters - plain.shape.trained_parameters == 2 * size
    messages = [item.message for item in case.findings if item.key == key]
    assert any("the copy of 'norm' is not counted" in message for message in messages), case.findings


def test_weights_that_a_trainer_loads_in_bf16_are_in_host_memory_once_with_deepspeed(tmp_path: Path) -> None:
    engine = tmp_path / "z2.json"
    settings = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    engine.write_text(json.dumps(settings))
    box, loads = ("--hardware", "4x3090", "--engine", str(engine)), dict[bool, float]()
    for is_bf16 in (False, True):
        document = ARGUMENTS | {"bf16": True, "model_name_or_path": "meta-llama/Llama-3.1-8B"}
        document |= {"torch_dtype": "bfloat16"} if is_bf16 else {}
        loads[is_bf16] = read(write(tmp_path, document), *box).memory.host_parts["load"]
    # fp32 in each of four processes; in bf16 the pages of the file are shared.
    assert loads[False] > 4 * 4 * 8.03e9
    assert 2 * 8.03e9 < loads[True] < 4 * 8.03e9


def test_the_reduction_in_each_micro_batch_is_read_from_accelerator_config(tmp_path: Path) -> None:
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    document = ARGUMENTS | {"gradient_accumulation_steps": 4, "accelerator_config": config}
    assert read(write(tmp_path, document | {"fsdp": "full_shard"}), *BOX).request.sync_each_batch
    # DDP has nothing to gain from it.
    assert not read(write(tmp_path, document), *BOX).request.sync_each_batch


def test_sharded_8_bit_weights_are_not_modelled(tmp_path: Path) -> None:
    document = AXOLOTL | {"adapter": "lora", "load_in_8bit": True, "fsdp_config": {"fsdp_version": 2}}
    case = read(write(tmp_path, document), *BOX)
    messages = [item.message for item in case.findings if item.key == "load_in_8bit" and item.kind == "conflict"]
    assert [message.partition(":")[0] for message in messages] == ["8-bit weights that FSDP shards are not modelled"]


def with_section(folder: Path, kind: str, stage: int, **zero: Any) -> str:
    """Write a DeepSpeed file with an optimizer as tutorials have it, and return its name."""
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    settings = {
        "optimizer": {"type": kind, "params": params},
        ZERO: {"stage": stage, **zero},
        "bf16": {"enabled": "auto"},
    }
    (folder / "ds.json").write_text(json.dumps(settings | {"train_micro_batch_size_per_gpu": "auto"}))
    return str(folder / "ds.json")


def test_the_optimizer_of_the_json_replaces_the_trainers(tmp_path: Path) -> None:
    # HfDeepSpeedConfig's optimizer becomes a DummyOptim (integrations/deepspeed.py).
    offload = {"offload_optimizer": {"device": "cpu"}}
    for kind, engines, zero in (("AdamW", "adamw", {}), ("Lion", "lion", {}), ("AdamW", "adamw", offload)):
        engine = with_section(tmp_path, kind, 2, **zero)
        for optim, replaced in (("adamw_torch", False), ("adamw_bnb_8bit", True), ("adafactor", True)):
            file = write(tmp_path, ARGUMENTS | {"bf16": True, "deepspeed": engine, "optim": optim})
            case = read(file, *BOX)
            assert case.request.optimizer == engines
            ignored = [item.message for item in case.findings if item.key == "optim"]
            assert [f"the engine makes the '{kind}'" in text for text in ignored] == [True] * replaced


def test_auto_of_an_accelerate_file_is_filled_in_by_the_trainer(tmp_path: Path) -> None:
    engine = with_section(tmp_path, "AdamW", 2)
    launcher = write(
        tmp_path,
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": engine}, "num_processes": 2},
        "accelerate.yaml",
    )
    keys = {"optimizer", "optimizer.params.betas", "optimizer.params.eps"}
    alone = {item.key: item for item in read(launcher, "gpt2", *BOX).findings if item.key in keys}
    assert {key: item.kind for key, item in alone.items()} == dict.fromkeys(keys, "refused") | {"optimizer": "conflict"}
    assert all("the Trainer" in item.message or "unless the program" in item.message for item in alone.values())
    trained = read(write(tmp_path, ARGUMENTS | {"bf16": True}), "--engine", str(launcher), *BOX)
    assert not keys & {item.key for item in trained.findings}
    # The same without the trainer's file, by a flag.
    flagged = read(launcher, "gpt2", "--trainer", *BOX)
    assert not keys & {item.key for item in flagged.findings}
    assert flagged.loop == "trainer"
    assert main(["explain", "--strict", str(launcher)]) == 1
    assert main(["explain", "--strict", "--trainer", str(launcher)]) == 0
    with pytest.raises(UserError, match="--trainer is for the file of an engine"):
        read(write(tmp_path, ARGUMENTS), "--trainer", *BOX)


def test_an_auto_that_nothing_fills_in_ends_the_run_of_a_trainer_too(tmp_path: Path) -> None:
    settings = {ZERO: {"stage": 2, "overlap_comm": "auto"}, "train_micro_batch_size_per_gpu": 1}
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=settings)
    with pytest.raises(ValueError, match=r"`zero_optimization\.overlap_comm` not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False)
    # The Trainer prepares with it.
    assert "deepspeed_config_process(must_match=False" in inspect.getsource(accelerate.Accelerator._prepare_deepspeed)
    key = f"{ZERO}.overlap_comm"
    document = ARGUMENTS | {"per_device_train_batch_size": 1, "deepspeed": settings}
    (refused,) = [item for item in read(write(tmp_path, document), *BOX).findings if item.key == f"deepspeed.{key}"]
    assert (refused.kind, refused.fix) == ("refused", "take it out: the default is true at stage 3, else false")
    engine = write(tmp_path, settings, "ds.json")
    (filled,) = [item for item in read(engine, "gpt2", *BOX).findings if item.key == key]
    assert filled.kind == "filled"
    assert filled.message.endswith("else false; Accelerate and the Trainer do not, and end with an error")


@pytest.mark.parametrize("document", [ARGUMENTS, FACTORY, AXOLOTL, ARGUMENTS | {"max_length": 64}])
def test_one_precision_at_most_is_on(document: dict[str, Any], tmp_path: Path) -> None:
    for bf16, fp16 in ((True, True), (True, False), (False, True)):
        case = read(write(tmp_path, document | {"bf16": bf16, "fp16": fp16}), *BOX)
        refused = [item for item in case.findings if item.key == "fp16" and item.kind == "refused"]
        assert len(refused) == (bf16 and fp16)
    with pytest.raises(ValueError, match="At most one of fp16 and bf16"):
        TrainingArguments(output_dir=str(tmp_path), bf16=True, fp16=True, use_cpu=True)


def test_frozen_weights_have_the_type_that_the_file_sets(tmp_path: Path) -> None:
    # TRL loads fp32 by default (trl/trainer/model_config.py).
    adapters = ARGUMENTS | {"use_peft": True, "model_name_or_path": "llama-3.2-1b", "bf16": True}
    parts = {}
    for dtype in (None, "float32", "bfloat16", "auto"):
        case = read(write(tmp_path, adapters | ({"dtype": dtype} if dtype else {})), *BOX)
        parts[dtype] = case.memory.device_parts["parameters"]
        noted = [item for item in case.findings if item.rule == "fp32-weights"]
        assert len(noted) == (dtype in (None, "float32"))
        assert all("4.60 GiB a rank" in item.message and item.fix == "set dtype: bfloat16" for item in noted)
    assert parts[None] == parts["float32"]
    assert parts["auto"] == parts["bfloat16"]
    in_fp32, in_bf16 = (read(write(tmp_path, adapters | {"dtype": dtype}), *BOX) for dtype in ("float32", "bfloat16"))
    (message,) = (item.message for item in in_fp32.findings if item.rule == "fp32-weights")
    narrow, wide = (rounded(case.memory.host_peak.value / GIB) for case in (in_bf16, in_fp32))
    assert message.endswith(f"and host memory of {narrow} and not {wide} GiB a node")
    frozen = read(write(tmp_path, adapters), *BOX).shape.frozen_parameters
    assert parts["float32"] - parts["bfloat16"] == pytest.approx(2 * frozen, rel=0.01)
    in_fp16 = read(write(tmp_path, adapters | {"bf16": False, "fp16": True, "dtype": "float16"}), *BOX)
    assert in_fp16.memory.device_parts["parameters"] == parts["bfloat16"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("model", "type_name"), [("llama-3.2-1b", "bf16"), ("llama-2-7b", "fp16"), ("gpt2", "fp32")])
def test_auto_is_the_type_in_which_a_model_is_published(key: str, model: str, type_name: str, tmp_path: Path) -> None:
    document = ARGUMENTS | {"model_name_or_path": model, "max_length": 512, "bf16": False, "fp16": False}
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    auto, stated = (read(write(tmp_path, document | {key: name}), *BOX) for name in ("auto", names[type_name]))
    assert dataclasses.asdict(auto.memory) == dataclasses.asdict(stated.memory)
    (filled,) = [item for item in auto.findings if item.kind == "filled"]
    assert (filled.key, filled.message) == (key, f"auto: {type_name}, the type in which {model} is published")


@pytest.mark.parametrize(("key", "stated"), [("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16"), ("dtype", None)])
def test_auto_is_the_type_of_config_json(key: str, stated: str | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, **sizes}
    config |= {} if stated is None else {key: stated}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    document = ARGUMENTS | {"model_name_or_path": str(tmp_path / "model"), "max_length": 64, "dtype": "auto"}
    case = read(write(tmp_path, document), *BOX)
    assert case.request.pure == (stated is not None)
    filled = [item.message for item in case.findings if item.kind == "filled"]
    assert filled == ([] if stated is None else ["auto: bf16, the type of its config.json"])


def test_auto_loads_16_bits_for_deepspeed(tmp_path: Path) -> None:
    document = ARGUMENTS | {"model_name_or_path": "llama-3.2-1b", "max_length": 64, "deepspeed": Z2}
    auto, wide = (read(write(tmp_path, document | {"dtype": dtype}), *BOX) for dtype in ("auto", "float32"))
    assert (auto.request.loads_16_bits, wide.request.loads_16_bits) == (True, False)
    assert auto.memory.host_parts["load"] < wide.memory.host_parts["load"]


def test_a_type_that_the_trainer_loads_is_not_called_one_of_the_checkpoint(tmp_path: Path) -> None:
    document = ARGUMENTS | {"model_name_or_path": "llama-3.2-1b", "max_length": 64}
    for dtype in ({}, {"dtype": "float32"}):
        case = read(write(tmp_path, document | dtype), *BOX)
        (noted,) = [item for item in case.findings if item.rule == "fp32-weights"]
        assert noted.message.startswith("weights are loaded and trained in fp32; in bf16, without fp32 masters, a peak")
        in_bf16 = read(write(tmp_path, document | {"dtype": "bfloat16"}), *BOX)
        assert f"a peak of {rounded(device_bytes(in_bf16.memory) / GIB)} GiB" in noted.message


def test_arguments_of_from_pretrained_replace_keys_of_trl(tmp_path: Path) -> None:
    arguments = {"torch_dtype": "bfloat16", "attn_implementation": "eager"}
    document = ARGUMENTS | {"model_name_or_path": "llama-3.2-1b", "max_length": 64, "dtype": "float32"}
    request = read(write(tmp_path, document | {"model_init_kwargs": arguments}), *BOX).request
    assert (request.pure, request.attention) == (True, "eager")
    request = read(write(tmp_path, document | {"model_init_kwargs": {"use_cache": False}}), *BOX).request
    assert (request.pure, request.attention) == (False, "sdpa")


@pytest.mark.parametrize(("release", "in_16_bits"), [("1.16.0", True), ("0.26.0", True), ("0.25.1", False)])
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_of_quantized_weights_have_the_type_that_trl_makes_them(
    release: str, in_16_bits: bool, bits: int, tmp_path: Path
) -> None:
    document = ARGUMENTS | {"model_name_or_path": "llama-3.2-1b", "use_peft": True, "dtype": "bfloat16"}
    quantized = read(write(tmp_path, document | {f"load_in_{bits}bit": True}), *BOX, "--release", f"trl={release}")
    assert quantized.request.adapters_in_16_bits == in_16_bits
    # Weight, gradient and two moments.
    trained = quantized.request.full_shape.trained_parameters
    assert predict_state(quantized.request).optimizer_device == pytest.approx(
        (4 if in_16_bits else 8) * trained, rel=1e-3
    )
    assert not read(write(tmp_path, document), *BOX).request.adapters_in_16_bits


def test_adapters_in_fp32_end_a_run_of_stage_3_under_one_release(tmp_path: Path) -> None:
    factory = FACTORY | {"model_name_or_path": "llama-3.2-1b", "finetuning_type": "lora", "deepspeed": Z3}
    trl = ARGUMENTS | {"model_name_or_path": "llama-3.2-1b", "use_peft": True, "dtype": "bfloat16", "deepspeed": Z3}
    for document, releases, is_refused in (
        (factory, "deepspeed=0.19.2", True),
        (factory, "deepspeed=0.19.3", False),
        (factory, "deepspeed=0.18.4", False),
        (trl, "deepspeed=0.19.2,trl=1.6.0", True),
        (trl, "deepspeed=0.19.2,trl=1.7.0", False),
        (factory | {"quantization_bit": 4}, "deepspeed=0.19.2", False),
    ):
        case = read(write(tmp_path, document), "--release", releases, *BOX)
        refused = [item for item in case.findings if "TypeError of _allgather_params_coalesced" in item.message]
        assert [item.kind for item in refused if item.kind == "refused"] == ["refused"] * is_refused
        assert first_line(case).startswith("Ends with an error") == is_refused


def test_axolotl_keeps_adapters_in_16_bits_if_peft_shall_not_cast_them(tmp_path: Path) -> None:
    document = AXOLOTL | {"adapter": "lora", "lora_target_linear": True}
    for value, in_16_bits in ((None, False), (True, False), (False, True)):
        request = read(write(tmp_path, document | {"peft_autocast_adapter_dtype": value}), *BOX).request
        assert request.adapters_in_16_bits == in_16_bits


def test_gradients_in_fp16_cannot_be_unscaled(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([parameter]))
    document = ARGUMENTS | {"bf16": False, "fp16": True, "dtype": "float16"}
    cases = ((document, True), (document | {"dtype": "float32"}, False), (document | {"use_peft": True}, False))
    for settings, is_refused in cases:
        case = read(write(tmp_path, settings), *BOX)
        assert any(item.key == "dtype" and item.kind == "refused" for item in case.findings) == is_refused


@pytest.mark.parametrize("keys", [{}, {"max_length": 512}])
def test_gradients_in_bf16_cannot_be_unscaled(keys: dict[str, Any], tmp_path: Path) -> None:
    document = ARGUMENTS | keys | {"bf16": False, "fp16": True}
    fsdp, adapters = {"fsdp": "full_shard auto_wrap"}, {"use_peft": True, "max_length": 512}
    for settings, kind in (
        ({"dtype": "bfloat16"}, "refused"),
        ({"torch_dtype": "bfloat16"}, "refused"),
        # The type of a checkpoint: unknown, bf16, and fp32.
        ({"dtype": "auto", "model_name_or_path": "gemma-2-2b"}, "conflict"),
        ({"dtype": "auto", "model_name_or_path": "llama-3.2-1b"}, "refused"),
        ({"dtype": "auto"}, None),
        ({"dtype": "float32"}, None),
        ({"dtype": "bfloat16", "fp16": False}, None),
        # DeepSpeed's own scaler, weights that Accelerate makes fp32, and adapters that peft keeps in fp32.
        ({"dtype": "bfloat16", "deepspeed": Z2}, None),
        ({"dtype": "bfloat16", **fsdp}, None),
        ({"dtype": "bfloat16", **adapters}, None),
    ):
        case = read(write(tmp_path, document | settings), *BOX)
        matches = [item for item in case.findings if "not implemented for 'BFloat16'" in item.message]
        assert [(item.kind, item.key in settings) for item in matches] == ([] if kind is None else [(kind, True)])


def test_fsdp_makes_weights_in_16_bits_fp32() -> None:
    source = inspect.getsource(accelerate.utils.fsdp_utils.fsdp2_prepare_model)
    assert "if param.requires_grad and param.dtype != torch.float32:" in source
    assert "param.data = param.data.to(torch.float32)  # upcasting" in inspect.getsource(accelerate.Accelerator)


@pytest.mark.parametrize("trained", [{}, {"use_peft": True}, {"use_peft": True, "load_in_4bit": True}])
def test_weights_in_16_bits_are_counted_without_mixed_precision(trained: dict[str, Any], tmp_path: Path) -> None:
    document = {"model_name_or_path": "llama-3.2-1b", "max_length": 512, "bf16": False, "fp16": False, **trained}
    wide, half, brain = (
        read(write(tmp_path, document | {"dtype": dtype}), *BOX) for dtype in ("float32", "float16", "bfloat16")
    )
    assert [case.request.precision for case in (wide, half, brain)] == ["fp32", "fp16-engine", "bf16-engine"]
    parts = [case.memory.device_parts["parameters"] for case in (wide, half, brain)]
    assert parts[1] == parts[2] < parts[0]
    if "load_in_4bit" not in trained:
        narrowed = wide.shape.frozen_parameters if trained else wide.shape.parameters
        assert parts[0] - parts[1] == pytest.approx(2 * narrowed, rel=0.01)


def test_two_kinds_of_checkpointing_are_refused_as_by_the_trainer(tmp_path: Path) -> None:
    source = inspect.getsource(transformers.Trainer)
    assert "fsdp_plugin.activation_checkpointing and self.args.activation_checkpointing:" in source
    engine = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "activation_checkpointing": True}}
    # It is TRL's default.
    trl = ARGUMENTS | {"max_length": 512}
    for document, key in (
        (ARGUMENTS | {"gradient_checkpointing": True}, "gradient_checkpointing"),
        (trl, "fsdp_config"),
    ):
        case = read(write(tmp_path, document | engine), *BOX)
        assert [item.key for item in case.findings if item.kind == "refused"] == [key]
    case = read(write(tmp_path, ARGUMENTS | engine), *BOX)
    assert [item.key for item in case.findings if item.kind == "refused"] == []
    assert case.request.gradient_checkpointing


def test_what_fp32_tensors_next_to_quantized_weights_take_is_named(tmp_path: Path) -> None:
    document = ARGUMENTS | {"model_name_or_path": "qwen3-14b", "use_peft": True, "load_in_4bit": True}
    case = read(write(tmp_path, document), *BOX)
    (noted,) = [item for item in case.findings if item.rule == "fp32-weights"]
    narrow = read(write(tmp_path, document | {"dtype": "bfloat16"}), *BOX)
    peaks = [rounded(device_bytes(predict_memory(it.request)) / GIB) for it in (case, narrow)]
    assert f"a peak of {peaks[0]} GiB, {peaks[1]} in bfloat16" in noted.message
    assert "fp32-weights" not in {item.rule for item in narrow.findings}


def test_removed_keys_are_none_of_training_arguments(tmp_path: Path) -> None:
    fields = set(TrainingArguments.__dataclass_fields__)
    assert not fields & REMOVED_HF_KEYS.keys()
    in_other_places = {"it", "transformer_layer_cls_to_wrap", "min_num_params"}
    assert {
        item.fix.split()[1].strip(":") for item in REMOVED_HF_KEYS.values() if item.fix.startswith("set ")
    } - in_other_places <= fields
    case = read(write(tmp_path, ARGUMENTS | {"evaluation_strategy": "steps", "warmup_ratio": 0.1}), *BOX)
    fixes = {item.key: item.fix for item in case.findings if item.rule == "removed-key"}
    assert not [
        item
        for item in read(write(tmp_path, FACTORY | {"warmup_ratio": 0.1, "overwrite_output_dir": True}), *BOX).findings
        if item.rule == "removed-key"
    ]
    assert fixes == {"evaluation_strategy": "set eval_strategy", "warmup_ratio": "set warmup_steps to the fraction"}


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("adamw_hf", "set adamw_torch"),
        ("adamw_apex_fused", "set adamw_torch"),
        ("AdamW_Torch", "set adamw_torch"),
        ("adafacto", "did you mean adafactor or galore_adafactor?"),
        ("adamw_torch_fused", None),
        ("paged_adamw_8bit", None),
    ],
)
def test_an_optimizer_that_transformers_lacks_is_named(name: str, fix: str | None, tmp_path: Path) -> None:
    assert {item.value for item in OptimizerNames} == HF_OPTIMIZERS
    case = read(write(tmp_path, ARGUMENTS | {"optim": name}), *BOX)
    conflicts = [(item.kind, item.key, item.fix) for item in case.findings if item.rule == "unknown-optimizer"]
    assert conflicts == ([] if fix is None else [("conflict", "optim", fix)])
    if fix is None:
        OptimizerNames(name)
    else:
        with pytest.raises(ValueError, match=f"{name} is not a valid OptimizerNames"):
            OptimizerNames(name)


@pytest.mark.parametrize(
    ("engine", "words"), [({"deepspeed": Z2}, "Can't find a valid checkpoint"), ({}, "new moments")]
)
def test_a_checkpoint_without_the_optimizer_is_named(engine: dict[str, Any], words: str, tmp_path: Path) -> None:
    case = read(write(tmp_path, ARGUMENTS | {"save_only_model": True} | engine), *BOX)
    (noted,) = (item for item in case.findings if item.key == "save_only_model")
    assert noted.kind == "noted"
    assert words in noted.message
    without = read(write(tmp_path, ARGUMENTS | engine), *BOX)
    assert not [item for item in without.findings if item.key == "save_only_model"]


@pytest.mark.parametrize(
    ("evaluates", "saves", "is_refused"),
    [("epoch", "steps", True), ("epoch", "epoch", False), ("no", "best", False), ("no", None, True)],
)
def test_a_best_model_needs_an_evaluation_with_each_checkpoint(
    evaluates: str, saves: str | None, is_refused: bool, tmp_path: Path
) -> None:
    document = {"eval_strategy": evaluates, "load_best_model_at_end": True} | (
        {"save_strategy": saves} if saves else {}
    )
    case = read(write(tmp_path, ARGUMENTS | document), *BOX)
    assert any(item.key == "load_best_model_at_end" for item in case.findings) == is_refused
    mismatch = pytest.raises(ValueError, match="requires the save and eval strategy to match")
    with mismatch if is_refused else contextlib.nullcontext():
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **document)


def test_a_reference_without_adapters_takes_a_forward_pass_and_no_memory(tmp_path: Path) -> None:
    pairs = ARGUMENTS | {"use_peft": True, "bf16": True, "max_length": 512, "per_device_train_batch_size": 2}
    preferences = read(write(tmp_path, pairs | {"beta": 0.1}), *BOX)
    supervised = read(write(tmp_path, pairs | {"per_device_train_batch_size": 4}), *BOX)
    assert preferences.request.micro_batch == supervised.request.micro_batch == 4
    assert preferences.memory.device_parts == supervised.memory.device_parts
    times = [predict_time(case.request) for case in (preferences, supervised)]
    assert times[0].step_s.value > 1.15 * times[1].step_s.value


@pytest.mark.parametrize("key", ["bf16.enabled", "mixed_precision", "bf16"])
def test_what_the_gpu_has_no_units_for_is_named(key: str, tmp_path: Path) -> None:
    if key == "bf16.enabled":
        settings = {"bf16": {"enabled": True}, ZERO: {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        words = [str(tmp_path / "ds.json"), "gpt2"]
    elif key == "mixed_precision":
        launcher = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 2}
        words = [str(write(tmp_path, launcher)), "gpt2"]
    else:
        words = [str(write(tmp_path, ARGUMENTS | {"bf16": True}))]
    for box, is_missing in (("2xT4", True), ("2xV100", True), ("2xA100", False)):
        case = read(*words, "--attn_implementation", "flash_attention_2", "--hardware", box)
        kinds = {item.key: item.kind for item in case.findings if item.rule in ("no-units", "ends-with-error")}
        assert kinds == ({key: "conflict", "attn_implementation": "refused"} if is_missing else {})
        assert first_line(case).startswith("Ends with an error: attn_implementation") == is_missing


SFT = {**ARGUMENTS, "model_name_or_path": "llama-3.1-8b", "max_length": 16384, "per_device_train_batch_size": 1}


@pytest.mark.parametrize(
    ("keys", "releases", "kernel"),
    [
        ({}, {"1.6": "transformers", "1.7": "chunked_nll", "1.14.2": "chunked_nll", "1.15": "trl", None: "trl"}, ""),
        ({"loss_type": "nll"}, {"1.7": "transformers", "1.15": "trl"}, ""),
        ({"loss_type": "chunked_nll"}, {"1.6": "chunked_nll", None: "trl"}, ""),
        ({"loss_type": "dft"}, {"1.14": "log_softmax", None: "trl"}, ""),
        ({"use_liger_kernel": True}, {"1.14": "liger", None: "trl"}, ""),
        ({"beta": 0.1}, {"1.14": "log_softmax", None: "trl"}, ""),
        ({"num_generations": 8}, {"1.14": "log_softmax", None: "trl"}, ""),
        ({"num_generations": 8, "use_liger_kernel": True}, {"1.14": "liger", None: "trl"}, ""),
        ({}, {None: "flash"}, "--loss_kernel flash"),
    ],
)
def test_the_loss_is_that_of_the_release_of_trl(
    keys: dict[str, Any], releases: dict[str | None, str], kernel: str, tmp_path: Path
) -> None:
    file = write(tmp_path, SFT | keys)
    for release, expected in releases.items():
        words = () if release is None else ("--release", f"trl={release}")
        case = read(file, *kernel.split(), *words, *BOX)
        assert case.request.loss_kernel == expected
        origin = "newest read" if release is None else "--release"
        assert re.search(rf"TRL \d+\.\d+\.\d+ \({origin}\)", release_line(case))
        assert not [item for item in case.findings if item.kind == "refused"]


def test_current_trl_has_no_logits_of_all_tokens(tmp_path: Path) -> None:
    file = write(tmp_path, SFT | {"fsdp": "full_shard"})
    now, before = (read(file, *words, *BOX).memory for words in ((), ("--release", "trl=1.6")))
    logits = 16384 * 128256
    # 14 bytes of the logits in the loss of transformers at 16 bits: a tile, and copies of the input.
    assert before.most_parts["logits"] >= 12 * logits
    assert now.most_parts["logits"] < 0.25 * before.most_parts["logits"]


@pytest.mark.parametrize(
    ("keys", "release", "words"),
    [
        ({"loss_type": "nonsense"}, "1.16", "SFT has no loss 'nonsense'"),
        ({"loss_type": "chunked_nll"}, "1.3", "SFT has it since 1.4.0"),
        ({"loss_type": "chunked_nll", "use_liger_kernel": True}, "1.14", "does not run with use_liger_kernel"),
    ],
)
def test_a_loss_that_trl_does_not_have_is_refused(keys: Any, release: str, words: str, tmp_path: Path) -> None:
    case = read(write(tmp_path, SFT | keys), "--release", f"trl={release}", *BOX)
    (refused,) = (item for item in case.findings if item.kind == "refused")
    assert refused.key == "loss_type"
    assert words in refused.message
    assert first_line(case).startswith("Refused by the trainer: loss_type")


def test_a_release_of_trl_is_for_its_files(tmp_path: Path) -> None:
    for document in (AXOLOTL, {"zero_optimization": {"stage": 1}}):
        with pytest.raises(UserError, match="--release trl is for a file of TRL"):
            read(write(tmp_path, document, "x.json"), "gpt2", "--release", "trl=1.9", *BOX)
    parser = Parser(prog="study", allow_abbrev=False)
    explain.add_arguments(parser)
    assert "trl=1.9: of the trainer of a TRL file" in " ".join(parser.format_help().split())


def test_a_reward_model_is_no_sft(tmp_path: Path) -> None:
    case = read(write(tmp_path, SFT | {"center_rewards_coefficient": 0.01}), *BOX)
    assert first_line(case).startswith("Without center_rewards_coefficient (not modelled): ")
    assert case.request.loss_kernel == "trl"
    assert any("a head of one value" in item.message for item in case.findings)


@pytest.mark.parametrize(
    ("keys", "release", "ends"),
    [
        ({"num_generations": 8, "use_liger_kernel": True}, "1.5.1", "use_liger_kernel"),
        ({"beta": 0.1, "use_liger_kernel": True}, "1.8", "use_liger_kernel"),
        ({"beta": 0.1, "use_liger_kernel": True}, "1.9", None),
        ({"loss_type": "chunked_nll"}, "1.5", "loss_type"),
        # Liger's SFT reads the weight within the model's forward pass, and the fused head gathers it.
        ({"use_liger_kernel": True}, "1.5", None),
        ({"use_liger_kernel": True}, None, None),
    ],
)
def test_a_sharded_head_ends_a_run_of_older_trl(
    keys: dict[str, Any], release: str | None, ends: str | None, tmp_path: Path
) -> None:
    words = () if release is None else ("--release", f"trl={release}")
    for engine, is_sharded in ((Z3, True), (Z2, False)):
        case = read(write(tmp_path, SFT | keys | {"deepspeed": engine}), *words, *BOX)
        errors = [item.key for item in case.findings if "size mismatch" in item.message]
        assert errors == [ends] * (is_sharded and ends is not None)


@pytest.mark.parametrize(("stage", "where"), [(2, "on the CPU"), (3, "in shards")])
def test_dpo_precomputes_before_deepspeed_has_the_model_until_trl_1_9(stage: int, where: str, tmp_path: Path) -> None:
    document = ARGUMENTS | {
        "beta": 0.1,
        "precompute_ref_log_probs": True,
        "deepspeed": Z2 | {"zero_optimization": {"stage": stage}},
    }

    def messages(document: dict[str, Any], release: str) -> list[str]:
        case = read(write(tmp_path, document), "--release", f"trl={release}", *BOX)
        return [item.message for item in case.findings if item.key == "precompute_ref_log_probs"]

    (message,) = messages(document, "1.8.0")
    assert message.endswith(f"weights are {where} then")
    for without in ({"precompute_ref_log_probs": False}, {"deepspeed": None}, {"desirable_weight": 1.0}):
        assert messages(document | without, "1.8.0") == []
    assert messages(document, "1.9.0") == []
    assert messages(document | {"use_peft": True, "load_in_4bit": True}, "1.8.0") == []


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"max_length": 512}, "0.26.0"),
        ({"num_generations": 8}, "0.26.0"),
        ({"beta": 0.1}, "0.29.0"),
        ({"desirable_weight": 1.0}, "1.8.0"),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_fp16_refuses_the_bf16_adapters_of_trl(keys: dict[str, Any], first: str, bits: int, tmp_path: Path) -> None:
    quantized = {"model_name_or_path": "qwen2.5-7b", "use_peft": True, f"load_in_{bits}bit": True}
    in_fp16 = quantized | {"per_device_train_batch_size": 2, "fp16": True} | keys

    def refused(document: dict[str, Any], *words: str) -> list[str]:
        case = read(write(tmp_path, document), *words, "--hardware", "T4")
        return [item.key for item in case.findings if "not implemented for 'BFloat16'" in item.message]

    assert refused(in_fp16) == refused(in_fp16, "--release", f"trl={first}") == ["fp16"]
    assert refused(in_fp16, "--release", "trl=0.25.1") == []
    # No scaler, adapters that are not cast, and the scaler of DeepSpeed.
    assert refused(in_fp16 | {"fp16": False, "bf16": False, "dtype": "float16"}) == []
    assert refused(in_fp16 | {f"load_in_{bits}bit": False}) == []
    assert refused(in_fp16 | {"deepspeed": Z2}) == []


def test_a_gpu_without_bf16_is_not_sent_to_what_trl_ends_in(tmp_path: Path) -> None:
    document = {"model_name_or_path": "qwen2.5-7b", "use_peft": True, "load_in_4bit": True}
    fixes = {}
    for keys in ({}, {"load_in_4bit": False}):
        case = read(write(tmp_path, document | keys), "--hardware", "T4")
        (fixes[bool(keys)],) = (item.fix for item in case.findings if item.rule == "no-units")
    assert fixes == {False: "set fp16: false, bf16: false and dtype: float16", True: "use fp16, or fp32"}


GRPO = {**ARGUMENTS, "model_name_or_path": "qwen2.5-7b", "num_generations": 8, "deepspeed": Z3, "use_vllm": True}


@pytest.mark.parametrize(
    ("keys", "words", "gib"),
    [
        # vLLM takes its share of all that torch sees (78.8 GiB of an H100): 0.3 by default.
        ({}, "", 0.3 * 78.8),
        ({"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5}, "", 0.5 * 78.8),
        ({"vllm_mode": "server"}, "", 0),
        ({}, "--release trl=0.29", 0),
        ({"vllm_enable_sleep_mode": True}, "", 0),
        ({"use_vllm": False}, "", 0),
    ],
)
def test_colocated_vllm_has_its_share_of_the_gpu(keys: dict[str, Any], words: str, gib: float, tmp_path: Path) -> None:
    case = read(write(tmp_path, GRPO | keys), *words.split(), *BOX)
    alone = read(write(tmp_path, GRPO | {"use_vllm": False}), *words.split(), *BOX)
    difference = device_bytes(case.memory) - device_bytes(alone.memory)
    assert difference == pytest.approx(gib * GIB, rel=0.01)
    verdict = first_line(case)
    assert "not modelled" not in verdict
    assert (f" + {rounded(difference / GIB)} of vLLM of " in verdict) == (gib > 0)


def test_vllm_without_hardware_is_left_out_by_name(tmp_path: Path) -> None:
    case = read(write(tmp_path, GRPO), "--world_size", "8")
    assert first_line(case).startswith("Without use_vllm (not modelled): ")


@pytest.mark.parametrize(
    ("keys", "release", "words"),
    [
        ({}, None, None),
        (
            {"gradient_accumulation_steps": 1},
            None,
            "4 completions (2 a micro-batch x 2 ranks), which do not make groups of 8",
        ),
        (
            {"num_generations": 6},
            None,
            "8 completions (2 a micro-batch x 2 ranks x 2 steps), which do not",
        ),
        ({"num_generations": 1}, None, "at least 2 completions"),
        ({"steps_per_generation": 3}, None, "12 completions (2 a micro-batch x 2 ranks x 3 steps)"),
        ({"generation_batch_size": 12}, None, "a generation has 12 completions, which do not make groups of 8"),
        ({"generation_batch_size": 16}, None, None),
        ({"generation_batch_size": 6}, None, "6 is not divisible by 4"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, None, "with steps_per_generation"),
        ({"num_generations": None, "max_completion_length": 64, "gradient_accumulation_steps": 1}, None, "groups of 8"),
        # Older ones have other factors.
        ({}, "0.17", None),
        ({}, "0.16", "4 completions (2 a micro-batch x 2 ranks), which do"),
        ({"steps_per_generation": 3}, "0.17", None),
    ],
)
def test_a_generation_of_grpo_has_whole_groups(
    keys: dict[str, Any], release: str | None, words: str | None, tmp_path: Path
) -> None:
    document = ARGUMENTS | {"num_generations": 8, "gradient_accumulation_steps": 2} | keys
    words_of_release = () if release is None else ("--release", f"trl={release}")
    case = read(write(tmp_path, document), *words_of_release, "--hardware", "2xH100")
    matches = [item.message for item in case.findings if item.kind == "refused"]
    assert len(matches) == (words is not None)
    assert words is None or words in matches[0]


@pytest.mark.parametrize(
    ("key", "value", "last", "first", "fix"),
    [
        ("max_seq_length", 512, "0.19", "0.20", "set max_length"),
        ("torch_dtype", "float32", "0.26", "0.27", "set dtype"),
        ("max_prompt_length", 128, "0.28.1", "0.29", "take it out, and filter prompts"),
        ("use_liger", True, "0.17", "0.18", "set use_liger_kernel"),
        ("rpo_alpha", 1.0, "0.28", "0.29", "take it out"),
    ],
)
def test_a_key_that_trl_removed_is_named(key: str, value: Any, last: str, first: str, fix: str, tmp_path: Path) -> None:
    file = write(tmp_path, ARGUMENTS | {"dataset_name": "trl-lib/Capybara", "use_peft": True, key: value})
    for words, is_removed in ((f"trl={last}", False), (f"trl={first}", True), (None, True)):
        case = read(file, *(("--release", words) if words else ()), *BOX)
        matches = [item for item in case.findings if item.rule in ("removed-key", "unknown-key")]
        assert [item.key for item in matches] == [key] * is_removed
        assert all(item.kind == "conflict" and item.fix.startswith(fix) for item in matches)


def test_a_prompt_of_grpo_has_no_length_since_trl_0_28(tmp_path: Path) -> None:
    file = write(tmp_path, ARGUMENTS | {"num_generations": 2, "max_prompt_length": 512})
    for release, is_removed in (("0.27", False), ("0.28", True)):
        case = read(file, "--release", f"trl={release}", *BOX)
        assert [item.key for item in case.findings if item.rule == "removed-key"] == ["max_prompt_length"] * is_removed


def test_a_key_that_trl_does_not_have_is_named(tmp_path: Path) -> None:
    accepted = {
        "max_length": 512,
        "dataset_text_field": "text",
        "learning_rate": 1e-4,
        "env": {"A": "1"},
        "lora_alpha": 32,
    }
    unknown = {"tokenizer": "gpt2", "nonsense": 1, "learning_rates": 1e-4, "use_flash_attention_2": True}
    case = read(write(tmp_path, ARGUMENTS | accepted | unknown), *BOX)
    matches = {item.key: item.fix for item in case.findings if "no such key" in item.message}
    assert set(matches) == set(unknown)
    assert "processing_class" in matches["tokenizer"]
    assert "learning_rate" in matches["learning_rates"]
    assert "attn_implementation" in matches["use_flash_attention_2"]
    # A program with further fields.
    case = read(write(tmp_path, ARGUMENTS | accepted | unknown | {"dataset_mixture": {}}), *BOX)
    assert not any("no such key" in item.message for item in case.findings)


def test_the_keys_of_trl_have_those_of_training_arguments() -> None:
    document = yaml.safe_load((ROOT / "study" / "advisor" / "trl_keys.yaml").read_text())
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(document["transformers"]) == fields
    assert not fields & set(document["trl"])
    assert not {*document["trl"], *fields} & (REMOVED_TRL_KEYS.keys() | NO_TRL_KEYS.keys())


def test_a_completion_of_grpo_is_longer_since_trl_1_10(tmp_path: Path) -> None:
    file = write(tmp_path, ARGUMENTS | {"num_generations": 2})
    for release, tokens in (("1.9.2", 256), ("1.10.0", 512), ("1.16.0", 512)):
        case = read(file, "--release", f"trl={release}", *BOX)
        assert case.request.sequence_length == 512 + tokens
        assert f"max_completion_length {tokens}" in case.read_from[0]


def test_grpo_generates_the_completions_of_its_file(tmp_path: Path) -> None:
    for keys, words, tokens in (({}, (), 512), ({"max_completion_length": 64}, (), 64), ({}, ("4096",), 4096)):
        flags = ("--generated_tokens", *words) if words else ()
        assert read(write(tmp_path, GRPO | keys), *BOX, *flags).generated_tokens == tokens
    case = read(write(tmp_path, GRPO), *BOX)
    (answer,) = (item for item in find_answers(case) if "generating 512 tokens" in item.question)
    # The embedding of qwen2.5-7b in 16 bits.
    assert answer.short.endswith("at most 1.02 GiB at once")
    assert read(write(tmp_path, SFT), *BOX).generated_tokens is None


def test_assumed_tokens_of_grpo_are_named(tmp_path: Path) -> None:
    for keys, names in (({}, "max_prompt_length 512, max_completion_length 512"), ({"max_prompt_length": 9}, "")):
        line = read(write(tmp_path, GRPO | keys), *BOX).read_from[0]
        assert names in line.partition("assumed")[2]
    assert "max_prompt_length" not in line


@pytest.mark.parametrize(("mode", "where"), [("colocate", "these GPUs"), ("server", "its server")])
def test_vllm_generates_without_gathers_for_each_token(mode: str, where: str, tmp_path: Path) -> None:
    for keys in ({"vllm_mode": mode}, {"use_vllm": False}):
        case = read(write(tmp_path, GRPO | keys), "--generated_tokens", "4096", *BOX)
        (answer,) = (item for item in find_answers(case) if "generating" in item.question)
        assert (f"vLLM generates on {where}" in answer.short) == ("vllm_mode" in keys)
        assert ("min for each batch" in answer.short) != ("vllm_mode" in keys)


def test_axolotl_trains_16_bit_weights_under_fsdp2(tmp_path: Path) -> None:
    """Its fsdp2_prepare_model has no line of Accelerate's that makes trained weights fp32."""
    plain = {"base_model": "qwen2-7b", "sequence_len": 2048, "micro_batch_size": 1, "bf16": True}
    settings = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    case = read(write(tmp_path, plain | {"fsdp_version": 2, "fsdp_config": settings}), *BOX)
    state = predict_state(case.request)
    # Weights, gradients and two moments of two bytes; shards have a little padding.
    assert state.device == pytest.approx(8 * case.shape.parameters / 8, rel=1e-3)
    (note,) = (item for item in case.findings if item.rule == "no-masters")
    assert "AdamW loses small updates" in note.message
    for document in (
        plain | {"fsdp_version": 1, "fsdp_config": settings},
        {"model_name_or_path": "qwen2-7b", "dtype": "bfloat16", "bf16": True, "fsdp": "full_shard"}
        | {"fsdp_config": {"version": 2}, "per_device_train_batch_size": 1},
    ):
        sharded = read(write(tmp_path, document), *BOX)
        assert sharded.request.strategy.is_fsdp
        assert "no-masters" not in {item.rule for item in sharded.findings}
        assert predict_state(sharded.request).device > 1.9 * state.device


def test_accelerate_before_1_11_reduces_gradients_of_fsdp2_in_each_micro_batch(tmp_path: Path) -> None:
    launch = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
    file, flags = write(tmp_path, launch, "fsdp.yaml"), ("qwen2-7b", "--accumulation", "8", *BOX)
    cases = {release: read(file, *flags, "--release", f"accelerate={release}") for release in ("1.10.0", "1.11.0")}
    synced = read(file, *flags, "--sync_each_batch")
    assert figures(cases["1.10.0"].request) == figures(synced.request) != figures(cases["1.11.0"].request)
    rules = {release: {item.rule for item in findings(case)} for release, case in cases.items()}
    assert "whole-gradients" in rules["1.11.0"] - rules["1.10.0"]
    messages = [item.message for item in cases["1.10.0"].findings if item.key == ACCUMULATION]
    assert messages == [
        "Accelerate 1.10.0 reduces FSDP2's gradients in each micro-batch: its no_sync has no effect there"
    ]
    assert figures(read(file, *flags).request) == figures(cases["1.11.0"].request)


def test_accelerate_before_1_13_makes_frozen_weights_of_fsdp2_fp32(tmp_path: Path) -> None:
    """A note had their bytes, and no figure."""
    launch = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
    file, flags = write(tmp_path, launch, "fsdp.yaml"), ("qwen2-7b", "--peft", "lora", *BOX)
    before, after, now = (
        read(file, *flags, *words)
        for words in (("--release", "accelerate=1.12.0"), ("--release", "accelerate=1.13.0"), ())
    )
    assert figures(after.request) == figures(now.request)
    frozen = now.shape.parameters - now.shape.trained_parameters
    grown = predict_state(before.request).device - predict_state(now.request).device
    assert grown == pytest.approx(2 * frozen / 8, rel=1e-2)
    # They are loaded in 16 bits, and made fp32 on the GPU.
    assert figures(before.request)[2] == pytest.approx(figures(now.request)[2], rel=1e-2)
    (noted,) = (item for item in before.findings if item.rule == "fsdp-frozen")
    assert noted.message == "Accelerate 1.12.0 makes frozen weights fp32 under FSDP2, and the figures have them so"
    assert not {"fsdp-frozen"} & {item.rule for item in after.findings}
    assert "set dtype" not in " ".join(item.fix for item in before.findings)
    # axolotl replaces Accelerate's function.
    keys = {"base_model": "qwen2-7b", "adapter": "lora", "lora_target_linear": True, "sequence_len": 2048, "bf16": True}
    keys |= {"micro_batch_size": 1, "fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    cases = [read(write(tmp_path, keys), *BOX, *words) for words in ((), ("--release", "accelerate=1.12.0"))]
    assert figures(cases[0].request) == figures(cases[1].request)
    assert not any(item.rule == "fsdp-frozen" for case in cases for item in case.findings)


@pytest.mark.parametrize(
    ("model", "release", "is_noted"),
    [("mixtral-8x7b", "4.57.6", True), ("mixtral-8x7b", "5.23.0", False), ("qwen2-7b", "4.57.6", False)],
)
def test_experts_of_an_older_transformers_are_noted_under_fsdp2(
    model: str, release: str, is_noted: bool, tmp_path: Path
) -> None:
    launch = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
    case = read(write(tmp_path, launch, "fsdp.yaml"), model, "--release", f"transformers={release}", *BOX)
    assert any(item.rule == "experts-of-older-release" for item in case.findings) == is_noted


# Groups of ranks that share samples.

LONG = ARGUMENTS | {"model_name_or_path": "llama-3.1-8b", "max_length": 65536, "dtype": "bfloat16"}
LONG |= {"per_device_train_batch_size": 1}
MESH = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: bf16
num_processes: 8
{section}
parallelism_config: {{{sizes}}}
"""
WITH_FSDP2 = "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}"
WITH_STAGE_3 = "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 1}"


def launched(folder: Path, sizes: str) -> str:
    """Return the file of a launcher with Ulysses, or with a ring under FSDP2."""
    is_ulysses = "sp_size" in sizes
    kind, section = ("DEEPSPEED", WITH_STAGE_3) if is_ulysses else ("FSDP", WITH_FSDP2)
    file = folder / "launch.yaml"
    file.write_text(MESH.format(kind=kind, section=section, sizes=sizes))
    return str(file)


ULYSSES, RING = "parallelism_config_sp_size: 4", "parallelism_config_dp_shard_size: 2, parallelism_config_cp_size: 4"


def test_a_trainers_file_with_ulysses_has_the_figures_of_the_flag(tmp_path: Path) -> None:
    case = read(write(tmp_path, LONG), "--engine", launched(tmp_path, ULYSSES), *BOX)
    assert (case.request.sequence_ranks, case.request.sequence_length) == (4, 65536 // 4)
    assert "not modelled" not in first_line(case)
    by_flag = predicted(
        f"llama-3.1-8b --strategy zero3 --hardware 8xH100 --precision bf16 --seq_length 65536 --sp 4 {RECOMPUTED}"
        " --loss_kernel trl"
    )
    parts = predict_memory(by_flag).device_parts
    for name in ("activations", "logits"):
        assert case.memory.device_parts[name] == parts[name]


def test_a_mapping_of_groups_ends_a_run_and_its_figures_are_those_of_its_sizes(tmp_path: Path) -> None:
    groups = {"sp_size": 4}
    with pytest.raises(AttributeError, match=NO_MAPPING):
        accelerate.Accelerator(cpu=True, parallelism_config=groups)
    case = read(write(tmp_path, LONG | {"deepspeed": Z3, "parallelism_config": groups}), *BOX)
    (refused,) = [item for item in case.findings if item.kind == "refused"]
    assert (refused.key, refused.severity) == ("parallelism_config", "error")
    assert refused.fix.startswith("set parallelism_config_sp_size: 4 in Accelerate's file")
    assert case.request.sequence_ranks == 4
    (refused,) = read(write(tmp_path, LONG | {"parallelism_config": "mesh.yaml"}), *BOX).findings
    assert refused.message.endswith("'mesh.yaml' is no ParallelismConfig")
    document = LONG | {
        "fsdp": True,
        "fsdp_config": {"version": 2},
        "parallelism_config": {"dp_shard_size": 2, "cp_size": 4},
    }
    case = read(write(tmp_path, document), *BOX)
    assert "without parallelism_config.cp_size (not modelled)" in first_line(case)
    assert ("parallelism_config.cp_size", "trainer.yaml") in {
        (item.key, Path(item.file).name) for item in case.findings
    }


def test_the_trainer_prepares_neither_its_schedule_nor_an_evaluation_with_the_model(tmp_path: Path) -> None:
    source = inspect.getsource(transformers.Trainer._prepare_for_training)
    prepared = re.findall(r"accelerator\.prepare\(([^)]*)\)", source)
    # A stand-in for the schedule of DeepSpeed's file.
    assert [" ".join(words.split()) for words in prepared if "lr_scheduler" in words] == [
        "self.model, self.optimizer, self.lr_scheduler"
    ]
    assert 'type(self.lr_scheduler).__name__ == "DummyScheduler"' in source
    launcher = launched(tmp_path, ULYSSES)
    words = ("takes a step for each process", "sees only the rank's part")
    alone = [item.message for item in read(launcher, "llama-3.1-8b", *BOX).findings]
    assert all(any(text in message for message in alone) for text in words)
    trained = [item.message for item in read(write(tmp_path, LONG), "--engine", launcher, *BOX).findings]
    assert not any(text in message for text in words for message in trained)


@pytest.mark.parametrize(
    ("keys", "sizes", "release", "kind", "key"),
    [
        ({"packing": True}, RING, "1.16.0", "refused", "packing"),
        ({"packing": True}, RING, "1.15.0", "conflict", "packing"),
        ({"packing": True}, ULYSSES, "1.16.0", None, "packing"),
        ({"packing": False}, RING, "1.16.0", None, "packing"),
        ({"loss_type": "dft"}, ULYSSES, "1.15.0", "refused", "loss_type"),
        ({"loss_type": "dft"}, ULYSSES, "1.14.0", None, "loss_type"),
        ({"label_smoothing_factor": 0.1}, ULYSSES, "1.16.0", "refused", "label_smoothing_factor"),
        ({"num_generations": 8, "max_completion_length": 64}, ULYSSES, "1.16.0", "conflict", "max_completion_length"),
    ],
)
def test_what_trl_does_not_do_with_divided_samples_is_named(
    keys: dict[str, Any], sizes: str, release: str, kind: str | None, key: str, tmp_path: Path
) -> None:
    engine = launched(tmp_path, sizes)
    case = read(write(tmp_path, LONG | keys), "--engine", engine, "--release", f"trl={release}", *BOX)
    kinds = {item.kind for item in case.findings if item.key == key and item.kind in ("refused", "conflict")}
    assert kinds == ({kind} if kind else set())


@pytest.mark.parametrize("key", ["context_parallel_size", "sequence_parallel_degree"])
def test_axolotls_rings_are_named_with_the_peak_of_ulysses(key: str, tmp_path: Path) -> None:
    document = AXOLOTL | {"base_model": "llama-3.1-8b", "sequence_len": 65536, "gradient_checkpointing": True}
    document |= {"deepspeed": Z3, "micro_batch_size": 2, "sample_packing": True, key: 4}
    case = read(write(tmp_path, document), *BOX)
    (noted,) = [item for item in case.findings if item.key == key and item.kind == "noted"]
    divided = over_ranks(case.request, 4, "sp_size")
    assert "a step trains on the samples of 2;" in noted.message
    assert noted.message.endswith(f"a peak of {rounded(device_bytes(predict_memory(divided)) / GIB)} GiB")
    assert first_line(case).count(f"without {key} (not modelled)") == 1
    assert {item.key for item in case.findings if item.kind == "refused"} == {key, "micro_batch_size"}
    runs = {"attn_implementation": "flash_attention_2", "micro_batch_size": 1}
    case = read(write(tmp_path, document | runs), *BOX)
    assert not any(item.kind == "refused" for item in case.findings)
    # One rank divides nothing.
    case = read(write(tmp_path, document | {key: 1}), *BOX)
    assert key not in {item.key for item in case.findings}


@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        ({"activation_offloading": True}, "--offload_checkpoints"),
        ({"tiled_mlp": True}, "--tiled_mlp"),
        ({"activation_offloading": True, "tiled_mlp": True}, "--offload_checkpoints --tiled_mlp"),
    ],
)
def test_keys_of_features_for_longer_samples_have_the_figures_of_the_flags(
    keys: dict[str, Any], flags: str, tmp_path: Path
) -> None:
    document = AXOLOTL | {"base_model": "llama-3.1-8b", "sequence_len": 65536, "gradient_checkpointing": True}
    document |= {"deepspeed": {**Z3, "bf16": {"enabled": True}}, "micro_batch_size": 1}
    document |= {"liger_fused_linear_cross_entropy": True}
    case = read(write(tmp_path, document | keys), *BOX)
    by_flag = predict_memory(
        predicted(
            f"llama-3.1-8b --strategy zero3 --hardware 8xH100 --precision bf16 --seq_length 65536 {RECOMPUTED} {flags}"
            " --loss_kernel liger"
        )
    )
    for name in ("activations", "logits"):
        assert case.memory.device_parts[name] == by_flag.device_parts[name]
    assert (
        case.memory.device_parts["activations"]
        < read(write(tmp_path, document), *BOX).memory.device_parts["activations"]
    )
    noted = {item.key: item.message for item in case.findings if item.key in keys}
    assert noted.keys() == keys.keys()
    assert all(message.endswith("no step time is predicted") for message in noted.values())
    assert "not modelled" not in first_line(case)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"fsdp_version": 2, "fsdp_config": {"offload_params": False}}, "is not predicted with fsdp2"),
        ({"gradient_checkpointing": False}, "activations go to the host; not modelled"),
        ({"activation_offloading": "disk"}, "activation_offloading: 'disk'"),
    ],
)
def test_a_feature_that_is_not_predicted_is_left_out_by_name(keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    document = AXOLOTL | {"base_model": "llama-3.1-8b", "gradient_checkpointing": True, "activation_offloading": True}
    case = read(write(tmp_path, document | keys), *BOX)
    (noted,) = [item for item in case.findings if item.key == "activation_offloading"]
    assert reason in noted.message
    assert first_line(case).startswith("Without activation_offloading (not modelled)")
