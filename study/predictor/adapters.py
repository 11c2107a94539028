"""Memory traffic and operators of LoRA's adapters in a step, in addition to their matrix products.

The operators are those of peft 0.21.2 and 0.13.2 (peft/tuners/lora/layer.py and bnb.py, Linear.forward) as
tests/unit/test_adapter_passes.py counts them. peft keeps the adapters of 16-bit weights in fp32
(autocast_adapter_dtype).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from study.config.precisions import in_autocast
from study.predictor.products import adapter_products
from study.predictor.request import FP32_BYTES, Request
from study.predictor.shape import INFIX, ModelShape

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
    over_fp32 = in_autocast(request.precision)
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
    dora = _dora_passes(request)
    return AdapterPasses(
        forward=inputs * widths.forward_in + outputs * widths.forward_out + dora.forward,
        backward=inputs * widths.backward_in + outputs * widths.backward_out + dora.backward,
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
    if shape.lora_dora:
        widths = dora_widths(request)
        # Of the norm seven, and of the magnitudes five; autocast casts three times.
        operators += 12 + bool(widths.weight_copy) + 3 * (widths.product < widths.adapter)
    if computes_adapters_in_fp32(request) or _casts_adapters(request):
        operators += 2
    if request.quantized:
        operators += 1
    return operators * len(adapter_products(shape)) // 2


# DoRA, by DoraLinearLayer.forward in dora.py of peft 0.21.2. In each forward pass of a layer both adapters multiply an
# identity matrix, which is as wide as the layer's input, and the product is scaled and added to the weight, whose norm
# is detached from the graph:
#
#     identity          ####****************    in the adapters' type; autocast multiplies a 16-bit copy, which stays
#     product               ############****    in the input's type from here on
#     weight's copy             ########****    of a quantized one, or of one in another type
#     scaled product            ####
#     sum                       ########
#     outputs                           ****    of the layer and of the adapter, multiplied by the magnitudes
#    -----------------------------------------> time


@dataclasses.dataclass(frozen=True)
class DoraWidths:
    """Bytes per element of DoRA's tensors; 0 for one that does not exist."""

    # Of the adapters' matrices and of the identity matrix, of autocast's copy of it, and of the products.
    adapter: int
    cast: int
    product: int
    # Of the input, and so of the product that is added to the weight, and of the weight's copy.
    summed: int
    weight_copy: int
    # Autocast's copy of the sum for its norm.
    normed: int
    # Of the layer's own output.
    base: int


def dora_widths(request: Request) -> DoraWidths:
    """Return the widths, from the types of weights and adapters, and under autocast of products and norms."""
    is_quantized = request.quantized or request.in_8_bits
    computing = request.computing_bytes
    adapter = computing if request.fsdp_gathers_16_bits else request.weight_bytes
    if request.has_fp32_adapters:
        adapter = FP32_BYTES
    # Over quantized weights only adapters in fp32 are under autocast.
    casts = _casts_adapters(request) or (is_quantized and request.has_fp32_adapters)
    product = 2 if casts else adapter
    # peft does not cast the input of a quantized layer under autocast.
    summed = computing if is_quantized and casts else adapter
    weight = 2 if is_quantized else (computing if request.fsdp_gathers_16_bits else request.weight_bytes)
    return DoraWidths(
        adapter=adapter,
        cast=2 if casts and adapter == FP32_BYTES else 0,
        product=product,
        summed=summed,
        weight_copy=summed if is_quantized or summed != weight else 0,
        normed=FP32_BYTES if casts and summed < FP32_BYTES else 0,
        base=computing,
    )


@dataclasses.dataclass(frozen=True)
class AdaptedMatrix:
    """Sizes of a weight with an adapter: its module, the rank, and the width of input and output."""

    module: str
    rank: int
    inner: int
    out: int


