"""Statistics over seeds and repeats: intervals, noise, significant differences, equivalence.

Times and losses are compared as ratios, hence on a log scale, paired by seed: repeats of one seed are averaged first. A
figure with too few runs has no interval. Student's t comes from scipy.special, because scipy.stats needs a second to
import and every notebook is a process.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from study.config.precisions import computes_in_bf16
from study.config.text import percent
from study.records.shares import CONFIDENCE

MIN_SAMPLE = 3
# With fewer points than this, all of them are printed after the interval.
SHOWN_BELOW = 6
SIGNIFICANCE = 0.05
NOT_SIGNIFICANT, NOT_TESTED = "not significant", "not tested"
# The same behind a ratio in a table.
NOT_SIGNIFICANT_MARK, NOT_TESTED_MARK = "n.s.", "n.t."
# Logs that differ by less than this are equal.
_ROUNDING = 1e-12
Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Interval:
    """Geometric mean of points with its t interval on the log scale; no bounds if there are too few points."""

    center: float
    low: float | None
    high: float | None
    points: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        return len(self.points)

    def scaled(self, factor: float) -> Interval:
        """Return the same interval in another unit."""
        low, high = (None if bound is None else factor * bound for bound in (self.low, self.high))
        return Interval(factor * self.center, low, high, tuple(factor * point for point in self.points))

    def brief(self, form: Callable[[float], str]) -> str:
        middle = form(self.center)
        return middle if self.low is None or self.high is None else f"{middle} [{form(self.low)}, {form(self.high)}]"

    def text(self, digits: int = 2) -> str:
        if self.n == 0:
            return "-"

        def form(value: float) -> str:
            return f"{value:,.{digits}f}"

        points_text = f": {', '.join(map(form, self.points))}" if 1 < self.n < SHOWN_BELOW else ""
        return f"{self.brief(form)} (n = {self.n}{points_text})"


def interval(values: Iterable[float]) -> Interval:
    """Return the t interval of positive figures on the log scale; a bootstrap of three points would cover 76 %."""
    points = tuple(float(value) for value in values if not pd.isna(value))
    if not points or min(points) <= 0:
        return Interval(math.nan, None, None, points if not points else ())
    logs = np.log(points)
    center = float(np.exp(logs.mean()))
    if len(points) < MIN_SAMPLE:
        return Interval(center, None, None, points)
    reach = float(t_quantile((1 + CONFIDENCE) / 2, len(points) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Interval(center, center * math.exp(-reach), center * math.exp(reach), points)


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t distribution."""
    return float(special.stdtrit(df, probability))


def apply_holm(ps: Iterable[float]) -> list[float]:
    """Correct p values of a family by Holm's method."""
    values = np.fromiter(ps, dtype=float)
    return [float(p) for p in np.minimum(values * _holm_factors(values), 1)]


def _holm_factors(ps: np.ndarray) -> np.ndarray:
    """Return the factor by which Holm's method corrects each p; it keeps their order."""
    order, counts = np.argsort(ps), np.arange(len(ps), 0, -1, dtype=float)
    corrected = np.maximum.accumulate(ps[order] * counts)
    factors = np.empty(len(ps))
    factors[order] = np.divide(corrected, ps[order], out=counts, where=corrected > ps[order] * counts)
    return factors


