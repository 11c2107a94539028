"""Predicted seconds of an optimizer step, by a roofline per part plus exposed communication, and whether it fits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from study.config.text import rounded, rounded_seconds
from study.config.yaml_sections import load_package_yaml
from study.host.memory import GIB
from study.predictor import activations, live
from study.predictor.activations import is_fused
from study.predictor.communication import communication_time, falling_network
from study.predictor.hardware import Hardware
from study.predictor.losses import IN_PLACE
from study.predictor.request import Estimate, MemoryUse, Request, SetupCorrection, StepTime
from study.predictor.state import bytes_per_parameter

# Phases in which host memory can peak.
_WHEN = {"load": "while each process loads the model", "train": "in training", "save": "while the model is saved"}


def usable_bytes(box: Hardware) -> float:
    """Return usable memory of one GPU in bytes; without a GPU the node's memory per rank."""
    if box.is_cpu_only:
        return (box.host_gib_per_node or 0) * GIB / box.gpus_per_node
    return box.device.visible_gib * GIB


def device_bytes(memory: MemoryUse, at_upper: bool = False) -> float:
    """Return the device memory of a process as the driver counts it: reserved memory and context."""
    return _upper_or_value(memory.peak_reserved, at_upper) + memory.device_parts["context"]


def excess_bytes(memory: MemoryUse, box: Hardware, at_upper: bool = False) -> float:
    """Return the bytes by which memory is exceeded; negative if it fits."""
    host_bytes, host_peak = (box.host_gib_per_node or 0) * GIB, _upper_or_value(memory.host_peak, at_upper)
    if memory.process_peak is not None:
        margin = _upper_or_value(memory.process_peak, at_upper) - memory.process_peak.value
        return box.gpus_per_node * (memory.peak_reserved.value + margin) + host_peak - host_bytes
    on_host = host_peak - host_bytes if box.host_gib_per_node is not None else -math.inf
    on_device = device_bytes(memory, at_upper) - usable_bytes(box)
    # An excess of host memory does not depend on the micro-batch.
    return max(on_device, on_host) if on_host > 0 else on_device


def fits(memory: MemoryUse, box: Hardware, at_upper: bool = False) -> bool:
    return memory.missing is None and excess_bytes(memory, box, at_upper) <= 0


def free_fraction(memory: MemoryUse, box: Hardware, at_upper: bool = False) -> float:
    """Return the free fraction of the device memory; on a CPU, of the host memory."""
    excess = excess_bytes(memory, box, at_upper) if box.is_cpu_only else None
    usable = usable_bytes(box)
    return 1 - device_bytes(memory, at_upper) / usable if excess is None else -excess / (usable * box.gpus_per_node)


def why(memory: MemoryUse, box: Hardware) -> str:
    """Explain in one line whether it fits: the free memory, or the part that is too large."""
    peak, usable = device_bytes(memory), usable_bytes(box)
    if memory.missing and excess_bytes(memory, box) <= 0:
        return f"no verdict: {rounded(peak / GIB)} GiB without {memory.missing}"
    if fits(memory, box):
        at_most = excess_bytes(memory, box, at_upper=True)
        warning = f"; may not fit: up to {rounded(at_most / GIB)} GiB too much" if at_most > 0 else ""
        return f"{free_fraction(memory, box):.0%} of the {'memory' if box.is_cpu_only else 'device'} is left{warning}"
    if box.is_cpu_only and box.host_gib_per_node is not None:
        needed = box.host_gib_per_node + excess_bytes(memory, box) / GIB
        return f"needs {rounded(needed)} GiB of host memory for all ranks, of {box.host_gib_per_node:,.6g}"
    if peak > usable or box.host_gib_per_node is None:
        part, size = max(memory.device_parts.items(), key=lambda item: item[1])
        return f"needs {rounded(peak / GIB)} GiB of {rounded(usable / GIB)}; {part} alone {rounded(size / GIB)}"
    when = max(_WHEN, key=memory.host_parts.__getitem__)
    needed = memory.host_peak.value / GIB
    return f"needs {rounded(needed)} GiB of host memory, of {box.host_gib_per_node:,.6g}, {_WHEN[when]}"


