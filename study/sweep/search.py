"""The largest micro-batch or model that fits, found by bisection over probes, each of them an ordinary cell.

The answer is never stored: it is read off the probes' records. It takes for granted that what fits at one rung fits at
every lower one; records that say otherwise are named with the answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from study.records.schema import SearchAxis
from study.sweep.cell import Cell
from study.sweep.verdict import CellState, cell_state


@dataclasses.dataclass(frozen=True)
class Bracket:
    """What the probes say so far, in positions on the ladder.

    `next` is the probe that would tell more; without it the search is over, found or `stopped_by` a probe that ended
    neither ok nor out of memory.
    """

    fits: int | None
    too_large: int | None
    next: int | None
    stopped_by: int | None
    fits_against_the_order: tuple[int, ...]


def examine(known: Mapping[int, str], last: int, start: int = 0) -> Bracket:
    """From the rung that is thought to be the answer by ever longer steps, up until one does not fit or down until one
    does; then bisection. A right guess takes two probes, and from the first rung on it is doubling.

    `known` says of each probe that has ended how it did, by its position.
    """
    too_large = min((place for place, state in known.items() if state == "oom"), default=None)
    oks = sorted(place for place, state in known.items() if state == "ok")
    fits = max((place for place in oks if too_large is None or place < too_large), default=None)
    is_over = fits == last if too_large is None else too_large == (0 if fits is None else fits + 1)
    if fits is not None and too_large is not None:
        following = (fits + too_large) // 2
    elif fits is not None and fits >= start:
        following = min(2 * fits - start + 1, last)
    elif too_large is not None and too_large <= start:
        following = max(2 * too_large - start - 1, 0)
    else:
        following = start
    stopped = not is_over and following in known
    return Bracket(
        fits=fits,
        too_large=too_large,
        next=None if is_over or stopped else following,
        stopped_by=following if stopped else None,
        fits_against_the_order=tuple(place for place in oks if too_large is not None and place > too_large),
    )


@dataclasses.dataclass(frozen=True)
class WhatFits:
    """The probes' answer in words, the same for a sweep's table and for a report."""

    bracket: Bracket
    last: int
    # By the position on the ladder: the size itself, and how its probe ended.
    size_at: Callable[[int], object]
    state_at: Callable[[int], CellState]

    @property
    def is_open(self) -> bool:
        """More might fit: the ladder ended first, or the search did."""
        return self.bracket.fits == self.last or self.bracket.next is not None or self.bracket.stopped_by is not None

    @property
    def answer(self) -> str:
        fits, too_large = self.bracket.fits, self.bracket.too_large
        if fits is not None:
            return f"{'at least ' if self.is_open else ''}{self.size_at(fits)}"
        if too_large is None:
            return "-"
        return f"none, {self.size_at(0)} is too large" if too_large == 0 else f"under {self.size_at(too_large)}"

    @property
    def why_not_more(self) -> str:
        """And which records contradict the answer."""
        bracket, said = self.bracket, []
        if bracket.too_large is not None:
            said.append(f"{self.size_at(bracket.too_large)}: {self.state_at(bracket.too_large).reason}")
        elif bracket.fits == self.last:
            said.append("the ladder ends there")
        if bracket.stopped_by is not None:
            probe = self.state_at(bracket.stopped_by)
            said.append(f"stopped at {self.size_at(bracket.stopped_by)}: {probe.state}, {probe.reason}")
        if bracket.fits_against_the_order:
            larger = ", ".join(str(self.size_at(place)) for place in bracket.fits_against_the_order)
            said.append(f"and yet {larger} did fit: what fits does not fit in order here")
        return "; ".join(said)


@dataclasses.dataclass(frozen=True)
class Search:
    """One ladder under one combination of a grid's other values."""

    id: str
    axis: SearchAxis
    rungs: Sequence[int] | Sequence[str]
    # How it differs from the other searches of its grid, beside the strategy.
    label: str
    probe_of: Callable[[int], Cell]
    # The rung that is predicted to be the answer.
    guess: Callable[[], int] = lambda: 0

    @functools.cached_property
    def start(self) -> int:
        return self.guess()

    @functools.cached_property
    def first(self) -> Cell:
        return self.probe_of(0)

    def states(
        self, root: Path, counts: Callable[[int, CellState], bool] = lambda place, probe: True
    ) -> dict[int, CellState]:
        """The probes that the search asks for, as far as their records go. A record that does not count is left out."""
        # Of every rung: another box would have begun elsewhere, and above one that did not fit another may have.
        states = ((place, cell_state(root / self.probe_of(place).id)) for place in range(len(self.rungs)))
        return {place: probe for place, probe in states if probe.state != "to do" and counts(place, probe)}

    def _examine(self, found: Mapping[int, CellState]) -> Bracket:
        return examine({place: probe.state for place, probe in found.items()}, self.last, self.start)

    @property
    def last(self) -> int:
        return len(self.rungs) - 1

    def probes(self, root: Path, retry: bool) -> Iterator[Cell]:
        """The probes that are still to run, one after another; each is chosen from the records of those before."""
        tried: set[int] = set()
        while (place := self._next(root, retry, tried)) is not None:
            tried.add(place)
            yield self.probe_of(place)

    def _next(self, root: Path, retry: bool, tried: set[int]) -> int | None:
        def counts(place: int, probe: CellState) -> bool:
            return place in tried or probe.state == "oom" or probe.is_answered(retry)

        bracket = self._examine(self.states(root, counts))
        if bracket.next is None and bracket.stopped_by is None and retry and bracket.too_large not in tried:
            # The record that sets the limit is the one to make again.
            return bracket.too_large
        return bracket.next

    def finding(self, root: Path) -> SearchResult:
        # A run that was cut off says nothing, and is run again.
        states = self.states(root, lambda place, probe: probe.state not in ("interrupted", "at work"))
        return SearchResult(self, self._examine(states), states)


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What the records of a search say, in the values of its ladder."""

    search: Search
    bracket: Bracket
    states: Mapping[int, CellState]

    @property
    def state(self) -> str:
        if self.bracket.stopped_by is not None:
            return "stopped"
        if self.bracket.next is not None:
            return "searching" if self.states else "to do"
        return "found"

    @property
    def what_fits(self) -> WhatFits:
        return WhatFits(self.bracket, self.search.last, self.search.rungs.__getitem__, self.states.__getitem__)


def example_of(item: Cell | Search) -> Cell:
    return item.first if isinstance(item, Search) else item


def one_of_each_model(item: Cell | Search) -> list[Cell]:
    if isinstance(item, Search) and item.axis == "largest_model":
        return [item.probe_of(place) for place in range(len(item.rungs))]
    return [example_of(item)]


def runs_left(item: Cell | Search, root: Path, retry: bool = False) -> Iterator[Cell]:
    """The cell, where it has no answer yet; of a search one probe after another, as long as it needs them."""
    if isinstance(item, Search):
        yield from item.probes(root, retry)
    elif not cell_state(root / item.id).is_answered(retry):
        yield item


def new_and_tried(
    items: Iterable[Cell | Search], root: Path, retry: bool = False
) -> tuple[list[Cell | Search], list[Cell | Search]]:
    """What is left of them: what nobody tried, and what has a run without an answer."""
    new, tried = list[Cell | Search](), list[Cell | Search]()
    for item in items:
        if isinstance(item, Search) and not item.states(root):
            # Which rung it begins at is a prediction, and takes its time.
            new.append(item)
        elif (run := next(runs_left(item, root, retry), None)) is not None:
            (new if cell_state(root / run.id).state == "to do" else tried).append(item)
    return new, tried


def cell_states(cells: Iterable[Cell | Search], root: Path) -> list[tuple[Cell, CellState]]:
    """The state of each cell, and of each probe that has a record; a cell that several name is there once."""
    found: dict[str, tuple[Cell, CellState]] = {}
    for item in cells:
        if isinstance(item, Search):
            several = [(item.probe_of(place), probe) for place, probe in item.states(root).items()]
        else:
            several = [(item, cell_state(root / item.id))]
        found |= {cell.id: (cell, state) for cell, state in several}
    return list(found.values())
