"""Each precision computes the same in every engine: arithmetic, loss scale and skipped steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from engine.test_refusals import assert_refused
from forked import fork_ranks
from runs import BF16_FLAGS, BF16_RELATIVE, FLAGS, RunFactory, losses, trained
from study.engine.optimizer import LOSS_SCALER
from study.records.directory import Run, read_run

GPT = ("--task", "gpt-wikitext")
FP16, ENGINE = ("--precision", "fp16"), ("--precision", "fp16-engine")
# So high that gradients overflow at the first loss scale, while losses stay finite.
OVERFLOWS = ("--learning_rate", "0.3", "--warmup_ratio", "0")
SAVES = ("--checkpointing_steps", "4")
# As BF16_RELATIVE, with the 11 bits of fp16 instead of the 8 of bf16.
FP16_RELATIVE = 2**-12

HAS_FP16 = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_fp16_supported()
needs_fp16 = pytest.mark.skipif(not HAS_FP16, reason="this CPU has no fp16")


@pytest.mark.skipif(HAS_FP16, reason="this CPU has fp16")
@pytest.mark.parametrize("precision", ["fp16", "fp16-engine"])
def test_fp16_without_hardware_support_is_refused(precision: str, tmp_path: Path) -> None:
    says, fix = (f"--precision {precision}", "this CPU has no fp16"), "use --precision bf16"
    assert_refused(tmp_path, "--scale", "laptop", "--precision", precision, says=says, fix=fix)


def skipped(run: Run) -> list[int]:
    return [row["step"] for row in run.steps if "skipped" in row]


@needs_fp16
@pytest.mark.parametrize(
    ("strategy", "precision", "reference", "weights"),
    [
        ("ddp", FP16, "single", "float32"),
        ("fsdp2", FP16, "single", "float32"),
        ("zero3", ENGINE, "zero1", "float16"),
        pytest.param("zero0", FP16, "single", "float32", marks=pytest.mark.long),
        pytest.param("zero2_cpu", ENGINE, "zero1", "float16", marks=pytest.mark.long),
    ],
)
def test_fp16_is_one_training_in_every_engine_that_has_it(get_run, strategy, precision, reference, weights):
    """Autocast over fp32 weights, or the engine's fp16 weights."""
    cut = ("--per_device_train_batch_size", "4") if reference == "single" else ()
    expected, arm = get_run(reference, *GPT, *precision, *cut), get_run(strategy, *GPT, *precision)
    assert (arm.engine["precision"], arm.engine["param_dtype"]) == (precision[1], weights)
    assert losses(arm) == pytest.approx(losses(expected), rel=FP16_RELATIVE)
    fp32 = losses(get_run(strategy, *GPT))[0]
    assert losses(arm)[0] != pytest.approx(fp32, rel=1e-8), "fp16 must not be fp32 under another name"


def test_stage_0_trains_as_stage_1_does_under_deepspeeds_own_bf16(get_run: RunFactory) -> None:
    """Its optimizer steps once with zero gradients before the first step, which Adam would count."""
    flags = (*GPT, *BF16_FLAGS, "--precision", "bf16-engine")
    zero0, zero1 = (get_run(strategy, *flags) for strategy in ("zero0", "zero1"))
    assert losses(zero0) == pytest.approx(losses(zero1), rel=BF16_RELATIVE / 8)


@needs_fp16
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("single", FP16), ("zero0", FP16), ("zero3", ENGINE)]
    + [pytest.param(strategy, FP16, marks=pytest.mark.long) for strategy in ("ddp", "fsdp2")]
    + [pytest.param(strategy, ENGINE, marks=pytest.mark.long) for strategy in ("zero1", "zero2_cpu")],
)
def test_a_step_that_overflows_is_skipped_and_does_not_advance_the_schedule(get_run, strategy, precision):
    run = get_run(strategy, *GPT, *precision, *OVERFLOWS, *SAVES)
    assert run.engine["loss_scaler"] == LOSS_SCALER
    # The same in every engine: the second step overflows, and at half the scale the third step, too.
    assert skipped(run)[:2] == [2, 3]
    assert run.summary["steps_skipped"] == len(skipped(run)) < 8
    rates = [row["lr"] for row in run.steps]
    waits = [
        row["step"]
        for row, (rate, later) in zip(run.steps[:-1], itertools.pairwise(rates), strict=True)
        if later == rate
    ]
    assert waits == [step for step in skipped(run) if step < 8]
    # The schedule falls to 0 over 8 optimizer steps.
    assert rates[3] == pytest.approx(0.3 * 7 / 8)


@needs_fp16
@pytest.mark.parametrize(
    ("strategy", "precision"), [("zero0", FP16), ("zero1", ENGINE), pytest.param("fsdp2", FP16, marks=pytest.mark.long)]
)
def test_a_resumed_run_continues_with_its_loss_scale(get_run, strategy, precision, tmp_path):
    """A resume at the first scale would also skip the next steps."""
    flags = (*GPT, *precision, *OVERFLOWS)
    full = get_run(strategy, *flags, *SAVES)
    checkpoint = str(full.path / "checkpoints" / "step_0000004")
    resumed = trained(strategy, tmp_path / "again", *flags, "--resume_from_checkpoint", checkpoint)
    assert losses(resumed) == losses(full)
    assert skipped(resumed) == skipped(full)
    assert resumed.summary["steps_skipped"] == full.summary["steps_skipped"] > 0


@needs_fp16
@pytest.mark.parametrize("trainer", ["hf_trainer", "bare_loop"])
def test_other_loops_skip_the_same_steps(get_run: RunFactory, trainer: str, tmp_path: Path) -> None:
    study = get_run("single", *GPT, *FP16, *OVERFLOWS, *SAVES)
    run = trained(
        "single", tmp_path / "run", *GPT, *FP16, *OVERFLOWS, script=f"study/experiments/baselines/{trainer}.py"
    )
    assert skipped(run)[:2] == skipped(study)[:2] == [2, 3]
    assert [row["lr"] for row in run.steps][:4] == pytest.approx([row["lr"] for row in study.steps][:4])


@pytest.mark.parametrize("trainer", ["study/train.py", "study/experiments/baselines/hf_trainer.py"])
def test_fp32_is_not_tf32_if_another_program_has_enabled_it(trainer: str, tmp_path: Path) -> None:
    """Accelerate enables TF32 when it compiles, regardless of the Trainer's setting; NVIDIA's containers always enable
    it.
    """
    flags = (*GPT, *FLAGS, "--max_steps", "1", "--output_dir", str(tmp_path / "run"))
    result = fork_ranks("single", "tests/probes/with_tf32.py", trainer, *flags, ranks=1)
    assert result.returncode == 0, result.stderr[-2000:]
    assert read_run(tmp_path / "run").engine["tf32"] is False
