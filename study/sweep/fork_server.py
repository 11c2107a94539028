"""Runs without import time: forks of a server that has imported the libraries of one stack.

`python study/sweep/fork_server.py SOCKET` is the server, which exits when its standard input closes. `... SOCKET
REQUEST` replaces a launcher: it requests a run from the server and exits with the run's status; stopping it stops the
run. `... SOCKET - SCRIPT ARGUMENTS` replaces a plain start of a script: its folder and environment are those of this
process. It needs only the standard library. `ForkServer` is the sweep's side. Each fork is a separate process with the
environment that `accelerate launch` sets. Records have the launch command, and the sweep's notes mark the run as
forked. It is used only without a GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

PRELOADED_MODULES = (
    "accelerate.commands.launch",
    "deepspeed.ops.op_builder.all_ops",
    "torch.distributed.fsdp",
    "torch.utils.cpp_extension",
    "torch.utils.flop_counter",
    "transformers.integrations",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.optimization",
    "study.engine.audit",
    "study.metrics",
    "study.run.open",
    "study.run.steps",
    "study.workloads.initial",
)
# Not for the runs of `study verify`; transformers' trainer imports `datasets`.
_FOR_TRAINING = ("datasets", "evaluate", "transformers.trainer")
# In place of a request's file: a script, its folder and environment are those of the process that asks.
_OF_CALLER = "-"
# torch's launcher grants the other ranks this time after one has failed.
GRACE_S = 30


@dataclasses.dataclass
class ForkServer:
    """Owner of one server at a time, for the stack of the last cell: another stack needs other libraries."""

    # The server's program: this file preloads what training needs.
    program: str = __file__
    _stack: str | None = None
    _process: subprocess.Popen[bytes] | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def command(
        self, stack: str | None, ranks: int, command: list[str], environment: Mapping[str, str], printed: Path
    ) -> list[str]:
        """Return the command to run instead of a launch or a script; itself if the stack's libraries do not import."""
        if not self._is_serving(stack, environment):
            return command
        from study.config.places import WORKING_FOLDER

        script = next(place for place, word in enumerate(command) if word.endswith(".py"))
        request = {
            "command": command[script:],
            "ranks": ranks,
            "agent_store": False,
            "environment": dict(environment),
            "launch": command[command.index("launch") + 1 : script] if "launch" in command else [],
            "folder": str(WORKING_FOLDER.absolute()),
            "stdout": str(printed),
            "stderr": str(printed),
        }
        file = printed.with_name("request.json")
        file.write_text(json.dumps(request))
        return [sys.executable, "-ES", __file__, self._address, str(file)]

    def script_command(self, script: str, arguments: list[str]) -> list[str]:
        """Return the command that starts a script in its caller's folder and environment, in a fork if there is one."""
        if not self._is_serving(None, os.environ):
            return [sys.executable, script, *arguments]
        return [sys.executable, "-ES", __file__, self._address, _OF_CALLER, script, *arguments]

    def _is_serving(self, stack: str | None, environment: Mapping[str, str]) -> bool:
        """Start a server for the stack unless it runs; False if its libraries do not import."""
        if self._process is not None and self._process.poll() is None and self._stack == stack:
            return True
        self.close()
        self._stack = stack
        self._folder = tempfile.TemporaryDirectory()
        # torch and DeepSpeed read these at import: one thread per rank, like the launcher, and no compilation.
        read_at_import = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, self.program, self._address],
            env={**environment, **read_at_import},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while not Path(self._address).exists():
            if self._process.poll() is not None:
                self.close()
                return False
            time.sleep(0.05)
        return True

    @property
    def _address(self) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name) / "socket")

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None


def ask(address: str, file: str, *script: str) -> int:
    """Request a run, or a script with the folder and environment of this process; return its exit status."""
    request = _request_of_caller(script) if file == _OF_CALLER else json.loads(Path(file).read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        request["port"] = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        if file == _OF_CALLER:
            _wait_for_end(connection)
        status = json.loads(connection.recv(64) or b"1")
    if status < 0:
        # The sweep searches for this line of torch's launcher.
        print(f"  exitcode  : {status}", flush=True)
    return status if status >= 0 else 1


def _wait_for_end(connection: socket.socket) -> None:
    """Return when the script has ended; exit, which ends the script, if this process's parent has died."""
    parent = os.getppid()
    while not select.select([connection], [], [], 1.0)[0]:
        if os.getppid() != parent:
            sys.exit(1)


def _request_of_caller(script: tuple[str, ...]) -> dict[str, Any]:
    """Return the request for a script in this process's folder and environment."""
    # A Jupyter kernel ends itself if its parent is not this process; a closed connection ends it, too.
    environment = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}
    return {
        "command": script,
        "ranks": 1,
        "agent_store": False,
        "environment": environment,
        "launch": [],
        "folder": str(Path.cwd()),
        "stdout": os.devnull,
        "stderr": os.devnull,
    }


