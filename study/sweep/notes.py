"""sweep.json beside a record: each attempt as the sweep saw it, and what that says of the cells to come."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.records import RecordError, read_json, write_json
from study.sweep.plan import Cell

NOTES = "sweep.json"
# Wall times by task and strategy.
Durations = dict[tuple[str, str], list[float]]


def append_attempt(directory: Path, cell: Cell, command: Sequence[str], attempt: dict[str, Any]) -> None:
    file = directory / NOTES
    try:
        attempts = list(read_json(file)["attempts"])
    except (RecordError, KeyError, TypeError):
        attempts = []
    document = {
        "cell": cell.id, "strategy": cell.strategy, "world_size": cell.world_size, "repeat": cell.repeat,
        "time_limit_s": cell.time_limit_s, "command": list(command), "attempts": [*attempts, attempt],
    }  # fmt: skip
    write_json(file, document)


def startup_s(directory: Path, started: float) -> float | None:
    """From the launch to the training loop: engine.json is the last thing written before it."""
    try:
        written = (directory / "engine.json").stat().st_mtime
    except OSError:
        return None
    return written - started if written >= started else None


def earlier_durations(root: Path) -> Durations:
    """How long the cells took that ended ok."""
    durations: Durations = {}
    for file in root.glob(f"*/{NOTES}"):
        try:
            document, config = read_json(file), read_json(file.parent / "config.json")
            last = document["attempts"][-1]
            if last["state"] == "ok":
                durations.setdefault((config["task"], document["strategy"]), []).append(float(last["wall_s"]))
        except (RecordError, KeyError, IndexError, TypeError):
            continue
    return durations


def expected_s(cell: Cell, durations: Durations) -> float:
    """The median of the cells like it, else of all; 0 while nothing is known."""
    alike = durations.get((cell.config.task, cell.strategy)) or [s for times in durations.values() for s in times]
    return statistics.median(alike) if alike else 0.0
