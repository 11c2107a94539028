"""Statistics over seeds and repeats: intervals, noise, significant differences, equivalence.

Times and losses are compared as ratios, so on a log scale, seed by seed: repeats of one seed are averaged first. A
figure that rests on too few runs says so and has no interval. Student's t is that of scipy.special: scipy.stats needs a
second to import, and every notebook is a process.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from study.config.text import percent

CONFIDENCE = 0.95
SMALLEST_SAMPLE = 3
# Fewer points than this are all shown, after their interval.
SHOWN_BELOW = 6
SIGNIFICANCE = 0.05
NOT_SIGNIFICANT = "not significant"
# Logs that are nearer than this are the same.
_ROUNDING = 1e-12
Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Interval:
    """The geometric mean of some points with its t interval on the log scale; no bounds where they are too few."""

    center: float
    low: float | None
    high: float | None
    points: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        return len(self.points)

    def brief(self, form: Callable[[float], str]) -> str:
        middle = form(self.center)
        return middle if self.low is None or self.high is None else f"{middle} [{form(self.low)}, {form(self.high)}]"

    def text(self, digits: int = 2, unit: float = 1.0) -> str:
        if self.n == 0:
            return "-"

        def form(value: float) -> str:
            return f"{unit * value:,.{digits}f}"

        shown = f": {', '.join(map(form, self.points))}" if 1 < self.n < SHOWN_BELOW else ""
        return f"{self.brief(form)} (n = {self.n}{shown})"


def interval(values: Iterable[float]) -> Interval:
    """Return the t interval of positive figures on the log scale; a bootstrap of three points would cover 76 %."""
    points = tuple(float(value) for value in values if not pd.isna(value))
    if not points or min(points) <= 0:
        return Interval(math.nan, None, None, points if not points else ())
    logs = np.log(points)
    center = float(np.exp(logs.mean()))
    if len(points) < SMALLEST_SAMPLE:
        return Interval(center, None, None, points)
    reach = float(t_quantile((1 + CONFIDENCE) / 2, len(points) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Interval(center, center * math.exp(-reach), center * math.exp(reach), points)


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.log(np.asarray(values, dtype=float)).mean()))


def t_quantile(share: float, df: float) -> float:
    return float(special.stdtrit(df, share))


def holm(ps: Iterable[float]) -> list[float]:
    """Correct p values of a family by Holm's method."""
    found = np.fromiter(ps, dtype=float)
    order = np.argsort(found)
    corrected = np.empty(len(found))
    corrected[order] = np.minimum(np.maximum.accumulate(found[order] * np.arange(len(found), 0, -1)), 1)
    return [float(p) for p in corrected]


def by_seed(runs: pd.DataFrame, figure: str, form: Callable[[Any], Any] = np.log) -> pd.DataFrame:
    """Return one row per seed and one column per strategy of a workload, the mean over repeats in each cell.

    A repeat of a seed computes the same loss, so it is no other sample of it. It is one of a time: where all runs have
    one seed, each repeat of a time is a row.
    """
    # A frame of runs has two hundred columns, and a selection copies what it selects.
    runs = runs[["status_state", "arm", "seed", "repeat", figure]]
    known = runs[(runs["status_state"] == "ok") & runs[figure].notna()]
    if form is np.log:
        known = known[known[figure] > 0]
    seeds = known["seed"].fillna(-1)
    rows = known["repeat"] if seeds.nunique() <= 1 and "loss" not in figure else seeds
    values = pd.Series(form(known[figure].to_numpy(dtype=float)), index=known.index)
    return values.groupby([rows.rename("sample"), known["arm"]]).mean().unstack("arm").sort_index()


def middle(runs: pd.DataFrame, figure: str, arm: str) -> Interval:
    table = by_seed(runs, figure)
    return interval(np.exp(table[arm].dropna()) if arm in table else ())


def paired(runs: pd.DataFrame, figure: str, arm: str, baseline: str, form: Any = np.log) -> pd.DataFrame:
    """Return one row per seed that both strategies have, in columns `value` and `baseline`."""
    table = by_seed(runs, figure, form)
    if not {arm, baseline} <= set(table):
        return pd.DataFrame({"value": [], "baseline": []}, dtype=float)
    return pd.DataFrame({"value": table[arm], "baseline": table[baseline]}).dropna()


def paired_ratio(runs: pd.DataFrame, figure: str, arm: str, baseline: str) -> Interval:
    """Return a strategy's figure as a multiple of the baseline's, seed by seed."""
    pairs = paired(runs, figure, arm, baseline)
    return interval(np.exp(pairs["value"] - pairs["baseline"]))


