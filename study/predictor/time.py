"""Predicted seconds of an optimizer step, by a roofline per part plus exposed communication, and whether it fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from study.config.precisions import computing_type
from study.config.text import rounded, rounded_seconds
from study.host.memory import GIB
from study.predictor.adapters import LAYER_OPERATORS, adapter_operators
from study.predictor.communication import (
    communication_time,
    falling_network,
    network_notes,
    padding_notes,
    pcie_notes,
)
from study.predictor.constants import FITTED, Constants
from study.predictor.hardware import Device, Hardware, pair_notes
from study.predictor.intervals import (
    TIMED_DEVICES,
    Ends,
    estimate,
    few_ratios,
    interval_name,
    kind_of_training,
)
from study.predictor.micro_batch import hardware_flops, model_flops
from study.predictor.passes import MEASURED_OVER_PEAK, passes_s, unit_waits_s
from study.predictor.request import BESIDE, Estimate, MemoryUse, Offload, Request, SetupCorrection, StepTime
from study.predictor.state import adapter_units, bytes_per_parameter, fsdp_shards
from study.predictor.tensor_group import ADAPTERS_ON_ROWS, UNDER_FSDP2, TensorGroup, group_adapters

# Waits of this fraction of a step are named.
_NOTED_WAIT = 0.03
# Phases in which host memory can peak, the one that no setting avoids first.
_WHEN = {"train": "in training", "load": "while the model is loaded", "save": "while the model is saved"}


def usable_bytes(box: Hardware) -> float:
    """Return usable memory of one GPU in bytes; without a GPU the node's memory per rank."""
    if box.is_cpu_only:
        return (box.host_gib_per_node or 0) * GIB / box.gpus_per_node
    return box.device.visible_gib * GIB


def device_bytes(memory: MemoryUse, at_upper: bool = False) -> float:
    """Return the device memory of a process as the driver counts it: reserved memory, context and another engine."""
    outside = memory.device_parts["context"] + memory.device_parts.get(BESIDE, 0.0)
    return _upper_or_value(memory.peak_reserved, at_upper) + outside


def excess_bytes(memory: MemoryUse, box: Hardware, at_upper: bool = False) -> float:
    """Return the bytes by which memory is exceeded; negative if it fits."""
    host_bytes, host_peak = (box.host_gib_per_node or 0) * GIB, _upper_or_value(memory.host_peak, at_upper)
    if memory.process_peak is not None:
        margin = _upper_or_value(memory.process_peak, at_upper) - memory.process_peak.value
        return box.gpus_per_node * (memory.peak_reserved.value + margin) + host_peak - host_bytes
    on_host = host_peak - host_bytes if box.host_gib_per_node is not None else -math.inf
    on_device = max(device_bytes(memory, at_upper), memory.loading) - usable_bytes(box)
    # An excess of host memory does not depend on the micro-batch.
    return max(on_device, on_host) if on_host > 0 else on_device


def host_fits(host_peak: Estimate, box: Hardware, at_upper: bool = False) -> bool:
    """Whether the host memory of a node is enough, or not known."""
    return box.host_gib_per_node is None or _upper_or_value(host_peak, at_upper) <= box.host_gib_per_node * GIB


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
        return f"needs {rounded(needed)} GiB of host memory for all ranks, of {host_limit(box)}"
    if memory.loading > usable >= peak:
        return f"loading needs {rounded(memory.loading / GIB)} of {rounded(usable / GIB)} GiB on each GPU"
    if peak > usable or box.host_gib_per_node is None:
        part, size = max(memory.device_parts.items(), key=lambda item: item[1])
        return f"needs {rounded(peak / GIB)} GiB of {rounded(usable / GIB)}; {part} alone {rounded(size / GIB)}"
    return f"needs {excess_on_host(memory, box)}"


def excess_on_host(memory: MemoryUse, box: Hardware) -> str:
    """Return the host memory that training needs, or else another phase, and the peak if that is later; empty if the
    host has as much, or if its memory is unknown."""
    if host_fits(memory.host_peak, box) or box.is_cpu_only:
        return ""
    limit = (box.host_gib_per_node or 0.0) * GIB
    sizes = {phase: memory.host_parts[phase] for phase in _WHEN}
    first = next((phase for phase, size in sizes.items() if size > limit), max(sizes, key=sizes.__getitem__))
    peak = max(sizes, key=sizes.__getitem__)
    later = f", and {rounded(sizes[peak] / GIB)} {_WHEN[peak]}" if sizes[peak] > sizes[first] else ""
    return f"{rounded(sizes[first] / GIB)} GiB of host memory, of {host_limit(box)}, {_WHEN[first]}{later}"


