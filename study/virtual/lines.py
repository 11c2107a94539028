"""Lines over layers: figures of a model that is too large for this box, extrapolated from three shallow ones.

All layers of these models are alike, so state and traffic are linear in them: a constant for embedding and head, and a
slope per layer. The engine's thresholds bend this line; the third depth shows whatever else does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from study.predictor.buckets import STAGE0_BUCKET
from study.records.schema import PEAKS as PEAKS_OF_PHASES
from study.records.schema import STATE_PLACES
from study.records.virtual_summary import MOMENTS, PEAKS, Extrapolation, RankSummary

# Figures of a summary by the names that `_figures` gives them, or patterns of these.
STEP_TIMES = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")
_MEMORY = (*PEAKS, "phase.*")
_REDUCED = ("collective.all_reduce.calls", "collective.reduce*.calls", "comm_calls_per_step")
_GATHERED = (
    "collective.all_gather.*", "comm_*", "sent_bytes_per_step", "buffer.gathered_parameters*", *_MEMORY, *STEP_TIMES,
)  # fmt: skip
# Directly beyond a threshold the figures are not on their new line yet.
_SETTLED_AT = 1.25


@dataclasses.dataclass(frozen=True)
class _Threshold:
    """Number of elements from which the engine works differently, by its name in engine.json's buckets."""

    name: str
    # Figures with another line beyond it.
    bends: tuple[str, ...]
    # Figures without a line beyond it while several layers fit into it: full buckets are counted in steps.
    steps: tuple[str, ...] = ()
    # It is compared with one rank's shard.
    sharded: bool = False
    # Between two uses of a parameter the whole model may be passed twice.
    passes: int = 1
    bytes_per_element: int = 1
    # The engine's constant, which no setting changes.
    constant: int | None = None