def paired_runs(runs: pd.DataFrame, arm: str, baseline: str) -> list[Pair]:
    """Pair each run of a strategy with a baseline run of its seed: the same repeat, or another if that was lost."""
    ended = runs.loc[runs["status_state"] == "ok", ["arm", "seed", "repeat", "run"]].fillna({"seed": -1})
    mine, its = (ended[ended["arm"] == name].sort_values(["seed", "repeat"]) for name in (arm, baseline))
    pairs = []
    for seed, repeat, run in mine[["seed", "repeat", "run"]].itertuples(index=False):
        others = its[its["seed"] == seed]
        if len(others):
            same = others.loc[others["repeat"] == repeat, "run"]
            pairs.append((str(run), str((same if len(same) else others["run"]).iloc[0])))
    return pairs


@dataclasses.dataclass(frozen=True)
class Noise:
    """Residual standard deviation of logs, so a share of the figure."""

    share: float
    df: int

    def least_significant_difference(self, samples: int, comparisons: int = 1) -> float | None:
        """Return the smallest significant measured difference; a true one of its size is found half of the time."""
        if samples < SMALLEST_SAMPLE:
            return None
        # As `differences` tests them, where all strategies are equally noisy.
        df = 4 / (1 / (samples - 1) + 1 / self.df)
        t = t_quantile(1 - SIGNIFICANCE / max(comparisons, 1) / 2, df)
        return math.expm1(t * self.share * math.sqrt(2 / samples))


def noise(runs: pd.DataFrame, figure: str) -> Noise | None:
    """Return the residual noise of one workload, pooled over strategies, after removing seed effects (a busy hour).

    More data makes it more certain and not larger. None if nothing ran twice.
    """
    logs = by_seed(_fair(runs), figure)
    variance, df, _ = _additive_fit(logs.to_numpy(dtype=float))
    if not df:
        # Repeats of one strategy alone: seed effects cannot be seen.
        df = int((logs.count() - 1).clip(lower=0).sum())
        variance = float(((logs - logs.mean()) ** 2).sum().sum()) / df if df else math.nan
    return Noise(math.sqrt(variance), df) if df else None


def repeat_noise(runs: pd.DataFrame, figure: str) -> Noise | None:
    """Return the noise of repeats of one strategy and seed."""
    known = _fair(runs)
    known = known[(known["status_state"] == "ok") & (known[figure] > 0)]
    logs = np.log(known[figure].astype(float)).groupby([known["arm"], known["seed"].fillna(-1)])
    df = int((logs.count() - 1).sum())
    return Noise(math.sqrt(float((logs.var(ddof=0) * logs.count()).sum()) / df), df) if df else None


def _fair(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["confounded"] == ""]


def _additive_fit(logs: np.ndarray) -> tuple[float, int, np.ndarray]:
    """Of one effect per seed, a row, and one per arm, a column: what they leave unexplained as variance and degrees of
    freedom, and the effect of each seed. By least squares; NaN where there is none."""
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
    """Ratio of two strategies. `p` is after Holm over its family; None if they share too few seeds."""

    ratio: Interval
    p: float | None

    @property
    def is_significant(self) -> bool:
        return self.p is not None and self.p < SIGNIFICANCE

    @property
    def is_confounded(self) -> bool:
        """Seeds there were, and one of the two breaks an invariant."""
        return self.p is None and self.ratio.n >= SMALLEST_SAMPLE

    @property
    def is_unsure(self) -> bool:
        return not (self.is_significant or self.is_confounded)

    @property
    def words(self) -> str:
        n = self.ratio.n
        if not n:
            return "no run to pair with"
        if self.is_significant:
            return f"{percent(self.ratio.center - 1, signed=True)} (n = {n}, p = {self.p:.2g})"
        if self.is_confounded:
            return "not judged"
        return f"{NOT_SIGNIFICANT} ({'one run each' if n == 1 else f'n = {n}'})"


