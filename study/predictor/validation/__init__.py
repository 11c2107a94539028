"""Measurements that validate predictions, published and of this project, and checks that they are possible.

Keys of published.yaml: a group has `common` keys that each of its rows inherits; a row was read on its `read_on`, on
that of its group, or on that of the file. `quote` has the page's own words on a row, if its group's note has not.
model, box, strategy, precision, attention, sequence, micro_batch, accumulation and checkpointing make the request;
`override` holds DeepSpeed's settings as --engine_override takes them; dropout, compiled, torch_gate, loss_kernel,
optimizer, step_copies, pure, expandable_segments, checkpoint_every, fsdp_version, fsdp_whole_root, fsdp_reduces_fp32,
sync_each_batch and autocast (false where FSDP alone computes in 16 bits) describe the page's trainer, as in Request,
and so do keeps_outputs, keeps_cache, adapters_in_16_bits, fsdp_offloads, reentrant_units, fsdp_mixed_units,
lora_dropout, quantized and double_quantized; lora_rank and lora_targets make the shape's adapters. `device` replaces
figures of the box's device, network_gb_per_s its network. One of tokens_per_s_per_gpu, samples_per_s (of all GPUs),
step_s and mfu is the time; memory_gib, memory_mib or memory_bytes is the memory, memory_kind its kind, and context_mib
the driver's memory that the page reports before any tensor. A row with a time or with `fits` did fit, one with
out_of_memory did not, and one with `refuse` is excluded for that reason. A row by which a constant was fitted or a rule
found is not held out: with `use: fit` (of a constant) or `use: rule` it scores no time, with `use_memory: fit` no
memory.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from study.config.precisions import computing_type
from study.config.strategies import read_strategy
from study.config.strategy_names import apply_overrides
from study.config.yaml_sections import load_package_yaml
from study.host.memory import GIB
from study.predictor.calibration import find_implausibility, peak_of_kind
from study.predictor.constants import FITTED, Constants
from study.predictor.hardware import to_box
from study.predictor.intervals import kind_of_training
from study.predictor.memory import EVALUATION_BYTES, predict_memory
from study.predictor.micro_batch import model_flops
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.shape import with_adapters
from study.predictor.state import predict_state
from study.predictor.time import device_bytes, predict_time, usable_bytes

# Kinds of memory figures: torch's tensors, torch's reserved memory, the process's memory in the driver; or, without a
# GPU, the resident memory of the process, with freed blocks retained or returned.
Kind = Literal["allocated", "reserved", "device", "resident", "resident_returned"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measured peak or step time, and the request that it belongs to."""

    # Id of a group of rows, such as llm-foundry-h100, or `own`.
    source: str
    name: str
    request: Request
    peak_bytes: float | None = None
    peak_kind: Kind = "allocated"
    # Of a process: when it imported the modules of evaluations, which stay loaded in later steps. Records from before
    # 2026-11-21 include the memory after the last evaluation, too.
    evaluated: Literal["never", "between", "last"] = "never"
    step_s: float | None = None
    # None if the device's limit was not tested.
    fits: bool | None = None
    use: Literal["fit", "rule", "score"] = "score"
    # The same for memory: a choice of the model was made with knowledge of this row.
    use_memory: Literal["fit", "score"] = "score"
    # Selective recomputation within each layer, which a request cannot express.
    selective: bool = False
    # Driver memory of a process without tensors, if its page reports it.
    context_bytes: float | None = None
    url: str = ""
    # Reason for a manual exclusion.
    refused: str | None = None


def implausibility(row: Measurement) -> str | None:
    """Return why a measurement is excluded or impossible; None if it is plausible."""
    return row.refused or find_implausibility(row.request, row.step_s, row.peak_bytes)


def predicted_peak(row: Measurement) -> float:
    """Return the predicted peak in bytes, of the row's kind."""
    memory, kind = predict_memory(_recomputing(row)), row.peak_kind
    if kind in ("allocated", "reserved", "device"):
        return peak_of_kind(memory, kind, row.context_bytes)
    tensors = memory.peak_reserved.value if kind == "resident" else memory.peak_allocated.value
    if row.evaluated == "last":
        tensors = max(tensors, memory.steady_allocated.value + EVALUATION_BYTES)
    return memory.host_parts["rank"] + tensors + (EVALUATION_BYTES if row.evaluated == "between" else 0.0)


