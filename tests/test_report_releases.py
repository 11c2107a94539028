"""A report of releases: which of them diverge from one process, by which cause, and in which cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from study.records.frames import Records, read_parquet, read_runs, write_parquet
from study.releases.release_cells import ReleaseCell, release_cells
from study.report.pages.releases import ReleaseReport
from study.report.questions import answers
from study.report.questions.releases import QUESTION, verdict_table
from synthetic_records import with_steps, write_run

CAUSES = """
causes:
  - id: divided-twice
    title: the gradient is divided <b>twice</b>
    blame: engine
    strategies: [zero1]
    accumulation: several
    differs: [gradient]
    deepspeed: "==0.18.6"
    says: Both divide.
    lines: [{package: deepspeed, release: 0.18.6, file: deepspeed/runtime/engine.py, lines: "10-12", says: divides}]
    left: {release: 0.19.8, change: https://github.com/deepspeedai/DeepSpeed/pull/1}
    gpu: shows
    gpu_why: the same Python runs there
  - id: race
    title: weights are read too early
    blame: engine
    strategies: [zero3]
    deepspeed: "<0.19.8"
    sometimes: true
    says: By chance.
    gpu: hidden
    gpu_why: one stream
"""
SHIFT: dict[str, Any] = {"loss_shift": 0.1, "norm": 0.25}


def write(
    root: Path, stack: str, strategy: str, micro_steps: int = 1, *, repeat: int = 1, norm: float = 1.0, **more: Any
) -> None:
    """Write a run with a stack and these gradient norms; `loss_shift` applies from the second step on."""
    versions = {
        "torch": "2.8.0" if stack.endswith("-then") else "2.13.0",
        "accelerate": "1.15.0",
        "transformers": "5.23.0",
    }
    engine_values = {"gradient_accumulation_steps": micro_steps, "deepspeed": stack.removesuffix("-then")}
    path = write_run(
        root, strategy, name=f"{strategy}-{stack}-{micro_steps}-r{repeat}", repeat=repeat, steps=4,
        config={"warmup_ratio": 0.0, "learning_rate": 1e-3, "lr_scheduler_type": "constant"},
        engine=engine_values | more.pop("engine", {}), environment={"packages": versions}, **more,
    )  # fmt: skip
    with_steps(path, lambda row: row | {"grad_norm": norm})
    (path / "sweep.json").write_text(json.dumps({"stack": stack, "strategy": strategy, "attempts": []}))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    root = tmp_path_factory.mktemp("releases")
    for stack in ("0.18.6", "0.18.6-then", "0.19.8"):
        write(root, stack, "single")
        write(root, stack, "ddp", 4)
    write(root, "0.18.6", "zero1")
    write(root, "0.18.6", "zero1", 4, **SHIFT)
    write(root, "0.18.6-then", "zero1", 4, **SHIFT)
    write(root, "0.18.6", "zero2", 4, **SHIFT)
    write(root, "0.18.6-then", "zero2", 4)
    write(root, "0.18.6", "zero3", 4)
    write(root, "0.18.6", "zero3", 4, repeat=2, loss_shift=0.2)
    write(root, "0.18.6", "zero3_cpu", 4, state="failed", reason="AttributeError: <i>no such</i> key")
    write(root, "0.18.6", "zero2_cpu", 4, state="unsupported", reason="deepspeed-0.18.6 is not installable: no wheel")
    write(root, "0.19.8", "zero1", 4)
    write(root, "0.18.6", "zero3")
    # It has no `single` run: another stack with the same torch and Accelerate has one.
    write(root, "0.19.2", "zero1", 4)
    write_parquet(read_runs(root), root / "kept")
    return read_parquet(root / "kept")


@pytest.fixture(autouse=True)
def causes(write_causes: Any) -> None:
    write_causes(CAUSES)


def find_cell(records: Records, stack: str, strategy: str, micro_steps: int = 4) -> ReleaseCell:
    matches = [cell for cell in release_cells(records)
             if (cell.stack, cell.strategy, cell.micro_steps) == (stack, strategy, micro_steps)]  # fmt: skip
    assert len(matches) == 1
    return matches[0]


def test_each_case_is_compared_with_one_process_of_its_own_releases(records: Records) -> None:
    kinds = {(cell.stack, cell.strategy, cell.micro_steps): cell.verdict.kind for cell in release_cells(records)}
    assert kinds == {
        **{(stack, "ddp", 4): "equal" for stack in ("0.18.6", "0.18.6-then", "0.19.8")},
        ("0.18.6", "zero1", 1): "equal", ("0.18.6", "zero1", 4): "different", ("0.18.6-then", "zero1", 4): "different",
        ("0.18.6", "zero2", 4): "different", ("0.18.6-then", "zero2", 4): "equal",
        ("0.18.6", "zero3", 1): "equal", ("0.18.6", "zero3", 4): "different", ("0.18.6", "zero3_cpu", 4): "crashes",
        ("0.18.6", "zero2_cpu", 4): "not installable", ("0.19.8", "zero1", 4): "equal", ("0.19.2", "zero1", 4): "equal",
    }  # fmt: skip
    assert find_cell(records, "0.18.6", "zero1").single.startswith("single-0.18.6-1")
    assert find_cell(records, "0.18.6-then", "zero1").single.startswith("single-0.18.6-then")


def test_a_fault_that_is_absent_with_contemporary_releases_is_a_mismatch(records: Records) -> None:
    engines, pairings = find_cell(records, "0.18.6", "zero1"), find_cell(records, "0.18.6", "zero2")
    assert (engines.contemporary, engines.is_mismatch) == ("different", False)
    assert (pairings.contemporary, pairings.is_mismatch) == ("equal", True)
    assert [cause.id for cause in engines.causes] == ["divided-twice"]
    assert pairings.causes == ()


def test_a_case_with_one_wrong_run_is_wrong_sometimes(records: Records) -> None:
    lucky = find_cell(records, "0.18.6", "zero3")
    assert (lucky.verdict.kind, lucky.differs_sometimes, len(lucky.runs)) == ("different", True, 2)
    assert lucky.worst_run.endswith("r2")
    assert not find_cell(records, "0.18.6", "zero1").differs_sometimes
    # One correct run proves nothing in a release with a race condition.
    assert find_cell(records, "0.18.6", "zero3", 1).is_equal_by_chance
    assert not find_cell(records, "0.19.8", "zero1").is_equal_by_chance


def test_the_answer_names_the_good_releases_and_such_a_report_has_no_speeds(records: Records) -> None:
    answer = QUESTION.answer(records)
    assert answer is not None
    assert "torch, on CPU ranks, 1 of 3 releases that run diverge from one process" in answer.sentence
    assert "under all strategies: 0.19.2, 0.19.8." in answer.sentence
    assert "Of 2 cases that are wrong today" in answer.notes[1]
    assert "1 are right with those" in answer.notes[1]
    assert {question.name for question in answers(records)} == {"releases", "runs"}
    # The newest first; the two newest have no fault.
    assert answer.table.to_numpy().tolist() == [
        ["0.19.2, 0.19.8", "not run", "no fault", "no fault"],
        ["0.18.6", "no fault", "a: `zero1`; ?: `zero2`; not run: `zero2_cpu`, `zero3_cpu`", "b: `zero3`"],
    ]
    verdicts = verdict_table(records).set_index(["Release", "Accelerate and torch", "Strategy", "Micro-steps"])
    assert verdicts.loc[("0.18.6", "today's", "zero1", 4), "Cause"] == "a"
    assert verdicts.loc[("0.18.6", "today's", "zero3", 4), "Verdict"] == "different, sometimes"


def test_the_page_escapes_causes_and_records(records: Records) -> None:
    text = ReleaseReport(records).details([])
    assert "### a: the gradient is divided &lt;b&gt;twice&lt;/b&gt;" in text
    assert "| 0.18.6 | `zero3_cpu` | crashes | AttributeError: &lt;i&gt;no such&lt;/i&gt; key |" in text
    assert "<i>" not in text
