"""Fit of the time constants to published rows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy
import yaml
from scipy.optimize import minimize

from study.predictor.constants import FITTED_FILE, Constants
from study.predictor.validation import Measurement, implausibility, predicted_step_s, published_rows

_HEAD = """\
# Written by `python -m study.report.pages.prediction fit`: constants of study/predictor/time.py with the smallest mean
# absolute error over {rows} rows of validation/published.yaml, {error:.1%}. None of those rows scores a prediction.
"""
# Fixed starts of the search, so that its result is reproducible. Each is in the valley of another local minimum: slow
# products with little other traffic, and fast ones with more.
_STARTS = (
    Constants(
        sustained=0.8,
        eager_traffic=1.5,
        compiled_traffic=0.8,
        hidden_share=0.3,
        launch_s=0.001,
        gather_hook_s=0.0002,
        host_gb_per_s=15.0,
    ),
    Constants(
        sustained=1.0,
        eager_traffic=5.0,
        compiled_traffic=1.7,
        hidden_share=0.9,
        launch_s=0.001,
        gather_hook_s=0.0002,
        host_gb_per_s=50.0,
    ),
)
# The search restarts from its result while the mean error falls by more than this.
_GAIN = 1e-3


def fit_rows() -> list[Measurement]:
    return [row for row in published_rows() if row.use == "fit" and row.step_s and not implausibility(row)]


def mean_error(rows: list[Measurement], constants: Constants) -> float:
    return float(numpy.mean([abs(predicted_step_s(row, constants) / (row.step_s or 1.0) - 1) for row in rows]))


def fit_constants(rows: list[Measurement], starts: Sequence[Constants] = _STARTS) -> Constants:
    """Return the best constants that searches from several starts find."""
    return min((_search(rows, start) for start in starts), key=lambda constants: mean_error(rows, constants))


def _search(rows: list[Measurement], start: Constants) -> Constants:
    """Search repeatedly: one search ends in a shallow local minimum that depends on each row."""
    result = minimize_error(rows, start)
    while mean_error(rows, start) - mean_error(rows, result) > _GAIN:
        start, result = result, minimize_error(rows, result)
    return result


def minimize_error(rows: list[Measurement], start: Constants) -> Constants:
    """Minimize the mean error by Nelder-Mead, over factors of the starting constants."""
    first = dataclasses.asdict(start)
    most = [1.0 if name in ("sustained", "hidden_share") else numpy.inf for name in first]

    def scale_constants(factors: numpy.ndarray) -> Constants:
        return Constants(*numpy.minimum([*first.values()] * abs(factors), most).tolist())

    result = minimize(
        lambda factors: mean_error(rows, scale_constants(factors)),
        numpy.ones(len(first)),
        method="Nelder-Mead",
        options={"maxiter": 4000, "xatol": 1e-3, "fatol": 1e-5, "adaptive": True},
    )
    return scale_constants(result.x)


def write() -> str:
    """Fit the constants, write fitted.yaml, and return its text."""
    rows = fit_rows()
    rounded = {name: float(f"{value:.3g}") for name, value in dataclasses.asdict(fit_constants(rows)).items()}
    error = mean_error(rows, Constants(**rounded))
    used = dict(collections.Counter(row.source for row in rows))
    text = _HEAD.format(rows=len(rows), error=error)
    text += yaml.safe_dump({"constants": rounded, "rows": used}, sort_keys=False)
    FITTED_FILE.write_text(text, encoding="utf-8")
    return text
