"""Measurements, the project's own and published ones, and what arithmetic says of each before it counts.

Keys of published.yaml: a group has `common` keys that each of its rows inherits. model, box, strategy, precision,
attention, sequence, micro_batch, accumulation and checkpointing make the request; `override` holds DeepSpeed's settings
as --engine_override takes them; dropout, compiled, fused_loss, chunked_loss, optimizer, step_copies, pure,
expandable_segments, checkpoint_every and autocast (false where FSDP alone computes in 16 bits) describe the page's
trainer, as Request does. `device` replaces figures of the box's device, network_gb_per_s its network. One of
tokens_per_s_per_gpu, samples_per_s (of all GPUs), step_s and mfu is the time; memory_gib, memory_mib or memory_bytes is
the memory, memory_kind what it counts, and context_mib the driver's memory that the page saw before any tensor. A row
with a time or with `fits` did fit, one with out_of_memory did not, and one with `refuse` does not count, for that
reason. With `use: fit` it scores no time, with `use_memory: fit` no memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError
from study.config.names import override
from study.config.strategies import read_strategy
from study.config.yaml_sections import read_own
from study.host.memory import GIB
from study.predictor.activations import model_flops
from study.predictor.hardware import box_of
from study.predictor.memory import EVALUATION_BYTES, predict_memory
from study.predictor.request import Request
from study.predictor.shape import lora_text, model_shape
from study.predictor.state import state_of
from study.predictor.time import FITTED, Constants, device_bytes, predict_time, usable_bytes

# What a figure of memory counts: torch's tensors, torch's pool, all that the driver sees of the process; or, without a
# GPU, the process itself: one that kept what it freed, or one that gave it back.
Kind = Literal["allocated", "reserved", "device", "resident", "resident_returned"]


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
    # None where the device's limit was not tried.
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
    """Return why arithmetic refuses a row; None where it may be true."""
    request = row.request
    if row.refused:
        return row.refused
    if row.peak_bytes is not None:
        state = state_of(request, waiting=False)
        least = state.params_device + state.optimizer_device
        if row.peak_bytes < least:
            return f"{row.peak_bytes / GIB:.1f} GiB, and weights and optimizer alone are {least / GIB:.1f}"
    peak = request.box.device.peak_tflops.get(request.precision.removesuffix("-engine"))
    if row.step_s is not None and peak is not None:
        rate = model_flops(request) / row.step_s / 1e12
        if rate > peak:
            return f"{rate:.0f} TFLOP/s, and the device has {peak:g}"
    return None


def predicted_peak(row: Measured, kind: Kind | None = None) -> float:
    """Return the predicted figure of the row's kind, or of another one."""
    memory, kind = predict_memory(_recomputing(row)), kind or row.peak_kind
    if kind == "allocated":
        return memory.peak_allocated.value
    if kind == "reserved":
        return memory.pool_with_room
    if kind == "device":
        return memory.pool_with_room + (row.context_bytes or memory.device_parts["context"])
    tensors = memory.peak_reserved.value if kind == "resident" else memory.peak_allocated.value
    if row.evaluated == "last":
        tensors = max(tensors, memory.steady_allocated.value + EVALUATION_BYTES)
    return memory.host_parts["rank"] + tensors + (EVALUATION_BYTES if row.evaluated == "between" else 0.0)


def _recomputing(row: Measured) -> Request:
    if not row.selective:
        return row.request
    return dataclasses.replace(row.request, gradient_checkpointing=True, keeps_products=True)


def predicted_fit(row: Measured) -> bool:
    return device_bytes(predict_memory(_recomputing(row))) <= usable_bytes(row.request.box)


def predicted_step_s(row: Measured, constants: Constants = FITTED) -> float:
    """Return seconds; what is recomputed in part is halfway between all and nothing."""
    recomputes = (True, False) if row.selective else (row.request.gradient_checkpointing,)
    requests = [dataclasses.replace(row.request, gradient_checkpointing=each) for each in recomputes]
    return statistics.mean(predict_time(request, constants=constants).step_s.value for request in requests)


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
        known = self.predicted_peak_gib is not None and self.peak_gib
        return self.predicted_peak_gib / self.peak_gib - 1 if known else None  # type: ignore[operator]

    @property
    def step_error(self) -> float | None:
        known = self.predicted_step_s is not None and self.step_s
        return self.predicted_step_s / self.step_s - 1 if known else None  # type: ignore[operator]


