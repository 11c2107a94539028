"""Bytes and operators of adapters in a prediction, against those that peft runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import LlamaConfig, LlamaForCausalLM

from study.config.strategies import read_strategy
from study.predictor.adapters import LAYER_OPERATORS, adapter_operators, adapter_passes
from study.predictor.hardware import to_box
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.shape import with_adapters

TOKENS, HIDDEN, OUT, RANK = 64, 512, 128, 2
# Operators that move no bytes, and products, whose bytes are counted elsewhere.
_UNCOUNTED = {"t", "view", "_unsafe_view", "detach", "alias", "expand", "transpose", "unsqueeze", "mm", "ones_like"}
# Dropout is these four on a CPU, and one on a GPU.
_EXTRA_OF_DROPOUT = 3


class _Operators(TorchDispatchMode):
    """Records operators by name, with the bytes of their large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        tensors = [item for item in tree_flatten((args, kwargs, result))[0] if isinstance(item, torch.Tensor)]
        # The adapters' own matrices are small.
        moved = sum(item.numel() * item.element_size() for item in tensors if item.numel() > RANK * HIDDEN)
        self.seen.append((name, moved))
        return result

    def moved_bytes(self) -> int:
        return sum(moved for name, moved in self.seen if name not in _UNCOUNTED)


@contextlib.contextmanager
def _recording() -> Iterator[_Operators]:
    with _Operators() as operators:
        yield operators


def _layer_bytes(*, adapted: bool, autocast: bool, fp32_adapters: bool) -> tuple[int, int]:
    """Return the bytes of a frozen bf16 layer's operators, forward and backward."""
    torch.manual_seed(0)
    layer: Any = torch.nn.Sequential()
    layer.add_module("k_proj", torch.nn.Linear(HIDDEN, OUT, bias=False, dtype=torch.bfloat16))
    layer.requires_grad_(requires_grad=False)
    if adapted:
        config = peft.LoraConfig(r=RANK, target_modules=["k_proj"])
        layer = peft.get_peft_model(layer, config, autocast_adapter_dtype=fp32_adapters)
    leaf = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with _recording() as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(leaf)
    with _recording() as backward:
        torch.autograd.grad(output, leaf, torch.ones_like(output))
    return forward.moved_bytes(), backward.moved_bytes()


@pytest.mark.parametrize(
    ("autocast", "fp32_adapters", "changes"),
    [
        (False, True, {"pure": True, "autocast": False}),
        (True, True, {"pure": True}),
        (False, False, {}),
    ],
    ids=["fp32", "autocast", "16-bit"],
)
def test_adapters_move_the_bytes_of_peft_s_operators(
    autocast: bool, fp32_adapters: bool, changes: dict[str, Any]
) -> None:
    text = f"layers=1,hidden={HIDDEN},heads=8,vocabulary=64,inner=64,key_value_heads={OUT * 8 // HIDDEN}"
    shape = with_adapters(model_shape(text), RANK, ("k_proj",))
    strategy, box = read_strategy("single"), to_box("A100")
    plain_request = Request(shape, strategy, box, TOKENS, 1, 1, "bf16-engine", False, "sdpa")
    request = dataclasses.replace(plain_request, **changes)
    plain, adapted = (
        _layer_bytes(adapted=is_adapted, autocast=autocast, fp32_adapters=fp32_adapters) for is_adapted in (False, True)
    )
    predicted = adapter_passes(request)
    assert adapted[0] - plain[0] == predicted.forward
    assert adapted[1] - plain[1] == predicted.backward


