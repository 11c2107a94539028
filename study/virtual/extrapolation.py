"""Linear extrapolation over depth: figures of a model that is too large for this machine, from three shallow ones.

All layers of these models are alike, so state and traffic are linear in their number: a constant for embedding and
head, and a slope per layer. The engine's thresholds change the slope; the third depth shows all other deviations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from study.config.strategies import Strategy, read_strategy
from study.predictor.buckets import STAGE0_BUCKET
from study.records.models import SummaryRecord
from study.records.schema import PEAKS, STATE_PLACES
from study.records.virtual_summary import GRADIENT_READ_POINTS, Summary, with_total

# Figures of a summary by their names in `_figures`, or patterns of these names.
STEP_TIMES = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")
_MEMORY = (*PEAKS, "phase.*")
_REDUCED = ("collective.all_reduce.calls", "collective.reduce*.calls", "comm_calls_per_step")
_GATHERED = (
    "collective.all_gather.*",
    "comm_*",
    "sent_bytes*",
    "buffer.gathered*",
    "forward_*",
    *_MEMORY,
    *STEP_TIMES,
)
# A depth is far enough beyond a threshold at this multiple of it; directly beyond it figures are not linear yet.
_SETTLED_AT = 1.25


@dataclasses.dataclass(frozen=True)
class _Threshold:
    """A number of elements above which the engine works differently; its name is a key of engine.json's buckets."""

    name: str
    # Figures with another slope above it.
    bends: tuple[str, ...]
    # Figures that are not linear above it if several layers fit into it: the number of full buckets is a step function.
    steps: tuple[str, ...] = ()
    # The engine compares it with one rank's shard.
    sharded: bool = False
    # Between two uses of a parameter: at most both passes, at least the layers if the embedding is the head as well.
    is_distance: bool = False
    bytes_per_element: int = 1
    # Value of a threshold that is a constant of the engine.
    constant: int | None = None


_IN_BUCKETS = _Threshold(
    "reduce_bucket_size", bends=("grads_in_bucket_bytes", *_MEMORY), steps=(*_REDUCED, "grads_in_bucket_bytes")
)
_OF_DDP = (_Threshold("ddp_bucket_bytes", bends=(), steps=_REDUCED, bytes_per_element=4),)
# By ZeRO stage. allgather_bucket_size is not here, because DeepSpeed ignores it if torch gathers into one tensor.
# Thresholds of single parameters do not depend on depth.
_BY_STAGE: dict[int, tuple[_Threshold, ...]] = {
    0: (_Threshold("MEMORY_OPT_ALLREDUCE_SIZE", bends=_MEMORY, steps=_REDUCED, constant=STAGE0_BUCKET),),
    # Gradients of stage 1 are outside the bucket.
    1: (_Threshold("reduce_bucket_size", bends=_MEMORY, steps=_REDUCED),),
    2: (_IN_BUCKETS,),
    3: (
        _IN_BUCKETS,
        _Threshold("max_live_parameters", bends=_GATHERED),
        _Threshold("max_reuse_distance", bends=_GATHERED, is_distance=True),
        _Threshold("prefetch_bucket_size", bends=_MEMORY, steps=("collective.all_gather.calls", "comm_calls_per_step")),
        # The gradient norm is reduced once per sub-group.
        _Threshold(
            "sub_group_size",
            bends=("buffer.nvme_optimizer_swap*", *_MEMORY),
            steps=("collective.all_reduce.*", "comm_calls_per_step"),
            sharded=True,
        ),
    ),
}


def _thresholds(strategy: Strategy) -> tuple[_Threshold, ...]:
    """Return the thresholds of a strategy's engine."""
    if strategy.name == "ddp":
        return _OF_DDP
    return () if strategy.zero_stage is None else _BY_STAGE[strategy.zero_stage]


