"""Model state of one rank by the engines' own rules, byte for byte: weights, gradients, optimizer, and what pads them.

Rank 0's, which has as much as any. The rules are those of deepspeed 0.19, torch's DDP and FSDP2; where each stands is
written beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from study.config.strategies import Strategy
from study.predictor.request import ModelShape, Request, same_for_any_micro_batch

# deepspeed/runtime/swap_tensor/constants.py and utils.py: the smallest piece that is swapped, and its alignment.
SMALLEST_SWAPPED_BYTES, SWAP_ALIGNMENT_BYTES = 2**20, 1024


# What DeepSpeed makes of a strategy's JSON: each setting that costs bytes, with the engine's own default for it.


@dataclasses.dataclass(frozen=True)
class Offload:
    device: str
    pinned: bool
    buffers: int
    # In elements; of parameters alone.
    buffer_size: int
    # Of the optimizer's: the share of it that goes to the host.
    ratio: float


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes are in elements, as DeepSpeed has them."""

    stage: int
    reduce_bucket: int
    overlaps: bool
    contiguous_gradients: bool
    reduce_scatter: bool
    # Stages 1 and 2 reduce a bucket to everybody, and each rank keeps its part.
    reduces_to_all: bool
    sub_group: int
    prefetch_bucket: int
    persistence_threshold: int
    model_persistence_threshold: int
    max_live: int
    max_reuse_distance: int
    # fp32 gradients are kept beside weights of 16 bits.
    accumulates_in_fp32: bool
    # Moments in the weights' 16 bits, or no fp32 masters at all: DeepSpeed's pure bf16.
    bf16_masters: bool
    bf16_moments: bool
    # Stage 3: the first rank has all weights on its host when a program saves the model.
    gathers_to_save: bool
    optimizer: Offload | None
    parameters: Offload | None

    @property
    def gradients_by(self) -> Literal["all_reduce", "reduce", "reduce_scatter"]:
        """stage_1_and_2.py, average_tensor: stages 1 and 2 reduce a bucket to everybody or, told not to, each part to
        its owner. Only stage 3 scatters."""
        if not self.reduce_scatter:
            return "all_reduce"
        if self.stage == 3:
            return "reduce_scatter"
        return "all_reduce" if self.reduces_to_all else "reduce"


def sizes_of_width(hidden: int) -> dict[str, int]:
    """What Accelerate makes of three sizes that are `auto`."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


def engine_settings(strategy: Strategy, hidden: int) -> EngineSettings:
    """Any other `auto` is the engine's default."""
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    auto = sizes_of_width(hidden)

    def number(name: str, default: float) -> int:
        value = zero.get(name, default)
        return int(auto.get(name, default)) if value == "auto" else int(value)

    def switch(name: str, default: bool) -> bool:
        value = zero.get(name, default)
        return default if value in ("auto", None) else bool(value)

    stage = int(zero["stage"])
    bf16 = strategy.deepspeed.get("bf16")
    bf16 = bf16 if isinstance(bf16, Mapping) else {}
    types = strategy.deepspeed.get("data_types")
    kept_in = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    return EngineSettings(
        stage=stage,
        reduce_bucket=number("reduce_bucket_size", 5e8),
        overlaps=switch("overlap_comm", stage == 3),
        contiguous_gradients=switch("contiguous_gradients", True),
        reduce_scatter=switch("reduce_scatter", True),
        reduces_to_all=switch("use_multi_rank_bucket_allreduce", True),
        sub_group=number("sub_group_size", 1e9),
        prefetch_bucket=number("stage3_prefetch_bucket_size", 5e7),
        persistence_threshold=number("stage3_param_persistence_threshold", 1e5),
        model_persistence_threshold=number("stage3_model_persistence_threshold", sys.maxsize),
        max_live=number("stage3_max_live_parameters", 1e9),
        max_reuse_distance=number("stage3_max_reuse_distance", 1e9),
        accumulates_in_fp32=kept_in == "fp32",
        bf16_masters=bool(bf16.get("bf16_master_weights_and_grads", False)),
        bf16_moments=bool(bf16.get("bf16_optimizer_states", False)),
        gathers_to_save=switch("stage3_gather_16bit_weights_on_model_save", False),
        optimizer=_offload(strategy, "optimizer", 4),
        parameters=_offload(strategy, "param", 5),
    )