def pivot_by_seed(runs: pd.DataFrame, figure: str, form: Callable[[Any], Any] = np.log) -> pd.DataFrame:
    """Return one row per seed and one column per strategy of a workload, the mean over repeats in each cell.

    Repeats of a seed compute the same loss, so they are not further samples of it. They are samples of a time: if all
    runs have the same seed, each repeat of a time is a row.
    """
    figures = runs[figure].to_numpy(dtype=float, na_value=math.nan)
    is_valid = (runs["status_state"] == "ok").to_numpy(dtype=bool) & ~np.isnan(figures)
    if form is np.log:
        is_valid &= figures > 0
    seeds = runs["seed"][is_valid].fillna(-1)
    samples = runs["repeat"][is_valid] if seeds.nunique() <= 1 and "loss" not in figure else seeds
    # In dictionaries: a group-by of a few runs takes four times longer, and a report makes thousands of these tables.
    values: dict[str, dict[Any, list[float]]] = {}
    for sample, arm, value in zip(samples, runs["arm"][is_valid], form(figures[is_valid]), strict=True):
        values.setdefault(arm, {}).setdefault(sample, []).append(float(value))
    arms, rows = sorted(values), sorted(set(itertools.chain(*values.values())))
    means = [[_mean(values[arm].get(row, [])) for arm in arms] for row in rows]
    return pd.DataFrame(
        np.array(means, dtype=float).reshape(len(rows), len(arms)),
        index=pd.Index(rows, dtype=samples.dtype, name="sample"),
        columns=pd.Index(arms, dtype="str" if arms else object, name="arm"),
    )


def _fair(runs: pd.DataFrame, figure: str) -> pd.DataFrame:
    """Return the comparable runs, with the columns that `pivot_by_seed` reads: a filter copies every column."""
    return runs.loc[runs["confounded"] == "", ["status_state", "seed", "repeat", "arm", figure]]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def paired(runs: pd.DataFrame, figure: str, arm: str, baseline: str, form: Any = np.log) -> pd.DataFrame:
    """Return one row per common seed of two strategies, with columns `value` and `baseline`."""
    table = pivot_by_seed(runs, figure, form)
    if not {arm, baseline} <= set(table):
        return pd.DataFrame({"value": [], "baseline": []}, dtype=float)
    return pd.DataFrame({"value": table[arm], "baseline": table[baseline]}).dropna()


def paired_ratio(logs: pd.DataFrame | Mapping[str, np.ndarray], arm: str, baseline: str) -> Interval:
    """Return the ratio of a strategy's figure to the baseline's, paired by seed, from their logs by seed."""
    return interval(np.exp(logs[arm] - logs[baseline]) if arm in logs and baseline in logs else ())