def when(memory: MemoryUse) -> str:
    """Return the phase in which host memory peaks, as in "while the model is loaded"."""
    return _WHEN[max(_WHEN, key=memory.host_parts.__getitem__)]


def host_limit(box: Hardware) -> str:
    """Return a node's host memory in GiB, with a tenth, as 128 GB are 119.2."""
    return f"{round(box.host_gib_per_node or 0.0, 1):,g}"


def _upper_or_value(figure: Estimate, upper: bool) -> float:
    """Return the figure or its upper bound; a bound below the figure, from overestimates, does not lower it."""
    return max(figure.value, figure.high or 0.0) if upper else figure.value


def max_offload_slowdown(correction: SetupCorrection | None = None) -> float:
    """Largest measured over predicted step time with offload, in general or after a measured step with offload."""
    is_measured = correction is not None and correction.offload_step_factor is not None
    row = few_ratios("calibrated_offload_step_s" if is_measured else "offload_step_s")
    return math.inf if row is None else row["high"]


# Rates of the host's Adam on published pages, in GB/s of the bytes that it moves: of the slowest rank, with clipping
# and copies (1.35 B weights in 22.88 s, https://github.com/deepspeedai/DeepSpeed/issues/1635), and of the fastest node,
# Adam alone (405 B in bf16 in about 4 s on eight nodes, Lambda's page in validation/published.yaml).
_SLOWEST_HOST_OF_A_RANK_GB_PER_S = 1.77
_FASTEST_HOST_GB_PER_S = 177.6
# Read and written, of the disk of a virtual machine without NVMe, by `study doctor --nvme_path` (0.71 and 0.24 GiB/s);
# SATA has at most 0.6.
SLOW_DISK_GB_PER_S = (0.76, 0.26)


def offload_range(request: Request, step_s: float) -> Ends | None:
    """Return the ends between which a step with its optimizer on the host lies: Adam at the slowest and the fastest
    published rate, unless the host's is given, NVMe down to a slow disk's, unless its rates are given, and the rest by
    the interval of other steps. None without offload, or if a step with offload was measured."""
    correction = request.correction or SetupCorrection()
    is_measured = correction.offload_step_factor is not None or correction.find_measured_factor(request) is not None
    is_on_host = request.fsdp_offloads or request.strategy.offload_device("optimizer")
    if is_measured or not is_on_host:
        return None
    factor = correction.find_step_factor(request)
    rest_s = step_s - _host_optimizer_s(request, FITTED, factor)
    rest = estimate(_step_interval_name(request, "step_s"), rest_s)
    if rest.low is None or rest.high is None:
        return None
    rate = request.box.host_memory_gb_per_s
    slowest = min(FITTED.host_gb_per_s, _SLOWEST_HOST_OF_A_RANK_GB_PER_S * request.box.gpus_per_node)
    least_s = _adam_s(request, factor, rate or _FASTEST_HOST_GB_PER_S)
    return rest.low + least_s, rest.high + _adam_s(request, factor, rate or slowest) + slow_disk_s(request)


def slow_disk_s(request: Request) -> float:
    """Return the seconds that a step takes longer on a slow disk than on the assumed NVMe; 0 if its rates are given."""
    box = request.box
    if box.is_nvme_given:
        return 0.0
    read, write = (
        min(slow, assumed)
        for slow, assumed in zip(SLOW_DISK_GB_PER_S, (box.nvme_read_gb_per_s, box.nvme_write_gb_per_s), strict=True)
    )
    slow_box = dataclasses.replace(box, nvme_read_gb_per_s=read, nvme_write_gb_per_s=write)
    factor = (request.correction or SetupCorrection()).find_step_factor(request)
    return factor * (_nvme_s(dataclasses.replace(request, box=slow_box)) - _nvme_s(request))