def differences(runs: pd.DataFrame, figure: str, pairs: Iterable[Pair]) -> dict[Pair, Difference]:
    """Test which strategies differ, with a false finding in at most 5 % of such families.

    A t test of the mean log ratio, twice for each pair: once with the first arm's own noise and once with the second
    one's, each time with all other arms' pooled noise for the other (Welch's degrees of freedom). The larger p counts,
    and Holm corrects for the number of pairs. Simulated for twelve arms against one, 2 % noise, seeds as blocks:

    - This finds something false in 2 to 4 % of families with 3, 5 or 8 seeds, also where one arm or the baseline is
      three or ten times noisier, and sees a 10 % difference with 3 seeds in 70 % of cases, a 5 % one with 5 in 58 %.
    - Dunnett, or Holm over one noise of all arms, finds something false in 11 to 13 % of families where an arm is three
      times noisier, and in 23 to 27 % where the baseline is.
    - Holm over each pair's own t test holds 5 %, and sees those differences in 16 % and 28 % of cases.
    """
    pairs = list(dict.fromkeys(pairs))
    logs = by_seed(runs, figure)
    ps = corrected_p(by_seed(_fair(runs), figure), pairs)
    nothing = pd.Series(dtype=float)
    ratios = {pair: np.exp((logs.get(pair[0], nothing) - logs.get(pair[1], nothing)).dropna()) for pair in pairs}
    return {pair: Difference(interval(ratios[pair]), ps.get(pair)) for pair in pairs}


def corrected_p(logs: pd.DataFrame, pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Return the corrected p of pairs of columns with enough rows in common."""
    values, places = logs.to_numpy(dtype=float), {arm: place for place, arm in enumerate(logs)}
    own = {arm: _own_noise(values, places[arm]) for arm in dict.fromkeys(itertools.chain(*pairs)) if arm in places}
    tested = {}
    for arm, base in pairs:
        if arm != base and arm in places and base in places:
            apart = values[:, places[arm]] - values[:, places[base]]
            apart = apart[~np.isnan(apart)]
            if len(apart) >= SMALLEST_SAMPLE:
                tested[arm, base] = (*_t_and_df(apart, own[arm]), *_t_and_df(apart, own[base]))
    if not tested:
        return {}
    t, df = np.array(list(tested.values())).reshape(-1, 2, 2).transpose(2, 0, 1)
    return dict(zip(tested, holm((2 * special.stdtr(df, -t)).max(axis=1)), strict=True))


class _OwnNoise(NamedTuple):
    """Variance and degrees of freedom of one strategy, and of all others together."""

    own: float
    own_df: int
    others: float
    others_df: int


def _own_noise(logs: np.ndarray, place: int) -> _OwnNoise:
    others = np.delete(logs, place, axis=1)
    variance, df, seeds = _additive_fit(others)
    apart = logs[:, place] - seeds
    known = ~np.isnan(apart)
    own = float(apart[known].var(ddof=1)) if known.sum() > 1 else math.nan
    if df:
        # How well the others know what a seed does is not this arm's noise.
        own -= variance * float((1 / (~np.isnan(others[known])).sum(axis=1)).mean())
    return _OwnNoise(max(own, 0.0), int(known.sum()) - 1, variance, df)


def _t_and_df(apart: np.ndarray, noise: _OwnNoise) -> tuple[float, float]:
    """Return t and degrees of freedom of differences in logs, whose mean is 0 for equal strategies."""
    n, variance = len(apart), noise.own + noise.others
    if not noise.others_df:
        # Nobody else to learn from: the pair's own t test.
        variance, df = float(apart.var(ddof=1)), float(n - 1)
    elif variance:
        df = variance**2 / (noise.own**2 / noise.own_df + noise.others**2 / noise.others_df)
    else:
        df = 1.0
    return abs(float(apart.mean())) / max(math.sqrt(variance / n), _ROUNDING), df


# Equivalence of losses (TOST), and the seeds needed to detect a change.

# A tenth of the smallest difference in loss that the studied documents claim (1.18 %, training loss, S2-01).
LOSS_MARGIN = 0.0012
# How far apart neighbouring bf16 numbers are. Two engines compute logits that differ by one such step, which is no
# difference in training.
BF16_SPACING = 2.0**-8
POWER = 0.8
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
    """Return the pairs of runs that a paired t-test needs to detect a change of `claim`, by the `spread` of pairs.

    Both are shares of the figure. None where ten thousand are not enough.
    """
    if claim <= 0 or spread < 0:
        raise ValueError(f"a claim of {claim} with a spread of {spread} asks for nothing")
    if spread == 0:
        return 2
    choices = range(2, _MOST_SEEDS + 1)
    place = bisect.bisect_left(choices, POWER, key=functools.partial(_power, claim / spread))
    return choices[place] if place < len(choices) else None


def _power(effect: float, n: int) -> float:
    """Power of a paired t-test; NaN close to 1, which is not below what is asked for either."""
    t, shift = t_quantile(1 - SIGNIFICANCE / 2, n - 1), effect * math.sqrt(n)
    return float(special.nctdtr(n - 1, shift, -t) + 1 - special.nctdtr(n - 1, shift, t))
