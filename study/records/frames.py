"""Tables of runs and of steps, read from run directories, and their parquet files, which are kept in git."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from study.config.errors import UserError, first_line
from study.records import directory, fairness, lock, older, plain_rows
from study.records.outcome import Outcome, SliceProgress
from study.records.rows import CONFIG_COLUMNS, RUN_COLUMNS, STEP_COLUMNS, run_row, step_block
from study.records.schema import NEW_NAMES, RecordError
from study.records.workloads import name_workloads, strategy_order, workload_names

if pd.__version__.startswith("2."):
    # As in pandas 3, for which Python 3.10 is too old: text has the type `str`, also in parquet.
    pd.options.future.infer_string = True
    pd.options.mode.copy_on_write = True


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRun:
    """A record that was read without error, with its path below the folder that was read."""

    place: Path
    row: dict[str, Any]
    # Columns of `steps`; None for a failed run.
    steps: dict[str, Any] | None
    digests: dict[str, str]
    # The --output_dir of the run.
    output_dir: str | None


def deduplicate_runs(runs: list[LoadedRun]) -> tuple[list[LoadedRun], list[str]]:
    """Return the runs without copies, with unique names and repeats, and the reasons why copies are excluded."""
    by_content: defaultdict[Hashable, list[LoadedRun]] = defaultdict(list)
    for entry in runs:
        # Runs that failed before their engine started may have the same files.
        is_complete = {"config.json", "engine.json"} <= entry.digests.keys()
        content = tuple(sorted(entry.digests.items())), entry.row["status_started_at"]
        by_content[content if is_complete else entry.place].append(entry)
    refused: list[str] = []
    unique = []
    for same in by_content.values():
        # The original is the record whose folder has the name of its --output_dir.
        original = min(same, key=lambda entry: (Path(entry.output_dir or "").name != entry.place.name, entry.place))
        refused += [f"{entry.place}: is a copy of {original.place}" for entry in same if entry is not original]
        unique.append(original)
    names = Counter(entry.row["run"] for entry in unique)
    unique.sort(key=lambda entry: entry.place)
    # Repeats of one config are numbered across folders, because runs are paired by seed and repeat.
    repeats_by_cell: defaultdict[Hashable, set[int]] = defaultdict(set)
    for entry in unique:
        if names[entry.row["run"]] > 1:
            entry.row["run"] = entry.place.as_posix()
        # Two searches may run the same probe; neither is a repeat of the other.
        if not entry.row["probe"]:
            used = repeats_by_cell[tuple(entry.row[key] for key in _CELL)]
            while entry.row["repeat"] in used:
                entry.row["repeat"] += 1
            used.add(entry.row["repeat"])
    return unique, refused


_CELL = (*CONFIG_COLUMNS, "strategy", "world_size", "trainer")
RUNS_FILE, STEPS_FILE = plain_rows.RUNS_FILE, "steps.parquet"
# These files are kept in git.
_COMPACT: dict[str, Any] = {"compression": "zstd", "compression_level": 19, "write_statistics": False}
# Types of columns of runs, which may have no value for some.
_NULLABLE = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
_REFUSED, _REMAINING, _DIGEST = b"study.refused", b"study.remaining", b"study.digest"


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """Input of a report: tables of runs and steps; `refused` lists the excluded run directories with the reasons."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    refused: tuple[str, ...] = ()
    # For suites with slices.
    remaining: tuple[SliceProgress, ...] = ()


def read_records(source: Path) -> Records:
    """Read records from run directories below a folder, or from the parquet files of a report; raises UserError."""
    if not source.is_dir():
        raise UserError(f"{source} is not a folder", "name a folder of runs, or one with runs.parquet")
    has_parquet = any((source / name).exists() for name in (RUNS_FILE, STEPS_FILE))
    if not has_parquet:
        return read_runs(source)
    if next(directory.find_runs(source), None) is not None:
        raise UserError(f"{source} contains both run directories and {RUNS_FILE}", "move one of them to another folder")
    return read_parquet(source)


