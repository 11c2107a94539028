"""Names of precisions: the type of the products, and whether autocast or the engine casts to it."""

from __future__ import annotations

# After the name of a type: DeepSpeed casts the weights. Without it, autocast casts fp32 weights for each product.
_OF_ENGINE = "-engine"


def computing_type(precision: str) -> str:
    """Return the type of the products: fp32, bf16 or fp16."""
    return precision.removesuffix(_OF_ENGINE)


def in_engine(precision: str) -> bool:
    """Whether the weights are in 16 bits, with the engine's own masters."""
    return precision.endswith(_OF_ENGINE)


def in_autocast(precision: str) -> bool:
    """Whether autocast casts fp32 weights to 16 bits."""
    return precision in ("bf16", "fp16")


def computes_in_fp16(precision: str) -> bool:
    """Whether a loss is scaled, as fp16 needs it."""
    return computing_type(precision) == "fp16"


def computes_in_bf16(precision: str) -> bool:
    """Whether products are in bf16, under autocast or in the engine."""
    return computing_type(precision) == "bf16"
