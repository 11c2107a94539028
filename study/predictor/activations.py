"""Activations that one micro-batch keeps for its backward pass, and working memory of both passes.

study/predictor/families.py has what autograd keeps of one layer, in tensors of each width.
"""

from __future__ import annotations

import dataclasses

from study.predictor.request import Request
from study.predictor.shape import INFIX, ModelShape

# Matrix-multiply FLOPs by formula, in the convention of study/metrics/flops.py.
# All products of the model, forward and backward, at the full sequence length: causal masking saves nothing in this
# count, and recomputation adds nothing to it. Hardware FLOPs add what gradient checkpointing computes again.


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of the forward pass: (tokens, inner) times (inner, out), `count` times in the model."""

    inner: int
    out: int
    count: int
    in_layer: bool = True


def products(shape: ModelShape) -> tuple[Product, ...]:
    """Products of one token, without adapters."""
    query, key_value = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    ups = 2 if shape.gated else 1
    # Transformers' GPT-2 takes queries, keys and values in one product; to the arithmetic it is the same.
    found = [
        Product(shape.hidden, query + 2 * key_value, shape.layers),
        Product(query, shape.hidden, shape.layers),
        Product(shape.hidden, shape.inner, ups * shape.layers),
        Product(shape.inner, shape.hidden, shape.layers),
    ]
    if shape.family == "causal-lm":
        found.append(Product(shape.hidden, shape.vocabulary, 1, in_layer=False))
    return tuple(found)


def adapter_products(shape: ModelShape) -> tuple[Product, ...]:
    """LoRA's products: two for each product of a layer."""
    matrices = [one for one in shape.tensors if one.in_layer and INFIX in one.name]
    return tuple(Product(one.elements // one.rows, one.rows, one.count) for one in matrices)


def head_flops(shape: ModelShape) -> int:
    """Forward, of each sequence: a classifier's pooler and its two classes."""
    return 2 * (shape.hidden**2 + 2 * shape.hidden) if shape.family == "sequence-classification" else 0


def attention_flops(shape: ModelShape, length: int) -> int:
    """Forward, of one sequence: scores, and values weighed with them, in every layer."""
    return 4 * length**2 * shape.heads * shape.head_dim * shape.layers


def forward_flops(shape: ModelShape, length: int, in_layers_only: bool = False) -> int:
    """FLOPs of one sequence."""
    of_products = sum(
        2 * length * each.inner * each.out * each.count
        for each in (*products(shape), *adapter_products(shape))
        if each.in_layer or not in_layers_only
    )
    return of_products + attention_flops(shape, length) + (0 if in_layers_only else head_flops(shape))


def model_flops(request: Request) -> int:
    """FLOPs of one optimizer step of one rank. A frozen matrix has one product in the backward pass, and not two."""
    shape, length = request.shape, request.sequence_length
    done = 3 * forward_flops(shape, length)
    if shape.lora_rank:
        done -= sum(2 * length * each.inner * each.out * each.count for each in products(shape))
    return done * request.micro_batch * request.accumulation


def hardware_flops(request: Request) -> int:
    """Model FLOPs and those of recomputation, without what a fused attention recomputes in its own backward pass."""
    again = forward_flops(request.shape, request.sequence_length, in_layers_only=True)
    sequences = request.micro_batch * request.accumulation
    return model_flops(request) + (
        again * sequences // request.checkpoint_every if request.gradient_checkpointing else 0
    )


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch."""

    # Kept by one layer until its backward pass, and of that the scores of its attention.
    layer: float
    scores: float
    # What a layer leaves when it is to be recomputed: its input.
    checkpoint: float
    # Kept outside the layers, without the logits.
    outside: float
    # The most that one layer makes besides what is kept: in a forward pass that keeps nothing, and backward.
    layer_forward: float
    layer_working: float
    # Log-probabilities in fp32 until the loss is through.
    logits: float
    # The most that the loss makes besides, forward and backward.
    logits_forward: float
    logits_backward: float
    # Copies of the weights in 16 bits that autocast makes: of one layer, and of the head.
    cast_layer: float
    cast_head: float
    # Of a layer's, what it remembers until the forward pass has ended: of trained weights alone (cached_cast).
    cast_cached: float


def is_fused(request: Request) -> bool:
    return request.attention != "eager" and has_fused(request.shape)


def has_fused(shape: ModelShape) -> bool:
    """Return whether a fused attention is counted here; flash-attention has kernels for more families."""
    return shape.table.fused is not None


def _mode(request: Request) -> str:
    if request.computing_bytes == 4:
        return "fp32"
    return "engine" if request.precision.endswith("-engine") or not request.autocast else "autocast"


def activations_of(request: Request) -> Activations:
    shape, family, mode, fused = request.shape, request.shape.table, _mode(request), is_fused(request)
    tokens, width = request.micro_batch * request.sequence_length, request.computing_bytes
    kept = family.fused if fused and family.fused else family.eager
    if in_kernels := bool(request.compiled and fused and family.in_kernels):
        assert family.in_kernels is not None
        kept = family.in_kernels
    wide, narrow = {
        "fp32": (0, kept.hidden), "autocast": (kept.autocast_wide, kept.autocast_hidden),
        "engine": (kept.engine_wide, kept.engine_hidden),
    }[mode]  # fmt: skip
    stream = 4 if mode == "autocast" else width
    query, key = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    on_cuda = mode == "autocast" and not request.box.in_host_memory
    inner = kept.inner + (family.inner_on_cuda if on_cuda else 0.0)
    per_token = 4 * wide * shape.hidden + width * (
        narrow * shape.hidden + inner * shape.inner + kept.query * query + kept.key * key
    )
    if family.head_norms:
        # What comes in, as fp32, and what trained weights multiply.
        each = width if in_kernels else 4 + (width if shape.lora_rank is None else 0)
        per_token += float(each * (shape.heads + shape.key_value_heads) * shape.head_dim)
    adapted, adapted_outside = _adapted(request, mode)
    per_token += adapted
    # Of 16 bits peft makes fp32 for its adapter, which autocast makes 16 again.
    widened = (4 + 2) * shape.inner if shape.lora_rank and mode == "autocast" else 0
    has_dropout = request.dropout and family.has_dropout
    # One byte for each number of two outputs of a layer.
    per_token += 2 * shape.hidden if has_dropout else 0
    # Attention fused keeps one number for each token and head; by hand every pair of tokens for every head.
    rows = request.micro_batch * shape.heads * request.sequence_length
    in_fp32 = mode in family.softmax_in_fp32 or (on_cuda and family.softmax_in_fp32_on_cuda)
    scores = 4.0 * rows
    if not fused:
        each_score = family.scores * width + (4 if in_fp32 else 0)
        if has_dropout:
            # A mask, and its output besides its input, which the softmax in fp32 does not keep.
            each_score += 1 + (0 if in_fp32 else width)
        scores = each_score * rows * request.sequence_length
    pairs = 0.0 if fused else float(rows * request.sequence_length)
    largest_scores = pairs * (4 if in_fp32 else width)
    matrices = [tensor for tensor in shape.tensors if tensor.in_layer and tensor.elements > tensor.rows]
    is_classifier = shape.family == "sequence-classification"
    logits, logits_forward, logits_backward = _loss(request, 0 if is_classifier else tokens * shape.vocabulary, width)
    outside = stream + (0 if is_classifier and stream > width else width) + 4 * shape.gated
    outside += 2 if family.norm_in_fp32 and mode == "engine" else 0
    # By hand, a causal mask of every pair of tokens. Where layers are recomputed it is one of their inputs, and kept.
    masks = 0.0
    if not fused and not is_classifier and request.gradient_checkpointing:
        masks = float(request.micro_batch * request.sequence_length**2 * stream * family.masks)
    casts = 2 if mode == "autocast" else 0
    # The gate's kernel writes both gradients over what it kept.
    passing = 1.0 if in_kernels else family.inner_gradients
    return Activations(
        layer=tokens * per_token + scores,
        scores=scores,
        checkpoint=tokens * shape.hidden * stream
        + (_kept_products(request, tokens, width) if request.keeps_products else 0),
        outside=tokens * shape.hidden * outside + masks + tokens * adapted_outside,
        layer_forward=max(
            tokens * (width * (2 * shape.inner + shape.hidden) + widened), family.scores_forward * largest_scores
        ),
        layer_working=max(
            tokens * (width * (passing * shape.inner + shape.hidden) + widened),
            # What the feed-forward block kept is gone by then.
            largest_scores + pairs * width - tokens * width * (inner * shape.inner + narrow / 2 * shape.hidden),
        ),
        logits=logits,
        logits_forward=logits_forward,
        logits_backward=logits_backward,
        cast_layer=casts * sum(tensor.elements for tensor in matrices),
        cast_head=casts * shape.hidden * (shape.hidden if is_classifier else shape.vocabulary),
        cast_cached=casts * sum(tensor.elements for tensor in matrices if tensor.trained),
    )


def _adapted(request: Request, mode: str) -> tuple[float, float]:
    """Return LoRA's difference per token: in each layer, and outside them. An adapter keeps what its layer takes,
    so frozen layers save nothing by themselves."""
    shape, family, width = request.shape, request.shape.table, request.computing_bytes
    if shape.lora_rank is None:
        return 0.0, 0.0
    stream = 4 if mode == "autocast" else width
    # A's output.
    layer = float(width * shape.lora_rank * len(adapter_products(shape)) // 2)
    if mode == "autocast" and is_fused(request) and family.keeps_output:
        # What attention puts out is made fp32 for the adapter, and 16 bits again: no longer attention's own.
        layer += width * shape.heads * shape.head_dim
    multiplied = 4 if family.norm_in_fp32 else stream
    layer -= family.multiplying_norms * multiplied * shape.hidden
    # The head's input and the last norm's product.
    outside = -(width if shape.family == "causal-lm" else 0) - (multiplied if family.multiplying_norms else 0)
    if request.gradient_checkpointing:
        outside += stream if family.sums_embeddings else 0
    else:
        # The first norm, of embeddings that have no gradient.
        outside -= 4 if family.multiplying_norms else stream
    return layer, outside * shape.hidden


def _loss(request: Request, numbers: float, width: int) -> tuple[float, float, float]:
    """Bytes kept until the loss is done, and the most besides, forward and backward; `numbers`: all logits."""
    if request.fused_loss:
        return numbers * width, numbers * width, numbers * width
    if request.chunked_loss and numbers:
        # Liger's fused_linear_cross_entropy.py: gradients of its input and of a matrix that is trained, made in the
        # forward pass; beside them the logits of one part, about as large as the input, and the matrix's of that part.
        shape, tokens = request.shape, request.micro_batch * request.sequence_length
        matrix = 0 if shape.lora_rank else shape.vocabulary * shape.hidden * width
        stream = tokens * shape.hidden * width
        return float(matrix + stream), float(matrix + 2 * stream), 0.0
    capped = width if request.shape.table.caps_logits else 0
    # The logits, in fp32 for the loss; then the loss's gradient and that of what it was made from.
    return numbers * (4 + capped), numbers * (width + (4 if width == 2 else 0) + capped), numbers * 8


def _kept_products(request: Request, tokens: int, width: int) -> float:
    """torchtitan's apply_ac: of products in their order the first, the third and so on, and the fused attention."""
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    outputs = [query, key, key, shape.hidden, *([shape.inner] * (2 if shape.gated else 1)), shape.hidden]
    pairs = request.micro_batch * shape.heads * request.sequence_length
    return tokens * width * (sum(outputs[::2]) + query) + 4.0 * pairs
