"""A process that has imported what a run imports, and forks the ranks of one launch after the other.

`python study/sweep/fork_server.py SOCKET`; it ends with its standard input. study/sweep/forks.py asks it, and so do
the tests. A fork is a process of its own, with the environment that `accelerate launch` would give it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from study.config.strategies import read_strategy
from study.host.imports import import_libraries, importing

ALSO = (
    "accelerate.commands.launch", "datasets", "deepspeed.ops.op_builder.all_ops", "evaluate",
    "torch.distributed.fsdp", "torch.utils.cpp_extension", "torch.utils.flop_counter", "transformers.integrations",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "transformers.optimization",
    "transformers.trainer",
)  # fmt: skip
# What torch's launcher grants the other ranks once one has failed.
GRACE_S = 30


def main(address: str) -> None:
    import_libraries(read_strategy("zero3"))
    with importing():
        for library in ALSO:
            importlib.import_module(library)
    with socket.create_server(address, family=socket.AF_UNIX) as listener:
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
    """A fork never goes back to the loop that it comes from."""
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
    """Starts the ranks of one request and answers with the exit status; whoever asked hangs up to have them ended."""
    request = json.loads(connection.makefile().readline())
    ranks: set[int] = set()
    for rank in range(request["ranks"]):
        if (process := os.fork()) == 0:
            connection.close()
            _leave_after(_be_rank, request, rank)
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
                    status, deadline = os.waitstatus_to_exitcode(wait_status), time.monotonic() + GRACE_S
                    _signal(ranks, signal.SIGTERM)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(status).encode())


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


def _be_rank(request: dict[str, Any], rank: int) -> None:
    os.setsid()
    for descriptor, file in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    script, *arguments = request["command"]
    if request["launch"]:
        _take_environment([*request["launch"], *request["command"]], request["port"], rank, request["agent_store"])
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _take_environment(launched: list[str], port: int, rank: int, agent_store: bool) -> None:
    """What Accelerate's launcher and torch's set for a rank, which a test holds against a real launch."""
    launcher = importlib.import_module("accelerate.commands.launch")
    utils = importlib.import_module("accelerate.utils")
    args, defaults, _ = launcher._validate_launch_command(launcher.launch_command_parser().parse_args(launched))
    world = str(args.num_processes)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = utils.prepare_deepspeed_cmd_env(args)
    elif args.multi_gpu or args.use_fsdp:
        environment = utils.prepare_multi_gpu_env(args)
    else:
        _, environment = utils.prepare_simple_launcher_cmd_env(args)
        world = ""
    os.environ.update(environment)
    if world:
        os.environ.update(
            {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
            | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), world)
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
            | {"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none"}
            # Whether the ranks meet in a store that is there, or in one that the first of them makes.
            | {"TORCHELASTIC_USE_AGENT_STORE": str(agent_store)}
            | {
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            }
            | {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        )


if __name__ == "__main__":
    main(sys.argv[1])
