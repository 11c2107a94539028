"""What repeats and seeds allow to be said: intervals, ratios, noise floors, equivalence, effect sizes, sample sizes.

The arithmetic is scipy's. A figure that rests on too few runs says so in its note and has no interval.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
SMALLEST_SAMPLE = 3
RESAMPLES = 2000
# A tenth of the smallest difference in loss that the studied documents claim (1.18 %, training loss, S2-01).
LOSS_MARGIN = 0.0012
# How far apart neighbouring bf16 numbers are. Two engines compute logits that differ by one such step, which is no
# difference in training.
BF16_SPACING = 2.0**-8
SIGNIFICANCE = 0.05
POWER = 0.8
_MOST_SEEDS = 10_000


@dataclasses.dataclass(frozen=True)
class Interval:
    """A middle with its bootstrap confidence interval; no bounds where `n` is too small for any."""

    center: float
    low: float | None
    high: float | None
    n: int

    @property
    def note(self) -> str:
        if self.low is not None:
            return f"n = {self.n}, {CONFIDENCE:.0%} bootstrap interval"
        if self.n == 0:
            return "no run"
        return "one run: no interval" if self.n == 1 else f"{self.n} runs: too few for an interval"

    def text(self, digits: int = 2) -> str:
        if self.n == 0:
            return "-"
        middle = f"{self.center:,.{digits}f}"
        if self.low is None or self.high is None:
            return f"{middle} (n = {self.n})"
        return f"{middle} [{self.low:,.{digits}f}, {self.high:,.{digits}f}] (n = {self.n})"


def interval(values: Sequence[float]) -> Interval:
    """The median, by percentile bootstrap with a fixed seed: the same records give the same report."""
    known = np.array([value for value in values if not pd.isna(value)], dtype=float)
    if not len(known):
        return Interval(math.nan, None, None, 0)
    center = float(np.median(known))
    if len(known) < SMALLEST_SAMPLE:
        return Interval(center, None, None, len(known))
    if np.ptp(known) == 0:
        return Interval(center, center, center, len(known))
    found = stats.bootstrap(
        (known,), np.median, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return Interval(center, float(found.low), float(found.high), len(known))


def paired(runs: pd.DataFrame, figure: str, arm: str, baseline: str) -> pd.DataFrame:
    """One row per (seed, repeat) that both arms of a workload have, with the figure and the run of each."""
    columns = ("status_state", "arm", "seed", "repeat", "run", figure)
    found: dict[str, dict[tuple[Any, Any], tuple[str, float]]] = {arm: {}, baseline: {}}
    for state, name, seed, repeat, run, value in zip(*(runs[column].tolist() for column in columns), strict=True):
        if state == "ok" and name in found and not pd.isna(value):
            found[name][None if pd.isna(seed) else seed, repeat] = (run, value)
    keys = sorted(found[arm].keys() & found[baseline].keys(), key=str)
    rows = [(*key, *found[arm][key], *found[baseline][key]) for key in keys]
    return pd.DataFrame(rows, columns=["seed", "repeat", "run", "value", "run_baseline", "baseline"])


def paired_ratio(runs: pd.DataFrame, figure: str, arm: str, baseline: str) -> Interval:
    """The arm's figure as a multiple of the baseline's, each run against its own partner."""
    pairs = paired(runs, figure, arm, baseline)
    pairs = pairs[pairs["baseline"] != 0]
    return interval((pairs["value"] / pairs["baseline"]).tolist())


@dataclasses.dataclass(frozen=True)
class NoiseFloor:
    """How far apart runs are that should be alike, as shares of the figure; None where no control was run."""

    # The same arm twice, and the same arm with another seed: the largest gap, and over how many sets of runs.
    repeat: float | None
    repeats: int
    seed: float | None
    seeds: int
    # Stage 0 against plain training on as many ranks: what the engine itself changes, which is no noise.
    engine: float | None
    engines: int

    @property
    def share(self) -> float | None:
        """A smaller difference is noise: how far repeats are apart or, where there are none, seeds."""
        return self.seed if self.repeat is None else self.repeat


def noise_floor(runs: pd.DataFrame, figure: str) -> NoiseFloor:
    """The largest relative gap in each kind of control, from one workload's runs without a confound."""
    ended = runs[(runs["status_state"] == "ok") & runs[figure].notna() & (runs["confounded"] == "")]
    repeats = [gap(group[figure]) for _, group in ended.groupby(["arm", "seed"]) if len(group) > 1]
    by_seed = ended.groupby(["arm", "seed"])[figure].median().reset_index()
    seeds = [gap(group[figure]) for _, group in by_seed.groupby("arm") if len(group) > 1]
    engines = []
    for plain, bare in (("single", ended["world_size"] == 1), ("ddp", ended["world_size"] > 1)):
        keys = ["seed", "repeat", "world_size"]
        mine, its = (ended[bare & (ended["strategy"] == name)][[*keys, figure]] for name in ("zero0", plain))
        engines += [gap(pair) for pair in mine.merge(its, on=keys)[[f"{figure}_x", f"{figure}_y"]].to_numpy()]
    floors = [(max(gaps, default=None), len(gaps)) for gaps in (repeats, seeds, engines)]
    return NoiseFloor(*floors[0], *floors[1], *floors[2])


