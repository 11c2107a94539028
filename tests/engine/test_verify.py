"""`study verify` names the strategies that match one process, and the faults of the others."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import ROOT
from study.config.strategies import STUDIED_STRATEGIES
from study.host.machine import detect_machine
from study.releases import verify as verify_module
from study.releases.causes import find_causes, find_races
from study.releases.verdict import ROUNDING, Verdict, reference_precision
from study.releases.verification import BY_LUCK, Verification, VerifyRow
from study.releases.verify import VerifyMatrix

PLANTED = ROOT / "tests" / "probes" / "planted"
STACK = {"deepspeed": "0.19.8", "accelerate": "1.15.0", "torch": "2.13.0", "transformers": "5.23.0"}


def verify(*flags: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    folders = [str(folder) for folder in (path, ROOT) if folder]
    return subprocess.run(
        [sys.executable, "-m", "study.cli", "verify", *flags],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"} | environment,
    )


def test_quick_finds_a_fault_in_each_stage_and_imports_the_engines_alone() -> None:
    """The installed DeepSpeed, with a fault planted in each stage."""
    result = verify("--quick", "--json", path=PLANTED)
    assert result.returncode == 1, result.stderr[-3000:]
    document = json.loads(result.stdout)
    assert document["answer"] == "FAIL: zero1, zero3 with accumulation (no known cause); zero2 (no known cause)"
    assert document["not_trusted"] == ["zero1", "zero2", "zero3"]
    assert "zero1, zero2, zero3 on 2 ranks on CPU cores, with accumulation 1 and 4; about 2 min" in result.stderr
    rows = document["rows"]
    assert {(row["strategy"], row["micro_steps"]): row["what"] for row in rows} == {
        ("zero1", 1): None,
        ("zero1", 4): "gradient",
        ("zero2", 1): "clipping",
        ("zero2", 4): "clipping",
        ("zero3", 1): None,
        ("zero3", 4): "scale",
    }
    assert [row["norm_ratio"] for row in rows if row["what"] == "scale"] == [pytest.approx(0.25, rel=1e-3)]
    assert {row["precision"] for row in rows} == {"fp32"}


def test_without_a_judged_engine_verification_does_not_pass() -> None:
    refused = Verdict("refuses", reason="no compiler")
    rows = [
        VerifyRow("ddp", "fp32", 1, Verdict("equal")),
        VerifyRow("zero1", "fp32", 1, refused),
        VerifyRow("zero2", "fp32", 1, Verdict("not judged", reason="the run of one process failed")),
    ]
    verification = Verification(("ddp", "zero1", "zero2"), 2, rows)
    assert (verification.unverified, verification.agrees) == (["zero1", "zero2"], None)
    assert verification.answer == "NOT JUDGED: no engine of DeepSpeed could run here; not judged here: zero1, zero2"
    alone = Verification(("ddp",), 2, rows[:1])
    passed = "PASS: ddp: gradients equal those of one process in fp32"
    assert (alone.agrees, alone.answer) == (True, passed)


def test_one_rank_passes_with_the_limits_of_one_rank() -> None:
    """A GPU alone cannot show a fault in a collective."""
    rows = [VerifyRow("zero1", precision, 4, Verdict("equal")) for precision in ("fp32", "fp16-engine")]
    answer = Verification(("zero1",), 1, rows).answer
    passed = "PASS: zero1: gradients equal those of one process in fp32, fp16-engine"
    assert answer == f"{passed}; one rank exchanges nothing, so faults between ranks are not detected"
    assert Verification(("zero1",), 2, rows).answer == passed


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_an_engine_s_own_half_precision_is_compared_with_autocast_in_the_same_format(half: str) -> None:
    assert reference_precision(f"{half}-engine") == reference_precision(half) == half
    # fp16 has three bits more than bf16.
    for suffix in ("", "-engine"):
        fp16, bf16 = (ROUNDING[f"{name}{suffix}"] for name in ("fp16", "bf16"))
        assert (8 * fp16.loss, 8 * fp16.norm) == (bf16.loss, bf16.norm)


def test_fp16_is_verified_on_request_under_the_strategies_that_have_it(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    verify_module.add_arguments(parser)
    precisions = parser.parse_args(["--precision", "fp16", "fp16-engine"]).precision
    matrix = VerifyMatrix(tmp_path, detect_machine(), STACK, precisions, 1, chosen=False)
    cells = {strategy: [cell[0] for cell in matrix.cells(strategy)] for strategy in STUDIED_STRATEGIES[1:]}
    assert {name: precisions for name, precisions in cells.items() if precisions} == {
        "ddp": ["fp16"],
        "zero0": ["fp16"],
        "zero1": ["fp16-engine"],
        "zero2": ["fp16-engine"],
        "zero3": ["fp16-engine"],
    }
    chosen = VerifyMatrix(tmp_path, detect_machine(), STACK, precisions, 1, chosen=True)
    assert [cell[0] for cell in chosen.cells("zero2_cpu")] == ["fp16-engine"]


def test_a_failure_names_the_strategy_the_set_up_and_the_known_cause() -> None:
    causes = find_causes(STACK | {"deepspeed": "0.19.5"}, "zero2", 4, "fp32", "gradient")
    wrong = Verdict("different", what="gradient", size=0.5)
    rows = [VerifyRow("zero2", "fp32", 1, Verdict("equal")), VerifyRow("zero2", "fp32", 4, wrong, causes)]
    zero3 = [VerifyRow("zero3", "fp32", steps, wrong) for steps in (1, 4)]
    cause = "cause a: the gradient is divided by the accumulation steps twice; fixed in 0.19.6"
    answer = Verification(("zero2", "zero3"), 2, [*rows, *zero3]).answer
    assert answer == f"FAIL: zero2 with accumulation ({cause}); zero3 (no known cause)"
    crash = VerifyRow("ddp", "fp32", 1, Verdict("crashes", reason="RuntimeError: x"))
    lora = VerifyRow("zero2", "fp32", 4, wrong, causes, "lora")
    answer = Verification(("ddp", "zero2"), 2, [*rows, lora, crash]).answer
    crashes = "ddp without accumulation (crashes: RuntimeError: x)"
    assert answer == f"FAIL: {crashes}; zero2, lora zero2 with accumulation ({cause})"


def test_an_equal_run_with_a_known_race_proves_nothing_and_fails_only_where_it_strikes_or_on_gpus() -> None:
    races = find_races(STACK | {"deepspeed": "0.19.7"}, "zero3", 4, "fp32", on_gpu=False)
    assert not find_races(STACK, "zero3", 4, "fp32", on_gpu=False)
    cause = "cause e: weights are read before they have arrived; on CPUs only; fixed in 0.19.8"
    row = VerifyRow("zero3", "fp32", 4, Verdict("equal"), races)
    assert (row.kind, row.is_fine, VerifyRow("zero3", "fp32", 4, Verdict("equal")).is_fine) == (BY_LUCK, False, True)
    verification = Verification(("zero3",), 2, [row])
    passed = "PASS: zero3: gradients equal those of one process in fp32"
    assert verification.answer == f"{passed}; zero3 {BY_LUCK} ({cause})"
    struck = VerifyRow("zero3", "fp32", 1, Verdict("different", what="weights"), races)
    assert Verification(("zero3",), 2, [struck, row]).answer == f"FAIL: zero3 ({cause})"
    on_gpus = tuple(dataclasses.replace(race, gpu="shows") for race in races)
    assert Verification(("zero3",), 2, [dataclasses.replace(row, causes=on_gpus)]).not_trusted == ["zero3"]


def test_releases_that_do_not_import_together_are_refused_with_the_message_of_python(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("from torch.distributed import log_of_another_release\n")
    result = verify("--quick", path=tmp_path)
    assert result.returncode == 2
    problem = "error: the packages under test cannot be imported together: ImportError: cannot import name"
    assert result.stderr.splitlines()[-1].startswith(problem)


@pytest.mark.long
def test_every_strategy_of_the_pinned_releases_matches_one_process(tmp_path: Path) -> None:
    # DeepSpeed's stages report the norm of Muon's updates, so those norms are not compared.
    options = ("--optimizer", "muon", "--peft", "lora")
    four = verify("--world_size", "4", "--quick", *options, "--json")
    assert four.returncode == 0, four.stderr
    assert "4 ranks on CPU cores" in four.stderr
    runs_dir = ("--runs_dir", str(tmp_path))
    result = verify("--json", *runs_dir)
    document = json.loads(result.stdout)
    assert result.returncode == 0, document["not_trusted"]
    assert {row["kind"] for row in document["rows"]} <= {"equal", "refuses"}
    assert sum(row["kind"] == "equal" for row in document["rows"]) >= 20
    # The same stack continues from its records.
    second = verify("--only", "ddp", *runs_dir)
    assert second.stdout.startswith("PASS: ddp: gradients equal those of one process in fp32, ")
