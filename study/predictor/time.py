"""Seconds of one optimizer step: a roofline of every part, and its exposed communication."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from study.config.yaml_sections import read_own
from study.host.memory import GIB
from study.predictor import activations
from study.predictor.activations import is_fused
from study.predictor.communication import exchange_of
from study.predictor.hardware import Hardware
from study.predictor.request import Estimate, Memory, Request, Time
from study.predictor.state import state_bytes

# When a host's memory peaks.
_WHEN = {"load": "while each process loads the model", "train": "in training", "save": "while the model is saved"}


def usable_bytes(box: Hardware) -> float:
    """Return the memory of a device, or without one a rank's share of the node's."""
    if box.in_host_memory:
        return (box.host_gib_per_node or 0) * GIB / box.gpus_per_node
    return box.device.visible_gib * GIB


def device_bytes(memory: Memory, at_upper_end: bool = False) -> float:
    """Return all that the driver sees of a process: the allocator's pool and the context."""
    return _end(memory.peak_reserved, at_upper_end) + memory.device_parts["context"]


def excess_bytes(memory: Memory, box: Hardware, at_upper_end: bool = False) -> float:
    """Return the bytes that are missing, or the room that is left as a negative number."""
    host_bytes, held = (box.host_gib_per_node or 0) * GIB, _end(memory.host_peak, at_upper_end)
    if memory.process_peak is not None:
        doubt = _end(memory.process_peak, at_upper_end) - memory.process_peak.value
        return box.gpus_per_node * (memory.peak_reserved.value + doubt) + held - host_bytes
    on_host = held - host_bytes if box.host_gib_per_node is not None else -math.inf
    on_device = device_bytes(memory, at_upper_end) - usable_bytes(box)
    # What is on the host does not go by the samples.
    return max(on_device, on_host) if on_host > 0 else on_device


def fits(memory: Memory, box: Hardware, at_upper_end: bool = False) -> bool:
    return excess_bytes(memory, box, at_upper_end) <= 0


def left_share(memory: Memory, box: Hardware, at_upper_end: bool = False) -> float:
    """Return the free share of a device, or of the host where that is the device."""
    held = excess_bytes(memory, box, at_upper_end) if box.in_host_memory else None
    usable = usable_bytes(box)
    return 1 - device_bytes(memory, at_upper_end) / usable if held is None else -held / (usable * box.gpus_per_node)


def why(memory: Memory, box: Hardware) -> str:
    """One line: how much is left, or what is too large."""
    peak, usable = device_bytes(memory), usable_bytes(box)
    if fits(memory, box):
        at_most = excess_bytes(memory, box, at_upper_end=True)
        doubt = f"; may not fit: up to {at_most / GIB:.1f} GiB too much" if at_most > 0 else ""
        return f"{left_share(memory, box):.0%} of the {'memory' if box.in_host_memory else 'device'} is left{doubt}"
    if box.in_host_memory and box.host_gib_per_node is not None:
        needed = box.host_gib_per_node + excess_bytes(memory, box) / GIB
        return f"needs {needed:.1f} GiB of host memory for all ranks, of {box.host_gib_per_node:.1f}"
    if peak > usable or box.host_gib_per_node is None:
        part, size = max(memory.device_parts.items(), key=lambda item: item[1])
        return f"needs {peak / GIB:.1f} GiB of {usable / GIB:.1f}; {part} alone {size / GIB:.1f}"
    when = max(_WHEN, key=memory.host_parts.__getitem__)
    needed = memory.host_peak.value / GIB
    return f"needs {needed:.1f} GiB of host memory, of {box.host_gib_per_node:.1f}, {_WHEN[when]}"


def _end(figure: Estimate, upper: bool) -> float:
    """An interval that lies below its figure, as of a prediction that leans high, does not lower it."""
    return max(figure.value, figure.high or 0.0) if upper else figure.value


FILE = Path(__file__).with_name("intervals.yaml")


