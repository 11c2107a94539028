"""The ending of a cell, judged by evidence if the cell's processes could not write it."""

from __future__ import annotations

import dataclasses
import functools
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError, redact_secrets, replace_unprintable
from study.host.memory import OomCounts
from study.records import lock, schema
from study.records.directory import Run, RunWriter, read_attempt, read_run, read_status, rewrite_outcome
from study.records.outcome import (
    HOST_OOM_HINT,
    Outcome,
    outcome_from_exception,
    outcome_from_log,
    outcome_from_status,
)
from study.sweep import supervise

StoppedBy = Literal["time limit", "user"]
_LAST_LINES = 15

_SIGNALLED = re.compile(r"exitcode\s*:\s*-(\d+)|died with <Signals\.\w+: (\d+)>|Signal (\d+) \(SIG\w+\) received")
# Releases of Slurm print one of these two lines, after the step's name or the time.
_OOM_BY_SLURM = re.compile(r"error: Detected \d+ oom[-_]kill event|^srun: error: .*: Out Of Memory$", re.MULTILINE)
_OOM_ON_NODE = re.compile(rf"^{re.escape(supervise.OOM_MARK)}(\d+): (\d+) (\d+)$", re.MULTILINE)
# When a task fails, srun ends the others, and their node prints the same line.
_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+)[^*]*)? \*\*\*")
_BY_SRUN = re.compile(r"_step_signal: Terminating StepId|^srun: error: .*: task", re.MULTILINE)
_EXIT_STATUS = re.compile(r"exitcode\s*:\s*-?[1-9]")
_NOISE = re.compile(r"^\s*(Traceback|File \"|[-=~^]+$|$)|^[WI]\d{4} |torch\.distributed\.elastic|traceback *:")


@dataclasses.dataclass(frozen=True)
class ExitEvidence:
    """Evidence of a cell's ending, complete when all its processes have ended."""

    launcher_status: int
    stopped_by: StoppedBy | None
    time_limit_s: float
    # Written by study/train.py in this attempt.
    status: Mapping[str, Any] | None
    refusal: UserError | None
    printed: str
    log: str
    ooms: OomCounts
    command: Sequence[str] = ()
    attempt_before: int = 0
    wall_s: float = 0.0

    @property
    def text(self) -> str:
        return f"{self.log}\n{self.printed}"

    @functools.cached_property
    def ending(self) -> Outcome:
        """Return the ending of a run by the reports of the run itself, the launcher, Slurm and the kernel."""
        status, printed = self.status, self.printed
        reported = outcome_from_status(status) if status and status["ended_at"] else None
        if reported is not None and reported.state in ("ok", "oom", "unsupported"):
            # However the processes exited.
            return reported
        if self.stopped_by == "time limit":
            reason = f"ended after its {self.time_limit_s:g} s"
            return Outcome("timeout", reason, "raise time_limit_s, or find the cause in log.txt")
        if self.stopped_by == "user":
            return Outcome("interrupted", "the sweep was stopped while it ran", "run it again")
        if self.refusal is not None:
            return outcome_from_exception(self.refusal)
        cancelled = _CANCELLED.search(printed)
        if cancelled and (cancelled[1] or not _BY_SRUN.search(printed[: cancelled.start()])):
            why = f": {cancelled[1].strip().lower()}" if cancelled[1] else ""
            return Outcome("interrupted", f"Slurm ended it{why}", "run it again", "Slurm")
        if _OOM_BY_SLURM.search(printed):
            return Outcome("oom", "the memory limit of the Slurm job was reached on a node", HOST_OOM_HINT)
        # Signals of ranks as torchrun and Accelerate report them, and of the launcher: a shell, the supervisor and srun
        # return 137 if it was killed.
        killed = {int(next(filter(None, match.groups()))) for match in _SIGNALLED.finditer(printed)}
        killed |= {-self.launcher_status} if self.launcher_status < 0 else set()
        if signal.SIGKILL in killed or self.launcher_status == 128 + signal.SIGKILL:
            return _judge_sigkill(self)
        if ran_out := outcome_from_log(reported.reason if reported else self.text, self.text):
            # The run may have reported it itself.
            return reported if reported and reported.cause == ran_out.cause else ran_out
        # When one rank fails, the launcher ends the others, whose reason is not the cause.
        if reported is not None and not (reported.state == "interrupted" and _EXIT_STATUS.search(printed)):
            return reported
        lines = last_lines(self.text, 3)
        how = f"a process was ended by signal {min(killed)}" if killed else f"exit status {self.launcher_status}"
        return Outcome("failed", f"{how}: {' | '.join(lines) or 'it printed nothing'}", "the rest is in log.txt")

    def write_end(self, directory: Path) -> None:
        """Write the run's ending to the record if its processes could not, and append its output to the log.

        Their lock ended with them, and another run may have begun there: the caller takes the folder first.
        """
        write_outcome(directory, self.attempt_before, self.ending)
        with (directory / "log.txt").open("a", encoding="utf-8") as stream:
            stream.write(self.printed)


def _judge_sigkill(evidence: ExitEvidence) -> Outcome:
    counted = _OOM_ON_NODE.findall(evidence.printed)
    places = {"": evidence.ooms} | {f" on node {node}": OomCounts(int(n), int(hit)) for node, n, hit in counted}
    # A node whose cgroup reached its limit comes before nodes that share its kernel.
    for place, ooms in sorted(places.items(), key=lambda item: -item[1].cgroup_limit_hit):
        if ooms.killed:
            killer = "the host's memory ran out, and its OOM killer"
            if ooms.cgroup_limit_hit:
                killer = "the cgroup's memory limit was reached, and the kernel"
            return Outcome("oom", f"{killer} killed a process{place}", HOST_OOM_HINT)
    return Outcome("interrupted", "a process was ended by SIGKILL, but not for its memory", "run it again")


def last_lines(text: str, count: int = _LAST_LINES) -> list[str]:
    """Return the last lines, without frames of tracebacks and the launcher's messages."""
    lines = [line.strip()[:300] for line in redact_secrets(text).splitlines() if not _NOISE.search(line)]
    return lines[-count:]


def write_outcome(directory: Path, attempt_before: int, ending: Outcome) -> None:
    """Write the attempt's ending to status.json, after all processes of the run have ended."""
    if read_attempt(directory) <= attempt_before:
        RunWriter(directory).close(ending)
        return
    if outcome_from_status(read_status(directory)) != ending:
        rewrite_outcome(directory, ending)


def read_record(directory: Path) -> Run:
    """Return a record without its rows, which is read as a whole once for each version of its status.json."""
    try:
        written = (directory / "status.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        raise schema.RecordError(directory / "status.json", "is missing") from None
    return _read_version(directory, written.st_ino, written.st_mtime_ns)


@functools.cache
def _read_version(directory: Path, inode: int, mtime_ns: int) -> Run:
    return dataclasses.replace(read_run(directory), steps=[], evals=[])


def cell_state(directory: Path) -> Outcome:
    """Return the state of the record in a directory."""
    try:
        status = read_record(directory).status
    except schema.RecordError as error:
        if not (directory / "status.json").exists():
            return Outcome("to do")
        return Outcome("damaged", str(error), "it is left as it is; --retry replaces it")
    if status["ended_at"] is None and lock.is_run_active(directory):
        return Outcome("at work", f"since {status['started_at']}")
    return Outcome(status["state"], replace_unprintable(status["reason"]), replace_unprintable(status["hint"]))
