"""What one micro-batch leaves for its backward pass, and what passes make besides: counted from transformers' own code.

A family's row says what autograd keeps of one layer, in tensors of each width. The rows are read off the modelling code
of transformers 5.17; study/predictor/traced.py counts the same on the live code, and the tests compare the two.
"""

from __future__ import annotations

import dataclasses

from study.predictor.request import ModelShape, Request
from study.predictor.shape import INFIX

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
    """Of each token, without adapters."""
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
    """Of LoRA, two for each product of a layer."""
    matrices = [one for one in shape.tensors if one.in_layer and INFIX in one.name]
    return tuple(Product(one.elements // one.rows, one.rows, one.count) for one in matrices)


def head_flops(shape: ModelShape) -> int:
    """Forward, of each sequence: a classifier's pooler and its two classes."""
    return 2 * (shape.hidden**2 + 2 * shape.hidden) if shape.family == "sequence-classification" else 0


def attention_flops(shape: ModelShape, length: int) -> int:
    """Forward, of one sequence: scores, and values weighed with them, in every layer."""
    return 4 * length**2 * shape.heads * shape.head_dim * shape.layers


def forward_flops(shape: ModelShape, length: int, in_layers_only: bool = False) -> int:
    """Of one sequence."""
    of_products = sum(
        2 * length * each.inner * each.out * each.count
        for each in (*products(shape), *adapter_products(shape))
        if each.in_layer or not in_layers_only
    )
    return of_products + attention_flops(shape, length) + (0 if in_layers_only else head_flops(shape))


def model_flops(request: Request) -> int:
    """Of one optimizer step of one rank. A frozen matrix has one product in the backward pass, and not two."""
    shape, length = request.shape, request.sequence_length
    done = 3 * forward_flops(shape, length)
    if shape.lora_rank:
        done -= sum(2 * length * each.inner * each.out * each.count for each in products(shape))
    return done * request.micro_batch * request.accumulation


def hardware_flops(request: Request) -> int:
    """With what is computed again; what a fused attention computes again in its own backward pass is not counted."""
    again = forward_flops(request.shape, request.sequence_length, in_layers_only=True)
    sequences = request.micro_batch * request.accumulation
    return model_flops(request) + (
        again * sequences // request.checkpoint_every if request.gradient_checkpointing else 0
    )


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Tensors of one layer: in fp32 whatever the precision, and in the computing type."""

    hidden: float
    inner: float
    # Of all query heads, and of all key heads.
    query: float = 0.0
    key: float = 0.0
    # Under autocast norms put out fp32, and linear layers cast it: so many tensors of the width stay in each type.
    autocast_wide: int = 0
    autocast_hidden: float = 0.0
    # In 16 bits norms of some families compute in fp32.
    engine_wide: int = 0
    engine_hidden: float = 0.0


# Attention fused.
_FUSED = {
    "bert": _Kept(8, 2, 0, 0, 2, 8, 0, 8),
    "gpt2": _Kept(8, 5, 0, 0, 2, 6, 0, 8),
    "gpt_neox": _Kept(10, 2, 0, 0, 1, 9, 0, 10),
    # GPT-NeoX's without what rotary positions keep.
    "mpt": _Kept(8, 2, 0, 0, 2, 6, 0, 8),
    "llama": _Kept(6, 4, 2, 2, 4, 5, 2, 4),
    "gemma": _Kept(6, 4, 2, 2, 4, 5, 4, 2),
}
# Norms, rotary positions and the gate in one kernel each: a norm keeps what came in and what goes out, the gate its two
# inputs and its product. So do Liger's rms_norm.py and swiglu.py, and so does torch.compile's min-cut partitioner.
_IN_KERNELS = {"llama": _Kept(4, 3, 2, 2, 2, 2, 0, 4)}
# Attention by hand keeps its scores, and key heads repeated for every query head.
_EAGER = {
    "bert": _FUSED["bert"],
    "gpt2": _FUSED["gpt2"],
    "gpt_neo": _Kept(8, 5, 0, 0, 2, 8, 2, 6),
    "gptj": _Kept(6, 5, 0, 0, 1, 8, 2, 4),
    "gpt_neox": _Kept(7, 2, 0, 0, 1, 6, 0, 7),
    "mpt": _Kept(8, 2, 0, 0, 2, 6, 0, 8),
    "llama": _Kept(6, 4, 4, 0, 4, 5, 2, 4),
    "gemma": _Kept(6, 4, 4, 0, 4, 5, 4, 2),
    "gemma2": _Kept(10, 4, 4, 0, 8, 5, 8, 2),
}
# Of Qwen3 with the norms of its heads besides.
_ALIKE = {"mistral": "llama", "qwen2": "llama", "qwen3": "llama"}
_WITH_HEAD_NORMS = ("qwen3",)
# Tensors of scores in the computing type, and one more in fp32 where the softmax computes in it.
_SCORES = {"gemma2": 2.0}
_SOFTMAX_IN_FP32 = {
    "bert": (), "gpt2": ("autocast",),
    **dict.fromkeys(("gpt_neo", "gptj", "gpt_neox", "mpt", "llama", "gemma", "gemma2"), ("autocast", "engine")),
}  # fmt: skip
# CUDA's autocast computes powers and softmax in fp32, a processor's does not (aten/src/ATen/autocast_mode.h): BERT's
# scores, and of GELU by its formula so many more 16-bit tensors of the feed-forward block's width.
_SOFTMAX_IN_FP32_ON_CUDA = ("bert",)
_INNER_ON_CUDA = dict.fromkeys(("gpt2", "gpt_neo", "gptj"), 3.0)
# Tensors of scores that a forward pass has at once, where it masks them by hand.
_SCORES_FORWARD = {"gpt_neo": 3.2, "gptj": 3.2}
# Widths of the feed-forward block that are on their way back through it at once; two where it has a gate.
_PASSING = {"bert": 1.0, "gpt_neox": 1.0, "mpt": 1.0, "gpt2": 2.5, "gpt_neo": 2.5, "gptj": 2.5}
# Norms of a layer that multiply by their weights at the end: frozen ones keep no product for the weights' gradient.
_NORMS_THAT_MULTIPLY = {"llama": 2, "gemma": 2, "gemma2": 4}
# Fused attention's output is what the next layer takes, by a view of it.
_KEEPS_OUTPUT = ("bert", "gpt2", "llama", "gemma")
# What comes out of the embedding of words is kept beside the sum that the first layer takes, where it is made to have a
# gradient: transformers does that wherever layers are recomputed (_gradient_checkpointing_enable).
_SUMS_EMBEDDINGS = ("bert", "gpt2", "gpt_neo")
# The others' configurations have none.
_WITH_DROPOUT = ("bert", "gpt2")


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
    # The most that one layer makes beside what is kept: in a forward pass that keeps nothing, and backward.
    layer_forward: float
    layer_working: float
    # Log-probabilities in fp32 until the loss is through.
    logits: float
    # The most that the loss makes beside them, forward and backward.
    logits_forward: float
    logits_backward: float
    # Copies of the weights in 16 bits that autocast makes: of one layer, and of the head.
    cast_layer: float
    cast_head: float
    # Of a layer's, what it remembers until the forward pass has ended: of trained weights alone (cached_cast).
    cast_cached: float


def computing_bytes(request: Request) -> int:
    return 4 if request.precision == "fp32" else 2


def is_fused(request: Request) -> bool:
    return request.attention != "eager" and has_fused(request.shape)


def has_fused(shape: ModelShape) -> bool:
    """As far as is counted here: flash-attention has kernels for more, which transformers trains by hand by default."""
    return _ALIKE.get(shape.model_type, shape.model_type) in _FUSED


def activations_of(request: Request) -> Activations:
    shape = request.shape
    tokens, width = request.micro_batch * request.sequence_length, computing_bytes(request)
    own = request.precision.endswith("-engine") or not request.autocast
    mode = "fp32" if width == 4 else "engine" if own else "autocast"
    name = _ALIKE.get(shape.model_type, shape.model_type)
    fused = is_fused(request)
    kept = (_FUSED if fused else _EAGER)[name]
    if in_kernels := request.compiled and fused and name in _IN_KERNELS:
        kept = _IN_KERNELS[name]
    wide, narrow = {
        "fp32": (0, kept.hidden), "autocast": (kept.autocast_wide, kept.autocast_hidden),
        "engine": (kept.engine_wide, kept.engine_hidden),
    }[mode]  # fmt: skip
    query, key = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    inner = kept.inner + (0.0 if mode != "autocast" or request.box.in_host_memory else _INNER_ON_CUDA.get(name, 0.0))
    per_token = 4 * wide * shape.hidden + width * (
        narrow * shape.hidden + inner * shape.inner + kept.query * query + kept.key * key
    )
    per_token += _head_norms(shape, width, in_kernels)
    scores = _scores(request, name, mode, fused, width)
    adapted, adapted_outside = _adapted(request, name, mode, fused, width)
    per_token += adapted
    # Of 16 bits peft makes fp32 for its adapter, which autocast makes 16 again.
    widened = (4 + 2) * shape.inner if shape.lora_rank and mode == "autocast" else 0
    # One byte for each number of two outputs of a layer.
    per_token += 2 * shape.hidden if request.dropout and name in _WITH_DROPOUT else 0
    stream = 4 if mode == "autocast" else width
    head = head_elements(shape) * 2 if mode == "autocast" else 0
    pairs = 0.0 if fused else float(request.micro_batch * shape.heads * request.sequence_length**2)
    largest_scores = pairs * (4 if _is_softmax_fp32(request, name, mode) else width)
    matrices, trained = (
        sum(one.elements for one in shape.tensors if one.in_layer and one.elements > one.rows and one.trained in which)
        for which in ((True, False), (True,))
    )
    vocabulary = 0 if shape.family == "sequence-classification" else shape.vocabulary
    # Gemma's last norm computes in fp32 all through.
    upcast = 2 if name.startswith("gemma") and mode == "engine" else 0
    capped = width if name == "gemma2" else 0
    loss = _loss(request, tokens * vocabulary, width, capped)
    return Activations(
        layer=tokens * per_token + scores,
        scores=scores,
        checkpoint=tokens * shape.hidden * stream
        + (_products(request, tokens, width) if request.keeps_products else 0),
        outside=tokens
        * shape.hidden
        * (stream + (0 if name == "bert" and stream > width else width) + 4 * shape.gated + upcast)
        + _masks(request, name, fused, stream)
        + tokens * adapted_outside,
        layer_forward=max(
            tokens * (width * (2 * shape.inner + shape.hidden) + widened),
            _SCORES_FORWARD.get(name, 2.1) * largest_scores,
        ),
        layer_working=max(
            # The gate's kernel writes both gradients over what it kept.
            tokens
            * (width * ((1.0 if in_kernels else _PASSING.get(name, 2.0)) * shape.inner + shape.hidden) + widened),
            # What the feed-forward block kept is gone by then.
            largest_scores + pairs * width - tokens * width * (inner * shape.inner + narrow / 2 * shape.hidden),
        ),
        logits=loss[0],
        logits_forward=loss[1],
        logits_backward=loss[2],
        cast_layer=matrices * 2 if mode == "autocast" else 0,
        cast_head=head,
        cast_cached=trained * 2 if mode == "autocast" else 0,
    )


def _adapted(request: Request, name: str, mode: str, fused: bool, width: int) -> tuple[float, float]:
    """What LoRA keeps more or less of a token: in each layer, and outside them. An adapter keeps what its layer takes,
    so frozen layers save nothing by themselves."""
    shape = request.shape
    if shape.lora_rank is None:
        return 0.0, 0.0
    stream = 4 if mode == "autocast" else width
    # A's output.
    layer = float(width * shape.lora_rank * len(adapter_products(shape)) // 2)
    if mode == "autocast" and fused and name in _KEEPS_OUTPUT:
        # What attention puts out is made fp32 for the adapter, and 16 bits again: no longer attention's own.
        layer += width * shape.heads * shape.head_dim
    multiplied = 4 if name.startswith("gemma") else stream
    layer -= _NORMS_THAT_MULTIPLY.get(name, 0) * multiplied * shape.hidden
    # The head's input and the last norm's product.
    outside = -(width if shape.family == "causal-lm" else 0) - (multiplied if name in _NORMS_THAT_MULTIPLY else 0)
    if request.gradient_checkpointing:
        outside += stream if name in _SUMS_EMBEDDINGS else 0
    else:
        # The first norm, of embeddings that have no gradient.
        outside -= 4 if name in _NORMS_THAT_MULTIPLY else stream
    return layer, outside * shape.hidden


def _head_norms(shape: ModelShape, width: int, in_kernels: bool) -> float:
    """Of queries and keys, in each layer: what comes in, as fp32, and what trained weights multiply."""
    if shape.model_type not in _WITH_HEAD_NORMS:
        return 0.0
    each = width if in_kernels else 4 + (width if shape.lora_rank is None else 0)
    return float(each * (shape.heads + shape.key_value_heads) * shape.head_dim)


def head_elements(shape: ModelShape) -> int:
    return shape.vocabulary * shape.hidden if shape.family == "causal-lm" else shape.hidden * shape.hidden


def _scores(request: Request, name: str, mode: str, fused: bool, width: int) -> float:
    """By hand: every pair of tokens for every head. Fused: one number for each token and head."""
    pairs = request.micro_batch * request.shape.heads * request.sequence_length
    if fused:
        return 4.0 * pairs
    in_fp32 = _is_softmax_fp32(request, name, mode)
    each = _SCORES.get(name, 1.0) * width + (4 if in_fp32 else 0)
    if request.dropout and name in _WITH_DROPOUT:
        # A mask, and what came out of it beside what went in, which the softmax in fp32 does not keep.
        each += 1 + (0 if in_fp32 else width)
    return each * pairs * request.sequence_length


def _is_softmax_fp32(request: Request, name: str, mode: str) -> bool:
    on_cuda = mode == "autocast" and not request.box.in_host_memory
    return mode in _SOFTMAX_IN_FP32[name] or (on_cuda and name in _SOFTMAX_IN_FP32_ON_CUDA)


def _loss(request: Request, numbers: float, width: int, capped: int) -> tuple[float, float, float]:
    """Kept until the loss is through, and the most beside it, forward and backward; `numbers`: tokens by words."""
    if request.fused_loss:
        return numbers * width, numbers * width, numbers * width
    if request.chunked_loss and numbers:
        # Liger's fused_linear_cross_entropy.py: gradients of its input and of a matrix that is trained, made in the
        # forward pass; beside them the logits of one part, about as large as the input, and the matrix's of that part.
        shape, tokens = request.shape, request.micro_batch * request.sequence_length
        matrix = 0 if shape.lora_rank else shape.vocabulary * shape.hidden * width
        stream = tokens * shape.hidden * width
        return float(matrix + stream), float(matrix + 2 * stream), 0.0
    # The logits, in fp32 for the loss; then the loss's gradient and that of what it was made from.
    return numbers * (4 + capped), numbers * (width + (4 if width == 2 else 0) + capped), numbers * 8


def _products(request: Request, tokens: int, width: int) -> float:
    """torchtitan's apply_ac: of products in their order the first, the third and so on, and the fused attention."""
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    outputs = [query, key, key, shape.hidden, *([shape.inner] * (2 if shape.gated else 1)), shape.hidden]
    pairs = request.micro_batch * shape.heads * request.sequence_length
    return tokens * width * (sum(outputs[::2]) + query) + 4.0 * pairs


def _masks(request: Request, name: str, fused: bool, stream: int) -> float:
    """By hand, a causal mask of every pair of tokens, and one more for the layers that look back a window.

    Where layers are recomputed it is one of their inputs, and kept.
    """
    if fused or name == "bert" or not request.gradient_checkpointing:
        return 0.0
    return float(request.micro_batch * request.sequence_length**2 * stream * (2 if name == "gemma2" else 1))
