"""The whole of a request's model traced on transformers' code, to compare with the count of its activations.

Imports torch, as live_trace.py does.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

import torch

from study.config.precisions import in_autocast, in_engine
from study.predictor.activations import is_fused
from study.predictor.live_trace import (
    AsCuda,
    Meter,
    build_model,
    compute_features,
    compute_loss,
    fake_tensors,
    make_inputs,
    register_fused,
)
from study.predictor.lora_targets import peft_targets
from study.predictor.request import Request


class TracedActivations(NamedTuple):
    """Traced activation bytes of one micro-batch, without weights."""

    # Saved for the backward pass at the end of the forward pass, including logits.
    saved_bytes: int
    forward_peak: int
    # Includes gradients in the weights' type, as on one device without an engine.
    backward_peak: int


def trace_activations(request: Request) -> TracedActivations:
    """Trace the activation memory of a request's model, without dropout."""
    with fake_tensors(torch.bfloat16 if in_engine(request.precision) else torch.float32):
        model = build_meta_model(request)
        inputs, media = make_inputs(model, request.micro_batch, request.sequence_length, request.target_length)
        live = Meter([*model.parameters(), *model.buffers(), *inputs.values(), *media.values()])
        autocasts = in_autocast(request.precision)
        as_cuda = AsCuda() if autocasts and not request.box.is_cpu_only else contextlib.nullcontext()
        if request.gradient_checkpointing:
            # Recomputation enters the mode again, since a mode has no effect inside the backward pass.
            checkpointing = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), as_cuda)}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        with live, torch.autocast("cpu", torch.bfloat16, enabled=autocasts), as_cuda:
            loss = compute_loss(model, inputs, compute_features(model, media))
        saved, forward_peak, live.peak = live.now, live.peak, live.now
        with live:
            loss.backward()
        return TracedActivations(saved, forward_peak, live.peak)


def build_meta_model(request: Request) -> Any:
    """Create the model of a request, with its adapters and without dropout."""
    document = json.loads(request.shape.document)
    if document["model_type"] == "gpt_neo":
        # One type for each layer.
        document["attention_types"] = [[["global"], request.shape.layers]]
    attention = register_fused() if is_fused(request) else "eager"
    shape = request.shape
    return build_model(
        document,
        shape.lora_rank,
        attention,
        dropout=False,
        targets=peft_targets(shape.lora_targets),
        saved=shape.lora_saved,
        lora_dropout=request.lora_dropout,
        dora=shape.lora_dora,
    )