def range_causes(request: Request) -> str:
    """Return the causes of the range of a step with offload, such as " by its host"; empty without an offload, and if
    both are given or one such step was measured."""
    correction = request.correction or SetupCorrection()
    if not request.offloads or correction.offload_step_factor is not None:
        return ""
    causes = ["host"] * (request.box.host_memory_gb_per_s is None)
    causes += ["NVMe"] * (slow_disk_s(request) > 0)
    return f" by its {' and '.join(causes)}" if causes else ""


def step_ends(request: Request, time: StepTime) -> Ends | None:
    """Return the ends of a step: of the errors of its kind of training, or of published hosts with offload. None if too
    few measurements validate it."""
    step = time.step_s
    if request.offloads and step.low is None:
        has_measured_offload = request.correction is not None and request.correction.offload_step_factor is not None
        if not has_measured_offload:
            return offload_range(request, step.value)
        step = estimate(_step_interval_name(request, "step_s"), step.value)
    return None if step.low is None or step.high is None else (step.low, step.high)


def speed_ends(request: Request, time: StepTime) -> Ends | None:
    """Return the ends of the throughput of all ranks; None if too few measurements validate it."""
    speed, ranks = time.tokens_per_s_per_gpu, request.box.ranks
    if speed.low is not None and speed.high is not None:
        return speed.low * ranks, speed.high * ranks
    if (ends := step_ends(request, time)) is None:
        return None
    tokens = speed.value * ranks * time.step_s.value
    return tokens / ends[1], tokens / ends[0]


# torch's foreach AdamW: 80 bytes of traffic per parameter, and clipping 12.
_OPTIMIZER_BYTES = 92
# CPU time per trained parameter of DeepSpeed's stages: of the hook that reduces its gradient in each backward pass at
# stages 1 and 2, and of an optimizer step. GPT-2 on one H200, where tests/data/receipts has a step of stage 2, of stage
# 3, and of neither.
_REDUCE_HOOK_S = 150e-6
_ENGINE_STEP_S = {1: 230e-6, 2: 230e-6, 3: 120e-6}
# Over the steps of reports/gpu that are predicted so: 0.64 (BERT-large) to 1.37 (stage 3 with offload).
_LAUNCH_NOTE = (
    "the GPU waits for the CPU, which launches kernels: a larger micro-batch takes hardly longer; such steps took 0.6"
    " to 1.4 times the prediction on one host"
)
# DeepSpeed's CPU Adam reads gradient, master and two moments, and writes master, moments and the new weight.
CPU_ADAM_BYTES = 30
# Of a CPU's Adam alone, without clipping and copies: 109 to 127 (table 4 of https://arxiv.org/abs/2101.06840). FSDP's
# copies are counted apart.
_ADAM_ALONE_GB_PER_S = 118.0
# How much faster a copy is from or to pinned memory: alone on a node, and on eight GPUs (4 to 5,
# https://github.com/deepspeedai/DeepSpeed/pull/5301). Others go through a pinned buffer of the driver.
_PINNED_SPEEDUP_ALONE, _PINNED_SPEEDUP = 6.0, 4.5


def predict_time(
    request: Request, memory: MemoryUse | None = None, constants: Constants = FITTED, *, has_notes: bool = True
) -> StepTime:
    """Predict the time of an optimizer step; `memory` only adds a note if it does not fit.

    A search over settings, which compares hundreds of times, needs no notes.
    """
    peak = request.box.device.peak_tflops.get(computing_type(request.precision))
    parts, compute_parts, is_launch_bound = _parts(request, constants)
    total = sum(seconds for name, seconds in parts.items() if name != "communication_overlapped")
    tokens = request.micro_batch * request.sequence_length * request.accumulation
    tokens_per_s = tokens / request.tensor_ranks / total
    return StepTime(
        parts=parts,
        compute_parts=compute_parts,
        step_s=_time_estimate(request, "step_s", total),
        tokens_per_s_per_gpu=_time_estimate(request, "tokens", tokens_per_s),
        mfu=None if peak is None else model_flops(request) / (total * peak * 1e12),
        hfu=None if peak is None else hardware_flops(request) / (total * peak * 1e12),
        notes=(*_notes(request, memory, total), *[_LAUNCH_NOTE] * is_launch_bound) if has_notes else (),
        is_launch_bound=is_launch_bound,
    )


