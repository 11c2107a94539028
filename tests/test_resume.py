"""A resumed run repeats the uninterrupted one, with any world size; a damaged checkpoint is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_refusals import write_manifest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from damage import Trap
from runs import FP32_RELATIVE, losses, train, trained
from study.config.errors import RunFailed, UserError
from study.config.flags import RunConfig, parse_command_line
from study.config.launched import Launch
from study.config.strategies import read_strategy
from study.host.memory import GIB
from study.records.directory import Run, read_json, read_run, read_status
from study.run.checkpoint import digests_of, last_checkpoint
from study.run.resume import check_indexes, engine_classes, find_checkpoint
from synthetic_records import write_run

GPT = ("--task", "gpt-wikitext")
# Weights that are rounded to 8 bits differ by a rounding here and there: tests/test_equivalence.py.
BF16_RELATIVE = 2**-9
SaveAt = Callable[..., tuple[Run, Path]]
long = [pytest.mark.long, pytest.mark.timeout(900)]
# One of each kind of checkpoint is quick.
WORLD_SIZES = [
    ("zero3", 4, 2), *(pytest.param(*case, marks=long) for case in (
        ("ddp", 4, 2), ("ddp", 2, 4), ("fsdp2", 4, 2),
        ("zero0", 4, 2), ("zero1", 4, 2), ("zero1", 2, 1), ("zero2", 4, 2), ("zero2", 2, 4),
        ("zero2_cpu", 4, 2), ("zero3", 2, 1), ("zero3", 2, 4), ("zero3_cpu_optimizer", 4, 2), ("zero3_cpu", 4, 2),
        ("fsdp2", 2, 1), ("fsdp2", 2, 4), ("hsdp", 4, 8), ("hsdp", 8, 4), ("zero3_hpz", 4, 8), ("zero3_hpz", 8, 4),
        ("ulysses_zero3", 2, 4), ("ulysses_zero3", 4, 2),
    ))
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SaveAt:
    """An uninterrupted run, and its checkpoint at half of its steps."""
    made: dict[tuple[str, ...], Run] = {}

    def save(strategy: str, ranks: int, *flags: str, step: int = 4) -> tuple[Run, Path]:
        key = (strategy, str(ranks), str(step), *flags)
        if key not in made:
            folder = tmp_path_factory.mktemp("saved") / "run"
            steps = ("--checkpointing_steps", str(step))
            made[key] = trained(strategy, folder, *GPT, *flags, *steps, ranks=ranks)
        return made[key], made[key].path / "checkpoints" / f"step_{step:07d}"

    return save


def resume(strategy: str, checkpoint: Path, folder: Path, ranks: int, *flags: str) -> Run:
    return trained(strategy, folder, *GPT, *flags, "--resume_from_checkpoint", str(checkpoint), ranks=ranks)


def assert_continues(resumed: Run, whole: Run) -> None:
    for key in ("loss", "grad_norm"):
        found, expected = ([row[key] for row in run.steps] for run in (resumed, whole))
        assert found == (expected if None in expected else pytest.approx(expected, rel=FP32_RELATIVE)), key


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero2_cpu", "zero3", *(pytest.param(one, marks=long) for one in ("fsdp2", "ulysses_zero1", "zero3_tp"))],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(saved: SaveAt, strategy: str, tmp_path: Path) -> None:
    # Dropout on: its random streams have to be put back as well.
    flags = ("--dropout", "0.1")
    whole, checkpoint = saved(strategy, 2, *flags)
    again = resume(strategy, checkpoint, tmp_path / "resumed", 2, *flags)
    figures = ("step", "loss", "lr", "grad_norm", "samples_hash")
    rows, expected = ([[row[key] for key in figures] for row in run.steps] for run in (again, whole))
    assert rows == expected
    assert again.evals == whole.evals
    assert_no_file_can_be_changed(checkpoint, Launch(read_strategy(strategy), 2, 0, 0, 2))


def assert_no_file_can_be_changed(checkpoint: Path, launch: Launch) -> None:
    """The manifest has every file that the engine wrote, and a changed one is refused by its name."""
    manifest = read_json(checkpoint / "checkpoint.json")
    there = {file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*") if file.is_file()}
    assert manifest["files"].keys() == there - {"checkpoint.json"}
    assert {"random_states_0.pkl", "random_states_1.pkl"} < there
    config = RunConfig.from_dict(manifest["config"] | {"resume_from_checkpoint": str(checkpoint)}, "this test")
    assert find_checkpoint(config, launch, checkpoint) is not None

    def assert_refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            find_checkpoint(config, launch, checkpoint)

    for name in sorted(manifest["files"]):
        file = checkpoint / name
        whole = file.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if whole else b"0"
        # Rows are read first, and refused in other words.
        are_rows = name.endswith(".jsonl")
        file.unlink()
        assert_refused(re.escape(name) + ("" if are_rows else " is missing"))
        file.write_bytes(flipped)
        assert_refused(re.escape(name) + ("" if are_rows else " differs from the saved file"))
        file.write_bytes(whole)
    (checkpoint / "random_states_7.pkl").write_bytes(b"another run's")
    assert_refused(r"random_states_7\.pkl was not saved with it")
    assert find_checkpoint(config, dataclasses.replace(launch, local_rank=1), checkpoint) is not None
    (checkpoint / "random_states_7.pkl").unlink()
    (checkpoint / "random_states_1.pkl").unlink()
    os.mkfifo(checkpoint / "random_states_1.pkl")
    assert_refused(r"random_states_1\.pkl is not a file")


@pytest.mark.parametrize(("strategy", "before", "after"), WORLD_SIZES)
def test_another_world_size_continues_with_the_losses_of_the_uninterrupted_run(
    saved: SaveAt, strategy: str, before: int, after: int, tmp_path: Path
) -> None:
    whole, checkpoint = saved(strategy, before)
    again = resume(strategy, checkpoint, tmp_path / "run", after)
    assert again.steps[:4] == whole.steps[:4]
    for key in ("step", "lr", "samples_hash", "tokens"):
        assert [row[key] for row in again.steps] == [row[key] for row in whole.steps]
    assert_continues(again, whole)
    found, expected = ([row["eval_loss"] for row in run.evals] for run in (again, whole))
    assert found == pytest.approx(expected, rel=FP32_RELATIVE)
    assert again.engine["world_size"] == after
    assert f"resumed: the steps up to 4 ran on {before} ranks" in again.engine["warnings"]
    # The universal checkpoint is deleted.
    assert {file.name for file in again.path.iterdir()} <= {file.name for file in whole.path.iterdir()}
    # Saving and loading are phases of their own, whose peaks include at least the rank's state.
    for run, phases in ((whole, {"save"}), (again, {"load"})):
        for rank in run.memory["ranks"]:
            assert rank["phases"].keys() & {"save", "load"} == phases
            if strategy == "zero3":
                own = sum(rank["state"]["state_bytes"][kind]["device"] for kind in ("params", "optimizer"))
                assert all(rank["phases"][phase]["host"] * GIB > own for phase in phases)


MICRO_BATCHES_OF_2 = ("--per_device_train_batch_size", "2")


@pytest.mark.parametrize(
    ("strategy", "step", "flags"),
    [
        # Accelerate puts its count of micro-batches back: at an odd one a step of two continued in the middle.
        ("ddp", 3, MICRO_BATCHES_OF_2),
        *(pytest.param(name, 3, MICRO_BATCHES_OF_2, marks=long) for name in ("zero0", "fsdp2", "zero2")),
        # Each group counts its own steps.
        pytest.param("zero3", 4, ("--engine_override", "zero_optimization.sub_group_size=100000"), marks=long),
        *(pytest.param(name, 4, ("--precision", "bf16-engine"), marks=long) for name in ("zero2", "zero3")),
    ],
)
def test_half_the_ranks_continue_with_other_settings_too(
    saved: SaveAt, strategy: str, step: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    whole, checkpoint = saved(strategy, 4, *flags, step=step)
    again = resume(strategy, checkpoint, tmp_path / "run", 2, *flags)
    accumulation = [run.engine["gradient_accumulation_steps"] for run in (whole, again)]
    assert accumulation[1] == (2 * accumulation[0] if step == 3 else accumulation[0])
    if "bf16-engine" in flags:
        assert losses(again) == pytest.approx(losses(whole), rel=BF16_RELATIVE)
    else:
        assert_continues(again, whole)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_to_fp32_returns_a_model_with_tied_weights_bit_for_bit(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    flags = (*GPT, "--max_steps", "3", "--checkpointing_steps", "3")
    run = trained(strategy, tmp_path / "run", *flags, script="tests/probes/live_weights.py")
    live = read_json(run.path / "checkpoints" / "live_weights.json")
    checkpoint = run.path / "checkpoints" / "step_0000003"
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with torch.serialization.safe_globals(engine_classes()):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="pytorch_model")
    assert "lm_head.weight" not in live, "tied to the embedding"
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    found = {name: hashlib.sha256(weights[name].detach().numpy().tobytes()).hexdigest() for name in live}
    assert found == live


def test_an_index_of_shards_with_code_in_it_is_not_read(saved: SaveAt, tmp_path: Path) -> None:
    _, checkpoint = saved("fsdp2", 4)
    found = sorted(file.parent.name for file in checkpoint.glob("*/.metadata"))
    assert found == ["optimizer_0", "pytorch_model_fsdp_0"]
    check_indexes(checkpoint)
    # A rank's own, which torch reads where the first is missing; a folder that Accelerate takes for the inner one.
    for name in ("optimizer_0/.metadata", "pytorch_model_fsdp_0/__1.metadata", ".metadata"):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        with pytest.raises(RunFailed, match=rf"{name} is not an index of a checkpoint \(it names posix\.mkdir\)"):
            check_indexes(folder)
    os.mkfifo(checkpoint / "own.metadata")
    with pytest.raises(RunFailed, match=r"own.metadata is not an index of a checkpoint \(not a regular file\)"):
        check_indexes(checkpoint)
    (checkpoint / "own.metadata").unlink()
    with pytest.raises(pickle.UnpicklingError, match=r"it names posix\.mkdir"):
        FileSystemReader(folder).read_metadata()
    assert not (tmp_path / "sprung").exists()
    assert FileSystemReader(checkpoint / "optimizer_0").read_metadata().state_dict_metadata


def test_a_checkpoint_with_code_or_without_random_states_is_not_resumed_from(saved: SaveAt, tmp_path: Path) -> None:
    """torch's format can contain any pickled call; Accelerate continues without random states, and logs a line."""
    _, checkpoint = saved("single", 1)
    whole = (checkpoint / "optimizer.bin").read_bytes()
    for name, content, reason in (
        ("optimizer.bin", Trap(tmp_path / "sprung"), "UnpicklingError"),
        ("random_states_0.pkl", {"step": 4}, "random states"),
    ):
        torch.save(content, checkpoint / name)
        write_manifest(checkpoint, files=digests_of(checkpoint, read_json(checkpoint / "checkpoint.json")["files"]))
        folder = tmp_path / name
        assert train("single", folder, *GPT, "--resume_from_checkpoint", str(checkpoint), ranks=1).returncode != 0
        assert reason in read_status(folder)["reason"]
        (checkpoint / "optimizer.bin").write_bytes(whole)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("changed", "fix"),
    [
        (("--gradient_checkpointing",), "use --no-gradient_checkpointing"),
        (("--per_device_train_batch_size", "2"), "leave --per_device_train_batch_size out"),
        (("--engine_override", "zero_optimization.overlap_comm=false"), "leave --engine_override out"),
        (("--learning_rate", "0.1"), "use --learning_rate 0.004"),
    ],
)
def test_a_changed_flag_is_refused_with_what_a_command_line_takes(
    changed: tuple[str, ...], fix: str, saved: SaveAt, tmp_path: Path
) -> None:
    _, checkpoint = saved("zero3", 2)
    manifest = read_json(checkpoint / "checkpoint.json")
    own = {key: getattr(parse_command_line(changed), key) for key in (changed[0].removeprefix("--"),)}
    config = RunConfig.from_dict(manifest["config"] | own | {"resume_from_checkpoint": str(checkpoint)}, "this test")
    with pytest.raises(UserError) as refusal:
        find_checkpoint(config, Launch(read_strategy("zero3"), 2, 0, 0, 2), checkpoint)
    assert refusal.value.fix == f"{fix}, or start from scratch"
    flags = fix.removeprefix("use ").split() if fix.startswith("use ") else []
    assert parse_command_line(flags) == RunConfig(
        **{changed[0][2:]: manifest["config"][changed[0][2:]]} if flags else {}
    )


