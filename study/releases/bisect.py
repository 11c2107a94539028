"""`study releases bisect`: between which releases a strategy begins to compute wrongly, and where it ends.

The cells are those of the suite `releases`, in its folder: what has a record there is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from study.config.errors import UserError
from study.config.printing import print_page
from study.config.strategies import STRATEGY_NAMES
from study.host.box import Box, this_box
from study.host.folders import folder_argument
from study.host.stacks import THEN, package_version, release_order, stacks
from study.releases.causes import PACKAGES, races_of, read_causes
from study.releases.verdict import Reference, Verdict, trace_at
from study.sweep.cell import Cell
from study.sweep.execute import run_cells
from study.sweep.plan import plan_cells
from study.sweep.suite_file import find_suite, read_suite
from study.sweep.verdict import cell_state

SUITE = "releases"


@dataclasses.dataclass(frozen=True)
class BisectResult:
    """Neighbours among the releases that could be judged; None where the range does not have them."""

    last_good: str | None
    first_bad: str
    last_bad: str
    first_good: str | None

    def lines(self) -> list[str]:
        before = f"; {self.last_good} is good" if self.last_good else ": nothing older in this range is good"
        after = f"first good after it: {self.first_good}; {self.last_bad} is bad" if self.first_good else \
            f"still bad in {self.last_bad}, the newest of this range that ran"  # fmt: skip
        return [f"first bad: {self.first_bad}{before}", after, "this is one bad span; others were not searched for"]


class Bisection:
    """Finds out whether releases are good, each once, and runs what has no record."""

    def __init__(self, strategy: str, micro_steps: int, runs: int, root: Path):
        self._box, self._root, self._runs = this_box(), root, runs
        self._cell, self._single = _cells(strategy, micro_steps, self._box)
        self.known: dict[str, bool | None] = {}

    def is_bad(self, stack: str) -> bool | None:
        """Return None, neither good nor bad, where the release refuses, crashes or cannot be installed, or is equal and
        has a known race."""
        if stack not in self.known:
            verdicts = self._verdicts(stack)
            worst = next((each for each in verdicts if each.kind == "different"), verdicts[0])
            self.known[stack] = {"equal": False, "different": True}.get(worst.kind)
            luck = ""
            micro_steps = self._cell.plan.gradient_accumulation_steps
            versions = {name: package_version(name) for name in PACKAGES} | dict(stacks()[stack].releases)
            on_gpu = self._box.gpus > 0
            if worst.kind == "equal" and races_of(versions, self._cell.strategy, micro_steps, "fp32", on_gpu):
                self.known[stack], luck = None, ", which proves nothing: it is known to differ sometimes"
            print_page([f"{stack}: {worst.says}{luck}"])
        return self.known[stack]

    def _verdicts(self, stack: str) -> list[Verdict]:
        single = dataclasses.replace(self._single, stack=stack)
        cells = [dataclasses.replace(self._cell, stack=stack, repeat=1 + repeat) for repeat in range(self._runs)]
        left = [cell for cell in (single, *cells) if not cell_state(self._root / cell.id).is_answered(retry=False)]
        if left:
            # Refuses a stack that has not been made yet.
            stacks()[stack].why_not()
            if run_cells(left, self._root, self._box).stopped:
                raise KeyboardInterrupt
        reference = Reference("fp32", trace_at(self._root / single.id))
        return [reference.judge(trace_at(self._root / cell.id)) for cell in cells]


def bisect(releases: Sequence[str], is_bad: Callable[[str], bool | None]) -> BisectResult | None:
    """Return the nearest good neighbours of a bad release; None where none is bad. `releases` from the oldest on."""
    bad = next((release for release in _halving(releases) if is_bad(release)), None)
    if bad is None:
        return None
    place = releases.index(bad)
    last_good, first_bad = _edge(releases[: place + 1][::-1], is_bad)
    first_good, last_bad = _edge(releases[place:], is_bad)
    return BisectResult(last_good, first_bad, last_bad, first_good)


def _halving(releases: Sequence[str]) -> list[str]:
    """Return the ends first, then middles of the spans between those before."""
    order, spans = [releases[0], releases[-1]], [(0, len(releases) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(releases[middle])
            spans += [(low, middle), (middle, high)]
    return order


def _edge(releases: Sequence[str], is_bad: Callable[[str], bool | None]) -> tuple[str | None, str]:
    """Return the first good release after a bad one, and the last bad one before it."""
    low, high = 0, len(releases) - 1
    while high > 0 and is_bad(releases[high]) is None:
        high -= 1
    if is_bad(releases[high]):
        return None, releases[high]
    while True:
        from_the_middle = sorted(range(low + 1, high), key=lambda place: abs(2 * place - low - high))
        middle = next((place for place in from_the_middle if is_bad(releases[place]) is not None), None)
        if middle is None:
            return releases[high], releases[low]
        low, high = (middle, high) if is_bad(releases[middle]) else (low, middle)


def _cells(strategy: str, micro_steps: int, box: Box) -> tuple[Cell, Cell]:
    """Return the suite's cells with fp32 and clipping: the strategy's, and that of one process."""
    every = [cell for cell in plan_cells(read_suite(find_suite(SUITE)), box) if isinstance(cell, Cell)]
    every = [cell for cell in every if cell.config.precision == "fp32" and cell.config.max_grad_norm]
    mine = [cell for cell in every if cell.strategy == strategy]
    steps = {cell.plan.gradient_accumulation_steps: cell for cell in mine}
    if not mine or strategy == "single":
        known = {cell.strategy for cell in every} - {"single"}
        names = ", ".join(sorted(known, key=STRATEGY_NAMES.index))
        raise UserError(f"the suite {SUITE} does not compare {strategy!r}", f"use one of {names}")
    if micro_steps not in steps:
        raise UserError(
            f"the suite {SUITE} has no --accumulation {micro_steps}", f"use {' or '.join(map(str, sorted(steps)))}"
        )
    return steps[micro_steps], next(cell for cell in every if cell.strategy == "single")


def releases_between(ends: Sequence[str] | None) -> list[str]:
    """Return the stacks of stacks.yaml with today's Accelerate and torch, from the oldest on."""
    known = sorted((name for name in stacks() if not name.endswith(THEN)), key=release_order)
    for end in ends or ():
        if end not in known:
            raise UserError(
                f"--between: no stack is called {end!r}", f"use two of {', '.join(known)}, or add it to stacks.yaml"
            )
    first, last = sorted(map(release_order, ends)) if ends else (release_order(known[0]), release_order(known[-1]))
    found = [name for name in known if first <= release_order(name) <= last]
    if len(found) < 2:
        raise UserError("--between names one release", "name two")
    return found


