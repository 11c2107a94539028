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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import UserError, require_extra
from study.config.places import IMPORT_ROOT
from study.experiments.autopsy.design import OPERATORS_OF, RESULT, SCALES, Scale, Session, plan
from study.host.folders import folder_argument
from study.host.machine import detect_machine
from study.host.stacks import check_training_packages
from study.records.directory import read_json, utc_now, write_json
from study.records.lock import FileLock
from study.records.schema import RecordError
from study.sweep.fork_server import ForkServer
from study.sweep.launch import lock_sweep_directory

REPORT = Path("reports") / "autopsy"
RUNS = Path("runs") / "autopsy"
MARK, SESSIONS = "autopsy.json", "sessions"
# Checkpoints and carried weights of running sessions: gigabytes on a GPU, which a killed run does not remove.
_WORK = ".work"
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
    where = f"{REPORT} by default"
    report_parser.add_argument("--output", type=folder_argument, default=REPORT, metavar="DIR", help=where)


def run(options: argparse.Namespace) -> int:
    """Run `study autopsy`, and return the exit status."""
    if options.action == "report":
        with require_extra("report"):
            from study.experiments.autopsy.page import build
        print(build(options.runs or RUNS, options.output, runs_named=options.runs is not None))
        return 0
    scale = SCALES[options.scale]
    if scale.on_gpu and not detect_machine().gpus:
        raise UserError(f"--scale {scale.name} needs {scale.box}, but this machine has no GPU", "use --scale laptop")
    check_training_packages()
    folder = options.runs or (RUNS if scale.name == "laptop" else RUNS.with_name(f"autopsy-{scale.name}"))
    with open_folder(folder, scale):
        failed = run_sessions(folder, scale, plan(scale), lambda line: print(line, flush=True), options.retry)
    print(f"to build the page: study autopsy report{'' if folder == RUNS else f' --runs {folder}'}")
    return 1 if failed else 0


def open_folder(folder: Path, scale: Scale) -> FileLock:
    """Lock the folder for this scale; raise UserError if it has sessions of another scale."""
    lock, mark = lock_sweep_directory(folder), folder / MARK
    if mark.exists() and read_json(mark).get("scale") != scale.name:
        lock.release()
        raise UserError(f"{folder} has sessions of another scale", "name another folder with --runs")
    (folder / SESSIONS).mkdir(exist_ok=True)
    write_json(mark, {"made_by": "study autopsy", "scale": scale.name})
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
    folder: Path, scale: Scale, sessions: Sequence[Session], say: Callable[[str], None], retry: bool = False
) -> int:
    """Run the missing sessions in the locked folder; return the number of failed ones."""
    # Not at the top, because every command imports this module.
    import asyncio

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
    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    todo, forks, began, states = iter(pending), ForkServer(), time.monotonic(), list[str]()

    async def run_lane(core: int) -> None:
        for session in todo:
            options = {**scale.options, **session.options}
            scaled = dataclasses.replace(scale, options=options)
            answer = await _run_session(session, scaled, core, work, environment, forks)
            about = {
                "session": session.id,
                "kind": session.kind,
                "cell": session.cell,
                "seed": session.seed,
                "scale": scale.name,
                "options": options,
                "lanes": len(cores),
                "core": core,
            }
            write_json(folder / SESSIONS / f"{session.id}.json", about | answer)
            # A gate is expected to fail.
            states.append("ok" if session.kind == "gate" else answer["state"])
            left_min = (time.monotonic() - began) / len(states) * (len(pending) - len(states)) / 60
            why = f" ({answer['reason']})" if answer["reason"] else ""
            took = f"{answer['session_s']:.0f} s; about {left_min:.0f} min left"
            say(f"{len(states)}/{len(pending)} {session.id}: {answer['state']}{why}, {took}")

    async def run_lanes() -> None:
        await asyncio.gather(*(run_lane(core if scale.threads else -1) for core in cores))

    try:
        asyncio.run(run_lanes())
    finally:
        forks.close()
        shutil.rmtree(work, ignore_errors=True)
    return len(states) - states.count("ok")


async def _run_session(
    session: Session, scale: Scale, core: int, work: Path, environment: dict[str, str], forks: ForkServer
) -> dict[str, Any]:
    """Run a session's processes in order, stop at the first failure, and return the session's record."""
    import asyncio

    async def run_process() -> int:
        with log.open("a") as stream:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            return await process.wait()
        finally:
            # It was cancelled: at the time limit, or by Ctrl-C.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    answer: dict[str, Any] = {"started_at": utc_now(), "state": "ok", "reason": "", "arms": []}
    with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as name:
        place = Path(name).absolute()
        log = place / _LOG
        command = [sys.executable, str(Path(__file__).with_name("session.py")), str(place / "task.json")]
        if not scale.on_gpu:
            # The first call starts the server, so no session's time includes it.
            command = forks.command(None, 1, command, environment, log)
        began = time.monotonic()
        for number, arms in enumerate(session.processes):
            task = {
                "scale": dataclasses.asdict(scale),
                "seed": session.seed,
                "core": core,
                "arms": [dataclasses.asdict(arm) for arm in arms],
            }
            write_json(place / "task.json", task)
            (place / RESULT).unlink(missing_ok=True)
            try:
                status = await asyncio.wait_for(run_process(), scale.limit_s - (time.monotonic() - began))
            except asyncio.TimeoutError:
                answer |= {"state": "timeout", "reason": f"no result in {scale.limit_s:g} s", "arms": []}
            else:
                reason = f"its process exited with status {status}, without a result"
                result: dict[str, Any] = {"state": "failed", "reason": reason}
                if (place / RESULT).exists():
                    result = read_json(place / RESULT)
                    answer["arms"] += [arm | {"process": number} for arm in result.pop("arms")]
                answer |= result
            if answer["state"] != "ok":
                answer["log"] = log.read_text(encoding="utf-8", errors="replace")[-_LOG_KEPT:]
                break
    return answer | {"session_s": round(time.monotonic() - began, 2)}
