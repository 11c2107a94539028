"""The receipt of loops under engines that a program makes itself: it changes no loss, and it attributes memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engines import printed_json
from forked import fork_ranks
from study.receipt.document import ReceiptDocument

PROBE = "tests/probes/receipt_strategies.py"
# Strategy of the receipt, and elements of this rank's parameters and optimizer state, in units of the model's.
CASES = {
    "fsdp1": (None, 0.5, 1.0),
    "zero0": ("zero0", 1.0, 2.0),
    "zero1": ("zero1", 1.0, 1.5),
    "zero2_cpu": ("zero2_cpu", 1.0, 1.5),
    "zero3_cpu": ("zero3_cpu", 0.5, 1.5),
    "lora": ("ddp", 1.0, None),
    "checkpointing": ("ddp", 1.0, 2.0),
    "compiled": ("ddp", 1.0, 2.0),
}


@functools.cache
def cases(*names: str) -> list[dict[str, Any]]:
    """Return the outcome of each case by its name, on each rank."""
    return [rank["cases"] for rank in printed_json(fork_ranks("ddp", PROBE, *names))]


def read_case(case: str, names: tuple[str, ...] = tuple(CASES)) -> ReceiptDocument:
    return ReceiptDocument.model_validate(cases(*names)[0][case]["receipt"])


@pytest.mark.parametrize("case", CASES)
def test_training_has_the_same_losses_to_the_last_bit(case: str) -> None:
    for rank in cases(*CASES):
        losses = rank[case]["losses"]
        assert losses == rank[case]["losses_without"]
        assert len(set(losses)) == len(losses) == 7
    assert read_case(case).failures == ()


@pytest.mark.parametrize("case", CASES)
def test_the_parts_explain_at_least_95_percent_of_the_bytes(case: str) -> None:
    receipt = read_case(case)
    memory, (strategy, parameters, optimizer) = receipt.memory, CASES[case]
    assert receipt.engine.strategy == strategy
    assert memory is not None
    assert 0.95 <= memory.attributed <= 1
    weights = 4 * receipt.model.parameters
    trained = 4 * receipt.model.trained_parameters
    assert memory.parts["parameters"] == pytest.approx(parameters * weights, rel=0.05)
    expected = 2 * trained if optimizer is None else optimizer * weights
    assert memory.parts["optimizer"] == pytest.approx(expected, rel=0.01)
    assert memory.parts["activations"] > 2**19


def test_what_the_program_has_made_of_the_model_is_seen() -> None:
    assert read_case("lora").model.lora_rank == 4
    assert read_case("checkpointing").engine.gradient_checkpointing
    assert read_case("compiled").engine.compiled
    offloads = {
        case: (read_case(case).engine.offload_optimizer, read_case(case).engine.offload_param) for case in CASES
    }
    assert offloads["zero2_cpu"] == ("cpu", None)
    assert offloads["zero3_cpu"] == ("cpu", "cpu")
    assert offloads["zero1"] == (None, None)


@pytest.mark.long
def test_losses_of_a_model_that_inductor_compiles_are_the_same_to_the_last_bit() -> None:
    for rank in cases("compiled_into_kernels"):
        losses = rank["compiled_into_kernels"]["losses"]
        assert losses == rank["compiled_into_kernels"]["losses_without"]
        assert len(set(losses)) == len(losses) == 7
    receipt = read_case("compiled_into_kernels", ("compiled_into_kernels",))
    assert (receipt.failures, receipt.engine.compiled) == ((), True)
    assert any(line.startswith("single operations of code that is compiled") for line in receipt.unavailable)


def test_host_traffic_that_no_core_can_show_is_named() -> None:
    line = "time of host traffic: on CPU ranks the offloaded state is in the memory that computes"
    assert {case for case in CASES if line in read_case(case).unavailable} == {"zero2_cpu", "zero3_cpu"}


def test_weights_in_4_bits_are_parameters_with_their_scales() -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes, which no extra of this project installs")
    for rank in cases("qlora"):
        assert rank["qlora"]["losses"] == rank["qlora"]["losses_without"]
    receipt = read_case("qlora", ("qlora",))
    assert receipt.failures == ()
    model, memory = receipt.model, receipt.memory
    assert (model.quantized, model.lora_rank) == (True, 4)
    # Two layers of 12 * 128**2 weights in 4 bits, with a scale in fp32 for each 64.
    in_4_bits = 2 * 12 * 128**2
    assert not [row for row in receipt.forecast.comparisons if row.is_outside]
    assert memory is not None
    assert 0.95 <= memory.attributed <= 1
    unquantized = 4 * (model.parameters - in_4_bits)
    assert memory.parts["parameters"] == pytest.approx(unquantized + in_4_bits / 2 + 4 * in_4_bits / 64, rel=0.01)
