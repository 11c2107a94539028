"""Run one cell: launched, watched, ended, and judged by what it left."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from study.errors import refusal_from_json
from study.host.cgroups import oom_counts
from study.launch.cell import Cell
from study.launch.command import clean_environment, launch_command
from study.launch.lock import end_leftovers
from study.launch.process import CellProcess
from study.launch.verdict import Evidence, StoppedBy, attempt_of, conclude, judge
from study.record.directory import read_json, read_status
from study.record.outcome import Ending

_POLL_S = 0.25
_LOG_TAIL_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Ended:
    """A cell whose last process is gone. Nothing is written yet: `write_end` does that."""

    ending: Ending
    evidence: Evidence
    command: list[str]
    attempt_before: int
    started: float
    wall_s: float

    @property
    def was_stopped(self) -> bool:
        return self.evidence.stopped_by == "user"

    def write_end(self, directory: Path) -> None:
        """Make the record say how the run ended, where its own processes could not.

        Their lock is gone with them, and somebody else's run may have begun there: the caller takes the folder first.
        """
        conclude(directory, self.attempt_before, self.ending)
        with (directory / "log.txt").open("a", encoding="utf-8") as stream:
            stream.write(self.evidence.printed)


def run_cell(cell: Cell, root: Path, watch: Callable[[], None] = lambda: None) -> Ended:
    """Returns when no process of the cell is left, also after Ctrl-C. `watch` is called while the run is at work.

    A directory that holds a run is given over to the next attempt, whatever state the last one left it in.
    """
    directory = root / cell.id
    log_file = directory / "log.txt"
    again = ["--overwrite_output_dir"] if (directory / "status.json").exists() else []
    command = launch_command(cell, directory, *again)
    attempt_before, log_size_before = attempt_of(directory), log_file.stat().st_size if log_file.exists() else 0
    ooms, started, clock = oom_counts(), time.time(), time.monotonic()

    def watch_the_new_run() -> None:
        # Before the run has opened its directory what lies there is an earlier attempt's.
        if _opened_since(directory, started):
            watch()

    with tempfile.TemporaryDirectory() as scratch:
        refusal_file = Path(scratch) / "refusal.json"
        process = CellProcess.start(command, clean_environment(root, refusal_file))
        try:
            launcher_status, stopped_by = _until_its_end(process, cell.time_limit_s, watch_the_new_run)
        except KeyboardInterrupt:
            launcher_status, stopped_by = process.end(), "user"
        except BaseException:
            process.end()
            raise
        wall_s = time.monotonic() - clock
        if launcher_status < 0:
            # The supervisor itself was killed, and has ended nobody.
            end_leftovers(root)
        refusal = refusal_from_json(read_json(refusal_file)) if refusal_file.exists() else None
        printed = process.collect()
    evidence = Evidence(
        launcher_status=launcher_status,
        stopped_by=stopped_by,
        time_limit_s=cell.time_limit_s,
        status=read_status(directory) if attempt_of(directory) > attempt_before else None,
        refusal=refusal,
        printed=printed,
        log=_tail(log_file, log_size_before),
        ooms=oom_counts() - ooms,
    )
    return Ended(judge(evidence), evidence, command, attempt_before, started, wall_s)


def _until_its_end(
    process: CellProcess, time_limit_s: float, watch: Callable[[], None]
) -> tuple[int, StoppedBy | None]:
    deadline = time.monotonic() + time_limit_s
    while (status := process.wait(_POLL_S)) is None:
        if time.monotonic() > deadline:
            return process.end(), "time limit"
        watch()
    return status, None


def _opened_since(directory: Path, started: float) -> bool:
    try:
        return (directory / "status.json").stat().st_mtime >= started
    except OSError:
        return False


def _tail(file: Path, start: int) -> str:
    """The end of what was written behind `start`."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(start, os.fstat(stream.fileno()).st_size - _LOG_TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