@functools.cache
def _table() -> dict[str, Any]:
    return read_own(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def slowest_offload() -> float:
    """How many times as long as predicted a step with offload was at most."""
    return float(_table().get("offload_step_s", {}).get("high", math.inf))


def estimate(what: str, value: float, certain: float = 0.0) -> Estimate:
    """`low` and `high` as shares of what is not certain of the value; none where nothing was validated."""
    row, rest = _table().get(what), value - certain
    return (
        Estimate(value) if row is None else Estimate(value, certain + rest * row["low"], certain + rest * row["high"])
    )


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants that no source gives, fitted to the rows of validation/published.yaml with `use: fit`."""

    # Of the best matrix product that was measured, what a long run of many shapes keeps.
    sustained: float
    # Traffic of everything but matrix products, over what is counted below: as transformers' modules run it, one
    # operation after another, and compiled.
    eager_traffic: float
    compiled_traffic: float
    # Of communication that hides behind computing, what computing loses by it.
    hidden_share: float
    # The CPU's time for a layer in each pass over it: no step is faster. DeepSpeed's stage 3 adds its hooks.
    launch_s: float
    hooks_s: float
    # What DeepSpeed's Adam on the host reads and writes, of all ranks of a node that share out its cores, with the
    # clipping and the copies around it. Alone it was seen at 109 to 127 (table 4 of https://arxiv.org/abs/2101.06840).
    host_gb_per_s: float


# Written by `python -m study.report.pages.prediction fit`.
FITTED_FILE = Path(__file__).with_name("fitted.yaml")
FITTED = Constants(**read_own(FITTED_FILE.read_text(encoding="utf-8"))["constants"])

# --- What was read off sources.
# Best measured product over the data sheet's peak, where none is published: A100 0.87, H100 0.80
# (stas00/ml-engineering, compute/accelerator).
_MEASURED_OVER_PEAK = 0.80
# Of the peak, a fused attention forward and backward. FlashAttention-2 reaches 50-73 % on A100 (its paper's abstract,
# https://arxiv.org/abs/2307.08691) and 35 % on H100 (FlashAttention-3's, https://arxiv.org/abs/2407.08608).
_FUSED_ATTENTION_SHARE, _FUSED_ATTENTION_SHARE_HOPPER = 0.60, 0.35
# Its backward pass has five products where the forward has two.
_FUSED_BACKWARD_OVER_FORWARD = 2.5

# --- What was counted in transformers' layers: reads and writes of one tensor of the hidden width, forward and backward
# (norms 4 + 8, residuals 6 + 4, dropout 4 + 6, moving heads 6 + 6), of the inner width, and of the attention scores
# where attention is not fused. Llama's norms go through fp32 and its queries and keys are turned.
_HIDDEN_PASSES, _HIDDEN_PASSES_GATED = 44, 76
_INNER_PASSES, _INNER_PASSES_GATED = 5, 10
_SCORE_PASSES = 18
# Bytes for each logit: written, widened to fp32, their softmax, and the same backward.
_LOGIT_BYTES = 30
# torch's AdamW, one operation after another over lists: 80 bytes for a parameter, and clipping 12.
_OPTIMIZER_BYTES = 92
# What autocast reads and writes to make 16-bit copies of fp32 weights, and fp32 gradients of 16-bit ones.
_AUTOCAST_BYTES, _AUTOCAST_BYTES_FROZEN = 12, 6
# Around an adapter, of the width that its layer puts out: scaled, added, scaled backward; of the width that comes in:
# its gradient added to the layer's (peft/tuners/lora/layer.py, Linear.forward).
_ADAPTER_PASSES_OUT, _ADAPTER_PASSES_IN = 2 + 3 + 2, 3
# DeepSpeed's Adam on the host reads gradient, master and two moments, and writes three of them and the new weight.
_CPU_ADAM_BYTES = 30


@dataclasses.dataclass(frozen=True)
class _Step:
    """A request in the units that the parts of its step need."""

    request: Request
    constants: Constants
    # Of matrix products, FLOP/s, and of memory, bytes/s.
    rate: float
    bandwidth: float

    @property
    def tokens(self) -> int:
        return self.request.micro_batch * self.request.sequence_length

    @property
    def loose_bytes(self) -> int:
        """Autocast computes norms, softmax and what follows them in fp32."""
        autocast = self.request.precision in ("bf16", "fp16") and self.request.autocast
        return 4 if autocast else self.request.computing_bytes


def predict_time(request: Request, memory: Memory | None = None, constants: Constants = FITTED) -> Time:
    """`memory` is for a note alone, where the device would not hold it."""
    device, precision, times = request.box.device, _base_precision(request), request.accumulation
    peak = device.peak_tflops.get(precision)
    # A precision that the device has no units for, as bf16 on V100, runs at fp32's rate at best.
    slowest = device.peak_tflops.get("fp32") or device.matmul_tflops.get("fp32", 0.0)
    best = device.matmul_tflops.get(precision) or _MEASURED_OVER_PEAK * (peak or slowest)
    step = _Step(request, constants, constants.sustained * best * 1e12, device.memory_bandwidth_gb_per_s * 1e9)
    forward, backward = _passes_s(step)
    exchange = exchange_of(request, forward, backward)
    parts = {
        "compute": times * max(forward + backward, _launched_s(step)) + _optimizer_s(step),
        "communication_exposed": exchange.exposed + constants.hidden_share * exchange.overlapped,
        "communication_overlapped": exchange.overlapped,
        "offload": _offload_s(step), "cpu_adam": _cpu_adam_s(step), "nvme": _nvme_s(step),
    }  # fmt: skip
    total = sum(seconds for name, seconds in parts.items() if name != "communication_overlapped")
    # Published times of offload are too few, and too far apart, for an interval; of LoRA, and of several GPUs without
    # NVLink, there are none.
    is_known = not (request.strategy.offloads or request.shape.lora_rank or request.box.meets_over_pcie)
    tokens_per_s = step.tokens * times / total
    return Time(
        parts=parts,
        step_s=estimate("step_s", total) if is_known else Estimate(total),
        tokens_per_s_per_gpu=estimate("tokens", tokens_per_s) if is_known else Estimate(tokens_per_s),
        mfu=None if peak is None else activations.model_flops(request) / (total * peak * 1e12),
        hfu=None if peak is None else activations.hardware_flops(request) / (total * peak * 1e12),
        notes=_notes(request, memory),
    )


def _base_precision(request: Request) -> str:
    return request.precision.removesuffix("-engine")


def _passes_s(step: _Step) -> tuple[float, float]:
    """Forward and backward. Each product of the forward pass has two backward, of a frozen matrix one; what is computed
    again comes first."""
    request, shape, tokens = step.request, step.request.shape, step.tokens
    # Forward, outside the layers; backward, of the input and, but for frozen matrices, of the weights.
    in_layers = outside = of_inputs = of_weights = 0.0
    own = [(product, bool(shape.lora_rank)) for product in activations.products(shape)]
    for product, is_frozen in [*own, *((product, False) for product in activations.adapter_products(shape))]:
        seconds = product.count * _product_s(step, tokens, product.inner, product.out)
        if not product.in_layer:
            outside += seconds
            continue
        in_layers += seconds
        of_inputs += product.count * _product_s(step, tokens, product.out, product.inner)
        if not is_frozen:
            of_weights += product.count * _product_s(step, product.out, tokens, product.inner)
    attention, elementwise = _attention_s(step), _elementwise_s(step)
    head = outside + activations.head_flops(shape) * request.micro_batch / step.rate
    is_frozen_head = shape.lora_rank and shape.family == "causal-lm"
    logits = casts = 0.0
    if shape.family == "causal-lm":
        each = 3 * request.computing_bytes if request.fused_loss else _LOGIT_BYTES
        logits = each * tokens * shape.vocabulary / step.bandwidth
    if request.precision in ("bf16", "fp16") and not request.strategy.is_fsdp:
        # Autocast keeps its copies for one micro-batch.
        moved = _AUTOCAST_BYTES * shape.trained_parameters + _AUTOCAST_BYTES_FROZEN * shape.frozen_parameters
        casts = moved / step.bandwidth
    layers = in_layers + attention + elementwise / 3
    again = layers / request.checkpoint_every if request.gradient_checkpointing else 0.0
    attention_backward = attention * (_FUSED_BACKWARD_OVER_FORWARD if is_fused(request) else 2.0)
    backward = of_inputs + of_weights + attention_backward + elementwise * 2 / 3 + head * (1 if is_frozen_head else 2)
    return layers + head + logits / 3 + casts / 2, backward + logits * 2 / 3 + casts / 2 + again


def _product_s(step: _Step, rows: float, inner: float, out: float) -> float:
    moved = step.request.computing_bytes * (rows * inner + inner * out + rows * out)
    return max(2 * rows * inner * out / step.rate, moved / step.bandwidth)


def _attention_s(step: _Step) -> float:
    """Forward, of all layers."""
    request, shape = step.request, step.request.shape
    done = activations.attention_flops(shape, request.sequence_length) * request.micro_batch
    if not is_fused(request):
        scores = request.micro_batch * shape.heads * request.sequence_length**2 * shape.layers
        moved = scores * step.loose_bytes * _SCORE_PASSES / 3
        return done / step.rate + moved / step.bandwidth
    causal = 0.5 if shape.family == "causal-lm" else 1.0
    device = request.box.device
    peak = device.peak_tflops.get(_base_precision(request))
    hopper = device.name.startswith(("H100", "H20", "H200", "H800", "GH200"))
    share = _FUSED_ATTENTION_SHARE_HOPPER if hopper else _FUSED_ATTENTION_SHARE
    return causal * done / (share * peak * 1e12 if peak else step.rate)


def _elementwise_s(step: _Step) -> float:
    """Everything in the layers that is not a matrix product or attention, forward and backward."""
    shape = step.request.shape
    hidden = _HIDDEN_PASSES_GATED if shape.gated else _HIDDEN_PASSES
    inner = _INNER_PASSES_GATED if shape.gated else _INNER_PASSES
    widths = shape.layers * (hidden * shape.hidden + inner * shape.inner)
    more = step.constants.compiled_traffic if step.request.compiled else step.constants.eager_traffic
    matrices = activations.adapter_products(shape)
    # A and B by turns: A takes what the layer takes, and B puts out what it puts out. They are counted pass by pass;
    # the rest is what a fused kernel would move, and the constant what eager kernels move for it.
    adapters = sum(each.count * each.inner for each in matrices[::2]) * _ADAPTER_PASSES_IN
    adapters += sum(each.count * each.out for each in matrices[1::2]) * _ADAPTER_PASSES_OUT
    return step.tokens * step.loose_bytes * (more * widths + adapters) / step.bandwidth


def _optimizer_s(step: _Step) -> float:
    """On the device; what the host does of it is elsewhere."""
    request, strategy = step.request, step.request.strategy
    shards = request.box.ranks if strategy.is_fsdp or strategy.zero_stage else 1
    if strategy.is_fsdp:
        shards = request.ranks_per_replica or shards
    on_device = 1 - _share_on_host(request)
    return on_device * _OPTIMIZER_BYTES * request.shape.trained_parameters / shards / step.bandwidth


def _share_on_host(request: Request) -> float:
    settings = request.settings if request.strategy.deepspeed else None
    return settings.optimizer.ratio if settings and settings.optimizer else 0.0


def _launched_s(step: _Step) -> float:
    """Seconds that the CPU needs to start one micro-batch's kernels: backward is as much as two forward passes."""
    request = step.request
    each = step.constants.launch_s + (step.constants.hooks_s if request.strategy.zero_stage == 3 else 0.0)
    return each * request.shape.layers * (3 + (1 / request.checkpoint_every if request.gradient_checkpointing else 0))


def _offload_s(step: _Step) -> float:
    """Over PCIe: gradients to the host, new weights back, and weights for every pass where they wait there."""
    request = step.request
    link = (request.box.device.pcie_gb_per_s or request.box.device.memory_bandwidth_gb_per_s) * 1e9
    shape, part = request.shape, request.weight_bytes / request.box.ranks
    # A gradient is added up on the device: what waits on the host comes back for each later micro-batch.
    moved = _share_on_host(request) * shape.trained_parameters * 2
    if request.strategy.offload_device("param"):
        moved += 2 * shape.parameters + request.gathered_again
    return request.accumulation * moved * part / link


def _cpu_adam_s(step: _Step) -> float:
    request = step.request
    on_node = request.shape.trained_parameters / request.box.nodes * _share_on_host(request)
    rate = request.box.host_memory_gb_per_s or step.constants.host_gb_per_s
    return on_node * _CPU_ADAM_BYTES / (rate * 1e9)


def _nvme_s(step: _Step) -> float:
    """A node's ranks share its NVMe; half of what an optimizer moves is read, half written.

    Weights that wait there are read in every pass, and written when they are new (_partitioned_params_swap_out in
    DeepSpeed's stage3.py).
    """
    request, box = step.request, step.request.box
    state = state_bytes(request.strategy, request.precision, box.ranks)
    if not state.nvme:
        return 0.0
    both = 0.5 / box.nvme_read_gb_per_s + 0.5 / box.nvme_write_gb_per_s
    passed = request.accumulation * (2 * request.shape.parameters + request.gathered_again)
    of_step = state.nvme_per_step * request.shape.trained_parameters * both
    of_passes = state.nvme_per_pass * passed / box.nvme_read_gb_per_s
    new = state.nvme_per_pass * request.shape.trained_parameters / box.nvme_write_gb_per_s
    return box.gpus_per_node * (of_step + of_passes + new) / 1e9


def _notes(request: Request, memory: Memory | None) -> tuple[str, ...]:
    device, name = request.box.device, _base_precision(request)
    notes = [
        "MFU counts every product at the full sequence length: causal masking saves nothing in it, recomputation adds"
        " nothing to it; HFU adds the layers' second forward pass"
    ]
    if device.peak_tflops.get(name) is None and name not in device.matmul_tflops:
        notes.append(f"{device.name} has no units for {name}: the rate is that of fp32 at best")
    elif name not in device.matmul_tflops:
        notes.append(
            f"there is no published rate of {device.name}'s best matrix product: {_MEASURED_OVER_PEAK:.0%} of its peak"
        )
    if memory is not None and device.memory_gib and device_bytes(memory) > usable_bytes(request.box):
        notes.append(f"this does not fit: the time is that of a {device.name} with more memory")
    if (of_host := host_adam_note(request)) is not None:
        notes.append(of_host)
    if request.shape.lora_rank:
        notes.append(LORA_NOTE)
    if request.swapped:
        notes.append(f"NVMe reads {request.box.nvme_read_gb_per_s} and writes {request.box.nvme_write_gb_per_s} GB/s")
    if request.box.nodes > 1:
        notes.append(f"{request.box.network_gb_per_s:g} GB/s of network for each GPU")
    return tuple(notes)


LORA_NOTE = (
    "a time with LoRA is counted by the constants of full training and was held against none: no products for frozen"
    " weights, the adapters' own, and no more of the CPU's time for a layer"
)


def host_adam_note(request: Request) -> str | None:
    """Return what the time of an offloaded optimizer rests on, and how not to lose it."""
    if not request.strategy.offload_device("optimizer"):
        return None
    if (said := request.box.host_memory_gb_per_s) is not None:
        return f"the host's Adam reads and writes {said:.0f} GB/s for all ranks of a node, as measured or given"
    return (
        f"the host's Adam: {FITTED.host_gb_per_s:.0f} GB/s for all ranks of a node, as published of 128 cores; another"
        " box had 10. accelerate launch and torchrun leave a rank one thread: set OMP_NUM_THREADS to a rank's cores,"
        " and --enable_cpu_affinity"
    )
