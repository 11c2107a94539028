from __future__ import annotations

import dataclasses
import hashlib
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from damage import Trap
from engine.test_refusals import write_manifest
from runs import BF16_RELATIVE, FP32_RELATIVE, RunFactory, losses, train, trained
from study.config.errors import RunFailed, UserError
from study.config.flags import RunConfig
from study.config.launch_context import Launch
from study.config.strategies import read_strategy
from study.host.memory import GIB
from study.records.directory import Run, read_json, read_run, read_status
from study.run.checkpoint import file_digests, latest_checkpoint
from study.run.resume import check_indexes, engine_classes, find_checkpoint
from sweeps import write_files
from synthetic_records import write_run

GPT = ("--task", "gpt-wikitext")
LORA, MUON = ("--peft", "lora"), ("--optimizer", "muon", "--max_grad_norm", "0")
STATES = ("--precision", "bf16-engine", "--bf16_states")
long = [pytest.mark.long, pytest.mark.timeout(900)]
# One of each kind of checkpoint runs outside the long tests.
WORLD_SIZES = [
    ("zero3", 4, 2), *(pytest.param(*case, marks=long) for case in (
        ("ddp", 4, 2), ("ddp", 2, 4), ("fsdp2", 4, 2),
        ("zero0", 4, 2), ("zero1", 4, 2), ("zero1", 2, 1), ("zero2", 4, 2), ("zero2", 2, 4),
        ("zero2_cpu", 4, 2), ("zero3", 2, 1), ("zero3", 2, 4), ("zero3_cpu_optimizer", 4, 2), ("zero3_cpu", 4, 2),
        ("fsdp2", 2, 1), ("fsdp2", 2, 4), ("hsdp", 4, 8), ("hsdp", 8, 4), ("zero3_hpz", 4, 8), ("zero3_hpz", 8, 4),
        ("ulysses_zero3", 2, 4), ("ulysses_zero3", 4, 2),
    ))
]  # fmt: skip


def save(get_run: RunFactory, strategy: str, ranks: int, *flags: str, step: int = 4) -> tuple[Run, Path]:
    """Return an uninterrupted run and its checkpoint after this step."""
    run = get_run(strategy, *GPT, *flags, "--checkpointing_steps", str(step), ranks=ranks)
    return run, run.path / "checkpoints" / f"step_{step:07d}"


def resume(strategy: str, checkpoint: Path, folder: Path, ranks: int, *flags: str) -> Run:
    return trained(strategy, folder, *GPT, *flags, "--resume_from_checkpoint", str(checkpoint), ranks=ranks)


def assert_continues(resumed: Run, full: Run) -> None:
    for key in ("loss", "grad_norm"):
        values, expected = ([row[key] for row in run.steps] for run in (resumed, full))
        assert values == (expected if None in expected else pytest.approx(expected, rel=FP32_RELATIVE)), key


# With dropout random states must be restored as well.
DROPOUT = ("--dropout", "0.1")


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        *((name, DROPOUT) for name in ("ddp", "zero2_cpu", "zero3")),
        ("zero3", LORA),
        *(
            pytest.param(name, flags, marks=long)
            for flags, names in (
                (DROPOUT, ("fsdp2", "ulysses_zero1", "zero3_tp")),
                (LORA, ("ddp", "zero2", "fsdp2")),
                (MUON, ("zero1", "zero2", "zero3")),
                (STATES, ("zero1", "zero2", "zero3")),
            )
            for name in names
        ),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(get_run, strategy, flags, tmp_path):
    full, checkpoint = save(get_run, strategy, 2, *flags)
    resumed = resume(strategy, checkpoint, tmp_path / "resumed", 2, *flags)
    figures = ("step", "loss", "lr", "grad_norm", "samples_hash")
    rows, expected = ([[row[key] for key in figures] for row in run.steps] for run in (resumed, full))
    assert rows == expected
    assert resumed.evals == full.evals
    assert_no_file_can_be_changed(checkpoint, Launch(read_strategy(strategy), 2, 0, 0, 2))


