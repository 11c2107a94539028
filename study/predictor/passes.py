"""Seconds of the forward and the backward pass of a micro-batch, by a roofline per part."""

from __future__ import annotations

import dataclasses

from study.config.precisions import computing_type, in_autocast
from study.predictor.activations import is_fused
from study.predictor.adapters import AdapterPasses, adapter_passes, computes_adapters_in_fp32
from study.predictor.constants import Constants
from study.predictor.losses import IN_PLACE, RECOMPUTED
from study.predictor.products import adapter_products, attention_flops, head_flops, matmuls
from study.predictor.request import FP32_BYTES, Request
from study.predictor.shape import is_packed, trains_head
from study.predictor.traced_activations import trace

# --- Constants from published sources.
# Best measured product over the data sheet's peak, if no measurement is published: A100 0.87, H100 0.80
# (stas00/ml-engineering, compute/accelerator).
MEASURED_OVER_PEAK = 0.80
# Fraction of the peak that a fused attention reaches, forward and backward. FlashAttention-2 reaches 50-73 % on A100
# (abstract of https://arxiv.org/abs/2307.08691) and 35 % on H100 (FlashAttention-3, https://arxiv.org/abs/2407.08608).
_FUSED_ATTENTION_SHARE, _FUSED_ATTENTION_SHARE_HOPPER = 0.60, 0.35
# Compute capability of Hopper: H100, H200, H800, H20, GH200.
_HOPPER = 9.0
# Its backward pass has five products, its forward pass two.
_FUSED_BACKWARD_OVER_FORWARD = 2.5

# --- CPU seconds of FSDP1's hooks of one unit over those of a layer's forward pass, which `launch_s` has: torch 2.13.0,
# `python tools/fsdp_units.py`.
_UNIT_FORWARD_OF_LAYER, _UNIT_BACKWARD_OF_LAYER = 0.54, 0.43

# --- Counts from transformers' layers: reads and writes of one tensor of the hidden width, forward and backward (norms
# 4 + 8, residuals 6 + 4, dropout 4 + 6, transposing heads 6 + 6), of the inner width, and of the attention scores if
# attention is not fused. Llama's norms compute in fp32, and its queries and keys have rotary positions.
_HIDDEN_PASSES, _HIDDEN_PASSES_RMS = 44, 76
_INNER_PASSES, _INNER_PASSES_GATED = 5, 10
_SCORE_PASSES = 18
# Bytes of traffic per logit: written, cast to fp32, softmax, and the same backward.
_LOGIT_BYTES = 30
# Traffic per parameter of autocast: 16-bit copies of fp32 weights, and fp32 gradients from 16-bit ones.
_AUTOCAST_BYTES, _AUTOCAST_BYTES_FROZEN = 12, 6
# Half a byte of a 4-bit weight, and the fp32 scale of a block of 64.
_PER_4_BIT_WEIGHT = 0.5 + 4 / 64
# Of them, residuals and transposed heads: what kernels of norms, rotary positions and the loss leave to torch.
_HIDDEN_PASSES_OF_TORCH = 10 + 12


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Rates of a device: FLOP/s of matrix products, and bytes/s of memory."""

    products: float
    fp32_products: float
    memory: float


@dataclasses.dataclass(frozen=True)
class _Work:
    """Seconds of a micro-batch's products and attention."""

    # Forward in the layers, and backward there.
    products: float
    products_backward: float
    # Forward.
    attention: float
    # What recomputation repeats of them, and the head.
    repeated: float
    head: float = 0.0


def _device_rates(request: Request, constants: Constants) -> _Rates:
    device, precision = request.box.device, computing_type(request.precision)
    peak = device.peak_tflops.get(precision)
    fp32 = device.matmul_tflops.get("fp32") or MEASURED_OVER_PEAK * (device.peak_tflops.get("fp32") or 0.0)
    # A precision without hardware units, such as bf16 on V100, runs at the fp32 rate at best.
    slowest = device.peak_tflops.get("fp32") or device.matmul_tflops.get("fp32", 0.0)
    best = device.matmul_tflops.get(precision) or MEASURED_OVER_PEAK * (peak or slowest)
    return _Rates(
        products=constants.sustained * best * 1e12,
        fp32_products=constants.sustained * (fp32 or best) * 1e12,
        memory=device.memory_bandwidth_gb_per_s * 1e9,
    )


