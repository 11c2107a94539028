"""Activation memory of one micro-batch, and FLOPs of a training step.

study/predictor/families.py counts the tensors that autograd saves per layer, by width.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from study.config.errors import UserError, first_line
from study.predictor import live
from study.predictor.request import Request
from study.predictor.shape import INFIX, ModelShape

# Matrix-multiply FLOPs by formula, in the convention of study/metrics/flops.py: all products of the model, forward and
# backward, at the full sequence length. Causal masking does not lower the count and recomputation does not raise it.
# Hardware FLOPs add the recomputation of gradient checkpointing.


@dataclasses.dataclass(frozen=True)
class MatMul:
    """One matrix product of the forward pass: (tokens, inner) times (inner, out), `count` times in the model."""

    inner: int
    out: int
    count: int
    in_layer: bool = True


def matmuls(shape: ModelShape) -> tuple[MatMul, ...]:
    """Return the matrix products of the base model, without adapters."""
    query, key_value = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    ups = 2 if shape.gated else 1
    # Queries, keys and values count as one product, as in GPT-2; the FLOPs are the same.
    matmuls = [
        MatMul(shape.hidden, query + 2 * key_value, shape.layers),
        MatMul(query, shape.hidden, shape.layers),
        MatMul(shape.hidden, shape.inner, ups * shape.layers),
        MatMul(shape.inner, shape.hidden, shape.layers),
    ]
    if shape.family == "causal-lm":
        matmuls.append(MatMul(shape.hidden, shape.vocabulary, 1, in_layer=False))
    return tuple(matmuls)


@functools.lru_cache(maxsize=64)
def adapter_products(shape: ModelShape) -> tuple[MatMul, ...]:
    """Return the matrix products of the LoRA adapters: two per adapted product of a layer."""
    matrices = [param for param in shape.params if param.place == 0 and INFIX in param.name]
    return tuple(MatMul(matrix.elements // matrix.rows, matrix.rows, shape.layers) for matrix in matrices)


def head_flops(shape: ModelShape) -> int:
    """Forward FLOPs per sequence of a classifier's pooler and two-class output; 0 for a language model."""
    return 2 * (shape.hidden**2 + 2 * shape.hidden) if shape.family == "sequence-classification" else 0


def attention_flops(shape: ModelShape, length: int) -> int:
    """Forward FLOPs per sequence of the attention scores and the weighted values, over all layers."""
    return 4 * length**2 * shape.heads * shape.head_dim * shape.layers


def forward_flops(shape: ModelShape, length: int, in_layers_only: bool = False) -> int:
    """FLOPs of the forward pass for one sequence."""
    product_flops = sum(
        2 * length * product.inner * product.out * product.count
        for product in (*matmuls(shape), *adapter_products(shape))
        if product.in_layer or not in_layers_only
    )
    return product_flops + attention_flops(shape, length) + (0 if in_layers_only else head_flops(shape))


def model_flops(request: Request) -> int:
    """FLOPs of one optimizer step of one rank. A frozen matrix has one product in the backward pass instead of two."""
    shape, length = request.shape, request.sequence_length
    if isinstance(shape, live.LiveShape):
        traced = trace(request)
        return round((traced.forward + traced.backward) * request.accumulation)
    flops = 3 * forward_flops(shape, length)
    if shape.lora_rank:
        flops -= sum(2 * length * product.inner * product.out * product.count for product in matmuls(shape))
    return flops * request.micro_batch * request.accumulation


def hardware_flops(request: Request) -> int:
    """Model FLOPs plus recomputation; a fused attention's recomputation in its backward kernel is not counted."""
    sequences = request.micro_batch * request.accumulation
    if isinstance(request.shape, live.LiveShape):
        recomputed = round(trace(request).layers_forward / request.micro_batch)
    else:
        recomputed = forward_flops(request.shape, request.sequence_length, in_layers_only=True)
    return model_flops(request) + (
        recomputed * sequences // request.checkpoint_every if request.gradient_checkpointing else 0
    )


