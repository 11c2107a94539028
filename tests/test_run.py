"""What a run does when something goes wrong, and that it goes on exactly where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_refusals import write_manifest

from damage import Trap, flip_a_bit
from engines import launch
from runs import losses, train, trained
from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.config.strategies import read_strategy
from study.records.directory import read_json, read_run, read_status
from study.run.checkpoint import digests_of, find_checkpoint
from study.workloads.initial import materialize_initial_weights

GPT = ("--task", "gpt-wikitext")


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "zero2_cpu",
        "zero3",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp2", "ulysses_zero1", "zero3_tp")),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(tmp_path, strategy):
    # Dropout on: its random streams have to be put back as well.
    flags = (*GPT, "--dropout", "0.1")
    whole = trained(strategy, tmp_path / "whole", *flags, "--checkpointing_steps", "4")
    checkpoint = whole.path / "checkpoints" / "step_0000004"
    again = trained(strategy, tmp_path / "resumed", *flags, "--resume_from_checkpoint", str(checkpoint))
    figures = ("step", "loss", "lr", "grad_norm", "samples_hash")
    assert [[row[key] for key in figures] for row in again.steps] == [
        [row[key] for key in figures] for row in whole.steps
    ]
    assert again.evals == whole.evals
    assert_no_file_can_be_changed(checkpoint, Launch(read_strategy(strategy), 2, 0, 0, 2))


def assert_no_file_can_be_changed(checkpoint: Path, launch: Launch) -> None:
    """All that the engine wrote is in the manifest, and each is refused by its name that is not as it was."""
    manifest = read_json(checkpoint / "checkpoint.json")
    saved = manifest["files"]
    there = {file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*") if file.is_file()}
    assert saved.keys() == there - {"checkpoint.json"}
    assert {"random_states_0.pkl", "random_states_1.pkl"} < there
    config = RunConfig.from_dict(manifest["config"] | {"resume_from_checkpoint": str(checkpoint)}, "this test")
    assert find_checkpoint(config, launch, checkpoint) is not None
    for name in sorted(saved):
        whole = (checkpoint / name).read_bytes()
        middle = len(whole) // 2
        damaged = {
            "is missing": None,
            "is not what was saved": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
            if whole
            else b"0",
        }
        for words, content in damaged.items():
            (checkpoint / name).unlink(missing_ok=True)
            if content is not None:
                (checkpoint / name).write_bytes(content)
            # The rows are looked at first, and what is wrong with them is said in their own words.
            words = "" if name.endswith(".jsonl") else words
            with pytest.raises(UserError, match=rf"{re.escape(name)}.*{words}"):
                find_checkpoint(config, launch, checkpoint)
        (checkpoint / name).write_bytes(whole)
    (checkpoint / "random_states_7.pkl").write_bytes(b"another run's")
    with pytest.raises(UserError, match=r"random_states_7\.pkl was not saved with it"):
        find_checkpoint(config, launch, checkpoint)
    assert find_checkpoint(config, dataclasses.replace(launch, local_rank=1), checkpoint) is not None
    (checkpoint / "random_states_7.pkl").unlink()
    (checkpoint / "random_states_1.pkl").unlink()
    os.mkfifo(checkpoint / "random_states_1.pkl")
    with pytest.raises(UserError, match=r"random_states_1\.pkl is not a file"):
        find_checkpoint(config, launch, checkpoint)


def test_initial_weights_with_a_flipped_bit_are_made_anew_by_one_rank_which_says_so(run_of, tmp_path, monkeypatch):
    whole = run_of("ddp", *GPT)
    initial = materialize_initial_weights(RunConfig.from_dict(whole.config, "this test"), tmp_path / "cache")
    flip_a_bit(initial.path / "model.safetensors")
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(tmp_path / "cache"))
    result = train("ddp", tmp_path / "run", *GPT)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stderr.count("model.safetensors was changed) and have been made anew") == 1
    again = read_run(tmp_path / "run")
    assert again.engine["initial_weights_sha256"] == whole.engine["initial_weights_sha256"]
    assert losses(again) == losses(whole)


def test_latest_is_the_last_checkpoint_of_the_run_in_the_folder_and_not_of_one_before_it(tmp_path):
    run = tmp_path / "run"

    def again(*flags: str) -> subprocess.CompletedProcess[str]:
        return train("single", run, *GPT, "--overwrite_output_dir", *flags, ranks=1)

    resumed = ("--resume_from_checkpoint", "latest")
    assert again("--checkpointing_steps", "4").returncode == 0
    rows = read_run(run).steps
    shutil.rmtree(run / "checkpoints" / "step_0000008")
    assert again(*resumed).returncode == 0
    assert read_run(run).steps[:4] == rows[:4]
    assert [row["loss"] for row in read_run(run).steps] == [row["loss"] for row in rows]
    # The same request once more from its start: its rows are others, if only by their times.
    assert again().returncode == 0
    rows = read_run(run).steps
    refused = again(*resumed)
    assert refused.returncode == 2
    assert f"{run} holds no whole checkpoint of the run whose rows are there" in refused.stderr
    assert read_run(run).steps == rows
    assert (run / "checkpoints" / "step_0000004" / "checkpoint.json").exists()


def test_a_checkpoint_that_holds_code_or_no_random_states_is_not_gone_on_from(tmp_path):
    """torch's format can carry any pickled call; only tensors and plain values are let in."""
    import torch

    run = trained("single", tmp_path / "run", *GPT, "--checkpointing_steps", "4")
    checkpoint = run.path / "checkpoints" / "step_0000004"
    shutil.copy(checkpoint / "optimizer.bin", tmp_path)
    torch.save(Trap(tmp_path / "sprung"), checkpoint / "optimizer.bin")
    write_manifest(checkpoint, files=digests_of(checkpoint, read_json(checkpoint / "checkpoint.json")["files"]))
    resumed = train("single", tmp_path / "again", *GPT, "--resume_from_checkpoint", str(checkpoint), ranks=1)
    assert resumed.returncode != 0
    assert not (tmp_path / "sprung").exists()
    assert "UnpicklingError" in read_status(tmp_path / "again")["reason"]

    # Accelerate would go on without these, and say so in a log alone.
    torch.save({"step": 4}, checkpoint / "random_states_0.pkl")
    shutil.copy(tmp_path / "optimizer.bin", checkpoint / "optimizer.bin")
    write_manifest(checkpoint, files=digests_of(checkpoint, read_json(checkpoint / "checkpoint.json")["files"]))
    resumed = train("single", tmp_path / "once more", *GPT, "--resume_from_checkpoint", str(checkpoint), ranks=1)
    assert resumed.returncode != 0
    assert "random states" in read_status(tmp_path / "once more")["reason"]


