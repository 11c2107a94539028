"""A receipt's memory timeline as a trace for Perfetto and chrome://tracing. It imports no torch.

The format: "Trace Event Format", events of metadata (M), of a duration (X) and of counters (C), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from study.receipt.document import MemoryTimeline, ReceiptDocument
from study.receipt.page import NAMES, describe

_PROCESS, _THREAD = 1, 1


def trace_document(receipt: ReceiptDocument, timeline: MemoryTimeline) -> dict[str, Any]:
    """Return the trace: one slice for each phase of the step, one counter for each part of its memory."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"receipt": describe(receipt)},
        "traceEvents": list(_events(timeline)),
    }


def _events(timeline: MemoryTimeline) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", "rank 0")
    yield _metadata("thread_name", "phases of the watched step")
    for span in timeline.phases:
        if span.phase != "between":
            duration = _microseconds(span.end_s - span.begin_s)
            yield _event("X", span.phase, span.begin_s) | {"dur": duration, "cat": "phase"}
    peak = timeline.total_bytes[timeline.at_s.index(timeline.peak_at_s)]
    yield _event("i", "peak of memory", timeline.peak_at_s) | {"s": "p", "args": {"bytes": peak}}
    yield from _counter("all tensors", timeline.at_s, timeline.total_bytes)
    for part, values in timeline.parts.items():
        yield from _counter(NAMES.get(part, part), timeline.at_s, values)


def _metadata(name: str, value: str) -> dict[str, Any]:
    return _event("M", name, 0.0) | {"args": {"name": value}}


def _counter(name: str, times: tuple[float, ...], values: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    last = None
    for place, (at_s, value) in enumerate(zip(times, values, strict=True)):
        # A counter lasts until its next event; the last event shows the end of the step.
        if value != last or place == len(times) - 1:
            yield _event("C", name, at_s) | {"args": {"bytes": value}}
        last = value


def _event(kind: str, name: str, at_s: float) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": _PROCESS, "tid": _THREAD, "ts": _microseconds(at_s)}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
