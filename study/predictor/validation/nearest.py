"""The measurements that are nearest to a request, and how far the prediction is off there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from study.host.memory import GIB
from study.predictor.request import Request
from study.predictor.shape import told as told_adapters
from study.predictor.validation.measured import Measured, impossible, predicted_peak, predicted_step_s
from study.predictor.validation.published import published_rows

_SHOWN = 3
# What one difference counts beside another: a model e times as large is as far off as another stage of ZeRO.
_SIZE, _RANKS, _TOKENS, _STAGE, _OFFLOAD, _DEVICE, _CHECKPOINTING = 1.0, 0.5, 0.3, 1.0, 1.0, 1.0, 0.3


def distance(one: Request, other: Request) -> float:
    def apart(weight: float, first: float, second: float) -> float:
        return weight * abs(math.log(first / second))

    def stage(request: Request) -> int:
        return 3 if request.strategy.is_fsdp else request.strategy.zero_stage or 0

    def offloads(request: Request) -> list[str | None]:
        return [request.strategy.offload_device(what) for what in ("optimizer", "param")]

    return (
        apart(_SIZE, one.shape.parameters, other.shape.parameters)
        + apart(_RANKS, one.box.ranks, other.box.ranks)
        + apart(_TOKENS, one.micro_batch * one.sequence_length, other.micro_batch * other.sequence_length)
        + _STAGE * (stage(one) != stage(other))
        + _OFFLOAD * (offloads(one) != offloads(other))
        + _DEVICE * (one.box.device.name != other.box.device.name)
        + _CHECKPOINTING * (one.gradient_checkpointing != other.gradient_checkpointing)
    )


def nearest(request: Request, rows: Sequence[Measured], count: int = _SHOWN) -> list[Measured]:
    """Of those that arithmetic does not refuse and that no constant was fitted on."""
    usable = [
        row for row in rows
        if (row.step_s is not None or row.peak_bytes is not None) and row.use == "score" and impossible(row) is None
    ]  # fmt: skip
    return sorted(usable, key=lambda row: distance(request, row.request))[:count]


def told(request: Request) -> Iterator[str]:
    """In lines for the reader: published measurements, then this project's own. LoRA is held against LoRA alone, of
    which nothing published is here."""
    if not request.shape.lora_rank:
        yield from _published(request)
    try:
        from study.predictor.records import request_of
        from study.predictor.validation import own
    except ModuleNotFoundError:
        # Tables are read by pandas, which no prediction needs.
        return
    runs = [(run, request_of(run)) for run in own.runs().itertuples()]
    runs = [(run, there) for run, there in runs if bool(there.shape.lora_rank) == bool(request.shape.lora_rank)]
    for label, is_virtual in (("a virtual rank", True), ("processes without a GPU", False)):
        some = [(run, there) for run, there in runs if bool(run.virtual) is is_virtual]
        run, there = min(some, key=lambda one: distance(request, one[1]))
        found = {one.figure: one for one in own.compared_of(run)}
        said = [
            f"{name} of {one.measured / GIB:.3g} GiB where {one.predicted / GIB:.3g} is predicted ({one.error:+.1%})"
            for name, one in (("state", found[own.ALL_STATE]), ("traffic", found[own.SENT])) if one.measured > 1000
        ]  # fmt: skip
        what = f"{there.shape.name}{told_adapters(there.shape)}, {there.strategy.name} on {there.box.ranks} ranks"
        yield f"own record near here, {label}: {what}: {'; '.join(said)} (reports/{run.suite})"


def _published(request: Request) -> Iterator[str]:
    for row in nearest(request, published_rows()):
        said = []
        if row.peak_bytes is not None:
            peak = predicted_peak(row)
            error = peak / row.peak_bytes - 1
            said.append(f"{row.peak_bytes / GIB:.1f} GiB where {peak / GIB:.1f} is predicted ({error:+.0%})")
        if row.step_s is not None:
            step = predicted_step_s(row)
            said.append(f"{row.step_s:.3g} s a step where {step:.3g} is predicted ({step / row.step_s - 1:+.0%})")
        yield f"measured near here: {row.name}: {'; '.join(said)} ({row.url or row.source})"
