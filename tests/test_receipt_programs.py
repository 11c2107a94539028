"""Receipts of programs of other projects: transformers' Trainer, peft, accelerate's example, nanoGPT."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from engines import printed_json
from forked import fork_ranks
from study.receipt.document import ReceiptDocument, read_receipt

PROGRAMS = ("trainer", "trainer_with_adapters", "nlp_example", "nanogpt", "wide_layers")


@functools.cache
def run_programs(strategy: str, *programs: str) -> dict[str, ReceiptDocument]:
    """Return the receipt of each program on two ranks."""
    folder = tempfile.mkdtemp()
    printed_json(fork_ranks(strategy, "tests/probes/receipt_programs.py", folder, *programs))
    return {program: read_receipt(str(Path(folder) / f"{program}.json")) for program in programs}


@pytest.mark.parametrize(
    ("program", "model", "batch", "steps"),
    [
        ("trainer", "LlamaForCausalLM", (2, 2, 32), 14),
        ("trainer_with_adapters", "PeftModelForCausalLM", (2, 2, 32), 14),
        ("nlp_example", "BertForSequenceClassification", (1, 4, 32), 14),
        ("nanogpt", "Gpt", (3, 4, 32), 12),
    ],
)
def test_a_program_has_a_receipt_from_two_lines(
    program: str, model: str, batch: tuple[int, int, int], steps: int
) -> None:
    receipt = run_programs("ddp", *PROGRAMS)[program]
    assert receipt.failures == ()
    assert receipt.state == "complete"
    assert (receipt.engine.engine, receipt.engine.ranks, receipt.model.name) == ("ddp", 2, model)
    work = receipt.work
    assert ((work.micro_batches, work.samples, work.sequence_length), work.steps) == (batch, steps)
    assert len(receipt.ranks) == 2
    assert receipt.memory is not None
    assert receipt.memory.parts["optimizer"] == pytest.approx(8 * receipt.model.trained_parameters, rel=0.01)
    # One reduction of all gradients a step, whatever the accumulation.
    assert sum(receipt.reduced_bytes) == pytest.approx(4 * receipt.model.trained_parameters, rel=0.01)
    assert all(receipt.time.parts[part] > 0 for part in ("forward", "backward", "optimizer"))
    assert {fault.id for fault in receipt.faults} <= {"data-loader-waits"}


def test_an_evaluation_inside_the_measured_steps_is_not_measured() -> None:
    receipt = run_programs("ddp", *PROGRAMS)["trainer"]
    # The Trainer evaluates after step 7, within the eighth, which is measured again.
    assert receipt.work.measured_steps == (6, 7, 9, 10, 11)
    assert receipt.memory is not None
    assert receipt.memory.moment != "between the passes"


def test_a_peak_inside_of_the_reducer_of_ddp_is_measured() -> None:
    receipt = run_programs("ddp", *PROGRAMS)["wide_layers"]
    assert receipt.failures == ()
    assert receipt.memory is not None
    assert receipt.memory.attributed >= 0.95
    assert receipt.memory.parts["buckets"] == 4 * receipt.model.parameters


def test_precision_and_adapters_are_those_of_the_program() -> None:
    receipts = run_programs("ddp", *PROGRAMS)
    assert (receipts["nanogpt"].engine.compute_dtype, receipts["nanogpt"].engine.param_dtype) == ("bfloat16", "float32")
    assert receipts["trainer_with_adapters"].model.lora_rank == 4
    assert receipts["trainer_with_adapters"].engine.gradient_checkpointing
    assert receipts["wide_layers"].model.config is None
    predicted = [name for name in PROGRAMS if receipts[name].forecast.missing is None]
    assert predicted == ["trainer", "trainer_with_adapters", "nlp_example"]
    for name in predicted:
        assert not [row for row in receipts[name].forecast.comparisons if row.is_outside], name


@pytest.mark.long
def test_the_trainer_has_a_receipt_under_deepspeed() -> None:
    receipt = run_programs("zero2", "trainer")["trainer"]
    assert receipt.failures == ()
    assert (receipt.engine.engine, receipt.engine.strategy, receipt.work.micro_batches) == ("deepspeed", "zero2", 2)
    assert not [row for row in receipt.forecast.comparisons if row.is_outside]


@pytest.mark.long
def test_trl_has_a_receipt_by_the_same_callback() -> None:
    pytest.importorskip("trl")
    receipt = run_programs("ddp", "trl_sft")["trl_sft"]
    assert receipt.failures == ()
    assert (receipt.state, receipt.model.name) == ("complete", "LlamaForCausalLM")