@dataclasses.dataclass(frozen=True)
class Activations:
    """Activation bytes of one micro-batch."""

    # Saved by one layer for its backward pass; `scores` is the attention scores' part of it.
    layer: float = 0.0
    scores: float = 0.0
    # Saved by a layer that is recomputed: its input.
    checkpoint: float = 0.0
    # Saved outside the layers, without the logits.
    outside: float = 0.0
    # Peak temporary memory of one layer: in a forward pass that saves nothing, and in the backward pass.
    layer_forward: float = 0.0
    layer_working: float = 0.0
    # Log-probabilities in fp32 until the loss is computed.
    logits: float = 0.0
    # Peak temporary memory of the loss, forward and backward.
    logits_forward: float = 0.0
    logits_backward: float = 0.0
    # 16-bit copies of the weights that autocast makes: of one layer, and of the head.
    cast_layer: float = 0.0
    cast_head: float = 0.0
    # Part of a layer's copies that autocast caches until the forward pass ends: trained weights only (cached_cast).
    cast_cached: float = 0.0


def is_fused(request: Request) -> bool:
    """Whether the prediction counts a fused attention kernel for the request."""
    return request.attention != "eager" and has_fused(request.shape)


def has_fused(shape: ModelShape) -> bool:
    """Whether the family's table has a fused attention; flash-attention has kernels for more families."""
    return shape.survey["fused"] if isinstance(shape, live.LiveShape) else shape.table.fused is not None


def _mode(request: Request) -> str:
    """Return the types of computation: fp32, 16 bits, or both as autocast decides."""
    if request.precision == "fp32":
        return "fp32"
    return "engine" if request.precision.endswith("-engine") or not request.autocast else "autocast"


def predict_activations(request: Request) -> Activations:
    """Return the activation memory of one micro-batch of the request."""
    if isinstance(request.shape, live.LiveShape):
        return trace(request).activations
    shape, family, fused = request.shape, request.shape.table, is_fused(request)
    tokens, width = request.micro_batch * request.sequence_length, request.computing_bytes
    mode = _mode(request)
    saved = family.fused if fused and family.fused else family.eager
    if in_kernels := bool(request.compiled and fused and family.in_kernels):
        assert family.in_kernels is not None
        saved = family.in_kernels
    wide, narrow = {
        "fp32": (0, saved.hidden), "autocast": (saved.autocast_wide, saved.autocast_hidden),
        "engine": (saved.engine_wide, saved.engine_hidden),
    }[mode]  # fmt: skip
    stream = 4 if mode == "autocast" else width
    query, key = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    on_cuda = mode == "autocast" and not request.box.is_cpu_only
    inner = saved.inner + (family.inner_on_cuda if on_cuda else 0.0)
    per_token = 4 * wide * shape.hidden + width * (
        narrow * shape.hidden + inner * shape.inner + saved.query * query + saved.key * key
    )
    if family.head_norms:
        # The norm's input in fp32, and the product that trained weights multiply.
        head_bytes = width if in_kernels else 4 + (width if shape.lora_rank is None else 0)
        per_token += float(head_bytes * (shape.heads + shape.key_value_heads) * shape.head_dim)
    adapted, adapted_outside = _adapted(request, mode)
    per_token += adapted
    # peft casts a 16-bit input to fp32 for its adapter, and autocast casts it back to 16 bits.
    widened = (4 + 2) * shape.inner if shape.lora_rank and mode == "autocast" else 0
    has_dropout = request.dropout and family.has_dropout
    # Dropout masks: one byte per element of two outputs of a layer.
    per_token += 2 * shape.hidden if has_dropout else 0
    # Fused attention saves one number per token and head; eager attention saves every pair of tokens per head.
    rows = request.micro_batch * shape.heads * request.sequence_length
    in_fp32 = mode in family.softmax_in_fp32 or (on_cuda and family.softmax_in_fp32_on_cuda)
    scores = 4.0 * rows
    if not fused:
        each_score = family.scores * width + (4 if in_fp32 else 0)
        if has_dropout:
            # A mask, and dropout's output in addition to its input, which an fp32 softmax does not save.
            each_score += 1 + (0 if in_fp32 else width)
        scores = each_score * rows * request.sequence_length
    pairs = 0.0 if fused else float(rows * request.sequence_length)
    largest_scores = pairs * (4 if in_fp32 else width)
    matrices = [param for param in shape.params if param.place == 0 and param.elements > param.rows]
    is_classifier = shape.family == "sequence-classification"
    logits, logits_forward, logits_backward = _loss(request, 0 if is_classifier else tokens * shape.vocabulary, width)
    outside = stream + (0 if is_classifier and stream > width else width) + 4 * shape.gated
    outside += 2 if family.norm_in_fp32 and mode == "engine" else 0
    # Eager attention has a causal mask over every pair of tokens. A recomputed layer saves it as one of its inputs.
    masks = 0.0
    if not fused and not is_classifier and request.gradient_checkpointing:
        masks = float(request.micro_batch * request.sequence_length**2 * stream * family.masks)
    casts = 2 if mode == "autocast" else 0
    products = 0.0
    if request.saves_matmul_outputs:
        # torchtitan's apply_ac saves products 1, 3 and so on of a layer, and its fused attention.
        outputs = [query, key, key, shape.hidden, *([shape.inner] * (2 if shape.gated else 1)), shape.hidden]
        products = tokens * width * (sum(outputs[::2]) + query) + 4.0 * rows
    # The fused gate kernel writes both gradients over the tensors that it saved.
    passing = 1.0 if in_kernels else family.inner_gradients
    return Activations(
        layer=tokens * per_token + scores,
        scores=scores,
        checkpoint=tokens * shape.hidden * stream + products,
        outside=tokens * shape.hidden * outside + masks + tokens * adapted_outside,
        layer_forward=max(
            tokens * (width * (2 * shape.inner + shape.hidden) + widened), family.scores_forward * largest_scores
        ),
        layer_working=max(
            tokens * (width * (passing * shape.inner + shape.hidden) + widened),
            # The tensors that the feed-forward block saved are freed by then.
            largest_scores + pairs * width - tokens * width * (inner * shape.inner + narrow / 2 * shape.hidden),
        ),
        logits=logits,
        logits_forward=logits_forward,
        logits_backward=logits_backward,
        cast_layer=casts * sum(matrix.elements for matrix in matrices),
        cast_head=casts * shape.hidden * (shape.hidden if is_classifier else shape.vocabulary),
        cast_cached=casts * sum(matrix.elements for matrix in matrices if matrix.trained),
    )