_IN_BUCKETS = _Threshold(
    "reduce_bucket_size", bends=("grads_in_bucket_bytes", *_MEMORY), steps=(*_REDUCED, "grads_in_bucket_bytes")
)
# By the first five letters of a strategy. allgather_bucket_size needs none, because DeepSpeed ignores it where torch
# gathers into one tensor; nor do thresholds of single parameters.
_THRESHOLDS: dict[str, tuple[_Threshold, ...]] = {
    "ddp": (_Threshold("ddp_bucket_bytes", bends=(), steps=_REDUCED, bytes_per_element=4),),
    "zero0": (_Threshold("MEMORY_OPT_ALLREDUCE_SIZE", bends=_MEMORY, steps=_REDUCED, constant=STAGE0_BUCKET),),
    # Stage 1 has its gradients outside the bucket.
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

    # Figures without a line because of it.
    bent: tuple[str, ...]
    # The smallest depth with a line; None where no depth helps, as for counts of full buckets.
    straight_from: int | None


def crossed(first: RankSummary, parameters: float, parameters_per_layer: float) -> dict[str, Crossing]:
    """Return each threshold between the first depth and a model of so many parameters, by name."""
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


# Largest share by which a line may differ, at the third depth or carried from there to the model.
LINEAR_WITHIN = 0.02
COUNTS = (
    "comm_bytes_per_step", "comm_calls_per_step", "sent_bytes_per_step", "grads_in_bucket_bytes", "kept_whole_bytes",
    "model_parameters",
)  # fmt: skip
# Prefixes of figures' names, and the fields of a summary with their groups.
_GROUPS = {
    "state": "state_bytes_per_rank", "grads": "grads_by_moment", "phase": "memory_gib_by_phase",
    "collective": "collectives",
}  # fmt: skip


def extrapolate(
    summaries: Sequence[RankSummary], model: str, layers: int, whole_model: dict[str, str] | None = None
) -> RankSummary:
    """Return the line through the first two depths at the `layers` of `model`; the third depth shows its error."""
    first, second, third = (summary.model_layers for summary in summaries)
    figures = _figures_by_depth(summaries)
    line: dict[str, float] = {}
    residual: dict[str, float] = {}
    at_target: dict[str, float] = {}
    for key, values in figures.items():
        if None in values:
            continue
        line[key] = _on_line(values, (first, second), layers)
        off = abs(values[2] - _on_line(values, (first, second), third))
        if values[2] or off:
            residual[key] = _share(off, values[2])
            at_target[key] = _share(off * abs(layers - first) / (third - first), line[key])
    per_layer = (figures["model_parameters"][1] - figures["model_parameters"][0]) / (second - first)
    over = crossed(summaries[0], line["model_parameters"], per_layer)
    patterns = [pattern for crossing in over.values() for pattern in crossing.bent]
    not_linear = set(figures) - set(line)
    not_linear |= {key for key in figures if any(fnmatchcase(key, pattern) for pattern in patterns)}
    not_linear |= {key for key in residual if max(residual[key], at_target[key]) > LINEAR_WITHIN}
    _largest_phases(line, not_linear)
    _larger_gradients(figures, line, not_linear)
    known = {key: None if key in not_linear else value for key, value in line.items()}
    shown = {key: off for key, off in at_target.items() if known[key] is not None}
    # State without a line has no figure, so its distance from a line is irrelevant.
    of_state = [key for key in residual if key.startswith(("state.", "grads.")) and key not in not_linear]
    how = Extrapolation(
        layers=layers,
        depths=(first, second),
        checked_at_depth=third,
        residual=residual,
        residual_at_target=at_target,
        not_linear=sorted(not_linear),
        crossed=sorted(over),
        depths_beyond={name: at for name, one in over.items() if (at := one.straight_from) is not None},
        largest_residual_of_state=max((residual[key] for key in of_state), default=0.0),
        largest_residual_at_target=max(shown.values(), default=0.0),
        furthest_figure=max(shown, key=lambda key: shown[key], default=None),
        run_dirs=[summary.run_dir for summary in summaries],
        whole_model=whole_model,
    )
    changed = {"model_name_or_path": model, "model_layers": layers, "extrapolated": how}
    return dataclasses.replace(summaries[0], **_fields(summaries, known) | changed)


def _on_line(values: Sequence[Any], depths: tuple[int, int], layers: int) -> float:
    value = values[0] + (values[1] - values[0]) / (depths[1] - depths[0]) * (layers - depths[0])
    return round(value) if isinstance(values[0], int) and isinstance(values[1], int) else value


def _share(off: float, of: float) -> float:
    return off / abs(of) if of else float(off > 0)


def _figures_by_depth(summaries: Sequence[RankSummary]) -> dict[str, list[Any]]:
    """Return each figure at every depth; a collective that was not used at one depth is 0 there."""
    by_depth = [_figures(summary) for summary in summaries]
    names = dict.fromkeys(name for figures in by_depth for name in figures)
    # A maximum is not a line: where its parts are known, it is the maximum of their lines.
    maxima = PEAKS if any(name.startswith("phase.") for name in names) else ()
    maxima += ("state.grads.",) if any(name.startswith("grads.") for name in names) else ()
    found = {}
    for name in names:
        absent = 0 if name.startswith(("collective.", "buffer.")) else None
        values = [figures.get(name, absent) for figures in by_depth]
        # What this box cannot measure has no figure, and bends nothing.
        if not name.startswith(maxima) and any(value is not None for value in values):
            found[name] = values
    return found


def _figures(summary: RankSummary) -> dict[str, Any]:
    groups: dict[str, Mapping[str, Any] | None] = {
        f"{short}.{name}": group for short, field in _GROUPS.items() for name, group in getattr(summary, field).items()
    }
    groups["buffer"] = summary.buffer_bytes
    return {
        **{f"{prefix}.{name}": value for prefix, group in groups.items() for name, value in (group or {}).items()},
        **{count: getattr(summary, count) for count in COUNTS},
        **{name: summary.run_figures.get(name) for name in (*PEAKS, *STEP_TIMES)},
    }


def _largest_phases(line: dict[str, float], not_linear: set[str]) -> None:
    """Set each peak to the largest phase of the model, which may differ from that of its depths."""
    for peak, name in PEAKS_OF_PHASES.items():
        keys = {key for key in {*line, *not_linear} if fnmatchcase(key, f"phase.*.{name}")}
        if keys & not_linear:
            not_linear.add(peak)
        elif keys:
            line[peak] = max(line[key] for key in keys)


def _larger_gradients(figures: Mapping[str, list[Any]], line: dict[str, float], not_linear: set[str]) -> None:
    """Set gradients to the larger of two readings; one without a line is left out where it was never the larger.

    Right after backward a rank has what is reduced so far: full buckets, so it is not linear, and never more than the
    rank's whole shard, which is there before the step.
    """
    for place in STATE_PLACES:
        keys = [key for snapshot in MOMENTS if (key := f"grads.{snapshot}.{place}") in figures]
        if any(None in figures[key] for key in keys):
            not_linear.add(f"state.grads.{place}")
            continue
        linear = [key for key in keys if key not in not_linear]
        largest = [max(at) for at in zip(*(figures[key] for key in keys), strict=True)]
        if linear and largest == [max(at) for at in zip(*(figures[key] for key in linear), strict=True)]:
            line[f"state.grads.{place}"] = max(line[key] for key in linear)
        elif keys:
            not_linear.add(f"state.grads.{place}")


def _fields(summaries: Sequence[RankSummary], known: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the fields of a summary from a line; other keys of summary.json stay if all depths have the same value."""
    alike = {
        name: value if all(other.run_figures.get(name) == value for other in summaries) else None
        for name, value in summaries[0].run_figures.items()
    }
    groups = {
        field: {
            name: {part: known.get(f"{short}.{name}.{part}") for part in group or STATE_PLACES}
            for summary in summaries
            for name, group in getattr(summary, field).items()
        }
        for short, field in _GROUPS.items()
    }
    return {
        **{count: known.get(count) for count in COUNTS},
        **groups,
        "buffer_bytes": {
            name: known.get(f"buffer.{name}") for summary in summaries for name in summary.buffer_bytes or ()
        },
        "run_figures": alike | {name: known.get(name) for name in (*PEAKS, *STEP_TIMES)},
        "run_dir": None,
    }
