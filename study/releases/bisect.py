"""`study releases bisect`: find the releases that introduced and fixed a strategy's divergence from one process.

It runs cells of the suite `releases` in the suite's folder, and reuses the records that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from study.config.errors import UserError
from study.config.printing import print_page, print_result
from study.config.strategies import STRATEGY_NAMES
from study.host.folders import folder_argument
from study.host.machine import detect_machine
from study.host.stacks import check_training_packages, is_of_today, package_version, release_key, stacks
from study.releases.causes import PACKAGES, find_races, read_causes
from study.releases.verdict import Reference, trace_at
from study.sweep.cell import Cell
from study.sweep.cell_outcome import cell_state
from study.sweep.execute import run_cells
from study.sweep.plan import plan_cells
from study.sweep.suite_file import find_suite, read_suite

SUITE = "releases"
# Of flags that only bisect takes.
_DEFAULTS = {"accumulation": 4, "repeat": 1, "runs_dir": Path("runs")}


@dataclasses.dataclass(frozen=True)
class BisectResult:
    """Boundaries of one span of bad releases, among those that were judged; None if the range has no good one there."""

    last_good: str | None
    first_bad: str
    last_bad: str
    first_good: str | None

    def lines(self) -> list[str]:
        before = f"; {self.last_good} is good" if self.last_good else ": nothing older in this range is good"
        after = (
            f"first good after it: {self.first_good}; {self.last_bad} is bad"
            if self.first_good
            else f"still bad in {self.last_bad}, the newest of this range that ran"
        )
        return [f"first bad: {self.first_bad}{before}", after, "this is one bad span; others were not searched for"]


class Bisection:
    """Judges releases for one strategy, each once; runs the cells that have no record yet."""

    def __init__(self, strategy: str, micro_steps: int, runs: int, root: Path, progress: TextIO):
        self._box, self._root, self._runs, self._progress = detect_machine(), root, runs, progress
        self.verdicts: dict[str, bool | None] = {}
        # The suite's cell of the strategy in fp32 with clipping, and that of one process.
        cells = [cell for cell in plan_cells(read_suite(find_suite(SUITE)), self._box) if isinstance(cell, Cell)]
        cells = [cell for cell in cells if cell.config.precision == "fp32" and cell.config.max_grad_norm]
        steps = {cell.plan.gradient_accumulation_steps: cell for cell in cells if cell.strategy == strategy}
        if not steps or strategy == "single":
            names = sorted({cell.strategy for cell in cells} - {"single"}, key=STRATEGY_NAMES.index)
            raise UserError(f"the suite {SUITE} does not compare {strategy!r}", f"use one of {', '.join(names)}")
        if micro_steps not in steps:
            problem = f"the suite {SUITE} has no --accumulation {micro_steps}"
            raise UserError(problem, f"use {' or '.join(map(str, sorted(steps)))}")
        self._cell, self._single = steps[micro_steps], next(cell for cell in cells if cell.strategy == "single")

    def is_bad(self, stack: str) -> bool | None:
        """Whether the release diverges; None if it rejects the run, crashes or is not installable, or if its runs are
        equal and it has a known race condition."""
        if stack not in self.verdicts:
            single = dataclasses.replace(self._single, stack=stack)
            cells = [dataclasses.replace(self._cell, stack=stack, repeat=1 + repeat) for repeat in range(self._runs)]
            pending = [cell for cell in (single, *cells) if not cell_state(self._root / cell.id).is_final(retry=False)]
            if pending:
                # Raises UserError for a stack that is not installed.
                stacks()[stack].install_error()
                if run_cells(pending, self._root, self._box).stopped:
                    raise KeyboardInterrupt
            reference = Reference("fp32", trace_at(self._root / single.id))
            verdicts = [reference.judge(trace_at(self._root / cell.id)) for cell in cells]
            worst = next((verdict for verdict in verdicts if verdict.kind == "different"), verdicts[0])
            self.verdicts[stack] = {"equal": False, "different": True}.get(worst.kind)
            note = ""
            micro_steps = self._cell.plan.gradient_accumulation_steps
            versions = {name: package_version(name) for name in PACKAGES} | dict(stacks()[stack].releases)
            on_gpu = self._box.gpus > 0
            if worst.kind == "equal" and find_races(versions, self._cell.strategy, micro_steps, "fp32", on_gpu):
                self.verdicts[stack], note = None, ", which proves nothing: the release has a known race condition"
            print_page([f"{stack}: {worst.describe}{note}"], self._progress)
        return self.verdicts[stack]


def bisect(releases: Sequence[str], is_bad: Callable[[str], bool | None]) -> BisectResult | None:
    """Return the good releases nearest to a bad one, on both sides; None if none is bad. The oldest comes first."""
    # Both ends, then the middle of each remaining span.
    order, spans = [0, len(releases) - 1], [(0, len(releases) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    bad = next((index for index in order if is_bad(releases[index])), None)
    if bad is None:
        return None
    last_good, first_bad = _edge(releases[: bad + 1][::-1], is_bad)
    first_good, last_bad = _edge(releases[bad:], is_bad)
    return BisectResult(last_good, first_bad, last_bad, first_good)


def _edge(releases: Sequence[str], is_bad: Callable[[str], bool | None]) -> tuple[str | None, str]:
    """Return the nearest good release after the first one, which is bad, and the last bad one before it."""
    low, high = 0, len(releases) - 1
    while high > 0 and is_bad(releases[high]) is None:
        high -= 1
    if is_bad(releases[high]):
        return None, releases[high]
    while True:
        candidates = sorted(range(low + 1, high), key=lambda index: abs(2 * index - low - high))
        middle = next((index for index in candidates if is_bad(releases[index]) is not None), None)
        if middle is None:
            return releases[high], releases[low]
        low, high = (middle, high) if is_bad(releases[middle]) else (low, middle)


def releases_between(ends: Sequence[str] | None) -> list[str]:
    """Return the stacks of stacks.yaml with today's Accelerate and torch, the oldest first."""
    names = sorted(filter(is_of_today, stacks()), key=release_key)
    for end in ends or ():
        if end not in names:
            problem = f"--between: there is no stack {end!r}"
            raise UserError(problem, f"use two of {', '.join(names)}, or add it to stacks.yaml")
    first, last = sorted(map(release_key, ends)) if ends else (release_key(names[0]), release_key(names[-1]))
    selected = [name for name in names if first <= release_key(name) <= last]
    if len(selected) < 2:
        raise UserError("--between spans a single release", "name two releases")
    return selected


