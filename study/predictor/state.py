"""Model state of rank 0 in exact bytes: weights, gradients, optimizer state, and padding, by the engines' rules.

No rank has more than rank 0. The rules are those of deepspeed 0.19, torch's DDP and FSDP2; see the comments.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from study.config.flags import Precision
from study.config.precisions import in_engine
from study.config.strategies import Strategy
from study.predictor.hardware import ANY_DEVICE, box_of_ranks
from study.predictor.request import FP32_BYTES, Request, cache_by_request
from study.predictor.shape import BEFORE, ModelShape, Parameter, is_packed
from study.predictor.table_shape import TableShape

# deepspeed/runtime/swap_tensor/constants.py and utils.py: the smallest shard that is swapped, and its alignment.
MIN_SWAPPED_BYTES, SWAP_ALIGNMENT_BYTES = 2**20, 1024
# torch's AdamW has a step counter per tensor.
STEP_BYTES = 4


@dataclasses.dataclass(frozen=True)
class State:
    """Model state of one rank in bytes by kind and place; gradients at their peak after a backward pass of the step."""

    params_device: float
    grads_device: float
    optimizer_device: float
    params_host: float = 0.0
    grads_host: float = 0.0
    optimizer_host: float = 0.0
    params_nvme: float = 0.0
    grads_nvme: float = 0.0
    optimizer_nvme: float = 0.0

    @property
    def device(self) -> float:
        return self.params_device + self.grads_device + self.optimizer_device

    @property
    def host(self) -> float:
        return self.params_host + self.grads_host + self.optimizer_host

    @property
    def nvme(self) -> float:
        return self.params_nvme + self.grads_nvme + self.optimizer_nvme


@cache_by_request
def predict_state(request: Request, *, unreduced: bool = True) -> State:
    """Return the model state; `unreduced` includes gradients that are not reduced yet after the backward pass."""
    by_stage = {None: _unsharded, 0: _unsharded, 1: _stage12, 2: _stage12, 3: _stage3}
    return by_stage[request.strategy.zero_stage](request, unreduced)


def checkpoint_bytes(request: Request) -> float | None:
    """Return the bytes of a checkpoint's files, of all ranks (reports/checkpoints); None without a measurement: with
    adapters, tensor parallelism, other optimizers, stage 0 and NVMe."""
    shape, strategy = request.shape, request.strategy
    is_other = shape.frozen_parameters or request.pure or request.optimizer != "adamw" or request.tensor_group
    if is_other or strategy.uses_nvme or strategy.zero_stage == 0:
        return None
    weights = float(shape.parameters * request.weight_bytes)
    optimizer = float(shape.parameters * request.moments_bytes)
    if strategy.is_fsdp and shape.tied:
        # Shards are saved under both names of a tied weight.
        return weights + optimizer + shape.embedding.elements * request.weight_bytes
    if strategy.zero_stage is None:
        return weights + optimizer
    masters = shape.parameters * request.settings.master_bytes
    # Stage 3 saves no other weights than the masters.
    return optimizer + masters + (0.0 if strategy.zero_stage == 3 else weights)


def accumulated_bytes(request: Request) -> float:
    """Bytes of unpartitioned gradients between micro-batches: Accelerate disables FSDP2's reduction until the last."""
    if request.accumulation == 1 or request.sync_each_batch:
        return 0.0
    return float(_fsdp_gradients(request) * request.gathered_bytes)


def reduced_bytes(request: Request) -> float:
    """Bytes of a rank's reduced gradients between micro-batches, if FSDP reduces them in each one."""
    if request.accumulation == 1 or not request.sync_each_batch or request.fsdp_offloads:
        return 0.0
    return float(fsdp_shards(request).trained * request.weight_bytes)


def undivided_gradient_elements(request: Request) -> int:
    """Return the elements of an embedding's gradient beyond those of a rank's part of it, where transformers divides
    the vocabulary: torch makes that gradient whole (embedding_dense_backward_strategy in its _embedding_ops.py)."""
    group = request.tensor_group
    if group is None or not group.divides_embedding or request.strategy.deepspeed is not None:
        return 0
    return group.model.embedding.elements - request.shape.embedding.elements


