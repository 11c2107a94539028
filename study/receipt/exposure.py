"""Time of collectives and of copies from and to the host in one profiled step: in flight, and exposed, when nothing is
computed meanwhile."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, and not declared so

from study.metrics.profiling import StepProfiler
from study.receipt.timing import RANGE

Intervals = list[tuple[int, int]]
# By the name of NCCL's kernel, or of gloo's event.
_KINDS = {
    "all_reduce": re.compile(r"all_?reduce", re.IGNORECASE),
    "all_gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce_scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "broadcast": re.compile(r"broadcast", re.IGNORECASE),
    "all_to_all": re.compile(r"all_?to_?all", re.IGNORECASE),
    "reduce": re.compile(r"reduce", re.IGNORECASE),
    "send_recv": re.compile(r"send|recv", re.IGNORECASE),
}
# On a CPU; autograd's own events also span the collectives of its hooks.
_COMPUTES = ("aten::", "fsdp::")
# Of a GPU: copies between its memory and the host's, as torch's profiler names them.
_HOST_COPIES = {"to_device": re.compile(r"^Memcpy HtoD"), "to_host": re.compile(r"^Memcpy DtoH")}
OFFLOAD_KINDS = (*_HOST_COPIES,)
_IN_FLIGHT = {"cpu": re.compile(r"^gloo:(?!barrier)"), "cuda": re.compile(r"^nccl")}


class Exposure(NamedTuple):
    """Seconds of the profiled step: in flight by collective, and exposed by collective and part of the step."""

    in_flight: dict[str, float]
    exposed: dict[tuple[str, str], float]


class ExposureProfiler(StepProfiler):
    """Profiler of one step, which keeps the collectives' times alone."""

    exposure: Exposure | None = None

    def __init__(self, device: torch.device, step: int) -> None:
        super().__init__(device, range(step, step + 1))

    def _summarize(self, events: Sequence[Any]) -> None:
        self.exposure = read_exposure(events, self.device.type)


def read_exposure(events: Iterable[Any], device: str) -> Exposure:
    """Return the times of collectives from the events of torch's profiler."""
    host, kernels = _split_by_device(list(events))
    parts = sorted(
        (*_interval(event), event.name().removeprefix(RANGE)) for event in host if event.name().startswith(RANGE)
    )
    launched = {event.correlation_id(): event.start_ns() for event in host if event.correlation_id() > 0}
    collectives: defaultdict[str, Intervals] = defaultdict(list)
    by_part: list[tuple[str, str, tuple[int, int]]] = []
    computing: Intervals = []
    for event in kernels if device == "cuda" else host:
        name, interval = event.name(), _interval(event)
        if (kind := _find_kind(name, device)) is not None:
            collectives[kind].append(interval)
            # A kernel belongs to the part in which the host launched it.
            began = launched.get(event.linked_correlation_id(), interval[0]) if device == "cuda" else interval[0]
            by_part.append((_part_at(parts, began), kind, interval))
        elif device == "cuda" or name.startswith(_COMPUTES):
            computing.append(interval)
    busy = _union(computing)
    exposed: defaultdict[tuple[str, str], float] = defaultdict(float)
    # Of two collectives in flight at once the first one has the time.
    reached = 0
    for part, kind, (begin, end) in sorted(by_part, key=lambda row: row[2]):
        begin = max(begin, reached)
        reached = max(reached, end)
        if begin < end:
            exposed[part, kind] += (end - begin - _covered(busy, begin, end)) * 1e-9
    in_flight = {kind: sum(end - begin for begin, end in _union(rows)) * 1e-9 for kind, rows in collectives.items()}
    return Exposure(in_flight, dict(exposed))


def _split_by_device(events: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the events of the host, and the kernels and copies of the GPU."""
    host = [event for event in events if event.device_type() == DeviceType.CPU]
    names = {event.name() for event in host}
    # A range of this file is one on the GPU, too, over all kernels of a part.
    kernels = [event for event in events if event.device_type() != DeviceType.CPU and not _is_annotation(event, names)]
    return host, kernels


def _interval(event: Any) -> tuple[int, int]:
    start = event.start_ns()
    # Older releases of torch, such as 2.4, have the duration alone.
    return start, event.end_ns() if hasattr(event, "end_ns") else start + event.duration_ns()


def _is_annotation(event: Any, names_on_host: Set[str]) -> bool:
    """Whether an event of a GPU is a range of the host, and no kernel."""
    if hasattr(event, "is_user_annotation"):
        return bool(event.is_user_annotation())
    # Older releases of torch, such as 2.4, have no mark of it.
    return event.name() in names_on_host


def _find_kind(name: str, device: str) -> str | None:
    """Return the kind of a collective or of a copy between a GPU and the host; None for anything else."""
    if _IN_FLIGHT[device].search(name):
        return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "other")
    if device != "cuda":
        return None
    return next((kind for kind, pattern in _HOST_COPIES.items() if pattern.search(name)), None)


def _part_at(parts: Sequence[tuple[int, int, str]], time: int) -> str:
    place = bisect.bisect_right(parts, time, key=lambda part: part[0]) - 1
    return parts[place][2] if place >= 0 and time < parts[place][1] else "rest"


def _union(intervals: Intervals) -> Intervals:
    """Return the intervals merged, in order."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _covered(merged: Intervals, begin: int, end: int) -> int:
    """Return how much of a span the merged intervals cover."""
    first = max(0, bisect.bisect_right(merged, begin, key=lambda interval: interval[0]) - 1)
    covered = 0
    for low, high in merged[first:]:
        if low >= end:
            break
        covered += max(0, min(high, end) - max(low, begin))
    return covered
