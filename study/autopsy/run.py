"""`study autopsy run`: every session that has no record yet, side by side where the scale allows it."""

from __future__ import annotations

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

from study.autopsy.design import READY, Scale, Session
from study.config.errors import UserError
from study.config.strategies import REPOSITORY
from study.host.box import this_box
from study.records.directory import is_part_of, read_json, write_json
from study.records.lock import FileLock
from study.records.schema import RecordError

MARK, SESSIONS, _LOCK = "autopsy.json", "sessions", ".lock"
# Checkpoints and carried weights of sessions that are under way: gigabytes on a GPU, and left behind by a kill.
_WORK = ".work"
_MADE_BY = "study autopsy"


def open_folder(folder: Path, scale: Scale) -> FileLock:
    """The folder as this scale's own, held until it is released; refused where it is anybody else's."""
    check_folder(folder)
    mark = folder / MARK
    try:
        (folder / SESSIONS).mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, f"another autopsy is at work in {folder}")
    except OSError as error:
        raise UserError(f"--runs {folder} is not writable ({error.strerror})", "name another folder") from None
    if mark.exists() and read_json(mark).get("scale") != scale.name:
        lock.release()
        raise UserError(f"{folder} holds sessions of another scale", "name another folder with --runs")
    write_json(mark, {"made_by": _MADE_BY, "scale": scale.name})
    return lock


def check_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"--runs {folder} is a file", "name a folder")
    others = [file.name for file in folder.iterdir() if file.name not in (_LOCK, SESSIONS, MARK, _WORK)
              and not is_part_of(file.name, MARK)]  # fmt: skip
    try:
        is_own = read_json(folder / MARK).get("made_by") == _MADE_BY
    except RecordError:
        is_own = not any(folder.iterdir())
    if others or not is_own:
        name = others[0] if others else MARK
        raise UserError(f"--runs {folder} holds {name} and is no autopsy's", "name a folder of its own")


def is_done(file: Path, retry: bool) -> bool:
    """A session that failed is an answer too, until somebody asks again."""
    try:
        return read_json(file)["state"] == "ok" or not retry
    except (RecordError, KeyError):
        return False


def missing(folder: Path, sessions: Sequence[Session], retry: bool = False) -> list[Session]:
    files = {session.id: folder / SESSIONS / f"{session.id}.json" for session in sessions}
    return [each for each in sessions if not files[each.id].exists() or not is_done(files[each.id], retry)]


def check_box(scale: Scale) -> None:
    if scale.on_gpu and not this_box().gpus:
        raise UserError(
            f"--scale {scale.name} needs {scale.box}, and no GPU is here", "use --scale laptop, or go there"
        )


class LaneLost(Exception):
    """It cannot even start."""


class Lane:
    """One process that runs sessions; a new one after a session that took too long."""

    def __init__(self, scale: Scale, core: int, work: Path):
        self.scale, self.core, self.work = scale, core, work
        self._process: subprocess.Popen[str] | None = None

    def run(self, session: Session) -> dict[str, Any]:
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
        return {"state": state, "reason": f"nothing came back in {took:.0f} s", "arms": [], "session_s": took}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        # Where a GPU is and is not meant, neither torch nor DeepSpeed shall find it.
        hidden = {} if self.scale.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        with tempfile.TemporaryFile("w+") as said:
            command = [sys.executable, "-m", "study.autopsy.lane", str(self.core), str(self.scale.threads)]
            process = self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=os.environ | hidden, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=said, text=True, start_new_session=True,
            )  # fmt: skip
            assert process.stdout is not None
            if process.stdout.readline().strip() != READY:
                self.end()
                said.seek(0)
                raise LaneLost((said.read().strip().splitlines() or ["it said nothing"])[-1])
        return process

    def end(self) -> None:
        """With every process that it has forked."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def run_sessions(
    folder: Path, lock: FileLock, scale: Scale, sessions: Sequence[Session], say: Callable[[str], None],
    retry: bool = False,
) -> int:  # fmt: skip
    """In the folder that is locked. Returns how many of them did not end ok."""
    left = missing(folder, sessions, retry)
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, min(scale.lanes, len(cores)))
    say(f"{len(sessions) - len(left)} of {len(sessions)} sessions are done; {len(left)} to run, {count} at a time")
    todo: queue.SimpleQueue[Session] = queue.SimpleQueue()
    for session in left:
        todo.put(session)
    progress = _Progress(len(left), say)
    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    lanes = [Lane(scale, cores[place] if scale.threads else -1, work) for place in range(count)]
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
        raise UserError(f"{folder} was renamed or removed while its sessions ran", "put it back, and run it again")
    if progress.lost:
        raise UserError(f"sessions cannot start here ({progress.lost})", "ask: study doctor")
    return progress.failed


def _work(
    lane: Lane, todo: queue.SimpleQueue[Session], folder: Path, lock: FileLock, progress: _Progress, lanes: int
) -> None:
    while True:
        try:
            session = todo.get_nowait()
        except queue.Empty:
            return
        try:
            answer = lane.run(session)
        except LaneLost as loss:
            progress.lost = str(loss)
            return
        if progress.stopped or not lock.is_in_place():
            # Ended from here: no answer of its own. Or another folder has this name by now.
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
            # What a gate shows is that it is refused.
            self.failed += not ended_ok and session.kind != "gate"
            left_min = (time.monotonic() - self._began) / self.done * (self.count - self.done) / 60
            why = "" if ended_ok else f" ({answer['reason']})"
            self.say(
                f"{self.done}/{self.count} {session.id}: {answer['state']}{why}, {answer['session_s']:.0f} s;"
                f" about {left_min:.0f} min left"
            )
