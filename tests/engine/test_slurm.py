"""A real Slurm of two nodes on this machine: no root, no munge, no systemd."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import psutil
import pytest
import yaml

from runs import FLAGS, RunFactory
from study.records.directory import Run, read_json, read_run, read_status
from sweeps import ENDLESS, ROOT, TINY, list_processes, list_ranks, wait_until, write_suite

pytestmark = pytest.mark.skipif(not (which("slurmctld") and which("slurmd")), reason="apt-get install slurm-wlm")
SBATCH = ROOT / "cluster" / "study.sbatch"
USER = getpass.getuser()
# The job file requests eight GPUs per node: Slurm counts them, but a run finds none.
CONF = (ROOT / "tests" / "data" / "slurm.conf").read_text()


@dataclasses.dataclass(frozen=True)
class Slurm:
    environment: dict[str, str]
    # Memory cgroup of the second node and its processes; None if this machine allows no limit.
    second_node_cgroup: Path | None
    # A folder that differs on the second node; None without permission to mount.
    seen_by_the_first_node_alone: Path | None

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def submit(self, folder: Path, *arguments: str, script: Path = SBATCH) -> Job:
        """Submit a job. `arguments` are those of sbatch, `--`, and those of the script."""
        output, at = folder / "job.out", arguments.index("--")
        answer = subprocess.run(
            ["sbatch", "--parsable", f"--output={output}", *arguments[:at], str(script), *arguments[at + 1 :]],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        return Job(self, answer.stdout.strip(), output)


@dataclasses.dataclass(frozen=True)
class Job:
    slurm: Slurm
    id: str
    output: Path

    def printed(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def fact(self, name: str) -> str:
        match = re.search(rf"\b{name}=(\S+)", self.slurm.ask("scontrol", "show", "job", self.id))
        assert match, name
        return match[1]

    def ended(self) -> str:
        """Return the job's last state. `sbatch --wait` would poll only every ten seconds."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
        # Each look starts scontrol, while ranks need the cores.
        return str(wait_until(lambda: state if (state := self.fact("JobState")) in states else None, 240, pause=0.5))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    sockets = [socket.create_server(("", 0)) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    host = socket.gethostname().partition(".")[0]
    filled = CONF.format(host=host, ports=ports, user=USER, folder=folder, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(filled)
    for number in range(8):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    cgroup = _memory_cgroup()
    second, unshared = ["slurmd", "-D", "-N", "n2"], folder / "unshared"
    unshared.mkdir()
    private = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs {unshared} && exec "$@"', "sh"]
    can_mount = subprocess.run([*private, "true"], capture_output=True, check=False).returncode == 0
    commands = (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], [*private, *second] if can_mount else second)
    daemons = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(daemons[-1].pid))
    cluster = Slurm(environment, cgroup, unshared if can_mount else None)
    try:
        wait_until(lambda: cluster.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 2, 60)
        yield cluster
    finally:
        subprocess.run(["scancel", "-f", "-u", USER], env=environment, check=False)
        time.sleep(0.5)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)
        if cgroup is not None:
            for pid in (cgroup / "cgroup.procs").read_text().split():
                psutil.Process(int(pid)).kill()
            wait_until(lambda: not (cgroup / "cgroup.procs").read_text(), 10)
            cgroup.rmdir()


def _memory_cgroup() -> Path | None:
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        cgroup = parent / f"zero-study-test-{os.getpid()}"
        try:
            cgroup.mkdir()
        except OSError:
            continue
        if _limit_file(cgroup).exists():
            return cgroup
        cgroup.rmdir()
    return None


def _limit_file(cgroup: Path) -> Path:
    first, second = cgroup / "memory.limit_in_bytes", cgroup / "memory.max"
    return first if first.exists() else second


def records(folder: Path) -> dict[str, Run]:
    runs_by_start = [read_run(file.parent) for file in sorted((folder / "tiny").glob("*/status.json"))]
    return {read_json(run.path / "sweep.json")["strategy"]: run for run in runs_by_start}


