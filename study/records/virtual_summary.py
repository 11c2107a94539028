"""Memory and communication of one virtual rank, from its run directory or from the table of runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from study.records.directory import Run
from study.records.schema import PEAKS as PEAKS_OF_PHASES
from study.records.schema import STATE_KINDS, STATE_PLACES

PEAKS = tuple(PEAKS_OF_PHASES)
# Gradients are read in two memory snapshots, and the larger figure counts.
GRADIENT_READ_POINTS = ("grads_after_backward", "grads_before_step")

ByPlace = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """Linear extrapolation from two depths, checked at a third."""

    layers: int
    depths: tuple[int, int]
    checked_at_depth: int
    # Relative error of each figure at the third depth.
    residual: dict[str, float]
    # The same error scaled to the whole model, relative to the extrapolated figure.
    residual_at_target: dict[str, float]
    # Figures that are not extrapolated: an error is too large, or a threshold of the engine lies in between.
    not_linear: list[str]
    # Thresholds between the depths and the model, and the depths from which extrapolation avoids them.
    crossed: list[str]
    depths_beyond: dict[str, int]
    largest_residual_of_state: float
    largest_residual_at_target: float
    furthest_figure: str | None
    run_dirs: list[str | None]
    # Outcome of the run of the whole model; None if it was not run.
    whole_model: dict[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class RankSummary:
    """Figures of one rank; None if a figure was not measured or is not linear in the number of layers."""

    strategy: str
    world_size: int
    rank: int
    task: str
    model_name_or_path: str
    model_parameters: int
    model_layers: int
    precision: str
    seq_length: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    emulated_device_memory_gib: float | None
    # By kind of state, then by place.
    state_bytes_per_rank: dict[str, ByPlace]
    # `comm` is payload: an all-reduce counts once, a gather by its output. `sent` are ring bytes.
    comm_bytes_per_step: float | None
    comm_calls_per_step: float | None
    sent_bytes_per_step: float | None
    collectives: dict[str, dict[str, float | None]]
    buffer_bytes: ByPlace | None
    grads_in_bucket_bytes: float | None
    kept_whole_bytes: float | None
    grads_by_moment: dict[str, ByPlace | None]
    memory_gib_by_phase: dict[str, ByPlace]
    # Sizes at which the engine reduces a bucket or releases gathered parameters.
    buckets: dict[str, Any] | None
    # All other keys of summary.json, such as PEAKS.
    run_figures: dict[str, float | None]
    # None if extrapolated, since each depth has its own run directory.
    run_dir: str | None
    extrapolated: Extrapolation | None = None

    @classmethod
    def from_run(cls, run: Run) -> RankSummary:
        (rank,) = run.memory["ranks"]
        state = rank["state"] or {}
        collectives = run.traffic["collectives"]
        # The engine is last, because it has the settings that were actually used.
        values = run.config | run.summary | run.engine
        values |= {
            "rank": values["virtual_rank"],
            # Without an instrumented step there is no payload either.
            "sent_bytes_per_step": None if values["comm_bytes_per_step"] is None else ring_bytes(collectives),
            "collectives": collectives,
            **{name: state.get(name) for name in ("buffer_bytes", "grads_in_bucket_bytes")},
            "kept_whole_bytes": state.get("kept_whole", {}).get("bytes"),
            "grads_by_moment": {moment: state.get(moment) for moment in GRADIENT_READ_POINTS},
            "memory_gib_by_phase": rank["phases"],
            "run_figures": {key: value for key, value in run.summary.items() if key not in _FIELDS},
            "run_dir": str(run.path),
        }
        return cls(**{name: values[name] for name in _FIELDS})

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RankSummary:
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
            "run_figures": {peak: row[peak] for peak in PEAKS},
            "run_dir": row["run"],
        }
        return cls(**{name: values[name] for name in _FIELDS})

    @property
    def state_bytes_total(self) -> float | None:
        return total(size for places in self.state_bytes_per_rank.values() for size in places.values())

    @property
    def not_linear(self) -> list[str]:
        """Names of the figures that are not extrapolated; empty for a measured summary."""
        return self.extrapolated.not_linear if self.extrapolated else []

    def document(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {"virtual": True, **fields.pop("run_figures"), **fields, "state_bytes_total": self.state_bytes_total}


# Fields that a record has.
_FIELDS = tuple(field.name for field in dataclasses.fields(RankSummary) if field.name != "extrapolated")


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
