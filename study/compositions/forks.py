"""Runs combinations in forks of one process that has imported the engines: `python -m study.compositions.forks FOLDER`.

Each line of standard input is a request, each line of standard output its outcome. No state survives from one
combination to the next, and none costs the time of imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from study.compositions.features import Combination, make_combination
from study.compositions.locate import largest_share_of_limit, locate_differences
from study.compositions.reference import PlainReference, make_reference, reference_key
from study.compositions.trace import FigureTrace, Place, load_arrays, save_arrays
from study.config.errors import Unsupported
from study.config.strategies import read_strategy
from study.host.folders import cache_directory
from study.host.operators import build_operators
from study.host.stacks import without_gc

TIME_LIMIT_S = 60.0
_ENGINES = ("deepspeed", "accelerate", "torch", "peft", "transformers")
_IMPORTED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "transformers.models.opt.modeling_opt",
    "accelerate",
    "deepspeed",
    "deepspeed.ops.adam",
    "deepspeed.moe.layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
    "study.compositions.engines",
)


# Together they need every operator that DeepSpeed compiles for a CPU.
_STRATEGIES_WITH_OPERATORS = ("zero2", "zero2_cpu", "zero3_nvme")


def serve(folder: Path) -> None:
    """Answer requests for outcomes until standard input closes."""
    references = _References(folder / "references")
    answer_requests(lambda request: _outcome(request, folder / "run", references))


def answer_requests(
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    strategies: Sequence[str] = _STRATEGIES_WITH_OPERATORS,
    imported: Sequence[str] = (),
) -> None:
    """Import the engines, then answer each line of standard input by one of standard output, until it closes.

    Other modules that the answers need are imported with them, and the operators of some strategies compiled.
    """
    # What imports print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_engines(strategies, imported)
    for line in sys.stdin:
        started = time.monotonic()
        document = answer(json.loads(line))
        document["seconds"] = round(time.monotonic() - started, 2)
        answers.write(json.dumps(document) + "\n")
        answers.flush()


def _import_engines(strategies: Sequence[str], imported: Sequence[str]) -> None:
    # Read at import. Functions that DeepSpeed decorates with torch.compile run uncompiled.
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    with without_gc():
        for name in (*_IMPORTED, *imported):
            # Older releases lack some; a combination that needs one fails with the message of its import.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    # As in study/sweep/fork_server.py: otherwise each rank calls the compiler.
    getattr(sys.modules.get("deepspeed.ops"), "__compatible_ops__", None)
    import_operators(strategies)


def import_operators(strategies: Sequence[str]) -> None:
    """Compile and load operators in this process, so that no fork compiles or waits for another's compilation."""
    for name in strategies:
        with contextlib.suppress(Unsupported, ImportError):
            build_operators(read_strategy(name), cache_directory(), say=lambda line: print(line, file=sys.stderr))


def _outcome(request: dict[str, Any], folder: Path, references: _References) -> dict[str, Any]:
    combination = make_combination(request["features"])
    outcome: dict[str, Any] = {"combination": combination.name}
    seed = request.get("seed", 0)
    reference = references.get(combination, seed)
    if reference is None:
        return outcome | {"kind": "no reference", "says": references.failure}
    failure = run_ranks(_trace_rank, combination, folder, request.get("fault"), seed)
    if failure is not None:
        return outcome | failure
    traces = {rank: FigureTrace.load(folder / f"trace-{rank}.npz") for rank in range(combination.ranks)}
    expanded = reference.expand_ranks(combination)
    located = locate_differences(traces, expanded, combination)
    if not located:
        share_of_limit = largest_share_of_limit(traces, expanded, combination)
        return outcome | {"kind": "equal", "says": "", "share_of_limit": share_of_limit}
    first, *later = [dataclasses.asdict(mismatch) | {"says": mismatch.describe} for mismatch in located]
    return outcome | {
        "kind": "differs",
        "says": first.pop("says"),
        "difference": first,
        "besides": later[0] if later else None,
    }


