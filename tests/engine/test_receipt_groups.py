"""Receipts of loops whose ranks share samples, in tensor-parallel groups."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forked import fork_ranks
from study.receipt.contribution import make_row
from study.receipt.document import ReceiptDocument, read_receipt
from study.receipt.page import describe

TOKENS_OF_A_RANK = 2 * 16


def run_loop(folder: Path, kind: str, ranks: int) -> tuple[ReceiptDocument, subprocess.CompletedProcess[str]]:
    done = fork_ranks("ddp", "tests/probes/receipt_groups.py", str(folder), kind, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return read_receipt(str(folder / f"{kind}.json")), done


@pytest.mark.parametrize(("kind", "ranks", "engine", "copies"), [("tensor", 2, "none", 1), ("fsdp2", 4, "fsdp2", 2)])
def test_tensor_parallel_ranks_share_their_samples(
    kind: str, ranks: int, engine: str, copies: int, tmp_path: Path
) -> None:
    receipt, done = run_loop(tmp_path, kind, ranks)
    assert receipt.failures == ()
    assert (receipt.engine.engine, receipt.engine.tensor_parallel, receipt.engine.sample_ranks) == (engine, 2, copies)
    assert f"{ranks} ranks on CPU, 2 for a layer" in describe(receipt)
    assert receipt.time.step_s is not None
    # A sample that two ranks share counts once.
    assert receipt.speed.tokens_per_s == pytest.approx(copies * TOKENS_OF_A_RANK / receipt.time.step_s)
    # Nobody has forgotten an engine.
    assert {fault.id for fault in receipt.faults} <= {"data-loader-waits"}
    assert "is in no engine" not in done.stderr
    assert "no prediction: tensor-, context- and sequence-parallel groups are not predicted" in done.stdout
    assert receipt.memory is not None
    assert receipt.memory.parts["parameters"] > 0


def test_a_receipt_of_groups_is_no_row_of_the_benchmark(tmp_path: Path) -> None:
    receipt, _ = run_loop(tmp_path, "tensor", 2)
    with pytest.raises(Exception, match="has model-parallel groups, which the rows do not describe"):
        make_row(receipt, "receipt.json")
