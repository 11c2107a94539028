"""The processes of one cell: started below a supervisor, and ended with everything that they have started."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from study.launch import supervise
from study.spec.strategies import REPOSITORY


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
