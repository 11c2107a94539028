"""Runs without the seconds that each spends on imports: forks of a server that has made them, for one stack at a time.

Cells under a stack are many, and train for a second or two. The command in their records is still what a person would
type, and the notes beside it say that the run was forked. Without a GPU only: CUDA does not survive a fork.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from study.config.strategies import REPOSITORY
from study.sweep import fork_client, fork_server
from study.sweep.cell import Cell


@dataclasses.dataclass
class ForkServer:
    """At most one at a time, for the stack of the last cell: another stack has other libraries."""

    _stack: str | None = None
    _process: subprocess.Popen[bytes] | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def command(self, cell: Cell, command: list[str], environment: Mapping[str, str], printed: Path) -> list[str]:
        """What to run in the place of a launch command: itself where the libraries of its stack cannot be imported."""
        if self._process is None or self._process.poll() is not None or self._stack != cell.stack:
            self.close()
            self._start(cell.stack, environment)
        if self._process is None or self._folder is None:
            return command
        script = next(place for place, word in enumerate(command) if word.endswith(".py"))
        launched = command[command.index("launch") + 1 : script]
        request = {
            "command": command[script:], "launch": launched, "ranks": cell.world_size, "agent_store": False,
            "folder": str(REPOSITORY), "environment": dict(environment), "stdout": str(printed), "stderr": str(printed),
        }  # fmt: skip
        file = printed.with_name("request.json")
        file.write_text(json.dumps(request))
        return [sys.executable, "-ES", fork_client.__file__, str(Path(self._folder.name) / "socket"), str(file)]

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None

    def _start(self, stack: str | None, environment: Mapping[str, str]) -> None:
        self._stack, self._folder = stack, tempfile.TemporaryDirectory()
        address = Path(self._folder.name) / "socket"
        # Read while torch and DeepSpeed are imported: one thread for each rank, as its launcher sets, and no compiling.
        read_at_import = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, fork_server.__file__, str(address)], cwd=REPOSITORY,
            env={**environment, **read_at_import}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        while not address.exists():
            if self._process.poll() is not None:
                self.close()
                return
            time.sleep(0.05)
