"""Run directories as two tables, one row per run and one per step, and those tables as parquet files in git."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from study.config.errors import UserError, first_line
from study.records.directory import digests, find_runs, is_sealed, read_run
from study.records.fairness import label_confounds
from study.records.lock import is_at_work
from study.records.rows import CONFIG_COLUMNS, RUN_COLUMNS, STEP_COLUMNS, run_row, step_block
from study.records.schema import NEW_NAMES, RecordError
from study.records.workloads import name_workloads, strategy_order


class Remaining(NamedTuple):
    """One slice of a suite, when its report was made: what was planned, how it ended as far as it ran, and the rest by
    what differs between its cells."""

    suite: str
    only: str
    planned: int
    ok: int
    # Out of memory, failed, refused by the box: a row of the report each, and an answer.
    other: int
    seconds: float
    left: Sequence[str]


@dataclasses.dataclass(frozen=True, eq=False)
class UniqueRuns:
    """A record that was read without error, and its place below the folder that was read."""

    place: Path
    row: dict[str, Any]
    # Columns of `steps`, where it ended well.
    steps: dict[str, Any] | None
    digests: dict[str, str]
    # Where the run itself says that it wrote.
    output_dir: str | None


# Each run once: a copy of a record is left out, and so are two records of one run that say different things.


def each_once(found: list[UniqueRuns]) -> tuple[list[UniqueRuns], list[str]]:
    """Return the runs to keep, each with its own name and repeat, and why others are left out."""
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


def _grouped(found: list[UniqueRuns], key: Callable[[UniqueRuns], Hashable]) -> list[list[UniqueRuns]]:
    groups: defaultdict[Hashable, list[UniqueRuns]] = defaultdict(list)
    for entry in found:
        groups[key(entry)].append(entry)
    return list(groups.values())


def _content(entry: UniqueRuns) -> Hashable:
    whole = {"config.json", "engine.json"} <= entry.digests.keys()
    return (tuple(sorted(entry.digests.items())), entry.row["status_started_at"]) if whole else entry.place


def _identity(entry: UniqueRuns) -> Hashable:
    """Return a key of one run, which another run of its configuration shares if both started in the same second."""
    if entry.steps is None:
        return entry.place
    return entry.digests["config.json"], *(entry.row[key] for key in (*_CELL, "status_started_at"))


def _disagreeing(group: list[UniqueRuns]) -> list[UniqueRuns]:
    """Return records whose step times are mostly equal to the last digit, which two runs never are."""
    disagreeing: dict[Path, UniqueRuns] = {}
    for one, other in itertools.pairwise(group):
        if one.steps is None or other.steps is None or len(one.steps["step"]) != len(other.steps["step"]):
            continue
        if (one.steps["step_time_s"] == other.steps["step_time_s"]).mean() > 0.5:
            disagreeing |= {one.place: one, other.place: other}
    return list(disagreeing.values())


def _number_repeats(found: list[UniqueRuns]) -> None:
    """Number the repeats of one configuration across folders: pairs are made by seed and repeat."""
    taken: defaultdict[Hashable, set[int]] = defaultdict(set)
    for entry in found:
        # Two searches may ask the same, and neither answer is a repeat of the other.
        if not entry.row["probe"]:
            used = taken[tuple(entry.row[key] for key in _CELL)]
            while entry.row["repeat"] in used:
                entry.row["repeat"] += 1
            used.add(entry.row["repeat"])


RUNS_FILE, STEPS_FILE = "runs.parquet", "steps.parquet"
_REFUSED, _REMAINING, _DIGEST = b"study.refused", b"study.remaining", b"study.digest"


@dataclasses.dataclass(frozen=True)
class Records:
    """All that a report is made of; `refused` says which run directories were left out, and why."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    refused: tuple[str, ...] = ()
    # Of a suite that is made of slices.
    remaining: tuple[Remaining, ...] = ()


def read_records(source: Path) -> Records:
    """A directory of run directories, or a folder with the two parquet files that were made of one."""
    if not source.is_dir():
        raise UserError(f"{source} is no folder", "name a folder of runs, or one that holds runs.parquet")
    has_parquet = any((source / name).exists() for name in (RUNS_FILE, STEPS_FILE))
    if not has_parquet:
        return read_runs(source)
    if next(find_runs(source), None) is not None:
        raise UserError(
            f"{source} holds both run directories and {RUNS_FILE}", "move one of them: they are never mixed"
        )
    return read_parquet(source)


