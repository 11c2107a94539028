"""Supervisor between the sweep and the processes of one run; it exits when either of them ends.

    python study/sweep/supervise.py [--on-a-node] COMMAND...

The sweep has the other end of stdin. When it closes, because the sweep ends the run or was killed, the supervisor ends
all processes below it. To end a launcher's process group is not enough, because torchrun starts every rank in a new
session. So the supervisor adopts every process that loses its parent.

In a Slurm job, each node of the step has a supervisor, and srun has the pipe. A supervisor prints the kernel's OOM
counts, which only its node can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
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
    """Run the command until it exits or stdin closes, end all processes below, and return the exit status."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Only the sweep ends the run, by closing the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    before = None
    if command[0] == ON_A_NODE:
        command, before = command[1:], _oom_counts()
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_become_launcher)
    ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: ended.put(launcher.wait()), daemon=True).start()

    def wait_for_the_pipe() -> None:
        os.read(0, 1)
        ended.put(None)

    threading.Thread(target=wait_for_the_pipe, daemon=True).start()
    status = ended.get()
    _kill_descendants()
    if before is not None and (ooms := _oom_counts() - before).killed:
        place = os.environ.get("SLURM_NODEID", "0")
        print(f"{OOM_MARK}{place}: {ooms.killed} {ooms.cgroup_limit_hit}", flush=True)
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


def _become_launcher() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # If host memory runs out, the kernel kills the run instead of the sweep or other processes.
    with contextlib.suppress(OSError):
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"1000")


def _kill_descendants() -> None:
    """Send SIGTERM, upon which ranks close their record, and then SIGKILL to ranks that hang in a collective."""
    if not _has_children():
        return
    import psutil

    started = time.monotonic()
    terminated: set[int] = set()
    while _has_children() and time.monotonic() - started < GRACE_S + KILL_S:
        in_grace_period = time.monotonic() - started < GRACE_S
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                if not in_grace_period:
                    os.kill(process.pid, signal.SIGKILL)
                elif process.pid not in terminated:
                    terminated.add(process.pid)
                    os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.02)


def _oom_counts() -> OomCounts:
    sys.path.append(str(Path(__file__).parents[2]))
    from study.host.memory import oom_counts

    return oom_counts()


def _has_children() -> bool:
    """Whether a child process is left. It collects the exit status of ended ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