def score(row: Measured) -> Scored:
    request, refused = row.request, impossible(row)
    has_peak, has_step = (refused is None and figure is not None for figure in (row.peak_bytes, row.step_s))
    has_limit = refused is None and row.fits is not None and bool(request.box.device.memory_gib)
    state = state_of(request)
    return Scored(
        source=row.source, name=row.name, strategy=request.strategy.name, offloads=request.strategy.offloads,
        precision=request.precision, device=request.box.device.name, ranks=request.box.ranks, use=row.use,
        use_memory=row.use_memory, refused=refused, peak_kind=row.peak_kind,
        peak_gib=None if row.peak_bytes is None else row.peak_bytes / GIB,
        predicted_peak_gib=predicted_peak(row) / GIB if has_peak else None,
        state_gib=(state.params_device + state.optimizer_device) / GIB if has_peak else None,
        step_s=row.step_s, predicted_step_s=predicted_step_s(row) if has_step else None,
        fits=row.fits, predicted_fits=predicted_fit(row) if has_limit else None, url=row.url,
    )  # fmt: skip


FILE = Path(__file__).with_name("published.yaml")
# Of the trainer, by the names that Request has for them.
_OF_TRAINER = (
    "attention", "autocast", "fused_loss", "dropout", "compiled", "optimizer", "step_copies", "pure", "chunked_loss",
    "expandable_segments", "checkpoint_every",
)  # fmt: skip
_KEYS = {
    "model", "box", "strategy", "precision", "sequence", "micro_batch", "accumulation", "checkpointing", "override",
    "device", "network_gb_per_s", "tokens_per_s_per_gpu", "samples_per_s", "step_s", "mfu", "memory_gib", "memory_mib",
    "memory_bytes", "memory_kind", "context_mib", "fits", "out_of_memory", "use", "use_memory", "url", "refuse",
    *_OF_TRAINER,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Source:
    id: str
    title: str
    url: str
    note: str = ""


def sources() -> list[Source]:
    return [Source(group["id"], group["title"], group["url"], group.get("note", "")) for group in _document()["groups"]]


def refused_sources() -> list[dict[str, str]]:
    """Return the sources that were read and are not used, and why."""
    return list(_document()["refused"])


def published_rows() -> list[Measured]:
    document = _document()
    return [
        _measured(group, number, {"url": group["url"], **group["common"], **row}, document["models"])
        for group in document["groups"]
        for number, row in enumerate(group["rows"], 1)
    ]


@functools.cache
def _document() -> dict[str, Any]:
    return dict(read_own(FILE.read_text(encoding="utf-8")))


def _measured(group: Mapping[str, Any], number: int, row: Mapping[str, Any], models: Mapping[str, str]) -> Measured:
    if unknown := sorted(row.keys() - _KEYS):
        place = f"{FILE.name}, {group['id']}, row {number}"
        raise UserError(f"{place} has the unknown key {unknown[0]!r}", f"use {', '.join(sorted(_KEYS))}")
    box, strategy = box_of(str(row["box"])), read_strategy(row["strategy"])
    box = dataclasses.replace(
        box, device=dataclasses.replace(box.device, **row.get("device", {})),
        network_gb_per_s=row.get("network_gb_per_s", box.network_gb_per_s),
    )  # fmt: skip
    if "override" in row:
        assert strategy.deepspeed is not None
        strategy = dataclasses.replace(strategy, deepspeed=override(strategy.deepspeed, row["override"]))
    request = Request(
        shape=model_shape(models[row["model"]]), strategy=strategy, box=box, sequence_length=row["sequence"],
        micro_batch=row["micro_batch"], accumulation=row["accumulation"], precision=row["precision"],
        gradient_checkpointing=row["checkpointing"] is True, **{name: row[name] for name in _OF_TRAINER if name in row},
    )  # fmt: skip
    units = {"memory_gib": GIB, "memory_mib": 2**20, "memory_bytes": 1.0}
    selective = row["checkpointing"] == "selective"
    words = [
        f"{row['model']} {row['box']} {row['strategy']} {request.micro_batch}x{request.sequence_length}",
        *[request.precision] * (request.precision != "bf16"), *["compiled"] * bool(row.get("compiled")),
        *["selective" if selective else "checkpointing"] * bool(row["checkpointing"]),
    ]  # fmt: skip
    return Measured(
        source=group["id"], name=", ".join(words), request=request,
        peak_bytes=next((float(row[name]) * unit for name, unit in units.items() if name in row), None),
        peak_kind=row.get("memory_kind", "allocated"), step_s=_step_s(row, request), fits=not row.get("out_of_memory"),
        use=row.get("use", "score"), use_memory=row.get("use_memory", "score"), selective=selective,
        context_bytes=row["context_mib"] * 2**20 if "context_mib" in row else None, url=row["url"],
        refused=row.get("refuse"),
    )  # fmt: skip


def _step_s(row: Mapping[str, Any], request: Request) -> float | None:
    sequences = request.micro_batch * request.accumulation
    if "tokens_per_s_per_gpu" in row:
        return float(sequences * request.sequence_length / row["tokens_per_s_per_gpu"])
    if "samples_per_s" in row:
        return float(sequences * request.box.ranks / row["samples_per_s"])
    if "mfu" in row:
        peak = request.box.device.peak_tflops[request.precision.removesuffix("-engine")]
        assert peak is not None
        return model_flops(request) / (row["mfu"] * peak * 1e12)
    return row.get("step_s")


def distance(one: Request, other: Request) -> float:
    """How different two requests are: a model e times as large counts as much as another stage of ZeRO."""

    def ratio(first: float, second: float) -> float:
        return abs(math.log(first / second))

    def stage(request: Request) -> int:
        return 3 if request.strategy.is_fsdp else request.strategy.zero_stage or 0

    def offloads(request: Request) -> list[str | None]:
        return [request.strategy.offload_device(what) for what in ("optimizer", "param")]

    return (
        ratio(one.shape.parameters, other.shape.parameters)
        + 0.5 * ratio(one.box.ranks, other.box.ranks)
        + 0.3 * ratio(one.micro_batch * one.sequence_length, other.micro_batch * other.sequence_length)
        + (stage(one) != stage(other))
        + (offloads(one) != offloads(other))
        + (one.box.device.name != other.box.device.name)
        + 0.3 * (one.gradient_checkpointing != other.gradient_checkpointing)
    )


def nearest(request: Request, rows: Sequence[Measured], count: int = 3) -> list[Measured]:
    """Return the nearest rows that arithmetic does not refuse and that no constant was fitted on."""
    usable = [
        row for row in rows
        if (row.step_s is not None or row.peak_bytes is not None) and row.use == "score" and impossible(row) is None
    ]  # fmt: skip
    return sorted(usable, key=lambda row: distance(request, row.request))[:count]


def describe_nearest(request: Request) -> Iterator[str]:
    """Lines for the reader: published measurements, then this project's own. A request with LoRA has own ones with LoRA
    alone, since none is published here."""
    for row in nearest(request, published_rows()) if not request.shape.lora_rank else []:
        found = []
        if row.peak_bytes is not None:
            peak = predicted_peak(row)
            error = peak / row.peak_bytes - 1
            found.append(f"{row.peak_bytes / GIB:.1f} GiB where {peak / GIB:.1f} is predicted ({error:+.0%})")
        if row.step_s is not None:
            step = predicted_step_s(row)
            found.append(f"{row.step_s:.3g} s a step where {step:.3g} is predicted ({step / row.step_s - 1:+.0%})")
        yield f"measured near here: {row.name}: {'; '.join(found)} ({row.url or row.source})"
    try:
        from study.predictor import records
    except ModuleNotFoundError:
        # Tables are read by pandas, which no prediction needs.
        return
    for label, is_virtual in (("a virtual rank", True), ("processes without a GPU", False)):
        run, there = min(
            (
                (run, there) for run, there in records.ended_runs()
                if bool(run.virtual) is is_virtual and bool(there.shape.lora_rank) == bool(request.shape.lora_rank)
            ),
            key=lambda pair: distance(request, pair[1]),
        )  # fmt: skip
        figures = {one.figure: one for one in records.compared_of(run)}
        found = [
            f"{name} of {one.measured / GIB:.3g} GiB where {one.predicted / GIB:.3g} is predicted ({one.error:+.1%})"
            for name, one in (("state", figures[records.ALL_STATE]), ("traffic", figures[records.SENT]))
            if one.measured > 1000
        ]
        what = f"{there.shape.name}{lora_text(there.shape)}, {there.strategy.name} on {there.box.ranks} ranks"
        yield f"own record near here, {label}: {what}: {'; '.join(found)} (reports/{run.suite})"
