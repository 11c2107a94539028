"""The figures of a virtual rank, out of its record; and what a line over layers makes of three records.

Every layer of these models is like every other, so state and traffic are a line over layers: what stands around the
layers, and so much per layer. They are not where the engine goes over to something else between the depths and the
model, as when a bucket is full: `crossed` knows these thresholds. What else bends, the third depth tells.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from study.record.directory import STATE_KINDS, STATE_PLACES, Run
from study.record.schema import PEAKS as PEAKS_OF_PHASES

PEAKS = tuple(PEAKS_OF_PHASES)
COUNTS = (
    "comm_bytes_per_step", "comm_calls_per_step", "grads_in_bucket_bytes", "kept_whole_bytes", "model_parameters",
)  # fmt: skip
# Gradients are read twice, and the larger figure counts. Which of the two that is may differ with the depth.
MOMENTS = ("grads_after_backward", "grads_before_step")
_TIMES = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")

# Right behind a threshold figures have not settled on their new line.
_SETTLED_AT = 1.25
# A figure that is not extrapolated: what the third depth is off the line, carried on to the model, is more than this.
LINEAR_WITHIN = 0.02

SENT = "sent_bytes_per_step"
_MEMORY = (*PEAKS, "phase.*")
_REDUCED = ("collective.all_reduce.calls", "collective.reduce*.calls", "comm_calls_per_step")
_GATHERED = ("collective.all_gather.*", "comm_*", SENT, "buffer.gathered_parameters*", *_MEMORY, *_TIMES)


@dataclasses.dataclass(frozen=True)
class _Threshold:
    """A number of elements from which on an engine does something else, by its name in engine.json's buckets."""

    name: str
    # No line goes across it, of these figures.
    bends: tuple[str, ...]
    # Nor, of these, beyond it while a layer has fewer elements: what counts full buckets goes up in steps.
    steps: tuple[str, ...] = ()
    # It is held against one rank's part.
    sharded: bool = False
    # Between two uses of a parameter the whole model may be passed twice.
    passes: int = 1
    bytes_per_element: int = 1
    # Where the engine's own constant counts, whatever the settings say.
    constant: int | None = None


_IN_BUCKETS = _Threshold(
    "reduce_bucket_size", bends=("grads_in_bucket_bytes", *_MEMORY), steps=(*_REDUCED, "grads_in_bucket_bytes")
)
# By the first five letters of a strategy. No threshold is needed for allgather_bucket_size, which DeepSpeed does not
# heed where torch gathers into one tensor, nor for those that look at one parameter at a time.
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


def summary_of(run: Run) -> dict[str, Any]:
    """What `--json` prints of one record: its summary, and the parts of the record that a summary leaves out."""
    (rank,) = run.memory["ranks"]
    state = rank["state"] or {}
    return {
        "strategy": run.engine["strategy"],
        "virtual": True,
        "world_size": run.engine["world_size"],
        "rank": run.engine["virtual_rank"],
        "task": run.config["task"],
        "model_name_or_path": run.config["model_name_or_path"],
        "model_parameters": run.engine["model_parameters"],
        "model_layers": run.engine["model_layers"],
        "precision": run.engine["precision"],
        "seq_length": run.config["seq_length"],
        "per_device_train_batch_size": run.engine["per_device_train_batch_size"],
        "gradient_accumulation_steps": run.engine["gradient_accumulation_steps"],
        "emulated_device_memory_gib": run.engine["emulated_device_memory_gib"],
        **run.summary,
        # comm_bytes_per_step is payload: an all-reduce counts once, a gather by what it puts out. This is what leaves.
        SENT: _sent(run.traffic["collectives"], run.summary["comm_bytes_per_step"]),
        "state_bytes_total": total_state_bytes(run.summary["state_bytes_per_rank"]),
        "buffer_bytes": state.get("buffer_bytes"),
        "grads_in_bucket_bytes": state.get("grads_in_bucket_bytes"),
        "kept_whole_bytes": state.get("kept_whole", {}).get("bytes"),
        "grads_by_moment": {moment: state.get(moment) for moment in MOMENTS},
        "memory_gib_by_phase": rank["phases"],
        "collectives": run.traffic["collectives"],
        "buckets": run.engine["buckets"],
        "run_dir": str(run.path),
        "extrapolated": None,
    }


def total_state_bytes(state: Mapping[str, Mapping[str, float | None]]) -> float | None:
    """None where a part of it is not known."""
    return total(state[kind][place] for kind in STATE_KINDS for place in STATE_PLACES)


def total(parts: Iterable[float | None]) -> float | None:
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


def crossed(first: Mapping[str, Any], parameters: float, parameters_per_layer: float) -> dict[str, tuple[str, ...]]:
    """Each threshold between the first depth and a model of so many parameters, with the figures that it spoils."""
    found = {}
    for threshold, at in _thresholds(first):
        ranks = first["world_size"] if threshold.sharded else 1
        here, there = sorted((first["model_parameters"] / ranks, parameters / ranks))
        reach = there * threshold.passes
        spoilt = threshold.bends if here <= at < reach else ()
        if parameters_per_layer / ranks < at < reach:
            spoilt += threshold.steps
        if spoilt:
            found[threshold.name] = spoilt
    return found


def depths_beyond(first: Mapping[str, Any], parameters: float, parameters_per_layer: float) -> dict[str, int]:
    """Of each threshold that bends a line, the depth from which on it does not.

    A count of buckets that hold several layers is no line at any depth, and not among these.
    """
    over = crossed(first, parameters, parameters_per_layer)
    found = {}
    for threshold, at in _thresholds(first):
        if set(over.get(threshold.name, ())) & set(threshold.bends) - set(threshold.steps):
            settled = _SETTLED_AT * at * (first["world_size"] if threshold.sharded else 1)
            missing = (settled - first["model_parameters"]) / parameters_per_layer
            found[threshold.name] = int(first["model_layers"]) + math.floor(missing) + 1
    return found


def extrapolate(summaries: Sequence[Mapping[str, Any]], depths: tuple[int, int, int], layers: int) -> dict[str, Any]:
    """The first two depths' line, at `layers`; the third depth tells how far off the line is there."""
    figures = _figures_of(summaries)
    line, spoilt, raw, carried = {}, set(), {}, {}
    for key, (first, second, third) in figures.items():
        if first is None or second is None or third is None:
            spoilt.add(key)
            continue
        line[key] = _on_line(depths, first, second, layers)
        off = abs(third - _on_line(depths, first, second, depths[2]))
        if third or off:
            raw[key] = _share(off, third)
            carried[key] = _share(off * abs(layers - depths[0]) / (depths[2] - depths[0]), line[key])
    per_layer = (figures["model_parameters"][1] - figures["model_parameters"][0]) / (depths[1] - depths[0])
    over = crossed(summaries[0], line["model_parameters"], per_layer)
    patterns = [pattern for spoils in over.values() for pattern in spoils]
    spoilt |= {key for key in figures if any(fnmatchcase(key, pattern) for pattern in patterns)}
    spoilt |= {key for key in carried if max(raw[key], carried[key]) > LINEAR_WITHIN}
    _peaks_of_phases(line, spoilt)
    _larger_moment(figures, line, spoilt)
    at: dict[str, Any] = {key: None if key in spoilt else value for key, value in line.items()}
    shown = {key: off for key, off in carried.items() if at[key] is not None}
    return _document(summaries, at) | {
        "model_layers": layers,
        "extrapolated": {
            "layers": layers,
            "depths": list(depths[:2]),
            "checked_at_depth": depths[2],
            # How far the third depth is off the line, as a share of what was measured there ...
            "residual": raw,
            # ... and carried on to the model, as a share of the figure there.
            "residual_at_target": carried,
            # Of these there is no figure: one of the two is too large, or a threshold is crossed.
            "not_linear": sorted(spoilt),
            "crossed": sorted(over),
            "depths_beyond": depths_beyond(summaries[0], line["model_parameters"], per_layer),
            "largest_residual_of_state": max(
                (value for key, value in raw.items() if key.startswith(("state.", "grads."))), default=0.0
            ),
            "largest_residual_at_target": max(shown.values(), default=0.0),
            "furthest_figure": max(shown, key=lambda key: shown[key], default=None),
            "run_dirs": [summary["run_dir"] for summary in summaries],
        },
    }


def _thresholds(summary: Mapping[str, Any]) -> Iterator[tuple[_Threshold, float]]:
    """With the number of elements that each has here."""
    buckets = summary.get("buckets") or {}
    for threshold in _THRESHOLDS.get(summary["strategy"][:5], ()) if buckets else ():
        at = threshold.constant or buckets.get(threshold.name)
        if at is not None:
            yield threshold, at / threshold.bytes_per_element


def _figures_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Each figure at every depth. What never happened at one depth, such as a collective, is 0 there."""
    by_depth = [_line_figures(summary) for summary in summaries]
    keys = dict.fromkeys(key for figures in by_depth for key in figures)
    if any(key.startswith("phase.") for key in keys):
        # Those of the phases say more, see `_peaks_of_phases`.
        keys = dict.fromkeys(key for key in keys if key not in PEAKS)
    if any(key.startswith("grads.") for key in keys):
        keys = dict.fromkeys(key for key in keys if not key.startswith("state.grads."))
    found = {}
    for key in keys:
        absent = 0 if key.startswith(("collective.", "buffer.")) else None
        values = [figures.get(key, absent) for figures in by_depth]
        # Not measurable on this box: there is no figure, and nothing that bends.
        if any(value is not None for value in values):
            found[key] = values
    return found


def _line_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    state = summary["state_bytes_per_rank"]
    figures = {f"state.{kind}.{place}": state[kind][place] for kind in STATE_KINDS for place in STATE_PLACES}
    figures |= {key: summary.get(key) for key in (*PEAKS, *COUNTS, *_TIMES)}
    figures[SENT] = _sent(summary["collectives"], summary["comm_bytes_per_step"])
    figures |= {f"buffer.{name}": size for name, size in (summary["buffer_bytes"] or {}).items()}
    for moment, places in (summary.get("grads_by_moment") or {}).items():
        figures |= {f"grads.{moment}.{place}": size for place, size in (places or {}).items()}
    for phase, peaks in (summary.get("memory_gib_by_phase") or {}).items():
        figures |= {f"phase.{phase}.{name}": size for name, size in peaks.items()}
    for name, counts in summary["collectives"].items():
        figures |= {f"collective.{name}.{key}": value for key, value in counts.items()}
    return figures


def _on_line(depths: tuple[int, int, int], first: float, second: float, layers: int) -> float:
    value = first + (second - first) / (depths[1] - depths[0]) * (layers - depths[0])
    return round(value) if isinstance(first, int) and isinstance(second, int) else value


def _share(off: float, of: float) -> float:
    return off / abs(of) if of else float(off > 0)


def _peaks_of_phases(line: dict[str, float], spoilt: set[str]) -> None:
    """The largest of the phases: which of them is the largest may be another one at another depth."""
    for peak, name in PEAKS_OF_PHASES.items():
        keys = {key for key in {*line, *spoilt} if fnmatchcase(key, f"phase.*.{name}")}
        if keys & spoilt:
            spoilt.add(peak)
        elif keys:
            line[peak] = max(line[key] for key in keys)


def _larger_moment(figures: Mapping[str, list[Any]], line: dict[str, float], spoilt: set[str]) -> None:
    """A moment without a line counts only where it was the larger one at some depth.

    After backward that is what happens to be reduced already, which goes by full buckets and never is more than the
    whole part of the rank, held before the step; gradients that were kept whole stand beside it, and are a line.
    """
    for place in STATE_PLACES:
        keys = [key for moment in MOMENTS if (key := f"grads.{moment}.{place}") in figures]
        if any(None in figures[key] for key in keys):
            spoilt.add(f"state.grads.{place}")
            continue
        known = [key for key in keys if key not in spoilt]
        largest = [max(at) for at in zip(*(figures[key] for key in keys), strict=True)]
        if known and largest == [max(at) for at in zip(*(figures[key] for key in known), strict=True)]:
            line[f"state.grads.{place}"] = max(line[key] for key in known)
        elif keys:
            spoilt.add(f"state.grads.{place}")


def _document(summaries: Sequence[Mapping[str, Any]], at: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a measured summary: of the line, or the same at every depth, or null."""
    example = summaries[0]
    same = {
        key: value for key, value in example.items() if all(other.get(key, value) == value for other in summaries[1:])
    }
    state = {kind: {place: at.get(f"state.{kind}.{place}") for place in STATE_PLACES} for kind in STATE_KINDS}
    phases = example.get("memory_gib_by_phase") or {}
    return {
        **dict.fromkeys(example),
        **same,
        **{key: at.get(key) for key in (*PEAKS, *COUNTS, *_TIMES, SENT)},
        "state_bytes_per_rank": state,
        "state_bytes_total": total_state_bytes(state),
        "memory_gib_by_phase": {
            phase: {name: at.get(f"phase.{phase}.{name}") for name in peaks} for phase, peaks in phases.items()
        },
        "buffer_bytes": _group(at, "buffer"),
        "collectives": _collectives(at),
    }


def _sent(collectives: Mapping[str, Mapping[str, float]], payload: float | None) -> float | None:
    """Where no step was watched there is no payload either."""
    return None if payload is None else sum(counts["wire_bytes_per_rank"] for counts in collectives.values())


def _group(figures: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    start = f"{prefix}."
    return {key.removeprefix(start): value for key, value in figures.items() if key.startswith(start)}


def _collectives(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    collectives: dict[str, dict[str, Any]] = {}
    for key, value in _group(figures, "collective").items():
        name, _, count = key.rpartition(".")
        collectives.setdefault(name, {})[count] = value
    return collectives
