"""Run one cell: launched, watched, ended, and judged by what it left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from study.config.errors import REFUSAL_FILE_VARIABLE, UserError, refusal_from_json
from study.config.strategies import REPOSITORY
from study.host.folders import COMPILES
from study.host.memory import oom_counts
from study.host.slurm import is_array_task
from study.host.stacks import stacks
from study.records.directory import read_json, read_status
from study.records.lock import FileLock
from study.records.outcome import Ending
from study.sweep import supervise
from study.sweep.cell import Cell, launch_command
from study.sweep.forks import ForkServer
from study.sweep.step import supervised
from study.sweep.verdict import ExitEvidence, StoppedBy, attempt_of, conclude, judge

# One sweep per directory, and nothing left of the one before.
# The lock is the kernel's, so it dies with its holder. The processes of a run carry the directory in their environment:
# should a sweep and the supervisor of its run both be killed, the next sweep finds what they left and ends it.

LOCK_NAME = "sweep.lock"
MARKER = "ZERO_STUDY_SWEEP_DIRECTORY"
_PATIENCE_S = 20.0


def only_sweep(directory: Path) -> FileLock:
    """The tasks of a job array may share it: they take one cell's folder at a time, and leave those that are taken."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        what = f"another sweep is at work in {directory}"
        return FileLock(directory / LOCK_NAME, what, shared=is_array_task())
    except OSError as error:
        raise UserError(
            f"{directory} is not writable ({error.strerror})", "let --runs-dir name a folder that you may write"
        ) from None


def marker_of(directory: Path) -> str:
    """Of another Slurm job's processes on this machine that job takes care."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{directory.resolve()}{f'#{job}' if job else ''}"


def end_leftovers(directory: Path) -> int:
    """End every process of an earlier sweep on this directory; returns how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_S
    while leftovers := _processes_of(directory):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in leftovers)
            raise UserError(f"processes of an earlier sweep on {directory} cannot be ended: {pids}", "restart the box")
        for process in leftovers:
            ended.add(process.pid)
            try:
                process.kill()
            except psutil.Error:
                continue
        time.sleep(0.05)
    return len(ended)


def _processes_of(directory: Path) -> list[psutil.Process]:
    wanted = marker_of(directory)
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.pid != os.getpid()]


_POLL_S = 0.25
_LOG_TAIL_BYTES = 64 * 1024
# What a launcher exports for its ranks would make the next one believe that it is a rank itself. Without docstrings
# transformers is not imported.
_NOT_FOR_A_RUN = re.compile(
    r"PYTHONOPTIMIZE$|ACCELERATE_|FSDP_|TORCHELASTIC_|DEEPSPEED_|(GROUP|ROLE)_|MASTER_(ADDR|PORT)$"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)$|LOCAL_SIZE$|PMI_|PMIX_|OMPI_|MV2_|MPI_LOCAL"
)


@dataclasses.dataclass(frozen=True)
class Ended(ExitEvidence):
    """A cell whose last process is gone. Nothing is written yet: `write_end` does that."""

    command: list[str]
    attempt_before: int
    wall_s: float

    @functools.cached_property
    def ending(self) -> Ending:
        return judge(self)

    @property
    def was_terminated(self) -> bool:
        """By somebody else than the sweep, and in order."""
        told = self.ending.reason.startswith(("Slurm ended it", "ended by SIGTERM"))
        return self.ending.state == "interrupted" and told

    def write_end(self, directory: Path) -> None:
        """Make the record say how the run ended, where its own processes could not.

        Their lock is gone with them, and somebody else's run may have begun there: the caller takes the folder first.
        """
        conclude(directory, self.attempt_before, self.ending)
        with (directory / "log.txt").open("a", encoding="utf-8") as stream:
            stream.write(self.printed)


