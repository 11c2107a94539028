"""Activation memory traced on transformers' code, by one forward and backward pass over fake tensors without data.

The only module of predictions that imports torch, imported on request. It counts every storage that the dispatcher
allocates, from its creation to its release, without the weights. Dropout is off, and fused attention is torch's without
a mask, as on a GPU. For hardware with GPUs the operations that CUDA's autocast computes in fp32 are in fp32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from typing import Any

import torch
import transformers
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from study.predictor.activations import is_fused
from study.predictor.live import LiveShape
from study.predictor.request import Request
from study.predictor.shape import ModelShape


@dataclasses.dataclass(frozen=True)
class TracedActivations:
    """Traced activation bytes of one micro-batch, without weights."""

    # Saved for the backward pass at the end of the forward pass, including logits.
    saved_bytes: int
    forward_peak: int
    # Includes gradients in the weights' type, as on one device without an engine.
    backward_peak: int


def trace_activations(request: Request) -> TracedActivations:
    """Trace the activation memory of a request's model."""
    from study.predictor import live_trace

    with live_trace.fake_tensors(torch.bfloat16 if request.precision.endswith("-engine") else torch.float32):
        model = build_meta_model(request)
        inputs, pixels = live_trace.make_inputs(model, request.micro_batch, request.sequence_length)
        tensors = [value for value in (*inputs.values(), pixels) if isinstance(value, torch.Tensor)]
        live = LiveBytes([*model.parameters(), *model.buffers(), *tensors])
        autocasts = request.precision in ("bf16", "fp16")
        as_cuda = AsCuda() if autocasts and not request.box.is_cpu_only else contextlib.nullcontext()
        if request.gradient_checkpointing:
            # Recomputation enters the mode again, since a mode has no effect inside the backward pass.
            checkpointing = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), as_cuda)}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        with live, torch.autocast("cpu", torch.bfloat16, enabled=autocasts), as_cuda:
            loss = live_trace.compute_loss(model, inputs, live_trace.compute_features(model, pixels))
        saved, forward_peak, live.peak = live.now, live.peak, live.now
        with live:
            loss.backward()
        return TracedActivations(saved, forward_peak, live.peak)


def build_meta_model(request: Request) -> Any:
    """Create transformers' model of a request, with its adapters and without dropout."""
    # It imports this module.
    from study.predictor import live_trace

    shape = request.shape
    attention = live_trace.register_fused() if is_fused(request) else "eager"
    if isinstance(shape, LiveShape):
        return live_trace.build_model(json.loads(shape.document), shape.lora_rank, attention, dropout=False)
    settings = transformers.AutoConfig.for_model(
        shape.model_type, attn_implementation=attention, **_architecture(shape, request.sequence_length)
    )
    settings.use_cache = False
    for name in vars(settings).keys() & {
        "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    }:  # fmt: skip
        setattr(settings, name, 0.0)
    if shape.family == "causal-lm":
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    else:
        kind = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(settings)]
    model = kind(settings).train()
    if shape.lora_rank is not None:
        live_trace.add_fake_adapters(model, shape.lora_rank, shape.family == "causal-lm")
    return model


def _architecture(shape: ModelShape, length: int) -> dict[str, Any]:
    """Return the config keys of transformers for a shape."""
    rows = {param.name: param.rows for param in shape.params}
    positions = max(length, rows.get("wpe.weight", 0), rows.get("position_embeddings.weight", 0))
    keys: dict[str, Any] = {"vocab_size": shape.vocabulary, "bos_token_id": None, "eos_token_id": None}
    if shape.model_type in ("gpt2", "gptj"):
        keys |= {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": shape.heads, "n_inner": shape.inner}
        keys |= {"n_positions": positions, "rotary_dim": min(64, shape.head_dim)}
    else:
        layers, heads = ("num_layers", "num_heads") if shape.model_type == "gpt_neo" else (
            "num_hidden_layers", "num_attention_heads",
        )  # fmt: skip
        keys |= {"hidden_size": shape.hidden, "intermediate_size": shape.inner, "max_position_embeddings": positions}
        keys |= {layers: shape.layers, heads: shape.heads, "num_key_value_heads": shape.key_value_heads}
        keys |= {"head_dim": shape.head_dim, "attention_types": [[["global"], shape.layers]], "pad_token_id": 0}
    return keys | {"tie_word_embeddings": shape.tied or shape.model_type == "bert"}


# Operations of AT_FORALL_FP32 in aten/src/ATen/autocast_mode.h that these models call.
_IN_FP32 = {
    functional.layer_norm, functional.softmax, functional.log_softmax, functional.cross_entropy, torch.softmax,
    torch.pow, torch.rsqrt, torch.sum, torch.Tensor.softmax, torch.Tensor.pow, torch.Tensor.__pow__,
    torch.Tensor.rsqrt, torch.Tensor.sum,
}  # fmt: skip


class AsCuda(TorchFunctionMode):
    """Runs the operations that CUDA's autocast computes in fp32 in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

        kwargs = kwargs or {}
        if func in _IN_FP32:
            args, kwargs = tuple(map(widened, args)), {name: widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages except those of `outside`."""

    def __init__(self, outside: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}
        for tensor in outside:
            self.see(tensor)
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self.known:
            return

        def release(_: Any) -> None:
            self.now -= size
            self.known.pop(key, None)

        self.known[key] = weakref.ref(storage, release)
        self.now += size
        self.peak = max(self.peak, self.now)