def _upper_or_value(figure: Estimate, upper: bool) -> float:
    """Return the figure or its upper bound; a bound below the figure, from overestimates, does not lower it."""
    return max(figure.value, figure.high or 0.0) if upper else figure.value


FILE = Path(__file__).with_name("intervals.yaml")
_INTERVALS = load_package_yaml(FILE.read_text(encoding="utf-8"))
# Logarithm up to which an error of a step time is that of a single configuration, and not of its setup.
SINGLE_ERROR = float(_INTERVALS.get("single_error", 0.0))


def max_offload_slowdown(correction: SetupCorrection | None = None) -> float:
    """Largest measured over predicted step time with offload, in general or after a measured step with offload."""
    is_measured = correction is not None and correction.offload_step_factor is not None
    row = _INTERVALS.get("calibrated_offload_step_s" if is_measured else "offload_step_s", {})
    return float(row.get("high", math.inf))


def offload_range(request: Request, step_s: float) -> tuple[float, float] | None:
    """Return the least and the most that published steps with offload took of a predicted time; None without offload,
    or if a step with offload was measured."""
    correction, row = request.correction, _INTERVALS.get("offload_step_s")
    is_measured = correction is not None and (
        correction.offload_step_factor is not None or correction.find_measured_factor(request) is not None
    )
    if row is None or is_measured or not request.strategy.offload_device("optimizer"):
        return None
    return row["low"] * step_s, row["high"] * step_s