def assert_no_file_can_be_changed(checkpoint: Path, launch: Launch) -> None:
    """Assert that the manifest lists every file of the engine, and that a change to one is an error with its name."""
    manifest = read_json(checkpoint / "checkpoint.json")
    files = {file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*") if file.is_file()}
    assert manifest["files"].keys() == files - {"checkpoint.json"}
    assert {"random_states_0.pkl", "random_states_1.pkl"} < files
    config = RunConfig.from_dict(manifest["config"] | {"resume_from_checkpoint": str(checkpoint)}, "this test")
    assert find_checkpoint(config, launch, checkpoint) is not None

    def assert_refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            find_checkpoint(config, launch, checkpoint)

    for name in sorted(manifest["files"]):
        file = checkpoint / name
        content = file.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b"0"
        # Rows are read first and have a different error message.
        are_rows = name.endswith(".jsonl")
        file.unlink()
        assert_refused(re.escape(name) + ("" if are_rows else " is missing"))
        file.write_bytes(flipped)
        assert_refused(re.escape(name) + ("" if are_rows else " differs from the saved file"))
        file.write_bytes(content)
    (checkpoint / "random_states_7.pkl").write_bytes(b"another run's")
    assert_refused(r"random_states_7\.pkl was not saved with it")
    assert find_checkpoint(config, dataclasses.replace(launch, local_rank=1), checkpoint) is not None
    (checkpoint / "random_states_7.pkl").unlink()


@pytest.mark.parametrize(("strategy", "before", "after"), WORLD_SIZES)
def test_another_world_size_continues_with_the_losses_of_the_uninterrupted_run(
    get_run, strategy, before, after, tmp_path
):
    full, checkpoint = save(get_run, strategy, before)
    resumed = resume(strategy, checkpoint, tmp_path / "run", after)
    assert resumed.steps[:4] == full.steps[:4]
    for key in ("step", "lr", "samples_hash", "tokens"):
        assert [row[key] for row in resumed.steps] == [row[key] for row in full.steps]
    assert_continues(resumed, full)
    values, expected = ([row["eval_loss"] for row in run.evals] for run in (resumed, full))
    assert values == pytest.approx(expected, rel=FP32_RELATIVE)
    assert resumed.engine["world_size"] == after
    assert f"resumed: the steps up to 4 ran on {before} ranks" in resumed.engine["warnings"]
    # The universal checkpoint is deleted.
    assert {file.name for file in resumed.path.iterdir()} <= {file.name for file in full.path.iterdir()}
    # Saving and loading are separate phases, whose peaks include at least the rank's state.
    for run, phases in ((full, {"save"}), (resumed, {"load"})):
        for rank in run.memory["ranks"]:
            assert rank["phases"].keys() & {"save", "load"} == phases
            if strategy == "zero3":
                state_bytes = sum(rank["state"]["state_bytes"][kind]["device"] for kind in ("params", "optimizer"))
                assert all(rank["phases"][phase]["host"] * GIB > state_bytes for phase in phases)


MICRO_BATCHES_OF_2 = ("--per_device_train_batch_size", "2")


@pytest.mark.parametrize(
    ("strategy", "step", "flags"),
    [
        # Accelerate restores its count of micro-batches: with an odd count, a step of two continued in its middle.
        ("ddp", 3, MICRO_BATCHES_OF_2),
        *(pytest.param(name, 3, MICRO_BATCHES_OF_2, marks=long) for name in ("zero0", "fsdp2", "zero2")),
        # Each sub-group counts its steps.
        pytest.param("zero3", 4, ("--engine_override", "zero_optimization.sub_group_size=100000"), marks=long),
        *(
            pytest.param(name, 4, flags, marks=long)
            for name in ("zero2", "zero3")
            for flags in (("--precision", "bf16-engine"), STATES)
        ),
        *(pytest.param(name, 4, LORA, marks=long) for name in ("ddp", "zero2", "zero3", "fsdp2")),
    ],
)
def test_half_the_ranks_continue_with_other_settings_too(get_run, strategy, step, flags, tmp_path):
    full, checkpoint = save(get_run, strategy, 4, *flags, step=step)
    resumed = resume(strategy, checkpoint, tmp_path / "run", 2, *flags)
    accumulation = [run.engine["gradient_accumulation_steps"] for run in (full, resumed)]
    assert accumulation[1] == (2 * accumulation[0] if step == 3 else accumulation[0])
    if "bf16-engine" in flags:
        assert losses(resumed) == pytest.approx(losses(full), rel=BF16_RELATIVE)
    else:
        assert_continues(resumed, full)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_to_fp32_returns_a_model_with_tied_weights_bit_for_bit(strategy, tmp_path, monkeypatch):
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
    digests = {name: hashlib.sha256(weights[name].detach().numpy().tobytes()).hexdigest() for name in live}
    assert digests == live


def test_an_index_of_shards_with_code_in_it_is_not_read(get_run: RunFactory, tmp_path: Path) -> None:
    _, checkpoint = save(get_run, "fsdp2", 2)
    folders = sorted(file.parent.name for file in checkpoint.glob("*/.metadata"))
    assert folders == ["optimizer_0", "pytorch_model_fsdp_0"]
    check_indexes(checkpoint)
    # A rank's index, which torch reads if the first is missing; and a folder that Accelerate treats as the inner one.
    for name in ("optimizer_0/.metadata", "pytorch_model_fsdp_0/__1.metadata", ".metadata"):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        with pytest.raises(RunFailed, match=rf"{name} is not an index of a checkpoint \(it names posix\.mkdir\)"):
            check_indexes(folder)
    with pytest.raises(pickle.UnpicklingError, match=r"it names posix\.mkdir"):
        FileSystemReader(folder).read_metadata()
    assert not (tmp_path / "sprung").exists()
    assert FileSystemReader(checkpoint / "optimizer_0").read_metadata().state_dict_metadata


def test_a_checkpoint_with_code_or_without_random_states_is_not_resumed_from(get_run, tmp_path):
    """torch's format can contain any pickled call; Accelerate only logs a line if random states are missing."""
    _, checkpoint = save(get_run, "single", 1)
    optimizer_bytes = (checkpoint / "optimizer.bin").read_bytes()
    for name, content, reason in (
        ("optimizer.bin", Trap(tmp_path / "sprung"), "UnpicklingError"),
        ("random_states_0.pkl", {"step": 4}, "random states"),
    ):
        torch.save(content, checkpoint / name)
        write_manifest(checkpoint, files=file_digests(checkpoint, read_json(checkpoint / "checkpoint.json")["files"]))
        folder = tmp_path / name
        assert train("single", folder, *GPT, "--resume_from_checkpoint", str(checkpoint), ranks=1).returncode != 0
        assert reason in read_status(folder)["reason"]
        (checkpoint / "optimizer.bin").write_bytes(optimizer_bytes)
    assert not (tmp_path / "sprung").exists()


def test_a_changed_flag_is_refused_with_a_valid_command_line(get_run: RunFactory) -> None:
    _, checkpoint = save(get_run, "zero3", 4)
    flags = read_json(checkpoint / "checkpoint.json")["config"] | {"resume_from_checkpoint": str(checkpoint)}
    for key, value, fix in (
        ("gradient_checkpointing", True, "use --no-gradient_checkpointing"),
        ("per_device_train_batch_size", 2, "leave --per_device_train_batch_size out"),
        ("engine_override", ["zero_optimization.overlap_comm=false"], "leave --engine_override out"),
        ("learning_rate", 0.1, "use --learning_rate 0.004"),
    ):
        config = RunConfig.from_dict(flags | {key: value}, "this test")
        with pytest.raises(UserError) as refusal:
            find_checkpoint(config, Launch(read_strategy("zero3"), 4, 0, 0, 4), checkpoint)
        assert refusal.value.fix == f"{fix}, or start from scratch"


def test_a_run_without_a_checkpoint_prints_a_notice_and_removes_partial_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path, "single", name="run")
    incomplete = ("step_0000003/model.safetensors", "step_0000004/pytorch_model/zero_states.pt")
    kept = ("step_0000005/notes.txt", "step_0000006/checkpoint.json")
    write_files(run / "checkpoints", dict.fromkeys((*incomplete, *kept), "partial"))
    (run / "photo.jpg").write_text("another program's")
    result = train("single", run, *GPT, "--overwrite_output_dir", "--checkpointing_steps", "100", ranks=1)
    assert result.returncode == 0, result.stderr
    assert "notice: --checkpointing_steps 100 saves no checkpoint in steps 1 to 8" in result.stderr
    # Files of other programs and complete checkpoints stay.
    assert (run / "photo.jpg").exists()
    remaining = {file.relative_to(run / "checkpoints").as_posix() for file in (run / "checkpoints").rglob("*")}
    assert remaining == {"step_0000005", "step_0000006", *kept}