@dataclasses.dataclass(frozen=True)
class Trace:
    """Traced figures of a micro-batch of a class outside the table; `missing` names what could not be traced."""

    activations: Activations = Activations()
    # FLOPs: forward, of fused attention, of the layers forward, and backward.
    forward: float = 0.0
    attention: float = 0.0
    layers_forward: float = 0.0
    backward: float = 0.0
    missing: str | None = None


@functools.lru_cache(maxsize=64)
def _measure(document: str, rank: int | None, options: str) -> dict[str, Any] | str:
    """Return the answer of a trace, or why there is none."""
    try:
        return live.answer("measure", document, rank, options)
    except UserError:
        raise
    except Exception as error:  # Any class of transformers, on tensors without data.
        return f"{type(error).__name__}: {first_line(error)}"


@functools.lru_cache(maxsize=512)
def trace(request: Request) -> Trace:
    """Return the traced figures. A layer has the mean of all, and its temporaries the difference to the largest one."""
    shape, layers = request.shape, request.shape.layers
    assert isinstance(shape, live.LiveShape)
    options = {
        "mode": _mode(request), "dropout": request.dropout, "fused": is_fused(request),
        "cuda": not request.box.is_cpu_only, "length": request.sequence_length,
    }  # fmt: skip
    answer = _measure(shape.document, shape.lora_rank, json.dumps(options, sort_keys=True))
    if isinstance(answer, str):
        return Trace(missing=f"activations and FLOPs ({answer})")
    first_pass, second_pass = answer["passes"]
    # Micro-batches, in units of the first pass, whose samples the second one has twice.
    counts, batch = answer["counts"], request.micro_batch / answer["samples"]

    def total(figure: str, at: Mapping[str, Any], recomputed: bool = True) -> float:
        traced = ((counts[name], layer) for name, layer in at["layers"].items() if layer)
        return float(sum(count * layer[figure] for count, layer in traced if layer["recomputed"] or not recomputed))

    def growth(first: float, second: float) -> float:
        """Return a figure's part that grows with the micro-batch; gradients and copies of weights are constant."""
        return (second - first) * batch

    def working(first: Mapping[str, Any], second: Mapping[str, Any], figure: str) -> float:
        """Return temporaries without the gradient of a weight, which is constant and counted elsewhere."""
        grown = growth(first[figure], second[figure])
        return max(0.0, grown, 2 * first[figure] - second[figure] + grown - first["gradient"])

    pairs = [(layer, second_pass["layers"][name]) for name, layer in first_pass["layers"].items() if layer]
    saved = growth(total("saved", first_pass), total("saved", second_pass)) / layers
    constant = (2 * total("saved", first_pass) - total("saved", second_pass)) / layers
    largest = max(growth(a["saved"], b["saved"]) * a["recomputed"] for a, b in pairs)
    # Bytes saved outside the layers, and by layers that are never recomputed.
    first, second = (at["outside"] + total("saved", at, False) - total("saved", at) for at in (first_pass, second_pass))
    tail = growth(first_pass["tail"], second_pass["tail"])
    logits = (
        max(0.0, tail), max(0.0, growth(first_pass["tail_forward"], second_pass["tail_forward"])),
        working(first_pass, second_pass, "tail_backward"),
    )  # fmt: skip
    if request.chunked_loss and shape.family == "causal-lm":
        tokens = request.micro_batch * request.sequence_length
        logits = _loss(request, tokens * shape.vocabulary, request.computing_bytes)
    activations = Activations(
        layer=saved, checkpoint=growth(total("checkpoint", first_pass), total("checkpoint", second_pass)) / layers,
        outside=first + (second - first) * (batch - 1) + min(0.0, tail), layer_forward=largest,
        layer_working=max(working(a, b, "working") for a, b in pairs)
        + (largest - saved if request.gradient_checkpointing else 0.0),
        logits=logits[0], logits_forward=logits[1], logits_backward=logits[2], cast_layer=constant,
        cast_head=2 * first_pass["tail"] - second_pass["tail"],
        cast_cached=constant * shape.trained_parameters / shape.parameters,
    )  # fmt: skip
    flops = {
        name: batch * (first_pass[name] - sum(layer[name] for layer, _ in pairs) + total(name, first_pass, False))
        for name in ("forward", "attention", "backward")
    }
    return Trace(activations, layers_forward=batch * total("forward", first_pass), missing=answer["missing"], **flops)


