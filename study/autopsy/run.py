"""`study autopsy run` and `study autopsy report`, and the lanes that run sessions.

A lane runs one session after the other, on a core of its own. Each process of a session is a fork of the sweep's
server, which has imported the libraries: its times exclude imports but include the cost of first steps. CUDA does not
survive a fork, so with a GPU every process is started from scratch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from study.autopsy.design import OPERATORS_OF, RESULT, SCALES, Scale, Session, plan
from study.config.errors import UserError, require_extra
from study.config.places import IMPORT_ROOT
from study.host.folders import folder_argument
from study.host.machine import detect_machine
from study.host.stacks import check_training_packages
from study.records.directory import is_partial_write, read_json, utc_now, write_json
from study.records.lock import FileLock
from study.records.schema import RecordError
from study.sweep.fork_server import ForkServer

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
        problem = f"--runs {folder} has {[*foreign, MARK][0]}, which is not a file of an autopsy"
        raise UserError(problem, "name another folder")
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


def run_sessions(
    folder: Path, lock: FileLock, scale: Scale, sessions: Sequence[Session], say: Callable[[str], None],
    retry: bool = False,
) -> int:  # fmt: skip
    """Run the missing sessions in the locked folder; return the number of failed ones."""
    pending = missing(folder, sessions, retry)
    cores = sorted(os.sched_getaffinity(0))[: scale.lanes]
    done = len(sessions) - len(pending)
    say(f"{done} of {len(sessions)} sessions are done; {len(pending)} to run, {len(cores)} at a time")
    # On a CPU scale, hide GPUs from torch and DeepSpeed.
    python_path = os.pathsep.join(filter(None, [str(IMPORT_ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": python_path, **({} if scale.on_gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    if pending:
        command = [sys.executable, "-m", "study.host.operators", OPERATORS_OF]
        built = subprocess.run(command, env=environment, capture_output=True, text=True)
        if built.returncode:
            why = (built.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"sessions cannot start ({why})", "see: study doctor")
    # Not at the top, because every command imports this module.
    import asyncio

    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    lanes = _Lanes(folder, work, lock, scale, len(cores), environment, iter(pending), len(pending), say)
    try:
        asyncio.run(lanes.run(cores))
    finally:
        lanes.forks.close()
        if is_in_place := lock.is_in_place():
            shutil.rmtree(work, ignore_errors=True)
    if not is_in_place:
        problem = f"{folder} was renamed or removed while its sessions ran"
        raise UserError(problem, "restore it, and run the command again")
    return lanes.failed


@dataclasses.dataclass
class _Lanes:
    folder: Path
    work: Path
    lock: FileLock
    scale: Scale
    count: int
    environment: dict[str, str]
    todo: Iterator[Session]
    pending: int
    say: Callable[[str], None]
    forks: ForkServer = dataclasses.field(default_factory=ForkServer)
    done: int = 0
    failed: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)

    async def run(self, cores: Sequence[int]) -> None:
        import asyncio

        await asyncio.gather(*(self._run_lane(core if self.scale.threads else -1) for core in cores))

    async def _run_lane(self, core: int) -> None:
        for session in self.todo:
            options = {**self.scale.options, **session.options}
            answer = await self._run_session(session, dataclasses.replace(self.scale, options=options), core)
            if not self.lock.is_in_place():
                # Another folder may have this name by now.
                return
            about = {"session": session.id, "kind": session.kind, "cell": session.cell, "seed": session.seed,
                     "scale": self.scale.name, "options": options, "lanes": self.count, "core": core}  # fmt: skip
            write_json(self.folder / SESSIONS / f"{session.id}.json", about | answer)
            self.done += 1
            # A gate is expected to fail.
            self.failed += answer["state"] != "ok" and session.kind != "gate"
            left_min = (time.monotonic() - self.began) / self.done * (self.pending - self.done) / 60
            why = f" ({answer['reason']})" if answer["reason"] else ""
            self.say(
                f"{self.done}/{self.pending} {session.id}: {answer['state']}{why}, {answer['session_s']:.0f} s;"
                f" about {left_min:.0f} min left"
            )

    async def _run_session(self, session: Session, scale: Scale, core: int) -> dict[str, Any]:
        """Run a session's processes in order, stop at the first failure, and return the session's record."""
        import asyncio

        answer: dict[str, Any] = {"started_at": utc_now(), "state": "ok", "reason": "", "arms": []}
        with tempfile.TemporaryDirectory(dir=self.work, ignore_cleanup_errors=True) as name:
            place = Path(name).absolute()
            command = [sys.executable, str(Path(__file__).with_name("session.py")), str(place / "task.json")]
            if not scale.on_gpu:
                # The first call starts the server, so no session's time includes it.
                command = self.forks.command(None, 1, command, self.environment, place / _LOG)
            began = time.monotonic()
            for number, arms in enumerate(session.processes):
                task = {"scale": dataclasses.asdict(scale), "seed": session.seed, "core": core,
                        "arms": [dataclasses.asdict(arm) for arm in arms]}  # fmt: skip
                write_json(place / "task.json", task)
                (place / RESULT).unlink(missing_ok=True)
                try:
                    left_s = scale.limit_s - (time.monotonic() - began)
                    status = await asyncio.wait_for(self._run_process(command, place / _LOG), left_s)
                except asyncio.TimeoutError:
                    answer |= {"state": "timeout", "reason": f"no result in {scale.limit_s:g} s", "arms": []}
                else:
                    result: dict[str, Any] = {
                        "state": "failed",
                        "reason": f"its process exited with status {status}, without a result",
                    }
                    if (place / RESULT).exists():
                        result = read_json(place / RESULT)
                        answer["arms"] += [arm | {"process": number} for arm in result.pop("arms")]
                    answer |= result
                if answer["state"] != "ok":
                    answer["log"] = (place / _LOG).read_text(encoding="utf-8", errors="replace")[-_LOG_KEPT:]
                    break
        return answer | {"session_s": round(time.monotonic() - began, 2)}

    async def _run_process(self, command: Sequence[str], log: Path) -> int:
        """Run one process of a session; kill it if this is cancelled."""
        import asyncio

        with log.open("a") as stream:
            process = await asyncio.create_subprocess_exec(
                *command, env=self.environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
