"""Figures of a receipt for experiment trackers, under names that others use. It imports no torch.

torchtitan (torchtitan/components/metrics.py, MetricsProcessor.log): throughput(tps), which is of one device, tflops,
mfu(%), time_metrics/end_to_end(s), time_metrics/data_loading(s) and (%), memory/max_active(GiB),
memory/max_reserved(GiB).
axolotl (src/axolotl/core/trainers/base.py, log): memory/max_allocated (GiB), with a space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from study.host.memory import GIB
from study.receipt.document import MEMORY_PARTS, TIME_PARTS, ForecastRow, ReceiptDocument
from study.receipt.host_optimizer import read_host_optimizer

_TIME_NAMES = {"data": "data_loading", "communication": "exposed_communication", "offload": "exposed_offload"}
_NOT_PLAIN = re.compile(r"[^0-9A-Za-z_\-. :/]")


def list_figures(receipt: ReceiptDocument) -> dict[str, float]:
    """Return the measured figures by name; empty before the measured steps have ended."""
    if receipt.state != "complete":
        return {}
    rows = (
        *_memory(receipt),
        *_time(receipt),
        *_speed(receipt),
        *_traffic(receipt),
        *_ranks(receipt),
        *_predicted(receipt),
    )
    return {name: float(value) for name, value in rows}


def plain_names(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures under names that MLflow takes, as transformers' MLflowCallback makes them."""
    return {_NOT_PLAIN.sub("_", name): value for name, value in figures.items()}


def log_figures(log: Callable[..., object], figures: Mapping[str, float], step: int) -> None:
    """Call a program's function; if it is accelerator.log, MLflow gets the names that it takes."""
    accelerator = getattr(log, "__self__", None)
    trackers = getattr(accelerator, "trackers", ())
    if "mlflow" not in [getattr(tracker, "name", None) for tracker in trackers]:
        log(figures, step=step)
        return
    # As Accelerator.log does, on the main process alone.
    for tracker in trackers if getattr(accelerator, "is_main_process", True) else ():
        tracker.log(plain_names(figures) if tracker.name == "mlflow" else figures, step=step)


def _memory(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    memory = receipt.memory
    if memory is None:
        return
    yield "memory/max_active(GiB)", memory.total_bytes / GIB
    if memory.allocator_slack_bytes is not None:
        yield "memory/max_reserved(GiB)", (memory.total_bytes + memory.allocator_slack_bytes) / GIB
    if memory.allocator_peak_bytes is not None:
        yield "memory/max_allocated (GiB)", memory.allocator_peak_bytes / GIB
    for part in MEMORY_PARTS:
        yield f"memory/{part}(GiB)", memory.parts.get(part, 0) / GIB
        if on_host := memory.offloaded_bytes(part):
            yield f"memory/offloaded_{part}(GiB)", on_host / GIB
    if memory.outside_torch_bytes is not None:
        name = "heap_without_tensors" if receipt.engine.device == "cpu" else "outside_torch"
        yield f"memory/{name}(GiB)", memory.outside_torch_bytes / GIB
    if receipt.counts_bytes_in_use:
        yield "memory/attributed(%)", 100 * memory.attributed
    yield "memory/process_peak(GiB)", memory.process_peak_bytes / GIB


def _time(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    times = receipt.time
    if times.step_s is not None:
        yield "time_metrics/end_to_end(s)", times.step_s
    yield from _time_parts(times.parts)
    if (host := read_host_optimizer(receipt)) is not None:
        yield "host_optimizer(GB/s)", host.gb_per_s


def _time_parts(parts: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    total = sum(parts.values())
    for part in TIME_PARTS:
        if part in parts and total:
            name = f"time_metrics/{_TIME_NAMES.get(part, part)}"
            yield f"{name}(s)", parts[part]
            yield f"{name}(%)", 100 * parts[part] / total


def _speed(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    speed, step_s = receipt.speed, receipt.time.step_s
    if speed.tokens_per_s is not None:
        yield "throughput(tps)", speed.tokens_per_s / receipt.engine.ranks
    # Recomputed operations are counted as well, and torchtitan's names are of a model's operations alone.
    is_recomputing = receipt.engine.gradient_checkpointing
    if speed.flops_per_step is not None and step_s:
        yield "hardware_tflops" if is_recomputing else "tflops", speed.flops_per_step / step_s / 1e12
    if speed.mfu is not None:
        yield "hfu(%)" if is_recomputing else "mfu(%)", 100 * speed.mfu


def _traffic(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    for kind, row in sorted((receipt.traffic or {}).items()):
        if row.payload_bytes:
            yield f"communication/{kind}(GiB)", row.ring_bytes / GIB


def _ranks(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    """Yield the slowest and the fullest of several ranks, once all have answered."""
    if len(receipt.ranks) < max(2, receipt.engine.ranks):
        return
    for name, unit, factor, figures in (
        ("slowest", "busy(s)", 1.0, {row.rank: row.busy_s for row in receipt.ranks}),
        ("fullest", "peak(GiB)", 1 / GIB, {row.rank: row.peak_bytes for row in receipt.ranks}),
    ):
        values = {rank: value for rank, value in figures.items() if value is not None}
        if values:
            rank = max(values, key=values.__getitem__)
            yield f"ranks/{name}", rank
            yield f"ranks/{name}_{unit}", values[rank] * factor


def _predicted(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    for row in receipt.forecast.comparisons:
        figure = row.figure.replace(" ", "_")
        if row.unit == "s":
            yield f"predicted/{figure}(s)", row.predicted
        else:
            yield f"predicted/{figure}(GiB)", row.predicted / GIB
    for row in receipt.forecast.parts:
        yield _predicted_part(row, receipt.engine.ranks)


def _predicted_part(row: ForecastRow, ranks: int) -> tuple[str, float]:
    """Return the predicted part under the name of the measured one."""
    kind, _, part = row.figure.partition(": ")
    if row.unit == "tokens/s":
        return "predicted/throughput(tps)", row.predicted / ranks
    name = part.replace(" ", "_")
    if row.unit == "s":
        return f"predicted/time_metrics/{_TIME_NAMES.get(name, name)}(s)", row.predicted
    return f"predicted/{'memory' if kind == 'memory' else 'communication'}/{name}(GiB)", row.predicted / GIB