def _adapted_operators(
    *, dora: bool, weights: torch.dtype, autocast: bool, fp32: bool
) -> tuple[_Operators, _Operators]:
    """Return the operators of a layer with an adapter, forward and backward, with the gradients of its weights."""
    torch.manual_seed(0)
    layer: Any = torch.nn.Sequential()
    layer.add_module("k_proj", torch.nn.Linear(HIDDEN, OUT, bias=False, dtype=weights))
    layer.requires_grad_(requires_grad=False)
    config = peft.LoraConfig(r=RANK, target_modules=["k_proj"], use_dora=dora)
    layer = peft.get_peft_model(layer, config, autocast_adapter_dtype=fp32)
    leaf = torch.randn(4096, HIDDEN, dtype=weights, requires_grad=True)
    with _recording() as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(leaf)
    with _recording() as backward:
        output.backward(torch.ones_like(output))
    return forward, backward


@pytest.mark.parametrize(
    ("weights", "autocast", "fp32", "changes"),
    [
        (torch.float32, False, True, {"precision": "fp32"}),
        (torch.float32, True, True, {"precision": "bf16"}),
        (torch.bfloat16, True, True, {"pure": True}),
        (torch.bfloat16, False, True, {"pure": True, "autocast": False}),
        (torch.bfloat16, False, False, {}),
    ],
    ids=["fp32", "autocast", "pure", "pure in fp32", "16-bit"],
)
def test_dora_moves_the_bytes_of_peft_s_norms_and_magnitudes(
    weights: torch.dtype, autocast: bool, fp32: bool, changes: dict[str, Any]
) -> None:
    text = f"layers=1,hidden={HIDDEN},heads=8,vocabulary=64,inner=64,key_value_heads={OUT * 8 // HIDDEN}"
    plain = with_adapters(model_shape(text), RANK, ("k_proj",))
    dora = with_adapters(model_shape(text), RANK, ("k_proj",), dora=True)
    requests = [
        dataclasses.replace(
            Request(shape, read_strategy("single"), to_box("A100"), 4096, 1, 1, "bf16-engine", False, "sdpa"), **changes
        )
        for shape in (plain, dora)
    ]
    before, after = (
        _adapted_operators(dora=is_dora, weights=weights, autocast=autocast, fp32=fp32) for is_dora in (False, True)
    )
    (forward, backward), (passes, more) = (
        [after[way].moved_bytes() - before[way].moved_bytes() for way in (0, 1)],
        [adapter_passes(request) for request in requests],
    )
    # The identity matrix is read by a product, and the product of the adapters is written by one; a view moves nothing.
    width = 4 if fp32 and not autocast else 2
    forward += width * (HIDDEN**2 + HIDDEN * OUT) - 2 * width * HIDDEN * OUT
    assert more.forward - passes.forward == forward
    assert more.backward - passes.backward == backward
    counts = [
        len([name for name, _ in run[0].seen if name == "mm" or name not in _UNCOUNTED]) for run in (before, after)
    ]
    assert counts[1] - counts[0] == adapter_operators(requests[1]) - adapter_operators(requests[0])


def _layer_operators(targets: list[str]) -> int:
    """Return the operators in the forward pass of a layer of Llama, from models of one and of two layers."""
    counts = []
    for layers in (1, 2):
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            attn_implementation="sdpa",
        )
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
        if targets:
            lora = peft.LoraConfig(r=RANK, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, lora)
        tokens = torch.arange(16)[None]
        with _recording() as operators:
            model(input_ids=tokens)
        counts.append(len([name for name, _ in operators.seen if name == "mm" or name not in _UNCOUNTED]))
    return counts[1] - counts[0]


def test_adapters_add_the_operators_that_peft_runs_to_a_layer() -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    plain, adapted = _layer_operators([]), _layer_operators(targets)
    assert plain == LAYER_OPERATORS
    shape = with_adapters(model_shape("llama-3.1-8b"), RANK, tuple(targets))
    strategy, box = read_strategy("single"), to_box("A100")
    request = Request(
        shape, strategy, box, 16, 1, 1, "bf16-engine", False, "sdpa", pure=True, autocast=False, lora_dropout=0.1
    )
    assert adapted - plain == adapter_operators(request) + _EXTRA_OF_DROPOUT * len(targets)
