"""`study verify --mine` compares a user's program with plain training, and names the first difference."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from engines import ONE_THREAD, ROOT
from forked import fork_ranks, fork_script
from study.cli import main
from study.config.errors import UserError
from study.config.printing import print_page
from study.receipt.mine_command import MineVerdict, judge, last_error
from study.receipt.mine_record import RECORD_VARIABLE, STEPS_VARIABLE, RankRecord, RecordedDifference, RecordedStep
from study.receipt.plain_copy import copy_plain
from study.receipt.replay import find_factor
from study.receipt.step_comparison import solve_weights

PROGRAMS = "tests/probes/mine_programs.py"
CHANGED_GRADIENTS = "changes of gradients between the last backward pass and the step, which are the program's own"
long = pytest.mark.long


@functools.cache
def verify(strategy: str, program: str, variant: str = "", steps: int = 3) -> MineVerdict:
    """Return the verdict on a program of the probe on two ranks."""
    folder = tempfile.mkdtemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORD_VARIABLE, folder)
        patch.setenv(STEPS_VARIABLE, str(steps))
        result = fork_ranks(strategy, PROGRAMS, program, variant)
    (Path(folder) / "log.txt").write_text(result.stdout + result.stderr)
    assert "the loop went on to its end" not in result.stdout
    return judge(Path(folder), "train.py", steps, result.returncode)


def first(verdict: MineVerdict) -> RecordedDifference:
    """Return the first difference of the rank that has the earliest one."""
    differences = [record.difference for record in verdict.records if record.difference is not None]
    return min(differences, key=lambda difference: difference.step)


@pytest.mark.parametrize(
    ("strategy", "program", "variant", "engine"),
    [
        ("ddp", "own_loop", "", "ddp"),
        # It is only slow.
        ("ddp", "own_loop", "forgets_no_sync", "ddp"),
        ("ddp", "own_loop", "second_receipt", "ddp"),
        ("ddp", "torch_loop", "autocast", "ddp"),
        ("ddp", "torch_loop", "fsdp1", "fsdp1"),
        ("ddp", "torch_loop", "fsdp1-bf16", "fsdp1"),
        ("ddp", "torch_loop", "fsdp2-bf16", "fsdp2"),
        ("ddp", "torch_loop", "largest", "ddp"),
        ("ddp", "accelerate_loop", "bf16", "ddp"),
        ("fsdp2", "accelerate_loop", "checkpoints", "fsdp2"),
        ("ddp", "trainer", "", "ddp"),
        # Its optimizer calls the passes of the last micro-batch.
        ("ddp", "lightning_trainer", "", "ddp"),
        ("zero2", "accelerate_loop", "", "deepspeed stage 2"),
        ("zero3", "accelerate_loop", "lora", "deepspeed stage 3"),
        pytest.param("zero0", "accelerate_loop", "", "deepspeed stage 0", marks=long),
        pytest.param("zero1", "accelerate_loop", "", "deepspeed stage 1", marks=long),
        pytest.param("zero3", "accelerate_loop", "checkpoints", "deepspeed stage 3", marks=long),
        pytest.param("zero2_cpu", "accelerate_loop", "", "deepspeed stage 2", marks=long),
        pytest.param("zero3_cpu", "accelerate_loop", "", "deepspeed stage 3", marks=long),
        pytest.param("zero2", "trainer", "", "deepspeed stage 2", marks=long),
        pytest.param("ddp", "deepspeed_loop", "1-bf16", "deepspeed stage 1", marks=long),
        pytest.param("ddp", "deepspeed_loop", "2-bf16", "deepspeed stage 2", marks=long),
        pytest.param("ddp", "deepspeed_loop", "3-bf16", "deepspeed stage 3", marks=long),
    ],
)
def test_a_right_program_equals_plain_training(strategy: str, program: str, variant: str, engine: str) -> None:
    verdict = verify(strategy, program, variant)
    assert verdict.status == 0, verdict.answer
    assert verdict.answer.startswith("PASS: 3 steps of train.py equal plain training of the same micro-batches")
    half = "bf16" in variant or variant == "autocast"
    for record in verdict.records:
        # Clipping by the largest gradient is the program's own.
        left_out = (CHANGED_GRADIENTS,) * (variant == "largest")
        assert (record.engine, record.left_out, len(record.steps)) == (engine, left_out, 3)
        assert len({step.plain_norm for step in record.steps}) == 3
        for step in record.steps:
            assert len(step.inputs_sha256) == 2
            assert step.norm == (pytest.approx(step.plain_norm, rel=1e-2 if half else 1e-5) if step.norm else None)
            assert step.loss == (pytest.approx(step.plain_loss, rel=1e-2 if half else 1e-5) if step.loss else None)
    assert not all(
        record.steps[0].inputs_sha256 == verdict.records[0].steps[0].inputs_sha256 for record in verdict.records
    )


def test_gradients_that_are_not_averaged_are_named_with_the_micro_batches_in_them() -> None:
    verdict = verify("ddp", "own_loop", "bypasses")
    assert verdict.status == 1
    assert verdict.answer == (
        "FAIL: step 1, gradient of 0.weight on rank 0 (and 4 more of 5 tensors): each micro-batch counts"
        " (rank 0: 2 2; rank 1: 0 0), right is 1: its gradients are not averaged with those of other ranks"
    )


def test_gradients_that_are_summed_over_ranks_are_named_with_their_factor() -> None:
    difference = first(verify("ddp", "own_loop", "sums"))
    assert (difference.step, difference.stage, difference.tensor) == (1, "gradient", "0.weight")
    assert difference.factor == pytest.approx(2.0)
    assert difference.weights is not None
    assert difference.weights == (pytest.approx((2.0, 2.0)), pytest.approx((2.0, 2.0)))


def test_gradients_that_a_hook_of_lightning_scales_are_named() -> None:
    verdict = verify("ddp", "lightning_trainer", "scales")
    difference = first(verdict)
    assert (verdict.status, difference.step, difference.stage) == (1, 1, "gradient")


def test_weights_that_no_engine_has_wrapped_are_named() -> None:
    verdict = verify("ddp", "torch_loop", "fsdp2-outside")
    assert verdict.status == 1
    assert verdict.answer.startswith("FAIL: step 1, gradient of wte.weight on rank 0 (and 2 more of 7 tensors)")
    assert verdict.answer.endswith("its gradients are not averaged with those of other ranks")


def test_a_weight_that_changes_on_one_rank_is_named() -> None:
    verdict = verify("ddp", "own_loop", "drifts")
    assert verdict.status == 1
    assert verdict.answer.startswith("FAIL: step 2, weights of 1.weight on rank 1: differs by 0.0002")
    assert verdict.answer.endswith("the ranks train different weights")


def test_an_update_that_is_not_the_optimizers_is_named() -> None:
    verdict = verify("ddp", "own_loop", "tampers")
    assert verdict.status == 1
    difference = first(verdict)
    assert (difference.step, difference.stage, difference.tensor, difference.tensors) == (1, "update", "3.weight", 1)


def test_weights_that_no_optimizer_trains_are_named() -> None:
    verdict = verify("ddp", "own_loop", "other_optimizer")
    assert verdict.status == 1
    assert verdict.answer == (
        "FAIL: the optimizer has no trained weight of this model, and none changes: make it after the engine, from"
        " model.parameters()"
    )
    verdict = verify("ddp", "own_loop", "part")
    assert verdict.status == 1
    assert "3 of 5 trained weights are in no optimizer, and no step changes them, such as 0.weight" in verdict.answer
    # Another optimizer trains them.
    verdict = verify("ddp", "own_loop", "two_optimizers")
    assert verdict.status == 0
    assert "not every weight has its settings in the optimizer" in verdict.records[0].left_out[0]


def test_the_gradient_of_the_step_before_is_named() -> None:
    verdict = verify("ddp", "own_loop", "keeps_gradients")
    assert verdict.status == 1
    assert verdict.answer.startswith("FAIL: step 2, gradient of 0.weight on rank 0 (and 4 more of 5 tensors)")
    assert verdict.answer.endswith("it has the gradient of the step before, too, which zero_grad() would have cleared")


def test_gradients_that_the_program_changes_itself_are_not_compared_without_a_word() -> None:
    verdict = verify("ddp", "own_loop", "clips_alone")
    assert verdict.status == 0
    assert [record.left_out for record in verdict.records] == [(CHANGED_GRADIENTS,)] * 2
    assert not verify("ddp", "own_loop").records[0].left_out


def test_a_receipt_before_the_engine_is_named() -> None:
    verdict = verify("ddp", "deepspeed_loop", "2-bf16-early")
    assert verdict.status == 3
    assert verdict.answer.startswith("NOT COMPARABLE: the receipt was made before accelerator.prepare")


@pytest.mark.parametrize(
    ("strategy", "program", "variant", "factor", "how"),
    [
        ("ddp", "torch_loop", "not_divided", "2", "not divided by their number"),
        ("ddp", "accelerate_loop", "divides_twice", "0.5", "divided by their number twice"),
        pytest.param("zero2", "accelerate_loop", "divides_twice", "0.5", "divided by their number twice", marks=long),
    ],
)
def test_losses_that_the_accumulation_does_not_divide_once_are_named(
    strategy: str, program: str, variant: str, factor: str, how: str
) -> None:
    verdict = verify(strategy, program, variant)
    assert verdict.status == 1
    assert f"step 1: the losses of 2 micro-batches are {how}: the gradient is {factor} times" in verdict.answer


def test_ranks_with_the_same_data_are_named() -> None:
    verdict = verify("ddp", "own_loop", "same_data")
    assert verdict.status == 1
    assert verdict.answer == (
        "FAIL: ranks 0 and 1 had the same inputs in all steps: the sampler does not divide the data"
    )


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("own_layers", "the LightningModule has no model of transformers with all of its parameters"),
        ("lbfgs", "LBFGS evaluates the loss several times in a step"),
    ],
)
def test_a_program_of_lightning_without_a_comparison_says_why(variant: str, reason: str) -> None:
    verdict = verify("ddp", "lightning_trainer", variant)
    assert (verdict.status, verdict.answer) == (3, f"NOT COMPARABLE: {reason}")


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("compiled", "torch.compile rounds otherwise, and draws other random numbers: run it without"),
        ("fsdp1-flat", "FSDP without use_orig_params has no gradient of a single tensor: set use_orig_params"),
        ("fsdp1-largest", "FSDP1 clips by a norm of type inf: clip by 2, or not at all"),
        ("calls_a_layer", "the program calls lm_head outside of the model's forward pass"),
    ],
)
def test_a_program_without_a_comparison_says_why_in_one_line(variant: str, reason: str) -> None:
    verdict = verify("ddp", "torch_loop", variant)
    assert (verdict.status, verdict.answer) == (3, f"NOT COMPARABLE: {reason}")


def step(*weights: float, divides_by_tokens: bool = False) -> RecordedStep:
    return RecordedStep(
        loss=1.0,
        plain_loss=1.0,
        norm=1.0,
        plain_norm=1.0,
        loss_weights=weights,
        divides_by_tokens=divides_by_tokens,
        inputs_sha256=("a", "b"),
    )


@pytest.mark.parametrize(
    ("recorded", "status", "text"),
    [
        (step(0.5, 0.5), 0, "PASS"),
        # transformers' Trainer divides the loss by the tokens of all ranks, and multiplies it by their number.
        (step(2.0, 2.0, divides_by_tokens=True), 0, "PASS"),
        (step(0.1, 0.1), 0, "PASS"),
        (step(1.0, 1.0), 1, "not divided"),
        (step(0.25, 0.0, 0.25, 0.25), 1, "the losses of 4 micro-batches count 0.25 0 0.25 0.25"),
    ],
)
def test_weights_of_losses_are_judged_by_the_accumulation(
    tmp_path: Path, recorded: RecordedStep, status: int, text: str
) -> None:
    RankRecord(rank=0, ranks=1, state="complete", engine="none", steps=(recorded,)).write(tmp_path)
    verdict = judge(tmp_path, "train.py", 1, 0)
    assert verdict.status == status
    assert text in verdict.answer
    page = "\n".join(line for line in verdict.page() if isinstance(line, str))
    assert ("micro-batches count 0.1 0.1 in this program" in page) is (recorded.loss_weights == (0.1, 0.1))


SCRIPT = """
import torch
from study import Receipt

