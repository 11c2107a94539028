"""Each run once: a copy of a record is left out, and so are two records of one run that say different things."""

from __future__ import annotations

import dataclasses
import itertools
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
    named: list[Found] = []
    for same in _grouped(kept, lambda entry: entry.place.name):
        for entry in same:
            name = entry.place.name if len(same) == 1 else entry.place.as_posix()
            named.append(dataclasses.replace(entry, row=entry.row | {"run": name}))
    return _numbered(sorted(named, key=lambda entry: entry.place)), refused


_CELL = (*CONFIG_COLUMNS, "strategy", "world_size", "trainer")


def _grouped(found: list[Found], key: Callable[[Found], Hashable]) -> list[list[Found]]:
    groups: dict[Hashable, list[Found]] = {}
    for entry in found:
        groups.setdefault(key(entry), []).append(entry)
    return list(groups.values())


def _content(entry: Found) -> Hashable:
    whole = {"config.json", "engine.json"} <= entry.digests.keys()
    return (tuple(sorted(entry.digests.items())), entry.row["status_started_at"]) if whole else entry.place


def _identity(entry: Found) -> Hashable:
    """The same for two records of one run, and for two runs of one configuration that started in the same second."""
    if entry.steps is None:
        return entry.place
    return entry.digests["config.json"], *(entry.row.get(key) for key in (*_CELL, "status_started_at"))


def _disagreeing(group: list[Found]) -> list[Found]:
    """Records of which most step times are equal to the last digit: two runs never have that."""
    disagreeing: dict[Path, Found] = {}
    for one, other in itertools.pairwise(group):
        if one.steps is None or other.steps is None or len(one.steps["step"]) != len(other.steps["step"]):
            continue
        if (one.steps["step_time_s"] == other.steps["step_time_s"]).mean() > 0.5:
            disagreeing |= {one.place: one, other.place: other}
    return list(disagreeing.values())


def _numbered(found: list[Found]) -> list[Found]:
    """Number the repeats of one configuration across folders: pairs are made by seed and repeat."""
    taken: dict[Hashable, set[int]] = {}
    numbered = []
    for entry in found:
        if entry.row.get("probe"):
            # Two searches may ask the same, and neither answer is a repeat of the other.
            numbered.append(entry)
            continue
        cell = tuple(entry.row.get(key) for key in _CELL)
        used = taken.setdefault(cell, set())
        repeat = entry.row["repeat"]
        while repeat in used:
            repeat += 1
        used.add(repeat)
        numbered.append(dataclasses.replace(entry, row=entry.row | {"repeat": repeat}))
    return numbered
