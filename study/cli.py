"""The `study` command. Its exit status: 0 done, 1 some run failed, 2 the request itself is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from study.doctor import command as doctor
from study.errors import UserError
from study.report import command as report
from study.sweep.box import check_requirements, this_box
from study.sweep.execute import run_cells, standings_of
from study.sweep.notes import estimate
from study.sweep.plan import Cell, plan_cells
from study.sweep.process import launch_command
from study.sweep.rehearsal import rehearsed
from study.sweep.search import Search
from study.sweep.suite_file import Suite, find_suite, read_suite
from study.sweep.tables import result_table, status_table
from study.virtual import command as virtual

_RESUME = """\
Cells that ended ok are never run again. Those that ended oom, timeout or unsupported are answered too, and are run
again with --retry only; interrupted and failed ones are run again by every call. Ctrl-C or a crash loses at most the
cell at work. A search chooses each probe from the records of those before it, and goes on from them.
ZERO_STUDY_HOST_MEMORY_GIB says how much memory this box has where it shows less than it can have.
"""


@dataclasses.dataclass(frozen=True)
class Command:
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="study", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, epilog=command.epilog, allow_abbrev=False)
        command.add_arguments(subparser)
    try:
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            subparsers.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return COMMANDS[options.command].run(options)
    except UserError as refusal:
        print(f"error: {refusal.problem}. To mend it: {refusal.mend}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:
        # `study status X | head`: whoever read has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message, f"{self.prog} --help lists what there is")


def _suite_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", metavar="SUITE", help="a name in study/suites/, or a path")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where records are kept")
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


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _suite_arguments(parser)
    parser.add_argument(
        "--time-budget", type=_duration, metavar="TIME", help="start no cell that would end later, such as 9m or 1h30m"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command of every cell, and run nothing")
    parser.add_argument("--retry", action="store_true", help="run oom, timeout and unsupported cells again")


def _duration(text: str) -> float:
    found = re.fullmatch(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 9m, 90s or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


def _plan(options: argparse.Namespace) -> tuple[Suite, list[Cell | Search], Path]:
    suite = read_suite(find_suite(options.suite))
    if options.rehearse:
        suite = rehearsed(suite)
    return suite, plan_cells(suite, this_box(), options.only), (options.runs_dir / suite.name).absolute()


def _run(options: argparse.Namespace) -> int:
    suite, cells, root = _plan(options)
    if options.dry_run:
        for cell in cells:
            _print_commands(cell, root, options.retry)
        print(f"# {estimate(cells, root, options.retry)}", file=sys.stderr)
        return 0
    box = this_box()
    check_requirements(suite, box)
    outcome = run_cells(cells, root, box, retry=options.retry, time_budget_s=options.time_budget)
    print(result_table(cells, root))
    states = Counter(standing.state for _, standing in standings_of(cells, root))
    if len(states) > 1:
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        print(f"\n{counts}; `study status {options.suite}` says why. What is mended is run again with --retry.")
    return 1 if outcome.stopped or _any_failed(cells, root) else 0


def _any_failed(cells: Sequence[Cell | Search], root: Path) -> bool:
    """A cell that ran out of memory has failed; a probe that did has answered."""
    for cell in cells:
        good = {"ok", "unsupported", "to do"} | ({"oom"} if isinstance(cell, Search) else set())
        if any(standing.state not in good for _, standing in standings_of([cell], root)):
            return True
    return False


def _print_commands(cell: Cell | Search, root: Path, retry: bool) -> None:
    if isinstance(cell, Cell):
        print(shlex.join(launch_command(cell, root / cell.id)))
        return
    probe = next(cell.probes(root, retry), None)
    if probe is None:
        print(f"# {cell.id} is answered: {cell.finding(root).answer()}")
        return
    print(f"# {cell.id} searches {cell.rungs[0]} to {cell.rungs[-1]}: its next probe, which decides those after it")
    print(shlex.join(launch_command(probe, root / probe.id)))


def _weights(options: argparse.Namespace) -> int:
    """Each set in a process of its own, which is all that holds the model and its libraries."""
    suite, cells, root = _plan(options)
    sets: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        for one in cell.distinct_models() if isinstance(cell, Search) else [cell]:
            config = one.config
            if not config.virtual_world_size:
                sets.setdefault((config.task, config.model_name_or_path, config.weights, str(config.seed)), one)
    if not sets:
        print(f"{suite.name} starts from no weights: all of its ranks are virtual")
    command = [sys.executable, "-m", "study.weights"]
    statuses = [subprocess.run([*command, *one.flags(root / one.id)], check=False).returncode for one in sets.values()]
    return 1 if any(statuses) else 0


def _status(options: argparse.Namespace) -> int:
    _, cells, root = _plan(options)
    print(status_table(standings_of(cells, root), [cell for cell in cells if isinstance(cell, Search)], root))
    return 0


def _report(options: argparse.Namespace) -> int:
    return report.run(_name_of(options.suite, options.runs_dir), options.runs_dir, options.output)


def _name_of(suite: str, runs_dir: Path) -> str:
    """Records decide: a folder of them is enough, and no suite file need be there any more."""
    try:
        return read_suite(find_suite(suite)).name
    except UserError:
        if Path(suite).name == suite and any((folder / suite).is_dir() for folder in (runs_dir, Path(report.REPORTS))):
            return suite
        raise


COMMANDS = {
    "run": Command("run a suite: every cell that is not done yet", _run_arguments, _run, _RESUME),
    "weights": Command(
        "draw the initial weights of a suite, so that no run's time pays for it", _suite_arguments, _weights
    ),
    "status": Command("where each cell of a suite stands, and why", _suite_arguments, _status),
    "virtual": Command("what one rank of N holds and sends", virtual.add_arguments, virtual.run, virtual.EPILOG),
    "report": Command("build the report of a suite's records", report.add_arguments, _report),
    "doctor": Command("what this box has, what it lacks, and the mend", doctor.add_arguments, doctor.run),
}

if __name__ == "__main__":
    sys.exit(main())
