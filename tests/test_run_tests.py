"""tools/run_tests.py: a test that fails once and passes alone does not fail the run; a test that fails twice does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engines import ROOT
from tools import run_tests as tool

FLAKY = """
from pathlib import Path
def test_flaky_{0}():
    tried = Path(__file__).with_name("tried-{0}")
    found = tried.exists()
    tried.touch()
    assert found, "only the first time"
"""
FAILING = "def test_failing():\n    assert 1 + 1 == 3\n"
PASSING = "import pytest\n@pytest.mark.alone\ndef test_alone():\n    pass\n"


def run_tests(folder: Path, *flags: str, **files: str) -> tuple[int, list[str]]:
    """Run the tool over test files in a separate folder; return its exit status and the lines of its output."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  alone\n  long\n  gpu\n")
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "run_tests.py"), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.strip().splitlines()


FLAKY_LINE = "FLAKY (passed alone): tests/test_one.py::test_flaky_1: AssertionError: only the first time assert False"
FAILED_LINE = "FAILED: tests/test_two.py::test_failing: assert (1 + 1) == 3"


def test_the_last_lines_name_flaky_and_failing_tests(tmp_path: Path) -> None:
    status, lines = run_tests(tmp_path, "--retry", one=FLAKY.format(1), passing=PASSING, two=FAILING)
    assert (status, lines[-2:]) == (1, [FLAKY_LINE, FAILED_LINE])
    # The pass of tests marked `alone`, and the second try.
    assert sum("1 passed" in line for line in lines) == 2


# The exit status and the failures of each pass.
FOUR = {f"tests/test_{number}.py::test": "assert 0" for number in range(4)}
ONE = dict([*FOUR.items()][:1])


@pytest.mark.parametrize(
    ("flags", "passes", "status", "last"),
    [
        (["--retry"], [(0, {})], 0, None),
        (["--retry"], [(1, ONE), (0, {})], 0, "FLAKY (passed alone): tests/test_0.py::test: assert 0"),
        (["--retry"], [(1, FOUR), (0, {})], 1, "4 flaky tests, more than 3"),
        ([], [(1, ONE)], 1, "FAILED: tests/test_0.py::test: assert 0"),
        # A pass that died before it named a failure, and such a second try.
        (["--retry"], [(1, {})], 1, None),
        (["--retry"], [(1, ONE), (1, {})], 1, "FAILED: tests/test_0.py::test: assert 0"),
    ],
)
def test_up_to_three_flaky_tests_are_green(flags, passes, status, last, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", *flags])
    monkeypatch.setattr(tool, "run_pass", lambda *_: passes.pop(0))
    assert tool.main() == status
    assert capsys.readouterr().out.splitlines()[-1:] == [last] * (last is not None)
