"""The figures of a virtual rank, out of its record; and what a line over layers makes of three records.

Every layer of these models is like every other, so state and traffic are a line over layers: what stands around the
layers, and so much per layer. Where a buffer is full, or a threshold is crossed, they are not; the third depth tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from study.records import STATE_KINDS, STATE_PLACES, Run

PEAKS = (
    "peak_memory_gib_allocated", "peak_memory_gib_reserved", "peak_memory_gib_device", "host_peak_rss_gib",
)  # fmt: skip
COUNTS = (
    "comm_bytes_per_step", "comm_calls_per_step", "grads_in_bucket_bytes", "kept_whole_bytes", "model_parameters",
)  # fmt: skip

# A figure whose third depth is further off the line than this is not extrapolated.
LINEAR_WITHIN = 0.02


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
        "emulated_device_memory_gib": run.engine["emulated_device_memory_gib"],
        **run.summary,
        "state_bytes_total": total_state_bytes(run.summary["state_bytes_per_rank"]),
        "buffer_bytes": state.get("buffer_bytes"),
        "grads_in_bucket_bytes": state.get("grads_in_bucket_bytes"),
        "kept_whole_bytes": state.get("kept_whole", {}).get("bytes"),
        "memory_gib_by_phase": rank["phases"],
        "collectives": run.traffic["collectives"],
        "run_dir": str(run.path),
        "extrapolated": None,
    }


def total_state_bytes(state: Mapping[str, Mapping[str, float | None]]) -> float:
    return sum(state[kind][place] or 0 for kind in STATE_KINDS for place in STATE_PLACES)


def extrapolate(summaries: Sequence[Mapping[str, Any]], depths: tuple[int, int, int], layers: int) -> dict[str, Any]:
    """The first two depths' line, at `layers`; the third depth tells how far off the line is there."""
    first, second, third = (_line_figures(summary) for summary in summaries)
    # A figure that a depth lacks, such as a collective that never happened there, has no line.
    shared = [key for key in first if all(figures.get(key) is not None for figures in (second, third))]
    line = {key: _on_line(depths, first[key], second[key], layers) for key in shared}
    residual = {}
    for key in shared:
        difference = third[key] - _on_line(depths, first[key], second[key], depths[2])
        if third[key] or difference:
            residual[key] = abs(difference) / abs(third[key]) if third[key] else 1.0
    not_linear = sorted(key for key, off in residual.items() if off > LINEAR_WITHIN)
    at: dict[str, Any] = {key: None if key in not_linear else value for key, value in line.items()}
    example = summaries[0]
    state = {kind: {place: at.get(f"state.{kind}.{place}") for place in STATE_PLACES} for kind in STATE_KINDS}
    return {
        **{key: example[key] for key in ("strategy", "virtual", "world_size", "rank", "task", "precision")},
        "emulated_device_memory_gib": example["emulated_device_memory_gib"],
        "model_layers": layers,
        "state_bytes_per_rank": state,
        "state_bytes_total": total_state_bytes(state),
        **{key: at.get(key) for key in (*PEAKS, *COUNTS)},
        "buffer_bytes": _group(at, "buffer"),
        "collectives": _collectives(at),
        "extrapolated": {
            "layers": layers,
            "depths": list(depths[:2]),
            "checked_at_depth": depths[2],
            "residual": residual,
            # Of these there is no figure: at the third depth the line is too far off.
            "not_linear": not_linear,
            "largest_residual_of_state": max(
                (value for key, value in residual.items() if key.startswith("state.")), default=0.0
            ),
            "run_dirs": [summary["run_dir"] for summary in summaries],
        },
    }


def _line_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    state = summary["state_bytes_per_rank"]
    figures = {f"state.{kind}.{place}": state[kind][place] for kind in STATE_KINDS for place in STATE_PLACES}
    figures |= {key: summary[key] for key in (*PEAKS, *COUNTS)}
    figures |= {f"buffer.{name}": size for name, size in (summary["buffer_bytes"] or {}).items()}
    for name, counts in summary["collectives"].items():
        figures |= {f"collective.{name}.{key}": value for key, value in counts.items()}
    return figures


def _on_line(depths: tuple[int, int, int], first: float, second: float, layers: int) -> float:
    value = first + (second - first) / (depths[1] - depths[0]) * (layers - depths[0])
    return round(value) if isinstance(first, int) and isinstance(second, int) else value


def _group(figures: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    start = f"{prefix}."
    return {key.removeprefix(start): value for key, value in figures.items() if key.startswith(start)}


def _collectives(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    collectives: dict[str, dict[str, Any]] = {}
    for key, value in _group(figures, "collective").items():
        name, _, count = key.rpartition(".")
        collectives.setdefault(name, {})[count] = value
    return collectives
