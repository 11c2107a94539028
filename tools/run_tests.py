"""Runs the tests in two passes: three files at a time, then those marked `alone` with nothing beside them.

    python tools/run_tests.py [--retry] [PYTEST FLAG ...]

With --retry the tests that failed run once more, alone in one process. Those that pass then are flaky: up to three of
them keep the exit status 0, and reports/LOG.md gets their lines until they are mended. The last lines name each flaky
and each failing test with its assertion.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MAX_FLAKY = 3
# With more failures than this something is broken, and a second try would only take time.
MAX_RETRIED = 20
QUICK = "not long and not gpu"


class FailureRecorder:
    """A plugin of pytest that writes each test that failed, with its assertion, as JSON to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._record(report)

    def _record(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2]
            self.failures.setdefault(report.nodeid, " ".join(text.split())[:300])
            # At once: pytest says only at its end which test it was.
            print(f"\n{report.nodeid}: {self.failures[report.nodeid]}", flush=True)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps(self.failures), encoding="utf-8")


def run_pass(*arguments: str) -> tuple[int, dict[str, str]]:
    """Run pytest in a process of its own; return its exit status, and the assertion of each test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "failures.json"
        status = subprocess.run([sys.executable, __file__, "--pass", str(file), *arguments]).returncode
        return status, json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def is_broken(status: int, failures: dict[str, str]) -> bool:
    """Whether a pass ended without a verdict on its tests: a usage error, an interrupt, a crash before its end."""
    return status not in (0, 1) or (status == 1 and not failures)


def main() -> int:
    if sys.argv[1:2] == ["--pass"]:
        return int(pytest.main(sys.argv[3:], plugins=[FailureRecorder(Path(sys.argv[2]))]))
    flags = [flag for flag in sys.argv[1:] if flag != "--retry"]
    # Two files of tests with ranks leave a quarter of two cores idle: they wait for each other, a launcher or a time
    # limit. In the order of their folders, so that files with few and long tests are not the last ones.
    workers = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    passes = [run_pass(*workers, "-m", f"{QUICK} and not alone", *flags)]
    # Each file is imported once more for it: only those that have such a test.
    alone = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if "mark.alone" in file.read_text("utf-8")]
    if alone:
        passes.append(run_pass("-m", f"alone and {QUICK}", *alone))
    failures = {test: assertion for _, failed in passes for test, assertion in failed.items()}
    broken = [status for status, failed in passes if is_broken(status, failed)]
    flaky: dict[str, str] = {}
    if failures and not broken and "--retry" in sys.argv and len(failures) <= MAX_RETRIED:
        print(f"\n{len(failures)} failed; once more, alone:", flush=True)
        status, again = run_pass("-m", QUICK, *failures)
        if not is_broken(status, again):
            flaky = {test: assertion for test, assertion in failures.items() if test not in again}
            failures = again
    for kind, tests in (("FLAKY (passed alone)", flaky), ("FAILED", failures)):
        for test, assertion in tests.items():
            print(f"{kind}: {test}: {assertion}")
    if len(flaky) > MAX_FLAKY:
        print(f"{len(flaky)} flaky tests, more than {MAX_FLAKY}")
    return int(broken[0]) if broken else int(bool(failures) or len(flaky) > MAX_FLAKY)


if __name__ == "__main__":
    sys.exit(main())
