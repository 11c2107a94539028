"""Launch one cell, watch it, end its processes and judge its ending by the evidence.

Only one sweep runs per directory, and without processes of an earlier one: the kernel releases the lock when its holder
exits. The processes of a run have the directory in their environment: if a sweep and the supervisor of its run are both
killed, the next sweep finds these processes and ends them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from study.config import errors, places
from study.host import folders, memory, slurm, stacks
from study.records.directory import read_attempt, read_json, read_status
from study.records.lock import FileLock
from study.sweep import cell_outcome, fork_server, supervise
from study.sweep.cell import Cell, launch_command

LOCK_NAME = "sweep.lock"
MARKER = "ZERO_STUDY_SWEEP_DIRECTORY"
_PATIENCE_S = 20.0
_POLL_S = 0.25
_LOG_TAIL_BYTES = 64 * 1024
# With these exports a launcher would treat itself as a rank. transformers needs docstrings at import.
_NOT_FOR_A_RUN = re.compile(
    r"PYTHONOPTIMIZE$|ACCELERATE_|FSDP_|TORCHELASTIC_|DEEPSPEED_|(GROUP|ROLE)_|MASTER_(ADDR|PORT)$"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)$|LOCAL_SIZE$|PMI_|PMIX_|OMPI_|MV2_|MPI_LOCAL"
)


def lock_sweep_directory(directory: Path) -> FileLock:
    """Return the directory's lock, which tasks of a job array share; raise UserError if another sweep has it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        problem = f"another sweep is active in {directory}"
        return FileLock(directory / LOCK_NAME, problem, shared=slurm.is_array_task())
    except OSError as error:
        problem = f"{directory} is not writable ({error.strerror})"
        raise errors.UserError(problem, "use a --runs_dir that you may write") from None


def _process_marker(directory: Path) -> str:
    """Return the marker of the directory and the Slurm job, as each job ends only its processes."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{directory.resolve()}{f'#{job}' if job else ''}"


def kill_stale_processes(directory: Path) -> int:
    """End all processes of an earlier sweep on this directory; return their number."""
    marker, ended = _process_marker(directory), set[int]()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE
                if is_ours and process.pid != os.getpid():
                    left.append(process.pid)
                    process.kill()
        if not left:
            return len(ended)
        if time.monotonic() > deadline:
            problem = f"processes of an earlier sweep on {directory} do not end: {', '.join(map(str, left))}"
            raise errors.UserError(problem, "restart the machine")
        ended.update(left)
        time.sleep(0.05)


class _CompilationLines:
    """The lines about compilation in a file of printed output."""

    def __init__(self, file: Path):
        self._file = file
        self._read = 0

    def new(self) -> list[str]:
        """Return the lines since the last call."""
        text = self._file.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.startswith(folders.COMPILES)]
        new_lines = lines[self._read :]
        self._read = len(lines)
        return new_lines


def run_cell(
    cell: Cell,
    root: Path,
    watch: Callable[[], None] = lambda: None,
    forks: fork_server.ForkServer | None = None,
    print_line: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> cell_outcome.ExitEvidence:
    """Run the cell; return its evidence when no process of it is left, also after Ctrl-C.

    `watch` is called during the run, and `print_line` with lines about compilation before its start. The next attempt
    reuses a directory with a run, whatever the state of the last attempt.
    """
    directory = root / cell.id
    overwrite = ["--overwrite_output_dir"] if (directory / "status.json").exists() else []
    command = launch_command(cell, directory, *overwrite)
    attempt_before = read_attempt(directory)
    log_sizes = {file: file.stat().st_size for file in _logs(directory)}
    ooms, clock = memory.oom_counts(), time.monotonic()

    with _scratch_folder(root, command) as scratch:
        # Output goes here first, because the run itself opens its directory.
        refusal_file, printed_file = Path(scratch) / "refusal.json", Path(scratch) / "printed.txt"
        compilation_lines = _CompilationLines(printed_file)

        def watch_the_new_run() -> None:
            # Until the run opens its directory, the record is an earlier attempt's, as its number shows.
            if read_attempt(directory) > attempt_before:
                watch()
            else:
                for line in compilation_lines.new():
                    print_line(line)

        environment = clean_environment(root, refusal_file)
        if cell.stack:
            environment |= stacks.stacks()[cell.stack].environment(os.environ)
        if forks:
            launched = forks.command(cell.stack, cell.world_size, command, environment, printed_file)
        else:
            launched = launch_directly(command)
        launcher_status, stopped_by = _run_supervised(
            launched, environment, printed_file, cell.time_limit_s, watch_the_new_run
        )
        wall_s = time.monotonic() - clock
        if launcher_status < 0:
            # The supervisor itself was killed, and ended no process.
            kill_stale_processes(root)
        return cell_outcome.ExitEvidence(
            launcher_status=launcher_status,
            stopped_by=stopped_by,
            time_limit_s=cell.time_limit_s,
            status=read_status(directory) if read_attempt(directory) > attempt_before else None,
            refusal=errors.refusal_from_json(read_json(refusal_file)) if refusal_file.exists() else None,
            printed=printed_file.read_text(encoding="utf-8", errors="replace"),
            log="\n".join(_tail(file, log_sizes.get(file, 0)) for file in _logs(directory)),
            ooms=memory.oom_counts() - ooms,
            command=command,
            attempt_before=attempt_before,
            wall_s=wall_s,
        )


def _scratch_folder(root: Path, command: list[str]) -> tempfile.TemporaryDirectory[str]:
    if command[0] == "srun":
        # All nodes of a job must be able to write a refusal there.
        return tempfile.TemporaryDirectory(dir=root, prefix=".launch-")
    return tempfile.TemporaryDirectory()


def launch_directly(command: list[str]) -> list[str]:
    """Return the command with accelerate-launch, which starts a second faster: it imports no other command."""
    script = f"{command[0]}-launch"
    return [script, *command[2:]] if command[1] == "launch" and shutil.which(script) else command


def with_supervisor(command: list[str]) -> list[str]:
    """Return the command with a supervisor before the launcher, and before each node's launcher of a step."""
    # A file instead of `-m`, because it starts faster.
    supervisor = [sys.executable, str(Path(supervise.__file__))]
    if command[0] != "srun":
        return [*supervisor, *command]
    place = next(place for place, word in enumerate(command) if place and not word.startswith("--"))
    return [*command[:place], *supervisor, supervise.ON_A_NODE, *command[place:]]