def _parts(request: Request, constants: Constants) -> tuple[dict[str, float], dict[str, float], bool]:
    """Return the seconds of each part of a step, those of its computation, and whether it waits for the CPU to launch
    kernels."""
    forward, backward = passes_s(request, constants)
    # TRL's reference model has a forward pass in each micro-batch.
    forward *= 1 + request.reference_model
    exchange = communication_time(request, forward, backward)
    correction = request.correction or SetupCorrection()
    factor = correction.find_step_factor(request)
    # The CPU runs ahead of the GPU, so the longer of the two counts.
    on_device = factor * request.accumulation * (forward + backward)
    launches = _launch_s(request, constants)
    launch_factor = correction.launch_factor or 1.0
    on_cpu = launch_factor * sum(launches.values())
    optimizer = factor * _device_optimizer_s(request)
    if on_cpu > on_device:
        compute_parts = {name: launch_factor * seconds for name, seconds in launches.items()}
        compute_parts["optimizer"] += optimizer
    else:
        each_pass = factor * request.accumulation
        compute_parts = {"forward": each_pass * forward, "backward": each_pass * backward, "optimizer": optimizer}
    parts = {
        "compute": max(on_device, on_cpu) + optimizer,
        "communication_exposed": factor * (exchange.exposed + constants.hidden_share * exchange.overlapped),
        # The rest of it: both together are all of the communication.
        "communication_overlapped": factor * (1 - constants.hidden_share) * exchange.overlapped,
        "offload": _offload_s(request, factor),
        "cpu_adam": _host_optimizer_s(request, constants, factor),
        "nvme": factor * _nvme_s(request),
    }
    measured_factor = correction.find_measured_factor(request)
    if measured_factor is not None:
        uncorrected = _uncorrected(request, constants)
        parts, compute_parts = (
            {name: seconds * measured_factor for name, seconds in times.items()}
            for times in (uncorrected.parts, uncorrected.compute_parts)
        )
    return parts, compute_parts, on_cpu > on_device


def _fraction_on_host(request: Request) -> float:
    """Return the fraction of the weights that are updated on the host."""
    if request.fsdp_offloads:
        return 1.0
    settings = request.settings if request.strategy.deepspeed else None
    return settings.optimizer.ratio if settings is not None and settings.optimizer is not None else 0.0


def _device_optimizer_s(request: Request) -> float:
    stepped = float(request.shape.trained_parameters)
    if request.strategy.is_fsdp:
        stepped = fsdp_shards(request).trained
    elif request.strategy.zero_stage:
        stepped /= request.data_ranks
    moved = (1 - _fraction_on_host(request)) * _OPTIMIZER_BYTES * stepped
    return moved / (request.box.device.memory_bandwidth_gb_per_s * 1e9)


def _host_optimizer_s(request: Request, constants: Constants, factor: float) -> float:
    usual = _ADAM_ALONE_GB_PER_S if request.fsdp_offloads else constants.host_gb_per_s
    return _adam_s(request, factor, request.box.host_memory_gb_per_s or usual)


def _adam_s(request: Request, factor: float, gb_per_s: float) -> float:
    """Return seconds of Adam on a node's host, whose ranks share its bandwidth."""
    trained = factor * request.tensor_ranks * request.shape.trained_parameters / request.box.nodes
    if request.fsdp_offloads:
        # The first node, whose ranks have the most rows.
        trained = factor * fsdp_shards(request).trained * request.box.gpus_per_node
    # torch's fused AdamW reads the gradient, and reads and writes the weight and two moments.
    fused = 3 * request.adapter_bytes + 2 * request.moments_bytes
    moved = fused if request.fsdp_offloads else CPU_ADAM_BYTES
    return trained * _fraction_on_host(request) * moved / (gb_per_s * 1e9)


def _offload_s(request: Request, factor: float) -> float:
    """Return seconds of copies between host and device: gradients to the host and back to accumulate, updated weights
    back, and offloaded weights for every pass."""
    if request.fsdp_offloads:
        return factor * _fsdp_copies_s(request)
    if not request.strategy.deepspeed:
        return 0.0
    settings, width = request.settings, request.weight_bytes
    optimizer_s = parameters_s = 0.0
    if settings.optimizer is not None:
        updated = _fraction_on_host(request) * request.shape.trained_parameters
        optimizer_s = updated * _optimizer_copy_bytes(request) / _host_link_bytes_per_s(request, settings.optimizer)
    if settings.parameters is not None:
        passes = 2 * request.stored.parameters + request.regathered_frozen_elements
        copied = request.accumulation * passes * width
        parameters_s = copied / _host_link_bytes_per_s(request, settings.parameters)
    return factor * (optimizer_s + parameters_s) / request.data_ranks


