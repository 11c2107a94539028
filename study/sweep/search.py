"""Search for the largest micro-batch or model that fits, by bisection over probes; each probe is an ordinary cell.

The answer is not stored but read from the probes' records. It assumes that sizes below one that fits also fit; it names
records that contradict this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from study.records.outcome import Outcome
from study.records.schema import SearchAxis
from study.sweep.cell import Cell
from study.sweep.cell_outcome import cell_state


@dataclasses.dataclass(frozen=True)
class SearchAnswer:
    """Answer of a search by its probes so far, in positions on the ladder and as text, for a sweep and for a report.

    `next` is the next probe. Without it the search is over: it has the answer, or was `stopped_by` a probe that ended
    neither ok nor out of memory.
    """

    states: Mapping[int, Outcome]
    last: int
    # The size at a position of the ladder.
    size_at: Callable[[int], object]
    fits: int | None
    too_large: int | None
    next: int | None
    stopped_by: int | None
    non_monotonic_fits: tuple[int, ...]

    @property
    def state(self) -> str:
        if self.stopped_by is not None:
            return "stopped"
        if self.next is not None:
            return "searching" if self.states else "to do"
        return "found"

    @property
    def is_open(self) -> bool:
        """Whether a larger size might fit: the search is not over, was stopped, or reached the ladder's end."""
        return self.fits == self.last or self.next is not None or self.stopped_by is not None

    @property
    def answer(self) -> str:
        """The largest size that fits, with `at least` if a larger one might; `-` without a result."""
        fits, too_large = self.fits, self.too_large
        if fits is not None:
            return f"{'at least ' if self.is_open else ''}{self.size_at(fits)}"
        if too_large is None:
            return "-"
        return f"none, {self.size_at(0)} is too large" if too_large == 0 else f"under {self.size_at(too_large)}"

    @property
    def limiting_reason(self) -> str:
        """The reason that the search ended at this size, and the records that contradict the answer."""
        reasons = []
        if self.too_large is not None:
            reasons.append(f"{self.size_at(self.too_large)}: {self.states[self.too_large].reason}")
        elif self.fits == self.last:
            reasons.append("the ladder ends there")
        if self.stopped_by is not None:
            probe = self.states[self.stopped_by]
            reasons.append(f"stopped at {self.size_at(self.stopped_by)}: {probe.state}, {probe.reason}")
        if self.non_monotonic_fits:
            larger = ", ".join(str(self.size_at(place)) for place in self.non_monotonic_fits)
            reasons.append(f"but {larger} did fit, so fit does not depend on size alone here")
        return "; ".join(reasons)


def find_answer(
    states: Mapping[int, Outcome], last: int, size_at: Callable[[int], object], start: int = 0
) -> SearchAnswer:
    """Return the answer by the ended probes, whose states are given by position, with the next probe.

    The search takes exponential steps from `start`, the predicted rung: up until a probe runs out of memory, or down
    until one fits. Then it bisects. A right prediction costs two probes; from the first rung on, this is doubling.
    """
    too_large = min((place for place, probe in states.items() if probe.state == "oom"), default=None)
    oks = sorted(place for place, probe in states.items() if probe.state == "ok")
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
    stopped = not is_over and following in states
    return SearchAnswer(
        states,
        last,
        size_at,
        fits,
        too_large,
        next=None if is_over or stopped else following,
        stopped_by=following if stopped else None,
        non_monotonic_fits=tuple(place for place in oks if too_large is not None and place > too_large),
    )


@dataclasses.dataclass(frozen=True)
class Search:
    """A search over one ladder, for one combination of the grid's other values."""

    id: str
    axis: SearchAxis
    rungs: Sequence[int] | Sequence[str]
    # Settings that distinguish it from the other searches of its grid, apart from the strategy.
    label: str
    probe_at: Callable[[int], Cell]
    # Predicts the rung of the answer.
    guess: Callable[[], int] = lambda: 0

    @functools.cached_property
    def start(self) -> int:
        return self.guess()

    @property
    def first(self) -> Cell:
        return self.probe_at(0)

    @property
    def last(self) -> int:
        return len(self.rungs) - 1

    def states(
        self, root: Path, counts: Callable[[int, Outcome], bool] = lambda place, probe: True
    ) -> dict[int, Outcome]:
        """Return the states of the probes that have a record, by position, except those that do not count."""
        # All rungs: another machine starts at another rung, and may have probed above a size that did not fit.
        states = ((place, cell_state(root / self.probe_at(place).id)) for place in range(len(self.rungs)))
        return {place: probe for place, probe in states if probe.state != "to do" and counts(place, probe)}

    def _examine(self, states: Mapping[int, Outcome]) -> SearchAnswer:
        return find_answer(states, self.last, self.rungs.__getitem__, self.start)

    def probes(self, root: Path, retry: bool) -> Iterator[Cell]:
        """Yield the probes that remain; each is chosen from the records of the earlier ones."""
        tried: set[int] = set()

        def counts(place: int, probe: Outcome) -> bool:
            return place in tried or probe.state == "oom" or probe.is_final(retry)

        while True:
            answer = self._examine(self.states(root, counts))
            place = answer.next
            if place is None and answer.stopped_by is None and retry and answer.too_large not in tried:
                # --retry runs the probe that sets the limit again.
                place = answer.too_large
            if place is None:
                return
            tried.add(place)
            yield self.probe_at(place)

    def what_fits(self, root: Path) -> SearchAnswer:
        # An interrupted run has no result, and runs again.
        return self._examine(self.states(root, lambda place, probe: probe.state not in ("interrupted", "at work")))


def representative_cell(item: Cell | Search) -> Cell:
    """Return the cell, or the first probe of a search."""
    return item.first if isinstance(item, Search) else item


def list_runs(item: Cell | Search) -> list[Cell]:
    """Return the cell, or all probes that a search may run."""
    return [item.probe_at(place) for place in range(len(item.rungs))] if isinstance(item, Search) else [item]


def one_of_each_model(item: Cell | Search) -> list[Cell]:
    """Return one cell for each model that the cell or search uses."""
    return list_runs(item) if isinstance(item, Search) and item.axis == "largest_model" else [representative_cell(item)]


def pending_runs(item: Cell | Search, root: Path, retry: bool = False) -> Iterator[Cell]:
    """Yield the cell if it is unanswered, or one after another the probes that a search still needs."""
    if isinstance(item, Search):
        yield from item.probes(root, retry)
    elif not cell_state(root / item.id).is_final(retry):
        yield item


def new_and_tried(
    items: Iterable[Cell | Search], root: Path, retry: bool = False
) -> tuple[list[Cell | Search], list[Cell | Search]]:
    """Return two lists of unanswered items: those never tried, and those whose next run has a record."""
    new, tried = list[Cell | Search](), list[Cell | Search]()
    for item in items:
        if isinstance(item, Search) and not item.states(root):
            # No record to look for, and its first rung needs a prediction, which takes time.
            new.append(item)
        elif (run := next(pending_runs(item, root, retry), None)) is not None:
            (new if cell_state(root / run.id).state == "to do" else tried).append(item)
    return new, tried


def cell_states(cells: Iterable[Cell | Search], root: Path) -> list[tuple[Cell, Outcome]]:
    """Return each cell once with its state, and each probe that has a record."""
    states: dict[str, tuple[Cell, Outcome]] = {}
    for item in cells:
        if isinstance(item, Search):
            several = [(item.probe_at(place), probe) for place, probe in item.states(root).items()]
        else:
            several = [(item, cell_state(root / item.id))]
        states |= {cell.id: (cell, state) for cell, state in several}
    return list(states.values())