def describe_changes(result: BisectResult, strategy: str, micro_steps: int) -> list[str]:
    """Describe the known causes that were introduced or fixed at the boundaries of a bad span."""
    lines = []
    for word, name, before, after in (
        ("introduced in", "entered", result.last_good, result.first_bad),
        ("fixed in", "left", result.last_bad, result.first_good),
    ):
        if before is None or after is None:
            continue
        for cause in read_causes():
            change, is_possible = getattr(cause, name), cause.shows_in(strategy, micro_steps, "fp32")
            is_between = release_key(before) < release_key(change.release) <= release_key(after)
            if cause.optimizer == "adamw" and is_possible and is_between:
                lines.append(f"{cause.title}: {word} {change.release} {change.change}".rstrip())
    return lines


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    accumulation = f"accumulation steps; default: {_DEFAULTS['accumulation']}"
    add("--accumulation", type=int, metavar="N", help=accumulation)
    add("--between", nargs=2, metavar="RELEASE", help="two releases of stacks.yaml; default: all")
    add("--repeat", type=int, metavar="N", help="runs per release, default: 1; a race condition needs several")
    where = f"folder of records; uses DIR/{SUITE}; default: {_DEFAULTS['runs_dir']}"
    add("--runs_dir", type=folder_argument, metavar="DIR", help=where)


def check_flags(options: argparse.Namespace) -> None:
    """Raise UserError for a flag of bisect where nothing is bisected."""
    for name in ("accumulation", "between", "repeat", "runs_dir"):
        if getattr(options, name) is not None:
            fix = "leave it out: the answer has both, with and without accumulation"
            if name != "accumulation":
                fix = "leave it out, or bisect: study releases bisect zero1"
            elif hasattr(options, "features"):
                fix = "add the feature accumulation, which is of 4 steps"
            raise UserError(f"--{name} is for study releases bisect", fix)


def fill_options(options: argparse.Namespace) -> None:
    """Set the flags that are left out to their defaults; UserError for a number of runs that is none."""
    for name, default in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.repeat < 1:
        raise UserError(f"--repeat {options.repeat} is out of range", "use 1 or more")
    check_training_packages()


def progress_stream(options: argparse.Namespace) -> TextIO:
    """Return the stream of progress: with --json standard output has the document alone."""
    return sys.stderr if options.json else sys.stdout


def run(options: argparse.Namespace) -> int:
    """Print the result of the bisection; return exit status 1 if no release of the range is bad."""
    if not options.strategy:
        raise UserError("bisect needs a strategy", "name one, such as zero1, or a combination: --features zero1,muon")
    fill_options(options)
    root = options.runs_dir / SUITE
    bisection = Bisection(options.strategy, options.accumulation, options.repeat, root, progress_stream(options))
    return print_bisected(
        options,
        {"strategy": options.strategy, "accumulation": options.accumulation},
        bisection,
        lambda result: describe_changes(result, options.strategy, options.accumulation),
    )


class ReleaseJudge(Protocol):
    """Judges releases, each once."""

    verdicts: dict[str, bool | None]

    def is_bad(self, stack: str) -> bool | None: ...


def print_bisected(
    options: argparse.Namespace,
    subject: dict[str, Any],
    judge: ReleaseJudge,
    describe: Callable[[BisectResult], Iterable[str]],
) -> int:
    """Print the boundaries of a bad span with its changes; return exit status 1 if no release is bad.

    `subject`: the bisected strategy or features, as JSON has them.
    """
    releases = releases_between(options.between)
    result = bisect(releases, judge.is_bad)
    changes = list(describe(result)) if result else []
    document = {
        **subject,
        "releases": releases,
        # True: bad. None: not judged.
        "judged": judge.verdicts,
        "span": dataclasses.asdict(result) if result else None,
        "changes": changes,
    }
    if result is None:
        judged = sum(is_bad is not None for is_bad in judge.verdicts.values())
        not_judged = f", {len(releases) - judged} could not be" if judged < len(releases) else ""
        lines = [f"no release of {releases[0]} to {releases[-1]} is bad; {judged} were judged{not_judged}"]
    else:
        lines = [*result.lines(), *changes]
    print_result(options.json, lambda: document, lines)
    return 1 if result is None else 0
