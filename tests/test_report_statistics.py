"""What may be said of a few runs: against known distributions, and never more than the runs allow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from study.report.records.statistics import (
    LOSS_MARGIN,
    effect,
    equivalence,
    gap,
    interval,
    noise_floor,
    paired,
    paired_ratio,
    percent,
    seeds_needed,
)


def frame(rows: list[tuple[str, int, int, float]], **more: object) -> pd.DataFrame:
    runs = pd.DataFrame(rows, columns=["arm", "seed", "repeat", "step_time_s_median"])
    strategies = runs["arm"].str.split(" ").str[0]
    told = {"status_state": "ok", "confounded": "", "run": [f"run-{n}" for n in range(len(runs))]}
    return runs.assign(strategy=strategies, world_size=2, **(told | more))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        found = interval(rng.normal(10, 1, size=30).tolist())
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 10 <= found.high
    assert 180 <= hits <= 199


def test_an_interval_is_the_same_every_time_and_holds_its_middle() -> None:
    values = [1.0, 2.0, 2.5, 7.0, 3.0]
    assert interval(values) == interval(values)
    found = interval(values)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.center == 2.5 <= found.high
    assert found.text(1) == f"2.5 [{found.low:.1f}, {found.high:.1f}] (n = 5)"


@pytest.mark.parametrize(
    ("values", "note", "text"),
    [
        ([], "no run", "-"), ([2.0], "one run: no interval", "2.00 (n = 1)"),
        ([2.0, 4.0], "2 runs: too few for an interval", "3.00 (n = 2)"),
        ([2.0, math.nan], "one run: no interval", "2.00 (n = 1)"),
        ([2.0, 2.0, 2.0], "n = 3, 95% bootstrap interval", "2.00 [2.00, 2.00] (n = 3)"),
    ],
)  # fmt: skip
def test_too_few_runs_are_said_and_get_no_interval(values: list[float], note: str, text: str) -> None:
    found = interval(values)
    assert (found.note, found.text()) == (note, text)


def test_ratios_are_paired_by_seed_and_repeat() -> None:
    runs = frame([
        ("ddp", 1, 1, 1.0), ("ddp", 2, 1, 2.0), ("ddp", 3, 1, 4.0), ("ddp", 4, 1, 9.0),
        ("zero3", 3, 1, 8.0), ("zero3", 1, 1, 2.0), ("zero3", 2, 1, 4.0), ("zero3", 1, 2, 99.0), ("zero3", 9, 1, 99.0),
    ])  # fmt: skip
    pairs = paired(runs, "step_time_s_median", "zero3", "ddp")
    assert pairs[["value", "baseline"]].to_numpy().tolist() == [[2.0, 1.0], [4.0, 2.0], [8.0, 4.0]]
    ratio = paired_ratio(runs, "step_time_s_median", "zero3", "ddp")
    assert (ratio.center, ratio.low, ratio.high, ratio.n) == (2.0, 2.0, 2.0, 3)
    assert paired_ratio(runs, "step_time_s_median", "zero2", "ddp").n == 0


def test_a_run_that_failed_is_no_partner() -> None:
    runs = frame([("ddp", 1, 1, 1.0), ("zero3", 1, 1, 2.0)], status_state=["failed", "ok"])
    assert paired_ratio(runs, "step_time_s_median", "zero3", "ddp").n == 0


def test_the_noise_floor_is_what_controls_differ_by() -> None:
    runs = frame([
        ("ddp", 1, 1, 1.00), ("ddp", 1, 2, 1.04), ("zero3", 1, 1, 2.0), ("zero3", 1, 2, 2.0), ("ddp", 2, 1, 1.20),
        ("zero0", 1, 1, 1.1),
    ])  # fmt: skip
    floor = noise_floor(runs, "step_time_s_median")
    assert floor.repeat == pytest.approx(0.04 / 1.02)
    assert floor.repeats == 2
    assert floor.seed == pytest.approx(gap([1.02, 1.20]))
    assert floor.engine == pytest.approx(gap([1.1, 1.0]))
    assert floor.share == floor.repeat
    nothing = noise_floor(frame([("ddp", 1, 1, 1.0)]), "step_time_s_median")
    assert (nothing.share, nothing.repeat, nothing.seed, nothing.engine) == (None, None, None, None)


def test_a_confounded_run_is_no_control() -> None:
    runs = frame([("ddp", 1, 1, 1.0), ("ddp", 1, 2, 5.0)], confounded=["", "threads per rank: 2, baseline 1"])
    assert noise_floor(runs, "step_time_s_median").repeat is None


def test_equivalence_is_shown_inside_the_margin_only() -> None:
    rng = np.random.default_rng(5)
    baselines: Any = rng.normal(2.0, 0.1, size=8)
    margin = LOSS_MARGIN * baselines.mean()
    near = equivalence(baselines + rng.normal(0, margin / 20, size=8), baselines)
    assert near.verdict == "equivalent"
    assert near.p is not None
    assert near.p < 0.05
    assert f"n = 8, p = {near.p:.2g}" in near.text()
    far = equivalence(baselines + 3 * margin + rng.normal(0, margin / 20, size=8), baselines)
    assert far.verdict == "not shown"
    wide = equivalence(baselines + rng.normal(0, 20 * margin, size=8), baselines)
    assert wide.verdict == "not shown"


def test_equivalence_is_the_larger_of_two_one_sided_t_tests() -> None:
    values, baselines = [1.0, 1.002, 1.001, 1.0005], [1.0, 1.0, 1.0, 1.0]
    found = equivalence(values, baselines, margin=0.005)
    differences = np.array(values) - 1
    t = (differences.mean() - 0.005) / (differences.std(ddof=1) / 2)
    assert found.p == pytest.approx(stats.t.cdf(t, 3))
    assert found.largest_difference == pytest.approx(0.002)


def test_one_run_each_is_no_test() -> None:
    found = equivalence([1.0], [1.0])
    assert (found.verdict, found.p, found.n) == ("no test", None, 1)
    assert found.text().startswith("one run each: no test")
    assert equivalence([], []).text() == "no run to pair with"
    same = equivalence([1.0, 2.0], [1.0, 2.0])
    assert (same.verdict, same.p) == ("equivalent", None)


def test_small_effects_are_called_noise_in_words() -> None:
    rows = [("ddp", seed, repeat, 1.0 + 0.02 * repeat) for seed in (1, 2, 3) for repeat in (1, 2)]
    runs = frame(
        [*rows, *(("zero2", seed, 1, 1.03) for seed in (1, 2, 3)), *(("zero3", s, 1, 1.53) for s in (1, 2, 3))]
    )
    floor = noise_floor(runs, "step_time_s_median")
    small = effect(runs, "step_time_s_median", "zero2", "ddp", floor)
    assert small.startswith("inside noise: +0.98 %")
    large = effect(runs, "step_time_s_median", "zero3", "ddp", floor)
    assert large == "+50 % (n = 3)"
    one = frame([("ddp", 1, 1, 1.0), ("zero3", 1, 1, 1.5)])
    words = effect(one, "step_time_s_median", "zero3", "ddp", noise_floor(one, "step_time_s_median"))
    assert words == "+50 % (n = 1), no control and one run: no interval"


def test_seeds_needed_give_the_power_they_promise() -> None:
    n = seeds_needed(0.0118, 0.01)
    assert n is not None
    rng = np.random.default_rng(11)
    samples = rng.normal(0.0118, 0.01, size=(4000, n))
    seen = (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean()
    assert 0.78 <= seen <= 0.90
    fewer = (stats.ttest_1samp(samples[:, : n - 1], 0, axis=1).pvalue < 0.05).mean()
    assert fewer < 0.82
    assert n < seeds_needed(0.0118, 0.02) < seeds_needed(0.0118, 0.04)  # type: ignore[operator]


def test_seeds_needed_knows_its_limits() -> None:
    assert seeds_needed(0.5, 0) == 2
    assert seeds_needed(1e-6, 1.0) is None
    with pytest.raises(ValueError, match="asks for nothing"):
        seeds_needed(0, 0.1)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.5, "+50 %"), (0.025, "+2.5 %"), (-0.001, "-0.10 %"), (1e-8, "+1e-06 %"), (-1e-8, "-1e-06 %"), (0, "+0.00 %")],
)
def test_shares_are_told_as_closely_as_they_are_worth(share: float, text: str) -> None:
    assert percent(share, signed=True) == text