def find_crossed_thresholds(
    first: Summary, parameters: float, parameters_per_layer: float
) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Return the thresholds between the first depth and a model with this number of parameters, by name.

    Each has the figures that are not linear because of it, and the smallest depth from which they are; None if there is
    none, as for the number of full buckets.
    """
    crossings = {}
    buckets = first["buckets"] or {}
    strategy = read_strategy(first["strategy"])
    # Tensor parallelism divides most parameters, and the engine counts those of a rank.
    divides_tensors = strategy.group is not None and strategy.group.divides == "tensors"
    group = (first["group_ranks"] or 1) if divides_tensors else 1
    for threshold in _thresholds(strategy) if buckets else ():
        limit = threshold.constant or buckets.get(threshold.name)
        if limit is None:
            continue
        ranks = first["world_size"] // group if threshold.sharded else 1
        # The threshold in parameters of the whole model, and if all of them are divided.
        parameters_at = limit / threshold.bytes_per_element * ranks
        at_most = group * parameters_at
        low, high = sorted((first["model_parameters"], parameters))
        low, reach = (first["model_layers"] * parameters_per_layer, 2 * high) if threshold.is_distance else (low, high)
        bent = threshold.bends if low <= at_most and parameters_at < reach else ()
        if parameters_per_layer < at_most and parameters_at < reach:
            bent += threshold.steps
        straight_from = None
        if set(bent) & set(threshold.bends) - set(threshold.steps):
            missing = (_SETTLED_AT * at_most - low) / parameters_per_layer
            straight_from = first["model_layers"] + math.floor(missing) + 1
        if bent:
            crossings[threshold.name] = bent, straight_from
    return crossings


# Largest relative error of a linear figure, at the third depth or scaled from there to the model.
MAX_NONLINEARITY = 0.02
COUNTS = (
    "comm_bytes_per_step",
    "comm_calls_per_step",
    "sent_bytes_per_step",
    "grads_in_bucket_bytes",
    "kept_whole_bytes",
    "forward_holds_bytes",
    "forward_gathers_bytes",
    "model_parameters",
)
# Prefixes of figure names, and the fields of a summary that contain these figures.
_GROUPS = {
    "state": "state_bytes_per_rank",
    "grads": "grads_by_moment",
    "phase": "memory_gib_by_phase",
    "collective": "collectives",
}


def extrapolate(
    summaries: Sequence[Summary], model: str, layers: int, whole_model: dict[str, str] | None = None
) -> Summary:
    """Extrapolate from the first two depths to the `layers` of `model`; the third depth gives the error.

    `whole_model` is the outcome of the run of the whole model, if there was one.
    """
    first, second, third = (summary["model_layers"] for summary in summaries)
    figures = _figures_by_depth(summaries)
    fit = _fit(figures, (first, second, third), layers)
    per_layer = (figures["model_parameters"][1] - figures["model_parameters"][0]) / (second - first)
    crossings = find_crossed_thresholds(summaries[0], fit.line["model_parameters"], per_layer)
    bent = [pattern for patterns, _ in crossings.values() for pattern in patterns]
    not_linear = _not_linear(figures, fit, bent)
    line = dict(fit.line)
    _largest_phases(line, not_linear)
    _larger_gradients(figures, line, not_linear)
    linear_figures = {key: None if key in not_linear else value for key, value in line.items()}
    errors = {key: error for key, error in fit.at_target.items() if linear_figures[key] is not None}
    # Non-linear state has no figure, so its error is irrelevant.
    state_keys = [key for key in fit.residual if key.startswith(("state.", "grads.")) and key not in not_linear]
    extrapolated = {
        "layers": layers,
        "depths": (first, second),
        "checked_at_depth": third,
        # Relative error of each figure at the third depth; the same scaled to the model, relative to its figure.
        "residual": fit.residual,
        "residual_at_target": fit.at_target,
        # Figures that are not extrapolated: an error is too large, or a threshold of the engine lies in between.
        "not_linear": sorted(not_linear),
        # Thresholds between the depths and the model, and the depths from which extrapolation avoids them.
        "crossed": sorted(crossings),
        "depths_beyond": {name: depth for name, (_, depth) in crossings.items() if depth is not None},
        "largest_residual_of_state": max((fit.residual[key] for key in state_keys), default=0.0),
        "largest_residual_at_target": max(errors.values(), default=0.0),
        "furthest_figure": max(errors, key=lambda key: errors[key], default=None),
        "run_dirs": [summary["run_dir"] for summary in summaries],
        "whole_model": whole_model,
    }
    changed = {"model_name_or_path": model, "model_layers": layers, "extrapolated": extrapolated, "run_dir": None}
    return with_total(summaries[0] | _at_target(summaries, linear_figures) | changed)


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Figures of the model on the line through the first two depths, and its errors."""

    line: dict[str, float]
    # Relative error at the third depth, and scaled to the model, relative to its figure.
    residual: dict[str, float]
    at_target: dict[str, float]


def _fit(figures: Mapping[str, list[Any]], depths: tuple[int, int, int], layers: int) -> _Fit:
    """Extrapolate the figures that every depth has."""
    first, second, third = depths
    fit = _Fit({}, {}, {})
    for key, values in figures.items():
        if None in values:
            continue
        fit.line[key] = _on_line(values, (first, second), layers)
        error = abs(values[2] - _on_line(values, (first, second), third))
        if values[2] or error:
            fit.residual[key] = _share(error, values[2])
            fit.at_target[key] = _share(error * abs(layers - first) / (third - first), fit.line[key])
    return fit