def _adapted(request: Request, mode: str) -> tuple[float, float]:
    """Return LoRA's difference in saved bytes per token: in each layer, and outside the layers. An adapter saves the
    input of its layer, so a frozen layer saves nothing itself."""
    shape, family, width = request.shape, request.shape.table, request.computing_bytes
    if shape.lora_rank is None:
        return 0.0, 0.0
    stream = 4 if mode == "autocast" else width
    # Output of the adapter's A matrix.
    layer = float(width * shape.lora_rank * len(adapter_products(shape)) // 2)
    if mode == "autocast" and is_fused(request) and family.keeps_output:
        # The attention output is cast to fp32 for the adapter and back to 16 bits, which makes a second tensor.
        layer += width * shape.heads * shape.head_dim
    multiplied = 4 if family.norm_in_fp32 else stream
    layer -= family.multiplying_norms * multiplied * shape.hidden
    # The frozen head does not save its input, nor the frozen last norm its product.
    outside = -(width if shape.family == "causal-lm" else 0) - (multiplied if family.multiplying_norms else 0)
    if request.gradient_checkpointing:
        outside += stream if family.sums_embeddings else 0
    else:
        # The first norm saves nothing: the frozen embeddings have no gradient.
        outside -= 4 if family.multiplying_norms else stream
    return layer, outside * shape.hidden


def _loss(request: Request, logits: float, width: int) -> tuple[float, float, float]:
    """Bytes saved until the loss is computed, and its peak temporaries forward and backward; `logits`: elements."""
    if request.fused_loss:
        return logits * width, logits * width, logits * width
    if request.chunked_loss and logits:
        # Liger's fused_linear_cross_entropy.py computes the gradients of its input and of a trained matrix in the
        # forward pass. Temporaries are the logits of one chunk, about as large as the input, and the chunk's matrix
        # gradient.
        shape, tokens = request.shape, request.micro_batch * request.sequence_length
        matrix = 0 if shape.lora_rank else shape.vocabulary * shape.hidden * width
        stream = tokens * shape.hidden * width
        return float(matrix + stream), float(matrix + 2 * stream), 0.0
    capped = width if request.shape.table.caps_logits else 0
    # The logits, in fp32 for the loss; then the gradient of the loss and that of its input.
    return logits * (4 + capped), logits * (width + (4 if width == 2 else 0) + capped), logits * 8
