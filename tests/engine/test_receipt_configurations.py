"""Settings of live engines in a receipt, so that its prediction is of the same configuration, and causes by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engines import printed_json
from forked import fork_ranks
from study.receipt.document import ReceiptDocument
from study.receipt.figures import list_figures
from study.receipt.page import receipt_lines

# Facts that each case has, next to those of every engine.
FSDP: dict[str, dict[str, object]] = {
    "fsdp2_cast": {"strategy": "fsdp2", "cast_dtype": "bfloat16"},
    "fsdp2_cast_and_reduced_in_fp32": {"strategy": "fsdp2", "cast_dtype": "bfloat16", "reduce_dtype": "float32"},
    "fsdp2_offload": {"strategy": "fsdp2", "offload_param": "cpu", "offload_optimizer": "cpu"},
    "hsdp": {"strategy": "hsdp", "replicas": 2},
    "fsdp1_cast": {"sharding": "FULL_SHARD", "cast_dtype": "bfloat16"},
    "fsdp1_gradients": {"sharding": "SHARD_GRAD_OP"},
    "fsdp1_unsharded": {"sharding": "NO_SHARD"},
    "fsdp1_hybrid": {"sharding": "HYBRID_SHARD", "replicas": 2},
}
OTHERS = ("embedding_in_fp32", "zero1_cpu", "zero1_cpu_reduced_in_fp32")
# Two replica groups of two ranks; on two ranks of one.
ON_FOUR_RANKS = "fsdp1_hybrid"
ON_TWO_RANKS = (*FSDP, *OTHERS)
NAMES = ("strategy", "cast_dtype", "reduce_dtype", "offload_param", "offload_optimizer", "sharding", "replicas")


@functools.cache
def run_probe(*cases: str, ranks: int = 2) -> dict[str, Any]:
    """Return the output of the first rank."""
    result = fork_ranks("ddp", "tests/probes/receipt_configurations.py", *cases, ranks=ranks, timeout=300)
    first: dict[str, Any] = printed_json(result)[0]
    return first


@functools.cache
def receipts() -> dict[str, ReceiptDocument]:
    """Return the receipt of each case."""
    documents = run_probe(*ON_TWO_RANKS)["receipts"] | run_probe(ON_FOUR_RANKS, ranks=4)["receipts"]
    return {case: ReceiptDocument.model_validate(document) for case, document in documents.items()}


def list_faults(case: str) -> dict[str, str]:
    return {fault.id: fault.says for fault in receipts()[case].faults}


@pytest.mark.parametrize("case", FSDP)
def test_the_prediction_has_the_settings_of_fsdps_live_objects(case: str) -> None:
    receipt = receipts()[case]
    assert (receipt.failures, receipt.state) == ((), "complete")
    none: dict[str, object] = {**dict.fromkeys(NAMES), "replicas": 1}
    facts = receipt.engine.model_dump()
    assert {name: facts[name] for name in NAMES} == none | FSDP[case]
    # By transformers' flag, which torch's wrapper does not replace.
    assert receipt.engine.gradient_checkpointing == (case == "fsdp2_cast")
    assert receipt.forecast.missing is None
    exact = {row.figure: row for row in receipt.forecast.comparisons if row.low is not None}
    assert {"parameters", "optimizer state", "ring bytes of a step"} <= set(exact)
    assert [row for row in exact.values() if row.is_outside] == []


def test_offload_of_fsdp1_is_read_from_its_handles() -> None:
    facts = run_probe(*ON_TWO_RANKS)["facts_of_fsdp1_offload"]
    assert (facts["offload_param"], facts["offload_optimizer"]) == ("cpu", "cpu")
    assert (facts["sharding"], facts["replicas"], facts["wrapped_groups"]) == ("FULL_SHARD", 1, 4)


def test_replicas_that_nothing_keeps_equal_are_named() -> None:
    document = run_probe(*ON_TWO_RANKS)["receipts"][ON_FOUR_RANKS]
    faults = {fault.id: fault.says for fault in ReceiptDocument.model_validate(document).faults}
    assert faults["no-engine"] == (
        "2 ranks train copies of the model that nothing keeps equal: FSDP's groups have one rank each"
    )
    for case in ("fsdp1_hybrid", "fsdp1_unsharded", "fsdp1_cast"):
        assert "no-engine" not in list_faults(case)


def test_gradients_in_fp32_of_16_bit_weights_are_named() -> None:
    says = list_faults("embedding_in_fp32")["reduced-in-fp32"]
    embedding = 1024 * 128 * 4
    assert says.startswith("gradients of the embedding (model.embed_tokens.weight) are reduced in fp32: 0.5 MB a step")
    receipt = receipts()["embedding_in_fp32"]
    assert receipt.reduced_by_dtype["float32"] == pytest.approx(embedding, rel=0.01)
    assert receipt.reduced_by_dtype["bfloat16"] == 2 * (receipt.model.parameters - 1024 * 128)
    assert list_faults("zero1_cpu_reduced_in_fp32")["reduced-in-fp32"].startswith("gradients are reduced in fp32: ")
    # FSDP's policy asks for it, or the engine reduces in 16 bits, or the weights are in fp32.
    for case in ("fsdp2_cast_and_reduced_in_fp32", "fsdp2_cast", "zero1_cpu", "hsdp"):
        assert "reduced-in-fp32" not in list_faults(case)


def test_adam_on_the_host_has_its_rate_with_cores_and_ranks() -> None:
    for case in ("zero1_cpu", "fsdp2_offload"):
        receipt = receipts()[case]
        (line,) = (line for line in receipt_lines(receipt, "r") if line.startswith("Adam on the host: "))
        assert receipt.host is not None
        assert f"this machine has {receipt.host.cores} core" in line
        assert receipt.host.ranks == 2
        # Half of the state, in which Adam reads gradient, weight and moments, and writes weight and moments.
        moved = 0.5 * receipt.model.parameters * (30 if case == "zero1_cpu" else 28)
        rate = moved / receipt.time.parts["optimizer"] / 1e9
        assert list_figures(receipt)["host_optimizer(GB/s)"] == pytest.approx(rate, rel=0.02)
    assert not any(line.startswith("Adam on the host") for line in receipt_lines(receipts()["hsdp"], "r"))


def test_a_configuration_that_the_matrix_of_releases_lacks_is_named() -> None:
    line = (
        "its own row in the matrix of releases: stage 1 with optimizer on the host is not in it;"
        " faults of the stage are looked for"
    )
    assert line in receipts()["zero1_cpu"].unavailable
    assert receipts()["zero1_cpu"].engine.strategy is None
    assert not any("matrix of releases" in line for line in receipts()["fsdp2_cast"].unavailable)