def read_runs(root: Path, folders: Sequence[Path] = (), remaining: tuple[Remaining, ...] = ()) -> Records:
    """Every run directory below `root`, or below `folders` of it. Refusals name a file by its path from `root`."""
    found: list[UniqueRuns] = []
    refused: list[str] = []
    root = root.absolute()
    for path in sorted({path for folder in folders or [root] for path in _candidates(folder.absolute())}):
        named = str(path.relative_to(root)).encode(errors="backslashreplace").decode()
        if named != str(path.relative_to(root)):
            refused.append(f"{named}: its name is not UTF-8; rename the folder")
            continue
        try:
            run = read_run(path)
            if run.status["ended_at"] is None and is_at_work(path):
                raise RecordError(path / "status.json", "its run is at work; a report that is made later has it")
            row = run_row(run) | {"sealed": is_sealed(run.status)}
            steps = step_block(run) if run.state == "ok" else None
            content = run.status.get("files_sha256") or digests(path)
        except RecordError as error:
            refused.append(f"{error.file.relative_to(root)}: {error.reason}")
        else:
            found.append(UniqueRuns(path.relative_to(root), row, steps, content, run.config.get("output_dir")))
    kept, twice = each_once(found)
    return Records(*_tables(kept), tuple(sorted([*refused, *twice])), remaining)


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield run directories; one that lost its status.json is refused by name, and not skipped silently."""
    documents = ("status.json", "engine.json", "summary.json", "memory.json", "traffic.json")
    yield from {file.parent for name in documents for file in folder.glob(f"**/{name}")}


def _tables(found: list[UniqueRuns]) -> tuple[pd.DataFrame, pd.DataFrame]:
    blocks = {entry.row["run"]: entry.steps for entry in found if entry.steps is not None}
    # Apart, because the sizes that a search tries would make the name of every other workload longer.
    plain, probing = ([entry.row for entry in found if bool(entry.row["probe"]) is asks] for asks in (False, True))
    named = [row for group in (plain, probing) for row in label_confounds(name_workloads(group), blocks)]
    rows = sorted(named, key=_place)
    columns = {key: _column([row[key] for row in rows], kind) for key, kind in RUN_COLUMNS.items()}
    return pd.DataFrame(columns), _steps(blocks)


def _column(values: list[Any], kind: str) -> Any:
    """Make a column; text as objects, since pandas is slow with sixty string columns."""
    if kind == "str":
        return pd.Series([math.nan if value is None else value for value in values], dtype=object)
    return pd.array(values, dtype=kind)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    numbers = (row["seed"] or 0, row["repeat"])
    return row["workload"], strategy_order(row["strategy"]), row["world_size"] or 0, row["arm"], *numbers, row["run"]


def _steps(blocks: dict[str, dict[str, Any]]) -> pd.DataFrame:
    if not blocks:
        return pd.DataFrame({key: pd.array([], dtype=kind) for key, kind in STEP_COLUMNS.items()})
    lengths = [len(block["step"]) for block in blocks.values()]
    runs = pd.Categorical.from_codes(np.repeat(np.arange(len(blocks)), lengths), categories=list(blocks))
    columns = {"run": runs} | {
        key: np.concatenate([block[key] for block in blocks.values()]) for key in STEP_COLUMNS if key != "run"
    }
    return pd.DataFrame(columns).astype(STEP_COLUMNS)


def steps_by_run(records: Records) -> dict[str, pd.DataFrame]:
    return {str(run): steps for run, steps in records.steps.groupby("run", sort=False)}


def real(records: Records) -> Records:
    """Records without virtual runs, which have no losses and no wall time, and without a search's probes."""
    return _chosen(records, ~records.runs["virtual"] & ~_is_probe(records))


def virtual(records: Records) -> Records:
    return _chosen(records, records.runs["virtual"] & ~_is_probe(records))


def probes(records: Records) -> Records:
    """The runs of a search, also those that their suite names for themselves."""
    return _chosen(records, records.runs["searches"].notna())


def without_probes(records: Records) -> Records:
    return _chosen(records, ~_is_probe(records))


def _is_probe(records: Records) -> pd.Series:
    return records.runs["probe"].fillna(False).astype(bool)


def only_virtual(records: Records) -> bool:
    return real(records).runs.empty and not virtual(records).runs.empty


def _chosen(records: Records, mask: pd.Series) -> Records:
    runs = records.runs[mask].reset_index(drop=True)
    steps = records.steps
    if len(runs) < len(records.runs):
        steps = steps[steps["run"].isin(runs["run"])].reset_index(drop=True)
    return Records(runs, steps, records.refused)


