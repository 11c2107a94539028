"""Errors of predictions with and without one measured configuration of the setup, on published pages.

Rows of a page that have model, hardware, precision and kernels in common are a setup. Each row in turn is the measured
one, and the others are predicted with it and without it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from study.config.precisions import computing_type
from study.predictor.calibration import MeasuredRun, PredictedRun, make_correction
from study.predictor.intervals import SINGLE_ERROR
from study.predictor.time import predict_time
from study.predictor.validation import (
    Measurement,
    implausibility,
    predicted_peak,
    predicted_state,
    predicted_step_s,
    published_rows,
)

SetupFigure = Literal["step", "peak"]
_SINGLE_ERRORS = [place / 100 for place in range(21)]


@dataclasses.dataclass(frozen=True)
class SetupPair:
    """A measured configuration, and another one of its setup, predicted with and without it."""

    page: str
    measured: Measurement
    row: Measurement
    figure: SetupFigure
    value: float
    before: float
    after: float
    # The certain part of a peak.
    state: float = 0.0

    @property
    def error_before(self) -> float:
        return abs(self.before / self.value - 1)

    @property
    def error(self) -> float:
        return abs(self.after / self.value - 1)

    @property
    def offloads(self) -> bool:
        """Whether both are steps with offload."""
        return all(row.request.offloads for row in (self.measured, self.row))


def list_pairs(figure: SetupFigure, single_error: float = SINGLE_ERROR) -> list[SetupPair]:
    """Return every pair of different configurations of a setup."""
    pairs = []
    for setup in _setups(figure):
        for measured, measured_run in setup:
            correction = make_correction([measured_run], single_error)
            for row, run in setup:
                if row.request.configuration == measured.request.configuration:
                    continue
                corrected = dataclasses.replace(row, request=dataclasses.replace(row.request, correction=correction))
                page = row.url.partition("#")[0]
                if figure == "step":
                    value, before, after = row.step_s, run.step_s, predicted_step_s(corrected)
                else:
                    value, before, after = row.peak_bytes, run.peak_bytes, predicted_peak(corrected)
                assert value is not None
                pairs.append(SetupPair(page, measured, row, figure, value, before, after, run.state_bytes))
    return pairs


@functools.cache
def _setups(figure: SetupFigure) -> list[list[tuple[Measurement, PredictedRun]]]:
    """Return the rows of each setup that have the figure, with their predictions."""
    setups: dict[tuple[object, ...], list[Measurement]] = {}
    for row in published_rows():
        value = row.step_s if figure == "step" else row.peak_bytes
        if value is not None and implausibility(row) is None:
            setups.setdefault((*_setup(row), row.peak_kind if figure == "peak" else ""), []).append(row)
    return [[(row, _predicted(row, figure)) for row in rows] for rows in setups.values() if len(rows) > 1]


def _setup(row: Measurement) -> tuple[object, ...]:
    request, shape = row.request, row.request.shape
    return (
        row.url.partition("#")[0],
        (shape.name, shape.lora_rank, shape.lora_targets, shape.lora_saved, shape.lora_dora),
        request.box.name,
        computing_type(request.precision),
        (request.attention, request.loss_kernel, request.optimizer),
        (request.compiled, request.quantized, request.reference_model),
    )


def _predicted(row: Measurement, figure: SetupFigure) -> PredictedRun:
    """Return a row as a measured run with one of its figures."""
    is_step = figure == "step"
    run = MeasuredRun(
        name=row.source,
        request=row.request,
        step_s=row.step_s if is_step else None,
        peak_bytes=None if is_step else row.peak_bytes,
    )
    return PredictedRun(
        run=run,
        step_s=predicted_step_s(row) if is_step else 0.0,
        peak_bytes=0.0 if is_step else predicted_peak(row),
        state_bytes=0.0 if is_step else predicted_state(row),
        is_launch_bound=is_step and predict_time(row.request).is_launch_bound,
    )


def mean_of_pages(pairs: Iterable[SetupPair], *, before: bool = False) -> float:
    """Return the mean over pages of the median error of a page."""
    return statistics.mean(medians_by_page(pairs, before=before).values())


def medians_by_page(pairs: Iterable[SetupPair], *, before: bool = False) -> dict[str, float]:
    """Return the median error of each page."""
    errors: dict[str, list[float]] = {}
    for pair in pairs:
        errors.setdefault(pair.page, []).append(pair.error_before if before else pair.error)
    return {page: statistics.median(values) for page, values in errors.items()}


def fit_single_error() -> float:
    """Return the single error with the smallest mean error of pages."""
    return _best_single_error(_step_pairs())


@functools.cache
def _step_pairs() -> dict[float, list[SetupPair]]:
    """Return the pairs of steps by single error."""
    return {single_error: list_pairs("step", single_error) for single_error in _SINGLE_ERRORS}


def _best_single_error(pairs: Mapping[float, Sequence[SetupPair]], without: str | None = None) -> float:
    """Return the single error whose pairs have the smallest mean error of pages, without one page."""

    def mean_error(single_error: float) -> float:
        return mean_of_pages(pair for pair in pairs[single_error] if pair.page != without)

    return min(_SINGLE_ERRORS, key=mean_error)


@functools.cache
def held_out_pairs(figure: SetupFigure) -> list[SetupPair]:
    """Return the pairs, those of steps with a single error that was fitted without their page."""
    if figure == "peak":
        return list_pairs("peak")
    by_error = _step_pairs()
    held_out = []
    for page in medians_by_page(by_error[0.0]):
        single_error = _best_single_error(by_error, without=page)
        held_out += [pair for pair in by_error[single_error] if pair.page == page]
    return held_out
