"""sweep.json beside a record: each attempt as the sweep saw it, and how long the next cells will take."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.records.directory import read_json, write_json
from study.records.schema import RecordError
from study.sweep.cell import Cell
from study.sweep.progress import show_duration
from study.sweep.search import Search, runs_left

NOTES = "sweep.json"
# For an estimate alone.
PROBES_OF_A_SEARCH = 3
# By what `_alike` says.
Durations = Mapping[tuple[str, ...], list[float]]


def append_attempt(directory: Path, cell: Cell, command: Sequence[str], attempt: dict[str, Any]) -> None:
    file = directory / NOTES
    before: dict[str, Any]
    try:
        before = read_json(file)
        attempts = list(before["attempts"])
    except (RecordError, KeyError, TypeError):
        before, attempts = {}, []
    document = {
        "cell": cell.id, "arm": cell.arm, "strategy": cell.strategy, "trainer": cell.trainer,
        "world_size": cell.world_size, "stack": cell.stack, "repeat": cell.repeat, "time_limit_s": cell.time_limit_s,
        "command": list(command), "attempts": [*attempts, attempt],
    }  # fmt: skip
    write_json(file, document | {key: before[key] for key in ("searches", "probe") if key in before})


def note_searches(cells: Iterable[Cell | Search], root: Path) -> None:
    """Note beside each probe's record every search that it belongs to, also one that found the record there.

    A run that the suite names for itself too is more than a probe.
    """
    cells = list(cells)
    named = {cell.id for cell in cells if isinstance(cell, Cell)}
    noted: dict[str, list[dict[str, Any]]] = {}
    for search in (cell for cell in cells if isinstance(cell, Search)):
        for place in search.states(root):
            entry = {"id": search.id, "axis": search.axis, "place": place, "last": search.last}
            noted.setdefault(search.probe_of(place).id, []).append(entry)
    for name, entries in noted.items():
        file = root / name / NOTES
        try:
            document = read_json(file)
        except RecordError:
            # The sweep was cut off here: it is run again.
            continue
        # `cells` may be some of the suite's: what was noted with the others stays.
        before = document.get("searches", [])
        others = [entry for entry in before if entry["id"] not in {mine["id"] for mine in entries}]
        said = {"searches": others + entries, "probe": name not in named and document.get("probe", True)}
        if said != {key: document.get(key) for key in said}:
            write_json(file, document | said)


def earlier_durations(root: Path) -> Durations:
    """How long the cells took that ended ok."""
    durations = defaultdict(list)
    for file in root.glob(f"*/{NOTES}"):
        try:
            document = read_json(file)
            config = RunConfig.from_dict(read_json(file.parent / "config.json"), str(file.parent))
            last = document["attempts"][-1]
            if last["state"] == "ok":
                ranks = config.virtual_world_size or document["world_size"]
                for key in _alike(config, document.get("arm", document["strategy"]), ranks):
                    durations[key].append(float(last["wall_s"]))
        except (RecordError, UserError, LookupError, TypeError, ValueError, AttributeError):
            continue
    return durations


def _alike(config: RunConfig, arm: str, ranks: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What names the runs that differ in seed and repeat alone, and those of one task, model and strategy."""
    but_for_the_seed = dataclasses.replace(config, seed=0).run_id(arm, ranks)
    return (but_for_the_seed,), (config.task, config.model_name_or_path, arm)


def expected_s(cell: Cell, durations: Durations) -> float:
    """The median of the cells that differ in seed and repeat alone, else what the suite says, else of those like it."""
    exactly, roughly = _alike(cell.config, cell.arm, cell.ranks)
    if exactly not in durations and cell.expected_s is not None:
        return cell.expected_s
    seconds = durations.get(exactly) or durations.get(roughly)
    seconds = seconds or [each for key, several in durations.items() if len(key) == 1 for each in several]
    return statistics.median(seconds) if seconds else 0.0


def left_to_run(
    cells: Iterable[Cell | Search], root: Path, retry: bool = False
) -> Iterator[tuple[Cell | Search, float]]:
    """What has no answer yet, each with the seconds it takes as far as records or the suite tell."""
    durations = earlier_durations(root)
    for item in cells:
        if (run := next(runs_left(item, root, retry), None)) is not None:
            yield item, expected_s(run, durations) * (PROBES_OF_A_SEARCH if isinstance(item, Search) else 1)


def estimate(left: Sequence[tuple[Cell | Search, float]], has_searches: bool) -> str:
    """What is left, and the time for it; how many probes a search will take is a guess."""
    searches = sum(isinstance(item, Search) for item, _ in left)
    seconds = [each for _, each in left]
    text = f"{len(left) - searches} cells to run" + (f" and {searches} searches to finish" if has_searches else "")
    if not any(seconds):
        return f"{text}; how long that takes is not known yet"
    assumed = f", a search taken for {PROBES_OF_A_SEARCH} probes" if searches else ""
    return f"{text}, about {show_duration(sum(seconds))} (an estimate{assumed})"
