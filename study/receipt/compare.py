"""Two receipts next to each second_value, and the differences that confound them. It imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from study.config.errors import UserError
from study.config.printing import TextTable
from study.config.text import binary_size, rounded_seconds
from study.receipt.document import MEMORY_PARTS, TIME_PARTS, ReceiptDocument
from study.receipt.page import describe


def comparison_page(
    names: tuple[str, str], receipts: tuple[ReceiptDocument, ReceiptDocument]
) -> Iterator[str | TextTable]:
    """Yield the lines of a comparison; UserError if one of the receipts has measured nothing."""
    for name, receipt in zip(names, receipts, strict=True):
        if receipt.state != "complete":
            problem = f"{name} has no measured step: the run ended after {receipt.work.steps}"
            raise UserError(problem, "train for 11 steps or more, or give Receipt a smaller `after`")
        yield f"{name}: {describe(receipt)}"
    confounds = confounded_by(*receipts)
    if confounds:
        yield f"confounded by: {'; '.join(confounds)}"
    rows = list(_rows(*receipts))
    yield TextTable(("", names[0], names[1], "ratio"), rows)
    for name, receipt in zip(names, receipts, strict=True):
        for fault in receipt.faults:
            yield f"{name}: {fault.says}. To fix it: {fault.fix}"


def confounded_by(first: ReceiptDocument, second: ReceiptDocument) -> list[str]:
    """Return the differences besides the engine: with any of them a ratio is not that of the engines."""
    differing = []
    for what, value, second_value in (
        ("model", (first.model.name, first.model.parameters), (second.model.name, second.model.parameters)),
        ("trained parameters", first.model.trained_parameters, second.model.trained_parameters),
        ("ranks", first.engine.ranks, second.engine.ranks),
        ("device", first.engine.device, second.engine.device),
        ("tokens of a step", _tokens(first), _tokens(second)),
        (
            "precision",
            (first.engine.compute_dtype, first.engine.param_dtype),
            (second.engine.compute_dtype, second.engine.param_dtype),
        ),
    ):
        if value != second_value:
            differing.append(f"{what} ({_text(value)} and {_text(second_value)})")
    for package in ("torch", "deepspeed"):
        versions = first.packages.get(package), second.packages.get(package)
        uses = package != "deepspeed" or "deepspeed" in (first.engine.engine, second.engine.engine)
        if uses and versions[0] != versions[1]:
            differing.append(f"{package} ({versions[0]} and {versions[1]})")
    return differing


def _tokens(receipt: ReceiptDocument) -> int | None:
    work = receipt.work
    if not work.micro_batches or not work.samples:
        return None
    return work.micro_batches * work.samples * (work.sequence_length or 1) * receipt.engine.input_ranks


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rows(first: ReceiptDocument, second: ReceiptDocument) -> Iterator[tuple[str, ...]]:
    for part in ("peak", *MEMORY_PARTS):
        values = _memory(first, part), _memory(second, part)
        if any(values):
            yield (f"memory: {part.replace('_', ' ')}", *map(binary_size, values), _ratio(*values))
    for part in ("step", *TIME_PARTS):
        seconds = _seconds(first, part), _seconds(second, part)
        if any(seconds):
            yield (f"time: {part}", *map(rounded_seconds, seconds), _ratio(*seconds))
    kinds = sorted({*(first.traffic or {}), *(second.traffic or {})})
    for kind in kinds:
        sent = _ring_bytes(first, kind), _ring_bytes(second, kind)
        if any(sent):
            yield (f"ring bytes: {kind}", *map(binary_size, sent), _ratio(*sent))
    speeds = first.speed.tokens_per_s or 0.0, second.speed.tokens_per_s or 0.0
    if any(speeds):
        yield ("tokens/s", *(f"{speed:,.0f}" for speed in speeds), _ratio(*speeds))


def _memory(receipt: ReceiptDocument, part: str) -> float:
    if receipt.memory is None:
        return 0.0
    return receipt.memory.total_bytes if part == "peak" else receipt.memory.parts.get(part, 0)


def _seconds(receipt: ReceiptDocument, part: str) -> float:
    return (receipt.time.step_s or 0.0) if part == "step" else receipt.time.parts.get(part, 0.0)


def _ring_bytes(receipt: ReceiptDocument, kind: str) -> float:
    row = (receipt.traffic or {}).get(kind)
    return 0.0 if row is None else row.ring_bytes


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.3g}" if first else "-"
