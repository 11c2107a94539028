"""When losses may be called equal, and how many seeds it takes to see a change."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import special

from study.report.records.statistics import SIGNIFICANCE, t_quantile

# A tenth of the smallest difference in loss that the studied documents claim (1.18 %, training loss, S2-01).
LOSS_MARGIN = 0.0012
# How far apart neighbouring bf16 numbers are. Two engines compute logits that differ by one such step, which is no
# difference in training.
BF16_SPACING = 2.0**-8
_POWER = 0.8
_MOST_SEEDS = 10_000


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests: is the mean paired difference of a loss within the margin? No p without its n."""

    n: int
    margin: float
    mean_difference: float | None
    p: float | None
    verdict: Literal["equivalent", "not shown", "no test"]
    reason: str

    def text(self) -> str:
        if self.mean_difference is None:
            return self.reason
        measured = f"mean difference {self.mean_difference:+.2g}, margin {self.margin:.2g}, n = {self.n}"
        return f"{self.reason} ({measured}{'' if self.p is None else f', p = {self.p:.2g}'})"


def equivalence(values: Sequence[float], baselines: Sequence[float], margin: float = LOSS_MARGIN) -> Equivalence:
    """`margin` is a share of the baselines' mean; values and baselines are pairs, one for each seed."""
    differences = np.asarray(values, dtype=float) - np.asarray(baselines, dtype=float)
    n = len(differences)
    if not n:
        return Equivalence(0, margin, None, None, "no test", "no run to pair with")
    bound = margin * abs(float(np.mean(baselines)))
    mean = float(differences.mean())

    result = functools.partial(Equivalence, n, bound, mean)
    if n < 2:
        return result(None, "no test", "one seed: no test")
    if np.ptp(differences) <= 1e-12 * max(abs(mean), bound):
        inside = abs(mean) < bound
        reason = "the same difference every time: no spread to test against"
        return result(None, "equivalent" if inside else "not shown", reason)
    # Of two tests, above -bound and below +bound, that of the nearer end.
    p = float(special.stdtr(n - 1, (abs(mean) - bound) / (differences.std(ddof=1) / math.sqrt(n))))
    shown = p < SIGNIFICANCE
    return result(p, "equivalent" if shown else "not shown", "equivalent" if shown else "equivalence is not shown")


def seeds_needed(claim: float, spread: float) -> int | None:
    """How many pairs of runs a paired t-test needs to see a change of `claim`, where pairs scatter by `spread`.

    Both are shares of the figure. None where ten thousand are not enough.
    """
    if claim <= 0 or spread < 0:
        raise ValueError(f"a claim of {claim} with a spread of {spread} asks for nothing")
    if spread == 0:
        return 2
    choices = range(2, _MOST_SEEDS + 1)
    place = bisect.bisect_left(choices, _POWER, key=functools.partial(_power, claim / spread))
    return choices[place] if place < len(choices) else None


def _power(effect: float, n: int) -> float:
    """Of a paired t-test. Not a number where it is all but 1, which is not below what is asked for either."""
    t, shift = t_quantile(1 - SIGNIFICANCE / 2, n - 1), effect * math.sqrt(n)
    return float(special.nctdtr(n - 1, shift, -t) + 1 - special.nctdtr(n - 1, shift, t))