def _fsdp_gradients(request: Request) -> int:
    """Return the elements of a model's gradients under FSDP."""
    if request.has_mixed_units:
        return sum(unit.with_gradients for unit in flat_units(request).values())
    return request.shape.trained_parameters


def frozen_gradients_bytes(request: Request) -> float:
    """Bytes of a rank's gradients of frozen weights if FSDP1's units have adapters, too (`fsdp_mixed_units`): shards
    without accumulation, and whole with it. Units without adapters, as that of the embedding, have no gradients."""
    mixed = dataclasses.replace(request, fsdp_mixed_units=True)
    if not mixed.has_mixed_units or request.shape.lora_rank is None:
        return 0.0
    elements = sum(unit.with_gradients for unit in flat_units(mixed).values()) - request.shape.trained_parameters
    are_reduced = request.accumulation == 1 or request.sync_each_batch
    return elements * request.gathered_bytes / (request.fsdp_ranks if are_reduced else 1)


@dataclasses.dataclass(frozen=True)
class FlatUnit:
    """A flat parameter of FSDP1, in elements: with padding, of tensors with gradients (all if one is trained), and rank
    0's parts of trained tensors."""

    size: int
    with_gradients: int
    local: tuple[int, ...]


@cache_by_request
def flat_units(request: Request) -> dict[int, FlatUnit]:
    """Return FSDP1's flat parameters: by layer, and under BEFORE the root's, of all others; with separate units of
    adapters only their frozen tensors, without wrapped layers all in the root."""
    tensors = dict[int, list[Parameter]]()
    for param in request.stored.params:
        if request.shape.lora_rank is None or request.has_mixed_units or not param.trained:
            place = BEFORE if request.fsdp_unwrapped else request.shape.find_layer(param)
            tensors.setdefault(place, []).append(param)
    return {place: _flat_unit(request, params) for place, params in tensors.items()}


class FsdpShards(NamedTuple):
    """Elements of rank 0's shards under FSDP, with padding: of all weights, and of those that are trained.

    The ranks' collectives carry as many elements of each rank.
    """

    stored: int
    trained: int


@cache_by_request
def fsdp_shards(request: Request) -> FsdpShards:
    """Return rank 0's shards: FSDP2 shards each tensor by rows (_init_sharded_param in torch's _fsdp_param.py), FSDP1
    flat parameters."""
    ranks = request.fsdp_ranks
    if request.fsdp_version == 2:
        return FsdpShards(*shards_by_rows(request.stored, ranks))
    units = flat_units(request).values()
    stored = sum(unit.size for unit in units) // ranks
    adapters = sum(unit.size for unit in adapter_units(request).values()) // ranks
    trained = sum(unit.size for unit in units if unit.with_gradients) // ranks
    return FsdpShards(stored + adapters, adapters or trained)


@functools.lru_cache(maxsize=64)
def shards_by_rows(shape: ModelShape, ranks: int) -> tuple[int, int]:
    """Return the elements of rank 0's shards in FSDP2, with padding: of all parameters, and of the trained ones."""
    trained = sum(param.shard_by_rows(ranks) for param in shape.trained_params)
    frozen = sum(param.shard_by_rows(ranks) for param in shape.params if not param.trained)
    return frozen + trained, trained


@cache_by_request
def adapter_units(request: Request) -> dict[int, FlatUnit]:
    """Return FSDP1's flat parameters of adapters, by the index of their first tensor: peft's fsdp_auto_wrap_policy
    makes a unit of each module whose own weight is trained."""
    if request.shape.lora_rank is None or request.has_mixed_units:
        return {}
    modules = itertools.groupby(request.shape.trained_params, key=lambda at: (at.place, at.name.rpartition(".")[0]))
    tensors = (list(params) for _, params in modules)
    return {params[0].index: _flat_unit(request, params) for params in tensors}


