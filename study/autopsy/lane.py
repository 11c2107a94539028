"""Runs sessions one after the other. Each of their processes is a fork of this one: imports are paid before any clock.

A fork has imported the libraries and computed nothing: what a process pays in its first steps it still pays. On a box
with GPUs, which do not survive a fork, every process is started anew.

python -m study.autopsy.lane CORE THREADS: says READY, and then answers each session, one line of JSON, with another,
until its standard input ends. CORE -1 is any.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from study.autopsy.design import READY
from study.config.strategies import read_strategy
from study.host.box import visible_gpus
from study.host.folders import cache_directory
from study.host.imports import import_libraries, importing
from study.host.operators import build_operators
from study.records.directory import read_json, utc_now, write_json

_LOG = "log.txt"
_LOG_KEPT = 1500


def main(core: int, threads: int) -> None:
    if core >= 0:
        os.sched_setaffinity(0, {core})
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # The answers go where standard output was, and whatever a library prints to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    strategy = read_strategy("zero3_cpu_optimizer")
    import_libraries(strategy)
    with importing():
        import study.autopsy.session  # noqa: F401
    build_operators(strategy, cache_directory())
    answers.write(f"{READY}\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(run_session(json.loads(line))) + "\n")
        answers.flush()


def run_session(request: dict[str, Any]) -> dict[str, Any]:
    """Its processes in their order; what one of them could not do ends it."""
    from study.autopsy.session import RESULT

    answer: dict[str, Any] = {"started_at": utc_now(), "state": "ok", "reason": "", "arms": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=request["work"]) as name:
        folder = Path(name)
        for place, arms in enumerate(request["processes"]):
            write_json(folder / "task.json", {"scale": request["scale"], "seed": request["seed"], "arms": arms})
            (folder / RESULT).unlink(missing_ok=True)
            status = _in_own_process(folder)
            if not (folder / RESULT).exists():
                answer |= {"state": "failed", "reason": f"its process ended with status {status} and said nothing"}
            else:
                said = read_json(folder / RESULT)
                answer["arms"] += [arm | {"process": place} for arm in said.pop("arms")]
                answer |= said
            if answer["state"] != "ok":
                answer["log"] = (folder / _LOG).read_text(encoding="utf-8", errors="replace")[-_LOG_KEPT:]
                break
    return answer | {"session_s": round(time.monotonic() - began, 2)}


def _in_own_process(folder: Path) -> int:
    task = folder / "task.json"
    with (folder / _LOG).open("a") as log:
        if visible_gpus():
            command = [sys.executable, "-m", "study.autopsy.session", str(task)]
            return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
        child = os.fork()
        if not child:
            _be_the_process(task, log.fileno())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _be_the_process(task: Path, log: int) -> None:
    """Never returns to the loop that it was forked from."""
    status = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from study.autopsy import session

        status = session.main(task)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