def _by_strategy(logs: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the columns of logs: arithmetic of tables takes a hundred times longer than that of short arrays."""
    return {str(arm): logs[arm].to_numpy(dtype=float) for arm in logs}


def paired_runs(runs: pd.DataFrame, arm: str, baseline: str) -> list[Pair]:
    """Pair each run of a strategy with a baseline run of its seed, if possible of the same repeat."""
    # In tuples: to filter and sort a table of a few runs takes ten times longer.
    columns = (runs[name] for name in ("status_state", "seed", "repeat", "arm", "run"))
    ended = [
        (-1 if pd.isna(seed) else seed, repeat, name, run)
        for state, seed, repeat, name, run in zip(*columns, strict=True)
        if state == "ok" and name in (arm, baseline)
    ]
    ended.sort(key=lambda row: row[:2])
    control: dict[Any, dict[Any, str]] = {}
    for seed, repeat, name, run in ended:
        if name == baseline:
            control.setdefault(seed, {}).setdefault(repeat, str(run))
    pairs = []
    for seed, repeat, name, run in ended:
        if name == arm and seed in control:
            candidates = control[seed]
            pairs.append((str(run), candidates.get(repeat) or next(iter(candidates.values()))))
    return pairs


@dataclasses.dataclass(frozen=True)
class Noise:
    """Residual standard deviation of logs, that is, relative to the figure."""

    log_sd: float
    df: int

    def least_significant_difference(self, samples: int, comparisons: int = 1) -> float | None:
        """Return the least significant difference; a true difference of this size is significant half of the time."""
        if samples < MIN_SAMPLE:
            return None
        # The test of `differences` with equal noise of all strategies.
        df = 4 / (1 / (samples - 1) + 1 / self.df)
        t = t_quantile(1 - SIGNIFICANCE / max(comparisons, 1) / 2, df)
        return math.expm1(t * self.log_sd * math.sqrt(2 / samples))


def estimate_noise(runs: pd.DataFrame, figure: str) -> Noise | None:
    """Return the residual noise of one workload, pooled over strategies without seed effects; None without reruns.

    A seed effect is, for example, other load on the machine during the runs of one seed. More data makes the estimate
    more certain, not smaller.
    """
    logs = pivot_by_seed(_fair(runs, figure), figure)
    variance, df, _ = _additive_fit(logs.to_numpy(dtype=float))
    if not df:
        # With repeats of a single strategy, seed effects cannot be separated from the noise.
        df = int((logs.count() - 1).clip(lower=0).sum())
        variance = float(((logs - logs.mean()) ** 2).sum().sum()) / df if df else math.nan
    return Noise(math.sqrt(variance), df) if df else None


def repeat_noise(runs: pd.DataFrame, figure: str) -> Noise | None:
    """Return the noise between reruns of one strategy with one seed; None without reruns."""
    is_valid = (runs["confounded"] == "") & (runs["status_state"] == "ok") & (runs[figure] > 0)
    valid = runs.loc[is_valid, ["arm", "seed", figure]]
    logs = np.log(valid[figure].astype(float)).groupby([valid["arm"], valid["seed"].fillna(-1)])
    df = int((logs.count() - 1).sum())
    return Noise(math.sqrt(float((logs.var(ddof=0) * logs.count()).sum()) / df), df) if df else None


def _additive_fit(logs: np.ndarray) -> tuple[float, int, np.ndarray]:
    """Fit an effect per seed (row) and per strategy (column) by least squares; NaN marks missing values.

    Return the residual variance, its degrees of freedom, and the seed effects.
    """
    rows, columns = np.nonzero(~np.isnan(logs))
    design = np.zeros((len(rows), sum(logs.shape)))
    design[np.arange(len(rows)), rows] = 1
    design[np.arange(len(rows)), logs.shape[0] + columns] = 1
    effects, _, rank, _ = np.linalg.lstsq(design, logs[rows, columns], rcond=None)
    df = len(rows) - int(rank)
    variance = float(((logs[rows, columns] - design @ effects) ** 2).sum()) / df if df else math.nan
    return variance, df, np.where(np.isnan(logs).all(axis=1), np.nan, effects[: len(logs)])


@dataclasses.dataclass(frozen=True)
class Difference:
    """Ratio of two strategies, with `p` after Holm's correction; None if they share too few fair seeds.

    With a p, the interval is of the same test: it excludes 1 if and only if p is significant.
    """

    ratio: Interval
    p: float | None
    # Whether there would be more seeds, but a strategy breaks an invariant in them, so that no test was made.
    is_confounded: bool = False

    @property
    def is_tested(self) -> bool:
        """Whether there are enough fair seeds for a test; without one nothing is known of the significance."""
        return self.p is not None

    @property
    def is_significant(self) -> bool:
        return self.p is not None and self.p < SIGNIFICANCE

    @property
    def mark(self) -> str:
        """Return the mark of the ratio: a test found no difference, or too few seeds allowed none.

        A significant ratio has none. Nor has one with enough seeds that is not a fair comparison.
        """
        if self.is_significant:
            return ""
        if self.is_tested:
            return NOT_SIGNIFICANT_MARK
        return NOT_TESTED_MARK if self.ratio.n < MIN_SAMPLE else ""

    @property
    def words(self) -> str:
        n = self.ratio.n
        if not n:
            return "no run to pair with"
        if self.is_significant:
            return f"{percent(self.ratio.center - 1, signed=True)} (n = {n}, p = {self.p:.2g})"
        if self.is_confounded:
            return "not judged"
        verdict = NOT_SIGNIFICANT if self.is_tested else NOT_TESTED
        return f"{verdict} ({'one run each' if n == 1 else f'n = {n}'})"


def differences(runs: pd.DataFrame, figure: str, pairs: Iterable[Pair]) -> dict[Pair, Difference]:
    """Test which strategies differ; the family-wise error rate is at most 5 %.

    Each pair has two t tests of the mean log ratio: one with the noise of the first strategy, one with that of the
    second, each with the pooled noise of all other strategies for the partner (Welch's degrees of freedom). The larger
    p counts, and Holm corrects for the number of pairs. One noise for all has an error rate of 11 to 27 % if a strategy
    or the baseline is three times noisier, and separate tests of pairs have a power of 16 % instead of 70 % for 10 %.
    """
    pairs = list(dict.fromkeys(pairs))
    logs, is_fair = pivot_by_seed(runs, figure), runs["confounded"] == ""
    fair_logs = logs if is_fair.all() else pivot_by_seed(_fair(runs, figure), figure)
    tests = corrected_tests(fair_logs, pairs)
    all_logs, fair = _by_strategy(logs), _by_strategy(fair_logs)
    ratios = {pair: paired_ratio(all_logs, *pair) for pair in pairs}
    for pair, (_, low, high) in tests.items():
        ratios[pair] = dataclasses.replace(ratios[pair], low=float(np.exp(low)), high=float(np.exp(high)))
    by_pair = {}
    for pair, ratio in ratios.items():
        if pair in tests:
            by_pair[pair] = Difference(ratio, tests[pair][0])
        else:
            is_confounded = paired_ratio(fair, *pair).n < ratio.n
            by_pair[pair] = Difference(ratio, None, is_confounded)
    return by_pair


def all_differences(runs: pd.DataFrame, figure: str) -> dict[Pair, Difference]:
    """Test all pairs of a workload's strategies as one family, so that no two questions disagree about a pair."""
    tested = differences(runs, figure, itertools.combinations(runs["arm"].unique(), 2))
    for (arm, base), difference in list(tested.items()):
        low, high = (None if end is None else 1 / end for end in (difference.ratio.high, difference.ratio.low))
        inverse = Interval(
            1 / difference.ratio.center, low, high, tuple(1 / point for point in difference.ratio.points)
        )
        tested[base, arm] = dataclasses.replace(difference, ratio=inverse)
    return tested


def mean_p(mean: float, error: float, df: float) -> float:
    """Return the two-sided p of a mean with this standard error."""
    return float(2 * special.stdtr(df, -abs(mean) / error))


class PairTest(NamedTuple):
    """Test of the mean difference of two columns of logs, before a correction for the number of tests."""

    p: float
    error: float
    df: float
    mean: float


def corrected_tests(logs: pd.DataFrame, pairs: Sequence[Pair]) -> dict[Pair, tuple[float, float, float]]:
    """Return p of each pair of columns with enough common rows, and the bounds of their mean difference, corrected.

    Holm's factor multiplies p and divides the level of the bounds.
    """
    tested = pair_tests(logs, pairs)
    if not tested:
        return {}
    p, error, df, mean = np.array(list(tested.values())).T
    factors = _holm_factors(p)
    reach = error * special.stdtrit(df, 1 - SIGNIFICANCE / factors / 2)
    return dict(zip(tested, zip(np.minimum(p * factors, 1), mean - reach, mean + reach, strict=True), strict=True))


def pair_tests(logs: pd.DataFrame, pairs: Sequence[Pair]) -> dict[Pair, PairTest]:
    """Return the test of each pair of columns with enough common rows, with the noise of all columns."""
    values, places = logs.to_numpy(dtype=float), {arm: place for place, arm in enumerate(logs)}
    noises = {
        arm: _strategy_noise(values, places[arm]) for arm in dict.fromkeys(itertools.chain(*pairs)) if arm in places
    }
    tested = {}
    for arm, base in pairs:
        if arm != base and arm in places and base in places:
            ratios = values[:, places[arm]] - values[:, places[base]]
            ratios = ratios[~np.isnan(ratios)]
            if len(ratios) >= MIN_SAMPLE:
                mean = float(ratios.mean())
                tests = [_error_and_df(ratios, noises[name]) for name in (arm, base)]
                tested[arm, base] = max(PairTest(mean_p(mean, error, df), error, df, mean) for error, df in tests)
    return tested


class _StrategyNoise(NamedTuple):
    variance: float
    df: int
    others_variance: float
    others_df: int


def _strategy_noise(logs: np.ndarray, place: int) -> _StrategyNoise:
    rest = np.delete(logs, place, axis=1)
    variance, df, seeds = _additive_fit(rest)
    residuals = logs[:, place] - seeds
    valid = ~np.isnan(residuals)
    strategy_variance = float(residuals[valid].var(ddof=1)) if valid.sum() > 1 else math.nan
    if df and valid.any():
        # Subtract the uncertainty of the seed effects, which come from the other strategies.
        strategy_variance -= variance * float((1 / (~np.isnan(rest[valid])).sum(axis=1)).mean())
    return _StrategyNoise(max(strategy_variance, 0.0), int(valid.sum()) - 1, variance, df)


def _error_and_df(ratios: np.ndarray, noise: _StrategyNoise) -> tuple[float, float]:
    """Return the standard error of the mean of differences of logs, and its degrees of freedom."""
    n, variance = len(ratios), noise.variance + noise.others_variance
    if not noise.others_df:
        # Without other strategies: the t test of the pair alone.
        variance, df = float(ratios.var(ddof=1)), float(n - 1)
    elif variance:
        df = variance**2 / (noise.variance**2 / noise.df + noise.others_variance**2 / noise.others_df)
    else:
        df = 1.0
    return max(math.sqrt(variance / n), _ROUNDING), df


# Equivalence of losses (TOST), and the seeds needed to detect a change.

# The smallest difference of a loss that the studied documents claim (training loss, S2-01), and a tenth of it, rounded.
CLAIMED_DIFFERENCE, LOSS_MARGIN = 0.0118, 0.0012
# Relative spacing of bf16 numbers. A difference of one such step between the logits of two engines is not one in
# training.
BF16_SPACING = 2.0**-8
POWER = 0.8
_MAX_SEEDS = 10_000


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Equivalence test (TOST): whether the mean paired difference of a loss is within the margin."""

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


def step_margin(precision: str) -> float:
    """Return the relative difference of a step's loss up to which losses are the same."""
    return max(LOSS_MARGIN, BF16_SPACING) if computes_in_bf16(precision) else LOSS_MARGIN


def equivalence_test(values: Sequence[float], baselines: Sequence[float], margin: float = LOSS_MARGIN) -> Equivalence:
    """Test the equivalence of paired losses, one pair per seed; `margin` is relative to the mean of the baselines."""
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
        reason = "the same difference for each seed: no variance for a test"
        return result(None, "equivalent" if inside else "not shown", reason)
    # Of the two one-sided tests, that of the nearer bound.
    p = float(special.stdtr(n - 1, (abs(mean) - bound) / (differences.std(ddof=1) / math.sqrt(n))))
    is_shown = p < SIGNIFICANCE
    return result(
        p, "equivalent" if is_shown else "not shown", "equivalent" if is_shown else "equivalence is not shown"
    )


def seeds_needed(claim: float, spread: float) -> int | None:
    """Number of pairs that a paired t test needs to detect a change of `claim` with 80 % power; None above 10,000.

    `spread` is the standard deviation of a pair's difference; both are relative to the figure.
    """
    if claim <= 0 or spread < 0:
        raise ValueError(f"claim {claim} or spread {spread} is out of range")
    if spread == 0:
        return 2

    def power(n: int) -> float:
        """Power of a paired t test; NaN close to 1, which does not compare as less than the required power."""
        t, shift = t_quantile(1 - SIGNIFICANCE / 2, n - 1), claim / spread * math.sqrt(n)
        return float(special.nctdtr(n - 1, shift, -t) + 1 - special.nctdtr(n - 1, shift, t))

    choices = range(2, _MAX_SEEDS + 1)
    place = bisect.bisect_left(choices, POWER, key=power)
    return choices[place] if place < len(choices) else None
