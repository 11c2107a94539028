"""One cell's processes: what is launched, in which environment, and how it is ended."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from study.errors import UserError
from study.launch import supervise
from study.launch.cell import Cell, Trainer
from study.launch.lock import MARKER
from study.spec.strategies import REPOSITORY

_SCRIPTS: dict[Trainer, str] = {
    "study": "study/train.py",
    "hf_trainer": "study/baselines/hf_trainer.py",
    "bare_loop": "study/baselines/bare_loop.py",
}
# study/train.py writes here why it refused: a launcher in between leaves of an exit status only that it was not 0.
REFUSAL_FILE = "ZERO_STUDY_REFUSAL_FILE"
# What a launcher exports for its ranks would make the next one believe that it is a rank itself.
_ANOTHER_LAUNCH = re.compile(
    r"ACCELERATE_|FSDP_|TORCHELASTIC_|DEEPSPEED_|(GROUP|ROLE)_|MASTER_(ADDR|PORT)$|(LOCAL_)?(RANK|WORLD_SIZE)$"
)


def launch_command(cell: Cell, output_dir: Path, *extra_flags: str) -> list[str]:
    """What a person would type in the repository root."""
    processes = [] if cell.strategy == "single" else ["--num_processes", str(cell.world_size)]
    configuration = f"accelerate_configs/{cell.strategy}.yaml"
    return [
        accelerate(), "launch", "--config_file", configuration, *processes, _SCRIPTS[cell.trainer],
        *cell.flags(_shortest(output_dir)), *extra_flags,
    ]  # fmt: skip


def _shortest(path: Path) -> Path:
    """As seen from the repository root, where every command runs."""
    path = path.absolute()
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path


def accelerate() -> str:
    """The word `accelerate` where the shell finds this installation's, else its path."""
    beside = Path(sys.executable).parent / "accelerate"
    found = shutil.which("accelerate")
    if found and (not beside.exists() or Path(found).samefile(beside)):
        return "accelerate"
    if beside.exists():
        return str(_shortest(beside))
    raise UserError("Accelerate is not installed here", "run: pip install -e '.[train]'")


def clean_environment(directory: Path, refusal_file: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _ANOTHER_LAUNCH.match(name)}
    # The environment need not be activated: ninja and the launcher's own children are looked for on PATH.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return {**kept, MARKER: str(directory.resolve()), REFUSAL_FILE: str(refusal_file)}


@dataclasses.dataclass
class CellProcess:
    """The running cell. Its printed output waits in a nameless file: the run directory is the run's to open."""

    supervisor: subprocess.Popen[bytes]
    output: IO[bytes]

    @classmethod
    def start(cls, command: Sequence[str], environment: dict[str, str]) -> CellProcess:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `collect`
        supervisor = subprocess.Popen(
            # A file and not `-m`, and without site-packages: it needs nothing of them, and starts at once.
            [sys.executable, "-ES", str(Path(supervise.__file__)), *command],
            cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        return cls(supervisor, output)

    def wait(self, seconds: float) -> int | None:
        """The launcher's exit status, or None when it is still at work."""
        try:
            return self.supervisor.wait(max(seconds, 0.001))
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> int:
        """End every process of the run; returns when none is left."""
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        try:
            return self.supervisor.wait(supervise.GRACE_S + supervise.KILL_S + 5)
        except subprocess.TimeoutExpired:
            self.supervisor.send_signal(signal.SIGKILL)
            return self.supervisor.wait()

    def collect(self) -> str:
        """What the launcher and the ranks printed before they had a log."""
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        self.output.close()
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        return text
