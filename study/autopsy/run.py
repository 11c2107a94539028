"""`study autopsy run` and `study autopsy report`, and the lanes that run sessions.

A lane is a worker process that runs sessions one after the other: `python -m study.autopsy.run CORE THREADS` prints
READY, then reads a session as one line of JSON and prints its result as another, until its standard input ends. CORE -1
is any core. Each process of a session is a fork of the lane: its times exclude imports but include the cost of first
steps. CUDA does not survive a fork, so with a GPU every process is started from scratch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from study.autopsy.design import READY, RESULT, SCALES, Scale, Session, plan
from study.config.errors import UserError, require_extra
from study.config.places import IMPORT_ROOT
from study.config.strategies import read_strategy
from study.host.folders import cache_directory, folder_argument
from study.host.machine import detect_machine, visible_gpus
from study.host.operators import build_operators
from study.host.stacks import check_training_packages, import_libraries, without_gc
from study.records.directory import is_partial_write, read_json, utc_now, write_json
from study.records.lock import FileLock
from study.records.schema import RecordError

REPORT = Path("reports") / "autopsy"
RUNS = Path("runs") / "autopsy"
MARK, SESSIONS, _LOCK = "autopsy.json", "sessions", ".lock"
# Checkpoints and carried weights of running sessions: gigabytes on a GPU, which a killed run does not remove.
_WORK = ".work"
_MADE_BY = "study autopsy"
_LOG, _LOG_KEPT = "log.txt", 1500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study autopsy` to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|report")
    run_parser = actions.add_parser(
        "run", help="run the sessions without a record; can be stopped at any time", allow_abbrev=False
    )
    boxes = "; ".join(f"{scale.name}: {scale.box}, {scale.minutes:g} min" for scale in SCALES.values())
    run_parser.add_argument("--scale", choices=SCALES, default="laptop", help=boxes)
    run_parser.add_argument("--retry", action="store_true", help="also rerun failed sessions")
    report_parser = actions.add_parser("report", help="build the page and its figures", allow_abbrev=False)
    for subparser in (run_parser, report_parser):
        subparser.add_argument("--runs", type=folder_argument, metavar="DIR", help=f"sessions; {RUNS} by default")
    report_parser.add_argument(
        "--output", type=folder_argument, default=REPORT, metavar="DIR", help=f"{REPORT} by default"
    )


def run(options: argparse.Namespace) -> int:
    """Run `study autopsy`, and return the exit status."""
    if options.action == "report":
        with require_extra("report"):
            from study.autopsy.page import build
        print(build(options.runs or RUNS, options.output, runs_named=options.runs is not None))
        return 0
    scale = SCALES[options.scale]
    if scale.on_gpu and not detect_machine().gpus:
        raise UserError(f"--scale {scale.name} needs {scale.box}, but this machine has no GPU", "use --scale laptop")
    check_training_packages()
    folder = options.runs or (RUNS if scale.name == "laptop" else RUNS.with_name(f"autopsy-{scale.name}"))
    with open_folder(folder, scale) as lock:
        failed = run_sessions(folder, lock, scale, plan(scale), lambda line: print(line, flush=True), options.retry)
    print(f"to build the page: study autopsy report{'' if folder == RUNS else f' --runs {folder}'}")
    return 1 if failed else 0


def open_folder(folder: Path, scale: Scale) -> FileLock:
    """Lock the folder for this scale; raise UserError if it has other files or another scale."""
    if folder.is_file():
        raise UserError(f"--runs {folder} is a file", "name a folder")
    mark = folder / MARK
    foreign = [file.name for file in (folder.iterdir() if folder.exists() else ())
              if file.name not in (_LOCK, SESSIONS, MARK, _WORK) and not is_partial_write(file.name, MARK)]  # fmt: skip
    try:
        is_own = read_json(mark).get("made_by") == _MADE_BY
    except RecordError:
        is_own = not folder.exists() or not any(folder.iterdir())
    if foreign or not is_own:
        raise UserError(
            f"--runs {folder} has {[*foreign, MARK][0]}, which is not a file of an autopsy", "name another folder"
        )
    try:
        (folder / SESSIONS).mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, f"another autopsy is active in {folder}")
    except OSError as error:
        raise UserError(f"--runs {folder} is not writable ({error.strerror})", "name another folder") from None
    if mark.exists() and read_json(mark).get("scale") != scale.name:
        lock.release()
        raise UserError(f"{folder} has sessions of another scale", "name another folder with --runs")
    write_json(mark, {"made_by": _MADE_BY, "scale": scale.name})
    return lock


def missing(folder: Path, sessions: Sequence[Session], retry: bool = False) -> list[Session]:
    """Return the sessions without a record; with `retry` also failed ones."""

    def is_done(session: Session) -> bool:
        try:
            return read_json(folder / SESSIONS / f"{session.id}.json")["state"] == "ok" or not retry
        except (RecordError, KeyError):
            return False

    return [session for session in sessions if not is_done(session)]


class WorkerStartError(Exception):
    """The process of a lane cannot start."""


class SessionWorker:
    """Handle of a worker process that runs sessions; replaced after a session that exceeds its time limit."""

    def __init__(self, scale: Scale, core: int, work: Path):
        self.scale, self.core, self.work = scale, core, work
        self._process: subprocess.Popen[str] | None = None

    def run(self, session: Session) -> dict[str, Any]:
        """Run a session and return its record; without a result, one that states failed or timeout."""
        scale = dataclasses.replace(self.scale, options={**self.scale.options, **session.options})
        processes = [[dataclasses.asdict(arm) for arm in arms] for arms in session.processes]
        request = {"scale": dataclasses.asdict(scale), "seed": session.seed, "processes": processes}
        request["work"] = str(self.work.absolute())
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        began = time.monotonic()
        timer = threading.Timer(self.scale.limit_s, self.end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            timer.cancel()
        if answer:
            return dict(json.loads(answer))
        self.end()
        took = time.monotonic() - began
        state = "timeout" if took >= self.scale.limit_s else "failed"
        return {"state": state, "reason": f"no result in {took:.0f} s", "arms": [], "session_s": took}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        # On a CPU scale, hide GPUs from torch and DeepSpeed.
        hidden = {} if self.scale.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        with tempfile.TemporaryFile("w+") as errors:
            command = [sys.executable, "-m", "study.autopsy.run", str(self.core), str(self.scale.threads)]
            process = self._process = subprocess.Popen(
                command, cwd=IMPORT_ROOT, env=os.environ | hidden, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip
            assert process.stdout is not None
            if process.stdout.readline().strip() != READY:
                self.end()
                errors.seek(0)
                raise WorkerStartError((errors.read().strip().splitlines() or ["it printed nothing"])[-1])
        return process

    def end(self) -> None:
        """Kill the worker and the processes that it forked."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def run_sessions(
    folder: Path, lock: FileLock, scale: Scale, sessions: Sequence[Session], say: Callable[[str], None],
    retry: bool = False,
) -> int:  # fmt: skip
    """Run the missing sessions in the locked folder; return the number of failed ones."""
    pending = missing(folder, sessions, retry)
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, min(scale.lanes, len(cores)))
    say(
        f"{len(sessions) - len(pending)} of {len(sessions)} sessions are done; {len(pending)} to run, {count} at a time"
    )
    todo: queue.SimpleQueue[Session] = queue.SimpleQueue()
    for session in pending:
        todo.put(session)
    progress = _Progress(len(pending), say)
    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    lanes = [SessionWorker(scale, cores[place] if scale.threads else -1, work) for place in range(count)]
    threads = [
        threading.Thread(target=_work, args=(lane, todo, folder, lock, progress, count), daemon=True) for lane in lanes
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        progress.stopped = True
        for lane in lanes:
            lane.end()
        if is_in_place := lock.is_in_place():
            shutil.rmtree(work, ignore_errors=True)
    if not is_in_place:
        raise UserError(
            f"{folder} was renamed or removed while its sessions ran", "restore it, and run the command again"
        )
    if progress.lost:
        raise UserError(f"sessions cannot start ({progress.lost})", "see: study doctor")
    return progress.failed


def _work(
    lane: SessionWorker, todo: queue.SimpleQueue[Session], folder: Path, lock: FileLock, progress: _Progress, lanes: int
) -> None:
    while True:
        try:
            session = todo.get_nowait()
        except queue.Empty:
            return
        try:
            answer = lane.run(session)
        except WorkerStartError as loss:
            progress.lost = str(loss)
            return
        if progress.stopped or not lock.is_in_place():
            # This process killed the worker, so there is no result; or another folder has this name by now.
            return
        about = {"session": session.id, "kind": session.kind, "cell": session.cell, "seed": session.seed}
        settings = {"options": {**lane.scale.options, **session.options}, "lanes": lanes, "core": lane.core}
        write_json(folder / SESSIONS / f"{session.id}.json", {**about, "scale": lane.scale.name, **settings, **answer})
        progress.add(session, answer)


class _Progress:
    def __init__(self, count: int, say: Callable[[str], None]):
        self.count, self.say, self.done, self.failed = count, say, 0, 0
        self.lost, self.stopped = "", False
        self._began, self._lock = time.monotonic(), threading.Lock()

    def add(self, session: Session, answer: dict[str, Any]) -> None:
        with self._lock:
            self.done += 1
            ended_ok = answer["state"] == "ok"
            # A gate is expected to fail.
            self.failed += not ended_ok and session.kind != "gate"
            left_min = (time.monotonic() - self._began) / self.done * (self.count - self.done) / 60
            why = "" if ended_ok else f" ({answer['reason']})"
            self.say(
                f"{self.done}/{self.count} {session.id}: {answer['state']}{why}, {answer['session_s']:.0f} s;"
                f" about {left_min:.0f} min left"
            )


def serve_sessions(core: int, threads: int) -> None:
    """Run sessions from standard input: the main loop of a lane's process."""
    if core >= 0:
        os.sched_setaffinity(0, {core})
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # Results go to the original standard output; output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    strategy = read_strategy("zero3_cpu_optimizer")
    import_libraries(strategy)
    with without_gc():
        import study.autopsy.session  # noqa: F401
    build_operators(strategy, cache_directory())
    answers.write(f"{READY}\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_run_processes(json.loads(line))) + "\n")
        answers.flush()


def _run_processes(request: dict[str, Any]) -> dict[str, Any]:
    """Run a session's processes in order, stop at the first failure, and return the session's record."""
    answer: dict[str, Any] = {"started_at": utc_now(), "state": "ok", "reason": "", "arms": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=request["work"]) as name:
        folder = Path(name)
        for place, arms in enumerate(request["processes"]):
            write_json(folder / "task.json", {"scale": request["scale"], "seed": request["seed"], "arms": arms})
            (folder / RESULT).unlink(missing_ok=True)
            status = _run_process(folder)
            if not (folder / RESULT).exists():
                answer |= {"state": "failed", "reason": f"its process exited with status {status} and without a result"}
            else:
                result = read_json(folder / RESULT)
                answer["arms"] += [arm | {"process": place} for arm in result.pop("arms")]
                answer |= result
            if answer["state"] != "ok":
                answer["log"] = (folder / _LOG).read_text(encoding="utf-8", errors="replace")[-_LOG_KEPT:]
                break
    return answer | {"session_s": round(time.monotonic() - began, 2)}


def _run_process(folder: Path) -> int:
    task = folder / "task.json"
    with (folder / _LOG).open("a") as log:
        if visible_gpus():
            command = [sys.executable, "-m", "study.autopsy.session", str(task)]
            return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                from study.autopsy import session

                status = session.main(task)
            finally:
                # Never return into the loop of the parent.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    serve_sessions(int(sys.argv[1]), int(sys.argv[2]))
