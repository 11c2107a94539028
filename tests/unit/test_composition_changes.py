"""A newer release against the stored combinations: repeated combinations, changes, and the report."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from study.compositions.answers import read_matrices
from study.compositions.changes import changes_page, combinations_to_repeat, equal_runs_with, find_changes
from study.compositions.features import make_combination
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationOutcome
from study.config.places import REPOSITORY
from tools.watch import is_newer

WATCH = REPOSITORY / "tools" / "watch.py"
STORED = next(read_matrices())
NO_FP16 = "ValueError: Type fp16 is not supported on your device."


def outcome(features: str, kind: str = "equal", says: str = "", line: str = "") -> CombinationOutcome:
    difference = {"stage": says} if kind == "differs" else None
    return CombinationOutcome(make_combination(features.split(",")), kind, says, line, 1.0, difference)


def make_matrix(*outcomes: CombinationOutcome, release: str = "99.0") -> Matrix:
    return Matrix({"deepspeed": release}, {result.combination: result for result in outcomes})


def test_everything_that_a_cpu_can_run_of_the_stored_matrix_is_repeated() -> None:
    names = {combination.name for combination in combinations_to_repeat(STORED)}
    assert len(names) > 150
    assert "zero2,muon,clipping" in names
    assert "zero3,deepcompile" not in names
    assert {outcome.combination.name for outcome in STORED.outcomes.values() if outcome.is_equal} <= names


@pytest.mark.parametrize(
    ("kind", "says", "count"), [("refuses", "", 1), ("refuses", NO_FP16, 0), ("differs", NO_FP16, 1)]
)
def test_a_cpu_without_fp16_is_no_change_of_a_release(kind: str, says: str, count: int) -> None:
    changes = find_changes(make_matrix(outcome("zero1,fp16")), make_matrix(outcome("zero1,fp16", kind, says)))
    assert len(list(changes)) == count


def test_equal_runs_with_a_feature_are_repeated_after_a_change_of_what_rounding_allows() -> None:
    chosen = equal_runs_with(STORED, ["bf16", "autocast"])
    assert chosen == sorted(chosen, key=lambda combination: len(combination.features))
    assert set(chosen) == {
        combination
        for combination, result in STORED.outcomes.items()
        if result.is_equal and {"bf16", "autocast"} & set(combination.features)
    }


def test_a_change_is_another_outcome_or_another_stage_and_not_another_line() -> None:
    before = make_matrix(
        outcome("zero1"),
        outcome("zero2"),
        outcome("zero3,muon,no_reduce_scatter"),
        release="1.0",
    )
    refused = outcome("zero2,sgd", "refuses", "no", "engine.py:1")
    different = outcome("zero3,clipping_unset", "differs", "gradient")
    fixed = outcome("zero1,clipping_unset", "differs", "gradient")
    for finding in (refused, different, fixed):
        before.findings[finding.combination] = finding
    now = make_matrix(
        outcome("zero1"),
        outcome("zero2", "crashes", "a `message` with | and <b>"),
        dataclasses.replace(refused, line="engine.py:7"),
        outcome("zero3,clipping_unset", "differs", "update"),
        outcome("zero1,clipping_unset"),
    )
    changes = list(find_changes(before, now))
    assert [(change.kind, change.now.combination.name) for change in changes] == [
        ("broken", "zero2"),
        ("other", "zero3,clipping_unset"),
        ("mended", "zero1,clipping_unset"),
    ]
    page = changes_page(before, now, missing=1)
    assert page.startswith("**5 combinations: 1 equal before and not now, 1 equal now, 1 not equal in another way.**")
    assert "| deepspeed | 1.0 | 99.0 |" in page
    assert "1 combinations were not run" in page
    assert "| `zero2` | equal | crashes: a 'message' with / and &lt;b> | - |" in page


def test_the_stored_matrix_has_no_change_against_itself() -> None:
    assert list(find_changes(STORED, STORED)) == []


@pytest.mark.parametrize(
    ("version", "stored", "newer"),
    [
        ("0.19.8", "0.19.8", False),
        ("2.13.0+cu129", "2.13.0+cpu", False),
        ("2.13.1+cpu", "2.13.0", True),
        ("0.20.0", "0.19.8", True),
        ("0.19.10", "0.19.9", True),
        ("0.18.0", "0.19.8", False),
        (None, "0.21.2", False),
        ("0.21.2", None, True),
    ],
)
def test_a_newer_release(version: str | None, stored: str | None, newer: bool) -> None:
    assert is_newer(version, stored) is newer


def watch(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(WATCH), *arguments], capture_output=True, text=True, cwd=REPOSITORY, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def test_nothing_is_run_without_a_newer_release(tmp_path: Path) -> None:
    status, out, _ = watch("--runs_dir", str(tmp_path / "runs"))
    assert status == 0
    assert out.startswith("no package is newer than those of the stored matrix: deepspeed 0.19.8")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("pretended", ["deepspeed", "deepspeed=", "deepspeed=new", "numpy=9.0"])
def test_a_wrong_release_is_refused(pretended: str, tmp_path: Path) -> None:
    status, _, error = watch("--runs_dir", str(tmp_path), "--pretend", pretended)
    assert status == 2
    assert "is not PACKAGE=RELEASE" in error


def test_the_workflow_runs_the_tool_and_reports_in_a_job_that_runs_no_package() -> None:
    text = (REPOSITORY / ".github" / "workflows" / "combinations.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert "tools/watch.py --runs_dir runs/watch" in str(jobs["watch"]["steps"])
    assert "permissions" not in jobs["watch"]
    assert jobs["report"]["permissions"] == {"issues": "write"}
    assert "pip" not in str(jobs["report"])


def test_the_workflow_opens_one_issue_for_the_same_releases(tmp_path: Path) -> None:
    text = (REPOSITORY / ".github" / "workflows" / "combinations.yml").read_text(encoding="utf-8")
    script = yaml.safe_load(text)["jobs"]["report"]["steps"][-1]["run"]
    # Stands for GitHub's command line: it lists and appends titles of a file.
    gh = tmp_path / "gh"
    gh.write_text('#!/bin/sh\ncase "$2" in list) cat issues;; create) echo "$6" >> issues;; esac\n')
    gh.chmod(0o755)
    issues = tmp_path / "issues"
    issues.write_text("Combinations change with deepspeed 99\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_REPOSITORY": "owner/name"}
    for newer in ("deepspeed 99.0, torch 9.1+cpu", "deepspeed 99.0, torch 9.1+cpu", "$(touch made) `touch made`"):
        (tmp_path / "newer.txt").write_text(newer + "\n")
        subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert issues.read_text().splitlines()[1:] == [
        "Combinations change with deepspeed 99.0, torch 9.1+cpu",
        "Combinations change with touch made touch made",
    ]
    assert not (tmp_path / "made").exists()
