"""One measurement, the project's own or a published one, and what arithmetic says of it before it counts."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Literal, get_args

from study.host.memory import GIB
from study.predict.fits import device_bytes, usable_bytes
from study.predict.flops import model_flops
from study.predict.host import EVALUATION_BYTES
from study.predict.memory import predict_memory
from study.predict.request import Memory, Request
from study.predict.state import state_of
from study.predict.time import FITTED, Constants, predict_time

# What a figure of memory counts: torch's tensors, torch's pool, all that the driver sees of the process; or, without a
# GPU, the process itself: one that kept what it freed, or one that gave it back.
Process = Literal["resident", "resident_returned"]
Kind = Literal["allocated", "reserved", "device"] | Process


@dataclasses.dataclass(frozen=True)
class Measured:
    # Of a group of rows, such as llm-foundry-h100, or `own`.
    source: str
    name: str
    request: Request
    peak_bytes: float | None = None
    peak_kind: Kind = "allocated"
    # Of a process: when it imported what evaluations need, which then is there in the steps that follow. Records of
    # before 2026-11-21 count what is left of the last one, too.
    evaluated: Literal["never", "between", "last"] = "never"
    step_s: float | None = None
    # None where nobody tried the device's limit.
    fits: bool | None = None
    use: Literal["fit", "score"] = "score"
    # The same of its memory: something was chosen with the row in sight.
    use_memory: Literal["fit", "score"] = "score"
    # Part of each layer is computed again, which no request says.
    selective: bool = False
    # Of a process that has no tensor yet, where its page measured it.
    context_bytes: float | None = None
    url: str = ""
    # Why it does not count, where a reader found out.
    refused: str | None = None


def impossible(row: Measured) -> str | None:
    """Why arithmetic refuses a row; None where it may be true."""
    request = row.request
    if row.refused:
        return row.refused
    if row.peak_bytes is not None:
        held = state_of(request, waiting=False)
        least = held.params_device + held.optimizer_device
        if row.peak_bytes < least:
            return f"{row.peak_bytes / GIB:.1f} GiB, and weights and optimizer alone are {least / GIB:.1f}"
    peak = request.box.device.peak_tflops.get(request.precision.removesuffix("-engine"))
    if row.step_s is not None and peak is not None:
        rate = model_flops(request) / row.step_s / 1e12
        if rate > peak:
            return f"{rate:.0f} TFLOP/s, and the device has {peak:g}"
    return None


def peak_of(memory: Memory, kind: Kind) -> float:
    """The predicted figure of the same kind."""
    if kind == "allocated":
        return memory.peak_allocated.value
    outside = memory.device_parts["context"] if kind == "device" else 0.0
    return memory.pool_with_room + outside


def predicted_peak(row: Measured, kind: Kind | None = None) -> float:
    memory, kind = predict_memory(_recomputing(row)), kind or row.peak_kind
    if kind in get_args(Process):
        return _of_process(memory, row, kind)
    other = 0.0
    if kind == "device" and row.context_bytes is not None:
        other = row.context_bytes - memory.device_parts["context"]
    return peak_of(memory, kind) + other


def _of_process(memory: Memory, row: Measured, kind: Kind) -> float:
    tensors = memory.peak_reserved if kind == "resident" else memory.peak_allocated
    libraries = memory.host_parts["rank"]
    if row.evaluated == "last":
        return libraries + max(tensors.value, memory.steady_allocated.value + EVALUATION_BYTES)
    return libraries + tensors.value + (EVALUATION_BYTES if row.evaluated == "between" else 0.0)


def _recomputing(row: Measured) -> Request:
    if not row.selective:
        return row.request
    return dataclasses.replace(row.request, gradient_checkpointing=True, keeps_products=True)


def predicted_fit(row: Measured) -> bool:
    memory = predict_memory(_recomputing(row))
    return device_bytes(memory) <= usable_bytes(row.request.box)


def predicted_step_s(row: Measured, constants: Constants = FITTED) -> float:
    return statistics.mean(predict_time(each, constants=constants).step_s.value for each in _variants(row))


def _variants(row: Measured) -> list[Request]:
    """What is computed again in part, halfway between all and nothing."""
    asked = (True, False) if row.selective else (row.request.gradient_checkpointing,)
    return [dataclasses.replace(row.request, gradient_checkpointing=each) for each in asked]
