"""Models by name besides the presets, without torch: their names, and parameters of those in the table of families."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from study.advisor import predict_command
from study.cli import main
from study.config.errors import UserError
from study.predictor import live
from study.predictor.families import FAMILIES
from study.predictor.models import model_shape
from study.workloads.presets import find_base, find_known, find_preset, known_models


def test_a_known_model_of_the_table_of_families_needs_no_torch() -> None:
    listed = [name for name, model in known_models().items() if model.config["model_type"] in FAMILIES]
    code = "import json, sys; sys.modules['torch'] = None; from study.predictor.models import model_shape;"
    code += f" print(json.dumps([model_shape(name).parameters for name in {listed}]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [known_models()[name].parameters for name in listed]
    assert {"pythia-1.4b", "mpt-7b", "codellama-7b", "yi-34b"} <= {*listed}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("codellama/CodeLlama-7b-Instruct-hf", "codellama-7b"),
        ("01-ai/Yi-34B-Chat", "yi-34b"),
        ("mosaicml/mpt-7b-instruct", "mpt-7b"),
        ("somebody/pythia-1.4b", None),
        ("google-t5/t5-3b", "t5-3b"),
        ("roberta-base", "roberta-base"),
        ("facebook/opt-6.7b", "opt-6.7b"),
        ("bigscience/bloomz-7b1", None),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("stabilityai/stablelm-2-1_6b", "stablelm-2-1.6b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.2"),
        ("mistralai/Mistral-7B-v0.4", None),
        ("google-bert/bert-base-cased", "bert-base-cased"),
        ("distilgpt2", "distilgpt2"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b-2507"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b-2507"),
        ("Qwen/Qwen3-4B-Instruct", None),
    ],
)
def test_a_known_model_is_found_by_its_hub_id_and_by_tuned_weights(name: str, expected: str | None) -> None:
    model = find_known(name)
    assert (model and model.name) == expected
    assert find_preset(name) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        # 22 billion parameters.
        ("mistralai/Mistral-Small-Instruct-2409", None),
        ("Qwen/Qwen3-4B-Instruct", "qwen3-4b"),
        ("Qwen/Qwen3-4B-Instruct-2507", None),
    ],
)
def test_tuned_weights_with_a_date_have_the_preset_of_that_date(name: str, expected: str | None) -> None:
    preset = find_base(name)
    assert (preset and preset.name) == expected


@pytest.mark.parametrize(
    ("name", "nearest"), [("t5-xl", "t5-(small|base|large|3b)"), ("opt-66b", "opt-"), ("bloomz-7b1", "bloom-7b1")]
)
def test_a_family_with_known_models_is_not_called_one_without_presets(name: str, nearest: str) -> None:
    with pytest.raises(UserError, match=rf"unknown model '{name}' -> did you mean {nearest}"):
        model_shape(name)


def test_the_help_says_which_models_take_up_to_a_minute() -> None:
    parser = argparse.ArgumentParser()
    predict_command.add_model_arguments(parser)
    text = " ".join(parser.format_help().split())
    traced = text.partition("with torch also these, which are traced in up to a minute: ")[2].partition(";")[0]
    assert {"flan-t5-xxl", "mixtral-8x7b"} <= set(traced.split(", "))
    assert not {"llama-3.1-8b", "bert-large-uncased"} & set(traced.split(", "))


@pytest.mark.parametrize(
    ("name", "meant"), [("qwen3-30b", "qwen3-30b-a3b"), ("Qwen3-235B-Instruct", "qwen3-235b-a22b")]
)
def test_a_mixture_is_suggested_for_its_name_without_the_active_experts(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"did you mean {meant}\?"):
        model_shape(name)


@pytest.mark.parametrize(("name", "nearest"), [("bert-large", "bert-large-uncased"), ("roberta-lage", "roberta-large")])
def test_the_beginning_of_a_preset_is_not_another_model_that_is_misspelt(name: str, nearest: str) -> None:
    with pytest.raises(UserError, match=rf"unknown model '{name}' -> did you mean {nearest}\?"):
        model_shape(name)


@pytest.mark.parametrize(
    ("name", "base", "kind"),
    [
        ("unsloth/gemma-2-9b-bnb-4bit", "gemma-2-9b", "4bit"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "llama-3.2-3b", "4bit"),
        ("unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit", "qwen2.5-7b", "dynamic-4bit"),
        ("unsloth/mistral-7b-instruct-v0.2-bnb-4bit", "mistral-7b-v0.2", "4bit"),
        ("gemma-2-9b-4bit", "gemma-2-9b", "4bit"),
    ],
)
def test_a_name_of_4_bit_weights_is_its_model_with_them(
    name: str, base: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = model_shape(name)
    assert (shape.name, shape.quantized_by, shape.parameters) == (base, kind, model_shape(base).parameters)
    flags = ["--strategy", "single", "--hardware", "L4", "--gradient_checkpointing", "--peft", "lora"]
    in_4_bits = ["--quantization", "4bit"]
    assert main(["predict", name, *flags, *in_4_bits]) == 0
    page = capsys.readouterr().out
    # Unsloth's dynamic ones have some matrices in 16 bits.
    notes = [line for line in page.splitlines() if "dynamic 4-bit weights" in line]
    assert bool(notes) == (kind == "dynamic-4bit")
    assert main(["predict", base, *flags, *in_4_bits]) == 0
    assert [line for line in page.splitlines() if line not in notes] == capsys.readouterr().out.splitlines()
    assert main(["predict", name, *flags]) == 2
    assert "add --peft lora --quantization 4bit, or name" in capsys.readouterr().err


def test_a_trainer_file_may_name_4_bit_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sft.yaml"
    text = "model_name_or_path: {}\nuse_peft: true\nload_in_4bit: true\nbf16: true\nlearning_rate: 2.0e-4\n"
    for name in ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "/models/unsloth/Llama-3.2-3B-bnb-4bit"):
        file.write_text(text.format(name))
        assert main(["explain", str(file), "--hardware", "L4"]) == 0
        assert "llama-3.2-3b" in capsys.readouterr().out


def test_no_two_known_models_have_one_spelling() -> None:
    ids = [model.hub_id.lower() for model in known_models().values()]
    assert len({*ids}) == len(ids)
    assert all(find_known(model.hub_id) == model == find_known(model.name) for model in known_models().values())


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--quantization 4bit", "peft has no default targets for adapters of a phi3. To fix it: add --lora_targets"),
        ("--quantization 8bit --lora_targets all-linear", "8-bit weights are not predicted"),
    ],
)
def test_adapters_that_would_be_refused_are_refused_before_a_trace(
    flags: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trace(*_: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(live, "answer", trace)
    file = tmp_path / "ddp.yaml"
    file.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 1\n")
    for question in ("predict microsoft/phi-4 --strategy single", "advise microsoft/phi-4", f"explain {file} phi-4"):
        assert main([*question.split(), "--hardware", "L4", "--peft", "lora", *flags.split()]) == 2
        assert refusal in capsys.readouterr().err


@pytest.mark.parametrize("name", ["microsoft/phi-4", "unsloth/phi-4-bnb-4bit"])
def test_the_adapters_of_a_trainer_file_are_checked_before_a_trace(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "answer", None)
    file = tmp_path / "sft.yaml"
    text = "use_peft: true\nload_in_4bit: true\nbf16: true\nlearning_rate: 2.0e-4\n"
    file.write_text(f"model_name_or_path: {name}\n{text}")
    assert main(["explain", str(file), "--hardware", "L4"]) == 2
    assert "sft.yaml: peft has no default targets for adapters of a phi3" in capsys.readouterr().err