def _flat_unit(request: Request, params: Sequence[Parameter]) -> FlatUnit:
    """Return the flat parameter of tensors. Each begins at 16 bytes, and the ranks divide the whole
    (_init_flat_param_and_metadata in torch's _flat_param.py)."""
    aligned, starts, end = 16 // request.gathered_bytes, list[int](), 0
    for param in params:
        starts.append(math.ceil(end / aligned) * aligned)
        end = starts[-1] + param.elements
    shard = math.ceil(end / request.fsdp_ranks)
    is_trained = any(param.trained for param in params)
    local = (
        min(param.elements, shard - start)
        for param, start in zip(params, starts, strict=True)
        if start < shard and (param.trained or not is_trained)
    )
    with_gradients = sum(param.elements for param in params) if is_trained else 0
    return FlatUnit(shard * request.fsdp_ranks, with_gradients, tuple(local))


def _unsharded(request: Request, waiting: bool) -> State:
    """State of single, DDP, FSDP2 (each tensor sharded by rows) and DeepSpeed's stage 0."""
    shape, weight = request.stored, request.weight_bytes
    stored, trained = shape.parameters, shape.trained_parameters
    if request.strategy.is_fsdp:
        stored, trained = fsdp_shards(request)
    master = 0 if weight == FP32_BYTES or request.pure else FP32_BYTES
    adapted = request.adapter_bytes
    stepped, steps = trained, len(shape.trained_params)
    if request.strategy.is_fsdp and request.fsdp_version == 1:
        # The optimizer has the parts of tensors in rank 0's shards, without their padding (fsdp_use_orig_params).
        units = adapter_units(request) or flat_units(request)
        local = [size for unit in units.values() if unit.with_gradients for size in unit.local]
        stepped, steps = sum(local), len(local)
    optimizer = stepped * (master + request.moments_bytes) + STEP_BYTES * steps
    unreduced = accumulated_bytes(request) if request.strategy.is_fsdp and waiting else 0.0
    if request.fsdp_offloads:
        # CPUOffloadPolicy, and CPUOffload of version 1: shards are gathered from the host, and their reduced gradients
        # go to it. Unreduced gradients stay on the device.
        return State(0.0, unreduced, 0.0, float(stored * weight), float(trained * adapted), optimizer)
    params = stored * weight + trained * (adapted - weight)
    grads = trained * adapted
    if not (request.strategy.is_fsdp or request.shape.tied):
        # FSDP divides it, and so does the sum with the gradient of a tied output layer.
        grads += undivided_gradient_elements(request) * adapted
    return State(params, max(grads, unreduced), optimizer)


def _stage12(request: Request, waiting: bool) -> State:
    """State of stages 1 and 2 (stage_1_and_2.py): a flat buffer of the trainable weights, padded to a multiple of two
    elements per rank, and shards of it. Frozen weights are separate and unpartitioned."""
    weight, settings, trained = request.weight_bytes, request.settings, request.shape.trained_parameters
    shard = flat_elements(request) // request.data_ranks
    optimizer_bytes = shard * (settings.master_bytes + request.moments_bytes)
    params = float((flat_elements(request) + request.stored.frozen_parameters) * weight)
    # After the backward pass this rank has its reduced gradients, unpartitioned, and any that exceed the bucket.
    large, last = last_bucket(request) if waiting else (0, frozenset[Parameter]())
    if settings.optimizer is not None:
        # Stage 1 reduces after the backward pass.
        large = trained if waiting and settings.stage == 1 else large
        grads_host = shard * settings.master_bytes
        return State(params, float(large * weight), 0.0, grads_host=grads_host, optimizer_host=optimizer_bytes)
    grad_width = FP32_BYTES if settings.accumulates_in_fp32 else weight
    if settings.stage == 1:
        return State(params, float(trained * grad_width), optimizer_bytes + STEP_BYTES)
    reduced = sum(param.elements for param, _ in rank0_shards(request) if param not in last) if waiting else 0
    return State(params, float(max(shard * grad_width, (reduced + large) * weight)), optimizer_bytes + STEP_BYTES)


