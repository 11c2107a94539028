"""A run over the nodes of a Slurm job: one `srun`, and on each node a launcher of its own."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from study.host.memory import OomCounts
from study.host.slurm import Job, address_of, this_job
from study.records.lock import digest_of_host
from study.sweep import supervise

# Below those that a kernel hands out by itself. Jobs that share a node begin at ports of their own.
_FIRST_PORT, _PORTS = 15000, 10000
_OOM = re.compile(rf"^{re.escape(supervise.OOM_MARK)}(\d+): (\d+) (\d+)$", re.MULTILINE)
# When a task ends badly srun ends the others, and the node says the same words of that.
_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+)[^*]*)? \*\*\*")
_ADDRESS = re.compile(r"(--main_process_ip )\S+")
_BY_SRUN = re.compile(r"_step_signal: Terminating StepId|^srun: error: .*: task", re.MULTILINE)


def on_nodes(job: Job, nodes: int, launcher: list[str], script: list[str]) -> list[str]:
    """What a person would type in the job, with a launcher's words and a script's."""
    if nodes == 1:
        return [*job.step(1), *launcher, *script]
    head = job.nodes[0]
    where = ["--num_machines", str(nodes), "--main_process_ip", address_of(head), "--main_process_port", _port(job)]
    # Only the step's own environment tells a node which one it is, so a shell there asks.
    line = f'exec {shlex.join([*launcher, *where])} --machine_rank "$SLURM_NODEID" {shlex.join(script)}'
    return [*job.step(nodes), "bash", "-c", line]


def _port(job: Job) -> str:
    """Tried here, which in a batch script is the node that the ranks meet on."""
    first = int(re.sub(r"\D", "", job.id) or 0) * 7
    for offset in range(_PORTS):
        port = _FIRST_PORT + (first + offset) % _PORTS
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("", port))
            except OSError:
                continue
            return str(port)
    return str(_FIRST_PORT)


def without_nodes(words: Sequence[str]) -> list[str]:
    """For what is handed on: each node of this job as the digest that records name it by, and no address."""
    job = this_job()
    names = sorted(job.nodes if job else (), key=len, reverse=True)
    said = []
    for word in words:
        for name in names:
            word = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", digest_of_host(name), word)
        said.append(_ADDRESS.sub(r"\1ADDRESS", word))
    return said


def supervised(command: list[str]) -> list[str]:
    """With somebody beside the launcher who ends what it leaves, and on each node of a step its own."""
    # A file and not `-m`, and without site-packages: it needs nothing of them, and starts at once.
    beside = [sys.executable, "-ES", str(Path(supervise.__file__))]
    if command[0] != "srun":
        return [*beside, *command]
    place = next(place for place, word in enumerate(command) if place and not word.startswith("--"))
    return [*command[:place], *beside, supervise.ON_A_NODE, *command[place:]]


def ooms_of_nodes(printed: str) -> dict[int, OomCounts]:
    """What the nodes' kernels counted while the step was at work there."""
    return {int(node): OomCounts(int(killed), int(hit)) for node, killed, hit in _OOM.findall(printed)}


def cancelled_by_slurm(printed: str) -> str | None:
    """Slurm's reason to end a step that nobody here wanted ended; empty where it gives none."""
    found = _CANCELLED.search(printed)
    if found is None or (not found[1] and _BY_SRUN.search(printed[: found.start()])):
        return None
    return (found[1] or "").strip().lower()
