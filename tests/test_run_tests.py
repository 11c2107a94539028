"""tools/run_tests.py: a test that fails once and passes alone does not fail the run; a test that fails twice does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engines import ROOT

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


FLAKY_LINE = "FLAKY (passed alone): tests/test_one.py::test_flaky_1: AssertionError: only the first time"
ONE = {"one": FLAKY.format(1), "passing": PASSING}


@pytest.mark.parametrize(
    ("flags", "files", "status", "last"),
    [
        (("--retry",), ONE, 0, [FLAKY_LINE]),
        (("--retry",), ONE | {"two": FAILING}, 1,
         [FLAKY_LINE, "FAILED: tests/test_two.py::test_failing: assert (1 + 1) == 3"]),
        (("--retry",), {f"flaky_{number}": FLAKY.format(number) for number in range(4)}, 1,
         ["4 flaky tests, more than 3"]),
        ((), ONE, 1, ["FAILED: tests/test_one.py::test_flaky_1: "]),
    ],
    ids=["flaky", "flaky and failing", "four flaky", "without a second try"],
)  # fmt: skip
def test_the_last_lines_name_flaky_and_failing_tests_and_up_to_three_flaky_ones_are_green(
    flags: tuple[str, ...], files: dict[str, str], status: int, last: list[str], tmp_path: Path
) -> None:
    ended, lines = run_tests(tmp_path, *flags, **files)
    assert ended == status
    assert all(line.startswith(start) for line, start in zip(lines[-len(last) :], last, strict=True)), lines
    # The pass of tests marked `alone`, and the second try.
    assert sum("1 passed" in line for line in lines) == ("passing" in files) * (1 + ("--retry" in flags))


def test_a_file_that_does_not_import_is_red_with_its_reason(tmp_path: Path) -> None:
    status, lines = run_tests(tmp_path, "--retry", broken="import nothing_of_that_name\n", passing=PASSING)
    assert status != 0
    assert "No module named 'nothing_of_that_name'" in lines[-1]


@pytest.mark.parametrize("when", ["always", "in the second try"])
def test_a_pass_that_dies_with_1_before_it_names_a_failure_is_red(when: str, tmp_path: Path) -> None:
    dies = "import os\ndef pytest_unconfigure(): os._exit(1)\ndef pytest_sessionfinish(): os._exit(1)\n"
    if when != "always":
        dies = f"from pathlib import Path\nif Path({str(tmp_path / 'tests' / 'tried-1')!r}).exists():\n  " + "  ".join(
            dies.splitlines(keepends=True)
        )
    (tmp_path / "conftest.py").write_text(dies)
    status, lines = run_tests(tmp_path, "--retry", one=FLAKY.format(1), passing=PASSING)
    assert status == 1
    assert not any(line.startswith("FLAKY") for line in lines)