def predicted_state(row: Measurement) -> float:
    """Return the certain part of a device's peak: weights and optimizer."""
    state = predict_state(row.request)
    return state.params_device + state.optimizer_device


def _recomputing(row: Measurement) -> Request:
    """Return the row's request, with checkpointing if its recomputation is selective."""
    recomputes = row.selective or row.request.gradient_checkpointing
    return dataclasses.replace(row.request, gradient_checkpointing=recomputes, saves_matmul_outputs=row.selective)


def predicted_step_s(row: Measurement, constants: Constants = FITTED) -> float:
    """Return predicted seconds; selective recomputation is the mean of full and none."""
    recomputes = (True, False) if row.selective else (row.request.gradient_checkpointing,)
    requests = [dataclasses.replace(row.request, gradient_checkpointing=recomputed) for recomputed in recomputes]
    return statistics.mean(predict_time(request, constants=constants).step_s.value for request in requests)


def score(row: Measurement) -> dict[str, Any]:
    """Return a measurement with its predicted figures and their errors, as a row of the validation table; figures of an
    impossible one are not predicted."""
    request, refused = row.request, implausibility(row)
    is_peak, is_step = (refused is None and figure is not None for figure in (row.peak_bytes, row.step_s))
    is_judged = refused is None and row.fits is not None and bool(request.box.device.memory_gib)
    judged_fit = device_bytes(predict_memory(_recomputing(row))) <= usable_bytes(request.box) if is_judged else None
    peak_gib = None if row.peak_bytes is None else row.peak_bytes / GIB
    predicted_gib, step_s = predicted_peak(row) / GIB if is_peak else None, predicted_step_s(row) if is_step else None
    return {
        "source": row.source,
        "name": row.name,
        "strategy": request.strategy.name,
        "offloads": request.offloads,
        "adapters": bool(request.shape.lora_rank),
        "kind": kind_of_training(request),
        "precision": request.precision,
        "device": request.box.device.name,
        "ranks": request.box.ranks,
        "use": row.use,
        "use_memory": row.use_memory,
        "refused": refused,
        "peak_kind": row.peak_kind,
        "peak_gib": peak_gib,
        "predicted_peak_gib": predicted_gib,
        # The exact part of it: weights and optimizer.
        "state_gib": predicted_state(row) / GIB if is_peak else None,
        "step_s": row.step_s,
        "predicted_step_s": step_s,
        "fits": row.fits,
        "predicted_fits": judged_fit,
        "url": row.url,
        "peak_error": predicted_gib / peak_gib - 1 if predicted_gib is not None and peak_gib else None,
        "step_error": step_s / row.step_s - 1 if step_s is not None and row.step_s else None,
    }


FILE = Path(__file__).with_name("published.yaml")
# Of the largest errors, by figure and source.
CAUSES = FILE.with_name("causes.yaml")
# Keys that are not fields of Request under the same name and with the same value.
_CONVERTED = {
    "model", "box", "strategy", "sequence", "checkpointing", "override", "device", "network_gb_per_s",
    "tokens_per_s_per_gpu", "samples_per_s", "step_s", "mfu", "memory_gib", "memory_mib", "memory_bytes", "memory_kind",
    "context_mib", "lora_rank", "lora_targets", "fits", "out_of_memory", "use", "use_memory", "url", "refuse", "quote",
    "read_on",
}  # fmt: skip


def sources() -> list[dict[str, str]]:
    """Return the pages whose measurements are used: id, title, url and note."""
    return [{key: group.get(key, "") for key in ("note", "id", "title", "url")} for group in _document()["groups"]]


def refused_sources() -> list[dict[str, str]]:
    """Return the pages that were read but not used, with reasons."""
    return list(_document()["refused"])


def published_rows() -> list[Measurement]:
    return [measurement for _, _, measurement in published_entries()]


