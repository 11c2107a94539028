"""The tools of this repository: the runner of tests, the guard of refactorings, and the list of planted faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines import ROOT
from tools import golden, house, run_tests, tree

# The runner: a test that fails once and passes alone does not fail the run; a test that fails twice does.

FLAKY = """
from pathlib import Path
def test_flaky():
    tried = Path(__file__).with_name("tried")
    found = tried.exists()
    tried.touch()
    assert found, "only the first time"
"""
FAILING = "def test_failing():\n    assert 1 + 1 == 3\n"
PASSING = "import pytest\n@pytest.mark.alone\ndef test_alone():\n    pass\n"
FLAKY_LINE = "FLAKY (passed alone): tests/test_one.py::test_flaky: AssertionError: only the first time assert False"
FAILED_LINE = "FAILED: tests/test_two.py::test_failing: assert (1 + 1) == 3"


def test_the_last_lines_name_flaky_and_failing_tests(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  alone\n  long\n  gpu\n")
    for name, text in {"one": FLAKY, "passing": PASSING, "two": FAILING}.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "run_tests.py"), "--retry"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = done.stdout.strip().splitlines()
    assert (done.returncode, lines[-2:]) == (1, [FLAKY_LINE, FAILED_LINE])
    # The pass of tests marked `alone`, and the second try.
    assert sum("1 passed" in line for line in lines) == 2


WRONG = """
from runs import trained
def test_wrong(tmp_path):
    trained("single", tmp_path)
