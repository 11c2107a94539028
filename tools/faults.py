"""Mutation tests: apply each fault of tools/faults.yaml to a copy of the checkout and report whether tests fail.

    python tools/faults.py [--only NAME...]

Run it after tests were shortened or code was moved. The copy is a git worktree in a temporary folder, with tracked
files and uncommitted changes; the user's work tree is never changed. `--only` takes prefixes of names.

A fault is located by its text, anywhere in study/. It is an error if the text is not there exactly once, or if a test
fails without a fault. The exit status is 1 after an error, or if tests detect fewer than 50 faults of the whole list.
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
MIN_SEEN = 50
# Time limits of one fault's tests, and of all tests without a fault.
TIME_LIMIT_S, TIME_LIMIT_OF_ALL_S = 240, 3600
_FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?/?(test_\w+\.py(?:::\w+)?)", re.MULTILINE)


@contextmanager
def copy_of_the_checkout() -> Iterator[Path]:
    """Yield a temporary git worktree with the uncommitted changes of this checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder) / "checkout"
        # `stash create` prints nothing for a clean tree.
        git("worktree", "add", "--detach", str(copy), git("stash", "create") or "HEAD")
        try:
            yield copy
        finally:
            git("worktree", "remove", "--force", str(copy))


def run_tests(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Return pytest's exit status, or None after the time limit, and the failed tests."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long and not gpu"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=copy,
            timeout=limit_s,
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": str(copy)},
        )
    except subprocess.TimeoutExpired:
        return None, f"the time limit of {limit_s:.0f} s"
    failed_tests = ", ".join(_FAILED.findall(done.stdout)) or (done.stdout + done.stderr).strip()[-300:]
    return done.returncode, failed_tests if done.returncode else ""


def without_faults(copy: Path, faults: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the faults whose tests fail without a fault, with the reason.

    It first runs the tests of all faults together, and the tests of each fault separately if that fails.
    """
    status, _ = run_tests(
        copy, list(dict.fromkeys(test for fault in faults for test in fault["tests"])), TIME_LIMIT_OF_ALL_S
    )
    lists = {tuple(fault["tests"]) for fault in faults} if status else set()
    failing = {
        tests: failed for tests in lists for status, failed in [run_tests(copy, tests, TIME_LIMIT_S)] if status != 0
    }
    return {fault["name"]: reason for fault in faults if (reason := failing.get(tuple(fault["tests"])))}


def tried(copy: Path, fault: dict[str, Any]) -> tuple[str, str]:
    """Apply one fault and run its tests; return the verdict and the tests that detected it."""
    files = [
        file
        for kind in ("py", "yaml")
        for file in copy.glob(f"study/**/*.{kind}")
        if fault["old"] in file.read_text(encoding="utf-8")
    ]
    if [file.read_text(encoding="utf-8").count(fault["old"]) for file in files] != [1]:
        return "text not found", f"{len(files)} files of study/ contain it; it must be in one file, once"
    text = files[0].read_text(encoding="utf-8")
    files[0].write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        status, failed_tests = run_tests(copy, fault["tests"], TIME_LIMIT_S)
    finally:
        files[0].write_text(text, encoding="utf-8")
    # pytest exits with 4 or 5 if no test matches, such as a missing or a long one.
    return ("no test" if status in (4, 5) else "seen" if status else "NOT SEEN"), failed_tests


def main() -> int:
    """Print the verdict on each fault; return the exit status."""
    parser = argparse.ArgumentParser(description="Check that the tests detect the faults of tools/faults.yaml.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="prefixes of the names of faults")
    options = parser.parse_args()
    all_faults = yaml.safe_load((ROOT / "tools" / "faults.yaml").read_text(encoding="utf-8"))
    faults = [fault for fault in all_faults if fault["name"].startswith(tuple(options.only))]
    counts: dict[str, int] = {}
    with copy_of_the_checkout() as copy:
        failing = without_faults(copy, faults)
        for fault in faults:
            started, reason = time.monotonic(), failing.get(fault["name"])
            verdict, failed_tests = ("tests fail", f"without any fault: {reason}") if reason else tried(copy, fault)
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"{verdict:14}  {time.monotonic() - started:4.0f} s  {fault['name']}  [{failed_tests}]", flush=True)
    print(f"{counts.get('seen', 0)} of {len(faults)} faults are seen ({counts})")
    errors = counts.get("text not found", 0) + counts.get("tests fail", 0) + counts.get("no test", 0)
    return int(bool(errors) or (len(faults) == len(all_faults) and counts.get("seen", 0) < MIN_SEEN))


if __name__ == "__main__":
    sys.exit(main())