def read_runs(root: Path, folders: Sequence[Path] = (), remaining: tuple[SliceProgress, ...] = ()) -> Records:
    """Read every run directory below `root`, or only below `folders`; paths in `refused` are relative to it."""
    runs: list[LoadedRun] = []
    refused: list[str] = []
    root = root.absolute()
    # Also run directories without a status.json, so that they are reported and not skipped silently.
    names = ("status.json", "engine.json", "summary.json", "memory.json", "traffic.json")
    files = (file for folder in folders or [root] for name in names for file in folder.absolute().glob(f"**/{name}"))
    for path in sorted({file.parent for file in files}):
        try:
            run = directory.read_run(path)
            if run.status["ended_at"] is None and lock.is_run_active(path):
                raise RecordError(path / "status.json", "its run is still active; a later report will include it")
            row = run_row(run) | {"sealed": directory.is_sealed(run.status)}
            steps = step_block(run) if run.state == "ok" else None
            content = run.status.get("files_sha256") or directory.digests(path)
        except RecordError as error:
            refused.append(f"{error.file.relative_to(root)}: {error.reason}")
        else:
            runs.append(LoadedRun(path.relative_to(root), row, steps, content, run.config.get("output_dir")))
    unique, duplicates = deduplicate_runs(runs)
    blocks = {entry.row["run"]: entry.steps for entry in unique if entry.steps is not None}
    return Records(*_tables([entry.row for entry in unique], blocks), tuple(sorted([*refused, *duplicates])), remaining)


