"""Runs of a real engine without the time that each needs for imports: forks of tests/probe_server.py.

The imports of its ranks and of the launcher are four fifths of the cost of a test's run. A fork is still a separate
process with the environment of `accelerate launch`, and it ends with its run. Tests of the launcher, of imports or of a
process's memory use engines.launch.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import probe_server
import torch

from engines import ONE_THREAD, ROOT
from study.sweep import fork_server


def fork_ranks(
    strategy: str,
    script: str | Path,
    *args: str,
    ranks: int = 2,
    timeout: float = 180,
    grace_s: float = fork_server.GRACE_S,
) -> subprocess.CompletedProcess[str]:
    """Run the script as engines.launch does, with the same result; no process survives this call.

    After one rank has failed the others have `grace_s` to end. One that waits for it in a collective takes all of it.
    """
    # The ranks rendezvous there, as in the launcher's store.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    # An absolute path stays as it is.
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    launched = ["--config_file", str(file), "--num_processes", str(ranks)]
    return _ask(
        _server(()),
        timeout,
        command=[str(script), *args],
        launch=launched,
        ranks=ranks,
        port=store.port,
        agent_store=True,
        grace_s=grace_s,
        folder=str(ROOT),
        environment=os.environ | ONE_THREAD,
    )


def fork_script(
    script: str | Path,
    *args: str,
    folder: Path,
    environment: Mapping[str, str],
    read_at_import: Mapping[str, str],
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT` in the folder. `read_at_import` has the variables that libraries read at import."""
    return _ask(
        _server(tuple(sorted(read_at_import.items()))),
        timeout,
        command=[str(script), *args],
        launch=None,
        ranks=1,
        folder=str(folder),
        environment={**environment, **read_at_import},
    )


def run_module(command: Sequence[str], check: bool) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...`, as subprocess.run does."""
    script = ROOT / f"{command[2].replace('.', '/')}.py"
    result = fork_script(script, *command[3:], folder=ROOT, environment=os.environ, read_at_import={})
    print(result.stdout, result.stderr)
    return result


def _ask(address: str, timeout: float, **request: Any) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as connection:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        request |= {file.name: str(file) for file in files}
        connection.settimeout(timeout)
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        try:
            status = json.loads(connection.recv(64))
        except TimeoutError:
            raise subprocess.TimeoutExpired(request["command"], timeout) from None
        outputs = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    return subprocess.CompletedProcess(request["command"], status, *outputs)


@functools.cache
def _server(read_at_import: tuple[tuple[str, str], ...]) -> str:
    """Return the address of a server whose libraries were imported with these variables."""
    # No default: the cache would hold the default and an empty tuple apart, each with a server.
    folder = tempfile.TemporaryDirectory()
    address = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [sys.executable, probe_server.__file__, address],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, **dict(read_at_import)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    while not Path(address).exists():
        if process.poll() is not None:
            raise RuntimeError(f"the fork server has ended with {process.returncode}")
        time.sleep(0.05)
    return address