def run_ranks(
    work: Callable[..., None], combination: Combination, folder: Path, *arguments: Any, limit_s: float = TIME_LIMIT_S
) -> dict[str, Any] | None:
    """Call work(combination, rank, folder, *arguments) in a fork for each rank; return what failed, or None."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = range(combination.ranks)
    forked = [_fork(_run_rank, work, combination, rank, port, folder, *arguments) for rank in ranks]
    timed_out = not _wait(forked, limit_s, folder)
    errors = [json.loads(file.read_text()) for file in sorted(folder.glob("error-*.json"))]
    if errors:
        # A rank whose peer has died reports that; the first error is the cause.
        first = min(errors, key=lambda error: error["at"])
        return {key: first[key] for key in ("kind", "says", "line")}
    if timed_out or not all((folder / f"done-{rank}").exists() for rank in ranks):
        return {"kind": "hangs" if timed_out else "crashes", "says": _last_line(folder), "line": ""}
    return None


class _References:
    """References by their key; a fork makes each, so that this process starts no thread of torch."""

    def __init__(self, folder: Path):
        self._folder, self._known = folder, dict[str, PlainReference | None]()
        self.failure = ""
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, combination: Combination, seed: int) -> PlainReference | None:
        key = f"{reference_key(combination)}-{seed}"
        if key not in self._known:
            place = self._folder / key
            place.mkdir(exist_ok=True)
            _wait([_fork(_make_reference, combination, place, seed)], TIME_LIMIT_S, place)
            self._known[key] = load_reference(place, combination.data_ranks) if (place / "done").exists() else None
        if self._known[key] is None:
            self.failure = _last_line(self._folder / key)
        return self._known[key]


def _make_reference(combination: Combination, folder: Path, seed: int) -> None:
    import numpy as np

    reference = make_reference(combination, seed)
    for rank, trace in reference.traces.items():
        trace.save(folder / f"trace-{rank}.npz")
        allowed = {place.key: np.array(value) for place, value in reference.allowed[rank].items()}
        save_arrays(folder / f"allowed-{rank}.npz", allowed)
    shares = {
        f"{rank}|{micro_step}|{name}": value
        for (rank, micro_step), tensors in reference.shares.items()
        for name, value in tensors.items()
    }
    save_arrays(folder / "shares.npz", shares)
    (folder / "done").touch()


def load_reference(folder: Path, ranks: int) -> PlainReference:
    traces = {rank: FigureTrace.load(folder / f"trace-{rank}.npz") for rank in range(ranks)}
    allowed: dict[int, dict[Place, float]] = {}
    for rank in range(ranks):
        limits = load_arrays(folder / f"allowed-{rank}.npz")
        allowed[rank] = {Place.parse(key): float(value) for key, value in limits.items()}
    shares: dict[tuple[int, int], dict[str, Any]] = {}
    for key, value in load_arrays(folder / "shares.npz").items():
        owner, micro_step, name = key.split("|")
        shares.setdefault((int(owner), int(micro_step)), {})[name] = value
    return PlainReference(traces, allowed, shares)


def _trace_rank(combination: Combination, rank: int, folder: Path, fault: str | None, seed: int) -> None:
    from study.compositions.engines import run_rank

    if fault is not None:
        plant_fault(*fault.rsplit(":", 1))
    run_rank(combination, rank, folder, seed).save(folder / f"trace-{rank}.npz")


def _run_rank(
    work: Callable[..., None], combination: Combination, rank: int, port: int, folder: Path, *arguments: Any
) -> None:
    ranks = str(combination.ranks)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    if combination.has("accelerate") and not combination.has("ddp"):
        engine = "DEEPSPEED" if combination.uses_deepspeed else "FSDP"
        os.environ[f"ACCELERATE_USE_{engine}"] = "true"
    try:
        work(combination, rank, folder, *arguments)
        (folder / f"done-{rank}").touch()
    except BaseException as error:
        (folder / f"error-{rank}.json").write_text(json.dumps(_described(error)))
        raise


def plant_fault(file: str, name: str) -> None:
    """Put a fault of a table FAULTS in a Python file into the imported engines, with its setting of a table SETTINGS.

    The name may also be that of a setting alone.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Data classes look their module up.
    sys.modules[Path(file).stem] = module
    spec.loader.exec_module(module)
    settings: dict[str, Any] = getattr(module, "SETTINGS", {})
    if (fault := module.FAULTS.get(name)) is None:
        settings[name].plant()
        return
    if fault.given:
        settings[fault.given].plant()
    fault.plant()


def _described(error: BaseException) -> dict[str, Any]:
    """Return the kind of an error, its message and the innermost line of an engine that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    # Installed, or a layer of a stack.
    inside = re.compile(rf"/(?:site-packages|dist-packages|stacks/[^/]+)/((?:{'|'.join(_ENGINES)})/.+)")
    engines = [frame for frame in frames if inside.search(frame.filename)]
    line = ""
    if (place := inside.search(engines[-1].filename if engines else "")) is not None:
        line = f"{place[1]}:{engines[-1].lineno}"
    # Without the folder of an installation.
    text = re.sub(r"/\S*/(?:site-packages|dist-packages|stacks/[^/\s]+)/", "", str(error))
    # Without a compiler's command, which has folders of this machine.
    text = re.sub(r"(Error building extension '\w+').*", r"\1", text)
    message = text.strip().splitlines()
    says = f"{type(error).__name__}: {message[0][:300] if message else ''}"
    # An engine raises it itself; other errors happen to it.
    raised = bool(engines) and frames[-1] == engines[-1] and (engines[-1].line or "").startswith(("raise", "assert"))
    return {"kind": "refuses" if raised else "crashes", "says": says, "line": line, "at": time.time()}


def _fork(work: Callable[..., None], *arguments: Any) -> int:
    """Start the work in a fork whose output goes to the folder among the arguments."""
    if (process := os.fork()) == 0:
        _leave_after(work, *arguments)
    return process


def _leave_after(work: Callable[..., None], *arguments: Any) -> NoReturn:
    status = 1
    try:
        os.setsid()
        folder = next(argument for argument in arguments if isinstance(argument, Path))
        printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# A rank that waits for one that has failed.
_GRACE_S = 3.0


def _wait(processes: list[int], limit_s: float, folder: Path) -> bool:
    """Wait for all processes; False if the time limit stopped them."""
    deadline = time.monotonic() + limit_s
    running, timed_out = set(processes), False
    while running:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                running.remove(process)
                if status:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if running and time.monotonic() > deadline:
            timed_out = True
            for process in running:
                os.killpg(process, signal.SIGKILL)
        time.sleep(0.005)
    return not timed_out


def _last_line(folder: Path) -> str:
    printed = folder / "printed.txt"
    lines = printed.read_text(errors="replace").strip().splitlines() if printed.exists() else []
    return lines[-1][:300] if lines else "no message"


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
