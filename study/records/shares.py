"""Shares of counts with their exact intervals; `study benchmark` prints them without scipy."""

from __future__ import annotations

import math

CONFIDENCE = 0.95
# Halvings of the range of a share: the last digit of a float.
_HALVINGS = 60


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the exact binomial interval (Clopper-Pearson) of a share."""
    tail = (1 - CONFIDENCE) / 2
    low = _find_fraction(successes, trials, tail) if successes else 0.0
    high = _find_fraction(successes + 1, trials, 1 - tail) if successes < trials else 1.0
    return low, high


def share_upper_bound(successes: int, trials: int) -> float:
    """Return the one-sided upper bound (95 %) of a share; after 0 of many trials about 3 / trials."""
    return _find_fraction(successes + 1, trials, CONFIDENCE) if successes < trials else 1.0


def share_text(successes: int, trials: int) -> str:
    """Return a count with the interval of its share, such as "7 of 10 (35% to 93%)"."""
    if not trials:
        return "0 of 0"
    low, high = share_interval(successes, trials)
    return f"{successes} of {trials} ({low:.0%} to {high:.0%})"


def _find_fraction(least: int, trials: int, probability: float) -> float:
    """Return the share with which at least so many of the trials succeed with this probability."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _at_least(least, trials, middle) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_least(least: int, trials: int, fraction: float) -> float:
    counts = range(least, trials + 1)
    return sum(math.comb(trials, count) * fraction**count * (1 - fraction) ** (trials - count) for count in counts)
