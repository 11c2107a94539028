"""A checkpoint goes on with another number of ranks, and its weights can be had without the engine."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from damage import Trap
from runs import FP32_RELATIVE, losses, trained
from study.config.errors import RunFailed
from study.host.memory import GIB
from study.records.directory import Run, read_json
from study.run.checkpoint import _engine_classes
from study.run.other_ranks import check_indexes

GPT = ("--task", "gpt-wikitext")
# Weights that are rounded to 8 bits differ by a rounding here and there: tests/test_equivalence.py.
BF16_RELATIVE = 2**-9
SaveAt = Callable[[str, int], tuple[Run, Path]]
# By kind of checkpoint; the rest is long.
QUICK = [("zero3", 4, 2)]
LONG = [
    ("ddp", 4, 2), ("ddp", 2, 4), ("fsdp2", 4, 2),
    ("zero0", 4, 2), ("zero1", 4, 2), ("zero1", 2, 1), ("zero2", 4, 2), ("zero2", 2, 4),
    ("zero2_cpu", 4, 2), ("zero3", 2, 1), ("zero3", 2, 4), ("zero3_cpu_optimizer", 4, 2), ("zero3_cpu", 4, 2),
    ("fsdp2", 2, 1), ("fsdp2", 2, 4), ("hsdp", 4, 8), ("hsdp", 8, 4), ("zero3_hpz", 4, 8), ("zero3_hpz", 8, 4),
    ("ulysses_zero3", 2, 4), ("ulysses_zero3", 4, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SaveAt:
    """An uninterrupted run, and its checkpoint at half of its steps."""
    made: dict[tuple[str, int], Run] = {}

    def save(strategy: str, ranks: int) -> tuple[Run, Path]:
        if (strategy, ranks) not in made:
            folder = tmp_path_factory.mktemp("saved") / "run"
            made[strategy, ranks] = trained(strategy, folder, *GPT, "--checkpointing_steps", "4", ranks=ranks)
        whole = made[strategy, ranks]
        return whole, whole.path / "checkpoints" / "step_0000004"

    return save


def resume(strategy: str, checkpoint: Path, folder: Path, ranks: int, *flags: str) -> Run:
    return trained(strategy, folder, *GPT, *flags, "--resume_from_checkpoint", str(checkpoint), ranks=ranks)


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [*QUICK, *(pytest.param(*case, marks=[pytest.mark.long, pytest.mark.timeout(900)]) for case in LONG)],
)
def test_other_ranks_go_on_with_the_losses_of_the_uninterrupted_run(
    saved: SaveAt, strategy: str, before: int, after: int, tmp_path: Path
) -> None:
    whole, checkpoint = saved(strategy, before)
    again = resume(strategy, checkpoint, tmp_path / "run", after)
    assert again.steps[:4] == whole.steps[:4]
    for key in ("step", "lr", "samples_hash", "tokens"):
        assert [row[key] for row in again.steps] == [row[key] for row in whole.steps]
    for key in ("loss", "grad_norm"):
        found, expected = ([row[key] for row in run.steps] for run in (again, whole))
        assert found == (expected if None in expected else pytest.approx(expected, rel=FP32_RELATIVE))
    assert [row["eval_loss"] for row in again.evals] == pytest.approx(
        [row["eval_loss"] for row in whole.evals], rel=FP32_RELATIVE
    )
    assert again.engine["world_size"] == after
    assert f"resumed: the steps up to 4 ran on {before} ranks" in again.engine["warnings"]
    # What was put together for the engine is gone.
    assert {file.name for file in again.path.iterdir()} <= {file.name for file in whole.path.iterdir()}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strategy", "flag", "relative"),
    [
        # Each group counts its own steps.
        ("zero3", "zero_optimization.sub_group_size=100000", FP32_RELATIVE), ("zero2", "bf16-engine", BF16_RELATIVE),
        ("zero3", "bf16-engine", BF16_RELATIVE),
    ],
)  # fmt: skip
def test_other_settings_of_an_engine_go_on_too(strategy: str, flag: str, relative: float, tmp_path: Path) -> None:
    flags = ("--precision" if flag == "bf16-engine" else "--engine_override", flag)
    whole = trained(strategy, tmp_path / "whole", *GPT, *flags, "--checkpointing_steps", "4", ranks=4)
    again = resume(strategy, whole.path / "checkpoints" / "step_0000004", tmp_path / "run", 2, *flags)
    assert losses(again) == pytest.approx(losses(whole), rel=relative)


def test_the_memory_of_saving_and_of_loading_is_a_phase_of_its_own(saved: SaveAt, tmp_path: Path) -> None:
    whole, checkpoint = saved("zero3", 4)
    again = resume("zero3", checkpoint, tmp_path / "run", 2)
    for run, phases in ((whole, {"save"}), (again, {"load"})):
        for rank in run.memory["ranks"]:
            assert rank["phases"].keys() & {"save", "load"} == phases
            # At least what the rank holds when it is loaded, and when it is saved.
            held = sum(rank["state"]["state_bytes"][kind]["device"] for kind in ("params", "optimizer"))
            assert all(rank["phases"][phase]["host"] * GIB > held for phase in phases)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_to_fp32_gives_a_model_with_tied_weights_back_bit_for_bit(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    flags = (*GPT, "--max_steps", "3", "--checkpointing_steps", "3")
    run = trained(strategy, tmp_path / "run", *flags, script="tests/probes/live_weights.py")
    live = read_json(run.path / "checkpoints" / "live_weights.json")
    checkpoint = run.path / "checkpoints" / "step_0000003"
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with torch.serialization.safe_globals(_engine_classes()):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="pytorch_model")
    assert "lm_head.weight" not in live, "tied to the embedding"
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    found = {name: hashlib.sha256(weights[name].detach().numpy().tobytes()).hexdigest() for name in live}
    assert found == live


def test_an_index_of_shards_that_holds_code_is_not_read(saved: SaveAt, tmp_path: Path) -> None:
    _, checkpoint = saved("fsdp2", 4)
    assert sorted(file.parent.name for file in checkpoint.glob("*/.metadata")) == [
        "optimizer_0",
        "pytorch_model_fsdp_0",
    ]
    check_indexes(checkpoint)
    # A rank's own, which torch takes where the first is not there; a folder that Accelerate takes for the inner one.
    for name in ("optimizer_0/.metadata", "pytorch_model_fsdp_0/__1.metadata", ".metadata"):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        with pytest.raises(RunFailed, match=rf"{name} is no index of a checkpoint \(it names posix\.mkdir\)"):
            check_indexes(folder)
    os.mkfifo(checkpoint / "own.metadata")
    with pytest.raises(RunFailed, match=r"own.metadata is no index of a checkpoint \(not a regular file\)"):
        check_indexes(checkpoint)
    (checkpoint / "own.metadata").unlink()
    with pytest.raises(pickle.UnpicklingError, match=r"it names posix\.mkdir"):
        FileSystemReader(folder).read_metadata()
    assert not (tmp_path / "sprung").exists()
    assert FileSystemReader(checkpoint / "optimizer_0").read_metadata().state_dict_metadata


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=[pytest.mark.long]) for name in ("zero0", "fsdp2", "zero2"))]
)
def test_a_step_of_more_micro_batches_begins_where_the_last_one_ended(strategy: str, tmp_path: Path) -> None:
    """Accelerate counts micro-batches over all steps, and puts its count back: at an odd one a step of two went on in
    the middle."""
    flags = ("--per_device_train_batch_size", "2")
    whole = trained(strategy, tmp_path / "whole", *GPT, *flags, "--checkpointing_steps", "3", ranks=4)
    again = resume(strategy, whole.path / "checkpoints" / "step_0000003", tmp_path / "run", 2, *flags)
    plans = [run.config["global_batch_size"] // (2 * run.engine["world_size"]) for run in (whole, again)]
    assert plans[1] == 2 * plans[0]
    for key in ("loss", "grad_norm"):
        found, expected = ([row[key] for row in run.steps] for run in (again, whole))
        assert found == (expected if None in expected else pytest.approx(expected, rel=FP32_RELATIVE))
