"""Small suites, real sweeps over them as a user starts them, and their processes."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from study.host.machine import Machine
from study.sweep.cell import Cell
from study.sweep.plan import plan_cells, smallest_machine
from study.sweep.search import Search
from study.sweep.suite_file import SUITE_DIRECTORY, Suite, read_suite

ROOT = Path(__file__).resolve().parent.parent
# Two short steps: these tests are about the processes around the training.
TINY = {
    "scale": "laptop",
    "task": "gpt-wikitext",
    "max_steps": 2,
    "seq_length": 16,
    "train_samples": 32,
    "eval_samples": 8,
    "global_batch_size": 4,
    "time_limit_s": 540,
}
# It never ends by itself within a test's time, and writes a row every step.
ENDLESS = {**TINY, "max_steps": 1_000_000, "logging_steps": 1}


def write_suite(folder: Path, axes: Mapping[str, Any], fixed: Mapping[str, Any] = TINY, **grid: Any) -> Path:
    """Write a suite of one grid over these axes and return its file."""
    file = folder / "tiny.yaml"
    grids = [{"axes": dict(axes), **grid}]
    document = {"name": "tiny", "description": "a test's", "fixed": dict(fixed), "grids": grids}
    file.write_text(yaml.safe_dump(document))
    return file


def write_files(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@functools.cache
def shipped() -> dict[str, Suite]:
    """Return the suites of study/suites/ by name, read once per process."""
    return {file.stem: read_suite(file) for file in sorted(SUITE_DIRECTORY.glob("*.yaml"))}


def gpu_suites() -> list[str]:
    """Return the names of the suites that need GPUs."""
    return [name for name, suite in shipped().items() if suite.requires.gpus]


def gpu_suites_with_cells() -> list[str]:
    """Return the GPU suites that are more than searches."""
    return [name for name in gpu_suites() if any(grid.ladder is None for grid in shipped()[name].grids)]


def box_for(name: str) -> Machine:
    """Return the smallest machine that meets the requirements of a shipped suite."""
    return smallest_machine(shipped()[name], Machine((), 0.0))


@functools.cache
def planned(name: str) -> list[Cell | Search]:
    """Return cells and searches of a shipped suite on its smallest machine."""
    return plan_cells(shipped()[name], box_for(name))


def planned_cells(name: str) -> list[Cell]:
    return [cell for cell in planned(name) if isinstance(cell, Cell)]


# A sweep that launches tests/probes/stub_run.py in place of training.
WITH_STUBS = """
import sys
from study import cli
from study.sweep import launch
launch.launch_command = lambda cell, folder, *_: [
    sys.executable, "tests/probes/stub_run.py", str(folder), str(cell.config.max_steps)
]
sys.exit(cli.main())
"""


def start(suite: Path, runs: Path, *arguments: str, stubs: bool = False, **popen: Any) -> subprocess.Popen[str]:
    sweep = ["-c", WITH_STUBS] if stubs else ["-m", "study.cli"]
    command = [sys.executable, *sweep, "run", str(suite), "--runs_dir", str(runs), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **popen
    )


def run(
    suite: Path, runs: Path, *arguments: str, timeout: float = 500, **popen: Any
) -> subprocess.CompletedProcess[str]:
    with start(suite, runs, *arguments, **popen) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def list_processes(runs: Path) -> list[psutil.Process]:
    """Return every living process that a sweep over these runs has started."""
    processes = []
    for process in psutil.process_iter():
        try:
            belongs = process.environ().get("ZERO_STUDY_SWEEP_DIRECTORY", "").startswith(str(runs))
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def list_ranks(runs: Path) -> list[psutil.Process]:
    """Return the training processes or stubs, without the launcher, whose arguments have the script's name later."""
    ranks = []
    for process in list_processes(runs):
        try:
            if any(part.endswith(("study/train.py", "stub_run.py")) for part in process.cmdline()[1:3]):
                ranks.append(process)
        except psutil.Error:
            continue
    return ranks


def wait_until(holds: Callable[[], Any], seconds: float = 120, pause: float = 0.05) -> Any:
    """Return the first true result of the function, asked again after each pause; AssertionError after the timeout."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := holds():
            return result
        time.sleep(pause)
    raise AssertionError(f"not within {seconds} s: {holds}")


def only_cell(runs: Path) -> Path:
    """Return the folder of the only cell with a status."""
    (cell,) = [file.parent for file in (runs / "tiny").glob("*/status.json")]
    return cell
