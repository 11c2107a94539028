"""The commands `study run`, `study weights` and `study status` for a suite, or for the slices of a series."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from study.config.errors import UserError
from study.config.printing import TextTable, print_page
from study.config.text import format_duration
from study.host import folders, machine, slurm, stacks
from study.predictor.hardware import to_box
from study.sweep.cell import Cell, launch_command
from study.sweep.execute import run_cells
from study.sweep.forecast import Forecast, earlier_durations, estimate, oom_warnings, pending_items
from study.sweep.plan import Plan, Slice, missing_requirement, plan_suite, runs_left_out, smallest_machine
from study.sweep.search import Search, cell_states, new_and_tried, one_of_each_model, pending_runs
from study.sweep.tables import fit_screen, result_tables, status_tables, status_verdict

RESUME = """\
Run it again to resume. Cells in state ok never run again. Cells in state oom, timeout or unsupported run again only
with --retry. Interrupted and failed cells run again in every call, after all cells that were never tried. Ctrl-C or a
crash loses at most the running cell. A search chooses each probe from the records of earlier probes. A series runs
slices of several suites in its order, and stores each record in the folder of its suite.
ZERO_STUDY_HOST_MEMORY_GIB sets the memory of this machine if the machine reports less than it can use.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every command on the cells of a suite."""
    add = parser.add_argument
    add("suite", metavar="SUITE", help="a name in study/suites/, or a path")
    add("--runs_dir", type=folders.folder_argument, default=Path("runs"), metavar="DIR", help="where records are kept")
    only = "only the cells whose id matches, such as '*-zero3-*', or a flag, such as seed=42 or repeat=1; if repeated,"
    add("--only", metavar="GLOB", action="append", default=[], help=f"{only} all must match")
    rehearsal = "smoke test: the same cells with tiny models and few steps, on any machine, in a separate folder;"
    add("--rehearse", action="store_true", help=f"{rehearsal} its results are not comparable")


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study status`."""
    add_arguments(parser)
    parser.add_argument("--details", action="store_true", help="print every row and every reason completely")


def add_timed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --time_budget to the arguments of every command."""
    add_arguments(parser)
    help = "only cells that end within this time, such as 9m or 1h30m"
    parser.add_argument("--time_budget", type=duration, metavar="TIME", help=help)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study run`."""
    add_timed_arguments(parser)
    add = parser.add_argument
    add("--dry_run", action="store_true", help="print each cell's command and predicted memory, time and outcome")
    add("--hardware", metavar="BOX", help="with --dry_run: predict for 8xH100, A100-40, this, ...")
    add("--retry", action="store_true", help="run oom, timeout and unsupported cells again")
    limit = "end a cell after this time, such as 2m, even if its time_limit_s is longer"
    add("--time_limit", type=duration, default=math.inf, metavar="TIME", help=limit)
    add("--details", action="store_true", help="print every cell, with its command in a dry run, and every column")


