"""The settings that a strategy is tried with: its own, fitted to the model and the box."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from study.predict.request import Box, ModelShape
from study.predict.settings import SMALLEST_SWAPPED_BYTES
from study.predict.state import FP32_BYTES
from study.spec.strategies import Strategy

# Elements: 16-bit buckets of 100 MB keep a network busy.
_SMALL_BUCKET = 50_000_000
# What is live and kept for reuse where memory is short, in layers.
_LAYERS_LIVE = 2
_SMALLEST_SUB_GROUPS = 10


def fitted(strategy: Strategy, shape: ModelShape, box: Box) -> Iterator[Strategy]:
    """With buckets that suit the model; at stage 3 also with little of it live at once."""
    if strategy.deepspeed is None or not strategy.zero_stage:
        yield strategy
        return
    largest = shape.largest_trained
    layer = sum(tensor.elements for tensor in shape.tensors if tensor.in_layer)
    small = min(_SMALL_BUCKET, shape.trained_parameters)
    # A bucket between the two takes in no more of the large tensors' gradients than the small one. Where all are
    # smaller a bucket of the largest would be many calls.
    for bucket in sorted({small, max(small, largest)}):
        base = _with(strategy, reduce_bucket_size=bucket, allgather_bucket_size=bucket)
        if strategy.zero_stage == 3:
            base = _with(base, stage3_prefetch_bucket_size=min(_SMALL_BUCKET, layer))
        base = _with_offloads(base, shape, box.ranks)
        if (of_a_copy := strategy.ranks_of_a_copy(box.ranks, box.gpus_per_node)) is not None:
            base = _with(base, zero_hpz_partition_size=of_a_copy)
        live = _LAYERS_LIVE * layer
        # A second copy is read only where parameters are let go of and gathered again.
        if of_a_copy is None or live >= shape.parameters:
            yield base
        if strategy.zero_stage == 3 and live < shape.parameters and bucket == small:
            yield _with(base, stage3_max_live_parameters=live, stage3_max_reuse_distance=0)


def _with_offloads(strategy: Strategy, shape: ModelShape, ranks: int) -> Strategy:
    """Buffers of the drive that hold the largest part, and sub-groups that leave room for some of them."""
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    if strategy.offload_device("param") == "nvme":
        part = -(-shape.largest * 11 // 10 // ranks)
        strategy = _with(strategy, offload_param={**zero["offload_param"], "buffer_size": 1}).with_swap_buffers(part)
    if strategy.offload_device("optimizer") == "nvme":
        part = shape.trained_parameters // ranks // _SMALLEST_SUB_GROUPS
        swapped = SMALLEST_SWAPPED_BYTES // FP32_BYTES
        size = min(1_000_000_000, max(part, shape.largest_trained // ranks, swapped))
        strategy = _with(strategy, sub_group_size=size)
    return strategy


def _with(strategy: Strategy, **settings: Any) -> Strategy:
    assert strategy.deepspeed is not None
    zero = {**strategy.deepspeed["zero_optimization"], **settings}
    return dataclasses.replace(strategy, deepspeed={**strategy.deepspeed, "zero_optimization": zero})
