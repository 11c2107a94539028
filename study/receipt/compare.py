"""Two receipts next to each other, and the differences that confound them. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from study.config.errors import UserError
from study.config.printing import TextTable
from study.config.text import binary_size, rounded_seconds
from study.receipt.document import BUFFERS, MEMORY_PARTS, PASSES, TIME_PARTS, ReceiptDocument, sum_parts
from study.receipt.page import describe

# A figure's name, the text of its values, and those of both receipts.
Figure = tuple[str, Callable[[float], str], tuple[float, float]]


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
    yield _table(names, receipts)
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


def _table(names: tuple[str, str], receipts: tuple[ReceiptDocument, ReceiptDocument]) -> TextTable:
    """Return the figures of both receipts; behind those of one with a prediction is the predicted figure."""
    figures = list(_figures(*receipts))
    names_of_figures = {figure for figure, *_ in figures}
    predictions = [
        {figure: value for figure, value in _predicted(receipt) if figure in names_of_figures} for receipt in receipts
    ]
    columns: list[str] = [""]
    for name, predicted in zip(names, predictions, strict=True):
        columns += [name, "predicted"] if predicted else [name]
    rows = []
    for figure, text, values in figures:
        row = [figure]
        for value, predicted in zip(values, predictions, strict=True):
            row.append(text(value))
            if predicted:
                row.append(text(predicted[figure]) if figure in predicted else "")
        rows.append((*row, _ratio(*values)))
    return TextTable((*columns, "ratio"), rows)


def _predicted(receipt: ReceiptDocument) -> Iterator[tuple[str, float]]:
    """Yield the predicted figures under their names in the table."""
    names = {"peak of tensors": "memory: peak", "step": "time: step"}
    for row in (*receipt.forecast.comparisons, *receipt.forecast.parts):
        yield names.get(row.figure, row.figure), row.predicted


def _figures(first: ReceiptDocument, second: ReceiptDocument) -> Iterator[Figure]:
    """Yield each figure that one of the receipts has."""
    predicted = {figure for receipt in (first, second) for figure, _ in _predicted(receipt)}
    for part in ("peak", *MEMORY_PARTS, BUFFERS):
        figure = f"memory: {part.replace('_', ' ')}"
        values = _memory(first, part), _memory(second, part)
        if any(values) and (part != BUFFERS or figure in predicted):
            yield figure, binary_size, values
    for part in ("step", *TIME_PARTS, PASSES):
        figure = f"time: {part}"
        seconds = _seconds(first, part), _seconds(second, part)
        if any(seconds) and (part != PASSES or figure in predicted):
            yield figure, rounded_seconds, seconds
    kinds = sorted({*(first.traffic or {}), *(second.traffic or {})})
    for kind in kinds:
        sent = _ring_bytes(first, kind), _ring_bytes(second, kind)
        if any(sent):
            yield f"ring bytes: {kind}", binary_size, sent
    speeds = first.speed.tokens_per_s or 0.0, second.speed.tokens_per_s or 0.0
    if any(speeds):
        yield "tokens/s", _tokens_text, speeds


def _tokens_text(speed: float) -> str:
    return f"{speed:,.0f}"


def _memory(receipt: ReceiptDocument, part: str) -> float:
    if receipt.memory is None:
        return 0.0
    return receipt.memory.total_bytes if part == "peak" else sum_parts(receipt.memory.parts, part)


def _seconds(receipt: ReceiptDocument, part: str) -> float:
    return (receipt.time.step_s or 0.0) if part == "step" else sum_parts(receipt.time.parts, part)


def _ring_bytes(receipt: ReceiptDocument, kind: str) -> float:
    row = (receipt.traffic or {}).get(kind)
    return 0.0 if row is None else row.ring_bytes


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.3g}" if first else "-"