def _fsdp_copies_s(request: Request) -> float:
    """Return seconds in which FSDP copies its shards from pinned host memory for both passes of a micro-batch, in the
    type in which they are stored (all_gather_inputs in torch's _fsdp_param.py), and gradients back when they are
    reduced (foreach_reduce in _fsdp_collectives.py)."""
    device, shards = request.box.device, fsdp_shards(request)
    link = (device.pcie_gb_per_s or device.memory_bandwidth_gb_per_s) * 1e9
    weights = 2 * shards.stored * request.weight_bytes
    gradients = shards.trained * request.adapter_bytes
    return (request.accumulation * weights + request.reductions * gradients) / link


def _optimizer_copy_bytes(request: Request) -> int:
    """Return the bytes of copies that a weight takes in a step if its optimizer is on the host.

    To accumulate, stage 2 copies a gradient there after each micro-batch and back before each but the first
    (async_accumulate_grad_in_cpu_via_gpu in stage_1_and_2.py); stage 3 copies it both ways in each (partition_grads in
    stage3.py). Stage 1 accumulates on the device, and reduces with the last micro-batch alone
    (reduce_ready_partitions_and_remove_grads). After the last it goes there once more, in the precision of the masters,
    and the weight comes back.
    """
    settings, width = request.settings, request.weight_bytes
    if settings.stage == 3:
        accumulating = 2 * request.accumulation
    elif settings.stage == 2 and request.accumulation > 1:
        accumulating = 2 * request.accumulation - 1
    else:
        accumulating = 0
    weight = 0 if settings.parameters is not None else width
    return accumulating * width + settings.master_bytes + weight


def _host_link_bytes_per_s(request: Request, offload: Offload) -> float:
    """Return the rate of copies between a device and the memory of an offload."""
    device = request.box.device
    link = (device.pcie_gb_per_s or device.memory_bandwidth_gb_per_s) * 1e9
    if offload.pinned or request.box.is_cpu_only:
        return link
    return link / (_PINNED_SPEEDUP_ALONE if request.box.gpus_per_node == 1 else _PINNED_SPEEDUP)


def _launch_s(request: Request, constants: Constants) -> dict[str, float]:
    """Return CPU seconds in which a step launches the kernels of its passes and of its optimizer: a backward pass takes
    as long as two forward passes."""
    shape, stage = request.shape, request.strategy.zero_stage
    passes = 3 + request.reference_model + (1 / request.checkpoint_every if request.gradient_checkpointing else 0)
    operators = 1 + adapter_operators(request) / LAYER_OPERATORS
    launches = constants.launch_s * operators * shape.layers * passes
    if stage == 3:
        launches += constants.gather_hook_s * len(shape.params) * passes
    elif stage:
        launches += _REDUCE_HOOK_S * len(shape.trained_params)
    engine_step = _ENGINE_STEP_S.get(stage or 0, 0.0) * len(shape.trained_params)
    return {"passes": request.accumulation * launches, "optimizer": engine_step}


def _uncorrected(request: Request, constants: Constants) -> StepTime:
    return predict_time(dataclasses.replace(request, correction=None), constants=constants)


def _lacks_times(box: Hardware) -> bool:
    """Whether no step of a GPU of the table was measured."""
    return bool(box.device.names) and not box.is_cpu_only and box.device.name not in TIMED_DEVICES


def unvalidated_notes(box: Hardware) -> Iterator[str]:
    """Yield that no measured step validates a GPU's time, if none does."""
    if _lacks_times(box):
        yield f"no measured step on {box.device.name} validates this time"


# Of names of intervals of measured setups.
_CALIBRATED = "calibrated_"


def _time_estimate(request: Request, figure: str, value: float) -> Estimate:
    """Return a time or a speed with its interval; without one if published figures of its kind do not give it."""
    correction = request.correction
    if correction is not None and correction.find_measured_factor(request) is not None:
        return Estimate(value, value, value)
    # Its ends are those of hosts: `step_ends`.
    return Estimate(value) if request.offloads else _device_time_estimate(request, figure, value)


