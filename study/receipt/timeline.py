"""Memory over the time of the watched step: bytes in use at each change, by part at some of them. It imports no torch.

To find the parts of the bytes in use takes milliseconds. It is done at each new peak, and at other moments for at most
a tenth of the step's time. Between two of these moments of one phase the parts change evenly, and activations are the
rest.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from study.receipt.document import MEMORY_PARTS, MemoryTimeline, Phase, PhaseSpan

MAX_MOMENTS, MAX_PHASES = 400, 400
_MAX_NOTED = 8000
# Fractions of the peak: from the first one a change is noted, from the second one its parts are looked for.
_NOTED, _SPLIT = 0.005, 0.02
_SPLITS_FRACTION = 0.1

Parts = dict[str, int]


class Moment(NamedTuple):
    """Bytes in use, and bytes by part if they were looked for."""

    at_s: float
    total_bytes: int
    parts: Parts | None
    # Number of phases that had begun.
    phase: int = 0


class SplitMoment(NamedTuple):
    at_s: float
    total_bytes: int
    parts: Parts
    phase: int = 0


class MemoryLog:
    """Log of one watched step. The receipt works inside `with log:`, and the clock is stopped there."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        self._phases: list[tuple[Phase, float]] = []
        self._began = time.perf_counter()
        self._own_s = self._paused_at = 0.0
        self._splits_s = self._last_split_s = 0.0
        self._noted_bytes = self._split_bytes = 0
        self._is_new_phase = False
        self._peak_at_s: float | None = None
        self._end_s = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._phases = [("between", 0.0)]

    def __enter__(self) -> None:
        self._paused_at = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._own_s += time.perf_counter() - self._paused_at
        self._paused_at = 0.0

    def _now(self) -> float:
        return (self._paused_at or time.perf_counter()) - self._began - self._own_s

    def enter_phase(self, phase: Phase) -> None:
        if len(self._phases) < MAX_PHASES:
            self._phases.append((phase, self._now()))
            self._is_new_phase = True

    def add(self, total_bytes: int, parts: Parts | None) -> None:
        self._end_s = self._now()
        self._moments.append(Moment(self._end_s, total_bytes, parts, len(self._phases)))
        self._noted_bytes = total_bytes
        if parts is not None:
            self._split_bytes = total_bytes
        if len(self._moments) > _MAX_NOTED:
            self._moments = [it for place, it in enumerate(self._moments) if it.parts is not None or place % 2]

    def add_peak(self, total_bytes: int, parts: Parts) -> None:
        self.add(total_bytes, parts)
        self._peak_at_s = self._end_s

    def replace_peak(self, total_bytes: int, parts: Parts) -> None:
        """Correct the peak, which is the last moment."""
        self._moments[-1] = self._moments[-1]._replace(total_bytes=total_bytes, parts=parts)

    def note(self, total_bytes: int, peak_bytes: int, split: Callable[[], Parts]) -> None:
        """Add a moment below the peak if the bytes in use have changed; with its parts if there is time."""
        if not self._is_new_phase and abs(total_bytes - self._noted_bytes) < _NOTED * peak_bytes:
            return
        parts = None
        has_changed = self._is_new_phase or abs(total_bytes - self._split_bytes) >= _SPLIT * peak_bytes
        if has_changed and self._has_time():
            began = time.perf_counter()
            parts = split()
            self._last_split_s = time.perf_counter() - began
            self._splits_s += self._last_split_s
        self._is_new_phase = False
        self.add(total_bytes, parts)

    def _has_time(self) -> bool:
        elapsed = time.perf_counter() - self._began
        return self._splits_s + self._last_split_s <= _SPLITS_FRACTION * elapsed and len(self._moments) < _MAX_NOTED

    @property
    def timeline(self) -> MemoryTimeline | None:
        """The timeline of a step that has ended; None if it had no peak."""
        if self._peak_at_s is None:
            return None
        rows = thinned(list(_split_all(self._moments)), MAX_MOMENTS, self._peak_at_s)
        columns = {part: tuple(row.parts[part] for row in rows) for part in MEMORY_PARTS}
        return MemoryTimeline(
            peak_at_s=_rounded(self._peak_at_s),
            at_s=tuple(_rounded(row.at_s) for row in rows),
            total_bytes=tuple(row.total_bytes for row in rows),
            parts={part: column for part, column in columns.items() if any(column)},
            phases=tuple(self._spans()),
        )

    def _spans(self) -> Iterator[PhaseSpan]:
        begins = [begin for _, begin in self._phases]
        for (phase, begin), end in zip(self._phases, [*begins[1:], self._end_s], strict=True):
            if end > begin:
                yield PhaseSpan(phase=phase, begin_s=_rounded(begin), end_s=_rounded(end))


def _split_all(moments: Sequence[Moment]) -> Iterator[SplitMoment]:
    """Yield the moments from the first one with parts on; those without parts have parts between their neighbors'."""
    split_moments = [SplitMoment(*it[:2], it.parts, it.phase) for it in moments if it.parts is not None]
    times = [it.at_s for it in split_moments]
    for moment in moments:
        place = bisect.bisect_right(times, moment.at_s)
        if moment.parts is not None:
            yield SplitMoment(*moment[:2], moment.parts, moment.phase)
        elif place:
            yield _between(moment, split_moments[place - 1], split_moments[min(place, len(split_moments) - 1)])


def _between(moment: Moment, before: SplitMoment, after: SplitMoment) -> SplitMoment:
    span = after.at_s - before.at_s
    # Parts such as gradients are freed at once, between two phases.
    fraction = (moment.at_s - before.at_s) / span if span > 0 and before.phase == after.phase else 0.0

    def mixed(first: int, second: int) -> int:
        return round(first + fraction * (second - first))

    parts = {part: mixed(before.parts[part], after.parts[part]) for part in MEMORY_PARTS}
    missing = mixed(_missing(before), _missing(after))
    other_bytes = sum(count for part, count in parts.items() if part != "activations")
    parts["activations"] = max(0, moment.total_bytes - missing - other_bytes)
    return SplitMoment(*moment[:2], parts, moment.phase)


def _missing(moment: SplitMoment) -> int:
    """Return the bytes in use that no part explains."""
    return moment.total_bytes - sum(moment.parts.values())


def thinned(rows: Sequence[SplitMoment], most: int, kept_at_s: float) -> list[SplitMoment]:
    """Return at most this many rows: the first, the last, that of a time, and the extremes of each stretch."""
    if len(rows) <= most:
        return list(rows)
    places_kept = {0, len(rows) - 1, *(place for place, row in enumerate(rows) if row.at_s == kept_at_s)}
    stretches = (most - len(places_kept)) // 2
    for stretch in range(stretches):
        places = range(len(rows) * stretch // stretches, len(rows) * (stretch + 1) // stretches)
        places_kept |= {choose(places, key=lambda place: rows[place].total_bytes) for choose in (min, max)}
    return [rows[place] for place in sorted(places_kept)]


def _rounded(seconds: float) -> float:
    return round(seconds, 7)