def test_a_checkpoint_goes_into_the_run_s_own_folder_and_is_named_in_what_a_killed_run_leaves(tmp_path):
    flags = (*GPT, "--checkpointing_steps", "2")
    result = train("ddp", tmp_path / "run", *flags, script="tests/probes/moved_folder.py")
    moved, other = read_run(tmp_path / "moved"), tmp_path / "run"
    assert (result.returncode, moved.state, len(moved.steps)) == (1, "failed", 4)
    assert "was moved or replaced while this run was at work" in moved.status["reason"]
    assert read_status(other)["hint"] == "another run's"
    assert [file.read_text() for file in other.rglob("*.bin")] == ["another run's"]
    assert moved.status["hint"] == f"the record up to step 4 is in {tmp_path / 'moved'}"


def test_a_loss_that_is_no_number_stops_the_run_and_the_record_stays(tmp_path):
    result = train("ddp", tmp_path / "run", *GPT, "--learning_rate", "1e30", "--warmup_ratio", "0", launched=True)
    assert result.returncode != 0
    run = read_run(tmp_path / "run")
    assert run.state == "failed"
    assert run.status["reason"].startswith(f"the loss is NaN at step {run.steps[-1]['step']}")
    assert [row["loss"] is None for row in run.steps] == [False] * (len(run.steps) - 1) + [True]
    assert "Traceback" not in result.stderr.partition("failed: ")[0]


def test_a_last_step_that_ruins_the_weights_is_found_by_the_evaluation_after_it(tmp_path):
    flags = ("--learning_rate", "1e38", "--warmup_ratio", "0", "--max_steps", "1")
    assert train("single", tmp_path / "run", *GPT, *flags, ranks=1).returncode != 0
    run = read_run(tmp_path / "run")
    assert run.state == "failed"
    assert run.status["reason"].startswith("the evaluation loss is not a number")
    assert [row["loss"] is None for row in run.steps] == [False]
    assert run.evals == []