def write_parquet(records: Records, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pandas(records.steps, preserve_index=False), folder / STEPS_FILE)
    frame = records.runs.astype(RUN_COLUMNS)
    runs = pa.Table.from_pandas(frame, preserve_index=False)
    notes = {
        _REFUSED: json.dumps(records.refused).encode(),
        _REMAINING: json.dumps([each._asdict() for each in records.remaining]).encode(),
        _DIGEST: _digest(frame, folder / STEPS_FILE),
    }
    pq.write_table(runs.replace_schema_metadata({**(runs.schema.metadata or {}), **notes}), folder / RUNS_FILE)


def _digest(runs: pd.DataFrame, steps: Path) -> bytes:
    """Digest of both tables: nothing else would show that a cell was edited, or that a file is of another report."""
    cells = runs.astype(object).where(runs.notna(), None).to_numpy().tolist()
    content = json.dumps([list(runs), cells]).encode() + hashlib.sha256(steps.read_bytes()).digest()
    return hashlib.sha256(content).hexdigest().encode()


def read_runs_table(folder: Path) -> pd.DataFrame:
    """Return the table of runs alone, in a fraction of the time."""
    return _with_run_columns(folder / RUNS_FILE, _read_table(folder / RUNS_FILE)[0])


def read_parquet(folder: Path) -> Records:
    file, of_steps = folder / RUNS_FILE, folder / STEPS_FILE
    runs, notes = _read_table(file)
    steps, _ = _read_table(of_steps)
    if _DIGEST not in notes:
        raise UserError(f"{file} has no digest: `study report` did not write it, or an older version did", _fix(file))
    if notes[_DIGEST] != _digest(runs, of_steps):
        raise UserError(f"{file} or {STEPS_FILE} was changed after the report was made", _fix(file))
    try:
        remaining = tuple(Remaining(**each) for each in json.loads(notes.get(_REMAINING, b"[]")))
        refused = tuple(map(str, json.loads(notes.get(_REFUSED, b"[]"))))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} does not say which runs were left out ({error})", _fix(file)) from None
    return Records(_with_run_columns(file, runs), _with_columns(of_steps, steps, STEP_COLUMNS), refused, remaining)


def _with_run_columns(file: Path, runs: pd.DataFrame) -> pd.DataFrame:
    text = {key: object for key, kind in RUN_COLUMNS.items() if kind == "str"}
    return _with_columns(file, runs.rename(columns=NEW_NAMES), RUN_COLUMNS).astype(text).copy()


def runs_only_in(folder: Path, records: Records) -> list[str]:
    """Return runs of an earlier report that these records lack. A name may begin with its folder, or not."""
    here = {Path(run).name for run in records.runs["run"]}
    return sorted(run for run in _names_of_runs(folder) or [] if Path(run).name not in here)


def is_empty(folder: Path) -> bool:
    """Whether a report has no run, since it was made before its study began."""
    return _names_of_runs(folder) == []


def _names_of_runs(folder: Path) -> list[str] | None:
    """Return None if they cannot be read, which is not an error: a new report replaces the file."""
    try:
        return list(_table(folder / RUNS_FILE, ["run"])["run"].to_pylist())
    except (OSError, ValueError):
        return None


def _table(file: Path, columns: list[str] | None = None) -> pa.Table:
    """Read one file: opening a pipe would block, and a folder would be read as one table of all its files."""
    if file.exists() and not file.is_file():
        raise OSError("not a regular file")
    return pq.read_table(file, columns=columns)


def _fix(file: Path) -> str:
    return f"remove it, and make it again from its runs: study report {file.parent.name} --runs_dir DIR"


def _read_table(file: Path) -> tuple[pd.DataFrame, Mapping[bytes, bytes]]:
    try:
        table = _table(file)
        return table.to_pandas(), table.schema.metadata or {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, pa.ArrowException) as error:
        # Notes in the file say of which type a column is, whatever it holds.
        raise UserError(f"{file} is not readable ({first_line(error)[:200]})", _fix(file)) from None


_ALWAYS = {"run", "status_state", "workload", "arm", "baseline", "confounded", "step"}


def _with_columns(file: Path, frame: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """A table with these columns; those that older files lack are empty, as no run could be asked for such a thing."""
    later = [key for key in columns if key not in frame]
    frame = frame.assign(**{key: pd.array([None] * len(frame), dtype=columns[key]) for key in later})
    wrong = [key for key in frame if str(frame[key].dtype) != columns.get(key)]
    if wrong or _ALWAYS & set(later):
        named = ", ".join(sorted([*wrong, *later])[:3])
        raise UserError(f"{file} has other columns than this version reads ({named})", _fix(file))
    return frame[list(columns)]
