"""`study run`, `study weights` and `study status`: a suite, or the slices of one that is made of others."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from study.config.errors import UserError
from study.host.box import Box
from study.host.folders import folder_argument
from study.host.slurm import allocated_box, refuse_to_be_one_of_many_tasks
from study.sweep.cell import Cell, launch_command
from study.sweep.execute import run_cells
from study.sweep.foresee import Foresight, foresight, warnings
from study.sweep.notes import earlier_durations, estimate, left_to_run
from study.sweep.search import Search, cell_states, new_and_tried, one_of_each_model, runs_left
from study.sweep.slices import Plan, Slice, missing_here, plan_suite
from study.sweep.tables import print_tables, result_tables, series_tables, status_tables
from study.sweep.verdict import ANSWERED

RESUME = """\
Cells that ended ok are never run again. Those that ended oom, timeout or unsupported are answered too, and are run
again with --retry only; interrupted and failed ones are run again by every call. Ctrl-C or a crash loses at most the
cell at work. What was tried before comes after all that was not. A search chooses each probe from the records of those
before it, and goes on from them. A suite that is made of others runs their slices in its own order, and keeps each
record where its own suite would.
ZERO_STUDY_HOST_MEMORY_GIB says how much memory this box has where it shows less than it can have.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For every command that is about the cells of a suite."""
    parser.add_argument("suite", metavar="SUITE", help="a name in study/suites/, or a path")
    parser.add_argument(
        "--runs-dir", type=folder_argument, default=Path("runs"), metavar="DIR", help="where records are kept"
    )
    parser.add_argument(
        "--only",
        metavar="GLOB",
        action="append",
        default=[],
        help="only the cells whose id matches, such as '*-zero3-*', or a flag of theirs, such as seed=42 or repeat=1; "
        "given again, both must",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same cells with tiny models and few steps, on any box, in a folder of their own: what they measure "
        "says nothing of the suite",
    )


def add_timed_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument(
        "--time-budget", type=duration, metavar="TIME", help="only cells that end in this time, such as 9m or 1h30m"
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_timed_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print each cell's command, and what it should hold, take and end as; run nothing",
    )
    parser.add_argument("--hardware", metavar="BOX", help="with --dry-run: predict for 8xH100, A100-40, this, ...")
    parser.add_argument("--retry", action="store_true", help="run oom, timeout and unsupported cells again")


def duration(text: str) -> float:
    found = re.fullmatch(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 9m, 90s or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def _plan(options: argparse.Namespace, box: Box) -> Plan:
    return plan_suite(options.suite, box, options.runs_dir, options.only, rehearse=options.rehearse)


def run(options: argparse.Namespace) -> int:
    if options.hardware is not None and not options.dry_run:
        raise UserError("--hardware predicts, and a run is where it is", "add --dry-run, or leave it out")
    refuse_to_be_one_of_many_tasks()
    box = allocated_box()
    plan = _plan(options, box)
    if options.dry_run:
        return _dry_run(plan, options.retry, box, options.hardware)
    deadline = None if options.time_budget is None else time.monotonic() + options.time_budget
    parts = _runnable(plan, box)
    passes = [("", part, part.cells) for part in parts]
    if plan.is_series:
        passes = list(_passes(parts, options.retry))
        if not passes:
            print_tables(series_tables(plan.slices))
    not_all_was_run = False
    for title, part, cells in passes:
        if title:
            print(f"{title}:", file=sys.stderr, flush=True)
        runs = [cell for cell in cells if isinstance(cell, Cell)]
        for warning in warnings([cell for cell in runs if any(runs_left(cell, part.root, options.retry))], box):
            print(warning, file=sys.stderr, flush=True)
        budget = None if deadline is None else max(0.0, deadline - time.monotonic())
        sweep = run_cells(cells, part.root, box, retry=options.retry, time_budget_s=budget)
        print_tables(result_tables(part.cells, part.root))
        counts = Counter(record.state for _, record in cell_states(part.cells, part.root))
        if len(counts) > 1:
            said = ", ".join(f"{count} {state}" for state, count in counts.most_common())
            place = "" if options.runs_dir == Path("runs") else f" --runs-dir {options.runs_dir}"
            again = f"`study status {options.suite}{place}{' --rehearse' if options.rehearse else ''}` says why."
            # All else is run again by every call.
            if counts.keys() & (ANSWERED - {"ok"}):
                again += " What is fixed is run again with --retry."
            print(f"\n{said}; {again}")
        not_all_was_run |= sweep.stopped or sweep.refused > 0
        if sweep.left:
            break
    return 1 if not_all_was_run or any(_any_failed(part) for part in plan.slices) else 0


def _passes(parts: Sequence[Slice], retry: bool) -> Iterator[tuple[str, Slice, list[Cell | Search]]]:
    """Slices with something left to run; what was tried before comes after all of them.

    A cell that hangs until a call is over would keep the others from it in every call.
    """
    second = []
    for part in parts:
        new, tried = new_and_tried(part.cells, part.root, retry)
        if new:
            yield part.title, part, [item for item in part.cells if item not in tried]
        if tried:
            second.append((f"{part.title}, tried before", part, tried))
    yield from second


def _runnable(plan: Plan, box: Box) -> list[Slice]:
    """Of a series, what the box can run; where it can run nothing of it, the first reason is told."""
    refusals = [missing_here(part.suite, box, part.cells) for part in plan.slices]
    missing = {refusal.problem: refusal for refusal in refusals if refusal is not None}
    if None not in refusals:
        raise next(iter(missing.values()))
    for problem in missing:
        print(f"notice: {problem}: left out", file=sys.stderr)
    return [part for part, refusal in zip(plan.slices, refusals, strict=True) if refusal is None]


def _dry_run(plan: Plan, retry: bool, box: Box, hardware: str | None) -> int:
    left = []
    for part in plan.slices:
        of_this = list(left_to_run(part.cells, part.root, retry))
        left += of_this
        if plan.is_series:
            print(f"# {part.title}: {estimate(of_this, bool(part.searches))}")
        ahead = foresight(part.suite, box, earlier_durations(part.root), hardware)
        for cell in part.cells:
            _print_commands(cell, part.root, retry, ahead)
    print(f"# {estimate(left, any(part.searches for part in plan.slices))}", file=sys.stderr)
    return 0


def _print_commands(cell: Cell | Search, root: Path, retry: bool, ahead: Foresight) -> None:
    if isinstance(cell, Cell):
        expected = "  # expected to run out of memory" if cell.expect == "oom" else ""
        print(f"{shlex.join(launch_command(cell, root / cell.id))}  # {ahead.told(cell)}{expected}")
        return
    probe = next(cell.probes(root, retry), None)
    if probe is None:
        print(f"# {cell.id} is answered: {cell.finding(root).what_fits.answer}")
        return
    print(f"# {cell.id} searches {cell.rungs[0]} to {cell.rungs[-1]}: its next probe, which decides those after it")
    print(f"{shlex.join(launch_command(probe, root / probe.id))}  # {ahead.told(probe)}")


def _any_failed(part: Slice) -> bool:
    """A cell that ran out of memory has failed, unless it is there to show that; a probe that did has answered."""
    fine = {"ok", "unsupported", "to do"}
    return any(
        record.state not in (fine | {"oom"} if isinstance(cell, Search) or cell.expect == "oom" else fine)
        for cell in part.cells
        for _, record in cell_states([cell], part.root)
    )


def weights(options: argparse.Namespace) -> int:
    """Each set in a process of its own, which is all that holds the model and its libraries."""
    box = allocated_box()
    plan = _plan(options, box)
    sets: dict[tuple[str, ...], tuple[Cell, Path]] = {}
    # On a box that can run some slices, the weights of those; on one that can run none, of all.
    parts = [part for part in plan.slices if not missing_here(part.suite, box, part.cells)] or plan.slices
    for item, root in in_order(parts, options.time_budget):
        for cell in one_of_each_model(item):
            config = cell.config
            if not config.virtual_world_size:
                key = (config.task, config.model_name_or_path, config.weights, str(config.seed))
                sets.setdefault(key, (cell, root))
    if not sets:
        print(f"no cell that {plan.name} would run now starts from weights")
    command = [sys.executable, "-m", "study.workloads.initial"]
    statuses = [
        subprocess.run([*command, *cell.flags(root / cell.id)], check=False).returncode for cell, root in sets.values()
    ]
    return 1 if any(statuses) else 0


def in_order(parts: Sequence[Slice], time_budget_s: float | None) -> Iterator[tuple[Cell | Search, Path]]:
    """What `study run` would start in this time, in its order."""
    spent = 0.0
    for _, part, cells in _passes(parts, retry=False):
        for cell, seconds in left_to_run(cells, part.root):
            spent += seconds
            if time_budget_s is not None and spent > time_budget_s:
                return
            yield cell, part.root


def status(options: argparse.Namespace) -> int:
    plan = _plan(options, allocated_box())
    print_tables(series_tables(plan.slices) if plan.is_series else status_tables(plan.slices[0]))
    return 0
