"""Memory and communication of one virtual rank, from its record or from a table of records."""

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
MOMENTS = ("grads_after_backward", "grads_before_step")

ByPlace = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """An extrapolated summary: a line through two depths, checked at a third."""

    layers: int
    depths: tuple[int, int]
    checked_at_depth: int
    # How far the third depth is off the line, as a share of what was measured there ...
    residual: dict[str, float]
    # ... and how far that would be at the whole model, as a share of the figure there.
    residual_at_target: dict[str, float]
    # These have no figure: one of the two shares is too large, or the engine crosses a threshold.
    not_linear: list[str]
    # Thresholds between the depths and the model, and from which depth on there is none.
    crossed: list[str]
    depths_beyond: dict[str, int]
    largest_residual_of_state: float
    largest_residual_at_target: float
    furthest_figure: str | None
    run_dirs: list[str | None]
    # How the whole model ended, where it was tried.
    whole_model: dict[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class RankSummary:
    """One rank's figures. None was not measured, or is not linear in the layers."""

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
    # By kind of state and then by place.
    state_bytes_per_rank: dict[str, ByPlace]
    # Payload: an all-reduce counts once, a gather by what it puts out. `sent` are ring bytes.
    comm_bytes_per_step: float | None
    comm_calls_per_step: float | None
    sent_bytes_per_step: float | None
    collectives: dict[str, dict[str, float | None]]
    buffer_bytes: ByPlace | None
    grads_in_bucket_bytes: float | None
    kept_whole_bytes: float | None
    grads_by_moment: dict[str, ByPlace | None]
    memory_gib_by_phase: dict[str, ByPlace]
    # The sizes at which the engine reduces a bucket, or releases gathered parameters.
    buckets: dict[str, Any] | None
    # What else summary.json says, such as PEAKS, by its names there.
    run_figures: dict[str, float | None]
    # None of a line: its depths have one each.
    run_dir: str | None
    extrapolated: Extrapolation | None = None

    @classmethod
    def of_run(cls, run: Run) -> RankSummary:
        (rank,) = run.memory["ranks"]
        state = rank["state"] or {}
        collectives = run.traffic["collectives"]
        # The engine's last: where two documents name one thing, it says what really ran.
        said = run.config | run.summary | run.engine
        said |= {
            "rank": said["virtual_rank"],
            # Where no step was watched there is no payload either.
            "sent_bytes_per_step": None if said["comm_bytes_per_step"] is None else ring_bytes(collectives),
            "collectives": collectives,
            **{name: state.get(name) for name in ("buffer_bytes", "grads_in_bucket_bytes")},
            "kept_whole_bytes": state.get("kept_whole", {}).get("bytes"),
            "grads_by_moment": {moment: state.get(moment) for moment in MOMENTS},
            "memory_gib_by_phase": rank["phases"],
            "run_figures": {key: value for key, value in run.summary.items() if key not in _FIELDS},
            "run_dir": str(run.path),
        }
        return cls(**{name: said[name] for name in _FIELDS})

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> RankSummary:
        """From a row of study/records/rows.py of a watched run that ended well; None in each empty cell."""
        collectives = json.loads(row["collectives"])
        said = {
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
            # A report shows the largest of them alone.
            "memory_gib_by_phase": {},
            "buckets": json.loads(row["buckets"] or "{}"),
            "run_figures": {peak: row[peak] for peak in PEAKS},
            "run_dir": row["run"],
        }
        return cls(**{name: said[name] for name in _FIELDS})

    @property
    def state_bytes_total(self) -> float | None:
        return total(size for places in self.state_bytes_per_rank.values() for size in places.values())

    @property
    def not_linear(self) -> list[str]:
        return self.extrapolated.not_linear if self.extrapolated else []

    def document(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        fields = dataclasses.asdict(self)
        return {"virtual": True, **fields.pop("run_figures"), **fields, "state_bytes_total": self.state_bytes_total}


# What a record says of each rank.
_FIELDS = tuple(field.name for field in dataclasses.fields(RankSummary) if field.name != "extrapolated")


def total(parts: Iterable[float | None]) -> float | None:
    """None where a part of it is not known."""
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


def ring_bytes(collectives: Mapping[str, Mapping[str, float]]) -> float:
    """Sent by one rank, where every collective is a ring."""
    return sum(counts["wire_bytes_per_rank"] for counts in collectives.values())