def test_two_nodes_train_as_one_machine_does(slurm: Slurm, tmp_path: Path, get_run: RunFactory) -> None:
    flags = zip(FLAGS[::2], FLAGS[1::2], strict=True)
    fixed: dict[str, Any] = {name.removeprefix("--"): yaml.safe_load(value) for name, value in flags}
    fixed |= {"task": "gpt-wikitext", "time_limit_s": 300}
    suite, runs = write_suite(tmp_path, {"strategy": "zero3"}, fixed), tmp_path / "runs"
    job = slurm.submit(tmp_path, "--", str(suite), "--runs_dir", str(runs))
    assert job.ended() == "COMPLETED", job.printed()
    run, expected = records(runs)["zero3"], get_run("zero3", "--task", "gpt-wikitext")
    for key in ("loss", "lr", "samples_hash"):
        values, expected_values = ([row[key] for row in source.steps] for source in (run, expected))
        assert values == (pytest.approx(expected_values, rel=1e-6) if key == "loss" else expected_values)
    # One rank on each node, each with a separate log, and both machines in the record.
    assert len(run.memory["ranks"]) == 2
    assert len(run.environment["other_machines"]) == 1
    assert all((run.path / name).read_text() for name in ("log.txt", "log.1.txt"))
    notes = read_json(run.path / "sweep.json")
    (attempt,) = notes["attempts"]
    assert len(set(attempt["nodes"])) == 2
    assert attempt["nodes"][1] in str(notes["command"])
    assert re.search(r"\bn[12]\b|127\.0", str(notes)) is None, "a folder that is handed on names no host"
    assert not list((runs / "tiny").glob(".launch-*"))


@pytest.mark.long
def test_a_preempted_job_stops_at_once_and_its_next_round_has_the_rest(slurm: Slurm, tmp_path: Path) -> None:
    # In this order; the second runs on the first node alone.
    suite, runs = write_suite(tmp_path, {"strategy": ["ddp", "single"]}), tmp_path / "runs"
    job = slurm.submit(tmp_path, "--", str(suite), "--runs_dir", str(runs))
    wait_until(lambda: len(list_ranks(runs)) == 2)
    (tmp_path / "other").mkdir()
    script = tmp_path / "other.sh"
    script.write_text("#!/bin/bash\n")
    preempting = slurm.submit(tmp_path / "other", "--partition=first", "--nodes=2", "--exclusive", "--", script=script)
    assert preempting.ended() == "COMPLETED"
    # The second cell was not started in the remaining time.
    (status,) = [read_status(file.parent) for file in (runs / "tiny").glob("*/status.json")]
    assert (status["state"], status["reason"]) == ("interrupted", "Slurm ended it")
    assert "stopped: Slurm ends this job\n2 of 2 cells are left" in job.printed()
    # Slurm itself would wait for two minutes.
    wait_until(lambda: job.fact("JobState") == "PENDING", 20)
    # A node rejects a credential from the second in which it revoked the last one.
    time.sleep(2)
    slurm.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now")
    assert job.ended() == "COMPLETED", job.printed()
    by_strategy = records(runs)
    assert {strategy: (run.state, run.status["attempt"]) for strategy, run in by_strategy.items()} == {
        "ddp": ("ok", 2),
        "single": ("ok", 1),
    }
    assert len(read_json(by_strategy["single"].path / "sweep.json")["attempts"][0]["nodes"]) == 1


@pytest.mark.long
def test_a_cell_s_time_limit_ends_it_on_every_node_and_the_job_s_own_begins_another_round(slurm, tmp_path):
    runs = tmp_path / "runs"
    short = [{"where": {"seed": 1}, "fixed": {"time_limit_s": 8}}]
    suite = write_suite(tmp_path, {"strategy": "ddp", "seed": [1, 2]}, ENDLESS, overrides=short)
    job = slurm.submit(tmp_path, "--", str(suite), "--runs_dir", str(runs))
    wait_until(lambda: "timeout after" in job.printed())
    (first,) = [file.parent for file in (runs / "tiny").glob("*/sweep.json")]
    assert read_status(first)["reason"] == "ended after its 8 s"
    assert not [process for process in list_processes(runs / "tiny") if first.name in " ".join(process.cmdline())]
    # The signal that Slurm sends with --signal shortly before the job's time limit.
    wait_until(lambda: len(list((runs / "tiny").glob("*/steps.jsonl"))) == 2)
    slurm.ask("scancel", "--batch", "--signal=TERM", job.id)
    wait_until(lambda: job.fact("JobState") == "PENDING", 30)
    assert job.fact("Restarts") == "1"
    assert "1 of 2 cells are left" in job.printed()
    (second,) = [file.parent for file in (runs / "tiny").glob("*/status.json") if file.parent != first]
    assert read_status(second)["reason"] == "the sweep was stopped while it ran"
    slurm.ask("scancel", job.id)
    assert list_processes(runs / "tiny") == []