def _stage3(request: Request, waiting: bool) -> State:
    """State of stage 3 (stage3.py): shards per parameter, in sub-groups, on the device, the host or NVMe."""
    weight, settings, ranks, shape = request.weight_bytes, request.settings, request.data_ranks, request.stored
    full_shard, shard = shards_of_model(shape, ranks)
    groups, persistent = sub_groups(request), persistent_params(request)
    unsharded = sum(param.elements for param in persistent) * weight if unshards(request) else 0
    moments = settings.master_bytes + request.moments_bytes
    grad_width = FP32_BYTES if settings.accumulates_in_fp32 else weight
    large = last_bucket(request)[0] if waiting else 0
    state: dict[str, float] = {
        "params_device": full_shard * weight + unsharded,
        "grads_device": shard * grad_width,
        "optimizer_device": shard * moments + STEP_BYTES * len(groups),
    }
    if settings.optimizer is not None:
        state |= _offloaded_optimizer(request, shard, moments, grad_width)
    if request.ranks_per_replica:
        state["params_device"] += _secondary_elements(request) * weight
    if settings.parameters is not None:
        swaps = settings.parameters.device == "nvme"
        nvme = _swapped_bytes(request, _swapped_params(request), weight) if swaps else 0.0
        state |= {"params_device": unsharded, "params_host": full_shard * weight - nvme, "params_nvme": nvme}
    state["grads_device"] += large * weight
    return State(**{place: float(size) for place, size in state.items()})