def test_latest_is_the_newest_of_the_checkpoints_that_led_to_the_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path, "single")
    rows = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    for step in (2, 4):
        folder = run / "checkpoints" / f"step_{step:07d}"
        write_files(folder, {"checkpoint.json": "{}", "steps.jsonl": "".join(rows[:step])})
    assert latest_checkpoint(run) == folder


def test_latest_is_never_a_checkpoint_of_a_run_that_was_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    from_latest = ("--resume_from_checkpoint", "latest")

    def train_over(*flags: str) -> tuple[int, str]:
        result = train("single", run, *GPT, "--overwrite_output_dir", *flags, ranks=1)
        return result.returncode, result.stderr

    assert train_over("--checkpointing_steps", "4")[0] == 0
    rows = read_run(run).steps
    shutil.rmtree(run / "checkpoints" / "step_0000008")
    assert train_over(*from_latest)[0] == 0
    assert read_run(run).steps[:4] == rows[:4]
    assert losses(read_run(run)) == [row["loss"] for row in rows]
    # The same run from its start: its rows differ, if only in their times.
    assert train_over()[0] == 0
    rows = read_run(run).steps
    status, printed = train_over(*from_latest)
    assert status == 2
    assert f"{run} has no complete checkpoint of its current run" in printed
    assert read_run(run).steps == rows
    assert (run / "checkpoints" / "step_0000004" / "checkpoint.json").exists()
