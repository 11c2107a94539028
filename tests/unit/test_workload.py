"""Flags of a workload and of hardware are read into `Workload` and `HardwareFlags`, and written as words again."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from commands import parse
from study.advisor import advise_command, explain, predict_command
from study.advisor.advise import AdviceRequest
from study.advisor.advise_command import AdviseFlags
from study.advisor.explain_case import ProgramSettings
from study.advisor.predict_command import PredictFlags
from study.advisor.workload import LONG_FEATURES, Workload
from study.cli import main
from study.config.errors import UserError
from study.config.flags import changed_flags
from study.predictor.hardware import HardwareFlags
from study.predictor.request import Program, Request

PREDICT = ["gpt2", "--strategy", "fsdp2", "--hardware", "8xH100"]
# Another value than the default, for each field of a workload.
CHANGES = {
    "micro_batch": "4",
    "accumulation": "8",
    "gradient_checkpointing": None,
    "pure_bf16": None,
    "autocast": None,
    "dropout": None,
    "seq_length": "512",
    "target_length": "128",
    "precision": "fp16-engine",
    "attn_implementation": "eager",
    "chunked_loss": None,
    "loss_kernel": "liger",
    "keeps_outputs": None,
    "compile": None,
    "fsdp_version": "1",
    "sync_each_batch": None,
    "reentrant_units": None,
    "fsdp_mixed_units": None,
    "peft": "lora",
    "adapters_in_16_bits": None,
    "lora_dropout": "0.05",
    "lora_rank": "64",
    "lora_targets": "q_proj,v_proj",
    "lora_modules_to_save": "lm_head",
    "lora_dora": None,
    "freeze": "visual,lm_head",
    "frozen_without_backward": None,
    "text_only": None,
    "tensor_parallel": "2",
    "tensor_plan": "sequence",
    "sp": "8",
    "offload_checkpoints": None,
    "tiled_mlp": None,
    "optimizer": "lion",
    "quantization": "4bit",
    "double_quant": None,
    "quantized_on_host": None,
    "with_reference": None,
    "hub": None,
}
HARDWARE_CHANGES = {
    "nvme_gb_per_s": "3.5,2",
    "network_gb_per_s": "12.5",
    "bus_gb_per_s": "5",
    "host_gb_per_s": "20",
    "host_memory": "512",
}


def make_words(changes: Mapping[str, str | None], names: Iterable[str]) -> list[str]:
    return [word for name in names for word in (f"--{name}", changes[name]) if word is not None]


def drawn_flags() -> list[list[str]]:
    """Return names of flags that may stand together, each of them in some, and 50 draws of half the flags."""
    draw, accepted, halves = random.Random(7), list[list[str]](), 0
    # Some flags stand only with two others, and some without all of a group: few draws of half the flags have them.
    while halves < 50 or {*itertools.chain(*accepted)} != {*CHANGES}:
        fraction = draw.choice((0.1, 0.5))
        names = [name for name in CHANGES if draw.random() < fraction]
        try:
            PredictFlags.from_options(parse(predict_command, [*PREDICT, *make_words(CHANGES, names)]))
        except UserError:
            continue
        accepted.append(names)
        halves += fraction == 0.5
    return accepted


def test_the_words_of_a_workload_are_read_as_the_same_workload() -> None:
    assert {"model_name_or_path", *CHANGES} == {field.name for field in dataclasses.fields(Workload)}
    for names in drawn_flags():
        flags = PredictFlags.from_options(parse(predict_command, [*PREDICT, *make_words(CHANGES, names)]))
        written = flags.workload.flags(gradient_checkpointing=False)
        assert written == make_words(CHANGES, names)
        assert PredictFlags.from_options(parse(predict_command, [*PREDICT, *written])) == flags


@pytest.mark.parametrize("count", range(len(HARDWARE_CHANGES) + 1))
def test_the_words_of_hardware_are_read_as_the_same_hardware(count: int) -> None:
    assert {"hardware", *HARDWARE_CHANGES} == {field.name for field in dataclasses.fields(HardwareFlags)}
    for names in itertools.combinations(HARDWARE_CHANGES, count):
        words = make_words(HARDWARE_CHANGES, names)
        flags = HardwareFlags.from_options(parse(predict_command, [*PREDICT, *words]))
        assert changed_flags(flags, hardware="8xH100") == words
        changed = {field.name for field in dataclasses.fields(flags) if getattr(flags, field.name) != field.default}
        assert changed == {"hardware", *names}


def test_each_command_has_a_flag_for_each_field_of_a_workload() -> None:
    fields = {field.name for field in dataclasses.fields(Workload)}
    only_predict = {"pure_bf16", "autocast", "dropout", "tensor_plan", *LONG_FEATURES}
    assert fields - vars(parse(predict_command, PREDICT)).keys() == set()
    assert fields - vars(parse(advise_command, ["gpt2"])).keys() == only_predict
    assert fields - vars(parse(explain, ["zero3.json", "gpt2"])).keys() == {
        "model_name_or_path",
        "tensor_parallel",
        *only_predict,
    }


def test_a_workload_has_what_each_command_names() -> None:
    words = ["gpt2", "--hardware", "8xH100", "--gradient_checkpointing"]
    by_choice = {
        choice: AdviseFlags.from_options(parse(advise_command, [*words, choice])).workload.gradient_checkpointing
        for choice in ("auto", "on", "off")
    }
    assert by_choice == {"auto": None, "on": True, "off": False}
    explained = Workload.from_options(parse(explain, ["zero3.json", "gpt2", "--precision", "no", "--micro_batch", "3"]))
    assert explained == Workload(precision="no", micro_batch=3, gradient_checkpointing=False)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--quantization 4bit", "--quantization 4bit is for frozen weights"),
        ("--adapters_in_16_bits", "--adapters_in_16_bits has no effect without adapters"),
        ("--lora_rank 4", "--lora_rank 4 has no effect without adapters"),
        ("--lora_targets q_proj,v_proj", "--lora_targets q_proj,v_proj has no effect without adapters"),
        ("--lora_modules_to_save lm_head", "--lora_modules_to_save lm_head has no effect without adapters"),
        ("--lora_dropout 0.1", "--lora_dropout 0.1 has no effect without adapters"),
        ("--peft lora --lora_dropout 1", "--lora_dropout 1 is out of range"),
        ("--double_quant", "--double_quant is about the scales of 4-bit weights"),
        ("--peft lora --quantized_on_host", "--quantized_on_host is about 4-bit weights"),
        ("--chunked_loss --loss_kernel flash", "--chunked_loss is liger, and --loss_kernel is flash"),
        ("--chunked_loss --keeps_outputs", "--keeps_outputs is about logits, and the loss liger returns none"),
    ],
)
def test_flags_that_exclude_each_other_are_refused_by_every_command(
    flags: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "zero2.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}', encoding="utf-8")
    for command in (
        "predict gpt2 --strategy fsdp2 --hardware 8xH100",
        "advise gpt2 --hardware 8xH100",
        f"explain {file} gpt2 --hardware 8xH100",
        f"explain --strict {file}",
    ):
        assert main([*command.split(), *flags.split()]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("version", "usual"), [([], 1), (["--fsdp_version", "1"], 2)])
def test_reentrant_units_are_of_the_first_version_of_fsdp(version: list[str], usual: int) -> None:
    options = parse(explain, ["fsdp.yaml", "gpt2", "--peft", "lora", "--reentrant_units", *version])
    assert Workload.from_options(options, usual_fsdp_version=usual).trainer.reentrant_units


@pytest.mark.parametrize(("version", "usual"), [([], 2), (["--fsdp_version", "2"], 1)])
def test_reentrant_units_of_the_second_version_of_fsdp_are_refused(version: list[str], usual: int) -> None:
    options = parse(explain, ["fsdp.yaml", "gpt2", "--peft", "lora", "--reentrant_units", *version])
    with pytest.raises(UserError, match="--reentrant_units is for FSDP1"):
        Workload.from_options(options, usual_fsdp_version=usual)


def test_settings_of_a_program_are_fields_of_one_class_and_reach_each_request() -> None:
    names = {field.name for field in dataclasses.fields(Program)}
    for question in (AdviceRequest, ProgramSettings):
        assert issubclass(question, Program)
        assert names.isdisjoint(vars(question)["__annotations__"])
    workload = Workload(attn_implementation="eager", optimizer="lion", with_reference=True, chunked_loss=True)
    program = workload.program(target_length=256)
    fields = program.request_fields
    assert fields.keys() <= {field.name for field in dataclasses.fields(Request)}
    assert (fields["attention"], fields["optimizer"], fields["reference_model"]) == ("eager", "lion", True)
    assert (fields["target_length"], fields["loss_kernel"], fields["quantized"]) == (256, "liger", False)
