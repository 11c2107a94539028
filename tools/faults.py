"""Puts each fault of tools/faults.yaml into a copy of the checkout, and says whether the tests see it.

    python tools/faults.py [--only NAME...]

Run it after tests were cut or code was moved. The copy is a git worktree in a temporary folder: it has what git knows,
with uncommitted changes, and the tree of the user is never touched. `--only` takes beginnings of names.

A fault is found by its text, wherever in study/ that has moved; one that is not there exactly once is an error, and so
is a test that fails without any fault. Exit status 1 with an error, or where fewer than 50 of the whole list are seen.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
LEAST_SEEN = 50
# Of one fault's tests, and of all tests without a fault.
TIME_LIMIT_S, TIME_LIMIT_OF_ALL_S = 240, 3600
_FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?/?(test_\w+\.py(?:::\w+)?)", re.MULTILINE)


@contextmanager
def copy_of_the_checkout() -> Iterator[Path]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder) / "checkout"
        # Of a clean tree `stash create` says nothing.
        git("worktree", "add", "--detach", str(copy), git("stash", "create") or "HEAD")
        try:
            yield copy
        finally:
            git("worktree", "remove", "--force", str(copy))


def run_tests(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """pytest's exit status, None where the time was over, and the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long and not gpu"]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=copy, timeout=limit_s, capture_output=True, text=True, errors="replace",
            env=os.environ | {"PYTHONPATH": str(copy)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"the time limit of {limit_s:.0f} s"
    said = ", ".join(_FAILED.findall(done.stdout)) or (done.stdout + done.stderr).strip()[-300:]
    return done.returncode, said if done.returncode else ""


def without_faults(copy: Path, faults: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Why the tests of a fault, by its name, do not pass as they are: all at once, and list by list if that fails."""
    status, _ = run_tests(
        copy, list(dict.fromkeys(test for fault in faults for test in fault["tests"])), TIME_LIMIT_OF_ALL_S
    )
    lists = {tuple(fault["tests"]) for fault in faults} if status else set()
    failing = {tests: said for tests in lists for status, said in [run_tests(copy, tests, TIME_LIMIT_S)] if status != 0}
    return {fault["name"]: why for fault in faults if (why := failing.get(tuple(fault["tests"])))}


def tried(copy: Path, fault: dict[str, Any]) -> tuple[str, str]:
    """What became of one fault, and which test saw it."""
    holding = [file for file in copy.glob("study/**/*.py") if fault["old"] in file.read_text(encoding="utf-8")]
    if [file.read_text(encoding="utf-8").count(fault["old"]) for file in holding] != [1]:
        return "text not found", f"{len(holding)} files of study/ hold it; it must be in one, once"
    text = holding[0].read_text(encoding="utf-8")
    holding[0].write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        status, said = run_tests(copy, fault["tests"], TIME_LIMIT_S)
    finally:
        holding[0].write_text(text, encoding="utf-8")
    # Of no test that is there, or is not long, pytest says so with these.
    return ("no test" if status in (4, 5) else "seen" if status else "NOT SEEN"), said


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the tests see the faults of tools/faults.yaml?")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="faults whose names begin so")
    options = parser.parse_args()
    every = yaml.safe_load((ROOT / "tools" / "faults.yaml").read_text(encoding="utf-8"))
    faults = [fault for fault in every if fault["name"].startswith(tuple(options.only))]
    counts: dict[str, int] = {}
    with copy_of_the_checkout() as copy:
        failing = without_faults(copy, faults)
        for fault in faults:
            started, why = time.monotonic(), failing.get(fault["name"])
            verdict, said = ("tests fail", f"without any fault: {why}") if why else tried(copy, fault)
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"{verdict:14}  {time.monotonic() - started:4.0f} s  {fault['name']}  [{said}]", flush=True)
    print(f"{counts.get('seen', 0)} of {len(faults)} faults are seen ({counts})")
    errors = counts.get("text not found", 0) + counts.get("tests fail", 0) + counts.get("no test", 0)
    return int(bool(errors) or (len(faults) == len(every) and counts.get("seen", 0) < LEAST_SEEN))


if __name__ == "__main__":
    sys.exit(main())
