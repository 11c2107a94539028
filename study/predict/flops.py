"""Matrix-multiply FLOPs by formula, in the convention of study/measure/flops.py.

All products of the model, forward and backward, at the full sequence length: causal masking saves nothing in this
count, and recomputation adds nothing to it. Hardware FLOPs add what gradient checkpointing computes again.
"""

from __future__ import annotations

import dataclasses

from study.predict.adapters import INFIX
from study.predict.request import ModelShape, Request


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
