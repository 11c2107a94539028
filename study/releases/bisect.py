"""`study releases bisect`: between which releases a strategy begins to train wrongly, and where it ends.

The cells are those of the suite `releases`, in its folder: what has a record there is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from study.config.errors import UserError
from study.config.strategies import STRATEGY_NAMES
from study.host.box import Box, this_box
from study.host.folders import folder_argument
from study.host.stacks import THEN, package_version, release_order, stacks
from study.releases.causes import PACKAGES, Change, races_of, read_causes
from study.releases.verdict import Verdict, judge, tolerance_of, trace_at
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
        after = f"first good again: {self.first_good}; {self.last_bad} is bad" if self.first_good else \
            f"still bad in {self.last_bad}, the newest of this range that ran"  # fmt: skip
        return [f"first bad: {self.first_bad}{before}", after, "this is one bad span: others were not looked for"]


class Bisection:
    """Asks of releases whether they are good, each once, and runs what has no record."""

    def __init__(self, strategy: str, micro_steps: int, runs: int, root: Path, say: Callable[[str], None]):
        self._box, self._root, self._say, self._runs = this_box(), root, say, runs
        self._cell, self._single = _cells(strategy, micro_steps, self._box)
        self._known: dict[str, bool | None] = {}

    def is_bad(self, stack: str) -> bool | None:
        """None where the release refuses, crashes or cannot be installed, or is equal where a race is known of it: that
        is neither good nor bad."""
        if stack not in self._known:
            verdicts = self._verdicts(stack)
            worst = next((each for each in verdicts if each.kind == "different"), verdicts[0])
            self._known[stack] = {"equal": False, "different": True}.get(worst.kind)
            luck = ""
            if worst.kind == "equal" and self._races(stack):
                self._known[stack], luck = None, ", which proves nothing: it is known to differ sometimes"
            self._say(f"{stack}: {worst.says}{luck}")
        return self._known[stack]

    @property
    def judged(self) -> int:
        return sum(is_bad is not None for is_bad in self._known.values())

    def _races(self, stack: str) -> bool:
        micro_steps = self._cell.plan.gradient_accumulation_steps
        versions = {name: package_version(name) for name in PACKAGES} | dict(stacks()[stack].releases)
        return bool(races_of(versions, self._cell.strategy, micro_steps, "fp32", self._box.gpus > 0))

    def _verdicts(self, stack: str) -> list[Verdict]:
        single = dataclasses.replace(self._single, stack=stack)
        cells = [dataclasses.replace(self._cell, stack=stack, repeat=1 + repeat) for repeat in range(self._runs)]
        left = [cell for cell in (single, *cells) if not cell_state(self._root / cell.id).is_answered(retry=False)]
        if left:
            # Refuses a stack that nobody has made yet.
            stacks()[stack].why_not()
            if run_cells(left, self._root, self._box).stopped:
                raise KeyboardInterrupt
        right, *traces = (trace_at(self._root / cell.id) for cell in (single, *cells))
        return [judge(trace, right, tolerance_of("fp32", right, [])) for trace in traces]


def bisect(releases: Sequence[str], is_bad: Callable[[str], bool | None]) -> BisectResult | None:
    """The nearest good neighbours of a bad release; None where none is bad. `releases` from the oldest on."""
    bad = next((release for release in _halving(releases) if is_bad(release)), None)
    if bad is None:
        return None
    place = releases.index(bad)
    last_good, first_bad = _edge(releases[: place + 1][::-1], is_bad)
    first_good, last_bad = _edge(releases[place:], is_bad)
    return BisectResult(last_good, first_bad, last_bad, first_good)


def _halving(releases: Sequence[str]) -> list[str]:
    """The ends first, then middles of what is left between those that were asked."""
    order, spans = [releases[0], releases[-1]], [(0, len(releases) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(releases[middle])
            spans += [(low, middle), (middle, high)]
    return order


def _edge(releases: Sequence[str], is_bad: Callable[[str], bool | None]) -> tuple[str | None, str]:
    """From a bad release on: the good one where that ends, and the last bad one before it."""
    low, high = 0, len(releases) - 1
    while high > 0 and is_bad(releases[high]) is None:
        high -= 1
    if is_bad(releases[high]):
        return None, releases[high]
    while True:
        between = [place for place in _from_the_middle(low, high) if is_bad(releases[place]) is not None]
        if not between:
            return releases[high], releases[low]
        low, high = (between[0], high) if is_bad(releases[between[0]]) else (low, between[0])


def _from_the_middle(low: int, high: int) -> list[int]:
    return sorted(range(low + 1, high), key=lambda place: abs(2 * place - low - high))


def _cells(strategy: str, micro_steps: int, box: Box) -> tuple[Cell, Cell]:
    """In fp32 and clipping, as the suite has them: the strategy's, and that of one process."""
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
    """Those of study/releases/stacks.yaml beside today's Accelerate and torch, from the oldest on."""
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
    """What causes.yaml says of the releases where it came and went."""
    mine = [cause for cause in read_causes() if cause.shows_in(strategy, micro_steps, "fp32")]
    came = [(cause, "came with", cause.entered) for cause in mine
            if _is_between(cause.entered, found.last_good, found.first_bad)]  # fmt: skip
    went = [(cause, "went with", cause.left) for cause in mine
            if _is_between(cause.left, found.last_bad, found.first_good)]  # fmt: skip
    return [
        f"{cause.title}: {word} {change.release} {change.change}".rstrip() for cause, word, change in (*came, *went)
    ]


def _is_between(change: Change, before: str | None, after: str | None) -> bool:
    if before is None or after is None:
        return False
    return release_order(before) < release_order(change.release) <= release_order(after)


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