"""
BY_A_FIXTURE = "def test_wrong(get_run):\n    get_run('single')\n"


@pytest.mark.parametrize(
    ("folder", "text", "says"),
    [
        ("unit", WRONG, "test_wrong.py: runs.trained starts ranks. To fix it: move the test to tests/engine/"),
        ("report", BY_A_FIXTURE, "tests/report/test_wrong.py: get_run starts ranks."),
        ("engine", WRONG, "tests/engine/test_wrong.py::test_wrong"),
    ],
    ids=["a function elsewhere", "a fixture elsewhere", "in its folder"],
)
def test_a_test_that_starts_ranks_is_collected_in_its_folder_alone(folder, text, says, tmp_path):
    """It is marked there by its folder."""
    for file in [*(ROOT / "tests").glob("*.py"), ROOT / "pyproject.toml"]:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.symlink_to(file) if file.name != "conftest.py" else shutil.copy(file, copy)
    (tmp_path / "tests" / folder).mkdir()
    (tmp_path / "tests" / folder / "test_wrong.py").write_text(text)
    mark = "engine" if folder == "engine" else "not engine"
    status, printed = collect(tmp_path, mark)
    assert (status != 0) == ("starts ranks" in says)
    assert says in printed


def collect(folder: Path, mark: str) -> tuple[int, str]:
    """Collect the tests of a folder in a fork: the libraries that its conftest.py imports take seconds."""
    printed = folder / "printed.txt"
    if (child := os.fork()) == 0:
        status = 1
        try:
            for descriptor in (1, 2):
                os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1)
            os.chdir(folder)
            # Those of this folder's tests have the same names.
            tests = (ROOT / "tests").as_posix()
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(tests):
                    del sys.modules[name]
            sys.path[:] = [place for place in sys.path if not place.startswith(tests)]
            arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", mark]
            status = int(pytest.main(arguments))
        finally:
            os._exit(status)
    _, wait_status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(wait_status), printed.read_text(encoding="utf-8")


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
    monkeypatch.setattr(run_tests, "run_pass", lambda *_: passes.pop(0))
    assert run_tests.main() == status
    assert capsys.readouterr().out.splitlines()[-1:] == [last] * (last is not None)


PAGE = "| Strategy | peak |\n| --- | --- |\n| zero2 | 1.25 |\n\nThe lowest peak is 1.25 GiB.\n"
OLD = {"arms": [{"name": "ddp", "held": 0.1 + 0.2, "kind": "nothing"}, {"name": "zero2", "held": 2}]}
DDP, ZERO2 = {"held": 0.1 + 0.2, "name": "ddp", "kind": "ineffective"}, {"name": "zero2", "held": 2.0}


@pytest.mark.parametrize(
    ("rows", "page", "says"),
    [
        # Other names in the table of renames, and other words.
        ([DDP, ZERO2], PAGE.replace("The lowest peak is", "Lowest of all peaks:"), ""),
        ([DDP | {"held": 0.3}, ZERO2], PAGE, "a.json: strategies.ddp.held: 0.30000000000000004 -> 0.3 (rounding)"),
        ([DDP | {"held": 0.31}, ZERO2], PAGE, "a.json: strategies.ddp.held: 0.30000000000000004 -> 0.31"),
        ([DDP, {"name": "zero2"}], PAGE, 'a.json: strategies.zero2.held: 2 -> "(absent)"'),
        ([DDP, ZERO2 | {"more": None}], PAGE, 'a.json: strategies.zero2.more: "(absent)" -> null'),
        ([ZERO2, DDP], PAGE, 'a.json: strategies (order): ["ddp", "zero2"] -> ["zero2", "ddp"]'),
        ([DDP, ZERO2], PAGE.replace("| 1.25", "| 1"), 'b.md: tables[Strategy, peak (1)].zero2.peak: "1.25" -> "1"'),
        (
            [DDP, ZERO2],
            PAGE.replace("1.25 G", "1.26 G"),
            'b.md: prose: "1.25 (The lowest peak is 1.25 GiB.)" -> "1.26 (The lowest peak is 1.26 GiB.)"',
        ),
        ([DDP, ZERO2], None, "b.md: : "),
    ],
)
def test_each_difference_is_found_and_a_new_name_is_none(rows, page, says, tmp_path, capsys):
    for name, document, text in (("old", OLD, PAGE), ("new", {"strategies": rows}, page)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text(json.dumps(document))
        if text:
            (tmp_path / name / "b.md").write_text(text)
    renames = {"arms": "strategies", "nothing": "ineffective"}
    assert golden.compare(tmp_path / "old", tmp_path / "new", renames) == bool(says)
    *differences, summary = capsys.readouterr().out.splitlines()
    assert (len(differences), "".join(differences).startswith(says)) == (bool(says), True)
    assert summary.startswith(f"{len(differences)} differences, {says.count('(rounding)')} of them rounding, in 2 ")


FAULTS = yaml.safe_load((ROOT / "tools" / "faults.yaml").read_text(encoding="utf-8"))
SOURCES = [file.read_text(encoding="utf-8") for file in (ROOT / "study").rglob("*") if file.suffix in (".py", ".yaml")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_is_found_once_and_its_tests_exist(fault: dict[str, Any]) -> None:
    assert sum(text.count(fault["old"]) for text in SOURCES) == 1
    for test in fault["tests"]:
        file, _, function = test.partition("::")
        name = f"def {function.partition('[')[0]}(" if function else ""
        assert name in Path(ROOT, file).read_text(encoding="utf-8")


# What git keeps: see tools/tree.py.


def test_git_keeps_no_file_that_a_command_makes_and_no_large_one() -> None:
    sizes = tree.tracked()
    assert len(sizes) > 500
    assert tree.problems(sizes, tree.linked_figures(sizes)) == []
    figures = {"reports/a/figures/shown.svg", "reports/a/figures/heavy.svg"}
    wrong = {
        "reports/a/index.html": "`make reports` makes it",
        "reports/a/loss.ipynb": "`make reports` makes it",
        "reports/a/images/loss_1.png": "`make reports` makes it",
        "reports/a/pages.json": "`make reports` makes it",
        "reports/a/figures/alone.svg": "no page in git shows it",
        "reports/a/figures/heavy.svg": "60,001 bytes",
        "reports/a/steps.parquet": "every version stays in each clone",
        "study/data.json": "every version stays",
    }
    heavy = {
        "reports/a/figures/heavy.svg": tree.MAX_FIGURE_BYTES + 1,
        "reports/a/steps.parquet": 500_000,
        "study/data.json": 500_000,
    }
    right = {"reports/a/figures/shown.svg": 10, "reports/a/summary.md": 10, "reports/README.md": 10}
    lines = tree.problems({**dict.fromkeys(wrong, 10), **right, **heavy}, figures)
    assert len(lines) == len(wrong)
    for line, (name, words) in zip(lines, wrong.items(), strict=True):
        assert line.startswith(f"{name}: ")
        assert words in line
        assert "To fix it: " in line
    (line,) = tree.problems({f"study/{number}.py": 400_000 for number in range(31)}, set())
    assert line.startswith("the tree has 12,400,000 bytes")


def test_every_recipe_of_the_makefile_has_its_variables() -> None:
    # A recipe that begins with an undefined variable may begin with a hyphen, for make "ignore errors".
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert "test-experiments" in targets
    # Options of users.
    options = ["FLAGS=", "TORCH_INDEX=", "RUNS="]
    command = ["make", "-n", "--warn-undefined-variables", *options, *targets]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "undefined variable" not in result.stderr


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("is_lost = 'connection closed' in reason", True),
        ("is_lost = 'connection closed' not in reason", True),
        ("is_lost = reason.startswith(('the loss is', 'x'))", True),
        ("parts = reason.split('; ')", False),
        ("is_lost = state == 'not judged'", False),
        ("is_lost = 'failed' in states", False),
    ],
)
def test_a_comparison_with_words_of_a_text_is_found(line: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "reader.py").write_text(f"reason, state, states = 'a', 'b', ['c']\n{line}\n")
    problems = [problem for problem in house.words_read(tmp_path) if "study/reader.py" in problem]
    assert [problem.partition(" allowed")[0] for problem in problems] == (
        ["study/reader.py looks for words in a text in line 2, 0 are"] if is_found else []
    )
