"""Sizes of a model from which on an engine works in another way, as when a bucket is full: no line goes across one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from study.virtual.summary import PEAKS, RankSummary

# A line's figures by their names in study/virtual/lines.py, or patterns of these.
STEP_TIMES = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")
_MEMORY = (*PEAKS, "phase.*")
_REDUCED = ("collective.all_reduce.calls", "collective.reduce*.calls", "comm_calls_per_step")
_GATHERED = (
    "collective.all_gather.*", "comm_*", "sent_bytes_per_step", "buffer.gathered_parameters*", *_MEMORY, *STEP_TIMES,
)  # fmt: skip
# Right behind a threshold figures have not settled on their new line.
_SETTLED_AT = 1.25


@dataclasses.dataclass(frozen=True)
class _Threshold:
    """A number of elements, by its name in engine.json's buckets."""

    name: str
    # No line of these figures goes across it.
    bends: tuple[str, ...]
    # Nor, beyond it, one of these while a layer has fewer elements: full buckets are counted in steps.
    steps: tuple[str, ...] = ()
    # It is compared with one rank's part.
    sharded: bool = False
    # Between two uses of a parameter the whole model may be passed twice.
    passes: int = 1
    bytes_per_element: int = 1
    # The engine's own constant, which no setting changes.
    constant: int | None = None


_IN_BUCKETS = _Threshold(
    "reduce_bucket_size", bends=("grads_in_bucket_bytes", *_MEMORY), steps=(*_REDUCED, "grads_in_bucket_bytes")
)
# By the first five letters of a strategy. None is needed for allgather_bucket_size, which DeepSpeed does not heed where
# torch gathers into one tensor, nor for those that look at one parameter at a time.
_THRESHOLDS: dict[str, tuple[_Threshold, ...]] = {
    "ddp": (_Threshold("ddp_bucket_bytes", bends=(), steps=_REDUCED, bytes_per_element=4),),
    "zero0": (_Threshold("MEMORY_OPT_ALLREDUCE_SIZE", bends=_MEMORY, steps=_REDUCED, constant=500_000_000),),
    # Stage 1 keeps its gradients outside the bucket.
    "zero1": (_Threshold("reduce_bucket_size", bends=_MEMORY, steps=_REDUCED),),
    "zero2": (_IN_BUCKETS,),
    "zero3": (
        _IN_BUCKETS,
        _Threshold("max_live_parameters", bends=_GATHERED),
        _Threshold("max_reuse_distance", bends=_GATHERED, passes=2),
        _Threshold("prefetch_bucket_size", bends=_MEMORY, steps=("collective.all_gather.calls", "comm_calls_per_step")),
        # The norm of the gradients is reduced once for each group.
        _Threshold(
            "sub_group_size",
            bends=("buffer.nvme_optimizer_swap*", *_MEMORY),
            steps=("collective.all_reduce.*", "comm_calls_per_step"),
            sharded=True,
        ),
    ),
}


def crossed(first: RankSummary, parameters: float, parameters_per_layer: float) -> dict[str, tuple[str, ...]]:
    """Each threshold between the first depth and a model of so many parameters, with the figures that have no line."""
    found = {}
    for threshold, at in _thresholds(first):
        ranks = first.world_size if threshold.sharded else 1
        here, there = sorted((first.model_parameters / ranks, parameters / ranks))
        reach = there * threshold.passes
        bent = threshold.bends if here <= at < reach else ()
        if parameters_per_layer / ranks < at < reach:
            bent += threshold.steps
        if bent:
            found[threshold.name] = bent
    return found


def depths_beyond(first: RankSummary, parameters: float, parameters_per_layer: float) -> dict[str, int]:
    """For each crossed threshold, the depth from which on lines are straight again.

    A count of buckets that hold several layers is no line at any depth, and not among these.
    """
    over = crossed(first, parameters, parameters_per_layer)
    found = {}
    for threshold, at in _thresholds(first):
        if set(over.get(threshold.name, ())) & set(threshold.bends) - set(threshold.steps):
            settled = _SETTLED_AT * at * (first.world_size if threshold.sharded else 1)
            missing = (settled - first.model_parameters) / parameters_per_layer
            found[threshold.name] = first.model_layers + math.floor(missing) + 1
    return found


def _thresholds(summary: RankSummary) -> Iterator[tuple[_Threshold, float]]:
    """With the number of elements that each has here."""
    for threshold in _THRESHOLDS.get(summary.strategy[:5], ()) if summary.buckets else ():
        at = threshold.constant or (summary.buckets or {}).get(threshold.name)
        if at is not None:
            yield threshold, at / threshold.bytes_per_element
