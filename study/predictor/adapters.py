"""Memory traffic and operators of LoRA's adapters in a step, in addition to their matrix products.

The operators are those of peft 0.21.2 and 0.13.2 (peft/tuners/lora/layer.py and bnb.py, Linear.forward) as
tests/unit/test_adapter_passes.py counts them. peft keeps the adapters of 16-bit weights in fp32
(autocast_adapter_dtype).
"""

from __future__ import annotations

import dataclasses

from study.predictor.products import adapter_products
from study.predictor.request import Request

# A cast between 16 bits and fp32 reads one and writes the other; dropout has a mask of a byte.
_CAST = 2 + 4
_MASK = 1
# Operators in the forward pass of a layer of Llama without adapters, in transformers 5.23.0.
LAYER_OPERATORS = 46


@dataclasses.dataclass(frozen=True)
class AdapterPasses:
    """Bytes of adapters' operators of a micro-batch, or their seconds."""

    forward: float = 0.0
    backward: float = 0.0

    def over(self, bytes_per_s: float) -> AdapterPasses:
        return AdapterPasses(self.forward / bytes_per_s, self.backward / bytes_per_s)


@dataclasses.dataclass(frozen=True)
class _PerElement:
    """Bytes per element of an adapter's input and output."""

    forward_in: float
    forward_out: float
    backward_in: float
    backward_out: float


def computes_adapters_in_fp32(request: Request) -> bool:
    """Whether the adapters of 16-bit weights are multiplied in fp32: nothing casts them, neither an engine nor
    autocast. peft's layers of quantized weights are trained under autocast, and do not cast their input there."""
    is_cast = request.autocast and not request.strategy.is_fsdp
    is_quantized = request.quantized or request.in_8_bits
    return request.has_fp32_adapters and not is_quantized and not is_cast


def _casts_adapters(request: Request) -> bool:
    """Whether peft casts an input to fp32 for its adapter, and autocast back to 16 bits for the product."""
    over_fp32 = request.precision in ("bf16", "fp16")
    is_quantized = request.quantized or request.in_8_bits
    return request.autocast and not is_quantized and (over_fp32 or request.pure)


def adapter_passes(request: Request) -> AdapterPasses:
    """Return the bytes that all adapters' operators other than products read and write in a micro-batch."""
    if not request.shape.lora_rank:
        return AdapterPasses()
    # A and B of adapters alternate: A has the layer's input, and B its output.
    products = adapter_products(request.shape)
    tokens = request.micro_batch * request.sequence_length
    inputs = tokens * sum(matrix.count * matrix.inner for matrix in products[::2])
    outputs = tokens * sum(matrix.count * matrix.out for matrix in products[1::2])
    widths = _bytes_per_element(request)
    return AdapterPasses(
        forward=inputs * widths.forward_in + outputs * widths.forward_out,
        backward=inputs * widths.backward_in + outputs * widths.backward_out,
    )


def _bytes_per_element(request: Request) -> _PerElement:
    """Return the bytes of: the input's casts and dropout; the output's scaling, its addition to the layer's output and
    its cast; backward the same, and the addition of the input's gradient to that of the layer."""
    if computes_adapters_in_fp32(request):
        dropout = _dropout_bytes(request, 4)
        return _PerElement(
            forward_in=_CAST + dropout,
            forward_out=2 * 4 + (2 + 4 + 4) + _CAST,
            backward_in=dropout + _CAST + 3 * 2,
            backward_out=2 * _CAST + 2 * 4,
        )
    if _casts_adapters(request):
        dropout = _dropout_bytes(request, 4)
        # Over fp32 weights the input is in fp32 already, and so is its gradient.
        widened = _CAST if request.pure else 0
        return _PerElement(
            forward_in=widened + dropout + _CAST,
            forward_out=(2 + 3) * 2,
            backward_in=_CAST + dropout + widened + 3 * (2 if request.pure else 4),
            backward_out=2 * 2,
        )
    width = request.loose_bytes
    dropout = _dropout_bytes(request, width)
    # peft copies the output of a 4-bit layer.
    copied = 2 * width if request.quantized else 0
    return _PerElement(
        forward_in=dropout,
        forward_out=(2 + 3) * width + copied,
        backward_in=dropout + 3 * width,
        backward_out=2 * width + copied,
    )


def _dropout_bytes(request: Request, width: int) -> int:
    return 2 * width + _MASK if request.lora_dropout else 0


def adapter_operators(request: Request) -> int:
    """Return the operators that adapters add to the forward pass of a layer."""
    shape = request.shape
    if not shape.lora_rank:
        return 0
    # Two products, scaling and addition.
    operators = 4 + bool(request.lora_dropout)
    if computes_adapters_in_fp32(request) or _casts_adapters(request):
        operators += 2
    if request.quantized:
        operators += 1
    return operators * len(adapter_products(shape)) // 2