def test_a_run_that_will_save_no_checkpoint_says_so_and_clears_what_a_killed_save_left(tmp_path: Path) -> None:
    run = write_run(tmp_path, "single", name="run")
    for name in ("step_0000003/model.safetensors", "step_0000004/pytorch_model/zero_states.pt",
                 "step_0000005/notes.txt", "step_0000006/checkpoint.json"):  # fmt: skip
        file = run / "checkpoints" / name
        file.parent.mkdir(parents=True)
        file.write_text("partial")
    result = train("single", run, *GPT, "--overwrite_output_dir", "--checkpointing_steps", "100", ranks=1)
    assert result.returncode == 0, result.stderr
    assert "notice: --checkpointing_steps 100 saves no checkpoint in the 8 steps of this run" in result.stderr
    # Others' files, and what is complete, are left alone.
    left = {file.relative_to(run / "checkpoints").as_posix() for file in (run / "checkpoints").rglob("*")}
    assert left == {"step_0000005", "step_0000005/notes.txt", "step_0000006", "step_0000006/checkpoint.json"}


def test_latest_is_the_newest_of_the_checkpoints_that_led_to_the_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path, "single")
    rows = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    for step in (2, 4):
        folder = run / "checkpoints" / f"step_{step:07d}"
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text("{}")
        (folder / "steps.jsonl").write_text("".join(rows[:step]))
    assert last_checkpoint(run) == folder


