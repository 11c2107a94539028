"""HF Trainer and the bare loop train as the study does: same losses, same samples, same record."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forked import fork_ranks
from runs import RunFactory, assert_same_training, by_one_rank, trained
from study.config.errors import RunFailed
from study.config.strategies import read_strategy
from tools import bench

HF_TRAINER, BARE_LOOP = "study/experiments/baselines/hf_trainer.py", "study/experiments/baselines/bare_loop.py"
BERT, GPT = "bert-imdb", "gpt-wikitext"


@pytest.mark.parametrize(
    ("script", "strategy", "task", "flags"),
    [
        (HF_TRAINER, "single", BERT, ()),
        (HF_TRAINER, "single", GPT, ()),
        (BARE_LOOP, "single", GPT, ()),
        (HF_TRAINER, "zero3", BERT, ()),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *((script, "ddp", task, ()) for script in (HF_TRAINER, BARE_LOOP) for task in (BERT, GPT)),
                *((HF_TRAINER, name, GPT, ()) for name in ("zero0", "zero1", "zero2", "zero2_cpu", "zero3_cpu")),
                *((script, "single", GPT, ("--precision", "bf16")) for script in (HF_TRAINER, BARE_LOOP)),
            )
        ),
    ],
)
def test_a_baseline_trains_as_the_study_does_with_a_complete_record(get_run, script, strategy, task, flags, tmp_path):
    """Accumulation over four micro-batches on one rank, or two on each of two ranks; in bf16 as in the study's run."""
    size = "4" if flags else "2"
    run = trained(
        strategy, tmp_path / "run", "--task", task, "--per_device_train_batch_size", size, *flags, script=script
    )
    study, trainer = by_one_rank(get_run, task, *flags), Path(script).stem
    assert_same_training(run, study)
    ranks = 1 if strategy == "single" else 2
    expected = {
        "trainer": trainer,
        "strategy": strategy,
        "world_size": ranks,
        "precision": "bf16" if flags else "fp32",
        "gradient_accumulation_steps": 2 if flags else 4 // ranks,
        "zero_stage": read_strategy(strategy).zero_stage,
    }
    assert {key: run.engine[key] for key in expected} == expected
    assert len(run.environment["code_sha256"]) == 64
    summary = run.summary
    if trainer == "bare_loop":
        assert min(summary["tokens_per_s"], summary["host_peak_rss_gib"]) > 0
        assert all(row["step_time_s"] is None for row in run.steps)
        unmeasured = ("step_time_s_median", "comm_bytes_per_step", "sent_bytes_per_step", "comm_calls_per_step")
        assert {summary[key] for key in unmeasured} == {None}
        assert summary["state_bytes_per_rank"]["params"]["device"] is None
        return
    assert all(row["step_time_s"] > 0 for row in run.steps)
    if ranks == 1:
        assert [key for key in summary if (summary[key] is None) != (study.summary[key] is None)] == []
        assert summary["state_bytes_per_rank"] == study.summary["state_bytes_per_rank"]
    else:
        collectives = run.traffic["collectives"].values()
        assert summary["comm_bytes_per_step"] > 0
        assert summary["sent_bytes_per_step"] == sum(counts["wire_bytes_per_rank"] for counts in collectives) > 0


@pytest.mark.parametrize(
    ("script", "strategy", "flags", "says"),
    [
        (BARE_LOOP, "zero3", (), "bare_loop supports only single and ddp"),
        (HF_TRAINER, "fsdp2", (), "hf_trainer does not support fsdp2"),
        (HF_TRAINER, "single", ("--checkpointing_steps", "5"), "without --checkpointing_steps"),
    ],
)
def test_an_unsupported_request_is_refused_in_one_line(script, strategy, flags, says, tmp_path):
    result = fork_ranks(strategy, script, *flags, "--output_dir", str(tmp_path / "run"), ranks=1)
    assert result.returncode != 0
    (refusal,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert says in refusal.partition(". To fix it: ")[0]
    assert not (tmp_path / "run").exists()


def test_a_box_that_slows_down_changes_speeds_and_no_ratio() -> None:
    seconds = {"study": 2.0, "hf_trainer": 2.2, "bare_loop": 1.98}
    slower = [
        [{name: value * (repeat + turn) for name, value in seconds.items()} for turn in range(3)]
        for repeat in (1, 2, 3, 4, 5)
    ]
    result = bench.compare("case", 1000, slower, overhead=0.001)
    assert result["tokens_per_s"]["study"] == pytest.approx([1000 / 2.0 / slow for slow in (2, 3, 4, 5, 6)])
    assert result["tokens_per_s_median"]["study"] == pytest.approx(1000 / 2.0 / 4)
    assert [result["ratio"]["hf_trainer"][key] for key in ("min", "median", "max")] == pytest.approx([1.1] * 3)
    assert result["ratio"]["bare_loop"]["median"] == pytest.approx(0.99)
    assert result["missed"] == result["undecided"] == []


def test_a_command_that_takes_longer_than_its_limit_misses_its_target() -> None:
    limits = {"study fast": 1.0, "study slow": 1.0, "study either": 1.0}
    timed = {"study fast": [0.5, 0.6, 1.2], "study slow": [1.1, 1.2, 1.3], "study either": [0.9, 1.1, 1.2]}
    assert bench.judge_start_up(timed, limits) == {
        "missed": ["study slow: 1.20 s of CPU (1.10 to 1.30), target at most 1"],
        "undecided": ["study either: 1.10 s of CPU (0.90 to 1.20), target at most 1"],
    }
    # Mixtral is a preset whose class is traced.
    traced = [command for command in bench.COMMANDS if {bench.TRACED, "mixtral-8x7b"} & {*command}]
    assert {most for command, most in bench.COMMANDS.items() if command not in traced} == {1.0}
    assert {bench.COMMANDS[command] for command in traced} == {2.0}


def test_loops_with_different_losses_are_not_compared(get_run: RunFactory) -> None:
    same = by_one_rank(get_run, "bert-imdb")
    different = by_one_rank(get_run, "gpt-wikitext")
    bench.check_same_losses(bench.CASES[0], {"study": same, "bare_loop": same})
    with pytest.raises(RunFailed, match="bare_loop on bert-imdb diverges from the study"):
        bench.check_same_losses(bench.CASES[0], {"study": same, "bare_loop": different})


@pytest.mark.long
def test_the_bench_times_all_three_in_turns(capsys, monkeypatch):
    monkeypatch.setattr(bench, "CASES", (bench.BenchCase("short", ("--seq_length", "16"), turns=2),))
    cores = os.sched_getaffinity(0)
    try:
        status = bench.main(["--repeats", "1", "--json"])
    finally:
        os.sched_setaffinity(0, cores)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    (case,) = document["cases"]
    assert case["tokens_per_s"].keys() == bench.SCRIPTS.keys()
    assert all(speed > 0 for (speed,) in case["tokens_per_s"].values())
    assert document["start_up"].keys() == bench.LIMITS.keys()
    assert status == (1 if case["missed"] or document["start_up_targets"]["missed"] else 0)
