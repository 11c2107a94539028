"""Other people's loops do the study's work: same losses, same samples, same record."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from forked import fork_ranks
from runs import RunFactory, by_one_rank, trained
from study.baselines import bench
from study.config.errors import RunFailed
from study.records.directory import Run

HF_TRAINER, BARE_LOOP = "study/baselines/hf_trainer.py", "study/baselines/bare_loop.py"


def trained_by(script: str, strategy: str, task: str, folder: Path, *flags: str) -> Run:
    """A baseline's run that accumulates: over four micro-batches alone, over two on each of two ranks."""
    cut = ("--per_device_train_batch_size", "2")
    return trained(strategy, folder, "--task", task, *cut, *flags, script=script)


def assert_same_training(run: Run, study: Run) -> None:
    assert len(run.steps) == len(study.steps) == 8
    for row, wanted in zip(run.steps, study.steps, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        # DeepSpeed's stage 0 clips and tells nobody the norm.
        if run.engine["zero_stage"] != 0:
            assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert row["lr"] == pytest.approx(wanted["lr"], rel=1e-9)
        assert row["samples_hash"] == wanted["samples_hash"]
    assert [row["step"] for row in run.evals] == [4, 8]
    for row, wanted in zip(run.evals, study.evals, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)
    assert run.engine["initial_weights_sha256"] == study.engine["initial_weights_sha256"]
    assert run.engine["optimizer_settings"] == study.engine["optimizer_settings"]
    assert run.summary["tokens"] == study.summary["tokens"]


@pytest.mark.parametrize("task", ["bert-imdb", "gpt-wikitext"])
def test_the_trainer_trains_as_the_study_does_and_leaves_its_whole_record(
    run_of: RunFactory, task: str, tmp_path: Path
) -> None:
    run, study = trained_by(HF_TRAINER, "single", task, tmp_path / "run"), by_one_rank(run_of, task)
    assert_same_training(run, study)
    assert run.engine["trainer"] == "hf_trainer"
    assert run.engine["gradient_accumulation_steps"] == 4
    assert all(row["step_time_s"] > 0 for row in run.steps)
    assert run.summary["state_bytes_per_rank"] == study.summary["state_bytes_per_rank"]
    unmeasured = {key for key, value in run.summary.items() if value is None}
    assert unmeasured == {key for key, value in study.summary.items() if value is None}


def test_the_bare_loop_trains_as_the_study_does_and_says_what_it_did_not_measure(
    run_of: RunFactory, tmp_path: Path
) -> None:
    run, study = trained_by(BARE_LOOP, "single", "gpt-wikitext", tmp_path / "run"), by_one_rank(run_of, "gpt-wikitext")
    assert_same_training(run, study)
    assert run.engine["trainer"] == "bare_loop"
    assert run.summary["tokens_per_s"] > 0
    assert run.summary["host_peak_rss_gib"] > 0
    assert all(row["step_time_s"] is None for row in run.steps)
    for key in ("step_time_s_median", "comm_bytes_per_step", "sent_bytes_per_step", "comm_calls_per_step"):
        assert run.summary[key] is None
    assert run.summary["state_bytes_per_rank"]["params"]["device"] is None


def test_the_trainer_runs_the_launched_deepspeed_file(run_of: RunFactory, tmp_path: Path) -> None:
    run = trained_by(HF_TRAINER, "zero3", "bert-imdb", tmp_path / "run")
    assert_same_training(run, by_one_rank(run_of, "bert-imdb"))
    assert (run.engine["zero_stage"], run.engine["world_size"]) == (3, 2)
    assert run.engine["distributed_type"] == "DEEPSPEED"
    collectives = run.traffic["collectives"].values()
    assert run.summary["comm_bytes_per_step"] > 0
    assert run.summary["sent_bytes_per_step"] == sum(each["wire_bytes_per_rank"] for each in collectives) > 0
    assert len(run.environment["code_sha256"]) == 64


@pytest.mark.long
@pytest.mark.parametrize("script", [HF_TRAINER, BARE_LOOP])
@pytest.mark.parametrize("task", ["bert-imdb", "gpt-wikitext"])
def test_two_ranks_of_ddp_train_as_the_study_does_alone(
    run_of: RunFactory, task: str, script: str, tmp_path: Path
) -> None:
    run = trained_by(script, "ddp", task, tmp_path / "run")
    assert_same_training(run, by_one_rank(run_of, task))
    assert run.engine["world_size"] == 2


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero2_cpu", "zero3_cpu"])
def test_the_trainer_runs_every_stage(run_of: RunFactory, strategy: str, tmp_path: Path) -> None:
    run = trained_by(HF_TRAINER, strategy, "gpt-wikitext", tmp_path / "run")
    assert_same_training(run, by_one_rank(run_of, "gpt-wikitext"))
    assert run.engine["strategy"] == strategy


@pytest.mark.long
@pytest.mark.parametrize("script", [HF_TRAINER, BARE_LOOP])
def test_bf16_is_the_same_autocast_in_every_loop(run_of: RunFactory, script: str, tmp_path: Path) -> None:
    flags = ("--precision", "bf16")
    run = trained_by(script, "single", "gpt-wikitext", tmp_path / "run", *flags, "--per_device_train_batch_size", "4")
    assert_same_training(run, by_one_rank(run_of, "gpt-wikitext", *flags))
    assert run.engine["precision"] == "bf16"


@pytest.mark.parametrize(
    ("script", "strategy", "flags", "says"),
    [
        (BARE_LOOP, "zero3", (), "bare_loop runs single and ddp"),
        (HF_TRAINER, "fsdp2", (), "hf_trainer does not run fsdp2"),
        (HF_TRAINER, "single", ("--checkpointing_steps", "5"), "knows no --checkpointing_steps"),
    ],
)
def test_what_a_baseline_cannot_do_is_refused_in_one_line(
    script: str, strategy: str, flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    result = fork_ranks(strategy, script, *flags, "--output_dir", str(tmp_path / "run"), ranks=1)
    refusals = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0
    assert len(refusals) == 1
    assert says in refusals[0]
    assert "To fix it: " in refusals[0]
    assert not (tmp_path / "run").exists()


def repeats_of(study: float, hf_trainer: float, bare_loop: float) -> list[list[dict[str, float]]]:
    """Seconds per turn on a box that slows down from turn to turn and from repeat to repeat, all three alike."""
    return [
        [
            {"study": study * slow, "hf_trainer": hf_trainer * slow, "bare_loop": bare_loop * slow}
            for slow in (repeat, repeat + 1, repeat + 2)
        ]
        for repeat in (1, 2, 3, 4, 5)
    ]


def test_a_box_that_slows_down_changes_speeds_and_no_ratio() -> None:
    result = bench.compare("case", 1000, repeats_of(2.0, 2.2, 1.98), share=0.001)
    assert result["tokens_per_s"]["study"] == pytest.approx([1000 / 2.0 / slow for slow in (2, 3, 4, 5, 6)])
    assert result["tokens_per_s_median"]["study"] == pytest.approx(1000 / 2.0 / 4)
    assert result["ratio"]["hf_trainer"]["median"] == pytest.approx(1.1)
    assert result["ratio"]["hf_trainer"]["min"] == pytest.approx(result["ratio"]["hf_trainer"]["max"])
    assert result["ratio"]["bare_loop"]["median"] == pytest.approx(0.99)
    assert result["missed"] == result["undecided"] == []


@pytest.mark.parametrize(
    ("repeats", "share", "says"),
    [
        (repeats_of(2.0, 1.9, 2.0), 0.001, "study/hf_trainer is 0.950"),
        (repeats_of(2.0, 2.0, 1.9), 0.001, "study/bare_loop is 0.950"),
        (repeats_of(2.0, 2.1, 2.0), 0.02, "measuring takes 2.00% of a step"),
    ],
)
def test_a_missed_target_is_named(repeats: list[list[dict[str, float]]], share: float, says: str) -> None:
    (line,) = bench.compare("case", 1000, repeats, share)["missed"]
    assert says in line


def test_a_ratio_whose_interval_holds_the_target_is_undecided_and_not_missed() -> None:
    noisy = [[{"study": 1.0, "hf_trainer": 0.99 + 0.008 * number, "bare_loop": 1.0}] for number in range(-4, 5)]
    result = bench.compare("case", 1000, noisy, share=0.001)
    assert result["missed"] == []
    assert "study/hf_trainer is 0.990" in result["undecided"][0]


def test_the_interval_of_a_median_covers_it_with_95_percent_and_no_wider_than_that_takes() -> None:
    for count in (6, 15, 40):
        low, high = map(int, bench.median_interval(range(count)))
        # The true median lies outside when fewer than low + 1 of the values fall on one side of it.
        outside = [2 * sum(math.comb(count, k) for k in range(cut + 1)) / 2**count for cut in (low, low + 1)]
        assert high == count - 1 - low
        assert outside[0] <= 0.05 < outside[1]


def test_loops_that_did_other_work_are_not_compared(run_of: RunFactory) -> None:
    same = by_one_rank(run_of, "bert-imdb")
    other = by_one_rank(run_of, "gpt-wikitext")
    bench._check_same_work(bench.CASES[0], {"study": same, "bare_loop": same})
    with pytest.raises(RunFailed, match="bare_loop on bert-imdb did other work"):
        bench._check_same_work(bench.CASES[0], {"study": same, "bare_loop": other})


@pytest.mark.long
def test_the_bench_times_all_three_in_turns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "CASES", (bench.BenchCase("short", ("--seq_length", "16"), turns=2),))
    cores = os.sched_getaffinity(0)
    try:
        status = bench.main(["--repeats", "1", "--json"])
    finally:
        os.sched_setaffinity(0, cores)
    printed = capsys.readouterr()
    (case,) = json.loads(printed.out)["cases"]
    assert {trainer: len(speeds) for trainer, speeds in case["tokens_per_s"].items()} == dict.fromkeys(bench.SCRIPTS, 1)
    assert all(speed > 0 for speeds in case["tokens_per_s"].values() for speed in speeds)
    assert case["ratio"]["bare_loop"]["min"] <= case["ratio"]["bare_loop"]["max"]
    assert status == (1 if case["missed"] else 0)
