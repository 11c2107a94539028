"""Each outcome with real processes, and that none of them outlives its sweep."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from study.records.directory import read_json, read_run, read_status
from study.sweep import supervise
from sweeps import ENDLESS, ROOT, TINY, only_cell, processes_of, ranks_of, run, start, wait_until, write_suite

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


@pytest.mark.parametrize("how", ["the sweep closes the pipe", "the launcher ends by itself"])
def test_daemons_in_their_own_sessions_that_ignore_sigterm_do_not_survive(tmp_path, how):
    pids = tmp_path / "pids"
    seconds = "600" if "pipe" in how else "1"
    process = subprocess.Popen(
        [sys.executable, "-ES", supervise.__file__, sys.executable, "-c", ESCAPE, str(pids), seconds],
        stdin=subprocess.PIPE,
    )
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 20)
    if "pipe" in how:
        assert process.stdin is not None
        process.stdin.close()
    process.wait(30)
    assert not [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_supervisor_passes_the_exit_status_on(code, status):
    process = subprocess.Popen(
        [sys.executable, "-ES", supervise.__file__, sys.executable, "-c", code], stdin=subprocess.PIPE
    )
    assert process.wait(30) == status


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's OOM killer")
def test_the_run_is_what_the_kernel_ends_first_where_memory_runs_out():
    code = "import sys; sys.exit(open('/proc/self/oom_score_adj').read() != '1000\\n')"
    process = subprocess.Popen(
        [sys.executable, "-ES", supervise.__file__, sys.executable, "-c", code], stdin=subprocess.PIPE
    )
    assert process.wait(30) == 0
    assert Path("/proc/self/oom_score_adj").read_text() != "1000\n"


def test_an_allocation_beyond_a_real_limit_is_oom_and_the_host_s(tmp_path):
    # Attention over 1024 x 1024 scores for 128 samples: beyond what a process may have here.
    fixed = {
        **TINY, "seq_length": 1024, "global_batch_size": 128, "train_samples": 128, "attn_implementation": "eager",
    }  # fmt: skip
    suite = write_suite(tmp_path, {"strategy": "single"}, fixed)
    limit = 4 * 2**30
    result = run(suite, tmp_path / "runs", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
    status = read_status(only_cell(tmp_path / "runs"))
    assert status["state"] == "oom", status
    assert "host" in status["reason"]
    assert result.returncode == 1
    again = run(suite, tmp_path / "runs")
    assert again.stderr == ""
    assert again.returncode == 1


@pytest.mark.long
def test_a_rank_that_hangs_is_ended_at_the_time_limit_with_all_its_family(tmp_path):
    runs = tmp_path / "runs"
    suite = write_suite(tmp_path, {"strategy": "ddp"}, {**ENDLESS, "time_limit_s": 40})
    process = start(suite, runs)
    try:
        wait_until(lambda: list(runs.glob("tiny/*/steps.jsonl")) and len(ranks_of(runs)) == 2)
        ranks_of(runs)[1].suspend()
        family = {each.pid for each in processes_of(runs)}
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    status = read_status(only_cell(runs))
    assert (status["state"], status["reason"]) == ("timeout", "ended after its 40 s")
    assert len(family) >= 4
    assert not [pid for pid in family if psutil.pid_exists(pid)]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("single", marks=pytest.mark.long)])
def test_a_rank_that_is_killed_leaves_an_interrupted_run_and_no_orphan(tmp_path, strategy):
    runs = tmp_path / "runs"
    process = start(write_suite(tmp_path, {"strategy": strategy}, ENDLESS), runs)
    try:
        wait_until(lambda: any(file.read_text() for file in runs.glob("tiny/*/steps.jsonl")))
        ranks_of(runs)[-1].kill()
        process.communicate(timeout=120)
    finally:
        process.kill()
    status = read_status(only_cell(runs))
    assert status["state"] == "interrupted", status
    assert "SIGKILL" in status["reason"]
    assert processes_of(runs) == []
    assert process.returncode == 1
    assert read_run(only_cell(runs)).steps


def test_ctrl_c_ends_the_run_in_order_and_says_what_is_left(tmp_path):
    runs = tmp_path / "runs"
    process = start(write_suite(tmp_path, {"strategy": ["ddp", "zero1", "zero2"]}, ENDLESS), runs)
    try:
        wait_until(lambda: any(file.read_text() for file in runs.glob("tiny/*/steps.jsonl")))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "stopped\n3 of 3 cells are left" in said
    assert "Traceback" not in said
    status = read_status(only_cell(runs))
    assert (status["state"], status["reason"]) == ("interrupted", "the sweep was stopped while it ran")
    assert processes_of(runs) == []


@pytest.mark.long
def test_a_supervisor_that_is_killed_leaves_no_orphan(tmp_path):
    runs = tmp_path / "runs"
    process = start(write_suite(tmp_path, {"strategy": "ddp"}, ENDLESS), runs)
    try:
        wait_until(lambda: any(file.read_text() for file in runs.glob("tiny/*/steps.jsonl")))
        (supervisor,) = [each for each in processes_of(runs) if each.ppid() == process.pid]
        supervisor.kill()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert processes_of(runs) == []
    assert read_status(only_cell(runs))["state"] == "interrupted"


@pytest.mark.long
def test_a_sweep_that_is_killed_takes_its_run_along(tmp_path):
    runs = tmp_path / "runs"
    process = start(write_suite(tmp_path, {"strategy": "ddp"}, ENDLESS), runs)
    wait_until(lambda: any(file.read_text() for file in runs.glob("tiny/*/steps.jsonl")))
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_of(runs), 30)


@pytest.mark.long
def test_a_sweep_killed_together_with_its_supervisor_leaves_nothing_to_the_next(tmp_path):
    runs = tmp_path / "runs"
    suite = write_suite(tmp_path, {"strategy": "single"}, {**ENDLESS, "time_limit_s": 20})
    process = start(suite, runs)
    wait_until(lambda: any(file.read_text() for file in runs.glob("tiny/*/steps.jsonl")))
    (supervisor,) = [each for each in processes_of(runs) if each.ppid() == process.pid]
    process.send_signal(signal.SIGSTOP)
    supervisor.kill()
    process.kill()
    process.communicate()
    (orphan,) = ranks_of(runs)
    again = run(suite, runs)
    assert "that an earlier sweep had left" in again.stderr
    assert not orphan.is_running()
    assert read_status(only_cell(runs))["attempt"] == 2


@pytest.mark.long
def test_what_the_box_lacks_is_unsupported_with_the_command_that_mends_it(tmp_path, monkeypatch):
    # Without a working compiler DeepSpeed finds no libaio, as on a box without it.
    monkeypatch.setenv("CC", "false")
    suite = write_suite(tmp_path, {"strategy": "zero3_nvme_optimizer"})
    result = run(suite, tmp_path / "runs")
    cell = only_cell(tmp_path / "runs")
    status = read_status(cell)
    assert (status["state"], status["hint"]) == ("unsupported", "run: apt-get install libaio-dev"), status
    assert result.returncode == 0
    monkeypatch.delenv("CC")
    assert run(suite, tmp_path / "runs", "--retry").returncode == 0
    assert read_run(cell).state == "ok"
    assert [attempt["state"] for attempt in read_json(cell / "sweep.json")["attempts"]] == ["unsupported", "ok"]


def test_a_run_that_raises_is_failed_with_its_exception_and_its_last_lines(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "single"}, {**TINY, "learning_rate": 1e30, "max_steps": 20})
    result = run(suite, tmp_path / "runs")
    cell = only_cell(tmp_path / "runs")
    assert result.returncode == 1
    assert read_status(cell)["reason"].startswith("the loss is NaN")
    assert any("the loss is NaN" in line for line in read_json(cell / "sweep.json")["attempts"][0]["last_lines"])
    assert "failed: the loss is NaN" in (cell / "log.txt").read_text()


FULL_DISK = """
set -u
mount -t tmpfs -o size=24m tmpfs "$1" || exit 77
"$PYTHON" -m study.cli run "$2" --runs-dir "$1" --only '*-single-*'; echo "first $?"
head -c 30m /dev/zero > "$1/filler" 2>/dev/null
"$PYTHON" -m study.cli run "$2" --runs-dir "$1"; echo "full $?"
"$PYTHON" -m study.cli status "$2" --runs-dir "$1"
rm "$1/filler"
"$PYTHON" -m study.cli run "$2" --runs-dir "$1"; echo "freed $?"
cp -r "$1/tiny" "$3"
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare to mount a small file system")
def test_a_full_disk_stops_the_sweep_and_nothing_finished_is_lost(tmp_path):
    mounted, copied = tmp_path / "mounted", tmp_path / "copied"
    mounted.mkdir()
    copied.mkdir()
    suite = write_suite(tmp_path, {"strategy": ["single", "ddp"]})
    result = subprocess.run(
        ["unshare", "-rm", "bash", "-c", FULL_DISK, "bash", str(mounted), str(suite), str(copied)], cwd=ROOT, text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home()), "PYTHON": sys.executable},
        capture_output=True, timeout=500,
    )  # fmt: skip
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("this kernel lets nobody mount a tmpfs in a user namespace")
    assert "first 0" in result.stdout, result.stderr
    assert "full 1" in result.stdout
    assert "No space left on device): make room" in result.stderr
    assert "freed 0" in result.stdout, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    runs = {file.parent.name: read_run(file.parent) for file in copied.glob("tiny/*/status.json")}
    assert {run.state for run in runs.values()} == {"ok"}
    assert len(runs) == 2
    (single,) = [name for name in runs if "-single-" in name]
    assert [attempt["attempt"] for attempt in read_json(copied / "tiny" / single / "sweep.json")["attempts"]] == [1]


def test_a_started_sweep_says_who_holds_the_directory(tmp_path):
    runs = tmp_path / "runs"
    suite = write_suite(tmp_path, {"strategy": "single"}, ENDLESS)
    process = start(suite, runs)
    try:
        wait_until(lambda: (runs / "tiny" / "sweep.lock").exists() and (runs / "tiny" / "sweep.lock").read_text())
        started = time.monotonic()
        second = run(suite, runs)
        assert time.monotonic() - started < 10
        assert second.returncode == 2
        assert (
            f"another sweep is at work in {runs / 'tiny'}: pid {process.pid} on this machine, since 20" in second.stderr
        )
        holder = json.loads((runs / "tiny" / "sweep.lock").read_text())
        assert holder["pid"] == process.pid
        assert platform.node() not in holder.values(), "a folder that is handed on names no host"
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert processes_of(runs) == []


def test_the_supervisor_finds_packages_where_the_sweep_found_them(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").touch()
    code = "import sys; sys.path.append(sys.argv[1]); import supervise; supervise._find_packages(); import only_here"
    folder = str(Path(supervise.__file__).parent)
    subprocess.run(
        [sys.executable, "-ES", "-c", code, folder], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True
    )