def test_latest_is_never_a_checkpoint_of_a_run_that_was_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    resumed = ("--resume_from_checkpoint", "latest")

    def again(*flags: str) -> tuple[int, str]:
        result = train("single", run, *GPT, "--overwrite_output_dir", *flags, ranks=1)
        return result.returncode, result.stderr

    assert again("--checkpointing_steps", "4")[0] == 0
    rows = read_run(run).steps
    shutil.rmtree(run / "checkpoints" / "step_0000008")
    assert again(*resumed)[0] == 0
    assert read_run(run).steps[:4] == rows[:4]
    assert losses(read_run(run)) == [row["loss"] for row in rows]
    # The same request from its start: its rows differ, if only in their times.
    assert again()[0] == 0
    rows = read_run(run).steps
    status, printed = again(*resumed)
    assert status == 2
    assert f"{run} has no complete checkpoint of its current run" in printed
    assert read_run(run).steps == rows
    assert (run / "checkpoints" / "step_0000004" / "checkpoint.json").exists()


def test_a_moved_run_saves_no_checkpoint_in_the_folder_that_replaced_its_own(tmp_path: Path) -> None:
    flags = (*GPT, "--checkpointing_steps", "2")
    result = train("ddp", tmp_path / "run", *flags, script="tests/probes/moved_folder.py")
    moved, other = read_run(tmp_path / "moved"), tmp_path / "run"
    assert (result.returncode, moved.state, len(moved.steps)) == (1, "failed", 4)
    assert "was moved or replaced during this run" in moved.status["reason"]
    assert read_status(other)["hint"] == "another run's"
    assert [file.read_text() for file in other.rglob("*.bin")] == ["another run's"]
    assert moved.status["hint"] == f"the record up to step 4 is in {tmp_path / 'moved'}"
