"""Runs of study/train.py that several tests read, each made once per session."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from forked import fork_ranks
from study.config.strategies import STRATEGY_DIRECTORY, WITH_REPLICAS, read_yaml
from study.records.directory import Run, read_run

RunFactory = Callable[..., Run]

# Small, and different from every default that could hide a mismatch: decay, warm-up, and an effective clipping.
FLAGS = (
    "--scale", "laptop", "--max_steps", "8", "--global_batch_size", "8", "--seq_length", "32", "--train_samples", "64",
    "--eval_samples", "24", "--weight_decay", "0.01", "--warmup_ratio", "0.25", "--max_grad_norm", "0.5",
    "--eval_steps", "4", "--logging_steps", "3",
)  # fmt: skip
# A CPU without bf16 emulates it slowly: half of the tokens, and no evaluation but a small one at the end.
BF16_FLAGS = ("--seq_length", "16", "--eval_steps", "0", "--eval_samples", "8")
# Without dropout, strategies differ only in the order of floating-point sums.
FP32_RELATIVE = 1e-5
# With autocast a logit has a rounding error of up to 2**-9 of itself (bf16 keeps 8 bits), and cross-entropy changes by
# at most twice the largest error among a sample's logits. Once runs differ in the last fp32 bit of a weight, single
# roundings differ. Logits of these models stay near 1, so a sample's loss may change by 2**-8; a step's loss is a mean
# over many samples or tokens with independent roundings: 2**-9 of it.
BF16_RELATIVE = 2**-9


def default_ranks(name: str) -> int:
    """Return the number of processes in the strategy's file."""
    return 1 if name == "single" else 4 if name in WITH_REPLICAS else 2


def train(
    strategy: str, output_dir: Path, *flags: str, ranks: int = 2, timeout: float = 300, script: str = "study/train.py"
) -> subprocess.CompletedProcess[str]:
    nvme = output_dir.parent / "nvme"
    return fork_ranks(
        strategy,
        script,
        *FLAGS,
        "--output_dir",
        str(output_dir),
        "--nvme_path",
        str(nvme),
        *flags,
        ranks=ranks,
        timeout=timeout,
    )


def trained(strategy: str, output_dir: Path, *flags: str, ranks: int | None = None, **how: Any) -> Run:
    """Return the record of a successful run; a failed one raises with the end of its output."""
    result = train(strategy, output_dir, *flags, ranks=ranks or default_ranks(strategy), **how)
    log = output_dir / "log.txt"
    written = log.read_text(errors="replace")[-3000:] if log.exists() else "no log"
    assert result.returncode == 0, f"{result.stderr[-3000:]}\n{written}"
    return read_run(output_dir)


def write_strategy(folder: Path, name: str, shipped: str, section: str, **settings: Any) -> str:
    """Write a shipped Accelerate file under another name, with changed keys of a section; return it as a strategy."""
    document = read_yaml(STRATEGY_DIRECTORY / f"{shipped}.yaml")
    document[section] |= settings
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return f"{folder}/{name}"


@pytest.fixture(scope="session")
def get_run(tmp_path_factory: pytest.TempPathFactory) -> RunFactory:
    """Return a function that gives the finished run of a strategy with these flags, from its record after the first
    call.
    """
    runs: dict[tuple[str, ...], Run] = {}
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A process of pytest-xdist has a folder below the session's, which all processes share.
        root = root.parent

    def make(strategy: str, *flags: str, ranks: int | None = None) -> Run:
        ranks = ranks or default_ranks(strategy)
        key = (strategy, str(ranks), *flags)
        if key not in runs:
            output_dir = root / "runs" / f"{strategy}-{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}"
            output_dir.parent.mkdir(exist_ok=True)
            with FileLock(f"{output_dir}.lock"):
                if not output_dir.exists():
                    trained(strategy, output_dir, *flags, ranks=ranks)
            runs[key] = read_run(output_dir)
            assert runs[key].state == "ok", runs[key].status
        return runs[key]

    return make


def by_one_rank(get_run: RunFactory, task: str, *flags: str) -> Run:
    """Return the run of `single`, with each step cut into two micro-batches."""
    return get_run("single", "--task", task, "--per_device_train_batch_size", "4", *flags)


def losses(run: Run) -> list[float]:
    """Return the loss of each step."""
    return [row["loss"] for row in run.steps]


def assert_same_training(arm: Run, single: Run) -> None:
    """Assert equal steps, evaluations, initial weights and optimizer settings, within the fp32 tolerances."""
    assert len(arm.steps) == len(single.steps) == 8
    for key, relative in (("loss", FP32_RELATIVE), ("grad_norm", 1e-4), ("lr", 1e-9)):
        values, expected = ([row[key] for row in run.steps] for run in (arm, single))
        if key == "grad_norm" and arm.engine["zero_stage"] == 0:
            # DeepSpeed without ZeRO clips fp32 gradients and reports no norm.
            expected = [None] * 8
        assert values == (expected if None in expected else pytest.approx(expected, rel=relative)), key
    assert [row["samples_hash"] for row in arm.steps] == [row["samples_hash"] for row in single.steps]
    assert [row["step"] for row in arm.evals] == [4, 8]
    for row, expected_row in zip(arm.evals, single.evals, strict=True):
        assert row == pytest.approx(expected_row, rel=FP32_RELATIVE)
    for key in ("initial_weights_sha256", "optimizer_settings"):
        assert arm.engine[key] == single.engine[key], key
    for key in ("tokens", "model_flops_per_step"):
        assert arm.summary[key] == single.summary[key], key
