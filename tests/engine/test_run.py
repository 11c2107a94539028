from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines import launch
from runs import train, trained
from study.records.directory import read_run, read_status

GPT = ("--task", "gpt-wikitext")


def test_a_loss_that_is_not_finite_stops_the_run_and_the_record_stays(tmp_path: Path) -> None:
    result = train("ddp", tmp_path / "run", *GPT, "--learning_rate", "1e30", "--warmup_ratio", "0")
    assert result.returncode != 0
    run = read_run(tmp_path / "run")
    assert run.state == "failed"
    step = run.steps[-1]["step"]
    assert run.status["reason"].startswith(f"the loss is NaN at step {step}")
    assert (run.ending.cause, run.ending.not_finite_step) == ("not finite", step)
    assert [row["loss"] is None for row in run.steps] == [False] * (len(run.steps) - 1) + [True]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("strategy", "flags", "reason", "steps", "skipped", "evals"),
    [
        pytest.param(
            "single",
            ("--learning_rate", "1e38", "--warmup_ratio", "0", "--max_steps", "1"),
            "the evaluation loss is not a number",
            1,
            0,
            [],
            id="last step ruins the weights",
        ),
        # The losses stay finite, but the gradient norm does not: only the first step changes weights. A loss of 1e8 has
        # a perplexity that overflows.
        pytest.param(
            "zero1",
            ("--learning_rate", "3e3", "--warmup_ratio", "0", "--eval_steps", "0"),
            "7 of 8 optimizer steps were skipped",
            8,
            7,
            [None],
            id="deepspeed skips steps",
        ),
        pytest.param(
            "zero2",
            ("--engine_override", "gradient_clipping=0.25"),
            "the engine differs from zero2's settings: gradient_clipping is 0.25, requested 0.5",
            0,
            0,
            [],
            id="engine differs",
        ),
        # DeepSpeed silently does not swap tensors smaller than an I/O block: no tensor here is as large as 16 MiB.
        pytest.param(
            "zero3_nvme",
            ("--engine_override", "aio.block_size=16777216"),
            "zero3_nvme swapped no optimizer",
            0,
            0,
            [],
            id="offload leaves no file",
        ),
    ],
)
def test_a_run_that_differs_from_its_flags_fails(strategy, flags, reason, steps, skipped, evals, tmp_path):
    ranks = 2 if skipped else 1
    assert train(strategy, tmp_path / "run", *GPT, *flags, ranks=ranks).returncode != 0
    run = read_run(tmp_path / "run")
    assert run.state == "failed"
    assert run.status["reason"].startswith(reason)
    assert ["skipped" in row for row in run.steps] == [False] * (steps - skipped) + [True] * skipped
    assert [row["loss"] is None for row in run.steps] == [False] * steps
    assert [row["perplexity"] for row in run.evals] == evals


def test_the_tracker_asked_for_gets_the_losses(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained("single", tmp_path / "run", *GPT, "--report_to", "tensorboard")
    tracked = EventAccumulator(str(run.path / "zero-study")).Reload()
    rows = {row["step"]: row["loss"] for row in run.steps}
    # Every third step, before the evaluation after the fourth, and the last.
    assert {event.step: event.value for event in tracked.Scalars("loss")} == {
        step: pytest.approx(rows[step], rel=1e-6) for step in (3, 4, 6, 8)
    }


def test_the_readme_command_trains_under_stage_3_and_prints_progress_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = launch("zero3", "study/train.py", "--max_steps", "2", "--logging_steps", "1", "--output_dir", str(folder))
    assert result.returncode == 0, result.stderr[-2000:]
    engine = json.loads((folder / "engine.json").read_text())
    assert (engine["zero_stage"], engine["world_size"]) == (3, 2)
    assert read_status(folder)["state"] == "ok"
    printed = [line for line in result.stderr.splitlines() if not line.startswith(("W1", "[20"))]
    assert printed[0].startswith("zero3 on 2 ranks: bert-imdb at laptop scale")
    assert printed[-1].startswith("done: loss ")
    assert len(printed) > 2
    assert all(line.startswith("step ") for line in printed[1:-1])
    assert "DeepSpeed" in (folder / "log.txt").read_text()
