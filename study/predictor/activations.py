"""Activation memory of one micro-batch, and FLOPs of a training step.

study/predictor/families.py counts the tensors that autograd saves per layer, by width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from study.config.strategies import Strategy
from study.predictor import live
from study.predictor.families import READS_INPUT
from study.predictor.hardware import Hardware
from study.predictor.losses import bytes_without_logits, logit_bytes
from study.predictor.request import Request
from study.predictor.shape import INFIX, ModelShape, Parameter

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


@functools.lru_cache(maxsize=64)
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


def phase(shape: ModelShape, param: Parameter) -> str:
    """Return the part of its layer's backward pass that begins when a parameter's gradient has arrived."""
    if isinstance(shape, live.LiveShape):
        return param.name
    module = param.name.partition(INFIX)[0].removesuffix(".weight").removesuffix(".bias")
    return module if module in shape.table.block else "reads" if module in READS_INPUT else ""


@dataclasses.dataclass(frozen=True)
class Activations:
    """Activation bytes of one micro-batch."""

    # Saved by one layer for its backward pass; `scores` is the attention scores' part of it.
    layer: float = 0.0
    scores: float = 0.0
    # Saved by a layer that is recomputed: its input.
    checkpoint: float = 0.0
    # Saved outside the layers, without the logits, and the part of it that the head's backward pass frees.
    outside: float = 0.0
    tail: float = 0.0
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
    # Bytes of a layer's saved and temporary tensors that are freed once a gradient has arrived, by `phase`.
    freed: Mapping[str, float] = dataclasses.field(default_factory=dict)


# Tensors of the hidden width that a norm's backward pass has at once.
_NORM_GRADIENTS = 5


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


def _saves_parameters(request: Request) -> bool:
    """Whether a linear layer saves its parameter for the backward pass, not autocast's copy: stage 3 replaces its
    function (linear.py of deepspeed 0.19, LinearFunctionForZeroStage3)."""
    return request.strategy.zero_stage == 3 and request.settings.memory_efficient_linear


def predict_activations(request: Request) -> Activations:  # noqa: PLR0914, PLR0915
    if isinstance(request.shape, live.LiveShape):
        return trace(request).activations
    shape, family, fused = request.shape, request.shape.table, is_fused(request)
    tokens, width = request.micro_batch * request.sequence_length, request.computing_bytes
    mode = _mode(request)
    saved = family.fused if fused and family.fused else family.eager
    if in_kernels := bool(request.compiled and fused and family.in_kernels):
        assert family.in_kernels is not None
        saved = dataclasses.replace(family.in_kernels, inner=family.in_kernels.inner + request.torch_gate)
    wide, narrow = {
        "fp32": (0, saved.hidden),
        "autocast": (saved.autocast_wide, saved.autocast_hidden),
        "engine": (saved.engine_wide, saved.engine_hidden),
    }[mode]
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
    adapted, adapted_tail, adapted_first = _adapted(request, mode)
    per_token += adapted
    # peft casts a 16-bit input to fp32 for its adapter, and autocast casts it back to 16 bits.
    widened = (4 + 2) * shape.inner if mode == "autocast" and family.block[-1] in adapted_modules(shape) else 0
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
    matrices = shape.layer_matrices
    is_classifier = shape.family == "sequence-classification"
    logits, logits_forward, logits_backward = _loss(request, 0 if is_classifier else tokens * shape.vocabulary, width)
    # The first layer's input, or if it is among the checkpoints the last one's output.
    outside = stream + (0 if is_classifier and stream > width else width) + 4 * shape.gated
    outside += 2 if family.norm_in_fp32 and mode == "engine" else 0
    # The head's backward pass frees a language model's last norm, its head's input, and the last layer's output, which
    # is not a checkpoint. A classifier's head reads a part of that output.
    recomputes = request.gradient_checkpointing
    tail = outside - stream * (is_classifier or not recomputes) if recomputes or not is_classifier else 0
    # Eager attention has a causal mask over every pair of tokens. A recomputed layer saves it as one of its inputs.
    masks = 0.0
    if not fused and not is_classifier and request.gradient_checkpointing:
        masks = float(request.micro_batch * request.sequence_length**2 * stream * family.masks)
    head_casts = 2 if mode == "autocast" and not _saves_parameters(request) else 0
    casts = 2 if mode == "autocast" and family.transposed else head_casts
    products = 0.0
    if request.saves_matmul_outputs:
        # torchtitan's apply_ac saves products 1, 3 and so on of a layer, and its fused attention.
        outputs = [query, key, key, shape.hidden, *([shape.inner] * (2 if shape.gated else 1)), shape.hidden]
        products = tokens * width * (sum(outputs[::2]) + query) + 4.0 * rows
    # The fused gate kernel writes both gradients over the tensors that it saved.
    passing = family.inner_gradients + 2.0 * bool(on_cuda and family.inner_on_cuda)
    passing = 1.0 if in_kernels and not request.torch_gate else passing
    # Backward, a layer's feed-forward block comes first: its saved tensors are freed before attention temporaries.
    layer, hidden_bytes = tokens * per_token + scores, tokens * width * shape.hidden
    in_block = tokens * width * passing * shape.inner + hidden_bytes + tokens * widened
    norm = tokens * _NORM_GRADIENTS * (4 if wide else width) * shape.hidden
    block_saved = tokens * (width * (inner * shape.inner + narrow / 2 * shape.hidden) + 2 * wide * shape.hidden)
    block_saved += tokens * _adapter_inputs(request)[1]
    in_attention = max(norm, largest_scores + pairs * width) - block_saved
    working = max(in_block, in_attention)
    block = family.block
    # By the module whose gradient has arrived: bytes above those of the layer.
    after = {block[-1]: in_block, "": in_attention, "reads": _NORM_GRADIENTS * 2 * hidden_bytes - layer}
    if family.gated:
        # Its activation, the product and a gradient are freed before the gate's matrix.
        after[block[1]] = in_block - (passing + 1) * tokens * width * shape.inner + hidden_bytes
    after[block[0]] = norm - block_saved
    in_block_casts = casts * sum(matrix.elements for matrix in matrices if matrix.name.startswith(block))
    after |= {name: after[name] - in_block_casts for name in (block[0], "")}
    return Activations(
        layer=layer,
        scores=scores,
        checkpoint=tokens * shape.hidden * stream + products,
        outside=tokens * (shape.hidden * outside + adapted_tail + adapted_first) + masks,
        tail=tokens * (shape.hidden * tail + adapted_tail),
        layer_forward=max(
            tokens * (width * (2 * shape.inner + shape.hidden) + widened), family.scores_forward * largest_scores
        ),
        layer_working=working,
        logits=logits,
        logits_forward=logits_forward,
        logits_backward=logits_backward,
        cast_layer=casts * sum(matrix.elements for matrix in matrices),
        cast_head=head_casts * shape.hidden * (shape.hidden if is_classifier else shape.vocabulary),
        cast_cached=casts * sum(matrix.elements for matrix in matrices if matrix.trained),
        freed={name: working - size for name, size in after.items()},
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


_ANY_STRATEGY = Strategy("any", "NO")


@functools.lru_cache(maxsize=2048)
def trace(request: Request) -> Trace:
    """Return the traced figures, which strategies and numbers of GPUs share."""
    box = Hardware(request.box.device.name, request.box.device, gpus_per_node=1)
    without_engine = dataclasses.replace(request, strategy=_ANY_STRATEGY, box=box, accumulation=1)
    return _traced(without_engine, has_casts=not _saves_parameters(request))


@functools.lru_cache(maxsize=512)
def _traced(request: Request, has_casts: bool) -> Trace:  # noqa: C901, PLR0914
    """Return the figures. A layer has the mean of all, and its temporaries the difference to the largest one."""
    shape, layers = request.shape, request.shape.layers
    assert isinstance(shape, live.LiveShape)
    answer = live.measure(
        shape,
        mode=_mode(request),
        dropout=request.dropout,
        fused=is_fused(request),
        cuda=not request.box.is_cpu_only,
        length=request.sequence_length,
        **({"lora_dropout": 0.1} if request.lora_dropout else {}),
    )
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

    def working(first: float, second: float, gradient: float) -> float:
        """Return temporaries without the gradient of a weight, which is constant and counted elsewhere."""
        constant = 2 * first - second
        return growth(first, second) + min(constant, max(0.0, constant - gradient))

    pairs = {name: (layer, second_pass["layers"][name]) for name, layer in first_pass["layers"].items() if layer}
    saved = growth(total("saved", first_pass), total("saved", second_pass)) / layers
    constant = has_casts * (2 * total("saved", first_pass) - total("saved", second_pass)) / layers
    checkpoints = [total("checkpoint", at) / layers for at in (first_pass, second_pass)]
    grown = {
        name: growth(layer["saved"], double["saved"]) * layer["recomputed"] for name, (layer, double) in pairs.items()
    }
    # By layer: its part above the mean, and its temporaries from each gradient to the next.
    above = {name: (size - saved) * request.gradient_checkpointing for name, size in grown.items()}
    temporaries = dict[str, dict[str, float]]()
    for name, (layer, double) in pairs.items():
        temporaries[name] = {
            at: working(size, double["working"].get(at, size), layer["gradient"])
            for at, size in layer["working"].items()
        }
        if request.gradient_checkpointing:
            repeated = growth(layer["recomputing"], double["recomputing"])
            temporaries[name][""] = max(repeated, temporaries[name].get("", repeated))
    peak = max(0.0, *(above[name] + max(sizes.values(), default=0.0) for name, sizes in temporaries.items()))
    freed, gradients = dict[str, float](), {param.name: request.weight_bytes * param.elements for param in shape.params}
    for layer, kind in answer["kinds"].items():
        # Those before a layer's first gradient, named "", are without it.
        before = temporaries.get(kind, {}).get("", -math.inf)
        for at, size in temporaries.get(kind, {}).items():
            if at:
                name = layer + at.removeprefix(kind) if at.startswith(kind) else at
                freed[name] = peak - above[kind] - max(size, before - gradients[name])
                before = -math.inf
    # Bytes saved outside the layers, and by layers that are never recomputed.
    first, second = (at["outside"] + total("saved", at, False) - total("saved", at) for at in (first_pass, second_pass))
    tail = growth(first_pass["tail"], second_pass["tail"])
    logits = (
        max(0.0, tail),
        max(0.0, growth(first_pass["tail_forward"], second_pass["tail_forward"])),
        max(0.0, working(first_pass["tail_backward"], second_pass["tail_backward"], first_pass["gradient"])),
    )
    if request.loss_kernel != "transformers" and shape.family == "causal-lm":
        tokens = request.micro_batch * request.sequence_length
        logits = _loss(request, tokens * shape.vocabulary, request.computing_bytes)
    activations = Activations(
        layer=saved,
        checkpoint=checkpoints[0] + (checkpoints[1] - checkpoints[0]) * (batch - 1),
        outside=first + (second - first) * (batch - 1) + min(0.0, tail),
        layer_forward=max(grown.values()),
        # The first layer's input is among the checkpoints.
        tail=(growth(*checkpoints) + min(0.0, tail)) * request.gradient_checkpointing,
        layer_working=peak,
        freed=freed,
        cast_layer=constant,
        logits=logits[0],
        logits_forward=logits[1],
        logits_backward=logits[2],
        cast_head=has_casts * (2 * first_pass["tail"] - second_pass["tail"]),
        cast_cached=constant * shape.trained_parameters / shape.parameters,
    )
    flops = {
        name: batch
        * (first_pass[name] - sum(layer[name] for layer, _ in pairs.values()) + total(name, first_pass, False))
        for name in ("forward", "attention", "backward")
    }
    return Trace(activations, layers_forward=batch * total("forward", first_pass), missing=answer["missing"], **flops)


def _adapted(request: Request, mode: str) -> tuple[float, float, float]:
    """Return LoRA's difference in saved bytes per token: in each layer, after the layers, and before them. An adapter
    saves the input of its layer, so a frozen layer saves nothing itself."""
    shape, family, width = request.shape, request.shape.table, request.computing_bytes
    if shape.lora_rank is None:
        return 0.0, 0.0, 0.0
    stream = 4 if mode == "autocast" else width
    # Output of the adapter's A matrix.
    layer = float(width * shape.lora_rank * len(adapter_products(shape)) // 2) + sum(_adapter_inputs(request))
    if mode == "autocast" and is_fused(request) and family.keeps_output and _adapts_output(shape):
        # The attention output is cast to fp32 for the adapter and back to 16 bits, which makes a second tensor.
        layer += width * shape.heads * shape.head_dim
    multiplied = 4 if family.norm_in_fp32 else stream
    layer -= family.multiplying_norms * multiplied * shape.hidden
    # The frozen head does not save its input, nor the frozen last norm its product.
    tail = -(width if shape.family == "causal-lm" else 0) - (multiplied if family.multiplying_norms else 0)
    # Without recomputation the first norm saves nothing: the frozen embeddings have no gradient.
    first = -(4 if family.multiplying_norms else stream)
    if request.gradient_checkpointing:
        first = stream if family.sums_embeddings else 0
    if shape.family == "sequence-classification" and not any(param.trained for param in _pooler_params(shape)):
        # Nothing else saves the last layer's output.
        first -= 0 if stream > width else width
    return layer, tail * shape.hidden, first * shape.hidden


def _pooler_params(shape: ModelShape) -> list[Parameter]:
    return [param for param in shape.params if param.name.startswith("pooler")]


@functools.lru_cache(maxsize=64)
def adapted_modules(shape: ModelShape) -> frozenset[str]:
    """Return the modules of a layer that have adapters."""
    inside = (param.name for param in shape.params if param.place == 0)
    return frozenset(name.partition(INFIX)[0] for name in inside if INFIX in name)


def _adapts_output(shape: ModelShape) -> bool:
    """Whether the matrix that reads the attention's output has an adapter."""
    return any(module not in READS_INPUT and module not in shape.table.block for module in adapted_modules(shape))


