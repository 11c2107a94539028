from __future__ import annotations

import gc
import inspect
import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from rank_servers import one_server

from runs import get_run
from study.config.errors import UserError
from study.host.folders import cache_directory
from study.host.memory import GIB, can_lock
from study.host.operators import configure_build_environment

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from study.claims.evidence import Evidence
    from study.claims.scoreboard import Scoreboard

__all__ = ["get_run", "one_server"]


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's job in the background ignores it, and so would every process that a test ends with Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        # The tests run ranks on CPU cores. The driver reads this at its first use, which no import above causes.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Launched processes find the operators that the installation built, with any cache.
    try:
        configure_build_environment(cache_directory())
    except UserError as refusal:
        raise pytest.UsageError(f"{refusal.problem}: {refusal.fix}") from None


# Functions of this folder that start ranks or a sweep. A test that asks for the fixture `get_run` starts ranks, too.
_STARTS_RANKS = {
    "engines.launch",
    "forked.fork_ranks",
    "forked.fork_script",
    "runs.train",
    "runs.trained",
    "sweeps.run",
    "sweeps.start",
}


# Their tests may start ranks. Those of an experiment are together, so that none is needed elsewhere.
_RANKS_FOLDERS = ("engine", "experiments")


def starts_ranks(item: pytest.Function) -> str | None:
    """Return the first name, by the alphabet, with which a test or its module starts ranks."""
    functions = {value for value in vars(item.module).values() if inspect.isfunction(value)}
    names = {f"{function.__module__}.{function.__name__}" for function in functions}
    return min(_STARTS_RANKS & names | {"get_run"} & set(item.fixturenames), default=None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = [item for item in items if isinstance(item, pytest.Function)]
    for test in tests:
        if test.path.parent.name in _RANKS_FOLDERS:
            test.add_marker(pytest.mark.engine)
        elif name := starts_ranks(test):
            file = test.path.relative_to(test.config.rootpath)
            raise pytest.UsageError(
                f"{file}: {name} starts ranks. To fix it: move the test to tests/engine/, or tests/experiments/"
            )
    if not can_lock(2 * GIB):
        why = pytest.mark.skip(reason="this user may not lock the memory that strategies on NVMe need (ulimit -l)")
        for test in tests:
            if test.get_closest_marker("engine") and "nvme" in test.name + inspect.getsource(test.function):
                test.add_marker(why)


def pytest_collection_finish() -> None:
    # Later collections do not visit the million objects of the imports. Four of a hundred seconds went into those of
    # every 700 objects, which free little.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


if "PYTEST_XDIST_WORKER" in os.environ:
    # Next to other tests two threads compete for one core, and training in this process takes minutes.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def committed_evidence() -> Evidence:
    """Return the committed records, of which each report is read once."""
    from study.claims.evidence import Evidence
    from study.claims.scoreboard import REPORTS

    return Evidence(REPORTS)


@pytest.fixture(scope="session")
def full_board(committed_evidence: Evidence) -> Scoreboard:
    """Return the claims judged by the committed records."""
    from study.claims.scoreboard import build_scoreboard

    return build_scoreboard(evidence=committed_evidence)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Debian's Chromium, headless, driven by playwright."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container's root cannot have a sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield chromium
        chromium.close()
