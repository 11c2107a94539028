"""Profiles of real runs: their figures add up, and recording one changes nothing else of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import RunFactory, trained
from study.records.schema import PROFILE_CATEGORIES

STEPS = 11
# Rows are flushed in the middle of the profiled steps, and between them and the watched step.
FLAGS = ("--max_steps", str(STEPS), "--eval_steps", "0", "--logging_steps", "5")
ASKED = ("--profile_steps", "3")


@pytest.mark.alone
def test_the_figures_of_a_profile_add_up_and_products_are_the_largest(get_run: RunFactory) -> None:
    run = get_run("single", *FLAGS, *ASKED)
    profile = run.profile
    assert profile["device"] == "cpu"
    assert profile["steps"] == [STEPS - 2, STEPS - 1, STEPS]
    parts, top = profile["categories_s_per_step"], profile["top"]
    assert set(parts) == set(PROFILE_CATEGORIES)
    assert sum(parts.values()) == pytest.approx(profile["summed_s_per_step"], rel=1e-9)
    assert profile["busy_s_per_step"] + profile["idle_s_per_step"] == pytest.approx(profile["wall_s_per_step"])
    assert 0 < profile["busy_s_per_step"] <= profile["summed_s_per_step"] * (1 + 1e-9)
    # With one thread nothing overlaps, and each operator's time excludes the operators that it calls.
    assert profile["summed_s_per_step"] == pytest.approx(profile["busy_s_per_step"], rel=1e-6)
    # The clock's rows are of the same steps; a few Python calls lie between its reading and the profiler's.
    rows = [row["step_time_s"] for row in run.steps[-3:]]
    assert profile["wall_s_per_step"] == pytest.approx(sum(rows) / 3, abs=2e-3)
    assert min(parts["optimizer"], parts["attention"]) > 0 == parts["collectives"]
    assert parts["matmul"] > 0.2 * profile["summed_s_per_step"]
    assert "aten::addmm" in [entry["name"] for entry in top[:5]]
    assert len(top) == 25
    assert [entry["s_per_step"] for entry in top] == sorted((entry["s_per_step"] for entry in top), reverse=True)
    # The number of calls is the same in each step.
    assert all(float(entry["calls_per_step"] * 3).is_integer() for entry in top)


def test_a_profiled_run_trains_as_without_a_profile_and_times_its_other_steps(get_run: RunFactory) -> None:
    plain, profiled = get_run("single", *FLAGS), get_run("single", *FLAGS, *ASKED)
    assert plain.profile == {}
    assert not (plain.path / "profile.json").exists()
    for key in ("loss", "lr", "grad_norm", "samples_hash"):
        assert [row[key] for row in plain.steps] == [row[key] for row in profiled.steps]
    assert plain.evals == profiled.evals
    # 3 steps warm up and 1 is watched; 3 are profiled, after one in which the profiler warms up.
    assert plain.memory["ranks"][0]["time"]["window_steps"] == STEPS - 4
    assert profiled.memory["ranks"][0]["time"]["window_steps"] == STEPS - 8
    times = sorted(row["step_time_s"] for row in profiled.steps[4:-4])
    assert profiled.summary["step_time_s_median"] == pytest.approx(times[len(times) // 2])
    assert {**plain.config, "output_dir": "", "profile_steps": 3} == {**profiled.config, "output_dir": ""}


def test_two_ranks_have_collectives_and_leave_out_the_same_steps(get_run: RunFactory) -> None:
    run = get_run("zero3", *FLAGS, *ASKED)
    assert run.profile["categories_s_per_step"]["collectives"] > 0
    assert [rank["time"]["window_steps"] for rank in run.memory["ranks"]] == [STEPS - 8] * 2


def test_the_other_trainer_has_the_same_profile(get_run: RunFactory, tmp_path: Path) -> None:
    flags = (*FLAGS, *ASKED)
    theirs = trained("single", tmp_path / "run", *flags, script="study/experiments/baselines/hf_trainer.py").profile
    ours = get_run("single", *flags).profile
    assert theirs["steps"] == ours["steps"]
    products = [
        {entry["name"]: entry["calls_per_step"] for entry in profile["top"] if entry["category"] == "matmul"}
        for profile in (theirs, ours)
    ]
    assert products[0]["aten::addmm"] == products[1]["aten::addmm"]