def adapted_matrices(shape: ModelShape, place: int = 0) -> Iterator[AdaptedMatrix]:
    """Yield the weights of a layer that have adapters."""
    first = None
    for param in shape.params:
        if param.place == place and f"{INFIX}A" in param.name:
            first = param
        elif param.place == place and f"{INFIX}B" in param.name and first is not None:
            module = param.name.partition(INFIX)[0]
            yield AdaptedMatrix(module, first.rows, first.elements // first.rows, param.rows)


def dora_temporaries(request: Request) -> float:
    """Return the most bytes that the norm of a weight takes in a forward pass, which does not keep them."""
    if not request.shape.lora_dora:
        return 0.0
    shape, widths = request.shape, dora_widths(request)
    places = {param.place for param in shape.params if INFIX in param.name}
    matrices = [matrix for place in places for matrix in adapted_matrices(shape, place)]
    tokens = request.micro_batch * request.sequence_length
    # After a matrix with wider outputs than the model other tensors of its layer follow, which are larger.
    return max(_norm_bytes(matrix, widths, tokens * (matrix.out <= shape.hidden)) for matrix in matrices)


def _norm_bytes(matrix: AdaptedMatrix, widths: DoraWidths, tokens: int) -> float:
    """Return the bytes of a weight's norm at the largest of its moments."""
    identity, weight = matrix.inner**2, matrix.inner * matrix.out
    kept_identity = (widths.cast or widths.adapter) * identity
    multiplied = (widths.adapter + widths.cast) * identity + widths.product * weight
    remaining = kept_identity + (widths.summed + widths.weight_copy) * weight
    added = remaining + max(2 * widths.summed, widths.summed + widths.normed) * weight
    # Both parts of the output, and the second one before it is scaled.
    outputs = remaining + 3 * max(widths.adapter, widths.base) * tokens * matrix.out
    return float(max(multiplied, added, outputs))


def dora_saved(request: Request) -> dict[str, int]:
    """Return the bytes per token that a layer saves of DoRA's outputs, that of the weight and that of the adapter, by
    module."""
    if not request.shape.lora_dora:
        return {}
    widths = dora_widths(request)
    return {matrix.module: (widths.base + widths.product) * matrix.out for matrix in adapted_matrices(request.shape)}


def dora_saved_weights(request: Request) -> float:
    """Return the bytes of copies of weights that a layer saves: with dropout the output is that of a second product,
    of the dropped input and the copy."""
    if not (request.shape.lora_dora and request.lora_dropout):
        return 0.0
    widths = dora_widths(request)
    # autocast multiplies a 16-bit copy.
    per_weight = widths.cast if widths.summed == FP32_BYTES and widths.cast else widths.weight_copy
    return float(sum(per_weight * matrix.inner * matrix.out for matrix in adapted_matrices(request.shape)))


def _dora_passes(request: Request) -> AdapterPasses:
    """Return the bytes that DoRA reads and writes in addition to LoRA: the norms of the weights, and the magnitudes of
    both parts of the output, whose gradients are products, too."""
    if not request.shape.lora_dora:
        return AdapterPasses()
    widths, tokens = dora_widths(request), request.micro_batch * request.sequence_length
    # Written, read by the product or by autocast, whose copy is written and read.
    identity = 2 * (widths.adapter + widths.cast)
    # The product is written; it is scaled, added, and the sum is read.
    weight = widths.product + 6 * widths.summed + 2 * widths.normed
    weight += (widths.product + widths.summed) * (widths.product != widths.summed)
    weight += (2 + widths.weight_copy) * bool(widths.weight_copy)
    output_forward, output_backward = _magnitude_bytes(widths)
    forward = backward = 0
    for matrix in adapted_matrices(request.shape):
        forward += (
            identity * matrix.inner**2 + weight * matrix.inner * matrix.out + output_forward * tokens * matrix.out
        )
        backward += output_backward * tokens * matrix.out
    layers = request.shape.layers
    return AdapterPasses(float(layers * forward), float(layers * backward))


def _magnitude_bytes(widths: DoraWidths) -> tuple[int, int]:
    """Return the bytes per element of an output, forward and backward: both of its parts are multiplied by the
    magnitudes and added; backward they have gradients, and so have the magnitudes."""
    # Magnitudes have the type of the adapters, and their products the wider one.
    width = max(widths.adapter, widths.base)
    parts = widths.base + widths.product
    forward, backward = parts + 5 * width, parts + 10 * width + 3 * widths.base
    cast = (width + widths.base) * (width != widths.base)
    backward += cast
    if widths.product < width:
        # LoRA's scaling and sum under autocast are in 16 bits, DoRA's are not, and the sum is cast.
        forward += 4 * (width - widths.base) + cast
        backward += 2 * (width - widths.base) + 3 * cast
    return forward, backward
