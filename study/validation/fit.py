"""Fits the constants of study/predict/time.py to the published rows that are for it, by relative error of the step."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import numpy
import yaml
from scipy.optimize import minimize

import study.predict
from study.predict.floor import ANY_DEVICE
from study.predict.kept import COPIES, GAPS, kept_bytes, small_activations
from study.predict.memory import points_of
from study.predict.request import Box, Request
from study.predict.shape import model_shape
from study.predict.time import Constants
from study.spec.strategies import read_strategy
from study.spec.yaml_sections import read_own
from study.validation.measured import Measured, impossible, predicted_step_s
from study.validation.published import published_rows

FILE = Path(study.predict.__file__).with_name("fitted.yaml")
_HEAD = """\
# Written by `python -m study.validation fit`: constants of study/predict/time.py with the smallest mean absolute
# error over {rows} rows of study/validation/published.yaml, {error:.1%}. None of those rows scores a prediction.
"""


KEPT_FILE = Path(__file__).with_name("kept.yaml")


def kept_fit() -> tuple[float, float]:
    """GAPS and COPIES of study/predict/kept.py."""
    document = read_own(KEPT_FILE.read_text(encoding="utf-8"))
    box = Box("processes", dataclasses.replace(ANY_DEVICE, memory_gib=0.0), document["ranks"], gathers_into_copies=True)
    parts = []
    for row in document["rows"]:
        request = Request(
            model_shape(document["model"]), read_strategy(row["strategy"]), box, row["sequence"], row["micro_batch"],
            row["accumulation"], "fp32", gradient_checkpointing=False, attention="sdpa",
        )  # fmt: skip
        points = points_of(request)
        small = max(point.small + small_activations(request, point.parts) for point in points)
        parts.append([small, (kept_bytes(request, small) - GAPS * small) / COPIES])
    kept = [(row["kept"] - row["returned"]) * 2**20 for row in document["rows"]]
    gaps, copies = numpy.linalg.lstsq(numpy.array(parts), numpy.array(kept), rcond=None)[0]
    return float(gaps), float(copies)


def fit_rows() -> list[Measured]:
    return [row for row in published_rows() if row.use == "fit" and row.step_s and not impossible(row)]


def mean_error(rows: list[Measured], constants: Constants) -> float:
    return float(numpy.mean([abs(predicted_step_s(row, constants) / (row.step_s or 1.0) - 1) for row in rows]))


# Where the search begins, always, so that it ends in one place.
_START = Constants(
    sustained=0.8,
    eager_traffic=1.5,
    compiled_traffic=0.8,
    hidden_share=0.3,
    launch_s=0.001,
    hooks_s=0.002,
    host_gb_per_s=15.0,
)


# A search that ends a new one begins from there, as long as it gains so much.
_GAIN = 1e-3


def fitted(rows: list[Measured], start: Constants = _START) -> Constants:
    """One search alone ends in a shallow place, and in another one for every row more or less."""
    found = searched(rows, start)
    while mean_error(rows, start) - mean_error(rows, found) > _GAIN:
        start, found = found, searched(rows, found)
    return found


def searched(rows: list[Measured], start: Constants) -> Constants:
    """By Nelder and Mead, each constant as a factor of where it starts."""
    first = dataclasses.asdict(start)

    def constants_of(factors: numpy.ndarray) -> Constants:
        values = {
            name: float(value * abs(factor)) for (name, value), factor in zip(first.items(), factors, strict=True)
        }
        shares = {name: min(1.0, values[name]) for name in ("sustained", "hidden_share")}
        return Constants(**values | shares)

    found = minimize(
        lambda factors: mean_error(rows, constants_of(factors)), numpy.ones(len(first)), method="Nelder-Mead",
        options={"maxiter": 4000, "xatol": 1e-3, "fatol": 1e-5, "adaptive": True},
    )  # fmt: skip
    return constants_of(found.x)


def write() -> str:
    rows = fit_rows()
    constants = fitted(rows)
    rounded = {name: float(f"{value:.3g}") for name, value in dataclasses.asdict(constants).items()}
    error = mean_error(rows, Constants(**rounded))
    used = dict(collections.Counter(row.source for row in rows))
    text = _HEAD.format(rows=len(rows), error=error) + yaml.safe_dump(
        {"constants": rounded, "rows": used}, sort_keys=False
    )
    FILE.write_text(text, encoding="utf-8")
    return text
