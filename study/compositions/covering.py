"""Designs in which every pair of levels that can meet meets in a run, or every pair under every engine."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from study.compositions.features import Combination, Never, Row, find_row, make_combination, read_rows, read_rules

# Levels of different rows: two, or an engine with two others.
Pair = frozenset[str]
# Combinations that are drawn for each run; the one with the most new pairs is taken.
_DRAWN: Final = 30
_TRIES_TO_COMPLETE: Final = 60

# Without these some features conflict with a default.
_COMPANIONS: Final = (("cpu_adam",), ("cpu_adam", "optimizer_cpu"), ("optimizer_cpu",))


class Design:
    """Draws combinations until every pair has been covered; findings on the way are left out of the next ones."""

    def __init__(self, seed: int = 0, levels: Collection[str] | None = None, *, per_engine: bool = False):
        """Levels outside `levels`, if it is given, are not drawn; `per_engine` covers every pair under every engine."""
        self._random = random.Random(seed)
        self._rows = {
            row.name: [level for level in row.levels if levels is None or level in levels or level == row.default]
            for row in read_rows().values()
        }
        self._forbidden: list[frozenset[str]] = []
        self._list = list_triples if per_engine else list_pairs
        # Whether a triple can be completed is found when it is drawn, since there are thousands.
        possible = self._possible_triples() if per_engine else self._possible_pairs()
        self.pairs = {pair for pair in possible if per_engine or self._completed(pair) is not None}
        # Pairs that may still be drawn, and pairs without a covering run: findings make the difference.
        self.uncovered = set(self.pairs)
        self._missing = set(self.pairs)

    @property
    def missing(self) -> set[Pair]:
        """The pairs that no covering run has, also those that findings keep from being drawn."""
        return self._missing & self.pairs

    def _possible_pairs(self) -> Iterator[Pair]:
        for levels, later_levels in itertools.combinations(self._rows.values(), 2):
            for first, second in itertools.product(levels, later_levels):
                if not _conflicts({first}, second):
                    yield frozenset((first, second))

    def _possible_triples(self) -> Iterator[Pair]:
        engines = self._rows["engine"]
        for pair in self._possible_pairs():
            for engine in engines if pair.isdisjoint(engines) else ():
                first, second = pair
                if not (_conflicts({engine}, first) or _conflicts({engine, first}, second)):
                    yield pair | {engine}

    def forbid(self, levels: Iterable[str]) -> None:
        """Draw no further combination with all of these levels."""
        self._forbidden.append(frozenset(levels))

    def drop(self, level: str) -> None:
        """Draw no further combination with a level."""
        self.forbid([level])
        self.pairs = {pair for pair in self.pairs if level not in pair}
        self.uncovered &= self.pairs

    def cover(self, combination: Combination) -> None:
        """Count the pairs of a run as covered."""
        covered = self._list(combination)
        self.uncovered -= covered
        self._missing -= covered

    def draw(self) -> Combination | None:
        """Return the next combination; None if no uncovered pair can be part of one."""
        candidates = sorted(self.uncovered, key=sorted)
        self._random.shuffle(candidates)
        for pair in candidates:
            first = self._completed(pair)
            if first is not None:
                drawn = [self._completed(pair) for _ in range(_DRAWN - 1)]
                possible = [first, *(combination for combination in drawn if combination is not None)]
                return max(possible, key=lambda combination: len(self._list(combination) & self.uncovered))
            # No combination with this pair is allowed any more, or any was.
            self.uncovered.discard(pair)
            if self._completed(pair, without_findings=True) is None:
                self.pairs.discard(pair)
        return None

    def single_features(self) -> list[Combination]:
        """Return every engine alone, and every other feature with one engine and the features that it needs."""
        # DeepSpeed's, the highest stage first, then torch's.
        engines = sorted(self._rows["engine"], key=lambda name: (not name.startswith("zero"), name == "hsdp"))
        engines.sort(key=lambda name: name if name.startswith("zero") else "", reverse=True)
        singles = [make_combination([engine]) for engine in engines]
        for row, levels in self._rows.items():
            for level in levels[1:] if row != "engine" else ():
                tried = (
                    make_combination([engine, level, *companion])
                    for companion in ((), *_COMPANIONS)
                    for engine in engines
                    if find_row(level).name not in {find_row(name).name for name in companion}
                )
                singles += itertools.islice((single for single in tried if single.conflict is None), 1)
        return singles

    def _completed(self, pair: Pair, *, without_findings: bool = False) -> Combination | None:
        """Return a combination with this pair, drawn at random; None if none was found.

        Findings do not forbid it `without_findings`.
        """
        for _ in range(_TRIES_TO_COMPLETE):
            levels = set(pair)
            open_rows = [row for row, names in self._rows.items() if levels.isdisjoint(names)]
            self._random.shuffle(open_rows)
            for row in open_rows:
                possible = [level for level in self._rows[row] if not _conflicts(levels, level)]
                if not possible:
                    break
                levels.add(self._random.choice(possible))
            else:
                chosen = frozenset(levels)
                if without_findings or not any(forbidden <= chosen for forbidden in self._forbidden):
                    return Combination(chosen)
        return None


def list_pairs(combination: Combination) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(combination.levels, 2)}


def list_triples(combination: Combination) -> set[Pair]:
    """Return the pairs of a combination's other levels, each with its engine."""
    engine = combination.level("engine")
    return {frozenset((engine, *pair)) for pair in itertools.combinations(combination.levels - {engine}, 2)}


def _conflicts(levels: Collection[str], level: str) -> bool:
    """Whether a level cannot join others that stand together. A rule with `unless` waits for the rows that may lift
    it."""
    joined = frozenset(levels) | {level}
    for rule, rows in _rules_about(level):
        if not any(joined.isdisjoint(row.levels) for row in rows) and rule.forbids(joined):
            return True
    return False


@functools.cache
def _rules_about(level: str) -> list[tuple[Never, list[Row]]]:
    """Return the rules that a level may decide, each with the rows that may lift it."""
    rules = [(rule, [find_row(name) for name in rule.unless]) for rule in read_rules()]
    return [
        (rule, rows)
        for rule, rows in rules
        if level in rule.first | rule.second or any(level in row.levels for row in rows)
    ]
