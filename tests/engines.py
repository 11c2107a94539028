"""Launch a script on real engines, the way a user does: `accelerate launch --config_file ...`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
# First on PYTHONPATH, it imitates a machine with a GPU and without a CUDA toolkit.
FAKE_GPU = ROOT / "tests" / "fakegpu"
# Without a GPU a device is one core, and the ranks must not compete for cores.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}


def launch(
    strategy: str, script: str | Path, *args: str, ranks: int = 2, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run `script` under accelerate_configs/<strategy>.yaml; on timeout no process of the launch survives."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"accelerate_configs/{strategy}.yaml",
        "--num_processes",
        str(ranks),
        "--main_process_port",
        "0",
        str(script),
        *args,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        # torchrun starts each rank in a separate session, and a survivor would hold the pipes open for ever.
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `study` in a new process, and check that it answered without torch."""
    code = (
        f"import sys; from study.cli import main; sys.argv = {['study', *arguments]!r};"
        "\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules, 'torch'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result


def run_in_terminal(command: Sequence[str], **variables: str) -> str:
    """Run a command on a pseudo-terminal and return its output."""
    parent, child = pty.openpty()
    output = b""
    environment = os.environ | ONE_THREAD | {"TERM": "xterm", **variables}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=child, stdout=child, stderr=child, start_new_session=True
    ) as process:
        os.close(child)
        # An OSError is the end: the other end of the pseudo-terminal is closed.
        with contextlib.suppress(OSError):
            while part := os.read(parent, 65536):
                output += part
    os.close(parent)
    assert process.returncode == 0, output
    return output.decode()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def print_screen(command: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a command of the study in this process; return its lines on a terminal of 120 columns."""
    from study.cli import main

    screen = Terminal()
    with monkeypatch.context() as patch:
        for name, value in {"COLUMNS": "120", "TERM": "xterm"}.items():
            patch.setenv(name, value)
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, screen)
        assert main(command.split()) == 0, screen.getvalue()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue())
    # A line that is written over shows what was written last.
    return [line.rpartition("\r")[2] for line in text.split("\n")][: -text.endswith("\n") or None]


def printed_json(result: subprocess.CompletedProcess[str], marker: str = "PROBE ") -> list[Any]:
    """Return the documents that a probe printed after the marker, one per rank, in rank order."""
    assert result.returncode == 0, f"{' '.join(result.args)}\n{result.stdout[-2000:]}\n{result.stderr[-6000:]}"
    # Two ranks may print on one line: each document ends with its JSON.
    decoder = json.JSONDecoder()
    documents = [decoder.raw_decode(text)[0] for text in result.stdout.split(marker)[1:]]
    return sorted(documents, key=lambda document: document["rank"])