def test_memory_that_runs_out_on_another_node_is_oom_with_the_node(slurm: Slurm, tmp_path: Path) -> None:
    if slurm.second_node_cgroup is None:
        pytest.skip("only root may limit a node's memory here")
    limit, runs = _limit_file(slurm.second_node_cgroup), tmp_path / "runs"
    suite = write_suite(tmp_path, {"strategy": "ddp"}, ENDLESS)
    before = limit.read_text()
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\ncd {ROOT}\nexec python -m study.cli run {suite} --runs_dir {runs}\n")
    job = slurm.submit(tmp_path, "--nodes=2", "--ntasks-per-node=1", "--", script=script)
    try:
        # The second node's rank runs and needs more memory to import torch. Version 1 of cgroups rejects a limit below
        # the memory in use.
        wait_until(lambda: list_ranks(runs))
        for mib in range(200, 500, 20):
            with contextlib.suppress(OSError):
                limit.write_text(str(mib * 2**20))
                break
        else:
            raise AssertionError("the second node's rank already has all of its memory")
        ended = job.ended()
    finally:
        limit.write_text(before)
    assert ended == "FAILED"
    run = records(runs)["ddp"]
    assert run.state == "oom", run.status
    assert run.status["reason"] == "the cgroup's memory limit was reached, and the kernel killed a process on node 1"
    assert list_processes(runs / "tiny") == []


def test_a_job_that_is_too_small_is_refused_before_a_run_and_the_doctor_lists_its_nodes(slurm, tmp_path):
    suite = write_suite(tmp_path, {"strategy": "ddp"})
    study = f"{sys.executable} -m study.cli"
    script = tmp_path / "job.sh"
    script.write_text(f"""#!/bin/bash
cd {ROOT}
{study} doctor --json > {tmp_path}/doctor.json
{study} run {suite} --runs_dir {slurm.seen_by_the_first_node_alone}; echo "status $?"
srun --ntasks=2 {study} run {suite} --runs_dir {tmp_path}/runs
{study} run {suite} --runs_dir {tmp_path}/runs --dry_run
""")
    job = slurm.submit(tmp_path, "--nodes=2", "--ntasks-per-node=1", "--", script=script)
    assert job.ended() == "COMPLETED", job.printed()
    checks = {check["name"]: check for check in json.loads((tmp_path / "doctor.json").read_text())["checks"]}
    assert checks["slurm"]["found"] == f"job {job.id} has 2 nodes; each run is one step over them"
    assert checks["nodes"]["found"].startswith("n1, n2: no GPU")
    assert [checks[f"shared {what}"]["state"] for what in ("repository", "runs", "cache")] == ["ok"] * 3
    assert re.fullmatch(r"\d+ on each node", checks["operators of nodes"]["found"])
    if slurm.seen_by_the_first_node_alone is not None:
        assert f"error: n2 does not see {slurm.seen_by_the_first_node_alone}/tiny" in job.printed()
        assert "status 2" in job.printed()
        assert not list(slurm.seen_by_the_first_node_alone.glob("tiny/*/status.json"))
    assert job.printed().count("error: this is one of 2 tasks that srun started") == 2
    assert re.search(r"--num_machines 2 --main_process_ip 127\.0\.0\.1 --main_process_port \d+ ", job.printed())


@pytest.mark.long
def test_tasks_of_an_array_fill_one_folder_at_the_same_time(slurm: Slurm, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    suite = write_suite(tmp_path, {"strategy": "single", "seed": [1, 2]}, {**TINY, "max_steps": 100})
    flags = ("--array=1-2", "--nodes=1", f"--output={tmp_path}/%a.out")
    job = slurm.submit(tmp_path, *flags, "--", str(suite), "--runs_dir", str(runs), "--only", "seed=%a")
    wait_until(lambda: len(list((runs / "tiny").glob("*/.zero-study-run.lock"))) == 2)
    assert len(list_processes(runs / "tiny")) >= 4
    wait_until(lambda: not slurm.ask("squeue", "-h", "-j", job.id, "-t", "PD,R,CG").strip())
    results = [read_run(file.parent) for file in sorted((runs / "tiny").glob("*/status.json"))]
    output = "".join(file.read_text() for file in tmp_path.glob("*.out"))
    assert [run.state for run in results] == ["ok", "ok"], output
    assert sorted(run.config["seed"] for run in results) == [1, 2]