def _adapter_inputs(request: Request) -> tuple[float, float]:
    """Return the bytes of adapters' inputs per token and layer, in attention and in the feed-forward block, above those
    of adapters on all linear layers without dropout, which share the tensor that their layers read."""
    shape, family, width = request.shape, request.shape.table, request.computing_bytes
    if shape.lora_rank is None:
        return 0.0, 0.0
    adapted = adapted_modules(shape)
    block = family.block
    inside = (param.name.removesuffix(".weight") for param in shape.layer_matrices if INFIX not in param.name)
    modules = [module for module in inside if module not in block]
    reads_input = [module for module in modules if module in READS_INPUT]
    query, is_kept = shape.heads * shape.head_dim, is_fused(request) and family.keeps_output
    outputs = [module for module in modules if module not in reads_input]
    # Dropout saves its output and a mask: a byte an element on a GPU, and on a CPU the factors (Dropout.cpp).
    dropped = width + (width if request.box.is_cpu_only else 1)

    def difference(names: Iterable[str], size: int, is_saved: bool) -> float:
        count = len(adapted.intersection(names))
        if not request.lora_dropout:
            return 0.0 if count or is_saved else -float(width * size)
        return float(size * (dropped * count - (0 if is_saved else width)))

    in_attention = difference(reads_input, shape.hidden, False) + difference(outputs, query, is_kept)
    return in_attention, difference(block[:-1], shape.hidden, False) + difference(block[-1:], shape.inner, False)


def _loss(request: Request, logits: float, width: int) -> tuple[float, float, float]:
    """Bytes saved until the loss is computed, and its peak temporaries forward and backward; `logits`: elements."""
    if not logits:
        return 0.0, 0.0, 0.0
    per_logit = logit_bytes(request.loss_kernel, width)
    if per_logit is None:
        shape, tokens = request.shape, request.micro_batch * request.sequence_length
        matrix = 0 if shape.lora_rank else shape.vocabulary * shape.hidden * width
        stream = tokens * shape.hidden * width
        saved, forward, backward = bytes_without_logits(request.loss_kernel, tokens, stream, matrix)
        return float(saved), float(forward), float(backward)
    is_traced = isinstance(request.shape, live.LiveShape)
    has_cap = request.loss_kernel == "transformers" and not is_traced and request.shape.table.caps_logits
    capped = width if has_cap else 0
    return logits * (per_logit.saved + capped), logits * (per_logit.forward + capped), logits * per_logit.backward