def test_steps_that_deepspeed_leaves_out_are_no_training(tmp_path):
    """Here the losses stay finite and the norm of the gradients does not: the first step is the only one."""
    flags = ("--learning_rate", "3e3", "--warmup_ratio", "0", "--eval_steps", "0")
    assert train("zero1", tmp_path / "run", *GPT, *flags).returncode != 0
    run = read_run(tmp_path / "run")
    assert run.state == "failed"
    assert run.status["reason"].startswith("7 of 8 optimizer steps were skipped")
    assert ["skipped" in row for row in run.steps] == [False] + [True] * 7
    assert [row["loss"] is None for row in run.steps] == [False] * 8
    # A loss of 1e8 has a perplexity that no float holds.
    assert [row["perplexity"] for row in run.evals] == [None]


def test_recomputed_activations_change_no_loss(run_of):
    plain, recomputed = run_of("ddp", *GPT), run_of("ddp", *GPT, "--gradient_checkpointing")
    assert recomputed.config["gradient_checkpointing"]
    assert losses(recomputed) == pytest.approx(losses(plain), rel=1e-6)


def test_an_engine_that_differs_from_what_is_asked_fails_before_training(tmp_path):
    result = train("zero2", tmp_path / "run", *GPT, "--engine_override", "gradient_clipping=0.25", ranks=1)
    assert result.returncode != 0
    run = read_run(tmp_path / "run")
    assert run.state == "failed"
    assert "gradient_clipping is 0.25, asked was 0.5" in run.status["reason"]
    assert run.steps == []


def test_offload_that_leaves_no_file_is_no_offload(tmp_path):
    """DeepSpeed swaps nothing smaller than an I/O block, and says nothing: here no tensor is as large as 16 MiB."""
    result = train("zero3_nvme", tmp_path / "run", *GPT, "--engine_override", "aio.block_size=16777216", ranks=1)
    assert result.returncode != 0
    assert "swapped no optimizer" in read_status(tmp_path / "run")["reason"]


def test_the_tracker_asked_for_gets_the_losses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained("single", tmp_path / "run", *GPT, "--report_to", "tensorboard")
    tracked = EventAccumulator(str(run.path / "zero-study")).Reload()
    rows = {row["step"]: row["loss"] for row in run.steps}
    # Every third step, before the evaluation behind the fourth, and the last.
    assert {event.step: event.value for event in tracked.Scalars("loss")} == {
        step: pytest.approx(rows[step], rel=1e-6) for step in (3, 4, 6, 8)
    }


@pytest.fixture(scope="module")
def as_in_the_readme(tmp_path_factory):
    """Its plain command, with few steps: what was said, and where the record is."""
    folder = tmp_path_factory.mktemp("readme") / "run"
    flags = ("--max_steps", "2", "--logging_steps", "1", "--output_dir", str(folder))
    return launch("zero3", "study/train.py", *flags), folder


def test_the_plain_command_of_the_readme_trains_under_stage_3(as_in_the_readme):
    result, folder = as_in_the_readme
    assert result.returncode == 0, result.stderr[-2000:]
    engine = json.loads((folder / "engine.json").read_text())
    assert (engine["zero_stage"], engine["world_size"]) == (3, 2)
    assert read_status(folder)["state"] == "ok"


def test_nothing_but_progress_reaches_the_terminal_and_the_noise_is_in_the_log(as_in_the_readme):
    result, folder = as_in_the_readme
    own = [line for line in result.stderr.splitlines() if not line.startswith(("W1", "[20"))]
    assert own[0].startswith("zero3 on 2 ranks: bert-imdb at laptop scale")
    assert own[-1].startswith("done: loss ")
    assert len(own) > 2
    assert all(line.startswith("step ") for line in own[1:-1])
    assert "DeepSpeed" in (folder / "log.txt").read_text()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_runs_in_a_row_end_cleanly(tmp_path):
    strategies = (
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "zero3_cpu",
        "zero3_nvme",
        "zero2_cpu",
        "zero3_cpu_nvme",
        "fsdp2",
        "zero0",
    )
    for number in range(50):
        strategy = strategies[number % len(strategies)]
        assert trained(strategy, tmp_path / str(number), *GPT, "--max_steps", "3").state == "ok"
