"""Receipts of programs of other projects: transformers' Trainer, peft, accelerate's example, nanoGPT."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from engines import printed_json
from forked import fork_ranks
from study.receipt.document import ReceiptDocument, read_receipt

PROGRAMS = ("trainer", "trainer_with_adapters", "trainer_with_some_adapters", "nlp_example", "nanogpt", "wide_layers")
LIGHTNING = ("lightning_trainer", "fabric")


@functools.cache
def folder_of_programs(strategy: str, *programs: str, ranks: int = 2) -> Path:
    """Run the programs, and return the folder of their receipts and logs."""
    folder = tempfile.mkdtemp()
    printed_json(fork_ranks(strategy, "tests/probes/receipt_programs.py", folder, *programs, ranks=ranks))
    return Path(folder)


def run_programs(strategy: str, *programs: str, ranks: int = 2) -> dict[str, ReceiptDocument]:
    """Return the receipt of each program."""
    folder = folder_of_programs(strategy, *programs, ranks=ranks)
    return {program: read_receipt(str(folder / f"{program}.json")) for program in programs}


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
    # nanoGPT's loop has a name for the logits, accelerate's example for an output of few classes.
    expected = {"kept-outputs"} if program == "nanogpt" else set()
    assert {fault.id for fault in receipt.faults} - {"data-loader-waits"} == expected


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
    assert predicted == ["trainer", "trainer_with_adapters", "trainer_with_some_adapters", "nlp_example"]
    for name in predicted:
        assert not [row for row in receipts[name].forecast.comparisons if row.is_outside], name


def test_a_prediction_has_adapters_where_the_program_has_them() -> None:
    model = run_programs("ddp", *PROGRAMS)["trainer_with_some_adapters"].model
    assert (model.lora_rank, model.lora_targets, model.lora_saved) == (8, ("down_proj", "q_proj"), ("lm_head",))
    assert (model.lora_dora, model.lora_dtype) == (True, "float32")


@pytest.mark.parametrize(
    ("strategy", "program", "frozen"),
    [
        ("zero3", "trainer_with_a_frozen_beginning", ("model.embed_tokens", "model.layers.0")),
        ("zero3", "trainer_recomputing_a_frozen_tower", ("model.vision_tower",)),
        ("fsdp2", "loop_with_a_frozen_tower", ("model.vision_tower",)),
        pytest.param("zero3", "trainer_with_a_frozen_tower", ("model.vision_tower",), marks=pytest.mark.long),
        pytest.param("zero2", "loop_with_a_frozen_tower", ("model.vision_tower",), marks=pytest.mark.long),
    ],
)
def test_state_and_traffic_of_frozen_parts_are_predicted(strategy: str, program: str, frozen: tuple[str, ...]) -> None:
    """DeepSpeed counts the steps in 4 bytes, and gathers a norm of gradients in 16."""
    receipt = run_programs(strategy, program)[program]
    assert receipt.failures == ()
    assert receipt.forecast.missing is None
    assert receipt.model.frozen_modules == frozen
    figures = {row.figure: (row.predicted, row.measured) for row in receipt.forecast.comparisons}
    for figure in ("parameters", "optimizer state", "ring bytes of a step"):
        predicted, measured = figures[figure]
        assert measured - 16 <= predicted <= measured, figure


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


@pytest.mark.parametrize("program", LIGHTNING)
def test_a_program_of_lightning_has_a_receipt(program: str) -> None:
    receipt = run_programs("ddp", *LIGHTNING)[program]
    assert receipt.failures == ()
    assert (receipt.state, receipt.engine.engine, receipt.engine.ranks) == ("complete", "ddp", 2)
    # The class and config of the model inside of the LightningModule.
    assert receipt.model.name == "LlamaForCausalLM"
    work = receipt.work
    assert (work.micro_batches, work.samples, work.sequence_length) == (2, 2, 32)
    assert sum(receipt.reduced_bytes) == pytest.approx(4 * receipt.model.trained_parameters, rel=0.01)
    assert receipt.forecast.missing is None
    assert not [row for row in receipt.forecast.comparisons if row.is_outside]
    assert receipt.memory is not None
    assert receipt.memory.moment in ("in the forward pass", "in the backward pass")


def test_passes_within_the_step_of_lightnings_optimizer_are_not_the_optimizers() -> None:
    in_lightning, in_fabric = (run_programs("ddp", *LIGHTNING)[program].time.parts for program in LIGHTNING)
    passes = in_lightning["forward"] + in_lightning["backward"]
    assert in_lightning["optimizer"] < passes
    assert in_fabric["optimizer"] < in_fabric["forward"] + in_fabric["backward"]


def test_an_evaluation_of_lightning_is_not_measured_and_its_logger_has_the_figures() -> None:
    # It evaluates after step 7, within the eighth, which is measured again.
    receipt = run_programs("ddp", *LIGHTNING)["lightning_trainer"]
    assert receipt.work.measured_steps == (6, 7, 9, 10, 11)
    logged = next(folder_of_programs("ddp", *LIGHTNING).glob("lightning_trainer/**/metrics.csv")).read_text()
    assert "throughput(tps)" in logged


def test_a_module_of_lightning_without_an_engine_has_a_receipt() -> None:
    receipt = run_programs("single", "lightning_alone", ranks=1)["lightning_alone"]
    assert receipt.failures == ()
    work = receipt.work
    assert (receipt.engine.engine, work.micro_batches, work.samples, work.sequence_length) == ("none", 2, 2, 32)
    assert receipt.time.parts["forward"] > 0