def published_entries(
    is_wanted: Callable[[Mapping[str, Any]], bool] = lambda keys: True,
) -> Iterator[tuple[datetime.date, dict[str, Any], Measurement]]:
    """Yield each published row that is wanted by its keys: the day on which it was read, its keys as in the file, and
    the measurement."""
    document = _document()
    for number, group in enumerate(document["groups"]):
        for place in range(len(group["rows"])):
            keys = _keys(number, place)
            if is_wanted(keys):
                group_day = group.get("read_on", document["read_on"])
                yield keys.get("read_on", group_day), keys, _measurement(number, place)


def _keys(number: int, place: int) -> dict[str, Any]:
    """Return the keys of a row of a group."""
    group = _document()["groups"][number]
    # A group of single threads has no page: its rows name theirs.
    page = {"url": group["url"]} if "url" in group else {}
    return {**page, **group["common"], **group["rows"][place]}


# All rows take a second, and a process may ask for them again: the calculator's server, and tests.
@functools.cache
def _measurement(number: int, place: int) -> Measurement:
    return _measured(_document()["groups"][number]["id"], _keys(number, place))


def published_model(name: str) -> str:
    """Return what stands for a model of published.yaml, as --model_name_or_path takes it."""
    return str(_document()["models"][name])


@functools.cache
def _document() -> dict[str, Any]:
    return dict(load_package_yaml(FILE.read_text(encoding="utf-8")))


def _measured(source: str, row: Mapping[str, Any]) -> Measurement:
    box, strategy = to_box(str(row["box"])), read_strategy(row["strategy"])
    box = dataclasses.replace(
        box,
        device=dataclasses.replace(box.device, **row.get("device", {})),
        network_gb_per_s=row.get("network_gb_per_s", box.network_gb_per_s),
    )
    if "override" in row:
        assert strategy.deepspeed is not None
        strategy = dataclasses.replace(strategy, deepspeed=apply_overrides(strategy.deepspeed, row["override"]))
    shape = model_shape(published_model(row["model"]))
    if "lora_rank" in row:
        shape = with_adapters(shape, row["lora_rank"], tuple(row["lora_targets"]))
    request = Request(
        shape=shape,
        strategy=strategy,
        box=box,
        sequence_length=row["sequence"],
        gradient_checkpointing=row["checkpointing"] is True,
        **{name: value for name, value in row.items() if name not in _CONVERTED},
    )
    units = {"memory_gib": GIB, "memory_mib": 2**20, "memory_bytes": 1.0}
    selective = row["checkpointing"] == "selective"
    words = [
        f"{row['model']} {row['box']} {row['strategy']} {request.micro_batch}x{request.sequence_length}",
        *["QLoRA" if request.quantized else "LoRA"] * bool(shape.lora_rank),
        *[request.precision] * (request.precision != "bf16"),
        *["compiled"] * bool(row.get("compiled")),
        *["selective" if selective else "checkpointing"] * bool(row["checkpointing"]),
    ]
    return Measurement(
        source=source,
        name=", ".join(words),
        request=request,
        peak_bytes=next((float(row[name]) * unit for name, unit in units.items() if name in row), None),
        peak_kind=row.get("memory_kind", "allocated"),
        step_s=_step_s(row, request),
        fits=not row.get("out_of_memory"),
        use=row.get("use", "score"),
        use_memory=row.get("use_memory", "score"),
        selective=selective,
        context_bytes=row["context_mib"] * 2**20 if "context_mib" in row else None,
        url=row["url"],
        refused=row.get("refuse"),
    )


def _step_s(row: Mapping[str, Any], request: Request) -> float | None:
    """Return a row's seconds per optimizer step, converted from its unit; None if it has no time."""
    sequences = request.micro_batch * request.accumulation
    if "tokens_per_s_per_gpu" in row:
        tokens = sequences * request.sequence_length / request.tensor_ranks
        return float(tokens / row["tokens_per_s_per_gpu"])
    if "samples_per_s" in row:
        return float(sequences * request.data_ranks / row["samples_per_s"])
    if "mfu" in row:
        peak = request.box.device.peak_tflops[computing_type(request.precision)]
        assert peak is not None
        return float(model_flops(request) / (row["mfu"] * peak * 1e12))
    seconds: float | None = row.get("step_s")
    return seconds
