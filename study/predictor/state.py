"""Model state of one rank by the engines' own rules, byte for byte: weights, gradients, optimizer, and what pads them.

Rank 0 has as much as any. The rules are those of deepspeed 0.19, torch's DDP and FSDP2; see the comments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import cast

from study.config.flags import Precision
from study.config.strategies import Strategy
from study.predictor.hardware import ANY_DEVICE, box_of_ranks
from study.predictor.request import FP32_BYTES, Request, same_for_any_micro_batch
from study.predictor.shape import ModelShape, Parameter, Tensor

# deepspeed/runtime/swap_tensor/constants.py and utils.py: the smallest shard that is swapped, and its alignment.
SMALLEST_SWAPPED_BYTES, SWAP_ALIGNMENT_BYTES = 2**20, 1024
# torch's AdamW counts the steps of each tensor, in one number.
STEP_BYTES = 4


@dataclasses.dataclass(frozen=True)
class State:
    """Bytes of one rank by kind and place. Gradients: the most after a backward pass of the step."""

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


@same_for_any_micro_batch
def state_of(request: Request, *, waiting: bool = True) -> State:
    """Return the state, with or without gradients that wait for their reduction after the backward pass."""
    if request.strategy.zero_stage in (None, 0):
        return _unsharded(request, waiting)
    return (_stage3 if request.settings.stage == 3 else _stage12)(request, waiting)


def accumulated_bytes(request: Request) -> float:
    """Unpartitioned gradients between two micro-batches: Accelerate turns FSDP2's reduction off until the last one."""
    if request.accumulation == 1:
        return 0.0
    width = 2 if request.fsdp_gathers_16_bits else request.weight_bytes
    return float(request.shape.trained_parameters * width)


