"""Rows that receipts gave the open benchmark, and their predicted peak and step. It imports no torch.

The columns are those of published measurements (docs/add-results.md); reports/receipts/ has one file for each row.
study/receipt/contribution.py makes and checks them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

import pydantic

from study.config.errors import UserError
from study.config.flags import Precision
from study.config.places import REPOSITORY
from study.config.printing import TextTable
from study.config.strategies import DEFAULT_RANKS_PER_NODE, STRATEGY_NAMES, WITH_GROUPS, read_strategy
from study.host.folders import resolve_path
from study.host.memory import GIB
from study.predictor.hardware import box_from_device_name
from study.predictor.memory import predict_memory
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.shape import ModelShape, with_adapters
from study.predictor.time import predict_time
from study.records.directory import read_json
from study.records.schema import RecordError

FOLDER = "reports/receipts"
# Names of classes, of the study's and transformers' tables, and of GPUs: no path and no address is among them.
ClassName = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,59}$")]
Word = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
DeviceName = Annotated[str, pydantic.Field(pattern=r"^[A-Z][A-Za-z0-9 -]{0,59}$")]
Version = Annotated[str, pydantic.Field(pattern=r"^[0-9][0-9A-Za-z.]{0,29}(\+(cpu|cu[0-9]{2,4}|rocm[0-9.]{1,8}))?$")]
Offload = Literal["cpu", "nvme"]
# DeepSpeed, two versions of FSDP, DDP, or a model on one rank.
Framework = Literal["deepspeed", "fsdp2", "fsdp1", "ddp", "none"]
ADAM = ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam")
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FILE_NAME = re.compile(r"[a-z0-9._-]{1,120}\.json")
_MAX_ROW_BYTES = 8192
# Lengths of learned position embeddings, which a row does not have.
_POSITIONS = tuple(2**power for power in range(6, 18))


class BenchmarkRow(pydantic.BaseModel):
    """One measured configuration; bytes and time are those of one rank."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    version: Literal[1] = 1
    date: Annotated[str, pydantic.Field(pattern=r"^20[0-9]{2}-[01][0-9]-[0-3][0-9]$")]
    model: ClassName
    params: pydantic.PositiveInt
    trained_params: pydantic.PositiveInt
    # None: the model has no config of transformers.
    model_type: Word | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    framework: Framework
    strategy: Word | None = None
    zero_stage: Literal[0, 1, 2, 3] | None = None
    gpus: pydantic.PositiveInt
    gpu_type: DeviceName
    micro_batch: pydantic.PositiveInt
    accumulation: pydantic.PositiveInt
    seq_length: pydantic.PositiveInt
    # Type of the matrix products, and of the weights.
    precision: Literal["float32", "bfloat16", "float16"]
    weights: Literal["float32", "bfloat16", "float16"]
    optimizer: ClassName | None = None
    checkpointing: bool
    compiled: bool
    offload_optimizer: Offload | None = None
    offload_params: Offload | None = None
    lora_rank: pydantic.PositiveInt | None = None
    attention: Word | None = None
    # Tensors at the peak; parameters and optimizer of a rank in all places, and on the GPU.
    peak_gib: pydantic.PositiveFloat
    state_gib: pydantic.PositiveFloat
    state_on_gpu_gib: pydantic.NonNegativeFloat
    step_s: pydantic.PositiveFloat
    tokens_per_s_per_gpu: pydantic.PositiveFloat
    tflop_per_step: pydantic.PositiveFloat | None = None
    mfu: pydantic.PositiveFloat | None = None
    ring_gib: pydantic.NonNegativeFloat | None = None
    packages: dict[Literal["torch", "deepspeed", "accelerate", "transformers", "peft", "trl", "zero-study"], Version]


def read_row(name: str) -> BenchmarkRow:
    """Return the row in a file; UserError if it is none."""
    path, fix = resolve_path(name), "write it with `study receipt receipt.json --contribute --output FILE`"
    if not _FILE_NAME.fullmatch(path.name):
        raise UserError(f"{name} has a name with other characters than a-z, 0-9, dots and dashes", fix)
    if path.is_file() and path.stat().st_size > _MAX_ROW_BYTES:
        raise UserError(f"{name} is larger than {_MAX_ROW_BYTES:,} bytes", fix)
    try:
        return BenchmarkRow.model_validate(read_json(path))
    except RecordError as error:
        raise UserError(str(error), fix) from None
    except pydantic.ValidationError as error:
        raise UserError(f"{name} is not a row: {first_problem(error)}", fix) from None


