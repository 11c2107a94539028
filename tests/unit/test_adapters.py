"""Adapters (LoRA, QLoRA): what FSDP1 keeps, their targets and dropout, 4-bit scales, and losses by name."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch.utils.checkpoint import checkpoint
from transformers import Gemma3Config, LlamaConfig, LlavaConfig, Phi3Config, T5Config, WhisperConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.pytorch_utils import Conv1D

from study.advisor import predict_command
from study.cli import main
from study.config.errors import UserError
from study.config.strategies import read_strategy
from study.host.memory import GIB, libraries_bytes
from study.predictor.buckets import gradient_snapshots
from study.predictor.communication import predict_payload
from study.predictor.constants import FITTED
from study.predictor.hardware import ANY_DEVICE, CPU_CORE, Hardware, box_of_ranks, to_box
from study.predictor.intervals import FILE as INTERVALS
from study.predictor.live import live_shape
from study.predictor.live_trace import build_model
from study.predictor.lora_targets import DEFAULT_TARGETS, peft_targets
from study.predictor.losses import Head, LossKernel, bytes_without_logits, logit_bytes
from study.predictor.memory import device_snapshots, predict_memory
from study.predictor.micro_batch import model_flops, predict_activations
from study.predictor.models import model_shape
from study.predictor.nearest import describe_nearest
from study.predictor.passes import passes_s
from study.predictor.request import Request
from study.predictor.shape import ModelShape, can_adapt, with_adapters
from study.predictor.state import State, accumulated_bytes, adapter_units, flat_units, predict_state
from study.predictor.table_shape import shape_of_architecture
from study.predictor.traced_request import build_meta_model, trace_activations
from study.predictor.validation import fit, published_rows
from study.report.pages import prediction as report
from study.report.pages import prediction_intervals
from unit.test_predict_memory import FAMILIES

ZERO3 = str(Path(__file__).parents[2] / "accelerate_configs" / "zero3.yaml")
TINY = "layers={},hidden=64,heads=2,key_value_heads=2,vocabulary=64,inner=128"


def fsdp1(layers: int, tokens: int, **changed: Any) -> Request:
    return Request(
        with_adapters(model_shape(TINY.format(layers)), 4),
        read_strategy("fsdp2"),
        box_of_ranks("2", ANY_DEVICE, 2),
        tokens,
        1,
        1,
        "fp32",
        True,
        "sdpa",
        autocast=False,
        fsdp_version=1,
        **changed,
    )


def test_fsdp1_has_a_unit_of_each_adapter_beside_the_frozen_one_of_its_layer() -> None:
    request = fsdp1(4, 64)
    units, adapters = flat_units(request), adapter_units(request)
    assert len(adapters) == 4 * 7 * 2
    assert sum(unit.size for unit in units.values()) == request.shape.frozen_parameters
    assert sum(unit.size for unit in adapters.values()) == request.shape.trained_parameters
    state = predict_state(request)
    assert state.params_device == 4 * request.shape.parameters / 2
    # Each part of an adapter's matrix has a step counter; frozen weights have no moments.
    assert state.optimizer_device == 8 * request.shape.trained_parameters / 2 + 4 * len(adapters)
    payload = predict_payload(request)
    assert payload["reduce_scatter"] == 4 * request.shape.trained_parameters
    outside = units[-1].size
    assert payload["all_gather"] == 4 * (2 * request.shape.parameters - outside)


def test_frozen_weights_in_a_flat_parameter_with_adapters_have_gradients() -> None:
    request = fsdp1(4, 64, fsdp_mixed_units=True)
    units, shape = flat_units(request), request.shape
    in_layers = [param for param in shape.params if shape.find_layer(param) >= 0]
    assert adapter_units(request) == {}
    assert sum(unit.size for unit in units.values()) == shape.parameters
    # Without adapters outside the layers the root needs no gradient.
    assert units[-1].with_gradients == 0
    assert sum(unit.with_gradients for unit in units.values()) == sum(param.elements for param in in_layers)
    state = predict_state(request)
    assert state.params_device == 4 * shape.parameters / 2
    assert state.grads_device == 4 * sum(param.elements for param in in_layers) / 2
    # AdamW has the adapters alone: of rank 0 those that its half of a layer's unit has.
    local = sum(size for unit in units.values() if unit.with_gradients for size in unit.local)
    steps = sum(len(unit.local) for unit in units.values() if unit.with_gradients)
    assert 0 < local <= shape.trained_parameters
    assert state.optimizer_device == 8 * local + 4 * steps
    assert predict_payload(request)["reduce_scatter"] == 4 * sum(param.elements for param in in_layers)
    # Whole gradients wait for the last micro-batch.
    accumulating = dataclasses.replace(request, accumulation=2)
    assert accumulated_bytes(accumulating) == 4 * sum(param.elements for param in in_layers)
    separate = dataclasses.replace(request, fsdp_mixed_units=False)
    assert model_flops(separate) < model_flops(request)
    timed = (dataclasses.replace(request, box=to_box("2xA100")) for request in (separate, request))
    # Without the waits for units of adapters, which the other one has.
    unlaunched = dataclasses.replace(FITTED, launch_s=0.0)
    (forward, backward), (same, more) = (passes_s(request, unlaunched) for request in timed)
    assert same == forward
    assert more > backward


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["predict", "gpt2", "--strategy", "zero3", "--fsdp_version", "1"], "--fsdp_version is for FSDP"),
        (["predict", "gpt2", "--strategy", "fsdp2", "--peft", "lora", "--reentrant_units"], "--fsdp_version 1"),
        (["predict", "gpt2", "--strategy", "fsdp2", "--fsdp_version", "1", "--reentrant_units"], "--peft lora"),
        (["advise", "gpt2", "--peft", "lora", "--reentrant_units"], "--fsdp_version 1"),
        (["advise", "gpt2", "--peft", "lora", "--fsdp_mixed_units"], "--fsdp_version 1"),
        (["explain", ZERO3, "gpt2", "--peft", "lora", "--fsdp_mixed_units"], "zero3.yaml is not"),
        (
            ["advise", "gpt2", "--peft", "lora", "--quantization", "4bit", "--fsdp_version", "1", "--fsdp_mixed_units"],
            "4-bit weights are not predicted",
        ),
        (
            ["advise", "gpt2", "--peft", "lora", "--fsdp_version", "1", "--reentrant_units", "--fsdp_mixed_units"],
            "leave one of them out",
        ),
    ],
)
def test_a_flag_of_fsdp1_without_an_effect_is_refused(flags: list[str], says: str, capsys: Any) -> None:
    assert main([*flags, "--hardware", "2xA100"]) == 2
    assert says in capsys.readouterr().err


def test_fsdp1_is_asked_for_by_a_flag_or_a_file(tmp_path: Path, capsys: Any) -> None:
    def device_bytes(*command: str) -> float:
        assert main([*command, "--peft", "lora", "--gradient_checkpointing", "--seq_length", "1024", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        return float(document["memory"]["peak_allocated"]["value"])

    file = tmp_path / "fsdp.yaml"
    settings = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    file.write_text(f"distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {{{settings}}}\n", encoding="utf-8")
    model = "layers=32,hidden=4096,heads=32,vocabulary=8000,inner=11008"
    predict = ["predict", model, "--strategy", "fsdp2", "--hardware", "2xA100", "--micro_batch", "4"]
    explain = ["explain", str(file), model, "--hardware", "2xA100", "--micro_batch", "4"]
    first = ["--fsdp_version", "1"]
    assert device_bytes(*explain) == device_bytes(*predict, *first) != device_bytes(*predict)
    assert device_bytes(*explain, "--fsdp_version", "2") == device_bytes(*predict)
    reentrant = device_bytes(*predict, *first, "--reentrant_units")
    assert device_bytes(*explain, "--reentrant_units") == reentrant > device_bytes(*explain)
    # A loop with Accelerate's own policy.
    mixed = device_bytes(*predict, *first, "--fsdp_mixed_units")
    assert device_bytes(*explain, "--fsdp_mixed_units") == mixed > device_bytes(*explain)
    file.write_text(f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, {settings}}}\n", encoding="utf-8")
    assert main([*explain, *first]) == 2
    assert "sets fsdp_version: 2" in capsys.readouterr().err


def test_peaks_of_adapters_have_the_interval_of_adapters(capsys: Any) -> None:
    command = ["predict", "llama-3.1-8b", "--strategy", "zero2", "--hardware", "2xA100-80", "--seq_length", "1024"]

    def peak(*flags: str) -> dict[str, float]:
        assert main([*command, *flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["memory"]["peak_allocated"]

    intervals = yaml.safe_load(INTERVALS.read_text(encoding="utf-8"))
    for flags, kind in (((), "above_state"), (("--peft", "lora"), "adapters_above_state")):
        figure, interval = peak(*flags), intervals[kind]
        certain = (figure["high"] - interval["high"] * figure["value"]) / (1 - interval["high"])
        assert certain + min(interval["low"], 1) * (figure["value"] - certain) == pytest.approx(figure["low"])


def test_a_note_has_the_gradients_of_frozen_weights_in_a_loop_without_the_policy_of_peft(capsys: Any) -> None:
    command = ["predict", "llama-2-7b", "--hardware", "2xA100", "--peft", "lora", "--strategy", "fsdp2"]

    def notes(*flags: str) -> list[str]:
        assert main([*command, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.startswith("fsdp_auto_wrap_policy:")]

    first = ["--fsdp_version", "1"]
    (note,) = notes(*first)
    parser = argparse.ArgumentParser()
    predict_command.add_arguments(parser)
    options = parser.parse_args([*command[1:], *first, "--fsdp_mixed_units"])
    request = predict_command.make_request(predict_command.PredictFlags.from_options(options))
    # At the optimizer step all gradients are there.
    gradients = gradient_snapshots(request)[-1].grads
    (stated,) = map(float, re.findall(r"([\d.]+) GiB a rank", note))
    trained = request.shape.trained_parameters * request.adapter_bytes / 2
    assert stated == pytest.approx((gradients - trained) / GIB, rel=0.01)
    assert notes(*first, "--fsdp_mixed_units") == notes() == notes(*first, "--quantization", "4bit") == []


def test_advice_for_fsdp1_writes_a_file_that_explain_reads_as_fsdp1(tmp_path: Path, capsys: Any) -> None:
    model = "layers=40,hidden=5120,heads=40,vocabulary=32000,inner=13824"
    command = ["advise", model, "--hardware", "2xRTX3090", "--peft", "lora", "--global_batch_size", "2"]
    assert main([*command, "--fsdp_version", "1", "--output", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommended"] == "fsdp2"
    best = document["strategies"][0]
    words = ["explain", document["files"]["accelerate"], model, "--peft", "lora", "--hardware", "2xRTX3090", "--json"]
    words += ["--gradient_checkpointing"] * best["gradient_checkpointing"]
    assert main(words) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["memory"]["peak_allocated"]["value"] == pytest.approx(
        sum(size for name, size in best["device_parts"].items() if name not in ("context", "fragmentation"))
    )
    # The command for study predict repeats the version.
    assert main([*command, "--fsdp_version", "1"]) == 0
    assert "--fsdp_version 1" in capsys.readouterr().out


SIZES = {
    "vocab_size": 3000,
    "hidden_size": 256,
    "n_embd": 256,
    "intermediate_size": 704,
    "n_inner": 704,
    "n_positions": 512,
    "num_attention_heads": 8,
    "n_head": 8,
    "num_heads": 8,
    "n_layer": 4,
    "num_layers": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "rotary_dim": 32,
}


def test_the_default_targets_are_those_defaults() -> None:
    defaults = {
        name: tuple(names)
        for name, names in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.items()
        if not isinstance(names, str)
    }
    assert defaults == DEFAULT_TARGETS


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        *((name, DEFAULT_TARGETS[name]) for name in ("bert", "gpt2", "gpt_neo", "gptj", "gpt_neox", "llama", "qwen3")),
        ("gpt2", ("c_proj",)),
        ("gpt2", ("attn.c_proj",)),
        ("bert", ("dense",)),
        ("bert", ("output.dense",)),
        ("llama", ("self_attn.o_proj", "down_proj")),
    ],
)
def test_targets_have_the_adapters_that_peft_makes(model_type: str, targets: tuple[str, ...]) -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 32} if model_type == "qwen3" else SIZES
    shape = with_adapters(shape_of_architecture(model_type, model_type, sizes), 4, targets)
    request = Request(shape, read_strategy("single"), to_box("1xH100"), 64, 1, 1, "fp32", False, "eager")
    with torch.device("meta"):
        model = build_meta_model(request)
    tensors = [(tensor.numel(), tensor.shape[0], tensor.requires_grad) for tensor in model.parameters()]
    assert [(param.elements, param.rows, param.trained) for param in shape.params] == tensors
    assert any(param.trained for param in shape.params)


def with_copies(model_type: str, saved: tuple[str, ...], *, tied: bool = False) -> ModelShape:
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": tied}
    if model_type in ("gpt2", "gpt_neox"):
        sizes = {**SIZES, "tie_word_embeddings": tied}
    shape = shape_of_architecture(model_type, model_type, sizes)
    return with_adapters(shape, 8, DEFAULT_TARGETS[model_type], saved)


EMBEDDING_AND_HEAD = ("embed_tokens", "lm_head")


@pytest.mark.parametrize(
    ("model_type", "saved", "tied"),
    [
        *(
            ("llama", saved, tied)
            for saved in (("embed_tokens",), ("lm_head",), EMBEDDING_AND_HEAD)
            for tied in (False, True)
        ),
        ("gpt2", ("wte", "lm_head"), True),
        ("gpt_neox", ("embed_in", "lm_head"), False),
    ],
)
def test_a_copy_of_a_saved_module_is_trained_next_to_its_frozen_original(
    model_type: str, saved: tuple[str, ...], tied: bool
) -> None:
    shape = with_copies(model_type, saved, tied=tied)
    request = Request(shape, read_strategy("single"), to_box("1xH100"), 64, 1, 1, "fp32", False, "eager")
    with torch.device("meta"):
        model = build_meta_model(request)
    tensors = [(tensor.numel(), tensor.shape[0], tensor.requires_grad) for tensor in model.parameters()]
    assert [(param.elements, param.rows, param.trained) for param in shape.params] == tensors
    plain = with_copies(model_type, (), tied=tied)
    assert shape.trained_parameters - plain.trained_parameters == len(saved) * plain.embedding.elements
    # Stage 3 gathers the copies, of a tied embedding also the frozen weight if the output layer has no copy.
    called = {param.name for call in shape.module_calls()[0].flat() for param in call.params}
    copies = {param.name for param in shape.params if ".modules_to_save" in param.name}
    assert copies <= called
    is_read = not set(saved) & {"embed_tokens", "wte", "embed_in"} or (tied and "lm_head" not in saved)
    assert (shape.params[0].name in called) == is_read


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("saved", [("embed_tokens",), ("lm_head",), EMBEDDING_AND_HEAD])
def test_activations_with_saved_modules_are_those_of_the_traced_code(model_type: str, saved: tuple[str, ...]) -> None:
    saved = tuple("wte" if name == "embed_tokens" and model_type == "gpt2" else name for name in saved)
    shape = with_copies(model_type, saved, tied=model_type != "llama")
    cases = (("fp32", "sdpa"), ("bf16-engine", "sdpa"), ("bf16", "eager"))
    for (precision, attention), checkpointing in itertools.product(cases, (False, True)):
        request = Request(
            shape,
            read_strategy("single"),
            to_box("1xH100"),
            512,
            4,
            1,
            precision,  # type: ignore[arg-type]
            checkpointing,
            attention,  # type: ignore[arg-type]
        )
        trace, estimate = trace_activations(request), predict_activations(request)
        points = [point.total for point in device_snapshots(request) if not point.step]
        stored = points[0] - estimate.logits_forward - (estimate.cast_cached * 4 if checkpointing else 0)
        within = 0.035 if precision == "bf16" else 0.005
        assert stored == pytest.approx(trace.saved_bytes, rel=within), request
        assert max(points) == pytest.approx(trace.backward_peak, rel=within), request


def test_a_trained_output_layer_has_a_weight_gradient_of_its_own() -> None:
    def steps(saved: tuple[str, ...]) -> tuple[int, float]:
        shape = with_copies("llama", saved)
        request = Request(
            shape, read_strategy("ddp"), to_box("1xH100"), 512, 4, 1, "bf16-engine", False, "sdpa", loss_kernel="liger"
        )
        return model_flops(request), passes_s(request, FITTED)[1]

    (flops, backward), (same, _), (more, longer) = (steps(saved) for saved in ((), ("embed_tokens",), ("lm_head",)))
    assert same == flops
    assert more - flops == 2 * 4 * 512 * SIZES["vocab_size"] * SIZES["hidden_size"]
    assert longer > backward


def test_copies_of_modules_have_the_type_of_16_bit_weights_and_adapters_fp32() -> None:
    shape = with_copies("llama", EMBEDDING_AND_HEAD)
    request = Request(shape, read_strategy("ddp"), to_box("2xH100"), 64, 1, 1, "bf16-engine", False, "sdpa", pure=True)
    config = LlamaConfig(**json.loads(shape.document))
    settings = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=list(EMBEDDING_AND_HEAD))
    model = get_peft_model(transformers.LlamaForCausalLM(config).to(torch.bfloat16), settings)
    sizes = [(param.numel() * param.element_size(), param.requires_grad) for param in model.parameters()]
    assert [(param.elements * request.bytes_per_weight(param), param.trained) for param in shape.params] == sizes
    state = predict_state(request)
    trained = sum(size for size, is_trained in sizes if is_trained)
    assert state.params_device == pytest.approx(sum(size for size, _ in sizes), abs=1)
    assert state.grads_device == pytest.approx(trained, abs=1)
    assert predict_payload(request)["all_reduce"] == pytest.approx(trained, abs=1)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp2", "zero3_cpu"])
def test_every_engine_shards_a_copy_like_any_trained_weight(strategy: str) -> None:
    def state(saved: tuple[str, ...]) -> State:
        box, shape = to_box("4xH100"), with_copies("llama", saved)
        return predict_state(Request(shape, read_strategy(strategy), box, 64, 1, 1, "bf16-engine", False, "sdpa"))

    plain, copied = state(()), state(("lm_head",))
    size = SIZES["vocab_size"] * SIZES["hidden_size"]
    optimizer = copied.optimizer_device + copied.optimizer_host - plain.optimizer_device - plain.optimizer_host
    assert optimizer == pytest.approx(12 * size / 4, abs=64)
    weights = copied.params_device + copied.params_host - plain.params_device - plain.params_host
    shards = 1 if strategy in ("zero1", "zero2") else 4
    assert weights == pytest.approx(2 * size / shards, abs=64)


def test_the_flag_for_saved_modules_names_what_it_takes(capsys: Any) -> None:
    command = ["predict", "llama-3.1-8b", "--strategy", "zero3", "--hardware", "8xH100", "--peft", "lora"]
    assert main([*command, "--lora_modules_to_save", "embed_tokens,lm_head", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lora_modules_to_save"] == ["embed_tokens", "lm_head"]
    assert document["trained_parameters"] > 2 * 128256 * 4096
    for name, says in (("wte", "has no module 'wte'"), ("norm", "a trained copy of 'norm' is not predicted")):
        assert main([*command, "--lora_modules_to_save", name]) == 2
        assert says in (error := capsys.readouterr().err)
        assert "copies of embed_tokens and lm_head are" in error


def test_a_traced_class_has_copies_too() -> None:
    config = Phi3Config(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=500, pad_token_id=0)
    plain = live_shape("phi3", {**config.to_dict(), "architectures": ["Phi3ForCausalLM"]})
    shape = with_adapters(plain, 4, ("qkv_proj",), EMBEDDING_AND_HEAD)
    copies = [param for param in shape.params if param.trained and "modules_to_save" in param.name]
    assert [param.elements for param in copies] == 2 * [plain.embedding.elements]
    with pytest.raises(UserError, match="has no module 'wte'"):
        with_adapters(plain, 4, ("qkv_proj",), ("wte",))


@pytest.mark.parametrize(
    ("config", "architecture", "targets"),
    [
        (T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4), "T5ForConditionalGeneration", ("q", "v")),
        (WhisperConfig(), "WhisperForConditionalGeneration", ("q_proj", "v_proj")),
        (Gemma3Config(), "Gemma3ForConditionalGeneration", ("q_proj", "v_proj")),
        (Gemma3Config(), "Gemma3ForConditionalGeneration", ()),
        (LlavaConfig(), "LlavaForConditionalGeneration", ()),
        (LlamaConfig(num_hidden_layers=2), "LlamaForCausalLM", ()),
    ],
)
def test_adapters_alone_are_trained_in_a_model_that_generates(
    config: Any, architecture: str, targets: tuple[str, ...]
) -> None:
    document = {**config.to_dict(), "architectures": [architecture]}
    with torch.device("meta"):
        model = build_model(document, 4, "sdpa", dropout=False, targets=targets)
        plain = getattr(transformers, architecture)(config)
        adapted = get_peft_model(plain, LoraConfig(r=4, target_modules=list(targets) or "all-linear"))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert trained == adapted.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gemma"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_of_some_targets_and_their_dropout_are_those_of_the_traced_code(
    model_type: str, dropout: float
) -> None:
    """A frozen layer without an adapter saves nothing; with dropout each adapter saves its own input, and a mask."""
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 32} if model_type != "gpt2" else SIZES
    shape = with_adapters(shape_of_architecture(model_type, model_type, sizes), 8, DEFAULT_TARGETS[model_type])
    # On a CPU the mask is as wide as the tensor.
    box = Hardware("1", CPU_CORE, 1) if dropout else to_box("1xH100")
    cases = (("fp32", "sdpa"), ("bf16-engine", "sdpa"), ("bf16", "eager"))
    for (precision, attention), checkpointing in itertools.product(cases, (False, True)):
        request = Request(
            shape,
            read_strategy("single"),
            box,
            512,
            4,
            1,
            precision,  # type: ignore[arg-type]
            checkpointing,
            attention,  # type: ignore[arg-type]
            lora_dropout=dropout,
        )
        trace, estimate = trace_activations(request), predict_activations(request)
        points = [point.total for point in device_snapshots(request) if not point.step]
        stored = points[0] - estimate.logits_forward - (estimate.cast_cached * 4 if checkpointing else 0)
        assert stored == pytest.approx(trace.saved_bytes, rel=0.035), request
        assert max(points) == pytest.approx(trace.backward_peak, rel=0.08), request


def test_dropout_of_adapters_takes_three_bytes_an_element_on_a_gpu() -> None:
    """The tensor that the layers read is no longer saved, since no adapter reads it."""
    shape = with_adapters(model_shape("llama-3.1-8b"), 8, ("q_proj", "v_proj", "down_proj"))
    box = to_box("1xH100")
    plain, dropped = (
        predict_activations(
            Request(shape, read_strategy("single"), box, 512, 2, 1, "bf16-engine", True, "sdpa", lora_dropout=rate)
        ).layer
        for rate in (0.0, 0.05)
    )
    assert dropped - plain == 2 * 512 * ((2 * 3 - 2) * shape.hidden + (3 - 2) * shape.inner)


def test_a_wrong_target_is_refused_with_those_of_the_model_and_the_default_is_peft_s(
    tmp_path: Path, capsys: Any
) -> None:
    command = ["predict", "gpt2", "--strategy", "ddp", "--hardware", "2xA100", "--peft", "lora"]
    assert main([*command, "--lora_targets", "q_proj,v_proj"]) == 2
    refusal = capsys.readouterr().err
    assert "no layer 'q_proj'" in refusal
    assert "c_attn, c_proj, c_fc" in refusal
    trained = []
    for targets in (["c_attn"], ["all-linear"], []):
        assert main([*command, *(["--lora_targets", *targets] if targets else []), "--json"]) == 0
        trained.append(json.loads(capsys.readouterr().out)["trained_parameters"])
    assert trained[0] == trained[2] == 12 * 8 * (768 + 3 * 768) < trained[1]
    assert main([*command, "--lora_dropout", "1"]) == 2
    assert "less than 1" in capsys.readouterr().err
    assert main([*command[:-2], "--lora_targets", "c_attn"]) == 2
    assert "--peft lora" in capsys.readouterr().err
    # A class outside the table of families.
    config = {
        "model_type": "olmo2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "vocab_size": 100,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    live = ["predict", str(tmp_path), *command[2:], "--seq_length", "64"]
    assert main(live) == 2
    assert "--lora_targets all-linear" in capsys.readouterr().err
    assert main([*live, "--lora_targets", "query"]) == 2
    assert "q_proj, k_proj, v_proj, o_proj" in capsys.readouterr().err
    assert main([*live, "--lora_targets", "q_proj,v_proj", "--lora_dropout", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trained_parameters"] == 2 * 2 * 8 * (64 + 64)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_targets_match_the_modules_that_peft_matches(model_type: str) -> None:
    """A full name of layer 0 gave adapters to all layers, and any text before a module's name was accepted."""
    shape = shape_of_architecture(model_type, model_type, FAMILIES[model_type])
    request = dataclasses.replace(fsdp1(1, 64), shape=shape, attention="eager")
    with torch.device("meta"):
        modules = dict(build_meta_model(request).named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear | Conv1D)]
    paths = list(dict.fromkeys(shape.module_path(param) for param in shape.params if can_adapt(shape, param)))
    assert sorted(paths) == sorted({*linear} - {"lm_head", "embed_out", "classifier"})
    assert {*shape.outside_modules} <= modules.keys() | {"embed_out"}
    # The end of a name, all full names of a module, and a regular expression.
    first = next(path for path in paths if ".0." in path)
    end, pattern = first.partition(".0.")[2], first.replace(".", r"\.").replace(r"\.0\.", r"\.\d+\.")
    full_names = tuple(first.replace(".0.", f".{layer}.") for layer in range(shape.layers))
    for targets in ((end,), (end.rpartition(".")[2],), full_names, (pattern,), (rf".*\.{end.rpartition('.')[2]}",)):
        adapted = with_adapters(shape, 4, targets)
        matrices = [param for param in adapted.params if ".lora_A" in param.name]
        matched = {shape.module_path(dataclasses.replace(it, name=it.name.replace(".lora_A", ""))) for it in matrices}
        given = peft_targets(targets)
        config = LoraConfig(target_modules=given if isinstance(given, str) else list(given))
        assert matched == {name for name in linear if check_target_module_exists(config, name)}
        with torch.device("meta"):
            model = build_meta_model(dataclasses.replace(request, shape=adapted))
        assert sum(it.numel() for it in model.parameters() if it.requires_grad) == adapted.trained_parameters
    with pytest.raises(UserError, match=rf"of 1 of {shape.layers} layers, which is not predicted"):
        with_adapters(shape, 4, (first,))
    with pytest.raises(UserError, match="has no layer"):
        with_adapters(shape, 4, (f"other.{end}",))


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (".*", "matches model.layers.0.self_attn, which is not a linear layer: peft ends with an error"),
        (r".*\.(q_proj|lm_head)|lm_head", "matches lm_head, whose adapters are not predicted"),
        (r".*layers\.[01]\..*q_proj", "--lora_targets has q_proj of 2 of 32 layers"),
        (r"layers\.\d+\.self_attn\.q_proj", "has no layer"),
        ("(q_proj", "is not a regular expression"),
        ("lm_head", "has no layer 'lm_head'"),
    ],
)
def test_targets_that_are_not_predicted_are_refused_in_one_line(targets: str, says: str, capsys: Any) -> None:
    command = ["predict", "llama-3.1-8b", "--strategy", "ddp", "--hardware", "2xA100", "--peft", "lora"]
    assert main([*command, "--lora_targets", targets]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_scales_of_4_bit_weights_take_half_a_bit_and_an_eighth_if_they_are_quantized_too(capsys: Any) -> None:
    shape = with_adapters(model_shape("llama-3.1-8b"), 8)
    request = Request(
        shape,
        read_strategy("fsdp2"),
        to_box("8xH100"),
        512,
        1,
        1,
        "bf16-engine",
        True,
        "sdpa",
        pure=True,
        quantized=True,
    )
    # An equal shape that was asked for before has its own parameters.
    copied = dataclasses.replace(shape, params=tuple(dataclasses.replace(param) for param in shape.params))
    assert predict_memory(dataclasses.replace(request, shape=copied, micro_batch=2)).device_parts["parameters"] > 0
    packed = [param for param, stored in zip(shape.params, request.stored.params, strict=True) if param != stored]
    weights = sum(param.elements for param in packed)
    sizes = [
        predict_memory(dataclasses.replace(request, double_quantized=is_so)).device_parts["parameters"]
        for is_so in (False, True)
    ]
    assert (sizes[0] - sizes[1]) * 8 / weights == pytest.approx(0.5 - 0.127, abs=1e-4)
    # All matrices of layers are packed, and neither the embedding nor the output layer nor an adapter.
    matrices = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    assert weights == matrices
    command = ["predict", "llama-3.1-8b", "--strategy", "ddp", "--hardware", "2xA100", "--peft", "lora"]
    assert main([*command, "--double_quant"]) == 2
    assert "--quantization 4bit" in capsys.readouterr().err
    assert main([*command, "--double_quant", "--quantization", "4bit"]) == 0


def qlora_of_70b(**changed: Any) -> Request:
    """Llama 3 70B on four GPUs of 24 GB, as philschmid.de trains it under FSDP1 with offload in transformers 4.40."""
    return Request(
        shape=with_adapters(model_shape("llama-3-70b"), 8, ()),
        strategy=read_strategy("fsdp2"),
        box=to_box("4xA10G"),
        sequence_length=3072,
        micro_batch=1,
        accumulation=1,
        precision="bf16",
        gradient_checkpointing=True,
        attention="sdpa",
        autocast=False,
        fsdp_version=1,
        fsdp_offloads=True,
        quantized=True,
        double_quantized=True,
        **changed,
    )


def test_4_bit_weights_are_loaded_whole_on_each_gpu_or_in_the_host_memory_of_each_process() -> None:
    on_device, on_host = (qlora_of_70b(quantized_on_host=is_so) for is_so in (False, True))
    shape, stored = on_host.shape, on_host.stored
    pairs = zip(shape.params, stored.params, strict=True)
    packed = sum(param.elements for param, in_4_bits in pairs if param != in_4_bits)
    model = packed / 2 + 2 * (shape.parameters - packed) + packed / 64 * (1 + 4 / 256)
    memory = predict_memory(on_device)
    context = memory.device_parts["context"]
    assert memory.loading - context == pytest.approx(model)
    assert predict_memory(on_host).loading == 0
    # Each process reads one tensor after another.
    process = libraries_bytes(has_deepspeed=False, before_steps=True) + 2 * shape.largest + model
    assert predict_memory(on_host).host_parts["load"] == pytest.approx(4 * process)
    assert memory.host_parts["load"] < memory.host_parts["train"] < 50 * GIB
    # The page has 127 GB of host memory; transformers 4.40 keeps the packed matrices alone on the host.
    assert 4 * packed / 2 / GIB == pytest.approx(127, rel=0.01)
    # DeepSpeed moves the model to each GPU before stage 3 shards it; replicas have no less in training.
    for name, loading in (("zero3", model + context), ("zero3_cpu", model + context), ("zero2", 0.0), ("ddp", 0.0)):
        strategy = read_strategy(name)
        request = dataclasses.replace(on_host, strategy=strategy, precision="bf16-engine", fsdp_offloads=False)
        assert predict_memory(request).loading == pytest.approx(loading), name


def test_processes_of_a_node_share_the_pages_of_16_bit_weights_that_they_load() -> None:
    """They are views of the file; fp32 weights are copies."""
    shape = with_adapters(model_shape("llama-3.1-8b"), 8)
    for name in ("fsdp2", "ddp"):
        request = Request(shape, read_strategy(name), to_box("4xA100"), 512, 1, 1, "bf16", True, "sdpa")
        loaded = dataclasses.replace(request, precision="bf16-engine", pure=True)
        libraries = libraries_bytes(has_deepspeed=False, before_steps=True)
        tensors = 4 * (libraries + 2 * shape.largest)
        assert predict_memory(loaded).host_parts["load"] == pytest.approx(tensors + 2 * shape.parameters)
        # With an offload a layer's shard replaces the layer.
        offloaded = dataclasses.replace(loaded, fsdp_offloads=loaded.strategy.is_fsdp)
        assert predict_memory(offloaded).host_parts["load"] == pytest.approx(tensors + 2 * shape.parameters)
        assert predict_memory(request).host_parts["load"] == pytest.approx(4 * (libraries + 4 * shape.parameters))


def test_losses_take_the_bytes_that_torch_allocates() -> None:
    tokens, vocabulary, hidden = 64, 4096, 8
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    inputs = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))

    def upcast_loss() -> torch.Tensor:
        logits = torch.nn.functional.linear(inputs, weight)[None]
        loss: torch.Tensor = ForCausalLMLoss(logits, labels[None], vocabulary)
        return loss

    def plain_loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(inputs, weight), labels)

    reference = weight.detach().clone()

    def log_probabilities(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """TRL 1.13's DPO (_compute_loss in trl/trainer/dpo_trainer.py) and selective_log_softmax, of two pairs."""
        logits = torch.nn.functional.linear(inputs, matrix).reshape(4, tokens // 4, vocabulary)
        rows = []
        for row, row_labels in zip(logits, labels.reshape(4, -1, 1), strict=True):
            probabilities = torch.nn.functional.log_softmax(row, dim=-1)
            rows.append(probabilities.gather(dim=-1, index=row_labels))
        return torch.stack(rows), logits

    def preference_loss() -> torch.Tensor:
        trained, _output = log_probabilities(weight)
        with torch.no_grad():
            frozen, _reference_output = log_probabilities(reference)
        return (trained - frozen).sum()

    def batch_logps(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """get_batch_logps of LLaMA-Factory (train/trainer_utils.py at ff6d4d12), of two pairs."""
        logits = torch.nn.functional.linear(inputs, matrix).reshape(4, tokens // 4, vocabulary).to(torch.float32)
        shifted, targets = logits[:, :-1, :], labels.reshape(4, -1, 1)[:, 1:]
        return torch.gather(shifted.log_softmax(-1), dim=2, index=targets).squeeze(2), logits

    def factory_loss() -> torch.Tensor:
        trained, _output = batch_logps(weight)
        with torch.no_grad():
            frozen, _reference_output = batch_logps(reference)
        return (trained - frozen).sum()

    losses: list[tuple[LossKernel, Callable[[], torch.Tensor]]] = [
        ("transformers", upcast_loss),
        ("same_type", plain_loss),
        ("log_softmax", preference_loss),
        ("batch_logps", factory_loss),
    ]
    for kernel, compute in losses:
        # The gradients of inputs and weights are allocated before.
        compute().backward()
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            compute().backward()
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in profile.kineto_results.events()
            if event.name() == "[memory]"
        )
        peak = max(itertools.accumulate(size for _, size in changes))
        row = logit_bytes(kernel, 2)
        assert row is not None
        predicted = (row.saved + max(row.forward, row.backward)) * tokens * vocabulary
        assert peak == pytest.approx(predicted, rel=0.05), kernel


def trl_chunk(rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """_chunk of TRL 1.13 (trl/trainer/sft_trainer.py), with the entropy that it logs."""
    logits = (rows @ weight.to(rows.dtype).t()).float()
    log_p = torch.nn.functional.log_softmax(logits, dim=-1)
    loss = torch.nn.functional.nll_loss(log_p, labels, reduction="sum")
    (-(log_p.exp() * log_p).sum(dim=-1)).sum()
    return loss


def chunked_nll(inputs: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows, loss = inputs[torch.arange(len(inputs))], torch.zeros(())
    for start in range(0, len(rows), 256):
        part, part_labels = rows[start : start + 256], labels[start : start + 256]
        loss = loss + checkpoint(trl_chunk, part, weight, part_labels, use_reentrant=False)
    return loss


class TrlHead(torch.autograd.Function):
    """ChunkedLogProbFunction of TRL 1.16 (trl/kernels/chunked_logprob.py), whose kernels fold a tile in place."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        numbers = [torch.zeros(len(rows)) for _ in range(3)]
        tile = torch.empty(min(len(rows), 4096), 32768, dtype=rows.dtype)
        torch.mm(rows, weight.t(), out=tile[:, : len(weight)])
        ctx.save_for_backward(rows, weight, *numbers)
        return numbers[0] + 1

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors[:2]
        in_fp32 = [torch.zeros(it.shape) for it in (rows, weight)]
        tile = torch.empty(min(len(rows), 4096), 32768, dtype=rows.dtype)
        torch.mm(rows, weight.t(), out=tile[:, : len(weight)])
        return tuple(it.to(rows.dtype) for it in in_fp32)


def trl_head(inputs: torch.Tensor, weight: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    applied: torch.Tensor = TrlHead.apply(inputs[torch.arange(len(inputs))], weight)
    return applied.sum()


@pytest.mark.parametrize(
    ("kernel", "compute", "vocabulary", "hidden"),
    [
        # Mostly logits, and mostly the matrix and the input.
        ("chunked_nll", chunked_nll, 4096, 8),
        ("chunked_nll", chunked_nll, 64, 2048),
        ("trl", trl_head, 4096, 8),
        ("trl", trl_head, 4096, 2048),
    ],
)
def test_losses_of_trl_without_logits_take_what_torch_allocates(
    kernel: LossKernel, compute: Callable[..., torch.Tensor], vocabulary: int, hidden: int
) -> None:
    # Four chunks.
    tokens = 1024
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    inputs = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    compute(inputs, weight, labels).backward()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        compute(inputs, weight, labels).backward()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.name() == "[memory]"
    )
    row = bytes_without_logits(kernel, Head(tokens, hidden, vocabulary, 2, 2, is_trained=True))
    peak = max(itertools.accumulate(size for _, size in changes))
    assert peak == pytest.approx(row.saved + max(row.forward, row.backward), rel=0.08)


def test_a_loss_is_named_and_the_older_flags_are_two_of_the_names(capsys: Any) -> None:
    command = ["predict", "llama-3.1-8b", "--strategy", "ddp", "--hardware", "2xA100-80", "--seq_length", "8192"]
    command += ["--peft", "lora", "--gradient_checkpointing"]

    def peak(*flags: str) -> float:
        assert main([*command, *flags, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["device_bytes"])

    assert peak("--loss_kernel", "liger") == peak("--chunked_loss")
    assert peak("--loss_kernel", "unsloth") == peak("--loss_kernel", "flash")
    order = ["cut", "liger", "chunked_nll", "flash", "same_type", "log_softmax", "fast", "transformers", "batch_logps"]
    peaks = [peak("--loss_kernel", name) for name in order]
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[-2] > peaks[-3] > peaks[1]
    assert main([*command, "--chunked_loss", "--loss_kernel", "cut"]) == 2
    assert "leave one of them out" in capsys.readouterr().err
    assert main(["advise", *command[1:2], "--hardware", "2xA100-80", "--loss_kernel", "fast"]) == 0
    page = capsys.readouterr().out
    assert "loss: fast" in page
    assert "--loss_kernel fast" in page


def test_published_adapters_have_the_predicted_peaks_and_count_in_intervals_of_their_own_alone() -> None:
    rows = published_rows()
    frame = report.scores_frame(rows)
    adapted = prediction_intervals.by_origin(frame)[prediction_intervals.ADAPTERS]
    # Rows of other projects were read when these rules stood.
    adapted, unseen = (adapted[adapted["source"].str.startswith("fms-") == is_fms] for is_fms in (True, False))
    assert adapted["source"].value_counts().to_dict() == {"fms-qlora": 29, "fms-lora": 16}
    assert len(unseen) == 71
    assert set(unseen["use"]) == {"score"}
    assert (unseen["use_memory"] == "fit").sum() == 3
    assert unseen["peak_error"].abs().median() < 0.07
    assert adapted["peak_error"].abs().max() < 0.09
    assert (adapted["peak_error"].abs() < 0.02).sum() > len(adapted) / 2
    # A row's address names its line.
    assert adapted["url"].str.contains(r"#L\d+$").all()
    assert adapted["url"].is_unique
    assert not any(row.request.shape.lora_rank for row in fit.fit_rows())
    both, without = (
        yaml.safe_load(prediction_intervals.intervals_text(rows)) for rows in (frame, frame[~frame["adapters"]])
    )
    assert both.pop("adapters_above_state")["rows"] == unseen.query("use_memory == 'score'")["peak_gib"].count()
    extremes = both["too_few_pages"].pop("adapters_step_s")
    # Of some devices the only published steps are of adapters.
    assert {*both.pop("timed_devices")} > {*without.pop("timed_devices")}
    assert both == without
    assert extremes["low"] < 1 < extremes["high"]
    # Their excess led to the rules of memory and of the adapters' operators.
    assert set(adapted["use_memory"]) == {"fit"}
    assert set(adapted["use"]) == {"rule"}
    kinds = report.kinds_table(frame).set_index(["kind", "figure"])
    peaks, steps = (kinds.xs(figure, level="figure") for figure in ("peak memory", "step time"))
    assert (peaks["held out"] == "yes").all()
    sharded = unseen[unseen["name"].str.contains("QLoRA") & (unseen["strategy"] == "fsdp2")]
    assert peaks.loc["QLoRA, FSDP", "rows"] == sharded["peak_error"].notna().sum()
    assert steps.loc["QLoRA, torch", "held out"] == "yes"
    held_out = peaks[peaks.index.str.startswith("full")]
    assert held_out.index.tolist() == [
        "full training, torch",
        "full training, FSDP",
        "full training, DeepSpeed",
        "full training, DeepSpeed with offload",
    ]
    # The same rows as in the benchmark, whose figures the README has.
    assert peaks["rows"].head(4).tolist() == [40, 66, 22, 11]
    plain = frame[~frame["adapters"]]
    assert held_out["rows"].sum() == (plain["peak_error"].notna() & (plain["use_memory"] == "score")).sum()
    assert steps[steps.index.str.startswith("full")].index.tolist() == held_out.index.tolist()
    # On one GPU their times are within 6 %, unless the page computes in fp32 next to its 4-bit layers.
    lora = adapted[~adapted["name"].str.contains("QLoRA") & (adapted["strategy"] == "single")]
    assert lora["step_error"].abs().max() < 0.06
    # The peaks of 30 runs are there by torch's allocator and by nvidia-smi, and Lambda's as allocated and as reserved.
    twice = frame["source"].str.endswith("-nvidia-smi").sum()
    assert report.measured_peaks(frame) == {"peaks": held_out["rows"].sum(), "runs": held_out["rows"].sum() - twice - 1}
    assert twice == 30
    assert (
        report.fits(frame).set_index("rows").loc["published", "of those that ran out, called"]
        == "24 of 31 (59% to 90%)"
    )


def test_a_request_with_adapters_is_near_published_runs_with_adapters() -> None:
    shape = with_adapters(model_shape("mistral-7b"), 8, ("q_proj", "v_proj"))
    request = Request(
        shape,
        read_strategy("single"),
        to_box("A100-80"),
        4096,
        4,
        1,
        "bf16-engine",
        True,
        "flash_attention_2",
        pure=True,
    )
    lines = list(describe_nearest(request))
    assert len([line for line in lines if line.startswith("similar measurement") and "LoRA" in line]) == 3
    plain = dataclasses.replace(request, shape=model_shape("mistral-7b"))
    assert not any("LoRA" in line for line in describe_nearest(plain))


def test_records_of_a_gpu_and_of_processes_without_one_are_named_apart() -> None:
    box, strategy = to_box("4xA100"), read_strategy("zero2")
    request = Request(model_shape("gpt2-xl"), strategy, box, 1024, 1, 1, "bf16", False, "sdpa")
    records = [line for line in describe_nearest(request) if line.startswith("similar record")]
    gpu_lines = [line for line in records if ", a GPU: " in line]
    cpu_lines = [line for line in records if ", processes without a GPU: " in line]
    assert len(records) == 3
    assert len(gpu_lines) == len(cpu_lines) == 1
    assert gpu_lines[0].endswith("(reports/gpu)")
    assert "s per step" in gpu_lines[0]
    assert "(reports/gpu)" not in cpu_lines[0]