def _offloaded_optimizer(request: Request, shard: int, moments: float, grad_width: int) -> dict[str, float]:
    """Return gradients and optimizer states of stage 3 by place, with the optimizer on the host or NVMe."""
    settings, groups = request.settings, sub_groups(request)
    assert settings.optimizer is not None
    # `ratio` leaves the first groups on a GPU (_create_fp32_partitions).
    on_device = groups[: 0 if request.box.is_cpu_only else int((1 - settings.optimizer.ratio) * len(groups))]
    stays = sum(on_device)
    state: dict[str, float] = {
        "grads_device": stays * settings.master_bytes,
        "optimizer_device": stays * moments,
        "grads_host": shard * grad_width,
        "optimizer_host": (shard - stays) * moments,
    }
    if settings.optimizer.device == "cpu":
        # They have the masters' type (master_weights_and_grads_dtype).
        state["grads_host"] += (shard - stays) * settings.master_bytes
    else:
        swapped = [group for group in groups if group * FP32_BYTES >= MIN_SWAPPED_BYTES]
        blocks = sum(math.ceil(group * FP32_BYTES / SWAP_ALIGNMENT_BYTES) for group in swapped)
        state["optimizer_nvme"] = blocks * SWAP_ALIGNMENT_BYTES * (moments // FP32_BYTES)
        state["optimizer_host"] = (sum(groups) - sum(swapped)) * moments
        state["grads_nvme"] = _swapped_bytes(request, request.stored.trained_params, FP32_BYTES)
    # backup_optimizer is torch's AdamW, whose step counters are on the host.
    state["optimizer_host"] += STEP_BYTES * len(on_device)
    return state


def _secondary_elements(request: Request) -> int:
    """Return the elements of hpZ's secondary shard within a machine (zero_hpz_partition_size).

    The optimizer step frees it for persistent parameters that it updates.
    """
    ranks, group = request.data_ranks, request.ranks_per_replica
    assert group is not None
    freed = {param for param in persistent_params(request) if param.trained}
    gathered = (math.ceil(param.elements / ranks) * ranks for param in set(request.stored.params) - freed)
    return sum(elements // group for elements in gathered)


def _swapped_params(request: Request) -> Sequence[Parameter]:
    """Return stage 3's parameters on NVMe: the first sub-groups, up to max_in_cpu elements of a rank, stay in host
    memory (_create_fp16_partitions_with_defragmentation in stage3.py)."""
    in_memory, elements = set[Parameter](), 0
    for group, shard in zip(_sub_group_params(request), sub_groups(request), strict=True):
        elements += shard
        in_memory |= set(group) if elements <= request.settings.max_in_cpu else set()
    return [param for param in request.stored.params if param not in in_memory]


def _swapped_bytes(request: Request, params: Sequence[Parameter], width: int) -> float:
    """Return the bytes of shards that are large enough for NVMe."""
    ranks = request.data_ranks
    sizes = [math.ceil(param.elements / ranks) * width for param in params]
    return float(sum(size for size in sizes if size >= MIN_SWAPPED_BYTES))


def unswapped_kind(request: Request) -> str | None:
    """Return the kind of state that DeepSpeed should swap to NVMe but keeps in host memory, since no shard is large
    enough; None otherwise. study/train.py stops such a run (study/engine/audit.py)."""
    if not request.swapped:
        return None
    state = predict_state(request)
    sizes = {"optimizer": state.optimizer_nvme, "param": state.params_nvme}
    kind = next((kind for kind in request.swapped if not sizes[kind]), None)
    return "parameters" if kind == "param" else kind


def engine_refusal(request: Request) -> tuple[str, str] | None:
    """Return the setting and DeepSpeed's error if it raises one when it makes the optimizer (engine.py); else None."""
    settings = request.strategy.deepspeed or {}
    is_16_bit = in_engine(request.precision)
    # _do_optimizer_sanity_check
    if request.strategy.zero_stage == 0 and is_16_bit and request.settings.accumulates_in_fp32:
        text = "stage 0 accumulates 16-bit gradients only in their type: DeepSpeed raises NotImplementedError"
        return "data_types.grad_accum_dtype", text
    # _configure_optimizer; Accelerate replaces the program's optimizer (map_pytorch_optim_to_deepspeed).
    if request.optimizer != "adamw" and "optimizer" not in settings and forces_cpu_adam(request.strategy):
        text = f"an optimizer offload refuses {request.optimizer}: deepspeed.initialize raises ZeRORuntimeException"
        return "optimizer", f"{text}; {REPLACED}"
    return None


REPLACED = "Accelerate and the Trainer replace it by DeepSpeed's 32-bit Adam, with weight decay in the gradient"


def forces_cpu_adam(strategy: Strategy) -> bool:
    """Whether only DeepSpeed's own optimizers may step on the host."""
    forced = (strategy.deepspeed or {}).get("zero_force_ds_cpu_optimizer", True)
    return bool(strategy.zero_stage) and strategy.offload_device("optimizer") is not None and bool(forced)


def frozen_bytes(request: Request) -> tuple[float, float]:
    """Return the bytes on the device and in host memory outside the engine's state: scales of quantized weights, whole
    on each rank, and a reference model, which TRL shards at stage 3 and under FSDP, with offloads."""
    shape, is_stage3 = request.shape, request.strategy.zero_stage == 3
    scales = _scales_bytes(request)
    if request.strategy.is_fsdp and request.fsdp_version == 2:
        shard = float(shards_by_rows(shape, request.fsdp_ranks)[0])
    else:
        ranks = request.fsdp_ranks if request.strategy.is_fsdp else request.data_ranks if is_stage3 else 1
        shard = shape.parameters / ranks
    size = request.weight_bytes * shard * request.has_reference_copy
    offloads = request.fsdp_offloads or (is_stage3 and request.settings.parameters is not None)
    return (scales, size) if offloads else (scales + size, 0.0)


def _scales_bytes(request: Request) -> float:
    """Return the bytes of scales. 4 bits have one of 64 weights (Linear4bit.quant_state): fp32, or a byte each and an
    fp32 number for 256 (quantize_4bit in bitsandbytes' functional.py). 8 bits have one of each row (SCB)."""
    shape = request.shape
    if request.in_8_bits:
        return float(FP32_BYTES * sum(param.rows for param in shape.params if is_packed(shape, param)))
    if not request.quantized:
        return 0.0
    per_scale = 1 + FP32_BYTES / 256 if request.double_quantized else FP32_BYTES
    return per_scale / 64 * sum(param.elements for param in shape.params if is_packed(shape, param))


def quantization_refusal(request: Request) -> str | None:
    """Return why 8-bit weights are not predicted with the engine; None if they are."""
    if request.in_8_bits and (request.strategy.zero_stage == 3 or request.strategy.is_fsdp):
        engine = "FSDP" if request.strategy.is_fsdp else "stage 3"
        patched = ", and axolotl patches torch for them" * request.strategy.is_fsdp
        return f"8-bit weights that {engine} shards are not modelled: LLaMA-Factory ends with an error{patched}"
    return None


def unsharded_4_bit_bytes(request: Request) -> float:
    """Return the bytes of a whole model with 4-bit weights, and of their scales."""
    scales = frozen_bytes(dataclasses.replace(request, reference_model=False))
    return float(request.stored.parameters * request.weight_bytes) + sum(scales)


def loaded_whole_bytes(request: Request) -> float:
    """Return the bytes of 4-bit weights on each GPU before stage 3 or FSDP shards them; 0 without such weights.

    transformers 5.23.0 quantizes on load, and on the GPU of each rank: without a device_map it makes one of the current
    device (update_device_map in quantizer_bnb_4bit.py), and no rank is left out
    (convert_and_load_state_dict_in_model in core_model_loading.py). The model is created without zero.Init
    (get_init_context in modeling_utils.py), and DeepSpeed moves it to the GPU before it shards it
    (_configure_distributed_model in engine.py, _convert_to_zero_parameters in parameter_offload.py). Accelerate does
    not move such a model to the meta device (fsdp2_prepare_model), whatever cpu_ram_efficient_loading is.
    From host memory both versions of FSDP move one layer at a time to the GPU and shard it (_move_states_to_device in
    torch's _init_utils.py and _fsdp_init.py).
    """
    shards_later = request.strategy.zero_stage == 3 or (request.strategy.is_fsdp and not request.loads_on_host)
    return unsharded_4_bit_bytes(request) if request.quantized and shards_later else 0.0


def rank0_shards(request: Request) -> Iterator[tuple[Parameter, int]]:
    """Yield rank 0's parameters and their local elements: stages 1 and 2 shard the flat buffer, not each tensor."""
    remaining = flat_elements(request) // request.data_ranks
    for param in request.shape.trained_params:
        if remaining > 0:
            yield param, min(param.elements, remaining)
        remaining -= param.elements


def last_bucket(request: Request) -> tuple[int, frozenset[Parameter]]:
    """Return the unreduced gradients after the backward pass: elements of those larger than the bucket, and all
    parameters."""
    return _last_bucket(request.shape, request.settings.reduce_bucket_size)


@functools.lru_cache(maxsize=64)
def _last_bucket(shape: ModelShape, most: int) -> tuple[int, frozenset[Parameter]]:
    filled, last = 0, list[Parameter]()
    for param in reversed(shape.trained_params):
        if filled + param.elements > most:
            filled, last = 0, []
        filled += param.elements
        last.append(param)
    return sum(param.elements for param in last if param.elements > most), frozenset(last)


def flat_elements(request: Request) -> int:
    """Return the elements of the flat buffer of stages 1 and 2, with padding."""
    step = 2 * request.data_ranks
    return math.ceil(request.shape.trained_parameters / step) * step


def shard_elements(request: Request, params: Sequence[Parameter]) -> int:
    """Return the elements of one rank's shards of parameters in stage 3, with padding."""
    ranks = request.data_ranks
    return sum(math.ceil(param.elements / ranks) for param in params)


@functools.lru_cache(maxsize=64)
def shards_of_model(shape: ModelShape, ranks: int) -> tuple[int, int]:
    """Return the elements of one rank's shards in stage 3: of all parameters, and of the trained ones."""
    trained = sum(math.ceil(param.elements / ranks) for param in shape.trained_params)
    frozen = sum(math.ceil(param.elements / ranks) for param in shape.params if not param.trained)
    return frozen + trained, trained


@cache_by_request
def persistent_params(request: Request) -> list[Parameter]:
    """Return stage 3's persistent parameters: small ones, frozen or not, that stay gathered (parameter_offload.py,
    mark_persistent_parameters)."""
    settings = request.settings
    thresholds = settings.stage3_model_persistence_threshold, settings.stage3_param_persistence_threshold
    return _persistent(request.stored, *thresholds)


@functools.lru_cache(maxsize=64)
def _persistent(shape: ModelShape, most_of_model: int, most_of_param: int) -> list[Parameter]:
    persistent, total = list[Parameter](), 0
    for param in shape.params:
        if param.elements <= most_of_param and param.elements + total <= most_of_model:
            persistent.append(param)
            total += param.elements
    return persistent


def _sub_group_params(request: Request) -> tuple[tuple[Parameter, ...], ...]:
    """Return the parameters of each sub-group."""
    return _grouped(request.shape, request.data_ranks, request.settings.sub_group_size)[0]


def sub_groups(request: Request) -> tuple[int, ...]:
    """Return the elements of one rank's shards of each sub-group."""
    return _grouped(request.shape, request.data_ranks, request.settings.sub_group_size)[1]


@functools.lru_cache(maxsize=64)
def _grouped(shape: ModelShape, ranks: int, most: int) -> tuple[tuple[tuple[Parameter, ...], ...], tuple[int, ...]]:
    """Return the sub-groups and their elements (stage3.py, _create_fp16_sub_groups)."""
    groups, sizes = list[tuple[Parameter, ...]](), list[int]()
    group, elements = list[Parameter](), 0
    for param in shape.trained_params:
        group.append(param)
        elements += math.ceil(param.elements / ranks)
        if elements >= most:
            groups.append(tuple(group))
            sizes.append(elements)
            group, elements = [], 0
    if group:
        groups.append(tuple(group))
        sizes.append(elements)
    return tuple(groups), tuple(sizes)


def unshards(request: Request) -> bool:
    """Whether stage 3 allocates unsharded parameters in addition to the shards. A single rank copies offloaded
    parameters to its GPU (NoGatherHandle in partition_parameters.py); otherwise its shard is the parameter."""
    return request.data_ranks > 1 or (request.settings.parameters is not None and not request.box.is_cpu_only)


# Model state per parameter of a model so large that padding is negligible, and with enough tensors that a fraction of
# the sub-groups is that fraction of the model. It is a lower bound: a model that exceeds the memory by it does not fit.
_LARGE, _LARGE_LAYERS = 2**50, 2**10


@functools.cache
def _large_shape(trained: bool) -> ModelShape:
    elements = _LARGE // _LARGE_LAYERS
    params = tuple(Parameter(layer, "weight", elements, elements, layer, trained) for layer in range(_LARGE_LAYERS))
    return TableShape(
        name="large",
        model_type="llama",
        family="causal-lm",
        layers=_LARGE_LAYERS,
        hidden=1,
        inner=1,
        heads=1,
        key_value_heads=1,
        head_dim=1,
        vocabulary=1,
        gated=True,
        tied=False,
        params=params,
    )


@functools.lru_cache(maxsize=256)
def bytes_per_parameter(strategy: Strategy, precision: str, ranks: int, trained: bool = True) -> State:
    """Return the state of one rank per parameter of the full model, with the strategy's overrides; of frozen weights if
    not `trained`."""
    request = Request(
        _large_shape(trained),
        strategy,
        box_of_ranks("any", ANY_DEVICE, ranks),
        1,
        1,
        1,
        cast(Precision, precision),
        False,
        "sdpa",
    )
    state = predict_state(request, unreduced=False)
    return State(**{name: size / _LARGE for name, size in dataclasses.asdict(state).items()})


# Formulas of the ZeRO paper (Rajbhandari et al., SC20, sections 3 and 7 and Table 1).

# By kind of state: bytes per parameter, for the optimizer fp32 weights, momentum and variance (the paper's K); and the
# first stage that shards it.
KINDS = {"params": (2, 3), "grads": (2, 2), "optimizer": (12, 1)}


def split_by(kind: str, stage: int, ranks: int) -> int:
    """Return the number of shards of a kind of state in a stage."""
    return ranks if stage >= KINDS[kind][1] else 1


def paper_state_bytes(parameters: float, stage: int, ranks: int) -> float:
    """Model state per device with mixed-precision Adam, in bytes; stage 0 is plain data parallelism."""
    return parameters * sum(size / split_by(kind, stage, ranks) for kind, (size, _) in KINDS.items())


def paper_traffic(stage: int, ranks: int) -> float:
    """Communication of one rank per step, as a multiple of the weights; gradients have the weights' type. An all-reduce
    is a reduce-scatter and an all-gather. Stages 1 and 2 gather the updated weights instead of the gradients; stage 3
    gathers them twice, for the forward and the backward pass."""
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks
