"""However a run ends, its record says so: judged from the evidence, and shown with real processes."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sweeps import ENDLESS, ROOT, TINY, only_cell, processes_of, ranks_of, run, start, wait_until, write_suite

from study.records import read_json, read_run, read_status
from study.sweep import supervise
from study.sweep.outcome import ANSWERED, Evidence, OomCounts, judge, last_lines, oom_counts

NO_OOM = OomCounts(0, 0)
TORCHRUN_KILLED = """\
E1120 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python
Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 7)
  traceback : Signal 9 (SIGKILL) received by PID 7
"""
SINGLE_KILLED = "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.\n"
SIGTERM_BY_LAUNCHER = (
    "interrupted",
    "ended by SIGTERM: a launcher sends it when another rank has died",
    "run it again",
)


def evidence(said=None, ended=True, **changed):
    status = None
    if said:
        status = {**dict(zip(("state", "reason", "hint"), said, strict=True)), "ended_at": "x" if ended else None}
    base = {
        "launcher_status": 1, "stopped_by": None, "time_limit_s": 5.0, "status": status, "refusal": None, "printed": "",
        "log": "", "ooms": NO_OOM,
    }  # fmt: skip
    return Evidence(**{**base, **changed})


OPEN = ("interrupted", "the run has not ended, or was killed", "run it again")


@pytest.mark.parametrize(
    ("given", "state", "says"),
    [
        # What the run itself says last is believed.
        (evidence(("ok", "", ""), launcher_status=0), "ok", ""),
        (evidence(("ok", "", ""), printed="terminate called without an active exception"), "ok", ""),
        (evidence(("ok", "", ""), stopped_by="time limit"), "ok", ""),
        (evidence(("failed", "ValueError: no", "look")), "failed", "ValueError: no"),
        (evidence(("oom", "CUDA out of memory. Tried", "x")), "oom", "CUDA out of memory"),
        # What was done to it.
        (evidence(OPEN, ended=False, stopped_by="time limit"), "timeout", "5 s"),
        (evidence(SIGTERM_BY_LAUNCHER, stopped_by="time limit"), "timeout", "5 s"),
        (evidence(SIGTERM_BY_LAUNCHER, stopped_by="user"), "interrupted", "the sweep was stopped"),
        # SIGKILL: whose was it?
        (evidence(OPEN, ended=False, printed=TORCHRUN_KILLED, ooms=OomCounts(1, 3)), "oom", "the cgroup's memory limit"),
        (evidence(OPEN, ended=False, printed=TORCHRUN_KILLED, ooms=OomCounts(1, 0)), "oom", "the host's memory ran out"),
        (evidence(OPEN, ended=False, printed=TORCHRUN_KILLED), "interrupted", "SIGKILL, and not for its memory"),
        (evidence(OPEN, ended=False, printed=SINGLE_KILLED, ooms=OomCounts(1, 1)), "oom", "the cgroup's memory limit"),
        # A rank that dies takes the others along, and they find other words for it.
        (evidence(SIGTERM_BY_LAUNCHER, printed=TORCHRUN_KILLED, ooms=OomCounts(1, 0)), "oom", "OOM killer"),
        (
            evidence(("failed", "RuntimeError: Connection closed by peer", ""), printed=TORCHRUN_KILLED, ooms=OomCounts(1, 0)),
            "oom", "OOM killer",
        ),
        (evidence(SIGTERM_BY_LAUNCHER, printed="exitcode  : -11 (pid: 7)"), "failed", "signal 11"),
        # Memory that was refused rather than taken.
        (evidence(("failed", "RuntimeError: std::bad_alloc", "")), "oom", "a limit on the process"),
        (evidence(OPEN, ended=False, log="OSError: [Errno 12] Cannot allocate memory"), "oom", "a limit on the process"),
        (evidence(printed="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"), "oom", "CUDA out of memory"),
        # Refusals.
        (evidence(refusal={"kind": "Unsupported", "problem": "no libaio", "mend": "install"}), "unsupported", "no libaio"),
        (evidence(refusal={"kind": "UserError", "problem": "odd batch", "mend": "even"}), "failed", "odd batch"),
        # Nothing but what was printed.
        (evidence(printed="Traceback (most recent call last):\n  File \"x\"\nKeyError: 'a'\n"), "failed", "KeyError: 'a'"),
        (evidence(printed="OSError: [Errno 28] No space left on device"), "failed", "the disk is full"),
        (evidence(), "failed", "exit status 1: it printed nothing"),
    ],
)  # fmt: skip
def test_the_evidence_tells_how_a_run_ended(given, state, says):
    ending = judge(given)
    assert ending.state == state
    assert says in ending.reason
    assert ending.hint or state in ("ok", "failed", "oom")


def test_last_lines_leave_out_frames_and_the_launchers_chatter():
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in b\n    call()\n    ^^^^^^\nOSError: no\n\nW1120 x\n'
    assert last_lines(text) == ["call()", "OSError: no"]


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/job\n", {"sys/fs/cgroup/job/memory.events": "low 0\noom 2\noom_kill 1\n"}),
        ("4:memory:/job\n0::/\n", {"sys/fs/cgroup/memory/job/memory.failcnt": "2\n",
                                   "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 1\n"}),
        # The limit stands above the process's own cgroup.
        ("0::/pod/job\n", {"sys/fs/cgroup/pod/job/memory.events": "oom 0\noom_kill 1\n",
                           "sys/fs/cgroup/pod/memory.events": "oom 2\noom_kill 0\n"}),
    ],
)  # fmt: skip
def test_the_kernels_counters_are_found_in_both_kinds_of_cgroup(tmp_path, cgroup, files):
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_counts(tmp_path) == OomCounts(killed=1, cgroup_limit_hit=2)


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
        [sys.executable, supervise.__file__, sys.executable, "-c", ESCAPE, str(pids), seconds], stdin=subprocess.PIPE
    )
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 20)
    if "pipe" in how:
        process.stdin.close()
    process.wait(30)
    assert not [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_supervisor_passes_the_exit_status_on(code, status):
    process = subprocess.Popen([sys.executable, supervise.__file__, sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.wait(30) == status


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
    assert "1/1" not in again.stderr
    assert again.returncode == 0


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


@pytest.mark.parametrize("strategy", ["single", "ddp"])
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
    assert "stopped: 3 of 3 cells are left" in said
    assert "Traceback" not in said
    status = read_status(only_cell(runs))
    assert (status["state"], status["reason"]) == ("interrupted", "the sweep was stopped while it ran")
    assert processes_of(runs) == []


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


def test_a_sweep_that_is_killed_takes_its_run_along(tmp_path):
    runs = tmp_path / "runs"
    process = start(write_suite(tmp_path, {"strategy": "ddp"}, ENDLESS), runs)
    wait_until(lambda: any(file.read_text() for file in runs.glob("tiny/*/steps.jsonl")))
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_of(runs), 30)


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
mount -t tmpfs -o size=2m tmpfs "$1" || exit 77
"$PYTHON" -m study.cli run "$2" --runs-dir "$1" --only '*-single-*'; echo "first $?"
head -c 3m /dev/zero > "$1/filler" 2>/dev/null
"$PYTHON" -m study.cli run "$2" --runs-dir "$1"; echo "full $?"
"$PYTHON" -m study.cli status "$2" --runs-dir "$1"
rm "$1/filler"
"$PYTHON" -m study.cli run "$2" --runs-dir "$1"; echo "freed $?"
cp -r "$1/tiny" "$3"
"""


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
    assert "full 2" in result.stdout or "full 1" in result.stdout
    assert "freed 0" in result.stdout, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    runs = {file.parent.name: read_run(file.parent) for file in copied.glob("tiny/*/status.json")}
    assert {run.state for run in runs.values()} == {"ok"}
    assert len(runs) == 2
    (single,) = [name for name in runs if "-single-" in name]
    assert [attempt["attempt"] for attempt in read_json(copied / "tiny" / single / "sweep.json")["attempts"]] == [1]


def test_only_answers_are_not_asked_again():
    assert {"ok", "oom", "timeout", "unsupported"} == ANSWERED


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
        assert f"another sweep works on {runs / 'tiny'}: pid {process.pid}, since 20" in second.stderr
        holder = json.loads((runs / "tiny" / "sweep.lock").read_text())
        assert holder["pid"] == process.pid
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert processes_of(runs) == []
