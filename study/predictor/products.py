"""Matrix products and FLOPs of the forward pass of a family of the table, by formula."""

from __future__ import annotations

import dataclasses
import functools
import math

from study.predictor.shape import INFIX, MAGNITUDE, ModelShape

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
        matmuls.append(MatMul(shape.hidden, math.ceil(shape.vocabulary / shape.head_parts), 1, in_layer=False))
    return tuple(matmuls)


@functools.lru_cache(maxsize=64)
def adapter_products(shape: ModelShape) -> tuple[MatMul, ...]:
    """Return the matrix products of the LoRA adapters: two per adapted product of a layer."""
    adapters = [param for param in shape.params if param.place == 0 and INFIX in param.name]
    matrices = [param for param in adapters if MAGNITUDE not in param.name]
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
