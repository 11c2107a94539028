"""Rows of the open benchmark: a receipt, and of its machine the GPU and releases alone. It imports no torch.

The columns are those of published measurements (docs/add-results.md); reports/receipts/ has one file for each row.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator

import pydantic

from study.benchmark.contributed import ADAM, BenchmarkRow, first_problem, read_row
from study.config.errors import UserError
from study.host.memory import GIB
from study.predictor.hardware import find_device, mfu
from study.predictor.models import shape_of_document
from study.predictor.shape import ModelShape
from study.receipt.document import PRECISIONS, PeakFacts, ReceiptDocument, StateFacts

_PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "peft", "trl", "zero-study")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Figures of a row are rounded, and counters and buffers belong to the state.
_TOLERANCE = 0.01
# Fraction of the peak from which other tensors, such as those of an earlier engine, are too much for a comparison.
_OTHER_FRACTION = 0.05


def make_row(receipt: ReceiptDocument, name: str) -> BenchmarkRow:
    """Return the row of a receipt; UserError if it has not all figures, or names that a row may not have."""
    memory, state, step_s = _required(receipt, name)
    engine, model, work = receipt.engine, receipt.model, receipt.work
    tokens = (work.micro_batches or 0) * (work.samples or 0) * (work.sequence_length or 0)
    flops = receipt.speed.flops_per_step
    on_gpu = state.params.get("device", 0) + state.optimizer.get("device", 0)
    columns = {
        "date": receipt.made_at[:10],
        "model": model.name,
        "params": model.parameters,
        "trained_params": model.trained_parameters,
        **_shape_columns(receipt),
        "framework": engine.engine,
        "strategy": engine.strategy,
        "zero_stage": engine.zero_stage,
        "gpus": engine.ranks,
        "gpu_type": engine.device,
        "micro_batch": work.samples,
        "accumulation": work.micro_batches,
        "seq_length": work.sequence_length,
        "precision": engine.compute_dtype,
        "weights": engine.param_dtype,
        "optimizer": engine.optimizer,
        "checkpointing": engine.gradient_checkpointing,
        "compiled": engine.compiled,
        "offload_optimizer": engine.offload_optimizer,
        "offload_params": engine.offload_param,
        "lora_rank": model.lora_rank,
        # The address of a kernel has a slash.
        "attention": None if "/" in (model.attention or "") else model.attention,
        "peak_gib": _gib(memory.total_bytes),
        "state_gib": _gib(sum(state.params.values()) + sum(state.optimizer.values())),
        "state_on_gpu_gib": _gib(on_gpu),
        "step_s": _digits(step_s),
        "tokens_per_s_per_gpu": _digits(tokens / step_s),
        "tflop_per_step": None if flops is None else _digits(flops / 1e12),
        "mfu": None if receipt.speed.mfu is None else _digits(receipt.speed.mfu),
        "ring_gib": None if receipt.traffic is None else _gib(sum(it.ring_bytes for it in receipt.traffic.values())),
        "packages": dict(_packages(receipt)),
    }
    try:
        return BenchmarkRow.model_validate(columns)
    except pydantic.ValidationError as error:
        raise UserError(f"{name} gives no row: {first_problem(error)}", "measure a loop that has this figure") from None


def _required(receipt: ReceiptDocument, name: str) -> tuple[PeakFacts, StateFacts, float]:
    """Return the figures that each row has; UserError if one is missing or the receipt is of no use for others."""
    memory, state, step_s = receipt.memory, receipt.model_state, receipt.time.step_s
    if receipt.state != "complete" or memory is None or state is None or step_s is None:
        raise UserError(f"{name} has no peak, model state or step time", "train for 11 steps or more with an optimizer")
    if receipt.failures:
        raise UserError(f"{name} lists a failure: {receipt.failures[0]}", "measure again without it")
    if receipt.engine.sample_ranks < receipt.engine.ranks:
        raise UserError(f"{name} has model-parallel groups, which the rows do not describe", "train without them")
    if receipt.engine.device == "cpu":
        raise UserError(f"{name} is of CPU ranks, and the benchmark of GPUs", "measure on a GPU")
    if memory.parts.get("other_tensors", 0) >= _OTHER_FRACTION * memory.total_bytes:
        raise UserError(f"{name} has tensors of something else at its peak", "measure in a new process")
    return memory, state, step_s


def _shape_columns(receipt: ReceiptDocument) -> dict[str, object]:
    config = receipt.model.config
    try:
        shape: ModelShape = shape_of_document(config or {}, receipt.model.name)
    except UserError:
        return {}
    return {
        "model_type": shape.model_type,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.key_value_heads,
        "intermediate": shape.inner,
        "vocab": shape.vocabulary,
    }


def _packages(receipt: ReceiptDocument) -> Iterator[tuple[str, str]]:
    """Yield the releases; a local version stays only if it names a build of torch."""
    for package in _PACKAGES:
        version = receipt.packages.get(package)
        if version is not None:
            public, _, local = version.partition("+")
            is_build = re.fullmatch(r"cpu|cu[0-9]{2,4}|rocm[0-9.]{1,8}", local)
            yield package, version if is_build else public


def _gib(count: float) -> float:
    return round(count / GIB, 6)


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def row_text(row: BenchmarkRow) -> str:
    return json.dumps(row.model_dump(mode="json", exclude_none=True), indent=2, allow_nan=False) + "\n"


def file_name(row: BenchmarkRow) -> str:
    """Return a name for the file of a row, which another row does not have."""
    digest = hashlib.sha256(row_text(row).encode()).hexdigest()[:8]
    words = f"{row.model}-{row.strategy or row.framework}-{row.gpus}x{row.gpu_type}-{digest}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()) + ".json"


def list_problems(row: BenchmarkRow) -> list[str]:
    """Return the reasons for which a row cannot be true."""
    return [*_memory_problems(row), *_time_problems(row)]


def least_state_bytes(row: BenchmarkRow) -> float:
    """Return the ZeRO paper's state of a rank without gradients: weights, and Adam's two moments in their type.

    Stage 1 shards the moments, stage 3 and FSDP the weights too. Masters and moments in fp32 are more. Weights of a
    quantized model with adapters may have one byte.
    """
    width = _BYTES[row.weights]
    shards_weights = row.zero_stage == 3 or row.framework in ("fsdp1", "fsdp2")
    shards_moments = shards_weights or bool(row.zero_stage)
    weights = row.params * (1 if row.lora_rank else width)
    moments = 2 * width * row.trained_params if row.optimizer in ADAM else 0
    return weights / (row.gpus if shards_weights else 1) + moments / (row.gpus if shards_moments else 1)


def _memory_problems(row: BenchmarkRow) -> Iterator[str]:
    least = least_state_bytes(row) / GIB
    if row.state_gib < least * (1 - _TOLERANCE):
        yield f"its model state of {row.state_gib:.4g} GiB is below the formula's {least:.4g}"
    if row.state_on_gpu_gib > row.state_gib * (1 + _TOLERANCE):
        yield f"{row.state_on_gpu_gib:.4g} GiB of its state are on the GPU, and {row.state_gib:.4g} in all places"
    if row.peak_gib < row.state_on_gpu_gib * (1 - _TOLERANCE):
        yield f"its peak of {row.peak_gib:.4g} GiB is below the {row.state_on_gpu_gib:.4g} of its state on the GPU"
    device = find_device(row.gpu_type)
    if device is None:
        yield f"{row.gpu_type} is not in study/predictor/hardware.yaml, so that nothing can be checked"
    elif row.peak_gib > device.memory_gib:
        yield f"its peak of {row.peak_gib:.4g} GiB is above the {device.memory_gib:g} GiB of {device.name}"


def _time_problems(row: BenchmarkRow) -> Iterator[str]:
    tokens = row.micro_batch * row.accumulation * row.seq_length
    if abs(row.tokens_per_s_per_gpu * row.step_s / tokens - 1) > _TOLERANCE:
        yield f"{row.tokens_per_s_per_gpu:g} tokens/s in {row.step_s:g} s are not the {tokens:,} of its step"
    if row.mfu is not None and row.mfu > 1:
        yield f"its MFU of {row.mfu:.4g} is above 1"
    if row.tflop_per_step is None:
        return
    utilization = mfu(1e12 * row.tflop_per_step, row.step_s, 1, row.gpu_type, PRECISIONS[row.precision])
    if utilization is None:
        return
    if utilization > 1:
        rate = row.tflop_per_step / row.step_s
        yield f"{rate:.4g} TFLOP/s are above the peak rate of {row.gpu_type} in {row.precision}"
    if row.mfu is None or abs(row.mfu / utilization - 1) > _TOLERANCE:
        yield f"its MFU is not the {utilization:.4g} of its operations, time and card"


def check_rows(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the problems of each file, among them that another one has the same row."""
    file_of_row: dict[str, str] = {}
    for name in names:
        try:
            row = read_row(name)
        except UserError as refusal:
            yield name, [refusal.problem]
            continue
        problems = list_problems(row)
        first = file_of_row.setdefault(row_text(row), name)
        if first != name:
            problems.append(f"it has the row of {first}")
        yield name, problems
