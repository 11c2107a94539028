"""Settings of a strategy that are fitted to a model and hardware, and the usual precision of its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from study.config.flags import Precision
from study.config.precisions import in_autocast, in_engine
from study.config.strategies import Strategy
from study.predictor import time as timing
from study.predictor.hardware import Hardware
from study.predictor.memory import loading_device_bytes, predict_memory
from study.predictor.micro_batch import missing_figures
from study.predictor.request import FP32_BYTES, MemoryUse, Request
from study.predictor.shape import ModelShape
from study.predictor.state import MIN_SWAPPED_BYTES, unswapped_kind

# In elements; 16-bit buckets of 100 MB saturate a network.
_SMALL_BUCKET = 50_000_000
# Live parameters and reuse distance if memory is short, in layers.
_LIVE_LAYERS = 2
_FEWEST_SUB_GROUPS = 10

# Whether it may not fit, whether it has no speed, the negative speed, and the peak; the least is the best.
RankKey = tuple[bool, bool, float, float]
_C = TypeVar("_C")
_V = TypeVar("_V")


def usual_precision(box: Hardware) -> str:
    """Return the default precision of the hardware."""
    return "fp32" if box.is_cpu_only else "bf16" if box.device.peak_tflops["bf16"] else "fp16"


def precision_under(strategy: Strategy, precision: str) -> Precision:
    """Return the --precision of study/train.py that is mixed precision under this strategy."""
    # DeepSpeed's fp16 does not train at stage 0.
    has_own = strategy.deepspeed is not None and (strategy.zero_stage != 0 or precision != "fp16")
    return cast(Precision, f"{precision}-engine" if has_own and precision != "fp32" else precision)


def usual_weights(shape: ModelShape, strategy: Strategy, precision: str) -> tuple[Precision, bool]:
    """Return the --precision of mixed precision, and whether the program loads the weights in 16 bits.

    With adapters, programs without DeepSpeed load the frozen weights in 16 bits, too. peft keeps the adapters in fp32,
    so that their gradients can be unscaled.
    """
    if shape.lora_rank and in_autocast(precision) and strategy.deepspeed is None:
        return cast(Precision, f"{precision}-engine"), True
    return precision_under(strategy, precision), False


def loads_16_bits(shape: ModelShape, strategy: Strategy, precision: Precision) -> bool:
    """Whether a program loads 16-bit weights for DeepSpeed: with adapters it does, as without an engine."""
    return bool(shape.lora_rank) and strategy.deepspeed is not None and in_engine(precision)


def loaded_where_it_fits(request: Request) -> Request:
    """Return the request with 4-bit weights loaded in host memory if FSDP shards them, and each GPU is too small for
    all of them."""
    if loading_device_bytes(request) <= timing.usable_bytes(request.box) or not request.strategy.is_fsdp:
        return request
    return dataclasses.replace(request, quantized_on_host=True)


def rank_key(memory: MemoryUse, tokens_per_s: float, box: Hardware, at_upper_bound: bool = True) -> RankKey:
    """Return the sort key of a prediction: those whose bound fits come first, then those whose peak fits, the fastest
    and the smallest.
    """
    is_uncertain = at_upper_bound and not timing.fits(memory, box, at_upper=True)
    return is_uncertain, not tokens_per_s, -tokens_per_s, memory.peak_reserved.value


def speed_if_it_fits(request: Request) -> float:
    """Return the predicted tokens/s of one GPU, for which no memory is predicted; 0 if DeepSpeed refuses the request.

    Infinite if the time cannot be predicted before it is known that the request fits.
    """
    if request.box.is_cpu_only or missing_figures(request) is not None:
        return math.inf
    if unswapped_kind(request) is not None:
        return 0.0
    return timing.predict_time(request, has_notes=False).tokens_per_s_per_gpu.value


def find_best(
    candidates: Sequence[_C], most_speed: Callable[[_C], float], evaluate: Callable[[_C], tuple[RankKey, _V]]
) -> _V:
    """Return the value of the first candidate whose `rank_key` is the least.

    A prediction of memory takes ten times as long as one of time. So candidates are evaluated in the order of a speed
    that each of them cannot exceed, until one that certainly fits is faster than all that remain.
    """
    bounds = [most_speed(candidate) for candidate in candidates] if len(candidates) > 1 else [math.inf]
    evaluated = list[tuple[RankKey, int, _V]]()
    for place in sorted(range(len(candidates)), key=lambda place: -bounds[place]):
        if any(key[:3] < (False, False, -bounds[place]) for key, _, _ in evaluated):
            break
        key, value = evaluate(candidates[place])
        evaluated.append((key, place, value))
    return min(evaluated, key=lambda entry: entry[:2])[2]


def fit_settings(request: Request, at_upper_bound: bool = True) -> Request:
    """Return the request with the fitted settings that serve it best, as advice and predictions use them."""
    requests = [
        dataclasses.replace(request, strategy=variant)
        for variant in tuned_variants(request.strategy, request.shape, request.box)
    ]
    if len(requests) == 1:
        return requests[0]

    def evaluate(candidate: Request) -> tuple[RankKey, Request]:
        memory, speed = predict_memory(candidate), 0.0
        if timing.fits(memory, request.box) and unswapped_kind(candidate) is None:
            speed = timing.predict_time(candidate, has_notes=False).tokens_per_s_per_gpu.value
        return rank_key(memory, speed, request.box, at_upper_bound), candidate

    return find_best(requests, speed_if_it_fits, evaluate)


def tuned_variants(strategy: Strategy, shape: ModelShape, box: Hardware) -> Iterator[Strategy]:
    """Yield variants with bucket sizes tuned to the model; for stage 3 also one with few live parameters."""
    if strategy.deepspeed is None or not strategy.zero_stage:
        yield strategy
        return
    layer = shape.layer_elements
    small = min(_SMALL_BUCKET, shape.trained_parameters)
    # A size between the two fits no more gradients of large tensors than the small one. If all tensors are smaller
    # than the small bucket, a bucket of the largest tensor's size would need many calls.
    for bucket in sorted({small, max(small, shape.largest_trained)}):
        base = _with_zero(strategy, reduce_bucket_size=bucket, allgather_bucket_size=bucket)
        if strategy.zero_stage == 3:
            base = _with_zero(base, stage3_prefetch_bucket_size=min(_SMALL_BUCKET, layer))
        if strategy.offload_device("param") == "nvme":
            # Buffers for the largest shard.
            offload = {**strategy.deepspeed["zero_optimization"]["offload_param"], "buffer_size": 1}
            base = _with_zero(base, offload_param=offload).with_swap_buffers(-(-shape.largest * 11 // 10 // box.ranks))
        if strategy.offload_device("optimizer") == "nvme":
            shard, swapped = shape.largest_trained // box.ranks, MIN_SWAPPED_BYTES // FP32_BYTES
            # Several sub-groups fit.
            least = max(shape.trained_parameters // box.ranks // _FEWEST_SUB_GROUPS, shard, swapped)
            base = _with_zero(base, sub_group_size=min(1_000_000_000, least))
        if (ranks_per_replica := strategy.ranks_per_replica(box.ranks, box.gpus_per_node)) is not None:
            base = _with_zero(base, zero_hpz_partition_size=ranks_per_replica)
        live = _LIVE_LAYERS * layer
        # The hpZ secondary partition is read only if parameters are released and gathered a second time.
        if ranks_per_replica is None or live >= shape.parameters:
            yield base
        if strategy.zero_stage == 3 and live < shape.parameters and bucket == small:
            yield _with_zero(base, stage3_max_live_parameters=live, stage3_max_reuse_distance=0)


def _with_zero(strategy: Strategy, **settings: Any) -> Strategy:
    assert strategy.deepspeed is not None
    zero = {**strategy.deepspeed["zero_optimization"], **settings}
    return dataclasses.replace(strategy, deepspeed={**strategy.deepspeed, "zero_optimization": zero})
