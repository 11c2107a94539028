"""Figures of a receipt for experiment trackers, under names that others use. It imports no torch.

torchtitan (torchtitan/components/metrics.py, MetricsProcessor.log): throughput(tps), which is of one device, tflops,
mfu(%), time_metrics/end_to_end(s), time_metrics/data_loading(s) and (%), memory/max_active(GiB),
memory/max_reserved(GiB).
axolotl (src/axolotl/core/trainers/base.py, log): memory/max_allocated (GiB), with a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from study.host.memory import GIB
from study.receipt.document import MEMORY_PARTS, TIME_PARTS, PeakFacts, ReceiptDocument

_TIME_NAMES = {"data": "data_loading", "communication": "exposed_communication", "offload": "exposed_offload"}
_NOT_PLAIN = re.compile(r"[^0-9A-Za-z_\-. :/]")


def list_figures(receipt: ReceiptDocument) -> dict[str, float]:
    """Return the measured figures by name; empty before the measured steps have ended."""
    if receipt.state != "complete":
        return {}
    rows = (*_memory(receipt.memory), *_time(receipt), *_speed(receipt), *_traffic(receipt))
    return {name: float(value) for name, value in rows}


def plain_names(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures under names that MLflow takes, as transformers' MLflowCallback makes them."""
    return {_NOT_PLAIN.sub("_", name): value for name, value in figures.items()}


def _memory(memory: PeakFacts | None) -> Iterator[tuple[str, float]]:
    if memory is None:
        return
    yield "memory/max_active(GiB)", memory.total_bytes / GIB
    if memory.allocator_slack_bytes is not None:
        yield "memory/max_reserved(GiB)", (memory.total_bytes + memory.allocator_slack_bytes) / GIB
    if memory.allocator_peak_bytes is not None:
        yield "memory/max_allocated (GiB)", memory.allocator_peak_bytes / GIB
    for part in MEMORY_PARTS:
        yield f"memory/{part}(GiB)", memory.parts.get(part, 0) / GIB
    yield "memory/attributed(%)", 100 * memory.attributed
    yield "memory/process_peak(GiB)", memory.process_peak_bytes / GIB


def _time(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    times = receipt.time
    if times.step_s is not None:
        yield "time_metrics/end_to_end(s)", times.step_s
    yield from _time_parts(times.parts)


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