def run_cell(
    cell: Cell,
    root: Path,
    watch: Callable[[], None] = lambda: None,
    forks: ForkServer | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Ended:
    """Returns when no process of the cell is left, also after Ctrl-C. `watch` is called while the run is at work, `say`
    with what delays its start.

    A directory that holds a run is given over to the next attempt, whatever state the last one left it in.
    """
    directory = root / cell.id
    again = ["--overwrite_output_dir"] if (directory / "status.json").exists() else []
    command = launch_command(cell, directory, *again)
    is_step = command[0] == "srun"
    attempt_before = attempt_of(directory)
    log_sizes = {file: file.stat().st_size for file in _logs(directory)}
    stack = stacks()[cell.stack].environment(os.environ) if cell.stack else {}
    ooms, clock, said = oom_counts(), time.monotonic(), list[str]()

    def watch_the_new_run() -> None:
        # Before the run has opened its directory what lies there is an earlier attempt's. Its number says so, whatever
        # the clock of the box does.
        if attempt_of(directory) > attempt_before:
            watch()
        else:
            lines = printed_file.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in [line for line in lines if line.startswith(COMPILES)][len(said) :]:
                said.append(line)
                say(line)

    # Every node of a job must be able to leave its refusal there.
    with tempfile.TemporaryDirectory(dir=root if is_step else None, prefix=".launch-" if is_step else None) as scratch:
        # What is printed waits here: the run directory is the run's to open.
        refusal_file, printed_file = Path(scratch) / "refusal.json", Path(scratch) / "printed.txt"
        environment = clean_environment(root, refusal_file) | stack
        launched = forks.command(cell, command, environment, printed_file) if forks else command
        with printed_file.open("ab") as output, subprocess.Popen(
            supervised(launched),
            cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as supervisor:  # fmt: skip
            try:
                launcher_status, stopped_by = _until_its_end(supervisor, cell.time_limit_s, watch_the_new_run)
            except KeyboardInterrupt:
                launcher_status, stopped_by = _end(supervisor), "user"
            except BaseException:
                _end(supervisor)
                raise
        wall_s = time.monotonic() - clock
        if launcher_status < 0:
            # The supervisor itself was killed, and has ended nobody.
            end_leftovers(root)
        return Ended(
            launcher_status=launcher_status,
            stopped_by=stopped_by,
            time_limit_s=cell.time_limit_s,
            status=read_status(directory) if attempt_of(directory) > attempt_before else None,
            refusal=refusal_from_json(read_json(refusal_file)) if refusal_file.exists() else None,
            printed=printed_file.read_text(encoding="utf-8", errors="replace"),
            log="\n".join(_tail(file, log_sizes.get(file, 0)) for file in _logs(directory)),
            ooms=oom_counts() - ooms,
            command=command,
            attempt_before=attempt_before,
            wall_s=wall_s,
        )


def _until_its_end(
    supervisor: subprocess.Popen[bytes], time_limit_s: float, watch: Callable[[], None]
) -> tuple[int, StoppedBy | None]:
    deadline = time.monotonic() + time_limit_s
    while time.monotonic() < deadline:
        try:
            return supervisor.wait(_POLL_S), None
        except subprocess.TimeoutExpired:
            watch()
    return _end(supervisor), "time limit"


def _end(supervisor: subprocess.Popen[bytes]) -> int:
    """End every process of the run; returns when none is left."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    try:
        return supervisor.wait(supervise.GRACE_S + supervise.KILL_S + 5)
    except subprocess.TimeoutExpired:
        pass
    # Then srun itself has Slurm end the step.
    for ask in (supervisor.terminate, supervisor.kill):
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return supervisor.wait(supervise.GRACE_S)
    return supervisor.wait()


def clean_environment(directory: Path, refusal_file: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _NOT_FOR_A_RUN.match(name)}
    # The environment need not be activated: ninja and the launcher's own children are looked for on PATH.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return {**kept, MARKER: marker_of(directory), REFUSAL_FILE_VARIABLE: str(refusal_file)}


def _logs(directory: Path) -> list[Path]:
    """The main process's machine has the first, and each other one its own."""
    return sorted(directory.glob("log*.txt"))


def _tail(file: Path, start: int) -> str:
    """The end of what was written behind `start`."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(start, os.fstat(stream.fileno()).st_size - _LOG_TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
