"""Rows of the benchmark: a published configuration each, with its inputs in plain columns and the measured figures."""

from __future__ import annotations

import collections
import csv
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from study.config.precisions import computing_type
from study.config.strategies import Strategy
from study.config.yaml_sections import load_package_yaml
from study.host.memory import GIB
from study.predictor.request import Request
from study.predictor.validation import Measurement, implausibility, published_entries, published_model, sources

FILE = Path(__file__).with_name("benchmark.yaml")
# Rows read until the day of benchmark.yaml were available when the predictor's rules were written, later rows were not.
Split = Literal["public", "later"]
SPLITS: tuple[Split, ...] = get_args(Split)
Engine = Literal["torch", "FSDP", "DeepSpeed"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
# Keys of a published row that are not inputs: measured figures, and keys of the validation.
_NO_INPUTS = {
    "tokens_per_s_per_gpu",
    "samples_per_s",
    "step_s",
    "mfu",
    "memory_gib",
    "memory_mib",
    "memory_bytes",
    "fits",
    "out_of_memory",
    "use",
    "use_memory",
    "url",
    "refuse",
    "quote",
    "read_on",
}
# Fields of the request that are inputs under the same name.
_REQUEST_FIELDS = (
    "precision",
    "pure",
    "autocast",
    "attention",
    "dropout",
    "compiled",
    "torch_gate",
    "loss_kernel",
    "keeps_outputs",
    "keeps_cache",
    "optimizer",
    "step_copies",
    "expandable_segments",
    "fsdp_version",
    "fsdp_whole_root",
    "fsdp_reduces_fp32",
    "sync_each_batch",
    "reentrant_units",
    "fsdp_mixed_units",
    "checkpoint_every",
    "adapters_in_16_bits",
    "lora_dropout",
    "quantized",
    "double_quantized",
)
_MEASURED = "measured_"
# Digits of the digest in an id.
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class BenchmarkQuestion:
    """A published configuration with its measured figures."""

    id: str
    source: str
    read_on: datetime.date
    split: Split
    # Of the page, or of the row on it.
    address: str
    # Title of the source, and the facts about all of its rows.
    title: str
    note: str
    # The page's own words of this row; empty if the note has them, or none are kept.
    quote: str
    kind: Literal["full", "offload", "adapters"]
    engine: Engine
    inputs: Mapping[str, Any]
    # Tokens of a GPU in an optimizer step.
    tokens_per_step: int
    # None: not measured.
    peak_gib: float | None
    step_s: float | None
    fits: bool | None
    measurement: Measurement

    @property
    def group(self) -> str:
        """The kind and the engine, by which scores are printed."""
        return f"{self.kind}, {self.engine}"

    @property
    def gpu_memory_gib(self) -> float:
        """The memory of a GPU that its driver shows."""
        return float(self.inputs["gpu_memory_gib"])

    @property
    def fitted(self) -> tuple[str, ...]:
        """The figures for which this row fitted a constant of `study predict`, or chose a rule."""
        uses = {"memory": self.measurement.use_memory, "time": self.measurement.use}
        return tuple(figure for figure, use in uses.items() if use != "score")

    def row(self) -> dict[str, Any]:
        """Return the columns of this row. Names of measured figures have a prefix, and stand last."""
        measured = {
            "peak_gib": self.peak_gib,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": None if self.step_s is None else self.tokens_per_step / self.step_s,
            "fits": self.fits,
        }
        return {
            "id": self.id,
            "source": self.source,
            "read_on": self.read_on.isoformat(),
            "split": self.split,
            "address": self.address,
            "title": self.title,
            "note": " ".join(self.note.split()),
            "quote": self.quote,
            "kind": self.kind,
            "engine": self.engine,
            **self.inputs,
            "study_predict_fitted": " ".join(self.fitted),
            **{f"{_MEASURED}{name}": value for name, value in measured.items()},
        }


def public_until() -> datetime.date:
    """Return the last day of the split `public`."""
    day: datetime.date = load_package_yaml(FILE.read_text(encoding="utf-8"))["public_until"]
    return day


def read_questions(split: Split | None = None) -> list[BenchmarkQuestion]:
    """Return the rows of one split, or of both, without rows that the validation rejects as impossible."""
    last_day = public_until()
    pages = {source["id"]: source for source in sources()}
    counts = collections.Counter[str]()
    questions = []
    for read_on, keys, measurement in published_entries():
        digest = _digest(keys)
        name = f"{measurement.source}-{digest}"
        counts[name] += 1
        if implausibility(measurement) is not None:
            continue
        # Some pages print two runs of one configuration.
        number = counts[name]
        unique = name if number == 1 else f"{name}-{number}"
        read_split: Split = "public" if read_on <= last_day else "later"
        questions.append(_question(unique, read_on, read_split, keys, measurement, pages[measurement.source]))
    return [question for question in questions if split in (None, question.split)]


def sharding_engine(strategy: Strategy) -> Engine:
    """Return which engine shards a strategy's state; torch for one that does not."""
    if strategy.is_fsdp:
        return "FSDP"
    return "torch" if strategy.zero_stage is None else "DeepSpeed"


def _digest(keys: Mapping[str, Any]) -> str:
    """Return a digest of a row's inputs, so that an answer is not scored against a row that was corrected since."""
    inputs = {name: value for name, value in keys.items() if name not in _NO_INPUTS}
    inputs["model"] = published_model(keys["model"])
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _question(
    name: str,
    read_on: datetime.date,
    split: Split,
    keys: Mapping[str, Any],
    measurement: Measurement,
    page: Mapping[str, str],
) -> BenchmarkQuestion:
    request = measurement.request
    strategy = request.strategy
    kind: Literal["full", "offload", "adapters"] = "full"
    if request.shape.lora_rank is not None:
        kind = "adapters"
    elif request.offloads:
        kind = "offload"
    return BenchmarkQuestion(
        id=name,
        source=measurement.source,
        read_on=read_on,
        split=split,
        address=measurement.url,
        title=page["title"],
        note=page["note"],
        quote=keys.get("quote", ""),
        kind=kind,
        engine=sharding_engine(strategy),
        inputs=_inputs(keys, request, measurement),
        tokens_per_step=request.micro_batch * request.accumulation * request.sequence_length,
        peak_gib=None if measurement.peak_bytes is None else measurement.peak_bytes / GIB,
        step_s=measurement.step_s,
        fits=measurement.fits,
        measurement=measurement,
    )


def _inputs(keys: Mapping[str, Any], request: Request, measurement: Measurement) -> dict[str, Any]:
    """Return the inputs of a configuration by this project's names, and the figures behind these names."""
    shape, box, strategy = request.shape, request.box, request.strategy
    device = box.device
    return {
        "model": keys["model"],
        "model_type": shape.model_type,
        "parameters": shape.parameters,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "inner": shape.inner,
        "heads": shape.heads,
        "key_value_heads": shape.key_value_heads,
        "vocabulary": shape.vocabulary,
        "gated": shape.gated,
        "tied": shape.tied,
        "gpu": device.name,
        "gpus": box.ranks,
        "nodes": box.nodes,
        "gpu_memory_gib": device.visible_gib,
        "gpu_bandwidth_gb_per_s": device.memory_bandwidth_gb_per_s,
        "gpu_tflops": device.peak_tflops[computing_type(request.precision)],
        "nvlink_gb_per_s": device.nvlink_gb_per_s,
        "network_gb_per_s": box.network_gb_per_s if box.nodes > 1 else None,
        "strategy": strategy.name,
        "zero_stage": strategy.zero_stage,
        # FSDP offloads both.
        "offload_optimizer": "cpu" if request.fsdp_offloads else strategy.offload_device("optimizer"),
        "offload_parameters": "cpu" if request.fsdp_offloads else strategy.offload_device("param"),
        "deepspeed_settings": " ".join(keys.get("override", ())),
        "sequence": request.sequence_length,
        "micro_batch": request.micro_batch,
        "accumulation": request.accumulation,
        "checkpointing": keys["checkpointing"],
        **{name: getattr(request, name) for name in _REQUEST_FIELDS},
        "lora_rank": shape.lora_rank,
        "lora_targets": " ".join(shape.lora_targets),
        # Memory of torch's tensors (allocated), of torch's pool (reserved), or of the process by nvidia-smi (device).
        "memory_kind": measurement.peak_kind,
        "context_mib": keys.get("context_mib"),
    }


def write_rows(questions: Iterable[BenchmarkQuestion], file: TextIO) -> None:
    """Write the rows as CSV; a field without a value is empty."""
    rows = [question.row() for question in questions]
    columns: Sequence[str] = list(rows[0]) if rows else ["id"]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _text(value) for name, value in row.items()})


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.7g}" if isinstance(value, float) else str(value)
