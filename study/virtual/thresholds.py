"""Model sizes from which on an engine works in another way, as with a full bucket: a line over layers bends there."""

from __future__ import annotations

import dataclasses
import math

from study.virtual.summary import PEAKS, RankSummary

# A line's figures by their names in study/virtual/lines.py, or patterns of these.
STEP_TIMES = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")
_MEMORY = (*PEAKS, "phase.*")
_REDUCED = ("collective.all_reduce.calls", "collective.reduce*.calls", "comm_calls_per_step")
_GATHERED = (
    "collective.all_gather.*", "comm_*", "sent_bytes_per_step", "buffer.gathered_parameters*", *_MEMORY, *STEP_TIMES,
)  # fmt: skip
# deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE: stage 0 reduces so many numbers at once.
STAGE0_BUCKET = 500_000_000
# Just beyond a threshold the figures are not on their new line yet.
_SETTLED_AT = 1.25


@dataclasses.dataclass(frozen=True)
class _Threshold:
    """A number of elements, by its name in engine.json's buckets."""

    name: str
    # These figures are on another line beyond it.
    bends: tuple[str, ...]
    # These are on no line beyond it while several layers fit into it: full buckets are counted in steps.
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
    "zero0": (_Threshold("MEMORY_OPT_ALLREDUCE_SIZE", bends=_MEMORY, steps=_REDUCED, constant=STAGE0_BUCKET),),
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


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A threshold between a depth and the model."""

    # Figures that have no line because of it.
    bent: tuple[str, ...]
    # The depth from which on they have one; None where no depth helps, as for counts of full buckets.
    straight_from: int | None


def crossed(first: RankSummary, parameters: float, parameters_per_layer: float) -> dict[str, Crossing]:
    """By its name, each threshold between the first depth and a model of so many parameters."""
    found = {}
    buckets = first.buckets or {}
    for threshold in _THRESHOLDS.get(first.strategy[:5], ()) if buckets else ():
        limit = threshold.constant or buckets.get(threshold.name)
        if limit is None:
            continue
        ranks = first.world_size if threshold.sharded else 1
        # In elements of the whole model.
        at = limit / threshold.bytes_per_element * ranks
        here, there = sorted((first.model_parameters, parameters))
        reach = there * threshold.passes
        bent = threshold.bends if here <= at < reach else ()
        if parameters_per_layer < at < reach:
            bent += threshold.steps
        straight_from = None
        if set(bent) & set(threshold.bends) - set(threshold.steps):
            missing = (_SETTLED_AT * at - first.model_parameters) / parameters_per_layer
            straight_from = first.model_layers + math.floor(missing) + 1
        if bent:
            found[threshold.name] = Crossing(bent, straight_from)
    return found