def changes_of(found: BisectResult, strategy: str, micro_steps: int) -> list[str]:
    """Return the causes that came and went between these releases."""
    mine = [cause for cause in read_causes() if cause.shows_in(strategy, micro_steps, "fp32")]

    def lines(word: str, name: str, before: str | None, after: str | None) -> Iterator[str]:
        if before is None or after is None:
            return
        for cause in mine:
            change = getattr(cause, name)
            if release_order(before) < release_order(change.release) <= release_order(after):
                yield f"{cause.title}: {word} {change.release} {change.change}".rstrip()

    return [
        *lines("came with", "entered", found.last_good, found.first_bad),
        *lines("went with", "left", found.last_bad, found.first_good),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="bisect")
    text = "between which releases a strategy begins to compute wrongly, and where it ends"
    add = actions.add_parser("bisect", help=text, allow_abbrev=False).add_argument
    add("strategy", metavar="STRATEGY")
    add("--accumulation", type=int, default=4, metavar="N", help="micro-batches of an optimizer step; 4 by default")
    add("--between", nargs=2, metavar="RELEASE", help="two of study/releases/stacks.yaml; all of it by default")
    add("--repeat", type=int, default=1, metavar="N", help="runs of each release; a race needs several")
    add("--runs_dir", type=folder_argument, default=Path("runs"), metavar="DIR", help=f"records, in {SUITE} below it")


def run(options: argparse.Namespace) -> int:
    """Exit status 1 where no release of the range computes wrongly."""
    if options.repeat < 1:
        raise UserError(f"--repeat {options.repeat} runs nothing", "use 1 or more")
    releases = releases_between(options.between)
    asked = Bisection(options.strategy, options.accumulation, options.repeat, options.runs_dir / SUITE)
    found = bisect(releases, asked.is_bad)
    if found is None:
        judged = sum(is_bad is not None for is_bad in asked.known.values())
        unknown = f"; {len(releases) - judged} could not" if judged < len(releases) else ""
        print_page([f"of {releases[0]} to {releases[-1]} no release is bad, of {judged} that could be judged{unknown}"])
        return 1
    print_page([*found.lines(), *changes_of(found, options.strategy, options.accumulation)])
    return 0
