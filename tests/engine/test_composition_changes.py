"""A release that brings a fault back, and a watch that ends in time, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from study.compositions.changes import changes_page, find_changes, repeat
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationSession
from study.config.places import REPOSITORY
from tools import watch
from unit.test_composition_changes import make_matrix, outcome

pytestmark = pytest.mark.usefixtures("one_server")
FAULTS_FILE = REPOSITORY / "tests" / "probes" / "replanted.py"


class FaultySession(CombinationSession):
    """Runs every combination on engines with a fault of DeepSpeed 0.18.3, as a release would bring it back."""

    def _ask(self, combination, fault, seed=0):
        return super()._ask(combination, f"{FAULTS_FILE}:last_micro_step_only", seed)


def test_a_release_that_brings_a_fault_back_is_reported_with_the_smallest_combination(tmp_path: Path) -> None:
    names = ("ddp", "zero2", "zero2,accumulation,schedule", "zero2,accumulation,evaluation", "zero1,accumulation")
    stored = make_matrix(*map(outcome, names), release="0.19.8")
    now, lines, file = Matrix({"deepspeed": "99.0"}), list[str](), tmp_path / "compositions.json"
    with FaultySession() as session:
        assert repeat(stored, now, session, minutes=5, report=lines.append, file=file)
    changes = list(find_changes(stored, now))
    assert {change.now.combination.name for change in changes} == set(names[2:4])
    assert {change.kind for change in changes} == {"broken"}
    assert {change.shown_by.combination.name for change in changes if change.shown_by} == {"zero2,accumulation"}
    assert Matrix.read(file).findings.keys() == now.findings.keys()
    assert "each micro-batch counts (rank 0: 0 0 0 1; rank 1: 0 0 0 1)" in changes_page(stored, now, missing=0)
    # A later call finds everything done.
    with CombinationSession() as session:
        assert repeat(stored, Matrix.read(file), session, minutes=5, report=lines.append)


def test_equal_runs_are_repeated_whatever_the_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main(["--runs_dir", str(tmp_path), "--equal_with", "bf16", "--minutes", "0.001"]) == 3
    out = capsys.readouterr().out
    assert "newer than the stored matrix: nothing" in out
    assert ": equal\n" in out
    page = (tmp_path / "changes.md").read_text()
    assert page.startswith("**1 combinations: 0 equal before and not now")
    assert "were not run: the time was over" in page


def test_a_pretended_release_is_run_until_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def pretend(release: str) -> int:
        return watch.main(["--runs_dir", str(tmp_path), "--pretend", f"deepspeed={release}", "--minutes", "0.001"])

    assert pretend("99.0") == 3
    assert "newer than the stored matrix: deepspeed 99.0" in capsys.readouterr().out
    assert "were not run: the time was over" in (tmp_path / "changes.md").read_text()
    assert (tmp_path / "newer.txt").read_text() == "deepspeed 99.0\n"
    with pytest.raises(SystemExit, match="2"):
        pretend("99.1")
    assert "has runs of another stack" in capsys.readouterr().err
