"""One measurement, the project's own or a published one, and what arithmetic says of it before it counts."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Literal, get_args

from study.host.memory import GIB
from study.predictor.activations import model_flops
from study.predictor.memory import EVALUATION_BYTES, predict_memory
from study.predictor.request import Memory, Request
from study.predictor.state import state_of
from study.predictor.time import FITTED, Constants, device_bytes, predict_time, usable_bytes

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


@dataclasses.dataclass(frozen=True)
class Scored:
    source: str
    name: str
    strategy: str
    offloads: bool
    precision: str
    device: str
    ranks: int
    use: str
    use_memory: str
    refused: str | None
    peak_kind: str
    peak_gib: float | None
    predicted_peak_gib: float | None
    # Of that, weights and the optimizer.
    state_gib: float | None
    step_s: float | None
    predicted_step_s: float | None
    fits: bool | None
    predicted_fits: bool | None
    url: str

    @property
    def peak_error(self) -> float | None:
        return _error(self.predicted_peak_gib, self.peak_gib)

    @property
    def step_error(self) -> float | None:
        return _error(self.predicted_step_s, self.step_s)


def score(row: Measured) -> Scored:
    request, refused = row.request, impossible(row)
    counts = refused is None
    return Scored(
        source=row.source,
        name=row.name,
        strategy=request.strategy.name,
        offloads=request.strategy.offloads,
        precision=request.precision,
        device=request.box.device.name,
        ranks=request.box.ranks,
        use=row.use,
        use_memory=row.use_memory,
        refused=refused,
        peak_kind=row.peak_kind,
        peak_gib=None if row.peak_bytes is None else row.peak_bytes / GIB,
        predicted_peak_gib=predicted_peak(row) / GIB if counts and row.peak_bytes is not None else None,
        state_gib=_held(request) / GIB if counts and row.peak_bytes is not None else None,
        step_s=row.step_s,
        predicted_step_s=predicted_step_s(row) if counts and row.step_s is not None else None,
        fits=row.fits,
        predicted_fits=predicted_fit(row)
        if counts and row.fits is not None and request.box.device.memory_gib
        else None,
        url=row.url,
    )


def _held(request: Request) -> float:
    state = state_of(request)
    return state.params_device + state.optimizer_device


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None
