"""Changes of a measured configuration that are predicted to be faster, calibrated by the run itself. It imports no
torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from study.advisor.advise import AdviceRequest, candidates
from study.advisor.fitted import fit_settings
from study.advisor.request_text import batch_text
from study.config.errors import UserError
from study.config.precisions import computing_type
from study.config.strategies import read_strategy
from study.config.text import rounded
from study.host.memory import GIB
from study.predictor.calibration import PredictedRun, check_run, make_correction
from study.predictor.memory import predict_memory
from study.predictor.request import Request, TrainerSettings
from study.predictor.time import device_bytes, fits, predict_time
from study.receipt.document import MeasuredForecast, PredictedChange, PredictedChanges, ReceiptDocument
from study.receipt.forecast import make_forecast, measured_run

_SHOWN = 3
_ROUNDING = 1e-6


def predict_changes(receipt: ReceiptDocument) -> PredictedChanges:
    """Return the changes of a receipt, or why there are none."""
    try:
        changes = list_changes(receipt)
    except UserError as refusal:
        return PredictedChanges(missing=refusal.problem)
    if changes is None:
        return PredictedChanges(missing="the time of a step is predicted for GPUs alone")
    return PredictedChanges(changes=tuple(changes))


def repeat_prediction(receipt: ReceiptDocument) -> ReceiptDocument:
    """Return the receipt of a file with the predictions of today's predictor: those in the file may be of an earlier
    one. They stay if today's needs a package that is not installed."""
    repeated = repeat_forecast(receipt)
    if repeated is receipt:
        return receipt
    differs = repeated.forecast.differs_from_file
    changes = predict_changes(receipt) if differs or receipt.changes is None else receipt.changes
    return repeated.model_copy(update={"changes": changes})


def repeat_forecast(receipt: ReceiptDocument) -> ReceiptDocument:
    """Return the receipt of a file with today's predicted figures alone; itself if they stay."""
    if receipt.state != "complete":
        return receipt
    forecast, stored = make_forecast(receipt), receipt.forecast
    if forecast.missing is not None and stored.comparisons:
        return receipt
    differs = stored != MeasuredForecast() and not _is_same(forecast, stored)
    return receipt.model_copy(update={"forecast": forecast.model_copy(update={"differs_from_file": differs})})


def _is_same(first: MeasuredForecast, second: MeasuredForecast) -> bool:
    """Whether two comparisons have the same figures, up to the rounding of another machine."""
    if len(first.comparisons) != len(second.comparisons):
        return False
    return all(
        row.figure == stored.figure
        and math.isclose(row.predicted, stored.predicted, rel_tol=_ROUNDING)
        and math.isclose(row.measured, stored.measured, rel_tol=_ROUNDING)
        and row.is_outside == stored.is_outside
        for row, stored in zip(first.comparisons, second.comparisons, strict=True)
    )


def change_lines(receipt: ReceiptDocument) -> Iterator[str]:
    """Yield the changes of a receipt as text."""
    if receipt.changes is None:
        return
    changes, missing = receipt.changes.changes, receipt.changes.missing
    if missing is not None:
        reason = "there is no prediction" if receipt.forecast.missing is not None else missing
        yield f"no changes are proposed: {reason}"
        return
    if not changes:
        yield "changes: no other strategy, micro-batch or loss is predicted to be faster beyond its error"
        return
    yield "changes that are predicted to be faster, calibrated by this run:"
    for change in changes:
        speed = f"{change.speedup:.2f} x as fast ({change.low:.2f} to {change.high:.2f})"
        yield f"  {change.says}: {speed}, {rounded(change.device_bytes / GIB)} GiB of the device"


def list_changes(receipt: ReceiptDocument) -> list[PredictedChange] | None:
    """Return the fastest single changes that fit and are faster at both ends of their intervals.

    None if no step on a GPU was measured.
    """
    if receipt.engine.device == "cpu" or receipt.time.step_s is None:
        return None
    run = measured_run(receipt, "this run")
    check_run(run)
    correction = make_correction([PredictedRun.predict(run)])
    now = dataclasses.replace(run.request, correction=correction)
    measured = predict_time(now).tokens_per_s_per_gpu.value
    changes = [_predicted(says, request, measured) for says, request in _single_changes(now)]
    faster = [change for change in changes if change is not None and change.low > 1]
    return sorted(faster, key=lambda change: -change.speedup)[:_SHOWN]


def _single_changes(now: Request) -> Iterator[tuple[str, Request]]:
    """Yield requests that differ from one by one change, with the change in words."""
    micro_batch = now.micro_batch
    while now.accumulation * now.micro_batch % (2 * micro_batch) == 0:
        micro_batch *= 2
        larger = dataclasses.replace(
            now, micro_batch=micro_batch, accumulation=now.accumulation * now.micro_batch // micro_batch
        )
        yield batch_text(larger), larger
    if now.gradient_checkpointing:
        yield "no gradient checkpointing", dataclasses.replace(now, gradient_checkpointing=False)
    if now.shape.has_word_logits and now.loss_kernel == "transformers":
        yield "a fused loss (Liger's)", dataclasses.replace(now, loss_kernel="liger")
    question = _question(now)
    for name in candidates(question):
        strategy = read_strategy(name)
        if strategy.name == now.strategy.name or (strategy.offloads and not now.strategy.offloads):
            continue
        changed = question.configuration(strategy, now.micro_batch, now.accumulation, now.gradient_checkpointing)
        yield name, fit_settings(changed)


def _question(now: Request) -> AdviceRequest:
    return AdviceRequest(
        shape=now.shape,
        box=now.box,
        sequence_length=now.sequence_length,
        precision=computing_type(now.precision),
        attention=now.attention,
        reference_model=now.reference_model,
        quantized=now.quantized,
        trainer=TrainerSettings(loss_kernel=now.loss_kernel, keeps_outputs=now.keeps_outputs, compiled=now.compiled),
        correction=now.correction,
    )


def _predicted(says: str, request: Request, measured: float) -> PredictedChange | None:
    """Return a change with its effect; None if its 90 % bound does not fit, or if its time has no interval."""
    memory = predict_memory(request)
    if not fits(memory, request.box, at_upper=True):
        return None
    speed = predict_time(request).tokens_per_s_per_gpu
    if speed.low is None or speed.high is None:
        return None
    return PredictedChange(
        says=says,
        speedup=speed.value / measured,
        low=speed.low / measured,
        high=speed.high / measured,
        device_bytes=device_bytes(memory),
    )