layers = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
receipt = Receipt(layers, optimizer)
for number, row in enumerate(receipt.steps(torch.randn(4, 2, 8))):
    layers(row).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if BREAKS and number == 1:
        raise ZeroDivisionError("no samples left")
"""


def test_a_script_is_launched_and_its_verdict_is_one_document(tmp_path: Path) -> None:
    program = ROOT / PROGRAMS
    script = (
        f"import sys; sys.argv = [sys.argv[0], 'own_loop']; sys.path.append({str(program.parent)!r})\n"
        f"exec(open({str(program)!r}).read())  # Receipt\n"
    )
    (tmp_path / "train.py").write_text(script)
    words = ["verify", "--mine", "train.py --lr 1e-4", "--world_size", "2", "--steps", "2", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "study.cli", *words],
        cwd=tmp_path,
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["command"][-2:] == ["--lr", "1e-4"]
    assert document["answer"].startswith("PASS: 2 steps of train.py equal plain training")
    assert [record["rank"] for record in document["ranks"]] == [0, 1]
    # The program neither went on nor wrote a receipt.
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("breaks", "problem", "fix"),
    [
        ("False", "train.py ended after 4 of 9 steps", "give it more data, or --steps 4"),
        ("True", "train.py failed after 2 steps: ZeroDivisionError: no samples left", "mend that first"),
    ],
)
def test_a_program_that_ends_early_is_one_line(tmp_path: Path, breaks: str, problem: str, fix: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("BREAKS", breaks))
    variables = {RECORD_VARIABLE: str(tmp_path), STEPS_VARIABLE: "9"}
    result = fork_script(
        tmp_path / "train.py", folder=tmp_path, environment=os.environ | ONE_THREAD | variables, read_at_import={}
    )
    (tmp_path / "log.txt").write_text(result.stdout + result.stderr)
    with pytest.raises(UserError) as refusal:
        judge(tmp_path, "train.py", 9, result.returncode)
    assert (refusal.value.problem, refusal.value.fix) == (problem, fix)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--mine", "absent.py"], "--mine: there is no file absent.py"),
        (["--mine", "torchrun absent.py"], "--mine: there is no file absent.py"),
        (["--mine", "without.py"], "without.py has no receipt"),
        (["--mine", ""], "--mine has no command"),
        (["--mine", "'"], "--mine: No closing quotation"),
        (["--mine", "no-such-launcher -m train"], "--mine: there is no program no-such-launcher"),
        (["--mine", "with.py", "--config_file", "absent.yaml"], "--config_file: there is no file absent.yaml"),
        (
            ["--mine", "torchrun with.py", "--world_size", "2"],
            "--world_size goes with a script, and --mine has a command",
        ),
        (["--mine", "with.py", "--quick"], "--quick does not go with --mine"),
        (["--mine", "with.py", "--locate"], "a combination of features does not go with --mine"),
        (["--steps", "3"], "--steps is of --mine"),
    ],
)
def test_a_wrong_request_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "without.py").write_text("print('trains')\n")
    (tmp_path / "with.py").write_text("from study import Receipt\n")
    monkeypatch.chdir(tmp_path if "with.py" in " ".join(words) else folder)
    assert main(["verify", *words]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {problem}")
    assert errors.count("\n") == 1


def test_the_last_line_of_a_failure_is_the_programs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        log.write_text(
            "[rank1]: Traceback (most recent call last):\n"
            '[rank1]:   File "train.py", line 3, in <module>\n'
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory\n"
            "E1128 api.py:879] failed (exitcode: 1)\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        )
        assert last_error(log) == "torch.OutOfMemoryError: CUDA out of memory"
        log.write_text("usage: train.py\nerror: no data\nE1128 api.py:879] failed (exitcode: 1)\n=====\n")
        assert last_error(log) == "error: no data"


def test_a_copy_computes_with_its_own_weights_only() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LSTM(4, 4), torch.nn.Identity())
    layers[0].tied = layers[1]
    copies = {id(it): torch.nn.Parameter(torch.zeros_like(it)) for it in layers.parameters()}
    plain = copy_plain(layers, copies)
    assert type(plain) is type(layers)
    assert {id(it) for it in plain.parameters()} == {id(it) for it in copies.values()}
    output, _ = plain(torch.ones(2, 1, 4))
    assert not output.any()
    assert plain[0].tied is plain[1]


def test_factors_and_weights_are_found_where_there_are_some() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(2, 2, 50, generator=generator)
    mean = parts.sum((0, 1)) / 2
    assert find_factor(4 * mean, mean, 1e-6) == pytest.approx(4.0)
    assert find_factor(mean + parts[0, 0], mean, 1e-6) is None
    assert solve_weights(mean, parts) is None
    weights = solve_weights((parts[0].sum(0) + 0.5 * parts[1, 1]) / 2, parts)
    assert weights is not None
    assert weights[0] == pytest.approx((1.0, 1.0))
    assert weights[1] == pytest.approx((0.0, 0.5), abs=1e-6)
    # Two ranks with the same data.
    assert solve_weights(parts[0].sum(0), torch.stack([parts[0], parts[0]])) is None


def test_the_page_shows_the_verdict_on_a_loop_that_bypasses_ddp() -> None:
    page = (ROOT / "docs" / "receipt.md").read_text(encoding="utf-8")
    block = page.split("<!-- verdict -->")[1].split("<!-- /verdict -->")[0].replace("```text", "").replace("```", "")
    verdict, printed = verify("ddp", "own_loop", "bypasses"), io.StringIO()
    print_page((verdict.answer, *verdict.page()), printed)
    assert printed.getvalue().split() == block.split()
