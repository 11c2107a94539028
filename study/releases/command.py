"""`study releases bisect`."""

from __future__ import annotations

import argparse
from pathlib import Path

from study.errors import UserError
from study.host.folders import folder_argument
from study.releases.bisect import SUITE, Bisection, bisect, changes_of, releases_between


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="bisect")
    bisection = actions.add_parser(
        "bisect",
        help="between which releases a strategy begins to train wrongly, and where it ends",
        allow_abbrev=False,
    )
    add = bisection.add_argument
    add("strategy", metavar="STRATEGY")
    add("--accumulation", type=int, default=4, metavar="N", help="micro-steps in a step; 4 by default")
    add("--between", nargs=2, metavar="RELEASE", help="two of study/releases/stacks.yaml; all of it by default")
    add("--repeat", type=int, default=1, metavar="N", help="runs of each release; a fault of luck needs several")
    add("--runs-dir", type=folder_argument, default=Path("runs"), metavar="DIR", help=f"records, in {SUITE} below it")


def run(options: argparse.Namespace) -> int:
    """Exit status 1 where no release of the range trains wrongly."""
    if options.repeat < 1:
        raise UserError(f"--repeat {options.repeat} runs nothing", "use 1 or more")
    releases = releases_between(options.between)
    asked = Bisection(
        options.strategy, options.accumulation, options.repeat, options.runs_dir / SUITE,
        lambda line: print(line, flush=True),
    )  # fmt: skip
    found = bisect(releases, asked.is_bad)
    if found is None:
        unknown = len(releases) - asked.judged
        print(f"of {releases[0]} to {releases[-1]} no release is bad, of {asked.judged} that could be judged"
              + (f"; {unknown} could not" if unknown else ""))  # fmt: skip
        return 1
    print("\n".join([*found.lines(), *changes_of(found, options.strategy, options.accumulation)]))
    return 0