def _unsharded(request: Request, waiting: bool) -> State:
    """single, DDP, FSDP2 (each tensor cut along its rows) and DeepSpeed's stage 0."""
    shape, weight, ranks = request.shape, request.weight_bytes, request.box.ranks
    held, trained = shape.parameters, shape.trained_parameters
    if request.strategy.is_fsdp:
        # hsdp shards within a replica group, and has several.
        ranks = request.ranks_per_replica or ranks
        held, trained = (
            sum(math.ceil(param.rows / ranks) * (param.elements // param.rows) for param in params)
            for params in (shape.params, shape.trained_params)
        )
    master = 0 if weight == FP32_BYTES or request.pure else FP32_BYTES
    optimizer = trained * (master + request.moments_bytes) + STEP_BYTES * len(shape.trained_params)
    unreduced = accumulated_bytes(request) if request.strategy.is_fsdp and waiting else 0.0
    return State(held * weight, max(trained * weight, unreduced), optimizer)


def _stage12(request: Request, waiting: bool) -> State:
    """stage_1_and_2.py: one flat buffer, padded to two numbers for each rank, and a shard of it. Frozen weights are
    beside it, unpartitioned."""
    weight, settings, trained = request.weight_bytes, request.settings, request.shape.trained_parameters
    shard = flat_elements(request) // request.box.ranks
    held = shard * (settings.master_bytes + request.moments_bytes)
    params = float((flat_elements(request) + request.shape.frozen_parameters) * weight)
    # When the backward pass has ended, this rank's reduced ones, whole, and one too large for the bucket.
    late, last = last_bucket(request) if waiting else (0, set())
    if settings.optimizer is not None:
        # Stage 1 reduces none before the backward pass has ended.
        late = trained if waiting and settings.stage == 1 else late
        return State(params, float(late * weight), 0.0, grads_host=shard * FP32_BYTES, optimizer_host=held)
    kept = FP32_BYTES if settings.accumulates_in_fp32 else weight
    if settings.stage == 1:
        return State(params, float(trained * kept), held + STEP_BYTES)
    reduced = sum(param.elements for param, _ in own_shards(request) if param not in last) if waiting else 0
    return State(params, float(max(shard * kept, (reduced + late) * weight)), held + STEP_BYTES)


def _stage3(request: Request, waiting: bool) -> State:
    weight, settings, ranks, shape = request.weight_bytes, request.settings, request.box.ranks, request.shape
    shard, every = shard_elements(request, shape.trained_params), shard_elements(request, shape.params)
    groups, persistent = sub_groups(request), persistent_params(request)
    unsharded = sum(param.elements for param in persistent) * weight if unshards(request) else 0
    moments = settings.master_bytes + request.moments_bytes
    kept = FP32_BYTES if settings.accumulates_in_fp32 else weight
    late = last_bucket(request)[0] if waiting else 0
    state = State(float(every * weight + unsharded), float(shard * kept), shard * moments + STEP_BYTES * len(groups))
    if settings.optimizer is not None:
        # The first groups stay on a GPU where `ratio` says so (_create_fp32_partitions).
        on_device = groups[: 0 if request.box.in_host_memory else int((1 - settings.optimizer.ratio) * len(groups))]
        stays = sum(on_device)
        grads_host, grads_nvme, optimizer_host, optimizer_nvme = float(shard * kept), 0.0, 0.0, 0.0
        if settings.optimizer.device == "cpu":
            grads_host, optimizer_host = grads_host + (shard - stays) * FP32_BYTES, (shard - stays) * moments
        else:
            swapped = [group for group in groups if group * FP32_BYTES >= SMALLEST_SWAPPED_BYTES]
            optimizer_nvme = sum((aligned(group * FP32_BYTES) * (moments // FP32_BYTES) for group in swapped), 0.0)
            optimizer_host = (sum(groups) - sum(swapped)) * moments
            grads_nvme = _swapped_bytes(request, shape.trained_params, FP32_BYTES)
        state = dataclasses.replace(
            state, grads_device=float(stays * FP32_BYTES), optimizer_device=stays * moments,
            grads_host=grads_host, grads_nvme=grads_nvme, optimizer_nvme=optimizer_nvme,
            # backup_optimizer is a plain AdamW of torch's, which counts its steps on the host.
            optimizer_host=optimizer_host + STEP_BYTES * len(on_device),
        )  # fmt: skip
    if group := request.ranks_per_replica:
        # zero_hpz_partition_size: a second shard, among the ranks of a machine. The optimizer's step drops that of
        # persistent parameters, if it changes them.
        again = set(shape.params) - {param for param in persistent if param.trained}
        second = sum(shard_elements(request, [param]) * ranks // group for param in again) * weight
        state = dataclasses.replace(state, params_device=state.params_device + second)
    if settings.parameters is not None:
        swaps = settings.parameters.device == "nvme"
        nvme = _swapped_bytes(request, shape.params, weight) if swaps else 0.0
        host = float(every * weight) - nvme
        state = dataclasses.replace(state, params_device=float(unsharded), params_host=host, params_nvme=nvme)
    return dataclasses.replace(state, grads_device=state.grads_device + late * weight)


def _swapped_bytes(request: Request, params: Sequence[Parameter], width: int) -> float:
    """The shards that are large enough for NVMe."""
    sizes = [math.ceil(param.elements / request.box.ranks) * width for param in params]
    return float(sum(size for size in sizes if size >= SMALLEST_SWAPPED_BYTES))


def unswapped(request: Request) -> str | None:
    """Return what DeepSpeed was to send to NVMe and leaves in host memory, as no shard is large enough. study/train.py
    ends such a run (study/engine/audit.py)."""
    if not request.swapped:
        return None
    state = state_of(request)
    sizes = {"optimizer": state.optimizer_nvme, "param": state.params_nvme}
    names = {"optimizer": "optimizer", "param": "parameters"}
    return next((names[what] for what in request.swapped if not sizes[what]), None)


def refused_accumulation(request: Request) -> str | None:
    """Return why stage 0 refuses a request: it accumulates gradients in the type of its weights alone (engine.py,
    _do_optimizer_sanity_check)."""
    is_16_bit = request.precision.endswith("-engine")
    if request.strategy.zero_stage == 0 and is_16_bit and request.settings.accumulates_in_fp32:
        return "stage 0 adds 16-bit gradients up in no other type: DeepSpeed ends with NotImplementedError"
    return None


def own_shards(request: Request) -> Iterator[tuple[Parameter, int]]:
    """Parameters of which rank 0 has a shard, and its size: stages 1 and 2 cut the flat buffer, not each tensor."""
    left = flat_elements(request) // request.box.ranks
    for param in request.shape.trained_params:
        if left > 0:
            yield param, min(param.elements, left)
        left -= param.elements


def last_bucket(request: Request) -> tuple[int, set[Parameter]]:
    """Return what waits after the backward pass: elements too large for the bucket, and all that wait."""
    filled, last = 0, list[Parameter]()
    for param in reversed(request.shape.trained_params):
        if filled + param.elements > request.settings.reduce_bucket:
            filled, last = 0, []
        filled += param.elements
        last.append(param)
    large = sum(param.elements for param in last if param.elements > request.settings.reduce_bucket)
    return large, set(last)


def flat_elements(request: Request) -> int:
    step = 2 * request.box.ranks
    return math.ceil(request.shape.trained_parameters / step) * step


def shard_elements(request: Request, params: Sequence[Parameter]) -> int:
    return sum(math.ceil(param.elements / request.box.ranks) for param in params)


def persistent_params(request: Request) -> list[Parameter]:
    """parameter_offload.py, mark_persistent_parameters: small ones are gathered once and stay, frozen or not."""
    found, total, settings = list[Parameter](), 0, request.settings
    for param in request.shape.params:
        fits = param.elements + total <= settings.model_persistence_threshold
        if fits and param.elements <= settings.persistence_threshold:
            found.append(param)
            total += param.elements
    return found


def sub_groups(request: Request) -> list[int]:
    """stage3.py, _create_fp16_sub_groups: elements of this rank's shard in each."""
    groups, current = list[int](), 0
    for param in request.shape.trained_params:
        current += math.ceil(param.elements / request.box.ranks)
        if current >= request.settings.sub_group:
            groups.append(current)
            current = 0
    return [*groups, current] if current else groups


def unshards(request: Request) -> bool:
    """Return whether stage 3 unshards parameters besides their shards. One rank copies to a GPU what is on the host
    (NoGatherHandle in partition_parameters.py); elsewhere its shard is the parameter."""
    return request.box.ranks > 1 or (request.settings.parameters is not None and not request.box.in_host_memory)


def aligned(size: float) -> int:
    return math.ceil(size / SWAP_ALIGNMENT_BYTES) * SWAP_ALIGNMENT_BYTES


# Model state per parameter, for a model so large that no padding shows, in so many tensors that a share of the
# sub-groups is a share of the model. What does not fit by it does not fit; what fits by it may not.
_LARGE, _LARGE_LAYERS = 2**50, 2**10


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Per parameter of the whole model, on one rank. The host's include gradients that wait there for the optimizer."""

    params_device: float
    grads_device: float
    optimizer_device: float
    host: float
    nvme: float
    # Through NVMe in one optimizer step, and for every pass over the parameters.
    nvme_per_step: float
    nvme_per_pass: float

    @property
    def device(self) -> float:
        return self.params_device + self.grads_device + self.optimizer_device


def state_bytes(strategy: Strategy, precision: str, ranks: int, trained: bool = True) -> StateBytes:
    """The strategy's settings count with what a run overrides in them. Not `trained`: of frozen weights."""
    elements = _LARGE // _LARGE_LAYERS
    weights = (Tensor("weights.weight", elements, _LARGE_LAYERS, in_layer=True, rows=elements, trained=trained),)
    shape = ModelShape(
        name="large", model_type="llama", family="causal-lm", layers=_LARGE_LAYERS, hidden=1, inner=1, heads=1,
        key_value_heads=1, head_dim=1, vocabulary=1, gated=True, tied=False, tensors=weights,
    )  # fmt: skip
    request = Request(
        shape, strategy, box_of_ranks("any", ANY_DEVICE, ranks), 1, 1, 1, cast(Precision, precision), False, "sdpa"
    )
    state = state_of(request, waiting=False)
    share = {name: value / shape.parameters for name, value in dataclasses.asdict(state).items()}
    stays = share["optimizer_nvme"] + share["grads_nvme"]
    return StateBytes(
        share["params_device"], share["grads_device"], share["optimizer_device"],
        host=state.host / shape.parameters, nvme=state.nvme / shape.parameters,
        nvme_per_step=2 * stays, nvme_per_pass=share["params_nvme"],
    )  # fmt: skip


# What the ZeRO paper says (Rajbhandari et al., SC20, sections 3 and 7 and Table 1), as its formulas.

# Bytes of a parameter, the optimizer's being fp32 weights, momentum and variance (the paper's K); and the first stage
# that splits them.
KINDS = {"params": (2, 3), "grads": (2, 2), "optimizer": (12, 1)}


def split_by(kind: str, stage: int, ranks: int) -> int:
    return ranks if stage >= KINDS[kind][1] else 1


def papers_state_bytes(parameters: float, stage: int, ranks: int) -> float:
    """Model state per device under mixed-precision Adam; stage 0 is plain data parallelism."""
    return parameters * sum(size / split_by(kind, stage, ranks) for kind, (size, _) in KINDS.items())


def papers_traffic(stage: int, ranks: int) -> float:
    """Communication of one rank in a step, as multiples of the model's weights, its gradients being of the same type.

    An all-reduce is a reduce-scatter and an all-gather. Stages 1 and 2 gather the updated weights instead of the
    gradients; stage 3 gathers them twice, for the forward and the backward pass.
    """
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks
