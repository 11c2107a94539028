"""Memory and communication of one virtual rank, from its run directory or from the table of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from study.records.directory import Run
from study.records.schema import PEAKS, STATE_KINDS, STATE_PLACES

# Gradients are read in two memory snapshots, and the larger figure counts.
GRADIENT_READ_POINTS = ("grads_after_backward", "grads_before_step")

# What `study virtual --json` prints: _KEYS, keys of summary.json, and the model state, by kind and place and in total.
# A figure is None if it was not measured, or is not linear in the number of layers.
Summary = dict[str, Any]
_FORWARD = ("forward_gathers_bytes", "forward_holds_bytes")
_KEYS = (
    "strategy",
    "world_size",
    "rank",
    "task",
    "model_name_or_path",
    "model_parameters",
    "model_layers",
    "precision",
    "seq_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "emulated_device_memory_gib",
    # `comm` is payload: an all-reduce counts once, a gather by its output. `sent` are ring bytes.
    "state_bytes_per_rank",
    "comm_bytes_per_step",
    "comm_calls_per_step",
    "sent_bytes_per_step",
    "collectives",
    "buffer_bytes",
    "grads_in_bucket_bytes",
    "kept_whole_bytes",
    "grads_by_moment",
    "memory_gib_by_phase",
    # Sizes at which the engine reduces a bucket or releases gathered parameters. `run_dir` is None if extrapolated,
    # since each depth has its own run directory.
    "buckets",
    "group_ranks",
    *_FORWARD,
    "run_dir",
)


def summarize_record(run: Run) -> Summary:
    """Return the summary of a successful run's record."""
    (rank,) = run.memory["ranks"]
    state, collectives = rank["state"] or {}, run.traffic["collectives"]
    # The engine is last, because it has the settings that were actually used.
    values = run.config | run.summary | run.engine
    values |= {
        "rank": values["virtual_rank"],
        # Without an instrumented step there is no payload either.
        "sent_bytes_per_step": None if values["comm_bytes_per_step"] is None else ring_bytes(collectives),
        "collectives": collectives,
        **{name: state.get(name) for name in ("buffer_bytes", "grads_in_bucket_bytes", *_FORWARD)},
        "group_ranks": (run.engine.get("model_parallel_group") or {}).get("ranks"),
        "kept_whole_bytes": state.get("kept_whole", {}).get("bytes"),
        "grads_by_moment": {moment: state.get(moment) for moment in GRADIENT_READ_POINTS},
        "memory_gib_by_phase": rank["phases"],
        "run_dir": str(run.path),
    }
    return with_total({"virtual": True} | run.summary | {key: values[key] for key in _KEYS} | {"extrapolated": None})


def summarize_row(row: Mapping[str, Any]) -> Summary:
    """Return the summary of a successful run's row of the table of runs, whose empty cells are None."""
    collectives = json.loads(row["collectives"])
    values = {
        **row,
        "rank": row["virtual_rank"] or 0,
        "precision": row["engine_precision"],
        "per_device_train_batch_size": row["micro_batch_size"],
        "emulated_device_memory_gib": row["device_memory_cap_gib"],
        "state_bytes_per_rank": {
            kind: {place: row[f"{kind}_bytes_{place}"] for place in STATE_PLACES} for kind in STATE_KINDS
        },
        "sent_bytes_per_step": ring_bytes(collectives),
        "collectives": collectives,
        "buffer_bytes": json.loads(row["buffers"] or "{}"),
        "grads_by_moment": json.loads(row["grads_by_moment"] or "{}"),
        # The table has only the maximum over phases.
        "memory_gib_by_phase": {},
        "buckets": json.loads(row["buckets"] or "{}"),
        "run_dir": row["run"],
    }
    return with_total({"virtual": True, "extrapolated": None} | {key: values[key] for key in (*PEAKS, *_KEYS)})


def with_total(summary: Summary) -> Summary:
    """Return the summary with the sum of its model state."""
    sizes = (size for places in summary["state_bytes_per_rank"].values() for size in places.values())
    return summary | {"state_bytes_total": total(sizes)}


def total(parts: Iterable[float | None]) -> float | None:
    """Return the sum of the parts; None if any part is None."""
    sizes = list(parts)
    return None if None in sizes else sum(part for part in sizes if part is not None)


def ring_bytes(collectives: Mapping[str, Mapping[str, float]]) -> float:
    """Return the bytes that one rank sends with ring collectives."""
    return sum(counts["wire_bytes_per_rank"] for counts in collectives.values())


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest of the values; None if all are None."""
    return max((value for value in values if value is not None), default=None)