def passes_s(request: Request, constants: Constants) -> tuple[float, float]:
    """Return seconds of the forward and the backward pass of a micro-batch; backward includes recomputation."""
    rates = _device_rates(request, constants)
    is_traced = request.shape.is_traced
    work = _traced_work(request, rates) if is_traced else _counted_work(request, rates)
    casts = 0.0 if is_traced else _casts_s(request, rates)
    logits = _logits_s(request, rates)
    elementwise = _elementwise_s(request, constants, rates)
    adapters = AdapterPasses()
    if not is_traced:
        adapters = adapter_passes(request).over(rates.memory)
    dequantization, recomputation = _dequantization_s(request, rates), 0.0
    waits = _unit_waits_s(request, constants, rates)
    if request.gradient_checkpointing:
        repeated = work.repeated + elementwise / 3 + adapters.forward + dequantization + waits.forward
        recomputation = repeated / request.checkpoint_every
    backward_attention = work.attention * (_FUSED_BACKWARD_OVER_FORWARD if is_fused(request) else 2.0)
    forward = work.products + work.attention + elementwise / 3 + adapters.forward + dequantization
    forward += work.head + logits / 3 + casts / 2 + waits.forward
    backward = work.products_backward + backward_attention + elementwise * 2 / 3
    backward += adapters.backward + waits.backward + work.head * _head_products(request) + dequantization
    return forward, backward + logits * 2 / 3 + casts / 2 + recomputation


def unit_waits_s(request: Request, constants: Constants) -> float:
    """Return seconds of a step that a GPU waits for FSDP1's units of adapters."""
    waits = _unit_waits_s(request, constants, _device_rates(request, constants))
    repeated = waits.forward / request.checkpoint_every if request.gradient_checkpointing else 0.0
    return request.accumulation * (waits.forward + repeated + waits.backward)


def _unit_waits_s(request: Request, constants: Constants, rates: _Rates) -> AdapterPasses:
    """Return seconds that a GPU waits for FSDP1's units of adapters: torch lets the CPU prepare two units ahead
    (_FreeEventQueue in its _limiter_utils.py), those of one adapter, whose hooks only the adapted product can hide."""
    shape = request.shape
    has_units = request.strategy.is_fsdp and request.fsdp_version == 1 and not request.fsdp_unwrapped
    if not shape.lora_rank or shape.is_traced or not has_units or request.has_mixed_units or request.data_ranks == 1:
        return AdapterPasses()
    tokens, width = request.micro_batch * request.sequence_length, request.computing_bytes
    hooks_forward = 2 * _UNIT_FORWARD_OF_LAYER * constants.launch_s
    hooks_backward = 2 * _UNIT_BACKWARD_OF_LAYER * constants.launch_s
    waits = AdapterPasses()
    products = adapter_products(shape)
    for first, second in zip(products[::2], products[1::2], strict=True):
        adapted_s = _product_s(rates, rates.products, width, tokens, first.inner, second.out)
        if request.quantized:
            adapted_s += (_PER_4_BIT_WEIGHT + width) * first.inner * second.out / rates.memory
        waits = AdapterPasses(
            waits.forward + first.count * max(0.0, hooks_forward - adapted_s),
            waits.backward + first.count * max(0.0, hooks_backward - adapted_s),
        )
    return waits


def _head_products(request: Request) -> int:
    """Return the products of the output layer's backward pass. With adapters the weights of a language model's are
    frozen, unless a copy of it is trained."""
    shape = request.shape
    is_frozen = bool(shape.lora_rank) and shape.family == "causal-lm" and not trains_head(shape)
    return (1 if is_frozen else 2) + (request.loss_kernel in RECOMPUTED)


def _traced_work(request: Request, rates: _Rates) -> _Work:
    """Return the work of all traced products; a fused attention has twice its forward FLOPs in the convention of the
    trace."""
    traced, rate = trace(request), rates.products
    return _Work(
        products=(traced.forward - traced.attention) / rate,
        products_backward=(traced.backward - 2 * traced.attention) / rate,
        attention=_fused_attention_s(request, traced.attention, rate),
        repeated=traced.layers_forward / rate,
    )


def _counted_work(request: Request, rates: _Rates) -> _Work:
    shape, rate = request.shape, rates.products
    in_layers, outside, products_backward = _products_s(request, rates)
    flops = attention_flops(shape, request.sequence_length) * request.micro_batch
    if is_fused(request):
        attention = _fused_attention_s(request, flops, rate)
    else:
        scores = request.micro_batch * shape.heads * request.sequence_length**2 * shape.layers
        attention = flops / rate + scores * request.loose_bytes * _SCORE_PASSES / 3 / rates.memory
    head = outside + head_flops(shape) * request.micro_batch / rate
    return _Work(in_layers, products_backward, attention, repeated=in_layers + attention, head=head)


