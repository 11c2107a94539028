"""The `study` command. Its exit status: 0 done, 1 some run failed, 2 the request itself is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from study.doctor import command as doctor
from study.errors import UserError
from study.sweep.box import check_requirements, this_box
from study.sweep.execute import run_cells, standings_of
from study.sweep.plan import Cell, plan_cells
from study.sweep.process import launch_command
from study.sweep.suite_file import Suite, find_suite, read_suite
from study.sweep.tables import result_table, status_table

_RESUME = """\
Cells that ended ok are never run again. Those that ended oom, timeout or unsupported are answered too, and are run
again with --retry only; interrupted and failed ones are run again by every call. Ctrl-C or a crash loses at most the
cell at work.
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
        options = parser.parse_args(arguments)
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
    parser.add_argument("--only", metavar="GLOB", help="only the cells whose id matches, such as '*-zero3-*'")


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


def _plan(options: argparse.Namespace) -> tuple[Suite, list[Cell], Path]:
    suite = read_suite(find_suite(options.suite))
    return suite, plan_cells(suite, this_box(), options.only), (options.runs_dir / suite.name).absolute()


def _run(options: argparse.Namespace) -> int:
    suite, cells, root = _plan(options)
    if options.dry_run:
        for cell in cells:
            print(shlex.join(launch_command(cell, root / cell.id)))
        return 0
    box = this_box()
    check_requirements(suite, box)
    outcome = run_cells(cells, root, box, retry=options.retry, time_budget_s=options.time_budget)
    print(result_table(cells, root))
    states = Counter(standing.state for _, standing in standings_of(cells, root))
    if len(states) > 1:
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        print(f"\n{counts}; `study status {options.suite}` says why. What is mended is run again with --retry.")
    return 1 if outcome.stopped or set(states) - {"ok", "unsupported", "to do"} else 0


def _status(options: argparse.Namespace) -> int:
    _, cells, root = _plan(options)
    print(status_table(standings_of(cells, root)))
    return 0


COMMANDS = {
    "run": Command("run a suite: every cell that is not done yet", _run_arguments, _run, _RESUME),
    "status": Command("where each cell of a suite stands, and why", _suite_arguments, _status),
    "doctor": Command("what this box has, what it lacks, and the mend", doctor.add_arguments, doctor.run),
}

if __name__ == "__main__":
    sys.exit(main())
