"""Each run once: a copy of a record is left out, and so are two records of one run that say different things."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from study.report.records.rows import CONFIG_COLUMNS


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A record that was read without error, and its place below the folder that was read."""

    place: Path
    row: dict[str, Any]
    # Columns of `steps`, where it ended well.
    steps: dict[str, Any] | None
    digests: dict[str, str]
    # Where the run itself says that it wrote.
    output_dir: str | None


def each_once(found: list[Found]) -> tuple[list[Found], list[str]]:
    """The runs to keep, each with a name of its own and a repeat of its own, and why others are left out."""
    refused: list[str] = []
    kept = []
    for same in _grouped(found, _content):
        # A copy has another name than the run gave itself.
        original = min(same, key=lambda entry: (Path(entry.output_dir or "").name != entry.place.name, entry.place))
        refused += [f"{entry.place}: is a copy of {original.place}" for entry in same if entry is not original]
        kept.append(original)
    found, kept = kept, []
    for group in _grouped(found, _identity):
        disagreeing = _disagreeing(group)
        kept += [entry for entry in group if entry not in disagreeing]
        places = ", ".join(str(entry.place) for entry in disagreeing)
        refused += [
            f"{entry.place}: two records of one run disagree ({places}), and nothing says which is right"
            for entry in disagreeing
        ]
    for same in _grouped(kept, lambda entry: entry.row["run"]):
        for entry in same if len(same) > 1 else ():
            entry.row["run"] = entry.place.as_posix()
    kept.sort(key=lambda entry: entry.place)
    _number_repeats(kept)
    return kept, refused


_CELL = (*CONFIG_COLUMNS, "strategy", "world_size", "trainer")


def _grouped(found: list[Found], key: Callable[[Found], Hashable]) -> list[list[Found]]:
    groups: defaultdict[Hashable, list[Found]] = defaultdict(list)
    for entry in found:
        groups[key(entry)].append(entry)
    return list(groups.values())


def _content(entry: Found) -> Hashable:
    whole = {"config.json", "engine.json"} <= entry.digests.keys()
    return (tuple(sorted(entry.digests.items())), entry.row["status_started_at"]) if whole else entry.place


def _identity(entry: Found) -> Hashable:
    """The same for two records of one run, and for two runs of one configuration that started in the same second."""
    if entry.steps is None:
        return entry.place
    return entry.digests["config.json"], *(entry.row[key] for key in (*_CELL, "status_started_at"))


def _disagreeing(group: list[Found]) -> list[Found]:
    """Records of which most step times are equal to the last digit: two runs never have that."""
    disagreeing: dict[Path, Found] = {}
    for one, other in itertools.pairwise(group):
        if one.steps is None or other.steps is None or len(one.steps["step"]) != len(other.steps["step"]):
            continue
        if (one.steps["step_time_s"] == other.steps["step_time_s"]).mean() > 0.5:
            disagreeing |= {one.place: one, other.place: other}
    return list(disagreeing.values())


def _number_repeats(found: list[Found]) -> None:
    """Of one configuration across folders: pairs are made by seed and repeat."""
    taken: defaultdict[Hashable, set[int]] = defaultdict(set)
    for entry in found:
        # Two searches may ask the same, and neither answer is a repeat of the other.
        if not entry.row["probe"]:
            used = taken[tuple(entry.row[key] for key in _CELL)]
            while entry.row["repeat"] in used:
                entry.row["repeat"] += 1
            used.add(entry.row["repeat"])