def first_problem(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


@dataclasses.dataclass(frozen=True)
class PredictedRow:
    """A contributed row with its predicted figures, or why the predictor does not take it."""

    file: str
    row: BenchmarkRow
    peak_gib: float | None = None
    step_s: float | None = None
    missing: str | None = None


def predict_contributed() -> list[PredictedRow]:
    """Return all rows in their order of files; none outside of a checkout."""
    return [_predict(path.name, read_row(str(path))) for path in sorted((REPOSITORY / FOLDER).glob("*.json"))]


def _predict(file: str, row: BenchmarkRow) -> PredictedRow:
    try:
        request = request_of_row(row)
        memory = predict_memory(request)
        if memory.missing:
            raise UserError(f"the predictor does not support {memory.missing}", "leave it out")
    except UserError as refusal:
        return PredictedRow(file, row, missing=refusal.problem)
    step_s = predict_time(request, memory).step_s.value
    return PredictedRow(file, row, memory.peak_allocated.value / GIB, step_s)


def request_of_row(row: BenchmarkRow) -> Request:
    """Return the configuration of a row, with the study's file of its strategy; UserError if it is not predicted."""
    if row.strategy not in STRATEGY_NAMES or row.strategy in WITH_GROUPS:
        raise UserError("no strategy of the study has its settings", "leave it out")
    if row.optimizer is not None and row.optimizer not in ADAM:
        raise UserError(f"the predictor does not support {row.optimizer}", "leave it out")
    nodes = max(1, row.gpus // DEFAULT_RANKS_PER_NODE)
    precision, weights = _PRECISIONS[row.precision], _PRECISIONS[row.weights]
    in_16_bits = weights != "fp32"
    return Request(
        shape=_shape(row),
        strategy=read_strategy(row.strategy),
        box=box_from_device_name(row.gpu_type, row.gpus, nodes if row.gpus % nodes == 0 else 1),
        sequence_length=row.seq_length,
        micro_batch=row.micro_batch,
        accumulation=row.accumulation,
        precision=cast(Precision, f"{weights}-engine" if in_16_bits else precision),
        pure=in_16_bits and row.framework != "deepspeed",
        gradient_checkpointing=row.checkpointing,
        attention=cast(Any, row.attention if row.attention in ("eager", "sdpa") else "sdpa"),
        compiled=row.compiled,
        fsdp_version=1 if row.framework == "fsdp1" else 2,
    )


def _shape(row: BenchmarkRow) -> ModelShape:
    """Return the model with the sizes and the numbers of parameters of a row; UserError if none has both."""
    sizes = {
        "type": row.model_type,
        "layers": row.layers,
        "hidden": row.hidden,
        "heads": row.heads,
        "key_value_heads": row.kv_heads,
        "inner": row.intermediate,
        "vocabulary": row.vocab,
    }
    if None not in sizes.values():
        text = ",".join(f"{size}={value}" for size, value in sizes.items())
        for tied in (1, 0):
            for positions in (row.seq_length, *_POSITIONS):
                shape = model_shape(f"{text},positions={positions},tied={tied}")
                if row.lora_rank is not None:
                    shape = with_adapters(shape, row.lora_rank)
                if (shape.parameters, shape.trained_parameters) == (row.params, row.trained_params):
                    return shape
    raise UserError(f"the predictor has no {row.model} of {row.params:,} parameters with its sizes", "leave it out")


def contributed_page(rows: Sequence[PredictedRow]) -> Iterator[str | TextTable]:
    """Yield the table of the rows that are predicted, and a line for each other one."""
    columns = ("contributed", "GPUs", "peak, GiB", "predicted", "error", "step, s", "predicted ", "error ")
    cells = [_cells(item) for item in rows if item.missing is None]
    if cells:
        yield ""
        yield TextTable(columns, cells)
        yield f"(rows of {FOLDER}, measured by study.Receipt; they score no predictor)"
    for item in rows:
        if item.missing is not None:
            yield f"{item.file} is not predicted: {item.missing}"


def _cells(item: PredictedRow) -> list[str]:
    row, peak_gib, step_s = item.row, item.peak_gib, item.step_s
    assert peak_gib is not None
    assert step_s is not None
    batch = f"{row.micro_batch} x {row.seq_length:,} x {row.accumulation}"
    what = f"{row.model} {row.params / 1e6:,.0f} M, {row.strategy}, {batch}{', checkpointing' * row.checkpointing}"
    figures = []
    for measured, predicted in ((row.peak_gib, peak_gib), (row.step_s, step_s)):
        figures += [f"{measured:.3g}", f"{predicted:.3g}", f"{predicted / measured - 1:+.1%}"]
    return [what, f"{row.gpus} x {row.gpu_type}", *figures]


def contributed_document(rows: Sequence[PredictedRow]) -> list[dict[str, Any]]:
    """Return the rows as JSON: measured figures, predicted ones, and why a row has none."""
    return [
        {
            "file": item.file,
            "row": item.row.model_dump(mode="json", exclude_none=True),
            "predicted_peak_gib": item.peak_gib,
            "predicted_step_s": item.step_s,
            "missing": item.missing,
        }
        for item in rows
    ]
