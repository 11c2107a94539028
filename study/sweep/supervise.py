"""Stands between the sweep and the processes of one run, and outlives neither.

    python study/sweep/supervise.py [--on-a-node] COMMAND...

The sweep holds the other end of stdin. When that closes, because the sweep wants the run ended or because it was
killed itself, everything below is ended. A launcher's own process group is not enough for this: torchrun puts every
rank into a session of its own. So this process adopts whatever loses its parent, and nobody escapes.

In a Slurm job there is one on each node of the step, and srun holds the pipe in between. What the kernel of a node
counted is known there alone, so it is printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import site
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from study.host.memory import OomCounts

GRACE_S = 5.0
KILL_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36
ON_A_NODE = "--on-a-node"
OOM_MARK = "zero-study: out of memory on node "


def main(command: list[str]) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The sweep alone decides: it closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    before = None
    if command[0] == ON_A_NODE:
        command, before = command[1:], _oom_counts()
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_as_the_launcher)
    ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: ended.put(launcher.wait()), daemon=True).start()
    threading.Thread(target=_wait_for_the_sweep, args=(ended,), daemon=True).start()
    status = ended.get()
    _end_all_below()
    if before is not None:
        _print_ooms(before)
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


def _wait_for_the_sweep(ended: queue.SimpleQueue[int | None]) -> None:
    os.read(0, 1)
    ended.put(None)


def _as_the_launcher() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Where the host's memory runs out the kernel shall end the run, and neither the sweep nor anybody else's work.
    with contextlib.suppress(OSError):
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"1000")


def _end_all_below() -> None:
    """SIGTERM, so that the ranks can close their record; then SIGKILL, for a rank that hangs in a collective."""
    if not _children_are_left():
        return
    _find_packages()
    import psutil

    started = time.monotonic()
    told: set[int] = set()
    while _children_are_left() and time.monotonic() - started < GRACE_S + KILL_S:
        patient = time.monotonic() - started < GRACE_S
        for process in psutil.Process().children(recursive=True):
            if not patient:
                _signal(process.pid, signal.SIGKILL)
            elif process.pid not in told:
                told.add(process.pid)
                _signal(process.pid, signal.SIGTERM)
        time.sleep(0.02)


def _find_packages() -> None:
    """Started without site-packages and PYTHONPATH (-ES), which would cost each run a tenth of a second."""
    site.main()
    sys.path.extend(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def _oom_counts() -> OomCounts:
    _find_packages()
    sys.path.append(str(Path(__file__).parents[2]))
    from study.host.memory import oom_counts

    return oom_counts()


def _print_ooms(before: OomCounts) -> None:
    ooms = _oom_counts() - before
    if ooms.killed:
        place = os.environ.get("SLURM_NODEID", "0")
        print(f"{OOM_MARK}{place}: {ooms.killed} {ooms.cgroup_limit_hit}", flush=True)


def _children_are_left() -> bool:
    """Also collects the exit status of those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
