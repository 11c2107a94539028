"""Rows of a table of runs, read without pandas, whose import takes as long as most advice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq

from study.config.errors import UserError, first_line
from study.records.rows import RUN_COLUMNS

RUNS_FILE = "runs.parquet"


def is_missing(value: Any) -> bool:
    """Whether a cell is empty: None of Arrow, and NaN or NA of pandas."""
    if value is None:
        return True
    try:
        # NaN differs from itself.
        return bool(value != value)
    except TypeError:
        # The comparison of NA is NA, which is neither true nor false.
        return True


def read_columns(folder: Path, names: Sequence[str]) -> list[SimpleNamespace]:
    """Return a report's runs with these columns, which are None where an older file lacks them; raise UserError."""
    file = folder / RUNS_FILE
    try:
        with pq.ParquetFile(file) as table:
            known = set(table.schema_arrow.names)
            rows = table.read(columns=[name for name in names if name in known]).to_pylist()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    empty = dict.fromkeys(names)
    return [SimpleNamespace(**(empty | row)) for row in rows]


def read_row(folder: Path, place: int) -> SimpleNamespace:
    """Return one of a report's runs, with None for columns that its file lacks; raise UserError."""
    file = folder / RUNS_FILE
    try:
        # pyarrow.parquet.read_table imports pandas.
        with pq.ParquetFile(file) as table:
            (row,) = table.read().slice(place, 1).to_pylist()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    return SimpleNamespace(**(dict.fromkeys(RUN_COLUMNS) | row))


def _unreadable(file: Path, error: Exception) -> UserError:
    fix = f"remove it, and rebuild it from its runs: study report {file.parent.name} --runs_dir DIR"
    return UserError(f"{file} is not readable ({first_line(error)[:200]})", fix)