def refused_accumulation(request: Request) -> str | None:
    """Stage 0 adds gradients up in the type of its weights alone (engine.py, _do_optimizer_sanity_check).

    What it says of another one; None where it runs.
    """
    if request.strategy.zero_stage != 0:
        return None
    settings, is_16_bit = engine_settings(request.strategy, request.shape.hidden), request.precision.endswith("-engine")
    if settings.accumulates_in_fp32 and is_16_bit:
        return "stage 0 adds 16-bit gradients up in no other type: DeepSpeed ends with NotImplementedError"
    return None


def _offload(strategy: Strategy, what: str, buffers: int) -> Offload | None:
    device = strategy.offload_device(what)
    if device is None or strategy.deepspeed is None:
        return None
    section: Mapping[str, Any] = strategy.deepspeed["zero_optimization"][f"offload_{what}"]
    return Offload(
        device=device,
        # deepspeed 0.19 pins unless told otherwise.
        pinned=bool(section.get("pin_memory", True)),
        buffers=int(section.get("buffer_count", buffers)),
        buffer_size=int(section.get("buffer_size", 1e8)),
        ratio=float(section.get("ratio", 1.0)),
    )


FP32_BYTES = 4
# The place of what comes before the layers.
BEFORE = -1
# One number of torch's AdamW for each tensor that it steps: the count of steps.
STEP_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of the model, in the order in which the engines meet them."""

    name: str
    elements: int
    rows: int
    # Its layer; -1 for what comes before the layers, and the number of layers for what comes after.
    place: int
    trained: bool = True


# For good: gathers and moments know a piece by its identity.
@functools.cache
def pieces_of(shape: ModelShape) -> tuple[Piece, ...]:
    return tuple(_pieces(shape))


@functools.cache
def trained_of(shape: ModelShape) -> tuple[Piece, ...]:
    """Those that have gradients and an optimizer: frozen ones are in no engine's groups (study/engine/optimizer.py)."""
    return tuple(piece for piece in pieces_of(shape) if piece.trained)


def _pieces(shape: ModelShape) -> Iterator[Piece]:
    inside = [tensor for tensor in shape.tensors if tensor.in_layer]
    seen = False
    for tensor in shape.tensors:
        if not tensor.in_layer:
            yield Piece(tensor.name, tensor.elements, tensor.rows, shape.layers if seen else BEFORE, tensor.trained)
        elif not seen:
            seen = True
            for layer in range(shape.layers):
                yield from (Piece(one.name, one.elements, one.rows, layer, one.trained) for one in inside)


@dataclasses.dataclass(frozen=True)
class State:
    """Bytes of one rank by kind and place. Gradients: as they are when the backward pass has ended."""

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


def weight_bytes(request: Request) -> int:
    """Autocast leaves the weights as they are; DeepSpeed's own 16 bits do not."""
    return 2 if request.precision.endswith("-engine") else 4


def moments_bytes(request: Request, settings: EngineSettings | None) -> float:
    """Both of AdamW's. 8-bit states have a float of 4 bytes for every 256 numbers beside them (bitsandbytes)."""
    if request.optimizer == "adamw_8bit":
        return 2 * (1 + 4 / 256)
    return 4.0 if request.pure or (settings is not None and settings.bf16_moments) else 8.0


@same_for_any_micro_batch
def state_of(request: Request, *, waiting: bool = True) -> State:
    """With or without gradients that still wait for their reduction when the backward pass has ended."""
    strategy = request.strategy
    if strategy.zero_stage in (None, 0):
        return _unsharded(request)
    settings = engine_settings(strategy, request.shape.hidden)
    return (_stage3 if settings.stage == 3 else _stage12)(request, settings, waiting)


