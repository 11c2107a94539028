"""Loops that use their receipt wrongly: one line names the cause, and the losses are those without a receipt."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engines import printed_json
from forked import fork_ranks
from study.receipt.document import ReceiptDocument
from study.receipt.page import receipt_lines

STOPS = "; training goes on, and nothing more is measured"
TOO_EARLY = "the receipt was made before accelerator.prepare, deepspeed.initialize or fully_shard: make it after"
UNKNOWN = "a receipt has no option aftr: did you mean after? its options are path, after, steps, quiet, log"
# The one line on standard error of each rank.
NOTICES = {
    "optimizer_of_another_model": "the optimizer (SGD) has no parameter of this model: give Receipt the one that trains"
    f" it, made after fully_shard{STOPS}",
    "unknown_option": UNKNOWN + STOPS,
    "unknown_option_of_the_callback": UNKNOWN + STOPS,
    "model_of_the_callback": "the callback takes the model of its trainer: leave model out; training goes on",
    "two_receipts": "another receipt measures this model, and has its figures: close() it before you make a second one;"
    " training goes on",
    "before_ddp": TOO_EARLY + STOPS,
    "before_fully_shard": TOO_EARLY + STOPS,
    "before_deepspeed": TOO_EARLY + STOPS,
    "nested_steps": "step() is inside of steps() or of another step(): the inner one counts; remove the other;"
    " training goes on",
    "step_without_with": "step() stands without with: write `with receipt.step():` around each step; training goes on",
    "begin_without_end": "begin_step() comes without end_step(): call end_step() after the optimizer's step;"
    " training goes on",
    "end_without_begin": "end_step() comes without begin_step(): call begin_step() before the forward pass of each"
    " step; training goes on",
    "never_used": "the receipt was made, and no step has begun: write `for batch in receipt.steps(loader):`,"
    " or `with receipt.step():` around each step; training goes on",
    "used_after_close": "close() has ended this receipt, and these steps are not measured: call it after the last step;"
    " training goes on",
    "optimizer_that_does_not_step": "SGD has not stepped in 14 micro-batches: give Receipt the optimizer whose step()"
    " the loop calls; training goes on",
    "path_of_none": "path is None, so the file is receipt.json: give it a file's name; training goes on",
    "unknown_argument_of_steps": "steps() has no argument total: leave it out; training goes on",
    "replaced_module": "the model changes while it is measured, at module.1: make the receipt after the change" + STOPS,
}
# Named in the receipt: no figure is missing, or the run is over.
OTHERS = ("step_without_parentheses", "loader_that_ends_early", "caught_error", "error_that_ends_training")


@functools.cache
def uses() -> list[dict[str, Any]]:
    """Return the outcome of each use by its name, on each rank."""
    return [
        rank["uses"]
        for rank in printed_json(fork_ranks("ddp", "tests/probes/receipt_wrong_uses.py", *NOTICES, *OTHERS))
    ]


def read_use(use: str) -> ReceiptDocument:
    return ReceiptDocument.model_validate(uses()[0][use]["receipt"])


@pytest.mark.parametrize("use", [*NOTICES, *OTHERS])
def test_training_goes_on_with_the_same_losses(use: str) -> None:
    for rank in uses():
        assert rank[use]["losses"] == rank[use]["losses_without"]
        # They are those of trained weights.
        assert len(set(rank[use]["losses"])) == len(rank[use]["losses"]) >= 7


@pytest.mark.parametrize("use", NOTICES)
def test_one_line_names_the_cause(use: str) -> None:
    for rank in uses():
        assert rank[use]["notices"] == [f"receipt: wrong use: {NOTICES[use]}"]


@pytest.mark.parametrize("use", [use for use in NOTICES if NOTICES[use].endswith(STOPS)])
def test_the_receipt_has_the_cause_and_no_figure_of_another_model(use: str) -> None:
    receipt = read_use(use)
    assert receipt.failures == (f"wrong use: {NOTICES[use].removesuffix(STOPS)}",)
    assert (receipt.state, receipt.memory) == ("too_short", None)
    lines = receipt_lines(receipt, "receipt.json")
    assert lines[0] == "receipt without a measured step"
    assert " ".join(" ".join(lines).split()).count(receipt.failures[0]) == 1


def test_of_two_receipts_the_first_has_the_figures_and_its_file() -> None:
    receipt = read_use("two_receipts")
    assert (receipt.state, receipt.failures, receipt.work.steps) == ("complete", (), 14)
    assert uses()[0]["two_receipts"]["screen"].count("receipt of DDP") == 1


def test_a_callback_measures_the_model_of_its_trainer_whatever_its_options() -> None:
    receipt = read_use("model_of_the_callback")
    assert (receipt.state, receipt.failures, receipt.model.name) == ("complete", (), "LossOfRows")


def test_an_option_of_lightnings_callback_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    from study import LightningReceiptCallback

    layer = nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(
        optimizers=[torch.optim.SGD(layer.parameters(), lr=0.1)], strategy=SimpleNamespace(model=layer), loggers=[]
    )
    for callback, cause in (
        (LightningReceiptCallback(aftr=3, quiet=True), UNKNOWN),
        (LightningReceiptCallback("receipt.json", quiet=True), "a receipt has no option 'receipt.json'"),
    ):
        callback.on_train_start(trainer, layer)
        assert callback.receipt is not None
        callback.on_train_batch_start(trainer, layer, None, 0)
        callback.on_train_batch_end(trainer, layer, None, None, 0)
        printed = capsys.readouterr().err
        assert printed.startswith(f"receipt: wrong use: {cause}")
        assert printed.count("\n") == 1
        callback.on_train_end(trainer, layer)


@pytest.mark.parametrize(
    "use", ["step_without_with", "begin_without_end", "end_without_begin", "never_used", "optimizer_that_does_not_step"]
)
def test_a_receipt_in_which_no_step_ends_has_the_cause(use: str) -> None:
    receipt = read_use(use)
    assert (receipt.state, receipt.work.steps) == ("too_short", 0)
    assert receipt.failures == (f"wrong use: {NOTICES[use].removesuffix('; training goes on')}",)
    assert receipt.failures[0] in " ".join(" ".join(receipt_lines(receipt, "receipt.json")).split())


@pytest.mark.parametrize(
    "use", ["path_of_none", "unknown_argument_of_steps", "step_without_parentheses", "used_after_close"]
)
def test_what_a_wrong_use_does_not_prevent_is_measured(use: str) -> None:
    receipt = read_use(use)
    assert (receipt.state, receipt.work.steps) == ("complete", 14)
    assert receipt.memory is not None
    assert [rank[use]["files"] for rank in uses()] == [["receipt.json"], []]


def test_nested_steps_count_once() -> None:
    receipt = read_use("nested_steps")
    assert (receipt.state, receipt.work.steps, receipt.work.measured_steps) == ("complete", 14, (6, 7, 8, 9, 10))
    assert receipt.failures == (f"wrong use: {NOTICES['nested_steps'].removesuffix('; training goes on')}",)


def test_a_loader_that_ends_early_is_named_with_the_steps_that_are_needed() -> None:
    receipt = read_use("loader_that_ends_early")
    assert (receipt.state, receipt.work.steps, receipt.failures) == ("too_short", 8, ())
    assert receipt.unavailable == (
        "memory, communication and parts of time: the run ended after 8 steps, and the receipt measures steps 6 to 10:"
        " train for longer, or make it with after=1, steps=3",
    )


def test_a_step_that_an_error_has_left_is_measured_again() -> None:
    assert uses()[0]["caught_error"]["notices"] == ["receipt: step 8 was left by ValueError: a bad batch"]
    receipt = read_use("caught_error")
    assert (receipt.state, receipt.failures) == ("complete", ())
    # Step 8 has no measurement: the error has ended it, and the next batch is a whole step.
    assert receipt.work.measured_steps == (6, 7, 9, 10, 11)
    assert receipt.memory is not None
    assert receipt.time.collectives["all_reduce"].in_flight_s > 0


def test_an_error_that_ends_training_is_named() -> None:
    receipt = read_use("error_that_ends_training")
    # The optimizer of step 7 has stepped.
    assert (receipt.state, receipt.work.steps) == ("interrupted", 7)
    assert receipt.unavailable == (
        "memory, communication and parts of time: step 7 was left by ValueError: no more data",
    )
