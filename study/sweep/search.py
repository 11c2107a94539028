"""The largest micro-batch or model that fits, found by bisection over probes, each of them an ordinary cell.

The answer is not stored: it is read from the probes' records. It assumes that what fits at one rung fits at every lower
one; records that contradict this are named with the answer.
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
    """Result of the probes so far, in positions on the ladder.

    `next` is the next probe; without it the search is over: found, or `stopped_by` a probe that ended neither ok nor
    out of memory.
    """

    fits: int | None
    too_large: int | None
    next: int | None
    stopped_by: int | None
    fits_against_the_order: tuple[int, ...]


def examine(known: Mapping[int, str], last: int, start: int = 0) -> Bracket:
    """Return the bracket of the states of the probes that ended, by position.

    From the rung that is predicted to be the answer by ever longer steps, up until one does not fit or down until one
    does; then bisection. A right prediction costs two probes; from the first rung on, this is doubling.
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
    # The size at a position of the ladder.
    size_at: Callable[[int], object]
    states: Mapping[int, CellState]

    @property
    def state(self) -> str:
        if self.bracket.stopped_by is not None:
            return "stopped"
        if self.bracket.next is not None:
            return "searching" if self.states else "to do"
        return "found"

    @property
    def is_open(self) -> bool:
        """Whether more might fit: the ladder ended first, or the search did."""
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
        """The limit, and the records that contradict the answer."""
        bracket, said = self.bracket, []
        if bracket.too_large is not None:
            said.append(f"{self.size_at(bracket.too_large)}: {self.states[bracket.too_large].reason}")
        elif bracket.fits == self.last:
            said.append("the ladder ends there")
        if bracket.stopped_by is not None:
            probe = self.states[bracket.stopped_by]
            said.append(f"stopped at {self.size_at(bracket.stopped_by)}: {probe.state}, {probe.reason}")
        if bracket.fits_against_the_order:
            larger = ", ".join(str(self.size_at(place)) for place in bracket.fits_against_the_order)
            said.append(f"but {larger} did fit: sizes do not fit in order here")
        return "; ".join(said)


@dataclasses.dataclass(frozen=True)
class Search:
    """One ladder under one combination of a grid's other values."""

    id: str
    axis: SearchAxis
    rungs: Sequence[int] | Sequence[str]
    # The difference to the other searches of its grid, apart from the strategy.
    label: str
    probe_of: Callable[[int], Cell]
    # The rung that is predicted to be the answer.
    guess: Callable[[], int] = lambda: 0

    @functools.cached_property
    def start(self) -> int:
        return self.guess()

    @property
    def first(self) -> Cell:
        return self.probe_of(0)

    @property
    def last(self) -> int:
        return len(self.rungs) - 1

    def states(
        self, root: Path, counts: Callable[[int, CellState], bool] = lambda place, probe: True
    ) -> dict[int, CellState]:
        """Return the probes that have a record, by position, except those that do not count."""
        # Of every rung: another box starts elsewhere, and may have probed above a rung that did not fit.
        states = ((place, cell_state(root / self.probe_of(place).id)) for place in range(len(self.rungs)))
        return {place: probe for place, probe in states if probe.state != "to do" and counts(place, probe)}

    def _examine(self, found: Mapping[int, CellState]) -> Bracket:
        return examine({place: probe.state for place, probe in found.items()}, self.last, self.start)

    def probes(self, root: Path, retry: bool) -> Iterator[Cell]:
        """Yield the probes that are still to run; each is chosen from the records of those before."""
        tried: set[int] = set()

        def counts(place: int, probe: CellState) -> bool:
            return place in tried or probe.state == "oom" or probe.is_answered(retry)

        while True:
            bracket = self._examine(self.states(root, counts))
            place = bracket.next
            if place is None and bracket.stopped_by is None and retry and bracket.too_large not in tried:
                # With --retry, the record that sets the limit is made again.
                place = bracket.too_large
            if place is None:
                return
            tried.add(place)
            yield self.probe_of(place)

    def what_fits(self, root: Path) -> WhatFits:
        # An interrupted run proves nothing, and is run again.
        states = self.states(root, lambda place, probe: probe.state not in ("interrupted", "at work"))
        return WhatFits(self._examine(states), self.last, self.rungs.__getitem__, states)


def example_of(item: Cell | Search) -> Cell:
    return item.first if isinstance(item, Search) else item


def runs_of(item: Cell | Search) -> list[Cell]:
    return [item.probe_of(place) for place in range(len(item.rungs))] if isinstance(item, Search) else [item]


def one_of_each_model(item: Cell | Search) -> list[Cell]:
    return runs_of(item) if isinstance(item, Search) and item.axis == "largest_model" else [example_of(item)]


def runs_left(item: Cell | Search, root: Path, retry: bool = False) -> Iterator[Cell]:
    """Yield the cell if it has no answer; the probes of a search one after another, as long as it needs them."""
    if isinstance(item, Search):
        yield from item.probes(root, retry)
    elif not cell_state(root / item.id).is_answered(retry):
        yield item


def new_and_tried(
    items: Iterable[Cell | Search], root: Path, retry: bool = False
) -> tuple[list[Cell | Search], list[Cell | Search]]:
    """Return the unanswered items: those never tried, and those whose next run has a record."""
    new, tried = list[Cell | Search](), list[Cell | Search]()
    for item in items:
        if isinstance(item, Search) and not item.states(root):
            # Its first rung is a prediction, which takes time.
            new.append(item)
        elif (run := next(runs_left(item, root, retry), None)) is not None:
            (new if cell_state(root / run.id).state == "to do" else tried).append(item)
    return new, tried


def cell_states(cells: Iterable[Cell | Search], root: Path) -> list[tuple[Cell, CellState]]:
    """Return the state of each cell, and of each probe that has a record; each cell once."""
    found: dict[str, tuple[Cell, CellState]] = {}
    for item in cells:
        if isinstance(item, Search):
            several = [(item.probe_of(place), probe) for place, probe in item.states(root).items()]
        else:
            several = [(item, cell_state(root / item.id))]
        found |= {cell.id: (cell, state) for cell, state in several}
    return list(found.values())
