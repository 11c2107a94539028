"""DoRA: its magnitudes, what its norms and outputs take, and the flag and keys that set it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import LlamaConfig, Phi3Config

from engines import ROOT
from study.cli import main
from study.config.strategies import read_strategy
from study.predictor.adapters import dora_saved, dora_saved_weights, dora_temporaries
from study.predictor.communication import predict_payload
from study.predictor.hardware import CPU_CORE, Hardware, to_box
from study.predictor.live import live_shape
from study.predictor.live_trace import Meter
from study.predictor.lora_targets import DEFAULT_TARGETS
from study.predictor.memory import device_snapshots, predict_memory
from study.predictor.micro_batch import predict_activations
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.shape import ModelShape, with_adapters
from study.predictor.state import predict_state
from study.predictor.table_shape import shape_of_architecture
from study.predictor.traced_request import build_meta_model, trace_activations
from tools.architectures import measure_peak
from unit.test_adapters import SIZES

ZERO2 = str(ROOT / "accelerate_configs" / "zero2.yaml")
IN, OUT, RANK = 512, 768, 4
# Weights and adapters of a layer, and autocast, by the settings of a request.
KINDS: dict[str, tuple[torch.dtype, bool, bool, dict[str, Any]]] = {
    "fp32": (torch.float32, True, False, {"precision": "fp32"}),
    "autocast": (torch.float32, True, True, {"precision": "bf16"}),
    "16-bit weights": (torch.bfloat16, True, True, {"pure": True}),
    "16-bit weights without autocast": (torch.bfloat16, True, False, {"pure": True, "autocast": False}),
    "16 bits": (torch.bfloat16, False, False, {}),
}


def dora_shape(model_type: str, targets: tuple[str, ...]) -> ModelShape:
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 32} if model_type in ("llama", "qwen3", "gemma") else SIZES
    return with_adapters(shape_of_architecture(model_type, model_type, sizes), 8, targets, dora=True)


def make_request(shape: ModelShape, tokens: int = 64, **changed: Any) -> Request:
    request = Request(shape, read_strategy("single"), to_box("1xH100"), tokens, 4, 1, "bf16-engine", False, "sdpa")
    return dataclasses.replace(request, **changed)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "qwen3"])
@pytest.mark.parametrize("is_everywhere", [False, True])
def test_each_adapter_has_a_magnitude_of_every_output(model_type: str, is_everywhere: bool) -> None:
    shape = dora_shape(model_type, () if is_everywhere else DEFAULT_TARGETS[model_type])
    with torch.device("meta"):
        model = build_meta_model(make_request(shape, precision="fp32"))
    tensors = [(tensor.numel(), tensor.shape[0], tensor.requires_grad) for tensor in model.parameters()]
    assert [(param.elements, param.rows, param.trained) for param in shape.params] == tensors


def test_magnitudes_have_the_type_of_the_adapters() -> None:
    shape = dora_shape("llama", ("q_proj", "v_proj"))
    request = make_request(shape, strategy=read_strategy("ddp"), box=to_box("2xH100"), pure=True)
    model = transformers.LlamaForCausalLM(LlamaConfig(**json.loads(shape.document))).to(torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_dora=True))
    sizes = [(param.numel() * param.element_size(), param.requires_grad) for param in model.parameters()]
    assert [(param.elements * request.bytes_per_weight(param), param.trained) for param in shape.params] == sizes
    trained = sum(size for size, is_trained in sizes if is_trained)
    state = predict_state(request)
    assert state.grads_device == pytest.approx(trained, abs=1)
    assert predict_payload(request)["all_reduce"] == pytest.approx(trained, abs=1)
    assert state.optimizer_device == pytest.approx(2 * trained, abs=8 * len(shape.trained_params))


def dora_layer(weights: torch.dtype, *, fp32_adapters: bool, dropout: float) -> Any:
    torch.manual_seed(0)
    layer: Any = torch.nn.Sequential()
    layer.add_module("up_proj", torch.nn.Linear(IN, OUT, bias=False, dtype=weights))
    layer.requires_grad_(requires_grad=False)
    config = peft.LoraConfig(r=RANK, target_modules=["up_proj"], use_dora=True, lora_dropout=dropout)
    return peft.get_peft_model(layer, config, autocast_adapter_dtype=fp32_adapters)


def layer_shape() -> ModelShape:
    text = f"layers=1,hidden={IN},heads=8,vocabulary=64,inner={OUT},key_value_heads=8"
    return with_adapters(model_shape(text), RANK, ("up_proj",), dora=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_norm_of_a_weight_takes_what_peft_s_module_takes(kind: str, dropout: float) -> None:
    weights, fp32_adapters, autocasts, changes = KINDS[kind]
    tokens = 16
    request = make_request(layer_shape(), tokens, micro_batch=1, lora_dropout=dropout, **changes)
    layer = dora_layer(weights, fp32_adapters=fp32_adapters, dropout=dropout)
    leaf = torch.randn(tokens, IN, dtype=weights, requires_grad=True)
    meter = Meter([*layer.parameters(), *layer.buffers(), leaf])
    with meter, torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        output = layer(leaf)
    # Of fp32 weights autocast's copy for the layer itself stays, too; and inputs and outputs are few.
    cast = 2 * IN * OUT * (autocasts and weights == torch.float32)
    assert meter.peak - cast == pytest.approx(dora_temporaries(request), rel=0.03)
    saved_bytes = tokens * sum(dora_saved(request).values()) + dora_saved_weights(request)
    small = 10 * 4 * tokens * IN
    assert saved_bytes <= meter.now - cast - output.nbytes <= saved_bytes + small
    # A copy of the weight is kept with dropout alone.
    has_copy = dropout > 0 and kind not in ("fp32", "16 bits")
    assert bool(dora_saved_weights(request)) == has_copy


@pytest.mark.parametrize(
    ("model_type", "targets", "dropout"),
    [
        ("llama", (), 0.0),
        ("llama", ("q_proj", "v_proj"), 0.0),
        ("llama", ("q_proj", "v_proj"), 0.1),
        ("gpt2", ("c_attn",), 0.0),
        ("gemma", (), 0.0),
    ],
)
def test_activations_with_dora_are_those_of_the_traced_code(
    model_type: str, targets: tuple[str, ...], dropout: float
) -> None:
    # On a CPU the mask of dropout is as wide as the tensor.
    box = Hardware("1", CPU_CORE, 1) if dropout else to_box("1xH100")
    for precision in ("fp32", "bf16-engine"):
        for checkpointing in (False, True):
            request = make_request(
                dora_shape(model_type, targets),
                512,
                box=box,
                precision=precision,
                gradient_checkpointing=checkpointing,
                lora_dropout=dropout,
            )
            trace, estimate = trace_activations(request), predict_activations(request)
            points = [point.total for point in device_snapshots(request) if not point.step]
            assert points[0] - estimate.logits_forward == pytest.approx(trace.saved_bytes, rel=0.025), request
            # A recomputation ends when all is saved, before the last outputs are scaled.
            most = 1.12 if checkpointing and precision == "fp32" else 1.025
            assert 0.975 <= max(points) / trace.backward_peak <= most, request


def test_the_peak_of_a_model_with_dora_is_that_of_torch() -> None:
    """Short samples, so that the norms are the peak of recomputed layers: an identity matrix as wide as the inner
    width."""
    shape = dora_shape("llama", ())
    config = LlamaConfig(**json.loads(shape.document), attn_implementation="eager", use_cache=False)
    peaks = {}
    for dora in (False, True):
        model = transformers.LlamaForCausalLM(config)
        settings = peft.LoraConfig(r=8, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        tokens = torch.arange(64)[None].repeat(4, 1)

        def step(model: Any = model, tokens: torch.Tensor = tokens) -> None:
            model.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()

        step()
        model.zero_grad()
        peaks[dora] = measure_peak(step)
    plain = with_adapters(shape_of_architecture("llama", "llama", json.loads(shape.document)), 8)
    for dora, adapted in ((False, plain), (True, shape)):
        request = make_request(adapted, 64, precision="fp32", attention="eager", gradient_checkpointing=True)
        points = [point.total - point.parts["allocator"] for point in device_snapshots(request) if not point.step]
        assert max(points) == pytest.approx(peaks[dora], rel=0.06)


def test_the_norm_of_a_quantized_weight_needs_its_copy() -> None:
    shape = with_adapters(model_shape("llama-3.1-8b"), 16, ("down_proj",), dora=True)
    request = make_request(shape, 1, micro_batch=1, pure=True, quantized=True)
    weight, identity = 14336 * 4096, 14336**2
    # Under autocast most is there when the identity matrix in fp32, its 16-bit copy and the product are; without peft's
    # fp32 adapters when the product, the dequantized weight, the scaled product and the sum are.
    assert dora_temporaries(request) == (4 + 2) * identity + 2 * weight
    in_16_bits = dataclasses.replace(request, adapters_in_16_bits=True)
    assert dora_temporaries(in_16_bits) == 2 * identity + 4 * 2 * weight
    assert dora_saved_weights(request) == 0
    assert dora_saved_weights(dataclasses.replace(request, lora_dropout=0.05)) == 2 * weight


def test_a_traced_class_has_magnitudes_and_norms_too() -> None:
    config = Phi3Config(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=500, pad_token_id=0)
    plain = live_shape("phi3", {**config.to_dict(), "architectures": ["Phi3ForCausalLM"]})
    lora, dora = (with_adapters(plain, 4, ("qkv_proj",), dora=is_dora) for is_dora in (False, True))
    assert dora.trained_parameters - lora.trained_parameters == 2 * 3 * 64
    assert sum(param.elements for param in dora.params if "magnitude" in param.name) == 2 * 3 * 64
    requests = [make_request(shape, 32, gradient_checkpointing=True) for shape in (lora, dora)]
    assert predict_activations(requests[0]).weight_norm == 0 < predict_activations(requests[1]).weight_norm
    peaks = [predict_memory(request).peak_allocated.value for request in requests]
    assert peaks[0] < peaks[1]


def test_stage_3_gathers_a_weight_for_its_norm_as_well() -> None:
    shape = dora_shape("llama", ("q_proj",))
    order = [param.name for call in shape.module_calls()[0].flat() for param in call.params if param.place == 0]
    projection = [name for name in order if name.startswith("q_proj")]
    adapters = ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]
    assert projection == ["q_proj.weight", "q_proj.lora_magnitude_vector.weight", "q_proj.weight", *adapters, *adapters]


def test_a_flag_and_the_keys_of_trainers_set_dora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    model = "layers=2,hidden=256,heads=4,vocabulary=1000,inner=512"
    flags = ["--hardware", "2xA100", "--peft", "lora", "--seq_length", "64", "--lora_rank", "8"]
    lora, dora = (ask("predict", model, "--strategy", "zero2", *flags, *more) for more in ([], ["--lora_dora"]))
    assert dora["lora_dora"]
    # Magnitudes of q_proj and v_proj.
    assert dora["trained_parameters"] - lora["trained_parameters"] == 2 * 2 * 256
    assert dora["time"]["step_s"]["value"] > lora["time"]["step_s"]["value"]
    assert any(note.startswith("DoRA: the norm of a weight takes up to") for note in dora["memory"]["notes"])
    assert main(["advise", model, *flags, "--lora_dora"]) == 0
    page = capsys.readouterr().out
    assert "DoRA of rank 8" in page
    assert "--lora_dora" in page
    batch = {"per_device_train_batch_size": 1, "learning_rate": 2e-5, "bf16": True}
    documents = {
        "axolotl": {"base_model": "gpt2", "learning_rate": 2e-5, "micro_batch_size": 1, "peft_use_dora": True}
        | {"adapter": "lora", "lora_r": 8, "lora_target_linear": True},
        "LLaMA-Factory": {"finetuning_type": "lora", "lora_rank": 8, "use_dora": True, **batch},
        "TRL": {"use_peft": True, "lora_r": 8, "use_dora": True, "dataset_name": "a/b", **batch},
    }
    for name, document in documents.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(document))
        with_dora = ask("explain", str(file), "llama-3.1-8b", "--engine", ZERO2, "--world_size", "2")
        key = "peft_use_dora" if "peft_use_dora" in document else "use_dora"
        file.write_text(json.dumps({**document, key: False}))
        without = ask("explain", str(file), "llama-3.1-8b", "--engine", ZERO2, "--world_size", "2")
        assert with_dora["trained_parameters"] > without["trained_parameters"]
        assert "DoRA of rank 8" in with_dora["read_from"][0]
        assert not any(finding["key"] == key for finding in with_dora["findings"])
    assert main(["predict", model, "--strategy", "zero2", "--hardware", "2xA100", "--lora_dora"]) == 2
    assert "--peft lora" in capsys.readouterr().err
