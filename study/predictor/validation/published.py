"""The rows of published.yaml as measurements.

A group has `common` keys that each of its rows takes over. model, box, strategy, precision, attention, sequence,
micro_batch, accumulation and checkpointing make the request; `override` are DeepSpeed's settings as --engine_override
takes them; dropout, compiled, fused_loss, chunked_loss, optimizer, step_copies, pure, expandable_segments,
checkpoint_every and autocast (false where FSDP alone computes in 16 bits) are of the page's trainer, as Request says
them. `device` replaces figures of the box's device, network_gb_per_s its network. One of tokens_per_s_per_gpu,
samples_per_s (of all GPUs), step_s and mfu is the time; memory_gib, memory_mib or memory_bytes is the memory,
memory_kind what it counts, and context_mib what the page saw of the driver before there was a tensor. A row with a time
or with `fits` did fit, one with out_of_memory did not, and one with `refuse` does not count, for that reason. With
`use: fit` it scores no time, with `use_memory: fit` no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.config.names import override
from study.config.strategies import read_strategy
from study.config.yaml_sections import read_own
from study.host.memory import GIB
from study.predictor.activations import model_flops
from study.predictor.boxes import box_of
from study.predictor.request import Request
from study.predictor.shape import model_shape
from study.predictor.validation.measured import Measured

FILE = Path(__file__).with_name("published.yaml")
# Of the trainer, by the names that Request has for them.
_OF_TRAINER = ("optimizer", "step_copies", "pure", "chunked_loss", "expandable_segments", "checkpoint_every")
_KEYS = {
    "model", "box", "strategy", "precision", "attention", "sequence", "micro_batch", "accumulation", "checkpointing",
    "override", "device", "network_gb_per_s", "tokens_per_s_per_gpu", "samples_per_s", "step_s", "mfu", "memory_gib",
    "memory_mib", "memory_bytes", "memory_kind", "context_mib", "fits", "out_of_memory", "use", "use_memory",
    "compiled", "url", "refuse", "autocast", "fused_loss", "dropout", *_OF_TRAINER,
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
    """What was read and is not used, and why."""
    return list(_document()["refused"])


def published_rows() -> list[Measured]:
    document = _document()
    return [
        _measured(group, number, {"url": group["url"], **group["common"], **row}, document["models"])
        for group in document["groups"]
        for number, row in enumerate(group["rows"], 1)
    ]


def _document() -> dict[str, Any]:
    return dict(read_own(FILE.read_text(encoding="utf-8")))


def _measured(group: Mapping[str, Any], number: int, row: Mapping[str, Any], models: Mapping[str, str]) -> Measured:
    place = f"{FILE.name}, {group['id']}, row {number}"
    if unknown := sorted(row.keys() - _KEYS):
        raise UserError(f"{place} has the unknown key {unknown[0]!r}", f"use {', '.join(sorted(_KEYS))}")
    request = _request(row, models[row["model"]])
    memory = row["memory_gib"] * GIB if "memory_gib" in row else None
    if "memory_mib" in row:
        memory = row["memory_mib"] * 2**20
    if "memory_bytes" in row:
        memory = float(row["memory_bytes"])
    step_s = _step_s(row, request)
    selective = row["checkpointing"] == "selective"
    words = [
        *[request.precision] * (request.precision != "bf16"),
        *["compiled"] * bool(row.get("compiled")),
        *["selective" if selective else "checkpointing"] * bool(row["checkpointing"]),
    ]
    name = f"{row['model']} {row['box']} {row['strategy']} {request.micro_batch}x{request.sequence_length}"
    return Measured(
        source=group["id"],
        name=", ".join([name, *words]),
        request=request,
        peak_bytes=memory,
        peak_kind=row.get("memory_kind", "allocated"),
        step_s=step_s,
        fits=not row.get("out_of_memory"),
        use=row.get("use", "score"),
        use_memory=row.get("use_memory", "score"),
        selective=selective,
        context_bytes=row["context_mib"] * 2**20 if "context_mib" in row else None,
        url=row["url"],
        refused=row.get("refuse"),
    )


def _request(row: Mapping[str, Any], model: str) -> Request:
    box = box_of(str(row["box"]))
    box = dataclasses.replace(
        box,
        device=dataclasses.replace(box.device, **row.get("device", {})),
        network_gb_per_s=row.get("network_gb_per_s", box.network_gb_per_s),
    )
    strategy = read_strategy(row["strategy"])
    if "override" in row:
        assert strategy.deepspeed is not None
        strategy = dataclasses.replace(strategy, deepspeed=override(strategy.deepspeed, row["override"]))
    return Request(
        shape=model_shape(model),
        strategy=strategy,
        box=box,
        sequence_length=row["sequence"],
        micro_batch=row["micro_batch"],
        accumulation=row["accumulation"],
        precision=row["precision"],
        gradient_checkpointing=row["checkpointing"] is True,
        attention=row["attention"],
        autocast=row.get("autocast", True),
        fused_loss=row.get("fused_loss", False),
        dropout=row.get("dropout", False),
        compiled=row.get("compiled", False),
        **{name: row[name] for name in _OF_TRAINER if name in row},
    )


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