def gap(values: Sequence[float]) -> float:
    """The largest distance between two of the values, as a share of their mean."""
    known = np.asarray(values, dtype=float)
    middle = abs(float(known.mean()))
    return float(np.ptp(known)) / middle if middle else 0.0


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests: is the mean paired difference of a loss within the margin? No p without its n."""

    n: int
    margin: float
    mean_difference: float | None
    largest_difference: float | None
    p: float | None
    verdict: Literal["equivalent", "not shown", "no test"]
    reason: str

    def text(self) -> str:
        if self.mean_difference is None:
            return self.reason
        measured = f"mean difference {self.mean_difference:+.2g}, margin {self.margin:.2g}, n = {self.n}"
        return f"{self.reason} ({measured}{'' if self.p is None else f', p = {self.p:.2g}'})"


def equivalence(values: Sequence[float], baselines: Sequence[float], margin: float = LOSS_MARGIN) -> Equivalence:
    """`margin` is a share of the baselines' mean; values and baselines are pairs."""
    differences = np.asarray(values, dtype=float) - np.asarray(baselines, dtype=float)
    n = len(differences)
    if not n:
        return Equivalence(0, margin, None, None, None, "no test", "no run to pair with")
    bound = margin * abs(float(np.mean(baselines)))
    mean, largest = float(differences.mean()), float(np.abs(differences).max())

    result = functools.partial(Equivalence, n, bound, mean, largest)
    if n < 2:
        return result(None, "no test", "one run each: no test")
    if np.ptp(differences) <= 1e-12 * max(abs(mean), bound):
        inside = abs(mean) < bound
        reason = "the same difference every time: no spread to test against"
        return result(None, "equivalent" if inside else "not shown", reason)
    above = stats.ttest_1samp(differences, -bound, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, bound, alternative="less").pvalue
    p = float(max(above, below))
    shown = p < SIGNIFICANCE
    return result(p, "equivalent" if shown else "not shown", "equivalent" if shown else "equivalence is not shown")


def effect(runs: pd.DataFrame, figure: str, arm: str, baseline: str, floor: NoiseFloor) -> str:
    """In words, how much an arm differs from the baseline, and whether that is more than runs differ by themselves."""
    ratio = paired_ratio(runs, figure, arm, baseline)
    if not ratio.n:
        return "no run to pair with"
    change = percent(ratio.center - 1, signed=True)
    if floor.share is not None and abs(ratio.center - 1) <= floor.share:
        return f"inside noise: {change}, and like runs differ by {percent(floor.share)}"
    if ratio.low is None or ratio.high is None:
        return f"{change} (n = {ratio.n}), {'no control and ' if floor.share is None else ''}{ratio.note}"
    if ratio.low <= 1 <= ratio.high:
        return f"inside noise: {change}, and the interval holds no difference (n = {ratio.n})"
    return f"{change} (n = {ratio.n})"


def seeds_needed(claim: float, spread: float) -> int | None:
    """How many pairs of runs a paired t-test needs to see a change of `claim`, where pairs scatter by `spread`.

    Both are shares of the figure. None where ten thousand are not enough.
    """
    if claim <= 0 or spread < 0:
        raise ValueError(f"a claim of {claim} with a spread of {spread} asks for nothing")
    if spread == 0:
        return 2
    choices = range(2, _MOST_SEEDS + 1)
    place = bisect.bisect_left(choices, POWER, key=lambda n: _power(n, claim / spread))
    return choices[place] if place < len(choices) else None


def _power(n: int, effect_size: float) -> float:
    shift = effect_size * math.sqrt(n)
    critical = stats.t.ppf(1 - SIGNIFICANCE / 2, n - 1)
    with warnings.catch_warnings():
        # Far out the other tail underflows, which is 0 as it should be.
        warnings.simplefilter("ignore", RuntimeWarning)
        seen = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    return 1.0 if math.isnan(seen) else float(seen)


def percent(share: float, signed: bool = False) -> str:
    size = abs(100 * share)
    digits = 0 if size >= 10 else 1 if size >= 1 else 2
    if 0 < size < 0.01:
        return f"{'+' if signed and share > 0 else '-' if share < 0 else ''}{size:.1g} %"
    return f"{100 * share:{'+' if signed else ''}.{digits}f} %"
