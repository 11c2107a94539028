"""Tensors that attention saves with dropout on a CPU, where torch has no fused kernel for it, and with a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from study.config.flags import Precision
from study.config.strategies import read_strategy
from study.predictor.activations import is_fused
from study.predictor.hardware import CPU_CORE, Hardware, to_box
from study.predictor.micro_batch import predict_activations
from study.predictor.models import shape_of_document
from study.predictor.request import Request

SAMPLES, LENGTH = 2, 64
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    "bert": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128},
}
KEYS = {"gpt2": ("attn_pdrop", "resid_pdrop"), "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob")}
LAYERS = {"gpt2": "n_layer", "bert": "num_hidden_layers"}
# Attention's dropout, and that of other outputs.
DROPOUTS = [(False, False), (True, False), (False, True), (True, True)]


def make_config(kind: str, layers: int, attention: bool, outputs: bool) -> Any:
    from transformers import AutoConfig

    first, second = KEYS[kind]
    dropout = {first: 0.1 * attention, second: 0.1 * outputs}
    return AutoConfig.for_model(kind, **SIZES[kind], **{LAYERS[kind]: layers}, **dropout, use_cache=False)


def saved_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the tensors that autograd saves in a forward pass, without the weights."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    is_classifier = config.model_type == "bert"
    auto = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    config._attn_implementation = "sdpa"
    model = auto.from_config(config).to(dtype).train()
    weights = {weight.untyped_storage()._cdata for weight in (*model.parameters(), *model.buffers())}
    sizes = dict[int, int]()
    saved = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            sizes[storage._cdata] = storage.nbytes()
            # A storage that is freed may give its address to another one.
            saved.append(storage)
        return tensor

    tokens = torch.randint(128, (SAMPLES, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens[:, 0] % 2 if is_classifier else tokens)
    return sum(sizes.values())


def make_request(config: Any, box: Hardware, precision: Precision, attention: bool, outputs: bool) -> Request:
    shape = shape_of_document(config.to_dict(), "model")
    strategy = read_strategy("single")
    request = Request(shape, strategy, box, LENGTH, SAMPLES, 1, precision, False, "sdpa", autocast=False)
    return dataclasses.replace(request, dropout=outputs, attention_dropout=attention)


@pytest.mark.parametrize(("attention", "outputs"), DROPOUTS)
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16-engine", torch.bfloat16)])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_layer_saves_on_a_cpu_what_is_predicted(
    kind: str, precision: Precision, dtype: torch.dtype, attention: bool, outputs: bool
) -> None:
    torch.manual_seed(1)
    measured = [saved_bytes(make_config(kind, layers, attention, outputs), dtype) for layers in (1, 2)]
    box = Hardware("1", CPU_CORE, 1)
    request = make_request(make_config(kind, 2, attention, outputs), box, precision, attention, outputs)
    assert is_fused(request) != attention
    # Statistics of norms are left out.
    assert measured[1] - measured[0] == pytest.approx(predict_activations(request).layer, rel=0.01)


@pytest.mark.parametrize(("kind", "tensors"), [("gpt2", 2), ("gpt_neox", -2), ("llama", 0)])
def test_a_cache_of_keys_and_values_is_counted(kind: str, tensors: int) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128}
    layers, predicted = [], []
    for is_on in (False, True):
        configs = [
            make_config("gpt2", count, False, False)
            if kind == "gpt2"
            else AutoConfig.for_model(kind, **sizes, num_hidden_layers=count)
            for count in (1, 2)
        ]
        for config in configs:
            config.use_cache = is_on
        first, second = (saved_bytes(config, torch.float32) for config in configs)
        layers.append(second - first)
        request = make_request(configs[1], Hardware("1", CPU_CORE, 1), "fp32", False, False)
        predicted.append(predict_activations(dataclasses.replace(request, uses_cache=is_on)).layer)
    tensor_bytes = 4 * SAMPLES * LENGTH * 32
    assert layers[1] - layers[0] == predicted[1] - predicted[0] == tensors * tensor_bytes
    # Recomputed layers fill none.
    recomputed = dataclasses.replace(request, uses_cache=True, gradient_checkpointing=True)
    assert predict_activations(recomputed).layer == pytest.approx(predicted[0])


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_gpu_has_a_kernel_for_attention_with_dropout(kind: str) -> None:
    config, box = make_config(kind, 2, True, True), to_box("1xH100")
    dropped, plain = (make_request(config, box, "bf16-engine", on, on) for on in (True, False))
    assert is_fused(dropped)
    # A byte an element of both outputs of a layer.
    difference = predict_activations(dropped).layer - predict_activations(plain).layer
    assert difference == 2 * SAMPLES * LENGTH * 32


def test_dropout_of_the_family_is_that_of_attention_unless_it_is_known_apart() -> None:
    config, box = make_config("gpt2", 2, True, True), Hardware("1", CPU_CORE, 1)
    request = make_request(config, box, "fp32", True, True)
    assert dataclasses.replace(request, attention_dropout=None).drops_attention
    assert not dataclasses.replace(request, attention_dropout=None, dropout=False).drops_attention
    # Llama's configs have none.
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    llama = shape_of_document({"model_type": "llama", "vocab_size": 128, **sizes}, "model")
    llama_request = dataclasses.replace(request, shape=llama, attention_dropout=None)
    assert is_fused(llama_request)
    assert not is_fused(dataclasses.replace(llama_request, attention_dropout=True))
