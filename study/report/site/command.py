"""`study report`: reads a suite's records and builds its report. Plotting libraries are imported only when needed."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from study.config.errors import UserError, require_extra
from study.config.places import REPOSITORY
from study.host.folders import folder_argument
from study.host.machine import detect_machine
from study.records.outcome import Terminated, raise_on_signals
from study.sweep.plan import Plan, plan_suite
from study.sweep.search import cell_states
from study.sweep.suite_file import find_suite, read_suite

if TYPE_CHECKING:
    from study.records.frames import Records
    from study.report.facts import ClaimRow

REPORTS = "reports"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("suite", metavar="SUITE", help="a name in study/suites/, a suite's path, or a name in reports/")
    add("--runs_dir", type=folder_argument, metavar="DIR", help="where records are kept; runs by default")
    output = "folder of the report, reports/SUITE by default; it may contain files of yours"
    add("--output", type=folder_argument, metavar="DIR", help=output)
    only_records = parser.add_mutually_exclusive_group()
    drop = "replace a report even if it has the only records of some runs"
    only_records.add_argument("--drop_missing", action="store_true", help=drop)
    only_records.add_argument("--keep_missing", action="store_true", help="keep runs that only the report contains")


def run(options: argparse.Namespace, claims: Callable[[Records, str, Path], Sequence[ClaimRow]]) -> int:
    """Build the report; `claims` returns the published claims that depend on a report's records, given its folder."""
    with require_extra("report"):
        from study.records import frames
        from study.report.site.build import build
        from study.sweep.tables import slice_progress
    runs_dir: Path = options.runs_dir or Path("runs")
    name, plan = name_and_plan(options.suite, runs_dir)
    output = options.output or Path(REPORTS) / name
    remaining = slice_progress(plan) if plan else ()
    roots = plan.roots() if plan else [runs_dir / name]
    earlier = dict.fromkeys((output, Path(REPORTS) / name, REPOSITORY / REPORTS / name))
    report_folder = next((folder for folder in earlier if (folder / frames.RUNS_FILE).exists()), None)
    has_runs = any(next(root.glob("**/status.json"), None) is not None for root in roots)
    if options.runs_dir and not has_runs and not plan:
        raise UserError(f"--runs_dir {runs_dir} has no records of {name}", "name the folder above that of the suite")
    if report_folder is not None and not has_runs and not (plan and frames.is_empty(report_folder)):
        records = frames.read_parquet(report_folder)
    elif has_runs or plan or roots[0].is_dir():
        records = frames.read_runs(runs_dir if plan else roots[0], roots, remaining)
        if report_folder == output:
            records = _with_missing_runs(records, output, runs_dir, options)
    else:
        parquet = Path(REPORTS) / name / frames.RUNS_FILE
        problem = f"there are no records of {name}: neither {runs_dir / name} nor {parquet} is there"
        raise UserError(problem, f"run: study run {name}, or name their folder with --runs_dir")
    facts = _facts_of_suite(options.suite, runs_dir, records) if has_runs and not plan else []
    for fact in facts:
        print_line(f"notice: {fact}")
    # SIGTERM, which `timeout` sends, leaves no partial report.
    with raise_on_signals(Terminated(), signal.SIGTERM):
        failures = build(
            records,
            name,
            output,
            claims=claims(records, name, output),
            say=print_line,
            facts=facts,
            title=title_of(options.suite),
        )
    if records.refused:
        print_line(f"records excluded: {len(records.refused)}; the report lists them with the reasons")
    print(output / "index.html")
    return 1 if failures else 0


def _with_missing_runs(records: Records, output: Path, runs_dir: Path, options: argparse.Namespace) -> Records:
    """Return the records with the earlier report's only runs, if the user keeps them; UserError without a choice."""
    from study.records import frames

    lost = frames.runs_only_in(output, records)
    if not lost:
        return records
    missing = f"{len(lost)} runs of the report in {output} are not below {runs_dir} ({lost[0]})"
    if not (options.drop_missing or options.keep_missing):
        fix = "add --keep_missing or --drop_missing, or name another --output"
        raise UserError(f"{missing}: the report has their only records", fix)
    print_line(f"notice: {missing}: {'kept' if options.keep_missing else 'dropped'}")
    return frames.merge_earlier_runs(frames.read_parquet(output), records) if options.keep_missing else records


def print_line(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr)


def name_and_plan(suite: str, runs_dir: Path) -> tuple[str, Plan | None]:
    """Return the name of a suite, whose file may be gone if its records are there; and its plan, if it has slices."""
    try:
        read = read_suite(find_suite(suite))
    except UserError:
        if Path(suite).name == suite != ".." and any((folder / suite).is_dir() for folder in (runs_dir, Path(REPORTS))):
            return suite, None
        raise
    return read.name, plan_suite(suite, detect_machine(), runs_dir) if read.slices else None


# Reports whose folder is not named as their suite: the ledger's checks name the folder.
_SUITES = {"gpu": "one_gpu"}


def title_of(name: str) -> str:
    """Return the question of a report or suite, the first sentence of the suite's description; empty without one."""
    try:
        suite = read_suite(find_suite(_SUITES.get(name, name)))
        return re.split(r"(?<=\?)\s|\.(?:\s|$)", suite.description.strip(), maxsplit=1)[0]
    except UserError:
        return ""


def _facts_of_suite(suite: str, runs_dir: Path, records: Records) -> list[str]:
    """Return how many runs of a suite have not begun, if only some have, and the runs that no cell of it planned."""
    try:
        parts = plan_suite(suite, detect_machine(), runs_dir).slices
    except UserError:
        return []
    names = {Path(run).name for run in records.runs["run"]}
    cells = [entry for part in parts for entry in cell_states(part.cells, part.root)]
    unstarted = sum(record.state == "to do" and cell.id not in names for cell, record in cells)
    facts = [f"{unstarted} of {len(cells)} runs have no record yet"] if 0 < unstarted < len(cells) else []
    return facts + [notice for part in parts if (notice := part.runs_of_others())]
