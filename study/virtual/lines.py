"""Lines over layers: what a model holds and sends that is too large for this box, told from three shallow ones.

Every layer of these models is like every other, so state and traffic are a line over layers: so much for the embedding
and the head, and so much for each layer. The engine's thresholds bend this line. What else bends it, the third depth
shows.
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

# Model sizes from which on an engine works in another way, as with a full bucket: a line over layers bends there.

# A line's figures by their names in study/virtual/lines.py, or patterns of these.
STEP_TIMES = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")
_MEMORY = (*PEAKS, "phase.*")
_REDUCED = ("collective.all_reduce.calls", "collective.reduce*.calls", "comm_calls_per_step")
_GATHERED = (
    "collective.all_gather.*", "comm_*", "sent_bytes_per_step", "buffer.gathered_parameters*", *_MEMORY, *STEP_TIMES,
)  # fmt: skip
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


# A line that is further off than this, at the third depth or carried on from there to the model, gives no figure.
LINEAR_WITHIN = 0.02
COUNTS = (
    "comm_bytes_per_step", "comm_calls_per_step", "sent_bytes_per_step", "grads_in_bucket_bytes", "kept_whole_bytes",
    "model_parameters",
)  # fmt: skip
# The fields of a summary whose figures are in groups, and what begins the names of these figures.
_GROUPS = {
    "state": "state_bytes_per_rank", "grads": "grads_by_moment", "phase": "memory_gib_by_phase",
    "collective": "collectives",
}  # fmt: skip


def extrapolate(
    summaries: Sequence[RankSummary], model: str, layers: int, whole_model: dict[str, str] | None = None
) -> RankSummary:
    """A line through the first two depths, read at the `layers` of `model`; the third depth tells how far off it is."""
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
    _larger_moment(figures, line, not_linear)
    known = {key: None if key in not_linear else value for key, value in line.items()}
    shown = {key: off for key, off in at_target.items() if known[key] is not None}
    how = Extrapolation(
        layers=layers,
        depths=(first, second),
        checked_at_depth=third,
        residual=residual,
        residual_at_target=at_target,
        not_linear=sorted(not_linear),
        crossed=sorted(over),
        depths_beyond={name: at for name, one in over.items() if (at := one.straight_from) is not None},
        largest_residual_of_state=max(
            # One without a line has no figure, so its distance from a line is of nothing that is shown.
            (
                value
                for key, value in residual.items()
                if key.startswith(("state.", "grads.")) and key not in not_linear
            ),
            default=0.0,
        ),
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
    """Each figure at every depth. What never happened at one depth, such as a collective, is 0 there."""
    by_depth = [_figures(summary) for summary in summaries]
    names = dict.fromkeys(name for figures in by_depth for name in figures)
    # A maximum is no line: where its parts are known, it is the maximum of their lines.
    maxima = PEAKS if any(name.startswith("phase.") for name in names) else ()
    maxima += ("state.grads.",) if any(name.startswith("grads.") for name in names) else ()
    found = {}
    for name in names:
        absent = 0 if name.startswith(("collective.", "buffer.")) else None
        values = [figures.get(name, absent) for figures in by_depth]
        # What cannot be measured on this box has no figure, and bends nothing.
        if not name.startswith(maxima) and any(value is not None for value in values):
            found[name] = values
    return found


def _figures(summary: RankSummary) -> dict[str, Any]:
    groups: dict[str, Mapping[str, Any] | None] = {
        f"{short}.{name}": held for short, field in _GROUPS.items() for name, held in getattr(summary, field).items()
    }
    groups["buffer"] = summary.buffer_bytes
    return {
        **{f"{group}.{name}": value for group, held in groups.items() for name, value in (held or {}).items()},
        **{count: getattr(summary, count) for count in COUNTS},
        **{name: summary.run_figures.get(name) for name in (*PEAKS, *STEP_TIMES)},
    }


def _largest_phases(line: dict[str, float], not_linear: set[str]) -> None:
    """The largest phase of the model may be another one than that of its depths."""
    for peak, name in PEAKS_OF_PHASES.items():
        keys = {key for key in {*line, *not_linear} if fnmatchcase(key, f"phase.*.{name}")}
        if keys & not_linear:
            not_linear.add(peak)
        elif keys:
            line[peak] = max(line[key] for key in keys)


def _larger_moment(figures: Mapping[str, list[Any]], line: dict[str, float], not_linear: set[str]) -> None:
    """The gradients are the larger of two readings. One without a line is left out where it was never the larger one.

    Right after backward a rank holds what is reduced so far. That goes by full buckets, so it is no line, and it is
    never more than the rank's whole part, which is held before the step.
    """
    for place in STATE_PLACES:
        keys = [key for moment in MOMENTS if (key := f"grads.{moment}.{place}") in figures]
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
    """The figures of a summary, from a line. What else summary.json says is kept where every depth says the same."""
    alike = {
        name: value if all(other.run_figures.get(name) == value for other in summaries) else None
        for name, value in summaries[0].run_figures.items()
    }
    groups = {
        field: {
            name: {part: known.get(f"{short}.{name}.{part}") for part in held or STATE_PLACES}
            for summary in summaries
            for name, held in getattr(summary, field).items()
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
