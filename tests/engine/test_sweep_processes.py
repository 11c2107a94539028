from __future__ import annotations

import json
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from study.records.directory import read_json, read_run, read_status
from study.sweep import supervise
from sweeps import ENDLESS, ROOT, TINY, list_processes, list_ranks, only_cell, run, start, wait_until, write_suite

SUPERVISED = [sys.executable, supervise.__file__, sys.executable, "-c"]
ESCAPE = """
import os, sys, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
        time.sleep(600)
time.sleep(float(sys.argv[2]))
"""


def test_daemons_in_their_own_sessions_that_ignore_sigterm_do_not_survive(tmp_path):
    # Both at once, since each takes the grace period: the sweep closes a pipe, and a launcher ends by itself.
    files = [tmp_path / "closed", tmp_path / "ended"]
    processes = [
        subprocess.Popen([*SUPERVISED, ESCAPE, str(file), seconds], stdin=subprocess.PIPE)
        for file, seconds in zip(files, ("600", "1"), strict=True)
    ]
    wait_until(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files), 20)
    assert processes[0].stdin is not None
    processes[0].stdin.close()
    for process in processes:
        process.wait(30)
    assert not [pid for file in files for pid in map(int, file.read_text().split()) if psutil.pid_exists(pid)]


ENDED_FIRST = "import sys; sys.exit(open('/proc/self/oom_score_adj').read() != '1000\\n')"


def test_the_supervisor_passes_the_exit_status_on_and_a_run_is_the_kernel_s_first_victim():
    # Linux's OOM killer selects the run first.
    first = {ENDED_FIRST: 0} if sys.platform == "linux" else {}
    for code, status in ({"raise SystemExit(3)": 3, "import os; os.kill(os.getpid(), 9)": 137} | first).items():
        assert subprocess.Popen([*SUPERVISED, code], stdin=subprocess.PIPE).wait(30) == status


@contextmanager
def endless(
    tmp_path: Path, strategy: str | list[str] = "ddp", stubs: bool = True, **fixed: Any
) -> Iterator[tuple[Any, Path]]:
    """Start a sweep and wait until its first run has a step."""
    runs = tmp_path / "runs"
    process = start(write_suite(tmp_path, {"strategy": strategy}, {**ENDLESS, **fixed}), runs, stubs=stubs)
    try:
        wait_until(lambda: any(file.read_text() for file in runs.glob("tiny/*/steps.jsonl")))
        yield process, runs
    finally:
        process.kill()
        process.communicate()


def test_a_run_out_of_host_memory_is_oom_with_its_last_lines(tmp_path):
    # Attention over 1024 x 1024 scores for 128 samples exceeds the limit of the process.
    large = {"seq_length": 1024, "global_batch_size": 128, "train_samples": 128, "attn_implementation": "eager"}
    suite = write_suite(tmp_path, {"strategy": "single"}, {**TINY, **large})
    limit, runs = 2 * 2**30, tmp_path / "runs"
    result = run(suite, runs, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
    assert result.returncode == 1
    cell = only_cell(runs)
    status = read_status(cell)
    assert (status["state"], "host" in status["reason"]) == ("oom", True), status
    (attempt,) = read_json(cell / "sweep.json")["attempts"]
    assert any(status["reason"] in line for line in attempt["last_lines"]), attempt
    assert f"oom: {status['reason']}" in (cell / "log.txt").read_text()
    second = run(suite, runs)
    assert (second.returncode, second.stderr) == (1, ""), "out of memory is an answer"


def test_a_rank_that_hangs_is_ended_at_the_time_limit_with_all_its_processes(tmp_path):
    with endless(tmp_path, time_limit_s=6) as (process, runs):
        wait_until(lambda: len(list_ranks(runs)) == 2)
        list_ranks(runs)[1].suspend()
        family = {member.pid for member in list_processes(runs)}
        process.communicate(timeout=120)
    assert process.returncode == 1
    status = read_status(only_cell(runs))
    assert (status["state"], status["reason"]) == ("timeout", "ended after its 6 s")
    assert len(family) >= 3
    assert not [pid for pid in family if psutil.pid_exists(pid)]


def test_a_rank_that_is_killed_leaves_an_interrupted_run_and_no_orphan(tmp_path):
    with endless(tmp_path, stubs=False) as (process, runs):
        list_ranks(runs)[-1].kill()
        process.communicate(timeout=120)
    status = read_status(only_cell(runs))
    assert (status["state"], "SIGKILL" in status["reason"]) == ("interrupted", True), status
    assert list_processes(runs) == []
    assert process.returncode == 1
    assert read_run(only_cell(runs)).steps


def test_a_second_sweep_names_the_first_one_which_ctrl_c_ends_in_order(tmp_path):
    with endless(tmp_path, ["ddp", "zero1", "zero2"]) as (process, runs):
        second = run(tmp_path / "tiny.yaml", runs, stubs=True, timeout=10)
        assert second.returncode == 2
        assert f"another sweep is active in {runs / 'tiny'}: pid {process.pid} on this machine" in second.stderr
        holder = json.loads((runs / "tiny" / "sweep.lock").read_text())
        assert holder["pid"] == process.pid
        assert platform.node() not in holder.values(), "a folder that is handed on names no host"
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    assert "stopped\n3 of 3 cells are left" in printed
    assert "Traceback" not in printed
    status = read_status(only_cell(runs))
    assert (status["state"], status["reason"]) == ("interrupted", "the sweep was stopped while it ran")
    assert list_processes(runs) == []


def test_the_next_sweep_ends_the_orphans_of_a_killed_sweep_and_supervisor(tmp_path):
    with endless(tmp_path, "single", time_limit_s=6) as (process, runs):
        (supervisor,) = [child for child in list_processes(runs) if child.ppid() == process.pid]
        process.send_signal(signal.SIGSTOP)
        supervisor.kill()
    orphans = list_ranks(runs)
    assert len(orphans) == 2
    next_sweep = run(tmp_path / "tiny.yaml", runs, stubs=True)
    assert "processes of an earlier sweep" in next_sweep.stderr
    assert not any(orphan.is_running() for orphan in orphans)
    assert read_status(only_cell(runs))["attempt"] == 2


FULL_DISK = (ROOT / "tests" / "data" / "full_disk.sh").read_text()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare to mount a small file system")
def test_a_full_disk_stops_the_sweep_and_nothing_finished_is_lost(tmp_path):
    mounted, copied = tmp_path / "mounted", tmp_path / "copied"
    mounted.mkdir()
    copied.mkdir()
    suite = write_suite(tmp_path, {"strategy": ["single", "ddp"]})
    result = subprocess.run(
        ["unshare", "-rm", "bash", "-c", FULL_DISK, "bash", str(mounted), str(suite), str(copied)],
        cwd=ROOT,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home()), "PYTHON": sys.executable},
        capture_output=True,
        timeout=500,
    )
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("this kernel does not allow a tmpfs in a user namespace")
    printed = result.stdout + result.stderr
    assert all(words in result.stdout for words in ("first 0", "full 1", "freed 0")), printed
    assert "No space left on device): make room" in result.stderr
    assert "Traceback" not in result.stderr
    runs = {file.parent.name: read_run(file.parent) for file in copied.glob("tiny/*/status.json")}
    assert [run.state for run in runs.values()] == ["ok", "ok"]
    (single,) = [name for name in runs if "-single-" in name]
    assert [attempt["attempt"] for attempt in read_json(copied / "tiny" / single / "sweep.json")["attempts"]] == [1]


# A cell takes most of a second at least, so in the seconds before all kills fewer than these are finished.
KILLS, CELLS, STEPS = 6, 12, 40


def finished(runs: Path) -> dict[str, dict[str, Any]]:
    """Return the statuses of finished stubs, which all end as unsupported."""
    statuses = {file.parent.name: read_status(file.parent) for file in (runs / "tiny").glob("*/status.json")}
    return {name: status for name, status in statuses.items() if status["state"] == "unsupported"}


def test_kills_at_random_moments_change_no_finished_record(tmp_path):
    fixed, runs = {**TINY, "max_steps": STEPS}, tmp_path / "runs"
    suite = write_suite(tmp_path, {"strategy": "single", "seed": list(range(CELLS))}, fixed)
    chance = random.Random(20191004)
    done: dict[str, dict[str, Any]] = {}

    def one_more_is_finished() -> bool:
        return len(finished(runs)) > len(done)

    for number in range(KILLS):
        sweep = start(suite, runs, stubs=True)
        if number % 2:
            # Also on a slow machine some cells are finished before the last kill.
            wait_until(one_more_is_finished)
        time.sleep(chance.uniform(0.3, 1.5))
        assert sweep.poll() is None, "the sweep was done before it had been killed often enough: make its cells longer"
        family = list_processes(runs)
        if family and chance.random() < 0.5:
            chance.choice(family).kill()
        sweep.kill()
        sweep.communicate()
        assert done.items() <= finished(runs).items(), "a finished cell was run again"
        done = finished(runs)
    assert run(suite, runs, stubs=True).returncode == 0
    assert done.items() <= finished(runs).items(), "a finished cell was run again"
    assert len(finished(runs)) == CELLS
    for name in finished(runs):
        record = read_run(runs / "tiny" / name)
        assert [row["step"] for row in record.steps] == list(range(1, STEPS + 1))
        # A killed sweep may not have noted a run that had just finished.
        notes = record.path / "sweep.json"
        states = [attempt["state"] for attempt in read_json(notes)["attempts"]] if notes.exists() else []
        assert states.count("unsupported") <= 1
    assert list_processes(tmp_path) == []