def _device_time_estimate(request: Request, figure: str, value: float) -> Estimate:
    """Return a time or a speed of the device with the interval of the setup if it was measured, or else of its kind of
    training."""
    # Published times with tensor parallelism are too few.
    if request.tensor_group is not None:
        return Estimate(value)
    name = _step_interval_name(request, figure)
    # With several GPUs but no NVLink there are none of full training.
    is_unvalidated = request.box.uses_pcie_links or request.shape.is_traced or _lacks_times(request.box)
    return Estimate(value) if is_unvalidated and not name.startswith(_CALIBRATED) else estimate(name, value)


def _step_interval_name(request: Request, figure: str) -> str:
    """Return the name of the interval of a step's time on the device: of the setup if it was measured, or else of the
    kind of training."""
    if request.correction is not None and request.correction.corrects_step(request):
        return f"{_CALIBRATED}{figure}"
    return interval_name(kind_of_training(request, counts_offload=False), figure)


def _nvme_s(request: Request) -> float:
    """Return seconds of NVMe traffic. A node's ranks share its NVMe; half of the optimizer's traffic is reads. Swapped
    weights are read in every pass, and written after the optimizer step (_partitioned_params_swap_out in stage3.py)."""
    if not request.strategy.uses_nvme:
        return 0.0
    shape, box = request.shape, request.box
    state = bytes_per_parameter(request.strategy, request.precision, request.data_ranks)
    if not state.nvme:
        return 0.0
    gathered = request.accumulation * (2 * request.stored.parameters + request.regathered_frozen_elements)
    optimizer = 2 * (state.optimizer_nvme + state.grads_nvme) * shape.trained_parameters
    optimizer_s = optimizer * (0.5 / box.nvme_read_gb_per_s + 0.5 / box.nvme_write_gb_per_s)
    passes_s = state.params_nvme * gathered / box.nvme_read_gb_per_s
    write_s = state.params_nvme * shape.trained_parameters / box.nvme_write_gb_per_s
    return box.gpus_per_node * (optimizer_s + passes_s + write_s) / 1e9


def _notes(request: Request, memory: MemoryUse | None, total: float) -> tuple[str, ...]:
    device, name = request.box.device, computing_type(request.precision)
    notes = [
        "MFU counts every product at full length, without savings by causal masking or recomputation; HFU includes"
        " recomputation",
    ]
    notes += _rate_notes(device, name)
    notes += unvalidated_notes(request.box)
    if memory is not None and device.memory_gib and device_bytes(memory) > usable_bytes(request.box):
        notes.append(f"this does not fit: the time assumes more memory of each {device.name}")
    if request.tensor_group is not None:
        notes += _tensor_notes(request, request.tensor_group)
    notes += _offload_notes(request, total)
    notes += _adapter_notes(request, total)
    if request.swapped:
        notes.append(f"NVMe reads {request.box.nvme_read_gb_per_s} and writes {request.box.nvme_write_gb_per_s} GB/s")
    notes += pair_notes(request.box)
    notes += pcie_notes(request)
    notes += padding_notes(request)
    notes += network_notes(request.box)
    if falling := falling_network(request.box.nodes):
        fraction, nodes = falling
        notes.append(
            f"the network keeps its bandwidth: one published cluster of {nodes} nodes had {fraction:.0%} of it, two all"
        )
    return tuple(notes)


def _rate_notes(device: Device, precision: str) -> list[str]:
    """Return a note on a rate of matrix products that is assumed, or is one without hardware units."""
    rate = device.matmul_tflops.get(precision)
    if device.peak_tflops.get(precision) is None:
        slow = "the rate is that of fp32 at best" if rate is None else f"{rate:g} TFLOPS measured"
        return [f"{device.name} has no units for {precision}: {slow}"]
    if rate is None:
        return [
            f"{device.name}'s best matrix product is not published: {MEASURED_OVER_PEAK:.0%} of its peak is assumed"
        ]
    return []


def _adapter_notes(request: Request, total: float) -> list[str]:
    """Return the assumptions of a step with adapters, and the wait for FSDP1's units of adapters."""
    if not request.shape.lora_rank:
        return []
    notes, waits_s = [lora_note()], unit_waits_s(request, FITTED)
    if waits_s > _NOTED_WAIT * total:
        units = len(adapter_units(request))
        notes.append(
            f"the GPU waits {rounded_seconds(waits_s)} of it for the hooks of FSDP1's {units} units of adapters"
        )
    return notes


# Of the rows of tests/data/tensor_steps.yaml.
_SEQUENCE_STEPS = "20 published steps of two pages took 0.89 to 1.63 times the prediction"


def _tensor_notes(request: Request, group: TensorGroup) -> Iterator[str]:
    """Yield notes on a tensor-parallel group: its samples, its published steps, and errors of installed releases."""
    published = f"{_SEQUENCE_STEPS} (docs/advice.md)"
    if not group.divides_stream:
        published = f"none with the matrices alone divided is published. With --tensor_plan sequence {published}"
    yield (
        f"the {group.ranks} ranks of a group process the same samples: a step has those of {request.data_ranks} of"
        f" {request.box.ranks} ranks. The bound of the peak is that of runs without tensor parallelism, and the step"
        f" has none: {published}"
    )
    if request.strategy.is_fsdp and not group.divides_stream:
        yield UNDER_FSDP2
    if request.shape.lora_rank is not None and group_adapters(group).rows:
        yield ADAPTERS_ON_ROWS


def _offload_notes(request: Request, total: float) -> list[str]:
    """Return notes on the host of a step with offload: its assumed rate, the range of the step, and pageable memory."""
    is_measured = request.correction is not None and request.correction.find_measured_factor(request) is not None
    notes = []
    if (host_note := host_adam_note(request)) is not None and not is_measured:
        notes.append(host_note)
    if (span := offload_range(request, total)) is not None:
        notes.append(f"{' to '.join(map(rounded_seconds, span))} a step: {_range_reason(request)}")
    if request.strategy.offload_device("optimizer") and not _pins_optimizer(request):
        notes.append("pin_memory: false: copies between host and device go through a buffer of the driver")
    return notes


def _range_reason(request: Request) -> str:
    """Return the assumptions of the range of a step with offload."""
    read, write = SLOW_DISK_GB_PER_S
    disk = ""
    if slow_disk_s(request):
        disk = f", NVMe down to a disk that reads {read} and writes {write} GB/s (--nvme_gb_per_s sets its rates)"
    if request.box.host_memory_gb_per_s is not None:
        return f"that rate{disk}, and the rest by the interval of other steps"
    return (
        f"Adam on published hosts had {_SLOWEST_HOST_OF_A_RANK_GB_PER_S} GB/s a rank to {_FASTEST_HOST_GB_PER_S:.0f} a"
        f" node{disk}, and the rest by the interval of other steps; --host_gb_per_s sets a rate"
    )


def _pins_optimizer(request: Request) -> bool:
    optimizer = request.settings.optimizer
    return optimizer is None or optimizer.pinned


def lora_note() -> str:
    """Return the assumptions of a step time with adapters, and the range of published ones."""
    note = (
        "the time with LoRA uses the constants of full training: no weight-gradient products of frozen weights, and the"
        " adapters' products, casts, dropout and additions"
    )
    if (row := few_ratios("adapters_step_s")) is not None:
        note += f"; {row['rows']} published steps took {row['low']:.1f} to {row['high']:.1f} times it"
    return note


def host_adam_note(request: Request) -> str | None:
    """Return a note on the assumed CPU Adam bandwidth and how to reach it; None if the optimizer is not offloaded."""
    if not (request.fsdp_offloads or request.strategy.offload_device("optimizer")):
        return None
    if (rate := request.box.host_memory_gb_per_s) is not None:
        return f"the host's Adam reads and writes {rounded(rate)} GB/s for all ranks of a node, as measured or given"
    deepspeed = f"{FITTED.host_gb_per_s:.0f} GB/s"
    source = f"{deepspeed} for all ranks of a node, as published for 128 cores, clipping and copies in it"
    if request.fsdp_offloads:
        source = (
            f"{_ADAM_ALONE_GB_PER_S:.0f} GB/s for all ranks of a node, as published for Adam alone. DeepSpeed's"
            f" {deepspeed} have clipping and copies in it: FSDP's copies are another part, and its clipping is not"
            " counted"
        )
    return (
        f"the host's Adam: {source}."
        " accelerate launch and torchrun give a rank one thread: set OMP_NUM_THREADS to its cores,"
        " and --enable_cpu_affinity"
    )