def _not_linear(figures: Mapping[str, list[Any]], fit: _Fit, bent: Sequence[str]) -> set[str]:
    """Return the figures that some depth lacks, that a threshold bends, or whose error is too large."""
    unknown = set(figures) - set(fit.line)
    beyond_thresholds = {key for key in figures if any(fnmatchcase(key, pattern) for pattern in bent)}
    errors = {key: max(fit.residual[key], fit.at_target[key]) for key in fit.residual}
    return unknown | beyond_thresholds | {key for key, error in errors.items() if error > MAX_NONLINEARITY}


def _largest_phases(line: dict[str, float], not_linear: set[str]) -> None:
    """Set each peak to that of the model's largest phase, which may differ from the largest one at shallow depths."""
    for peak, name in PEAKS.items():
        keys = {key for key in {*line, *not_linear} if fnmatchcase(key, f"phase.*.{name}")}
        if keys & not_linear:
            not_linear.add(peak)
        elif keys:
            line[peak] = max(line[key] for key in keys)


def _on_line(values: Sequence[Any], depths: tuple[int, int], layers: int) -> float:
    value: float = values[0] + (values[1] - values[0]) / (depths[1] - depths[0]) * (layers - depths[0])
    return round(value) if isinstance(values[0], int) and isinstance(values[1], int) else value


def _share(error: float, reference: float) -> float:
    return error / abs(reference) if reference else float(error > 0)


def _figures_by_depth(summaries: Sequence[Summary]) -> dict[str, list[Any]]:
    """Return each figure at every depth; 0 for a collective that was not used at one depth."""
    by_depth = []
    for summary in summaries:
        figures = {
            f"{short}.{name}.{part}": value
            for short, field in _GROUPS.items()
            for name, group in summary[field].items()
            for part, value in (group or {}).items()
        }
        figures |= {f"buffer.{name}": size for name, size in (summary["buffer_bytes"] or {}).items()}
        by_depth.append(figures | {name: summary.get(name) for name in (*COUNTS, *PEAKS, *STEP_TIMES)})
    names = dict.fromkeys(name for figures in by_depth for name in figures)
    # A maximum is not linear. If its parts are known, it is the maximum of the extrapolated parts.
    maxima = tuple(PEAKS) if any(name.startswith("phase.") for name in names) else ()
    maxima += ("state.grads.",) if any(name.startswith("grads.") for name in names) else ()
    by_name = {}
    for name in names:
        absent = 0 if name.startswith(("collective.", "buffer.")) else None
        values = [figures.get(name, absent) for figures in by_depth]
        # Figures that this machine cannot measure are omitted.
        if not name.startswith(maxima) and any(value is not None for value in values):
            by_name[name] = values
    return by_name


def _larger_gradients(figures: Mapping[str, list[Any]], line: dict[str, float], not_linear: set[str]) -> None:
    """Set gradients to the larger of two readings; ignores a non-linear reading that is never the larger.

    Right after backward a rank has the gradients that are reduced so far. These are full buckets, so not linear, and
    they never exceed the rank's shard, which is complete before the step.
    """
    for place in STATE_PLACES:
        keys = [key for snapshot in GRADIENT_READ_POINTS if (key := f"grads.{snapshot}.{place}") in figures]
        if any(None in figures[key] for key in keys):
            not_linear.add(f"state.grads.{place}")
            continue
        linear = [key for key in keys if key not in not_linear]
        largest = [max(at) for at in zip(*(figures[key] for key in keys), strict=True)]
        if linear and largest == [max(at) for at in zip(*(figures[key] for key in linear), strict=True)]:
            line[f"state.grads.{place}"] = max(line[key] for key in linear)
        elif keys:
            not_linear.add(f"state.grads.{place}")


def _at_target(summaries: Sequence[Summary], line: Mapping[str, float | None]) -> Summary:
    """Return the figures of the model from the line; None for those of a run that differ between depths."""
    first = summaries[0]
    run_figures = SummaryRecord.model_fields.keys() & first.keys()
    return {
        **{name: None for name in run_figures if any(shallow.get(name) != first[name] for shallow in summaries)},
        **{name: line.get(name) for name in (*COUNTS, *PEAKS, *STEP_TIMES)},
        **{
            field: {
                name: {part: line.get(f"{short}.{name}.{part}") for part in group or STATE_PLACES}
                for summary in summaries
                for name, group in summary[field].items()
            }
            for short, field in _GROUPS.items()
        },
        "buffer_bytes": {
            name: line.get(f"buffer.{name}") for summary in summaries for name in summary["buffer_bytes"] or ()
        },
    }