def preload() -> None:
    """Import the libraries of a run; the Makefile compiles them by it, too."""
    from study.config.strategies import read_strategy
    from study.host.stacks import import_libraries, is_engines_only, without_gc

    import_libraries(read_strategy("zero3"))
    with without_gc():
        for library in PRELOADED_MODULES + (() if is_engines_only() else _FOR_TRAINING):
            importlib.import_module(library)
        # Compiles the patterns of all architectures, which a first model needs. Older releases have none.
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("gpt2")
        # The operators that compile here: otherwise each rank calls the compiler when it starts DeepSpeed.
        with contextlib.suppress(ImportError):
            getattr(importlib.import_module("deepspeed.ops"), "__compatible_ops__", None)


def serve(address: str, preload: Callable[[], None] = preload) -> None:
    """Import the libraries, then fork a process for each request until standard input closes."""
    preload()
    # The address appears when the socket listens: a connection between bind and listen fails.
    with socket.create_server(f"{address}.new", family=socket.AF_UNIX) as listener:
        Path(f"{address}.new").rename(address)
        leaders: set[int] = set()
        while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [], 0.05)[0]):
            if listener in ready:
                connection, _ = listener.accept()
                if (leader := os.fork()) == 0:
                    listener.close()
                    _leave_after(_lead, connection)
                leaders.add(leader)
                connection.close()
            leaders -= {leader for leader in leaders if os.waitpid(leader, os.WNOHANG)[0]}


def _leave_after(work: Any, *arguments: Any) -> NoReturn:
    """Run the work of a forked process and exit, so that it never returns to its parent's loop."""
    status = 1
    try:
        work(*arguments)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _lead(connection: socket.socket) -> None:
    """Start the ranks of one request and send their exit status; a closed connection ends them."""
    request = json.loads(connection.makefile().readline())
    ranks: set[int] = set()
    for rank in range(request["ranks"]):
        if (process := os.fork()) == 0:
            connection.close()
            _leave_after(_run_rank, request, rank)
        ranks.add(process)
    status, deadline = 0, float("inf")
    while ranks:
        if select.select([connection], [], [], 0.02)[0] or time.monotonic() > deadline:
            _signal(ranks, signal.SIGKILL)
        for process in list(ranks):
            ended, wait_status = os.waitpid(process, os.WNOHANG)
            if ended:
                ranks.remove(process)
                if wait_status and not status:
                    status = os.waitstatus_to_exitcode(wait_status)
                    deadline = time.monotonic() + request.get("grace_s", GRACE_S)
                    _signal(ranks, signal.SIGTERM)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(status).encode())


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


def _run_rank(request: dict[str, Any], rank: int) -> None:
    os.setsid()
    for descriptor, file in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    script, sys.argv = request["command"][0], request["command"]
    if request["launch"]:
        # The variables that the launchers of Accelerate and torch set; a test compares them with a real launch.
        launcher = importlib.import_module("accelerate.commands.launch")
        utils = importlib.import_module("accelerate.utils")
        words = [*request["launch"], *request["command"]]
        args, defaults, _ = launcher._validate_launch_command(launcher.launch_command_parser().parse_args(words))
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            _, variables = utils.prepare_deepspeed_cmd_env(args)
        elif args.multi_gpu or args.use_fsdp:
            variables = utils.prepare_multi_gpu_env(args)
        else:
            _, variables = utils.prepare_simple_launcher_cmd_env(args)
        os.environ.update(variables)
        if args.use_deepspeed or args.multi_gpu or args.use_fsdp:
            os.environ.update(
                dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
                | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(args.num_processes))
                | {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(request["port"]),
                    "GROUP_RANK": "0",
                    "GROUP_WORLD_SIZE": "1",
                    "ROLE_NAME": "default",
                    "TORCHELASTIC_RUN_ID": "none",
                    # Whether the ranks connect to an existing store, or to one that rank 0 creates.
                    "TORCHELASTIC_USE_AGENT_STORE": str(request["agent_store"]),
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "TORCHELASTIC_MAX_RESTARTS": "0",
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
                    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                }
            )
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        if sys.argv[2] == _OF_CALLER:
            # Jupyter interrupts a kernel before it kills it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.exit(ask(*sys.argv[1:]))
    serve(sys.argv[1])
