"""Measures steps of combinations in forks of one process with the engines: `python -m study.costs.server FOLDER`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.compositions.features import Combination, make_combination
from study.compositions.forks import answer_requests, import_operators, run_ranks
from study.compositions.tiny_model import DecoderSize

if TYPE_CHECKING:
    from study.compositions.engines import Loop

# Tensors outweigh an engine's own objects, and a step takes 10 ms. As in a large model each bucket is a part of it, and
# stage 3 keeps a part gathered.
SIZE = DecoderSize(
    vocabulary=512, length=32, width=128, feed_forward=256, heads=4, layers=4, bucket=200_000, live=200_000
)
# Of the measured combinations none has NVMe, and few have the optimizer on the host, whose operator takes minutes to
# compile for each release.
_WITH_FIRST_OPERATORS, _WITH_ADAM = "zero2", "zero2_cpu"
_METERS = ("study.receipt.failures", "study.receipt.live_engine", "study.receipt.peak", "study.receipt.timing")
# Of a measurement, which takes seconds: processes of a busy machine wait for its cores.
_TIME_LIMIT_S = 600.0
# Steps before the timed ones: the engines allocate, and stage 3 traces the order of its modules.
_FIRST_STEPS = 3


def serve(folder: Path) -> None:
    """Answer requests until standard input closes."""
    answer_requests(
        lambda request: _measure(make_combination(request["features"]), folder / "run", request["timed_steps"]),
        (_WITH_FIRST_OPERATORS,),
        _METERS,
    )


def _measure(combination: Combination, folder: Path, timed_steps: int) -> dict[str, Any]:
    if combination.has("optimizer_cpu", "all_cpu"):
        import_operators([_WITH_ADAM])
    failure = run_ranks(_measure_rank, combination, folder, timed_steps, limit_s=_TIME_LIMIT_S)
    if failure is not None:
        return failure
    figures: dict[str, Any] = json.loads((folder / "figures-0.json").read_text(encoding="utf-8"))
    return {"kind": "measured", "says": "", **figures}


def _measure_rank(combination: Combination, rank: int, folder: Path, timed_steps: int) -> None:
    loop = _make_loop(combination, rank, folder)
    loop.notes_figures = False
    loop.start(seed=0)
    for step in range(1, _FIRST_STEPS + 1):
        loop.train_step(step)
    host_s = statistics.median(_time_steps(loop, timed_steps))
    figures = {"host_s": host_s, **_watch_step(loop, _FIRST_STEPS)}
    (folder / f"figures-{rank}.json").write_text(json.dumps(figures), encoding="utf-8")


def _make_loop(combination: Combination, rank: int, folder: Path) -> Loop:
    from study.compositions.engines import make_loop
    from study.costs.adapters import AdapterLoop, loads_adapters

    if loads_adapters(combination):
        return AdapterLoop(combination, rank, folder, SIZE, seed=0)
    return make_loop(combination, rank, folder, SIZE)


def _time_steps(loop: Loop, count: int) -> Iterator[float]:
    """Yield the CPU time of this rank's threads in each step."""
    for step in range(1, count + 1):
        began = time.process_time()
        loop.train_step(step)
        yield time.process_time() - began


def _watch_step(loop: Loop, step: int) -> dict[str, Any]:
    """Train one step under the receipt's meters, and return its memory and communication on this rank."""
    import torch

    from study.receipt.failures import Failures
    from study.receipt.live_engine import read_model
    from study.receipt.peak import GuardedState, GuardedTraffic, PeakWatch
    from study.receipt.timing import PartTimer

    failures, device = Failures(), torch.device("cpu")
    optimizer = getattr(loop, "optimizer", None) or loop.model.optimizer
    timer = PartTimer(loop.model, optimizer, device, failures)
    state = GuardedState(loop.model, optimizer, device, failures)
    traffic = GuardedTraffic(step, failures)
    peak = PeakWatch(loop.model, optimizer, timer, device, failures)
    timer.open()
    with state, traffic, peak:
        loop.train_step(step)
    timer.close()
    if failures.texts or state.report is None:
        raise RuntimeError(f"a meter failed: {'; '.join(failures.texts) or 'no optimizer step was seen'}")
    return {
        "parameters": read_model(loop.model).parameters,
        "state_bytes": sum(sum(places.values()) for places in state.report["state_bytes"].values()),
        "peak_bytes": peak.peak_bytes,
        "peak_moment": peak.moment,
        "peak_parts": {name: count for name, count in peak.parts.items() if count},
        "sent_bytes": round(sum(kind["wire_bytes_per_rank"] for kind in traffic.collectives.values())),
        "collectives": {name: int(kind["calls"]) for name, kind in sorted(traffic.collectives.items())},
    }


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
