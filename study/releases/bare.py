"""The control of the releases: DeepSpeed without this project's trainer, beside a plain loop of the same numbers.

    python -m study.releases.bare [STACK ...] [--output reports/releases/bare.json]

A small model takes six steps of the same batches on two gloo ranks, each in one micro-step or in four, as three callers
ask for it: `bare` steps the engine after every backward, as DeepSpeed's guide does; `boundary` says which micro-step is
the last and steps once, as Accelerate does since 1.8; `accelerate` is the stack's own Accelerate. What is wrong under
`bare` is the engine's; what is wrong under the others alone is the pairing's. `installed` is the stack that runs this.

Behind a dash a micro-step has two losses, each with a backward pass of its own: `bare-losses` of one forward pass,
`bare-forwards` of one each. There `boundary` names the last of these passes as well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study.host.folders import cache_directory
from study.host.operators import use_own_build
from study.host.stacks import stacks
from study.releases.bare_cases import LEARNING_RATE, RANKS, ControlCase, build_model, cases, plain_loop, train

INSTALLED = "installed"
MARK = "result: "
# What rounding may do to a loss or a norm. The installed release is off by 1e-7, in bf16 by 3e-4; a fault by 4e-3.
_ROUNDING = {"fp32": 1e-5, "bf16": 2e-3}
_CASE_LIMIT_S = 90


def start(work: Callable[[], Any], output: Path) -> int:
    """The work in a fork of this process, which has imported all: it costs no start-up, and harms no other."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        found = work()
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        found = {"error": f"{type(error).__name__}: {lines[0]}"[:200]}
    # Whole or not there, for who reads it while it is written.
    output.with_suffix(".part").write_text(json.dumps(found))
    output.with_suffix(".part").replace(output)
    os._exit(0)


def collect(children: Mapping[int, Path]) -> list[dict[str, Any]]:
    """What each child left. One that hangs is ended, and so is one whose partner has failed."""
    deadline, alive = time.monotonic() + _CASE_LIMIT_S, set(children)
    while alive and time.monotonic() < deadline:
        ended = {pid for pid in alive if os.waitpid(pid, os.WNOHANG)[0]}
        if any("losses" not in _read(children[pid]) for pid in ended):
            deadline = min(deadline, time.monotonic() + 2)
        alive -= ended
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [_read(output) for output in children.values()]


def _read(output: Path) -> dict[str, Any]:
    return dict(json.loads(output.read_text())) if output.exists() else {}


def measure(case: ControlCase, folder: Path) -> dict[str, Any]:
    """The case beside the plain loop: how far off its losses are, its first norm, and its weights at the end."""
    is_bf16 = case.precision != "fp32"
    plain = folder / f"plain-{is_bf16}-{case.clipping}"
    if not plain.exists():
        collect({start(lambda: plain_loop(is_bf16, case.clipping), plain): plain})
    right = _read(plain)
    name = "-".join(map(str, dataclasses.astuple(case))).replace(".", "_")
    outputs = [folder / f"{name}-{rank}" for rank in range(RANKS)]
    work = [functools.partial(train, case, rank, folder / f"{name}-store") for rank in range(RANKS)]
    ranks = collect({start(each, output): output for each, output in zip(work, outputs, strict=True)})
    if errors := [rank.get("error", "") for rank in ranks if "losses" not in rank]:
        return {"error": next(filter(None, errors), "it hung, or ended without a word")}
    mine, other = ranks
    return {
        "losses_off": _short(max(map(_share, mine["losses"], right["losses"]))),
        "norm": _short(mine["norms"][0], 6), "right_norm": _short(right["norms"][0], 6),
        "weights_off": _short(_distance(mine["weights"], right["weights"])),
        # After how many of the steps the two ranks read other weights.
        "readings_apart": sum(a != b for a, b in zip(mine["readings"], other["readings"], strict=True)),
    }  # fmt: skip


def _share(mine: float, its: float) -> float:
    return abs(mine - its) / abs(its)


def _distance(mine: Sequence[float], its: Sequence[float]) -> float:
    """Root mean square of the difference, in units of the learning rate: a step of Adam is about 1."""
    squares = ((a - b) ** 2 for a, b in zip(mine, its, strict=True))
    return float((sum(squares) / len(its)) ** 0.5 / LEARNING_RATE)


def _short(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def child(only: str) -> None:
    """Every case under the releases that this process imports, a line for each."""
    import accelerate
    import deepspeed
    import torch

    torch.set_num_threads(1)
    _import_once()
    stack = {each.__name__: str(each.__version__) for each in (deepspeed, accelerate, torch)}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if only in _words(dataclasses.asdict(case)):
                row = {**stack, **dataclasses.asdict(case), **measure(case, Path(folder))}
                print(MARK + json.dumps(row), flush=True)


def _import_once() -> None:
    """What every case would import or load again."""
    import deepspeed.ops
    import torch

    torch.optim.AdamW(build_model().parameters())
    # A compiler is asked for each operator.
    getattr(deepspeed.ops, "__compatible_ops__", None)
    with contextlib.suppress(ImportError):
        # Later releases import it, and half of torch with it, to look at the optimizer they are given.
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    # An operator for inference, which takes half a minute to build. `deepspeed.comm.torch` by name is torch itself.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None


def under(stack: str, only: str, before: Path | None = None) -> list[dict[str, Any]]:
    """The rows of a stack; `before` is a folder that Python searches before the stack's."""
    environment = {**os.environ} | ({} if stack == INSTALLED else stacks()[stack].environment(os.environ))
    if before:
        environment["PYTHONPATH"] = os.pathsep.join([str(before), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "study.releases.bare", "--child", "--only", only]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rows = []
    for line in process.stdout:
        if line.startswith(MARK):
            rows.append({"stack": stack, **json.loads(line.removeprefix(MARK))})
            print(" ".join(str(value) for value in rows[-1].values()), flush=True)
    if process.wait() and not rows:
        rows = [{"stack": stack, "error": "it cannot be imported"}]
    return rows


def read_rows(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def is_right(row: Mapping[str, Any]) -> bool | None:
    """Whether a case came to what the plain loop did, to rounding; None of one that ended in an error."""
    if row.get("error"):
        return None
    most = _ROUNDING["fp32" if row["precision"] == "fp32" else "bf16"]
    # Stage 0 reports no norm in fp32.
    norm_off = 0.0 if row["norm"] is None else _share(row["norm"], row["right_norm"])
    return max(row["losses_off"], norm_off) <= most


def _words(row: Mapping[str, Any]) -> str:
    """What names a case, for `--only`; all of it is there but in the row of a stack that cannot be imported."""
    return " ".join(str(row.get(field.name, "")) for field in dataclasses.fields(ControlCase))


def write_rows(output: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row a line, so that a later run shows what changed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("stacks", nargs="*", metavar="STACK")
    parser.add_argument("--output", type=Path, default=Path("reports/releases/bare.json"))
    parser.add_argument("--only", default="", help="cases whose words hold this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_own_build(cache_directory())
    if options.child:
        child(options.only)
        return 0
    names = options.stacks or [*stacks(), INSTALLED]
    kept = [row for row in read_rows(options.output) if row["stack"] not in names or options.only not in _words(row)]
    for name in names:
        kept += under(name, options.only)
        write_rows(options.output, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