def _unsharded(request: Request) -> State:
    """single, DDP, FSDP2 (each tensor cut along its rows) and DeepSpeed's stage 0."""
    shape, weight, ranks = request.shape, weight_bytes(request), request.box.ranks
    held, trained = shape.parameters, shape.trained_parameters
    if request.strategy.is_fsdp:
        # hsdp shards within a copy, and has several.
        ranks = request.ranks_of_a_copy or ranks
        held, trained = (
            sum(math.ceil(piece.rows / ranks) * (piece.elements // piece.rows) for piece in pieces)
            for pieces in (pieces_of(shape), trained_of(shape))
        )
    master = 0 if weight == FP32_BYTES or request.pure else FP32_BYTES
    optimizer = trained * (master + moments_bytes(request, None)) + STEP_BYTES * len(trained_of(shape))
    return State(held * weight, trained * weight, optimizer)


def _stage12(request: Request, settings: EngineSettings, waiting: bool) -> State:
    """stage_1_and_2.py: one flat buffer, padded to two numbers for each rank, and a part of it. Frozen weights stand
    beside it, whole on every rank."""
    weight, ranks = weight_bytes(request), request.box.ranks
    part = flat_elements(request) // ranks
    held = part * (master_bytes(settings) + moments_bytes(request, settings))
    params = float((flat_elements(request) + request.shape.frozen_parameters) * weight)
    # When the backward pass has ended, this rank's reduced ones, whole, and one too large for the bucket.
    late, last = last_bucket(request, settings) if waiting else (0, set())
    if settings.optimizer is not None:
        # Stage 1 reduces none before the backward pass has ended.
        late = request.shape.trained_parameters if waiting and settings.stage == 1 else late
        return State(params, float(late * weight), 0.0, grads_host=part * FP32_BYTES, optimizer_host=held)
    kept = FP32_BYTES if settings.accumulates_in_fp32 else weight
    if settings.stage == 1:
        return State(params, float(request.shape.trained_parameters * kept), held + STEP_BYTES)
    reduced = sum(piece.elements for piece in own_pieces(request) if id(piece) not in last) if waiting else 0
    return State(params, float(max(part * kept, (reduced + late) * weight)), held + STEP_BYTES)


def unswapped(request: Request) -> str | None:
    """What the strategy puts on a drive and DeepSpeed leaves in host memory, since no part of it is large enough. A run
    fails for it (study/engine/audit.py)."""
    if not request.strategy.uses_nvme:
        return None
    state = state_of(request)
    for what, kind, swapped in (
        ("optimizer", "optimizer", state.optimizer_nvme), ("parameters", "param", state.params_nvme)
    ):  # fmt: skip
        if request.strategy.offload_device(kind) == "nvme" and not swapped:
            return what
    return None


def own_pieces(request: Request) -> list[Piece]:
    """Those of which rank 0 keeps some: stages 1 and 2 cut the flat buffer, not each tensor."""
    return [piece for piece, _ in own_parts(request)]


def own_parts(request: Request) -> Iterator[tuple[Piece, int]]:
    """With how much of it rank 0 keeps."""
    left = flat_elements(request) // request.box.ranks
    for piece in trained_of(request.shape):
        if left > 0:
            yield piece, min(piece.elements, left)
        left -= piece.elements


def last_bucket(request: Request, settings: EngineSettings) -> tuple[int, set[int]]:
    """What waits when the backward pass has ended: elements too large for the bucket, and all that wait, by id."""
    filled, last = 0, list[Piece]()
    for piece in reversed(trained_of(request.shape)):
        if filled + piece.elements > settings.reduce_bucket:
            filled, last = 0, []
        filled += piece.elements
        last.append(piece)
    large = sum(piece.elements for piece in last if piece.elements > settings.reduce_bucket)
    return large, {id(piece) for piece in last}


def master_bytes(settings: EngineSettings) -> int:
    return 2 if settings.bf16_masters else FP32_BYTES


def flat_elements(request: Request) -> int:
    step = 2 * request.box.ranks
    return math.ceil(request.shape.trained_parameters / step) * step


def part_elements(request: Request, pieces: Sequence[Piece]) -> int:
    ranks = request.box.ranks
    return sum(math.ceil(piece.elements / ranks) for piece in pieces)


def kept_whole(request: Request, settings: EngineSettings) -> list[Piece]:
    """parameter_offload.py, mark_persistent_parameters: small ones are gathered once and stay, frozen or not."""
    found, total = [], 0
    for piece in pieces_of(request.shape):
        if piece.elements + total > settings.model_persistence_threshold:
            continue
        if piece.elements <= settings.persistence_threshold:
            found.append(piece)
            total += piece.elements
    return found


def sub_groups(request: Request, settings: EngineSettings) -> list[int]:
    """stage3.py, _create_fp16_sub_groups: elements of this rank's part in each."""
    groups, current, ranks = [], 0, request.box.ranks
    for piece in trained_of(request.shape):
        current += math.ceil(piece.elements / ranks)
        if current >= settings.sub_group:
            groups.append(current)
            current = 0
    return [*groups, current] if current else groups


def makes_whole(request: Request, settings: EngineSettings) -> bool:
    """Whether stage 3 makes parameters whole beside their parts: on one rank it copies to a GPU what waits on the host
    (NoGatherHandle in partition_parameters.py), and elsewhere the part is the whole."""
    return request.box.ranks > 1 or (settings.parameters is not None and not request.box.in_host_memory)


def _stage3(request: Request, settings: EngineSettings, waiting: bool) -> State:
    weight, part = weight_bytes(request), part_elements(request, trained_of(request.shape))
    every = part_elements(request, pieces_of(request.shape))
    groups = sub_groups(request, settings)
    whole = (
        sum(piece.elements for piece in kept_whole(request, settings)) * weight if makes_whole(request, settings) else 0
    )
    moments = master_bytes(settings) + moments_bytes(request, settings)
    kept = FP32_BYTES if settings.accumulates_in_fp32 else weight
    parts = dict.fromkeys(("params_host", "grads_host", "optimizer_host", "params_nvme", "grads_nvme"), 0.0)
    parts["optimizer_nvme"] = 0.0
    late = last_bucket(request, settings)[0] if waiting else 0
    grads_device, optimizer_device = float(part * kept), part * moments + STEP_BYTES * len(groups)
    if settings.optimizer is not None:
        # The first groups stay on a GPU where `ratio` says so (_create_fp32_partitions).
        stays = 0 if request.box.in_host_memory else int((1 - settings.optimizer.ratio) * len(groups))
        on_device = groups[:stays]
        staying = sum(on_device)
        grads_device, optimizer_device = float(staying * FP32_BYTES), staying * moments
        _offloaded_optimizer(request, settings, parts, part, groups, staying, kept)
        # backup_optimizer is a plain AdamW of torch's, which counts its steps on the host.
        parts["optimizer_host"] += STEP_BYTES * len(on_device)
    params_device = float(every * weight + whole)
    if copy := request.ranks_of_a_copy:
        # zero_hpz_partition_size: a second part, of what the ranks of a machine share. The optimizer's step drops that
        # of what is kept whole, if it changes it.
        dropped = {piece for piece in kept_whole(request, settings) if piece.trained}
        again = set(pieces_of(request.shape)) - dropped
        params_device += sum(part_elements(request, [piece]) * request.box.ranks // copy for piece in again) * weight
    if settings.parameters is not None:
        params_device = float(whole)
        parts["params_host"] = float(every * weight)
        if settings.parameters.device == "nvme":
            sizes = [math.ceil(piece.elements / request.box.ranks) * weight for piece in pieces_of(request.shape)]
            swapped = sum(size for size in sizes if size >= SMALLEST_SWAPPED_BYTES)
            parts["params_nvme"] = float(swapped)
            parts["params_host"] -= swapped
    return State(params_device, grads_device + late * weight, optimizer_device, **parts)


def _offloaded_optimizer(
    request: Request, settings: EngineSettings, parts: dict[str, float], part: int, groups: list[int], staying: int,
    kept: int,
) -> None:  # fmt: skip
    """On the host: gradients as they come, in fp32 for the step, masters, moments. The drive takes the large ones."""
    assert settings.optimizer is not None
    moments = master_bytes(settings) + moments_bytes(request, settings)
    parts["grads_host"] = float(part * kept)
    if settings.optimizer.device == "cpu":
        parts["grads_host"] += (part - staying) * FP32_BYTES
        parts["optimizer_host"] = (part - staying) * moments
        return
    for elements in groups:
        if elements * FP32_BYTES >= SMALLEST_SWAPPED_BYTES:
            parts["optimizer_nvme"] += aligned(elements * FP32_BYTES) * (moments // FP32_BYTES)
        else:
            parts["optimizer_host"] += elements * moments
    sizes = [math.ceil(piece.elements / request.box.ranks) * FP32_BYTES for piece in trained_of(request.shape)]
    parts["grads_nvme"] = float(sum(size for size in sizes if size >= SMALLEST_SWAPPED_BYTES))


def aligned(size: float) -> int:
    return math.ceil(size / SWAP_ALIGNMENT_BYTES) * SWAP_ALIGNMENT_BYTES
