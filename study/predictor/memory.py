"""Predicted memory of a strategy by part: one GPU (steady and peak), the host of one node, and its NVMe."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from study.config.strategies import Strategy
from study.config.text import format_number
from study.host.memory import GIB, MALLOC_MMAP_THRESHOLD_MAX_BYTES, libraries_bytes
from study.predictor import state as model_state
from study.predictor.activations import Activations, returns_fp32
from study.predictor.adapters import dora_saved_weights, dora_temporaries
from study.predictor.allocator import cublas_workspace_bytes, unsplit_bytes
from study.predictor.buckets import Snapshot, gradient_snapshots, has_tied_gradients, standing_bucket
from study.predictor.intervals import estimate, interval_name, kind_of_training
from study.predictor.losses import WITHOUT_LOGITS
from study.predictor.micro_batch import missing_figures, predict_activations
from study.predictor.request import BESIDE, FP32_BYTES, Estimate, MemoryUse, Request, cache_by_request
from study.predictor.shape import ModelShape
from study.predictor.zero3_gathers import GatherTrace, module_call_order, reference_gathers, simulate_gathers

# Libraries with a CPU build of torch: resident memory after three steps of a model of width 16 and depth 1,
# measured with torch 2.13, transformers 5.17 and deepspeed 0.19.8; and the addition of DeepSpeed.
CPU_LIBRARIES_BYTES, CPU_ENGINE_BYTES = 0.402 * GIB, 0.007 * GIB
# Python objects per module that stage 3 hooks: fitted to the excess memory of virtual ranks of models with 31 to 1002
# modules.
HOOKED_MODULE_BYTES = 70 * 2**10
# Memory of the modules that the first evaluation imports, `evaluate` and `datasets`.
EVALUATION_BYTES = 0.09 * GIB


def pinned_bytes(size: float) -> float:
    """Return the pinned bytes of an allocation, which torch rounds up to a power of two (CachingHostAllocator)."""
    return float(1 << (int(size) - 1).bit_length()) if size >= 1 else 0.0


@dataclasses.dataclass(frozen=True)
class NodeMemory:
    """Bytes of one node's host memory by part and by moment, and of its NVMe."""

    state: float
    buffers: float
    libraries: float
    # Pinned bytes among them.
    pinned: float
    # While weights are loaded, in steps, of one rank in steps, and while the model is saved.
    load: float
    train: float
    rank: float
    save: float
    nvme: float

    @property
    def parts(self) -> dict[str, float]:
        """Host memory by the names of MemoryUse.host_parts."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "nvme"}


@cache_by_request
def predict_host_memory(request: Request) -> NodeMemory:
    """Return the memory of a node, without a reference model."""
    state, ranks = model_state.predict_state(request), request.box.gpus_per_node
    libraries = _libraries_of_a_rank(request)
    buffers = _offload_buffers(request, state.params_host)
    train = ranks * (libraries + state.host + buffers.size)
    saved = 0.0
    if request.strategy.zero_stage == 3 and request.settings.stage3_gather_16bit_weights_on_model_save:
        # Without this setting Accelerate raises, and the engine saves shards, as this study's checkpoints do.
        saved = request.weight_bytes * float(request.stored.parameters)
    return NodeMemory(
        state=ranks * state.host,
        buffers=ranks * buffers.size,
        libraries=ranks * libraries,
        pinned=ranks * buffers.pinned,
        load=_load_bytes(request, state, libraries),
        train=train,
        rank=train / ranks,
        save=train + saved,
        nvme=ranks * state.nvme,
    )


def estimate_host_peak(request: Request) -> Estimate:
    """Return the peak of a node's host memory with its interval; without checkpoints there it does not depend on the
    micro-batch."""
    host = _host_in_steps(request)
    return estimate("host", max(host.load, host.train, host.save))


def checkpoints_on_host_bytes(request: Request) -> float:
    """Return a rank's bytes of recomputed layers' inputs in host memory: each is a pinned tensor (_empty_cpu_like in
    DeepSpeed's offload_activations.py)."""
    if not (request.checkpoints_on_host and request.gradient_checkpointing):
        return 0.0
    stacks = predict_activations(request).first_layers(request.shape.layers)
    return sum(count * pinned_bytes(stack.checkpoint) for stack, count in stacks) / request.checkpoint_every


def _host_in_steps(request: Request) -> NodeMemory:
    """Return a node's memory with the checkpoints of a micro-batch."""
    host, checkpoints = _host_memory(request), checkpoints_on_host_bytes(request)
    if not checkpoints:
        return host
    node = request.box.gpus_per_node * checkpoints
    return dataclasses.replace(
        host,
        buffers=host.buffers + node,
        pinned=host.pinned + node,
        train=host.train + node,
        rank=host.rank + checkpoints,
    )


@cache_by_request
def _host_memory(request: Request) -> NodeMemory:
    """Return a node's memory with the frozen weights on the host, and the loading of a reference model."""
    host = predict_host_memory(request)
    ranks, frozen = request.box.gpus_per_node, model_state.frozen_bytes(request)[1]
    # Outside stage 3 each process creates both models in host memory; in 16 bits both are views of one file.
    is_created = request.has_reference_copy and request.strategy.zero_stage != 3 and not request.pure
    loaded = float(FP32_BYTES * request.shape.parameters * is_created)
    return dataclasses.replace(
        host,
        state=host.state + frozen * ranks,
        train=host.train + frozen * ranks,
        load=host.load + loaded * ranks,
    )


def _libraries_of_a_rank(request: Request) -> float:
    """Return the bytes of imported libraries and of the engine's objects per rank."""
    strategy = request.strategy
    if not request.box.is_cpu_only:
        return libraries_bytes(strategy.deepspeed is not None)
    hooked = module_call_order(request.shape, recomputes=False)[0] if strategy.zero_stage == 3 else ()
    libraries = CPU_LIBRARIES_BYTES + (CPU_ENGINE_BYTES if strategy.deepspeed else 0.0)
    return libraries + len(hooked) * HOOKED_MODULE_BYTES


class _OffloadBuffers(NamedTuple):
    """A rank's bytes of buffers for offloaded state, and the pinned ones among all of its host memory."""

    size: float = 0.0
    pinned: float = 0.0


def _offload_buffers(request: Request, params_host: float) -> _OffloadBuffers:
    if not request.strategy.zero_stage:
        return _OffloadBuffers()
    settings = request.settings
    optimizer = _optimizer_buffers(request)
    locked, buffers, swapped = list(optimizer.locked), optimizer.size, optimizer.swapped
    parameters = settings.parameters
    if parameters is not None:
        locked.append(params_host)
        if parameters.device == "cpu" and parameters.pinned and not request.box.is_cpu_only:
            retained = _retained_shards(request)
            locked += retained
            buffers += sum(retained)
        if parameters.device == "nvme":
            swapped += float(parameters.buffers * parameters.buffer_size * request.weight_bytes)
    buffers += swapped
    pins = any(offload.pinned for offload in (settings.optimizer, parameters) if offload is not None)
    if not pins or request.box.is_cpu_only:
        return _OffloadBuffers(buffers)
    # DeepSpeed's buffers for swapped state are locked page by page (page_alloc.cpp), and not rounded.
    rounded = sum(map(pinned_bytes, locked))
    return _OffloadBuffers(buffers + (rounded - sum(locked)), rounded + swapped)


class _OptimizerBuffers(NamedTuple):
    """Bytes of each locked allocation of an offloaded optimizer, of its buffers, and of swapped state."""

    locked: tuple[float, ...] = ()
    size: float = 0.0
    swapped: float = 0.0


def _optimizer_buffers(request: Request) -> _OptimizerBuffers:
    shape, weight, optimizer = request.shape, request.weight_bytes, request.settings.optimizer
    if optimizer is None:
        return _OptimizerBuffers()
    if request.strategy.zero_stage != 3:
        # The masters and their gradients in fp32, the gradients in the weights' type, and the largest one of these.
        part = -(-shape.trained_parameters // request.data_ranks)
        grads = float(part * weight)
        largest = float(shape.largest_trained * weight)
        return _OptimizerBuffers((part * 4.0, part * 4.0, grads, largest), grads + largest)
    grads = model_state.shards_of_model(shape, request.data_ranks)[1] * float(weight)
    groups = model_state.sub_groups(request)
    if optimizer.device == "cpu":
        return _OptimizerBuffers((grads, *(group * 4.0 for group in groups)))
    return _OptimizerBuffers((grads,), swapped=optimizer.buffers * 4.0 * max(groups))


def _retained_shards(request: Request) -> list[float]:
    """Return the bytes of each shard that torch's pinned pool keeps: zero.Init pins each one separately. The shards are
    copied into one buffer and freed, but the pool keeps the blocks."""
    ranks, weight = request.data_ranks, request.weight_bytes
    return [pinned_bytes(-(-param.elements // ranks) * weight) for param in request.shape.trained_params]


def _load_bytes(request: Request, state: model_state.State, libraries: float) -> float:
    """Return a node's host bytes while weights are loaded and the engine is created."""
    ranks, loaded = request.box.gpus_per_node, _loaded_weights(request)
    if request.box.is_cpu_only:
        return ranks * (libraries + loaded.process + state.host) + loaded.node
    # The engine creates its optimizer after the weights have left the host (_configure_distributed_model), or are
    # in stage 3's host buffers.
    before = libraries_bytes(request.strategy.deepspeed is not None, before_steps=True)
    # zero.Init shards weights while they are loaded, 4-bit ones excepted. A layer that FSDP shards leaves the host
    # before its shard is there.
    has_zero_init = request.strategy.zero_stage == 3 and not request.quantized
    shards = state.params_host if has_zero_init else 0.0
    weights = ranks * (before + loaded.process + shards) + loaded.node
    return max(weights, ranks * (before + state.host))


class _LoadedWeights(NamedTuple):
    """Host bytes of weights while they are loaded: of each process, and of all processes of a node together."""

    process: float
    node: float = 0.0


def _loaded_weights(request: Request) -> _LoadedWeights:
    # transformers divides tensors while it loads them, AutoTP those of the whole model.
    shape = request.shape if request.strategy.deepspeed is None else request.full_shape
    weight = 2 if request.loads_16_bits else request.weight_bytes
    tensor = float(request.full_shape.largest * weight)
    if request.quantized or request.in_8_bits:
        # transformers creates the model on the meta device, and reads, moves and quantizes one tensor after another
        # (spawn_materialize without a thread pool).
        on_host = model_state.unsharded_4_bit_bytes(request) if request.loads_on_host else 0.0
        return _LoadedWeights(on_host + tensor)
    if request.strategy.zero_stage == 3:
        # zero.Init shards one tensor at a time, and rank 0 has a second one, read from the file.
        return _LoadedWeights(4.0 * shape.largest, 4.0 * shape.largest)
    if (request.pure or request.loads_16_bits) and not request.box.is_cpu_only:
        # Weights that are loaded in the type of their file are views of it (_materialize_copy), and all processes of a
        # node share its pages: two had 138 MiB each of 272.
        return _LoadedWeights(tensor, float(shape.parameters * weight))
    # Each process creates the full model in fp32, and then 16-bit weights tensor by tensor.
    return _LoadedWeights(4.0 * shape.parameters + (tensor if weight < FP32_BYTES else 0.0))


def loading_device_bytes(request: Request) -> float:
    """Return the bytes of one GPU, with its context, while it has weights that an engine shards later; 0 without."""
    loaded = model_state.loaded_whole_bytes(request)
    if not loaded or request.box.is_cpu_only:
        return 0.0
    return loaded + _cuda_context_bytes(request.box.ranks)


# Freed blocks that malloc retains in a process without a GPU: runs set this for stable times
# (study/host/environment.py), and blocks of 32 MiB and more are always returned. FRAGMENTATION is a fraction of
# the peak in smaller blocks, WEIGHT_COPIES a number of flat copies of all weights, as ranks with shards send them. Both
# are least squares over validation/malloc_retention.yaml. The reason for that many copies is not known: with one heap
# for all threads (MALLOC_ARENA_MAX=1) there were more.
FRAGMENTATION, WEIGHT_COPIES = 0.57, 7.7


def small_blocks(request: Request, points: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the peak bytes in small blocks, and the bytes of weights sent in one call."""
    shape, tokens = request.shape, request.micro_batch * request.sequence_length
    widths = {
        "activations": shape.inner,
        "attention": shape.heads * request.sequence_length,
    }
    blocks = {name: FP32_BYTES * tokens * width for name, width in widths.items()}
    blocks["logits"] = FP32_BYTES * request.output_tokens * shape.vocabulary
    blocks |= dict.fromkeys(("gradients", "buffers"), shape.largest * request.weight_bytes)
    small = [name for name, size in blocks.items() if size < MALLOC_MMAP_THRESHOLD_MAX_BYTES]
    peak = max(sum(parts.get(name, 0.0) for name in small) for parts in points)
    has_shards = request.data_ranks > 1 and (bool(request.strategy.zero_stage) or request.strategy.is_fsdp)
    # Stages 1 and 2 send only trained weights.
    is_whole = request.strategy.zero_stage == 3 or request.strategy.is_fsdp
    sent = (shape.parameters if is_whole else shape.trained_parameters) * request.weight_bytes
    return peak, float(sent) if has_shards and sent < MALLOC_MMAP_THRESHOLD_MAX_BYTES else 0.0


# A CUDA context after the first tensor (https://discuss.pytorch.org/t/73021), and NCCL's buffers on A100s for two ranks
# and for more (https://github.com/NVIDIA/nccl/issues/964).
CONTEXT_BYTES, COMMUNICATOR_OF_TWO_BYTES, COMMUNICATOR_BYTES = 723 * 2**20, 544 * 2**20, 688 * 2**20
# Reserved memory beyond the allocated peak, as a fraction. Assumed: no record of this project measures it.
FRAGMENTATION_FRACTION = 0.04


class DeviceMemory(NamedTuple):
    """Device memory by part at one instant of a step."""

    parts: dict[str, float]
    # Moment of a step, as text.
    moment: str
    # In the optimizer step, after the backward pass.
    step: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def with_logits(self, size: float) -> DeviceMemory:
        """Return the moment with more bytes of logits."""
        return self._replace(parts={**self.parts, "logits": self.parts.get("logits", 0.0) + size})

    def without(self, *names: str) -> float:
        return self.total - sum(self.parts[name] for name in names)


@functools.lru_cache(maxsize=4096)
def predict_memory(request: Request) -> MemoryUse:
    """Predict the memory of one GPU, its node's host, and NVMe."""
    state = _device_state(request)
    allocator = _allocator_bytes(request)
    points = device_snapshots(request)
    peak = _highest(points, state, allocator)
    host = _host_in_steps(request)
    excess = 0.0
    if request.correction is not None:
        excess = request.correction.find_excess(request, peak.total - state.exact)
    free = _free_blocks_bytes(request, peak, points)
    reserved = peak.total + free
    parts = {name: peak.parts.get(name, 0.0) for name in PARTS}
    parts["context"] = 0.0 if request.box.is_cpu_only else _cuda_context_bytes(request.box.ranks)
    parts["fragmentation"] = free
    if request.vllm_bytes:
        parts[BESIDE] = request.vllm_bytes
    if excess:
        parts[MEASURED_EXCESS] = excess
    return MemoryUse(
        device_parts=parts,
        missing=missing_figures(request),
        steady_allocated=estimate("state", state.steady + (_static_buffer_bytes(request) + allocator)),
        peak_allocated=_peak_estimate(request, peak.total, excess, state.exact),
        peak_reserved=_peak_estimate(request, reserved, excess, state.exact),
        pool_with_room=excess + _pool_with_room(request, points, state.exact + allocator, reserved),
        process_peak=estimate("process", reserved + host.rank) if request.box.is_cpu_only else None,
        host_parts=host.parts,
        host_peak=estimate_host_peak(request),
        nvme=host.nvme,
        notes=tuple(_notes(request, peak)),
        loading=loading_device_bytes(request),
        moment=peak.moment,
        most_parts=_most_parts(points, allocator),
    )


def _highest(points: Sequence[DeviceMemory], state: _DeviceState, allocator: float) -> DeviceMemory:
    """Return the moment with the most memory, with the parts that are constant in a step."""
    highest = max(points, key=lambda point: point.total)
    parts = {**state.parts, **highest.parts, "allocator": highest.parts["allocator"] + allocator}
    return highest._replace(parts=parts)


def _most_parts(points: Sequence[DeviceMemory], allocator: float) -> dict[str, float]:
    """Return the largest size of each part that changes in a step."""
    changing = [name for name in PARTS if name not in ("parameters", "optimizer")]
    most = {name: max(point.parts.get(name, 0.0) for point in points) for name in changing}
    return {**most, "allocator": most["allocator"] + allocator}


def _allocator_bytes(request: Request) -> float:
    """Return cuBLAS' workspaces, which exist from the first step on, and the bytes of the state's blocks
    beyond its tensors."""
    unsplit = unsplit_bytes(request)
    return cublas_workspace_bytes(request.box.device) + unsplit.parameters + unsplit.optimizer


def _free_blocks_bytes(request: Request, peak: DeviceMemory, points: Sequence[DeviceMemory]) -> float:
    """Return the bytes of free blocks at the peak: torch's on a GPU, malloc's without one."""
    if not request.box.is_cpu_only:
        return peak.total * FRAGMENTATION_FRACTION
    most, sent = small_blocks(request, [point.parts for point in points])
    return FRAGMENTATION * most + WEIGHT_COPIES * sent


def _peak_estimate(request: Request, size: float, excess: float, exact: float) -> Estimate:
    """Return a peak with its interval, which is that of published peaks unless peaks of the setup were measured.

    `excess`: what measured peaks have more. The intervals come from GPUs.
    """
    if request.box.is_cpu_only:
        return Estimate(size)
    correction, corrected = request.correction, size + excess
    if correction is None or not correction.excesses:
        usual = estimate(interval_name(kind_of_training(request), "above_state"), corrected, exact)
        return _at_most_the_device(request, usual)
    if correction.has_measured_peak(request):
        return Estimate(corrected, corrected, corrected)
    return estimate("calibrated_above_state", corrected, exact)


def _at_most_the_device(request: Request, peak: Estimate) -> Estimate:
    """Return the peak, whose bound is at most the GPU's memory if a step of this configuration was measured: it ran."""
    correction = request.correction
    if correction is None or correction.find_measured_factor(request) is None or peak.high is None:
        return peak
    room = request.box.device.visible_gib * GIB - _unpooled_bytes(request)
    return dataclasses.replace(peak, high=max(peak.value, min(peak.high, room)))


@dataclasses.dataclass(frozen=True)
class _DeviceState:
    """Bytes on the device that do not change in a step."""

    parameters: float
    optimizer: float
    # Of a persistent buffer of gradients, which counts as the optimizer's if that is offloaded.
    gradients: float = 0.0
    is_offloaded: bool = False

    @property
    def exact(self) -> float:
        """Bytes of weights and optimizer, which are exact."""
        return self.parameters + self.parts["optimizer"]

    @property
    def steady(self) -> float:
        """Bytes between two steps."""
        return self.parameters + self.optimizer + self.gradients

    @property
    def parts(self) -> dict[str, float]:
        gradients = self.gradients if self.is_offloaded else 0.0
        return {"parameters": self.parameters, "optimizer": self.optimizer + gradients}


@cache_by_request
def _device_state(request: Request) -> _DeviceState:
    """Return the bytes of weights and optimizer, and those of stage 3's gradients.

    These have a persistent buffer (stage3.py, grad_partitions_flat_buffer). With an offload they are those in fp32 of
    sub-groups that `ratio` leaves on the device, allocated at the start (initialize_optimizer_states).
    """
    state, frozen = model_state.predict_state(request), model_state.frozen_bytes(request)[0]
    frozen += reference_gathers(request).live_at_end * request.gathered_bytes
    parameters = state.params_device + frozen
    if request.strategy.zero_stage != 3:
        return _DeviceState(parameters, state.optimizer_device)
    gradients = model_state.predict_state(request, unreduced=False).grads_device
    is_offloaded = bool(request.strategy.offload_device("optimizer"))
    return _DeviceState(parameters, state.optimizer_device, gradients, is_offloaded)


def least_device_bytes(request: Request, at_upper: bool = False) -> float:
    """Return device bytes that a prediction, or its upper bound, has at least: weights, optimizer, accumulated
    gradients, and the activations at the loss, or weights while they are loaded.

    It needs no gathers and no order of gradients, so a search for the largest micro-batch begins with it.
    """
    if request.box.is_cpu_only:
        return 0.0
    exact = _device_state(request).exact
    saved = predict_activations(request)
    stored = sum(_stored(request, saved, request.shape.layers).values())
    logits = saved.logits + max(saved.logits_forward, saved.logits_backward)
    buffers = _static_buffer_bytes(request) + cublas_workspace_bytes(request.box.device)
    allocated = exact + stored + logits + buffers + _accumulated_bytes(request)
    reserved = allocated * (1 + FRAGMENTATION_FRACTION)
    if request.correction is not None:
        reserved += request.correction.find_excess(request, allocated - exact)
    if at_upper:
        reserved = max(reserved, _peak_estimate(request, reserved, 0.0, exact).high or 0.0)
    return max(reserved + _unpooled_bytes(request), loading_device_bytes(request))


def _pool_with_room(request: Request, points: Sequence[DeviceMemory], constant: float, needed: float) -> float:
    """Return the reserved memory of the caching allocator if it never has to free cached blocks.

    Blocks that one phase of a step freed are too small, or split, for the next phase: temporaries of the passes,
    gradients, and temporaries of the optimizer add up, except in expandable segments. A block serves only its stream,
    and FSDP and stage 3 gather and reduce on other streams, where FSDP also has its sharded gradients (foreach_reduce
    in _fsdp_collectives.py, _reduce_grad in _runtime_utils.py). Before torch runs out of memory it frees all cached
    blocks (release_cached_blocks in CUDACachingAllocator.cpp), so this figure does not decide whether a model fits.
    """
    if not request.box.device.memory_gib:
        return needed
    passing = [point for point in points if not point.step]
    steps = max((point.total for point in points if point.step), default=0.0)
    other_streams, excluded = 0.0, tuple[str, ...]()
    if request.data_ranks > 1 and (request.strategy.is_fsdp or request.strategy.zero_stage == 3):
        other_streams, excluded = max(point.parts["buffers"] for point in passing), ("buffers",)
    if request.expandable_segments:
        sharded = 0.0
        if excluded and request.strategy.is_fsdp:
            sharded = max((point.parts["gradients"] for point in points if point.step), default=0.0)
        passes = max(point.without(*excluded) - min(point.parts["gradients"], sharded) for point in passing)
        return max(needed, constant + other_streams + sharded + max(steps - sharded, passes))
    passes = other_streams + max(point.without("gradients", *excluded) for point in passing)
    available = request.box.device.visible_gib * 2**30 - _unpooled_bytes(request)
    return max(needed, min(constant + passes + steps, available))


def _cuda_context_bytes(ranks: int) -> float:
    """Return the bytes of the CUDA context and NCCL's buffers."""
    return float(CONTEXT_BYTES + (0 if ranks == 1 else COMMUNICATOR_OF_TWO_BYTES if ranks == 2 else COMMUNICATOR_BYTES))


def _unpooled_bytes(request: Request) -> float:
    """Return the bytes of the GPU outside of torch's allocator."""
    return _cuda_context_bytes(request.box.ranks) + request.vllm_bytes


def kept_for_backward(request: Request) -> float:
    """Return the bytes that a forward pass leaves allocated, its logits included, gathered weights excluded."""
    saved = predict_activations(request)
    returned = _logits_bytes(request, saved, request.computing_bytes)
    return sum(_stored(request, saved, request.shape.layers).values()) + saved.logits + returned


def _logits_bytes(request: Request, saved: Activations, width: int) -> float:
    """Return the bytes of a micro-batch's logits; 0 of a model, or with a loss, that has none of all tokens."""
    if not saved.logits or request.loss_kernel in WITHOUT_LOGITS:
        return 0.0
    return float(request.output_tokens * request.shape.vocabulary * width)


def kept_output_bytes(request: Request) -> float:
    """Return the bytes of logits that the loop keeps throughout a step."""
    if not request.keeps_outputs:
        return 0.0
    width = FP32_BYTES if returns_fp32(request) else request.computing_bytes
    return _logits_bytes(request, predict_activations(request), width) + _cache_bytes(request)


def _cache_bytes(request: Request) -> float:
    """Return the bytes of keys and values that a recomputed pass would not keep."""
    if not (request.keeps_cache and request.gradient_checkpointing):
        return 0.0
    shape = request.shape
    keys = shape.layers * shape.key_value_heads * shape.head_dim
    return float(2 * keys * request.micro_batch * request.sequence_length * request.computing_bytes)


# What measured peaks of the same setup have more; negative if they have less.
MEASURED_EXCESS = "measured excess"
# allocator: cuBLAS' workspaces, and remainders of blocks (study/predictor/allocator.py).
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "logits", "attention", "allocator")


def _notes(request: Request, peak: DeviceMemory) -> Iterator[str]:
    """Yield explanations of parts whose size is not obvious."""
    shape, logits = request.shape, peak.parts.get("logits", 0.0)
    yield from shape.notes()
    if shape.has_decoder:
        yield _lengths_note(request)
    yield from _dora_notes(request)
    if request.has_reference_copy:
        live = reference_gathers(request).max_live_elements * request.gathered_bytes / GIB
        unsharded = f", and {format_number(live)} unsharded in its forward pass, before the loss" * (live > 0)
        size = format_number(sum(model_state.frozen_bytes(request)) / GIB)
        yield f"the reference model's weights need {size} GiB a rank{unsharded}"
    if logits > 0.2 * peak.total and request.loss_kernel not in WITHOUT_LOGITS:
        tokens = request.output_tokens
        size = format_number(logits / (tokens * shape.vocabulary))
        yield f"logits and their loss: {tokens:,} tokens by {shape.vocabulary:,} words, {size} bytes each"
    if not request.strategy.zero_stage:
        return
    settings = request.settings
    largest = max(shape.trained_params, key=lambda param: param.elements)
    # Stage 1 partitions no gradient.
    if settings.stage > 1 and largest.elements > settings.reduce_bucket_size:
        yield f"gradient of {largest.name} ({largest.elements:,} elements) exceeds the bucket and stays unpartitioned"
    if has_tied_gradients(shape):
        yield f"{shape.embedding.name} is tied: the gradients of both uses and their sum are allocated at once"
    if (what := model_state.unswapped_kind(request)) is not None:
        is_small = what == "optimizer" or settings.max_in_cpu < shape.trained_parameters / request.data_ranks
        reason = "no shard has the 1 MiB that DeepSpeed swaps" if is_small else f"max_in_cpu is {settings.max_in_cpu:,}"
        yield f"the {what} is not on NVMe but in host memory: {reason}"
    if settings.stage == 3:
        persistent = sum(param.elements for param in model_state.persistent_params(request))
        most = simulate_gathers(request).gathered_at_once + persistent
        yield f"at most {most:,} of {request.stored.parameters:,} parameters are unsharded at once"


def _lengths_note(request: Request) -> str:
    """Return which tokens are those of an encoder-decoder model's sample."""
    if not request.shape.encoder_reads_tokens:
        return "the tokens of a sample are the decoder's, and its encoder's input has the size that config.json sets"
    if request.target_length is None:
        return f"encoder and decoder have {request.sequence_length:,} tokens each; --target_length sets the decoder's"
    return f"tokens/s counts the {request.sequence_length:,} tokens of the encoder"


def _dora_notes(request: Request) -> Iterator[str]:
    """Yield what DoRA takes besides its parameters."""
    if request.shape.lora_dora:
        size = format_number(dora_temporaries(request) / GIB)
        yield f"DoRA: the norm of a weight takes up to {size} GiB in a forward pass; no published run validates it"
    if copies := dora_saved_weights(request):
        size = format_number(copies * (1 if request.gradient_checkpointing else request.shape.layers) / GIB)
        yield f"DoRA keeps copies of weights for the backward pass, {size} GiB: not with a lora_dropout of 0"


def _static_buffer_bytes(request: Request) -> float:
    """Return bytes of gradient buffers that exist during the forward pass as well."""
    shape = request.shape
    if request.strategy.name == "ddp":
        return float(shape.trained_parameters * request.adapter_bytes)
    if request.strategy.zero_stage == 3:
        return standing_bucket(request)
    if request.strategy.zero_stage and request.settings.optimizer is not None:
        return shape.largest_trained * float(request.weight_bytes)
    return 0.0


def _accumulated_bytes(request: Request) -> float:
    """Return the bytes of gradients during the forward pass of a step's last micro-batch."""
    strategy = request.strategy
    if strategy.is_fsdp:
        return model_state.accumulated_bytes(request) + model_state.reduced_bytes(request)
    # Stage 3 allocates its gradient buffer at the start, unless the optimizer is offloaded.
    has_accumulated = not strategy.offload_device("optimizer") if strategy.zero_stage == 3 else request.accumulation > 1
    return model_state.predict_state(request, unreduced=False).grads_device if has_accumulated else 0.0


# A step on one rank: its allocations, and the moments that can be its peak (^), by their names in DeviceMemory.
#
#                        forward pass         loss    its gradient    backward pass         optimizer step
#     weights, optimizer #################################################################################
#     activations             ....::::||||    ||||    ||||            ||||::::....
#     a layer's temporaries   ####                                    ################
#     logits                                  ####    ######
#     gradients          (earlier micro-batches: all)                     ....::::||||      |||| or shards
#     buffers            (DDP, offload and stage 3: all)              ################      ####
#     gathered weights   ################     ####    ####            ################      (stage 3, FSDP)
#     AdamW's copies                                                                        ####
#                                ^             ^       ^                ^                     ^
#
# buckets.py follows the gradients and buffers of the last two columns.


def device_snapshots(request: Request) -> list[DeviceMemory]:
    """Return the memory snapshots of a step, without the weights and the optimizer, which are constant."""
    step = _DeviceStep(request)
    points = [
        step.at_the_loss(),
        *step.in_the_reference_model(),
        *step.in_the_forward_pass(),
        step.at_the_gradient_of_the_loss(),
        *step.from_the_first_gradient_on(),
    ]
    output_bytes = kept_output_bytes(request)
    return [point.with_logits(output_bytes) for point in points] if output_bytes else points


# A layer, whether it is before the layer's backward pass, and the part of that pass, None before its first gradient.
_LayerPart = tuple[int, bool, str | None]


class _DeviceStep:
    """The moments of a step on one device."""

    def __init__(self, request: Request) -> None:
        shape = request.shape
        self.request = request
        self.layers = shape.layers
        self.saved = predict_activations(request)
        self.is_stage3 = request.strategy.zero_stage == 3
        self.gathers = simulate_gathers(request) if self.is_stage3 else GatherTrace()
        self.stored = _stored(request, self.saved, shape.layers)
        self.phases = _phases(shape)
        self.stored_by_part: dict[_LayerPart, dict[str, float]] = {}
        self.accumulated = _accumulated_bytes(request)
        self.standing = _static_buffer_bytes(request)
        # FSDP2's root stays gathered until its backward pass; stages 1 and 2 allocate their bucket at the first
        # gradient.
        self.begun = gradient_snapshots(request)[0].buffers if request.strategy.is_fsdp else self.standing
        # autocast caches its weight copies of a recomputed layer until the forward pass ends. It caches none of views
        # (cached_cast in torch's autocast_mode.cpp), as FSDP1's weights are.
        is_cached = request.gradient_checkpointing and not (request.strategy.is_fsdp and request.fsdp_version == 1)
        self.cached = self.saved.cast_cached / request.checkpoint_every if is_cached else 0.0
        # Remainders of blocks, per byte of gradients.
        gradients = shape.trained_parameters * request.adapter_bytes
        self.remainders = unsplit_bytes(request).gradients / max(1, gradients)
        if request.has_mixed_units:
            # Gradients of flat parameters, which are large.
            self.remainders = 0.0

    def _point(self, moment: str, live: int, **parts: float) -> DeviceMemory:
        """Return a moment with these parts, and `live` elements that stage 3 has gathered."""
        gradients = {"gradients": self.accumulated, "allocator": self.accumulated * self.remainders}
        all_parts = {**self.stored, **gradients, **parts}
        buffers = all_parts.get("buffers", self.standing) + live * self.request.weight_bytes
        return DeviceMemory({**all_parts, "buffers": buffers}, moment)

    def at_the_loss(self) -> DeviceMemory:
        """Return the end of the forward pass, when the loss is computed from the logits."""
        activations = self.stored["activations"] + self.cached * self.layers
        logits = self.saved.logits + self.saved.logits_forward
        live = self.gathers.live_at_end
        return self._point("at the loss", live, buffers=self.begun, activations=activations, logits=logits)

    def in_the_reference_model(self) -> Iterator[DeviceMemory]:
        """Yield the reference model's forward pass: TRL runs it before the loss, and frees its logits before the
        backward pass."""
        if not self.request.has_reference_copy:
            return
        reference = reference_gathers(self.request)
        unsharded = (reference.max_live_elements - reference.live_at_end) * self.request.gathered_bytes
        logits = self.saved.logits + max(self.saved.logits_forward, self.saved.layer_forward)
        moment = "in the reference model's forward pass"
        yield self._point(moment, self.gathers.live_at_end, buffers=self.begun + unsharded, logits=logits)

    def in_the_forward_pass(self) -> Iterator[DeviceMemory]:
        """Yield the forward pass of each layer, with the temporaries of one whose tensors are not saved."""
        ends = (end - 1 for end in itertools.accumulate(self.request.shape.stack_sizes))
        for place, live in (self.gathers.live_forward or dict.fromkeys(ends, 0)).items():
            so_far = min(self.layers, place + 1)
            before = _stored(self.request, self.saved, so_far)
            working = self.saved.weight_norm
            if self.request.gradient_checkpointing and so_far:
                working = max(working, self.saved.find_stack(so_far - 1).forward)
            before["activations"] = before["activations"] + self.cached * so_far + working
            yield self._point("in the forward pass", live, **before)

    def at_the_gradient_of_the_loss(self) -> DeviceMemory:
        logits = self.saved.logits + self.saved.logits_backward
        return self._point("at the loss's gradient", self.gathers.live_at_end, buffers=self.begun, logits=logits)

    def from_the_first_gradient_on(self) -> Iterator[DeviceMemory]:
        """Yield the backward pass and the optimizer step."""
        recomputes = self.is_stage3 and self.request.gradient_checkpointing
        request, kinds = _gradient_request(self.request), self.saved.layer_kinds
        for snapshot in _decisive_snapshots(request, recomputes=recomputes, kinds=kinds):
            parts = {
                "gradients": snapshot.grads,
                "buffers": snapshot.buffers,
                "allocator": snapshot.grads * self.remainders,
            }
            if snapshot.step:
                yield DeviceMemory(parts, "in the optimizer step", step=True)
            else:
                yield DeviceMemory({**self._stored_at(snapshot), **parts}, "in the backward pass")

    def _stored_at(self, snapshot: Snapshot) -> dict[str, float]:
        """Return the activations that are left when a gradient arrives."""
        place, param = snapshot.place, snapshot.param
        part = None
        if param is not None:
            part = self.phases[param.index] if 0 <= place < self.layers else ""
        # Several snapshots of a part are decisive: each has the largest of another size.
        key = (place, snapshot.between, part)
        if (stored := self.stored_by_part.get(key)) is None:
            stored = self.stored_by_part[key] = self._stored_in(*key)
        return stored

    def _stored_in(self, place: int, between: bool, part: str | None) -> dict[str, float]:
        """Return the activations that are left in a part of a layer's backward pass, None before its first gradient."""
        request, saved = self.request, self.saved
        is_in_layer = 0 <= place < self.layers
        stored = _stored(request, saved, min(self.layers, place + 1), is_in_layer and not between)
        stored["activations"] += _kept_inputs_bytes(request, saved, place)
        if part is None and is_in_layer and not between and request.gradient_checkpointing:
            # Before its first gradient a layer is recomputed.
            stored["activations"] += max(0.0, saved.weight_norm - saved.find_stack(place).working)
        if part is not None and is_in_layer:
            stored["activations"] -= saved.freed.get(part, 0.0)
        if is_in_layer:
            stored["activations"] += saved.carried_at(place)
        if place < self.layers:
            # After the head's backward pass autograd has freed autocast's copy of its weight.
            stored["activations"] -= saved.cast_head + saved.freed_before(place)
        return stored


def _kept_inputs_bytes(request: Request, saved: Activations, place: int) -> float:
    """Return the bytes of inputs and their gradients that FSDP1 keeps of the layers above `place`.

    register_multi_grad_hook (_register_post_backward_reshard_only_hook in torch's _runtime_utils.py) has the input's
    AccumulateGrad. In a reentrant recomputation that is a leaf, so that its gradient accumulates in it. The gradient of
    the layer just above is the one that this layer's backward pass has anyway.
    """
    above = request.shape.layers - 1 - place
    if not request.keeps_inputs or above < 1:
        return 0.0
    return saved.checkpoint / request.checkpoint_every * (above + (above - 1))


# Sum, gradients and buffers, which are the criteria of the largest, and the snapshot that they belong to.
_Candidate = tuple[tuple[float, float, float], Snapshot]
_CRITERIA = 3
# Of a layer's backward pass before its first gradient.
_BEGIN = "begin"
# Layer, None for the optimizer step; whether it is before the layer's backward pass; and the part of the layer.
_Part = tuple[int | None, bool, str]


def _gradient_request(request: Request) -> Request:
    """Return a request with the same snapshots, one for all strategies of stage 3 that differ elsewhere.

    Stage 3 has its gradients' shards from the start, whether they are accumulated or not.
    """
    if request.strategy.zero_stage != 3:
        return request
    strategy = _gradient_strategy(request.strategy, request.data_ranks)
    return dataclasses.replace(request.without_batch, strategy=strategy, accumulation=1)


@functools.lru_cache(maxsize=256)
def _gradient_strategy(strategy: Strategy, ranks: int) -> Strategy:
    """Return a strategy of stage 3 with the settings that affect gradients and gathers.

    With an offloaded optimizer the device has no gradients between steps, and its sub-groups step on the host. A single
    rank gathers parameters only from the host. The gathers exclude hpZ's secondary shard.
    """
    assert strategy.deepspeed is not None
    zero = dict(strategy.deepspeed["zero_optimization"])
    zero.pop("zero_hpz_partition_size", None)
    if ranks > 1:
        zero.pop("offload_param", None)
    if strategy.offload_device("optimizer") is not None:
        zero.pop("sub_group_size", None)
        zero["offload_optimizer"] = {"device": "cpu"}
    return dataclasses.replace(strategy, name="zero3", deepspeed={**strategy.deepspeed, "zero_optimization": zero})


@cache_by_request
def _decisive_snapshots(request: Request, *, recomputes: bool, kinds: tuple[str, ...]) -> list[Snapshot]:
    """Return the snapshots that can be the peak, with all buffers: those with the most gradients, buffers, or both, per
    part of a layer and for the optimizer step. All other memory is equal in the snapshots of a part, which are many.

    `kinds`: Activations.layer_kinds.
    """
    standing, shape = _static_buffer_bytes(request), request.shape
    request = dataclasses.replace(request, gradient_checkpointing=recomputes)
    gathers = simulate_gathers(request) if request.strategy.zero_stage == 3 else GatherTrace()
    phases = _phases(shape)
    # By layer, None for the optimizer step, and by part of a layer: the largest sum, gradients and buffers, each with
    # its own gradients, buffers and snapshot.
    largest: dict[_Part, list[_Candidate]] = {}

    for snapshot in gradient_snapshots(request):
        param, at, buffers = snapshot.param, snapshot.place, max(standing, snapshot.buffers)
        live = 0 if snapshot.step else gathers.live_backward.get(at, 0)
        name = _BEGIN
        if param is not None:
            live = gathers.live_at.get(param.index, live)
            name = phases[param.index] if 0 <= at < shape.layers else ""
        part = (None if snapshot.step else at, snapshot.between, name)
        _keep_largest(largest, snapshot, part, (snapshot.grads, buffers + live * request.weight_bytes))
        if snapshot.arrival and param is not None and param.index in gathers.live_before:
            # A tied embedding has both gradients and their sum; before that, only the head's.
            count = 2 if param.index == shape.embedding.index and has_tied_gradients(shape) else 1
            grads = snapshot.grads - float(count * param.elements * request.weight_bytes)
            buffers += gathers.live_before[param.index] * request.weight_bytes
            _keep_largest(largest, snapshot, part, (grads, buffers))
    decisive = _without_inner_layers(largest, shape, kinds)
    return [snapshot._replace(grads=grads, buffers=buffers) for (_, grads, buffers), snapshot in decisive]


def _keep_largest(
    largest: dict[_Part, list[_Candidate]], snapshot: Snapshot, part: _Part, sizes: tuple[float, float]
) -> None:
    """Keep a snapshot whose gradients, buffers or their sum are the largest of its part.

    The criteria are written out: this runs for each gradient of each strategy.
    """
    grads, buffers = sizes
    total = grads + buffers
    if (rows := largest.get(part)) is None:
        largest[part] = [((total, grads, buffers), snapshot)] * _CRITERIA
        return
    if total > rows[0][0][0]:
        rows[0] = ((total, grads, buffers), snapshot)
    if grads > rows[1][0][1]:
        rows[1] = ((total, grads, buffers), snapshot)
    if buffers > rows[2][0][2]:
        rows[2] = ((total, grads, buffers), snapshot)


def _without_inner_layers(
    largest: Mapping[_Part, Sequence[_Candidate]], shape: ModelShape, kinds: tuple[str, ...]
) -> list[_Candidate]:
    """Return the candidates without those of layers that cannot be the peak, whatever grows or falls by layer."""
    stacks = shape.stack_numbers
    chosen = [(part, criterion, row) for part, rows in largest.items() for criterion, row in enumerate(rows)]
    # The same part of all layers of a stack and a kind.
    by_part = defaultdict[tuple[int, str, bool, str, int], list[tuple[int, float, int]]](list)
    decisive_indexes = set[int]()
    for index, ((place, between, name), criterion, row) in enumerate(chosen):
        if place is not None and 0 <= place < shape.layers:
            kind, part = kinds[place] if kinds else "", shape.part_of_any_layer(place, name)
            by_part[stacks[place], kind, between, part, criterion].append((place, row[0][criterion], index))
        else:
            decisive_indexes.add(index)
    for points in by_part.values():
        decisive_indexes.update(_upper_hull(points))
    return [row for index, (_, _, row) in enumerate(chosen) if index in decisive_indexes]


@functools.lru_cache(maxsize=64)
def _phases(shape: ModelShape) -> Mapping[int, str]:
    """Return the part of a layer that begins with each parameter's gradient, by the parameter's index."""
    return {param.index: shape.part_of_backward(param) for param in shape.params}


def _upper_hull(points: list[tuple[int, float, int]]) -> list[int]:
    """Return the indexes of the points that are the largest for some slope of the memory that grows with the layer.

    The activations of a part are linear in the layer for any batch: with a convex hull the points need no
    activations, so that all micro-batches share them.
    """
    hull: list[tuple[int, float, int]] = []
    for place, value, index in sorted(points):
        if hull and hull[-1][0] == place:
            # Of two at one place the larger, and of equal ones the first.
            if hull[-1][1] >= value:
                continue
            hull.pop()
        while len(hull) > 1:
            (first, low, _), (second, middle, _) = hull[-2:]
            if (middle - low) * (place - first) > (value - low) * (second - first):
                break
            hull.pop()
        hull.append((place, value, index))
    return [index for _, _, index in hull]


# Inputs of recomputed layers that a device has while the others are in host memory: max_fwd_stash_count and
# keep_last_count of DeepSpeed's offload_activations.py.
CHECKPOINTS_ON_DEVICE = 3


def _stored(request: Request, saved: Activations, layers: int, working: bool = False) -> dict[str, float]:
    """Return activation bytes saved by the first `layers` layers, and with `working` the last one's temporaries."""
    recomputed = request.gradient_checkpointing
    recomputed_layers = layers / request.checkpoint_every if recomputed else 0.0
    full_layers = layers - recomputed_layers
    scores = full_layers * saved.scores
    activations = 0.0
    most = float(CHECKPOINTS_ON_DEVICE if request.checkpoints_on_host else layers)
    for stack, count in saved.first_layers(layers):
        with_checkpoint = count / request.checkpoint_every if recomputed else 0.0
        on_device = min(with_checkpoint, most)
        most -= on_device
        activations += on_device * stack.checkpoint + (count - with_checkpoint) * (stack.saved - saved.scores)
        activations += stack.shared if with_checkpoint else 0.0
    activations += saved.outside
    # autocast's copies live as long as the graph; recomputed layers cast again.
    activations += saved.cast_layer * full_layers + saved.cast_head
    if working:
        stack = saved.find_stack(layers - 1)
        activations += stack.working
        if recomputed:
            activations += stack.saved - stack.input - saved.scores + saved.cast_layer
            scores += saved.scores
    return {"activations": activations, "attention": scores}
