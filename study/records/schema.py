"""Check of the files of a run directory, and names that their keys and values share with other code.

The models are in study/records/models.py, which `validate` imports itself: commands that read no record start faster
without pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

State = Literal["ok", "oom", "timeout", "unsupported", "failed", "interrupted"]
# What ended a run, if other code depends on it; the reason has the words. "not finite": a loss or gradients.
EndCause = Literal[
    "device memory",
    "device or locked memory",
    "locked memory",
    "host memory",
    "shared memory",
    "disk",
    "not finite",
    "not installable",
    "Slurm",
    "SIGTERM",
]
# Quantities that a search maximizes.
SearchAxis = Literal["largest_micro_batch", "largest_model"]
STATE_KINDS = ("params", "grads", "optimizer")
STATE_PLACES = ("device", "host", "nvme")
# Parts of the time of a profiled step.
ProfileCategory = Literal["matmul", "attention", "elementwise", "optimizer", "copies", "collectives", "other"]
PROFILE_CATEGORIES: tuple[str, ...] = get_args(ProfileCategory)
# Figures of summary.json that are maxima of memory.json over ranks and phases.
PEAKS = {
    "peak_memory_gib_allocated": "allocated",
    "peak_memory_gib_reserved": "reserved",
    "peak_memory_gib_device": "device",
    "host_peak_rss_gib": "host",
}
# Keys of status.json in a record that was closed.
SEAL = frozenset({"files_sha256", "status_sha256"})
# New names of keys and columns of older records. `read_json` and `read_parquet` rename them.
NEW_NAMES = {"team_size": "group_size", "team": "model_parallel_group", "team_ranks": "group_ranks"}


def with_new_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with the keys of older records renamed."""
    return {NEW_NAMES.get(key, key): value for key, value in document.items()}


class RecordError(ValueError):
    """Invalid file of a run directory, with the reason."""

    def __init__(self, file: Path, reason: str):
        self.file, self.reason = file, reason
        super().__init__(f"{file}: {reason}")


def validate(file: Path, value: Any, row: int | None = None) -> None:
    """Raise RecordError if a document, or one row of a file of rows, does not match the model of its file.

    A damaged file thus adds no wrong number to a table.
    """
    from pydantic import ValidationError

    from study.records.models import FILES, refusal

    try:
        FILES[file.name].model_validate(value)
    except ValidationError as error:
        raise RecordError(file, refusal(error) if row is None else f"row {row}: {refusal(error)}") from None