def estimate(figure: str, value: float, certain: float = 0.0) -> Estimate:
    """Add an interval to a value, except its exact part `certain`; no interval if the figure was not validated."""
    if (row := _INTERVALS.get(figure)) is None:
        return Estimate(value)
    return Estimate(value, *(certain + (value - certain) * row[bound] for bound in ("low", "high")))


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants without a published source, fitted to the rows of validation/published.yaml with `use: fit`."""

    # Sustained fraction of the best measured matrix product, in a long run with many shapes.
    sustained: float
    # Memory traffic of all other operations over the count below: as transformers' modules run them one by one, and
    # compiled.
    eager_traffic: float
    compiled_traffic: float
    # Slowdown of compute by overlapped communication, as a fraction of the overlapped time.
    hidden_share: float
    # CPU time per layer and pass to launch kernels, a lower bound of the passes. DeepSpeed's stage 3 adds the hooks
    # that gather and release, per parameter and pass.
    launch_s: float
    gather_hook_s: float
    # Memory bandwidth of DeepSpeed's CPU Adam in GB/s, for all ranks of a node that share its cores, including clipping
    # and copies. CPU Adam alone was measured at 109 to 127 (table 4 of https://arxiv.org/abs/2101.06840).
    host_gb_per_s: float


# Written by `python -m study.report.pages.prediction fit`.
FITTED_FILE = Path(__file__).with_name("fitted.yaml")
FITTED = Constants(**load_package_yaml(FITTED_FILE.read_text(encoding="utf-8"))["constants"])

# --- Constants from published sources.
# Best measured product over the data sheet's peak, if no measurement is published: A100 0.87, H100 0.80
# (stas00/ml-engineering, compute/accelerator).
_MEASURED_OVER_PEAK = 0.80
# Fraction of the peak that a fused attention reaches, forward and backward. FlashAttention-2 reaches 50-73 % on A100
# (abstract of https://arxiv.org/abs/2307.08691) and 35 % on H100 (FlashAttention-3, https://arxiv.org/abs/2407.08608).
_FUSED_ATTENTION_SHARE, _FUSED_ATTENTION_SHARE_HOPPER = 0.60, 0.35
# Its backward pass has five products, its forward pass two.
_FUSED_BACKWARD_OVER_FORWARD = 2.5

# --- Counts from transformers' layers: reads and writes of one tensor of the hidden width, forward and backward (norms
# 4 + 8, residuals 6 + 4, dropout 4 + 6, transposing heads 6 + 6), of the inner width, and of the attention scores if
# attention is not fused. Llama's norms compute in fp32, and its queries and keys have rotary positions.
_HIDDEN_PASSES, _HIDDEN_PASSES_GATED = 44, 76
_INNER_PASSES, _INNER_PASSES_GATED = 5, 10
_SCORE_PASSES = 18
# Bytes of traffic per logit: written, cast to fp32, softmax, and the same backward.
_LOGIT_BYTES = 30
# torch's foreach AdamW: 80 bytes of traffic per parameter, and clipping 12.
_OPTIMIZER_BYTES = 92
# CPU time per trained parameter of DeepSpeed's stages: of the hook that reduces its gradient in each backward pass at
# stages 1 and 2, and of an optimizer step. GPT-2 on one H200, where tests/data/receipts has a step of stage 2, of stage
# 3, and of neither.
_REDUCE_HOOK_S = 150e-6
_ENGINE_STEP_S = {1: 230e-6, 2: 230e-6, 3: 120e-6}
# Traffic per parameter of autocast: 16-bit copies of fp32 weights, and fp32 gradients from 16-bit ones.
_AUTOCAST_BYTES, _AUTOCAST_BYTES_FROZEN = 12, 6
# Passes over an adapter's output (scaled, added, scaled backward), and over its input (its gradient added to the
# layer's); peft/tuners/lora/layer.py, Linear.forward.
_ADAPTER_PASSES_OUT, _ADAPTER_PASSES_IN = 2 + 3 + 2, 3
# DeepSpeed's CPU Adam reads gradient, master and two moments, and writes master, moments and the new weight.
CPU_ADAM_BYTES = 30


def predict_time(request: Request, memory: MemoryUse | None = None, constants: Constants = FITTED) -> StepTime:  # noqa: PLR0914
    """Predict the time of an optimizer step; `memory` only adds a note if it does not fit."""
    strategy, box, times = request.strategy, request.box, request.accumulation
    device, trained = box.device, request.shape.trained_parameters
    precision = request.precision.removesuffix("-engine")
    peak = device.peak_tflops.get(precision)
    # A precision without hardware units, such as bf16 on V100, runs at the fp32 rate at best.
    slowest = device.peak_tflops.get("fp32") or device.matmul_tflops.get("fp32", 0.0)
    best = device.matmul_tflops.get(precision) or _MEASURED_OVER_PEAK * (peak or slowest)
    bandwidth = device.memory_bandwidth_gb_per_s * 1e9
    forward, backward = _passes_s(request, constants, constants.sustained * best * 1e12, bandwidth)
    # TRL's reference model has a forward pass in each micro-batch.
    forward *= 1 + request.reference_model
    # The optimizer steps on the device, or a fraction of it as DeepSpeed's Adam on the host.
    on_host = request.settings.optimizer.ratio if strategy.deepspeed and request.settings.optimizer else 0.0
    shards = request.fsdp_ranks if strategy.is_fsdp else box.ranks if strategy.zero_stage else 1
    step = (1 - on_host) * _OPTIMIZER_BYTES * trained / shards / bandwidth
    host_rate = (box.host_memory_gb_per_s or constants.host_gb_per_s) * 1e9
    # Offloads send gradients to the host, updated weights back, and offloaded weights for every pass. Gradients
    # accumulate on the device: later micro-batches copy them back from the host.
    offloaded = on_host * trained * 2
    if strategy.offload_device("param"):
        offloaded += 2 * request.stored.parameters + request.regathered_frozen_elements
    link = (device.pcie_gb_per_s or device.memory_bandwidth_gb_per_s) * 1e9
    exchange = communication_time(request, forward, backward)
    correction = request.correction or SetupCorrection()
    factor = correction.find_step_factor(request)
    # The CPU runs ahead of the GPU, so the longer of the two counts.
    on_device = factor * times * (forward + backward)
    on_cpu = (correction.launch_factor or 1.0) * _launch_s(request, constants)
    parts = {
        "compute": max(on_device, on_cpu) + factor * step,
        "communication_exposed": factor * (exchange.exposed + constants.hidden_share * exchange.overlapped),
        "communication_overlapped": factor * exchange.overlapped,
        "offload": factor * times * offloaded * (request.weight_bytes / box.ranks) / link,
        "cpu_adam": factor * trained / box.nodes * on_host * CPU_ADAM_BYTES / host_rate,
        "nvme": factor * _nvme_s(request),
    }
    measured_factor = correction.find_measured_factor(request)
    if measured_factor is not None:
        parts = {name: seconds * measured_factor for name, seconds in _uncorrected(request, constants).parts.items()}
    total = sum(seconds for name, seconds in parts.items() if name != "communication_overlapped")
    tokens_per_s = request.micro_batch * request.sequence_length * times / total
    return StepTime(
        parts=parts,
        step_s=_time_estimate(request, "step_s", total),
        tokens_per_s_per_gpu=_time_estimate(request, "tokens", tokens_per_s),
        mfu=None if peak is None else activations.model_flops(request) / (total * peak * 1e12),
        hfu=None if peak is None else activations.hardware_flops(request) / (total * peak * 1e12),
        notes=_notes(request, memory, total),
        is_launch_bound=on_cpu > on_device,
    )


def _launch_s(request: Request, constants: Constants) -> float:
    """Return CPU seconds of a step to launch its kernels: a backward pass takes as long as two forward passes."""
    shape, stage = request.shape, request.strategy.zero_stage
    passes = 3 + request.reference_model + (1 / request.checkpoint_every if request.gradient_checkpointing else 0)
    launches = constants.launch_s * shape.layers * passes
    if stage == 3:
        launches += constants.gather_hook_s * len(shape.params) * passes
    elif stage:
        launches += _REDUCE_HOOK_S * len(shape.trained_params)
    return request.accumulation * launches + _ENGINE_STEP_S.get(stage or 0, 0.0) * len(shape.trained_params)


def _uncorrected(request: Request, constants: Constants) -> StepTime:
    return predict_time(dataclasses.replace(request, correction=None), constants=constants)


def _time_estimate(request: Request, figure: str, value: float) -> Estimate:
    """Return a time or a speed with its interval; without one if published figures of its kind do not give it."""
    shape, strategy, correction = request.shape, request.strategy, request.correction
    if correction is not None and correction.find_measured_factor(request) is not None:
        return Estimate(value, value, value)
    # Published times with offload are too few and too scattered.
    if strategy.offloads:
        return Estimate(value)
    if correction is not None and (correction.step_factor or correction.launch_factor):
        return estimate(f"calibrated_{figure}", value)
    # With LoRA, or with several GPUs but no NVLink, there are none that were predicted before they were known.
    is_known = not (shape.lora_rank or request.box.uses_pcie_links or isinstance(shape, live.LiveShape))
    return estimate(figure, value) if is_known else Estimate(value)


def _passes_s(request: Request, constants: Constants, rate: float, bandwidth: float) -> tuple[float, float]:  # noqa: PLR0914
    """Return seconds of the forward and the backward pass of a micro-batch, at FLOP/s of matrix products and bytes/s of
    memory; the backward pass includes recomputation."""
    shape, width, tokens = request.shape, request.computing_bytes, request.micro_batch * request.sequence_length
    is_autocast, fused = request.precision in ("bf16", "fp16"), is_fused(request)
    # Operations of the layers other than matrix products and attention; autocast runs norms and softmax in fp32.
    loose_bytes = 4 if is_autocast and request.autocast else width
    hidden = _HIDDEN_PASSES_GATED if shape.gated else _HIDDEN_PASSES
    inner = _INNER_PASSES_GATED if shape.gated else _INNER_PASSES
    traffic = constants.compiled_traffic if request.compiled else constants.eager_traffic
    traffic *= shape.layers * (hidden * shape.hidden + inner * shape.inner)
    head = casts = logits = 0.0
    if shape.family == "causal-lm":
        per_logit = 3 * width if request.loss_kernel in IN_PLACE else _LOGIT_BYTES
        logits = per_logit * tokens * shape.vocabulary / bandwidth
    if isinstance(shape, live.LiveShape):
        # All traced products; a fused attention has twice its forward FLOPs in the convention of the trace.
        traced = activations.trace(request)
        in_layers, products_backward = (
            (flops - passes * traced.attention) / rate for flops, passes in ((traced.forward, 1), (traced.backward, 2))
        )
        attention, repeated = _fused_attention_s(request, traced.attention, rate), traced.layers_forward / rate
    else:
        in_layers, outside, products_backward = _products_s(request, rate, bandwidth)
        # A and B of adapters alternate: A has the layer's input, and B its output. Their passes are counted one by one;
        # the rest is the traffic of a fused kernel times the fitted factor of eager kernels.
        adapters = activations.adapter_products(shape)
        traffic += sum(matrix.count * matrix.inner for matrix in adapters[::2]) * _ADAPTER_PASSES_IN
        traffic += sum(matrix.count * matrix.out for matrix in adapters[1::2]) * _ADAPTER_PASSES_OUT
        flops = activations.attention_flops(shape, request.sequence_length) * request.micro_batch
        scores = request.micro_batch * shape.heads * request.sequence_length**2 * shape.layers
        scores_s = scores * loose_bytes * _SCORE_PASSES / 3 / bandwidth
        attention = _fused_attention_s(request, flops, rate) if fused else flops / rate + scores_s
        head, repeated = outside + activations.head_flops(shape) * request.micro_batch / rate, in_layers + attention
        if is_autocast and not request.strategy.is_fsdp:
            # autocast caches its copies for one micro-batch.
            moved = _AUTOCAST_BYTES * shape.trained_parameters + _AUTOCAST_BYTES_FROZEN * shape.frozen_parameters
            casts = moved / bandwidth
    elementwise = tokens * loose_bytes * traffic / bandwidth
    recomputation = (repeated + elementwise / 3) / request.checkpoint_every if request.gradient_checkpointing else 0.0
    backward = products_backward + attention * (_FUSED_BACKWARD_OVER_FORWARD if fused else 2.0) + elementwise * 2 / 3
    backward += head * (1 if shape.lora_rank and shape.family == "causal-lm" else 2)
    forward = in_layers + attention + elementwise / 3 + head + logits / 3 + casts / 2
    return forward, backward + logits * 2 / 3 + casts / 2 + recomputation


def _products_s(request: Request, rate: float, bandwidth: float) -> tuple[float, float, float]:
    """Return seconds of the matrix products: forward in the layers and outside, and backward in the layers. Each
    forward product has two backward products, of a frozen matrix one."""
    shape, width, tokens = request.shape, request.computing_bytes, request.micro_batch * request.sequence_length

    def product_s(rows: float, inner: float, out: float) -> float:
        """Return seconds of a matrix product: the larger of compute and memory traffic."""
        return max(2 * rows * inner * out / rate, width * (rows * inner + inner * out + rows * out) / bandwidth)

    in_layers = outside = input_gradients = weight_gradients = 0.0
    matmuls = activations.matmuls(shape)
    for index, product in enumerate((*matmuls, *activations.adapter_products(shape))):
        seconds = product.count * product_s(tokens, product.inner, product.out)
        if not product.in_layer:
            outside += seconds
            continue
        in_layers += seconds
        input_gradients += product.count * product_s(tokens, product.out, product.inner)
        if not shape.lora_rank or index >= len(matmuls):
            weight_gradients += product.count * product_s(product.out, tokens, product.inner)
    return in_layers, outside, input_gradients + weight_gradients


def _fused_attention_s(request: Request, flops: float, rate: float) -> float:
    """Return forward seconds of a fused attention, without masked pairs of tokens."""
    shape, device = request.shape, request.box.device
    causal = 0.5 if shape.family == "causal-lm" else 1.0
    peak = device.peak_tflops.get(request.precision.removesuffix("-engine"))
    hopper = device.name.startswith(("H100", "H20", "H200", "H800", "GH200"))
    peak_fraction = _FUSED_ATTENTION_SHARE_HOPPER if hopper else _FUSED_ATTENTION_SHARE
    return causal * flops / (peak_fraction * peak * 1e12 if peak else rate)


def _nvme_s(request: Request) -> float:
    """Return seconds of NVMe traffic. A node's ranks share its NVMe; half of the optimizer's traffic is reads. Swapped
    weights are read in every pass, and written after the optimizer step (_partitioned_params_swap_out in stage3.py)."""
    if not request.strategy.uses_nvme:
        return 0.0
    shape, box = request.shape, request.box
    state = bytes_per_parameter(request.strategy, request.precision, box.ranks)
    if not state.nvme:
        return 0.0
    gathered = request.accumulation * (2 * request.stored.parameters + request.regathered_frozen_elements)
    optimizer = 2 * (state.optimizer_nvme + state.grads_nvme) * shape.trained_parameters
    optimizer_s = optimizer * (0.5 / box.nvme_read_gb_per_s + 0.5 / box.nvme_write_gb_per_s)
    passes_s = state.params_nvme * gathered / box.nvme_read_gb_per_s
    write_s = state.params_nvme * shape.trained_parameters / box.nvme_write_gb_per_s
    return box.gpus_per_node * (optimizer_s + passes_s + write_s) / 1e9


def _notes(request: Request, memory: MemoryUse | None, total: float) -> tuple[str, ...]:
    device, name = request.box.device, request.precision.removesuffix("-engine")
    notes = [
        "MFU counts every product at full length, without savings by causal masking or recomputation; HFU includes"
        " recomputation",
    ]
    if device.peak_tflops.get(name) is None and name not in device.matmul_tflops:
        notes.append(f"{device.name} has no units for {name}: the rate is that of fp32 at best")
    elif name not in device.matmul_tflops:
        notes.append(
            f"{device.name}'s best matrix product is not published: {_MEASURED_OVER_PEAK:.0%} of its peak is assumed"
        )
    if memory is not None and device.memory_gib and device_bytes(memory) > usable_bytes(request.box):
        notes.append(f"this does not fit: the time assumes more memory of each {device.name}")
    is_measured = request.correction is not None and request.correction.find_measured_factor(request) is not None
    if (host_note := host_adam_note(request)) is not None and not is_measured:
        notes.append(host_note)
    if (span := offload_range(request, total)) is not None:
        low, high = (end / total for end in span)
        bounds = f"here {rounded_seconds(span[0])} to {rounded_seconds(span[1])}"
        notes.append(f"published offload steps took {low:.1f} to {high:.1f} times the prediction, {bounds}")
    if request.shape.lora_rank:
        notes.append(lora_note())
    if request.swapped:
        notes.append(f"NVMe reads {request.box.nvme_read_gb_per_s} and writes {request.box.nvme_write_gb_per_s} GB/s")
    if request.box.nodes > 1:
        notes.append(f"{request.box.network_gb_per_s:g} GB/s of network bandwidth per GPU")
    if falling := falling_network(request.box.nodes):
        fraction, nodes = falling
        notes.append(
            f"the network keeps its bandwidth: one published cluster of {nodes} nodes had {fraction:.0%} of it, two all"
        )
    return tuple(notes)


def lora_note() -> str:
    """Return the assumptions of a step time with adapters, and the range of published ones."""
    note = (
        "the time with LoRA uses the constants of full training: no weight-gradient products of frozen weights, the"
        " adapters' products, and no extra CPU time per layer"
    )
    if row := _INTERVALS.get("adapters_step_s"):
        note += f"; {row['rows']} published steps, of one project, took {row['low']:.1f} to {row['high']:.1f} times it"
    return note


def host_adam_note(request: Request) -> str | None:
    """Return a note on the assumed CPU Adam bandwidth and how to reach it; None if the optimizer is not offloaded."""
    if not request.strategy.offload_device("optimizer"):
        return None
    if (rate := request.box.host_memory_gb_per_s) is not None:
        return f"the host's Adam reads and writes {rounded(rate)} GB/s for all ranks of a node, as measured or given"
    return (
        f"the host's Adam: {FITTED.host_gb_per_s:.0f} GB/s for all ranks of a node, as published for 128 cores; another"
        " machine reached 10. accelerate launch and torchrun give a rank one thread: set OMP_NUM_THREADS to its cores,"
        " and --enable_cpu_affinity"
    )