def _tables(runs: Sequence[dict[str, Any]], blocks: dict[str, dict[str, Any]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    # Probes are named separately: the sizes that a search tries would make the names of all workloads longer.
    plain, probing = ([row for row in runs if bool(row["probe"]) is is_probe] for is_probe in (False, True))
    labelled = [row for group in (plain, probing) for row in fairness.label_confounds(name_workloads(group), blocks)]
    rows = sorted(
        labelled,
        key=lambda row: (
            row["workload"],
            strategy_order(row["strategy"]),
            row["world_size"] or 0,
            row["arm"],
            row["seed"] or 0,
            row["repeat"],
            row["run"],
        ),
    )
    # Text as objects, because pandas is slow with sixty string columns.
    runs = pd.DataFrame(
        {
            key: pd.Series([math.nan if row[key] is None else row[key] for row in rows], dtype=object)
            if kind == "str"
            else pd.array([row[key] for row in rows], dtype=kind)
            for key, kind in RUN_COLUMNS.items()
        }
    )
    if not blocks:
        return runs, pd.DataFrame({key: pd.array([], dtype=kind) for key, kind in STEP_COLUMNS.items()})
    lengths = [len(block["step"]) for block in blocks.values()]
    names = pd.Categorical.from_codes(np.repeat(np.arange(len(blocks)), lengths), categories=list(blocks))
    columns = {"run": names} | {
        key: np.concatenate([block[key] for block in blocks.values()]) for key in STEP_COLUMNS if key != "run"
    }
    return runs, pd.DataFrame(columns).astype(STEP_COLUMNS)


def steps_by_run(records: Records) -> dict[str, pd.DataFrame]:
    """Return the table of steps of each run."""
    return {str(run): steps for run, steps in records.steps.groupby("run", sort=False)}


def real_runs(records: Records) -> Records:
    """Select the runs that are not virtual, which have losses and times, without probes of a search."""
    return _chosen(records, ~records.runs["virtual"] & ~_is_probe(records))


def virtual_runs(records: Records) -> Records:
    """Select the virtual runs, without probes of a search."""
    return _chosen(records, records.runs["virtual"] & ~_is_probe(records))


def probe_runs(records: Records) -> Records:
    """Select the runs that a search used, including those that the suite also plans as cells."""
    return _chosen(records, records.runs["searches"].notna())


def outcome_of_run(run: Mapping[str, Any]) -> Outcome:
    """Return the outcome in a row of the table of runs."""
    reason, hint, cause, step = (
        None if plain_rows.is_missing(run[f"status_{key}"]) else run[f"status_{key}"]
        for key in ("reason", "hint", "cause", "not_finite_step")
    )
    return Outcome(run["status_state"], reason or "", hint or "", cause, None if step is None else int(step))


def drop_probes(records: Records) -> Records:
    """Select all runs except those that were run only for a search."""
    return _chosen(records, ~_is_probe(records))


def _is_probe(records: Records) -> pd.Series:
    return records.runs["probe"].fillna(False).astype(bool)


def _chosen(records: Records, mask: pd.Series) -> Records:
    runs = records.runs[mask].reset_index(drop=True)
    steps = records.steps
    if len(runs) < len(records.runs):
        steps = steps[steps["run"].isin(runs["run"])].reset_index(drop=True)
    return Records(runs, steps, records.refused)


def write_parquet(records: Records, folder: Path) -> None:
    """Write both tables as parquet files, with a digest of their content."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pandas(records.steps, preserve_index=False), folder / STEPS_FILE, **_COMPACT)
    frame = _without_empty_columns(records.runs.astype(RUN_COLUMNS))
    # Arrow's and pandas' notes on 170 columns would be half of the file.
    runs = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    remaining = json.dumps([progress._asdict() for progress in records.remaining]).encode()
    notes = {_REFUSED: json.dumps(records.refused).encode(), _REMAINING: remaining}
    notes[_DIGEST] = _digest(frame, folder / STEPS_FILE)
    with pq.ParquetWriter(folder / RUNS_FILE, runs.schema, store_schema=False, **_COMPACT) as writer:
        writer.write_table(runs)
        writer.add_key_value_metadata(notes)


def _without_empty_columns(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the table without columns that have no value: a figure that a later version adds changes no older file."""
    kept = [name for name in runs if name in _ALWAYS | _INSTEAD_OF_WORDS or runs[name].notna().any()]
    return runs[kept]


def _digest(runs: pd.DataFrame, steps: Path) -> bytes:
    """Return the digest of both tables, which detects edited cells and files of another report."""
    cells = runs.astype(object).where(runs.notna(), None).to_numpy().tolist()
    content = json.dumps([list(runs), cells]).encode() + hashlib.sha256(steps.read_bytes()).digest()
    return hashlib.sha256(content).hexdigest().encode()


def read_runs_table(folder: Path) -> pd.DataFrame:
    """Read only the table of runs, which is much faster than `read_parquet`; does not check the digest."""
    return _with_run_columns(folder / RUNS_FILE, _read_table(folder / RUNS_FILE, _NULLABLE)[0])


def read_parquet(folder: Path) -> Records:
    """Read the tables of a report and check their digest; raises UserError."""
    file, steps_file = folder / RUNS_FILE, folder / STEPS_FILE
    runs, notes = _read_table(file, _NULLABLE)
    steps, _ = _read_table(steps_file)
    if _DIGEST not in notes:
        raise UserError(f"{file} has no digest: `study report` did not write it, or an older version did", _fix(file))
    if notes[_DIGEST] != _digest(runs, steps_file):
        raise UserError(f"{file} or {STEPS_FILE} was changed after the report was made", _fix(file))
    remaining = tuple(SliceProgress(**progress) for progress in json.loads(notes.get(_REMAINING, b"[]")))
    refused = tuple(json.loads(notes.get(_REFUSED, b"[]")))
    return Records(_with_run_columns(file, runs), _with_columns(steps_file, steps, STEP_COLUMNS), refused, remaining)


def _with_run_columns(file: Path, runs: pd.DataFrame) -> pd.DataFrame:
    text = {key: object for key, kind in RUN_COLUMNS.items() if kind == "str"}
    runs = _with_facts_of_words(runs.rename(columns=NEW_NAMES))
    table = _with_columns(file, runs, RUN_COLUMNS).astype(text).copy()
    # Named again, because an older version may have named them differently.
    for _, keys in table["workload_key"].dropna().groupby(table["probe"].fillna(False)):
        table.loc[keys.index, "workload"] = keys.map(workload_names(sorted(set(keys))))
    return table


# A file without them has these facts in words.
_INSTEAD_OF_WORDS = {"status_cause", "nvme_param_dtype"}


def _with_facts_of_words(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the columns for which older files have only words."""
    if "status_cause" not in runs:
        facts = [older.read_reason(None if pd.isna(reason) else reason) for reason in runs["status_reason"]]
        runs = runs.assign(
            status_cause=pd.array([fact.cause for fact in facts], dtype="str"),
            status_not_finite_step=pd.array([fact.not_finite_step for fact in facts], dtype="Int64"),
        )
    if "nvme_param_dtype" not in runs:
        read = [older.read_warnings([] if pd.isna(texts) else json.loads(texts)) for texts in runs["warnings"]]
        texts = [
            None if pd.isna(text) else json.dumps(fact.warnings)
            for text, fact in zip(runs["warnings"], read, strict=True)
        ]
        runs = runs.assign(
            warnings=pd.array(texts, dtype="str"),
            nvme_param_dtype=pd.array([fact.nvme_param_dtype for fact in read], dtype="str"),
        )
    return runs


def runs_only_in(folder: Path, records: Records) -> list[str]:
    """Return the runs of an earlier report that these records lack, compared by name without folder."""
    names = {Path(run).name for run in records.runs["run"]}
    return sorted(run for run in _names_of_runs(folder) or [] if Path(run).name not in names)


def merge_earlier_runs(earlier: Records, records: Records) -> Records:
    """Return the records and, of an earlier report, the runs that they lack, compared by name without folder."""
    names = {Path(run).name for run in records.runs["run"]}
    earlier_runs = _chosen(earlier, ~earlier.runs["run"].map(lambda run: Path(run).name in names))
    rows: list[dict[str, Any]] = []
    blocks: dict[str, dict[str, Any]] = {}
    for part in (earlier_runs, records):
        rows += part.runs.astype(object).where(part.runs.notna(), None).to_dict("records")
        blocks |= {
            run: {key: steps[key].to_numpy() for key in STEP_COLUMNS} for run, steps in steps_by_run(part).items()
        }
    # Workload names and confounds depend on all runs.
    return Records(
        *_tables(rows, dict(sorted(blocks.items()))), (*earlier.refused, *records.refused), records.remaining
    )


def is_empty(folder: Path) -> bool:
    """Whether a report has no runs, because it was built before its suite started."""
    return _names_of_runs(folder) == []


def _names_of_runs(folder: Path) -> list[str] | None:
    try:
        return list(pq.read_table(folder / RUNS_FILE, columns=["run"])["run"].to_pylist())
    except (OSError, ValueError):
        return None


def _fix(file: Path) -> str:
    return f"remove it, and rebuild it from its runs: study report {file.parent.name} --runs_dir DIR"


def _read_table(file: Path, types: Mapping[Any, Any] = {}) -> tuple[pd.DataFrame, Mapping[bytes, bytes]]:
    try:
        table = pq.read_table(file)
        return table.to_pandas(types_mapper=types.get), table.schema.metadata or {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not readable ({first_line(error)[:200]})", _fix(file)) from None


_ALWAYS = {"run", "status_state", "workload", "arm", "baseline", "confounded", "step"}


def _with_columns(file: Path, frame: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """Return the table with exactly these columns; columns that older files lack are empty. Raises UserError."""
    later = [key for key in columns if key not in frame]
    frame = frame.assign(**{key: pd.array([None] * len(frame), dtype=columns[key]) for key in later})
    wrong = [key for key in frame if str(frame[key].dtype) != columns.get(key)]
    if wrong or _ALWAYS & set(later):
        examples = ", ".join(sorted([*wrong, *later])[:3])
        raise UserError(f"{file} has other columns than this version reads ({examples})", _fix(file))
    return frame[list(columns)]