def _run_supervised(
    launched: list[str],
    environment: dict[str, str],
    printed_file: Path,
    time_limit_s: float,
    watch: Callable[[], None],
) -> tuple[int, cell_outcome.StoppedBy | None]:
    """Run the command under a supervisor until no process is left; return its exit status, and why it ended early."""
    with (
        printed_file.open("ab") as output,
        subprocess.Popen(
            with_supervisor(launched),
            cwd=places.WORKING_FOLDER,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as supervisor,
    ):
        try:
            return _wait(supervisor, time_limit_s, watch)
        except KeyboardInterrupt:
            return _end(supervisor), "user"
        except BaseException:
            _end(supervisor)
            raise


def _wait(
    supervisor: subprocess.Popen[bytes], time_limit_s: float, watch: Callable[[], None]
) -> tuple[int, cell_outcome.StoppedBy | None]:
    deadline = time.monotonic() + time_limit_s
    while time.monotonic() < deadline:
        try:
            return supervisor.wait(_POLL_S), None
        except subprocess.TimeoutExpired:
            watch()
    return _end(supervisor), "time limit"


def _end(supervisor: subprocess.Popen[bytes]) -> int:
    """End all processes of the run; return the supervisor's exit status when none is left."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return supervisor.wait(supervise.GRACE_S + supervise.KILL_S + 5)
    # If srun does not react, a signal makes it end the step.
    for stop in (supervisor.terminate, supervisor.kill):
        stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return supervisor.wait(supervise.GRACE_S)
    return supervisor.wait()


def clean_environment(directory: Path, refusal_file: Path) -> dict[str, str]:
    """Return the environment of a run: this process's without a launcher's exports, with the sweep's marker."""
    variables = {name: value for name, value in os.environ.items() if not _NOT_FOR_A_RUN.match(name)}
    # The Python environment may be inactive, and ninja and the launcher's children are found through PATH.
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    return {**variables, MARKER: _process_marker(directory), errors.REFUSAL_FILE_VARIABLE: str(refusal_file)}


def _logs(directory: Path) -> list[Path]:
    return sorted(directory.glob("log*.txt"))


def _tail(file: Path, start: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(start, os.fstat(stream.fileno()).st_size - _LOG_TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