def duration(text: str) -> float:
    """Return the seconds of a duration such as 9m, 90s or 1h30m."""
    match = re.fullmatch(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 9m, 90s or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def _plan(options: argparse.Namespace, box: machine.Machine) -> Plan:
    return plan_suite(options.suite, box, options.runs_dir, options.only, rehearse=options.rehearse)


def run(options: argparse.Namespace) -> int:
    """Run the cells of the suite or series; return 1 if some did not run or failed, else 0."""
    if options.hardware is not None and not options.dry_run:
        raise UserError("--hardware is only for predictions", "add --dry_run, or leave --hardware out")
    slurm.check_single_slurm_task()
    box = slurm.job_resources()
    plan = _plan(options, box)
    if options.dry_run:
        return _dry_run(plan, options, box)
    deadline = None if options.time_budget is None else time.monotonic() + options.time_budget
    parts = _runnable(plan, box)
    passes = [("", part, part.cells) for part in parts]
    if plan.is_series:
        passes = list(_passes(parts, options.retry))
        if not passes:
            print_page([status_verdict(plan, options), "", *fit_screen(list(status_tables(plan)), options.details)])
    _print_notices(parts, box)
    not_all_was_run = False
    for title, part, cells in passes:
        if title:
            print(f"{title}:", file=sys.stderr, flush=True)
        _print_oom_warnings(part, cells, options.retry, box)
        budget = None if deadline is None else max(0.0, deadline - time.monotonic())
        sweep = run_cells(
            cells, part.root, box, retry=options.retry, time_budget_s=budget, time_limit_s=options.time_limit
        )
        print_page([status_verdict(plan, options), "", *result_tables(part.cells, part.root, options.details)])
        not_all_was_run |= sweep.stopped or sweep.refused > 0
        if sweep.pending:
            break
    return int(not_all_was_run or any(map(_has_failures, plan.slices)))


def _print_oom_warnings(part: Slice, cells: Sequence[Cell | Search], retry: bool, box: machine.Machine) -> None:
    """Print a warning for each pending cell for which the machine's memory may not suffice."""
    pending = [cell for cell in cells if isinstance(cell, Cell) and any(pending_runs(cell, part.root, retry))]
    for warning in oom_warnings(pending, box):
        print(warning, file=sys.stderr, flush=True)


def _has_failures(part: Slice) -> bool:
    """Whether a cell of the slice ended in a state that is neither a result nor an expected one."""
    for cell in part.cells:
        # For a probe, or a cell that demonstrates it, out of memory is an answer.
        oom = {"oom"} if isinstance(cell, Search) or cell.expect == "oom" else set[str]()
        states = {record.state for _, record in cell_states([cell], part.root)}
        if states - {"ok", "unsupported", "to do"} - oom:
            return True
    return False


def _print_notices(parts: Sequence[Slice], box: machine.Machine) -> None:
    """Print the other runs in a suite's folder, and the runs that this machine leaves out."""
    for part in {part.root: part for part in parts}.values():
        for notice in (part.runs_of_others(), runs_left_out(part.suite, box)):
            if notice:
                print(f"notice: {notice}", file=sys.stderr)


def _passes(parts: Sequence[Slice], retry: bool) -> Iterator[tuple[str, Slice, list[Cell | Search]]]:
    """Yield the slices with cells to run, first all cells that were never tried: another may hang in every call."""
    second = []
    for part in parts:
        new, tried = new_and_tried(part.cells, part.root, retry)
        if new:
            yield part.title, part, [item for item in part.cells if item not in tried]
        if tried:
            second.append((f"{part.title}, tried before", part, tried))
    yield from second


def _runnable(plan: Plan, box: machine.Machine) -> list[Slice]:
    """Return the slices of a series that the machine can run; if there are none, raise the first reason."""
    refusals = [missing_requirement(part.suite, box, part.cells) for part in plan.slices]
    missing = {refusal.problem: refusal for refusal in refusals if refusal is not None}
    if None not in refusals:
        raise next(iter(missing.values()))
    for problem in missing:
        print(f"notice: {problem}: left out", file=sys.stderr)
    return [part for part, refusal in zip(plan.slices, refusals, strict=True) if refusal is None]


def _dry_run(plan: Plan, options: argparse.Namespace, box: machine.Machine) -> int:
    """Print each cell's command and forecast; on a terminal without --details, forecasts that fit a screen."""
    name = options.hardware or ("this" if box.gpus else None)
    predicted_for = None if name is None else to_box(name)
    is_short = sys.stdout.isatty() and not options.details
    remaining: list[tuple[Cell | Search, float]] = []
    parts: list[tuple[str, ...]] = []
    cells: list[tuple[str, ...]] = []
    training_s = 0.0
    slices, limit = plan.slices, ""
    if options.time_budget is not None:
        slices = _slices_in_time(plan, options.time_budget, options.retry)
        limit = _limit_text(plan, slices, options.time_budget, options.retry)
    for part in slices:
        remaining_of_slice = list(pending_items(part.cells, part.root, options.retry))
        remaining += remaining_of_slice
        parts.append((part.title, estimate(remaining_of_slice, bool(part.searches))))
        forecast = Forecast(smallest_machine(part.suite, box), earlier_durations(part.root), predicted_for)
        if plan.is_series and not is_short:
            print(f"# {': '.join(parts[-1])}")
        if not is_short:
            _print_commands(part, forecast, options.retry)
        # A screen has only the parts of a series.
        elif not plan.is_series:
            cells += _forecast_rows(part, forecast, options.retry)
        training_s += sum(forecast.training_s(cell) or 0.0 for cell, _ in remaining_of_slice if isinstance(cell, Cell))
    if is_short:
        columns = ("part", "cells") if plan.is_series else ("strategy", "model", "world", "predicted")
        print_page(fit_screen([TextTable(columns, parts if plan.is_series else cells)], details=False))
    total = limit + estimate(remaining, any(part.searches for part in slices))
    if training_s and not any(seconds for _, seconds in remaining):
        total += f"; predicted training steps: {format_duration(training_s)}, plus start-up and evaluation of each cell"
    print_page([f"# {total}"], sys.stderr)
    return 0


def _slices_in_time(plan: Plan, time_budget_s: float, retry: bool) -> list[Slice]:
    """Return the slices with the cells that `study run` would start within this time."""
    started = {(item.id, root) for item, root in in_order(plan.slices, time_budget_s, retry)}
    slices = []
    for part in plan.slices:
        if items := [item for item in part.cells if (item.id, part.root) in started]:
            slices.append(dataclasses.replace(part, cells=items))
    return slices


def _limit_text(plan: Plan, slices: Sequence[Slice], time_budget_s: float, retry: bool) -> str:
    """Return how many cells of the plan start within this time, or that it is unknown."""
    budget = format_duration(time_budget_s)
    if not any(seconds for part in slices for _, seconds in pending_items(part.cells, part.root, retry)):
        return f"how many start within {budget} is unknown until a cell has run: "
    started, planned = (sum(len(part.cells) for part in group) for group in (slices, plan.slices))
    return f"within {budget} {started} of {planned} would start: "


def _print_commands(part: Slice, forecast: Forecast, retry: bool) -> None:
    """Print the command of each cell and of each search's next probe, with its forecast."""
    for cell, note in _next_runs(part, retry):
        texts = [] if cell is None else forecast.describe(cell)
        if note:
            print(f"# {note}")
        if cell is not None:
            expected = "  # expected to run out of memory" if cell.expect == "oom" else ""
            command = shlex.join(launch_command(cell, part.root / cell.id))
            print(f"{command}  # predicted: {', '.join(texts)}{expected}")


def _forecast_rows(part: Slice, forecast: Forecast, retry: bool) -> Iterator[tuple[str, ...]]:
    """Yield strategy, model, ranks and forecast of each cell and of each search's next probe."""
    for cell, note in _next_runs(part, retry):
        if cell is None:
            yield "-", "-", "-", note
        else:
            *figures, outcome = forecast.describe(cell)
            # The outcome first, because a long text is cut.
            yield cell.arm, cell.config.model_name, str(cell.ranks), ", ".join([outcome, *figures])


def _next_runs(part: Slice, retry: bool) -> Iterator[tuple[Cell | None, str]]:
    """Yield each cell, and for each search its next probe, or None if it is answered, with a note."""
    for item in part.cells:
        if isinstance(item, Cell):
            yield item, ""
        elif (cell := next(item.probes(part.root, retry), None)) is None:
            yield None, f"{item.id} is answered: {item.what_fits(part.root).answer}"
        else:
            sizes = f"{item.rungs[0]} to {item.rungs[-1]}"
            yield cell, f"{item.id} searches {sizes}: its next probe, which decides those after it"


def weights(options: argparse.Namespace) -> int:
    """Create the initial weights of the cells that have none, each set in a separate process that loads the model."""
    box = slurm.job_resources()
    plan = _plan(options, box)
    sets: dict[tuple[str, ...], tuple[Cell, Path]] = {}
    # Slices that the machine can run; if there are none, all.
    parts = [part for part in plan.slices if not missing_requirement(part.suite, box, part.cells)] or plan.slices
    for item, root in in_order(parts, options.time_budget):
        for cell in one_of_each_model(item):
            config = cell.config
            if not config.virtual_world_size:
                key = (config.task, config.model_name_or_path, config.weights, str(config.seed))
                sets.setdefault(key, (cell, root))
    if not sets:
        print(f"no remaining cell of {plan.name} needs initial weights")
        return 0
    stacks.check_training_packages()
    command = [sys.executable, "-m", "study.workloads.initial"]
    statuses = [
        subprocess.run([*command, *cell.flags(root / cell.id)], check=False).returncode for cell, root in sets.values()
    ]
    return 1 if any(statuses) else 0


def in_order(
    parts: Sequence[Slice], time_budget_s: float | None, retry: bool = False
) -> Iterator[tuple[Cell | Search, Path]]:
    """Yield the cells and searches that `study run` would start within this time, in its order."""
    spent = 0.0
    for _, part, cells in _passes(parts, retry):
        for cell, seconds in pending_items(cells, part.root, retry):
            spent += seconds
            if time_budget_s is not None and spent > time_budget_s:
                return
            yield cell, part.root


def status(options: argparse.Namespace) -> int:
    """Print how many cells are done, and the reasons of the others."""
    box = slurm.job_resources()
    plan = _plan(options, box)
    lacks = [missing_requirement(part.suite, box, part.cells) for part in plan.slices]
    verdict = status_verdict(plan, options, lacks[0].problem if lacks[0] is not None and all(lacks) else "")
    print_page([verdict, "", *fit_screen(list(status_tables(plan)), options.details)])
    return 0