def _elementwise_s(request: Request, constants: Constants, rates: _Rates) -> float:
    """Return seconds of a layer's operations other than matrix products and attention, forward and backward."""
    shape, tokens = request.shape, _tokens_of_a_layer(request)
    hidden = _HIDDEN_PASSES_RMS if shape.has_rms_norms else _HIDDEN_PASSES
    inner = _INNER_PASSES_GATED if shape.gated else _INNER_PASSES
    factor = constants.compiled_traffic if request.compiled else constants.eager_traffic
    # Norms and residuals of a rank's own tokens, and its own heads.
    width = shape.hidden / request.stream_ranks
    traffic = factor * (shape.layers * (hidden * width + inner * shape.inner))
    if request.compiled and request.torch_gate:
        unfused_width = _HIDDEN_PASSES_OF_TORCH * width + inner * shape.inner
        traffic += (constants.eager_traffic - factor) * shape.layers * unfused_width
    return tokens * request.loose_bytes * traffic / rates.memory


def _tokens_of_a_layer(request: Request) -> float:
    """Return the tokens of a micro-batch in the mean of all layers, of which an encoder's and a decoder's differ."""
    shape = request.shape
    if shape.is_traced and (elements := trace(request).stream):
        return elements / (shape.hidden * shape.layers)
    return request.micro_batch * request.sequence_length


def _logits_s(request: Request, rates: _Rates) -> float:
    """Return seconds of the loss of a language model, forward and backward, without the product of its head."""
    if request.shape.family != "causal-lm" and not request.shape.has_decoder:
        return 0.0
    per_logit = 3 * request.computing_bytes if request.loss_kernel in IN_PLACE else _LOGIT_BYTES
    return per_logit * request.output_tokens * request.shape.vocabulary / rates.memory


def _casts_s(request: Request, rates: _Rates) -> float:
    """Return seconds of autocast's copies of weights and gradients; it caches its copies for one micro-batch."""
    if not in_autocast(request.precision) or request.strategy.is_fsdp:
        return 0.0
    shape = request.shape
    moved = _AUTOCAST_BYTES * shape.trained_parameters + _AUTOCAST_BYTES_FROZEN * shape.frozen_parameters
    return moved / rates.memory


def _dequantization_s(request: Request, rates: _Rates) -> float:
    """Return seconds in which bitsandbytes reads 4-bit weights and their scales and writes them in the type of the
    products: in each forward pass, and again in the backward pass (MatMul4Bit in autograd/_functions.py)."""
    if not request.quantized:
        return 0.0
    shape = request.shape
    weights = sum(param.elements for param in shape.params if is_packed(shape, param))
    return (_PER_4_BIT_WEIGHT + request.computing_bytes) * weights / rates.memory


def _products_s(request: Request, rates: _Rates) -> tuple[float, float, float]:
    """Return seconds of the matrix products: forward in the layers and outside, and backward in the layers. Each
    forward product has two backward products, of a frozen matrix one."""
    shape, width, tokens = request.shape, request.computing_bytes, request.micro_batch * request.sequence_length

    def product_s(rows: float, inner: float, out: float) -> float:
        return _product_s(rates, rate, width, rows, inner, out)

    in_layers = outside = input_gradients = weight_gradients = 0.0
    model_products = matmuls(shape)
    rate = rates.products
    for index, product in enumerate((*model_products, *adapter_products(shape))):
        if index == len(model_products) and computes_adapters_in_fp32(request):
            width = FP32_BYTES
            rate = rates.fp32_products
        seconds = product.count * product_s(tokens, product.inner, product.out)
        if not product.in_layer:
            outside += seconds
            continue
        in_layers += seconds
        input_gradients += product.count * product_s(tokens, product.out, product.inner)
        if not shape.lora_rank or request.has_mixed_units or index >= len(model_products):
            weight_gradients += product.count * product_s(product.out, tokens, product.inner)
    return in_layers, outside, input_gradients + weight_gradients


def _product_s(rates: _Rates, rate: float, width: float, rows: float, inner: float, out: float) -> float:
    """Return seconds of a matrix product: the larger of compute and memory traffic."""
    moved = width * (rows * inner + inner * out + rows * out)
    return max(2 * rows * inner * out / rate, moved / rates.memory)


def _fused_attention_s(request: Request, flops: float, rate: float) -> float:
    """Return forward seconds of a fused attention, without masked pairs of tokens."""
    shape, device = request.shape, request.box.device
    causal = 0.5 if shape.family == "causal-lm" else 1.0
    peak = device.peak_tflops.get(computing_type(request.precision))
    is_hopper = device.compute_capability == _HOPPER
    peak_fraction = _FUSED_ATTENTION_SHARE_HOPPER if is_hopper else _FUSED_ATTENTION_SHARE
    # The power limit of a T4 and of an MI300X holds a product below the fraction of their peak.
    return causal * flops / (min(peak_fraction * peak * 1e12, rate) if peak else rate)
