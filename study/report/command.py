"""`study report`: finds a suite's records and builds its report. What draws is loaded when it is needed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from study.errors import UserError
from study.strategies import REPOSITORY

RUNS_FILE = "runs.parquet"
REPORTS = "reports"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", metavar="SUITE", help="a name in study/suites/, a suite's path, or a name in reports/")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where records are kept")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where the report goes, whole or not at all; reports/SUITE by default",
    )


def run(suite: str, runs_dir: Path, output: Path | None) -> int:
    """`suite` is the name by which records and report are kept."""
    try:
        from study.report.build import build
        from study.report.frames import read_records
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed here", "run: pip install -e '.[report]'") from None
    output = output or Path(REPORTS) / suite
    # Handed on and not kept: a thousand long runs are large.
    built = build(
        read_records(_source(suite, runs_dir, output)), suite, output, say=lambda line: print(line, file=sys.stderr)
    )
    if built.refused:
        print(f"{built.refused} records left out; the report says which and why", file=sys.stderr)
    for name, failure in built.failures.items():
        print(f"{name}.ipynb failed in {failure}", file=sys.stderr)
    print(built.page)
    return 1 if built.failures else 0


def _source(suite: str, runs_dir: Path, output: Path) -> Path:
    """The run directories, where there are any; else the parquet files of an earlier report."""
    runs = runs_dir / suite
    if next(runs.glob("**/status.json"), None) is not None:
        return runs
    reports = dict.fromkeys((output, Path(REPORTS) / suite, REPOSITORY / REPORTS / suite))
    for folder in reports:
        if (folder / RUNS_FILE).exists():
            return folder
    if runs.is_dir():
        return runs
    raise UserError(
        f"there are no records of {suite}: neither {runs} nor {Path(REPORTS) / suite / RUNS_FILE} is there",
        f"run: study run {suite}, or name their place with --runs-dir",
    )
