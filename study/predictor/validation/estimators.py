"""Fit of the time constants to published rows, and comparison of the predicted memory with public estimators."""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

import numpy
import yaml
from scipy.optimize import minimize

from study.config.errors import RunFailed, first_line
from study.config.places import IMPORT_ROOT, install_command
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.request import Request
from study.predictor.time import FITTED_FILE, Constants
from study.predictor.validation import (
    Measurement,
    implausibility,
    predicted_fit,
    predicted_peak,
    predicted_step_s,
    published_rows,
)

_HEAD = """\
# Written by `python -m study.report.pages.prediction fit`: constants of study/predictor/time.py with the smallest mean
# absolute error over {rows} rows of validation/published.yaml, {error:.1%}. None of those rows scores a prediction.
"""
# Fixed start of the search, so that its result is reproducible.
_START = Constants(
    sustained=0.8, eager_traffic=1.5, compiled_traffic=0.8, hidden_share=0.3, launch_s=0.001, hooks_s=0.002,
    host_gb_per_s=15.0,
)  # fmt: skip
# The search restarts from its result while the mean error falls by more than this.
_GAIN = 1e-3


def fit_rows() -> list[Measurement]:
    """Return the published times to which constants are fitted."""
    return [row for row in published_rows() if row.use == "fit" and row.step_s and not implausibility(row)]


def mean_error(rows: list[Measurement], constants: Constants) -> float:
    """Return the mean absolute relative error of predicted step times."""
    return float(numpy.mean([abs(predicted_step_s(row, constants) / (row.step_s or 1.0) - 1) for row in rows]))


def fit_constants(rows: list[Measurement], start: Constants = _START) -> Constants:
    """Fit the constants by repeated searches: one search ends in a shallow local minimum that depends on each row."""
    result = minimize_error(rows, start)
    while mean_error(rows, start) - mean_error(rows, result) > _GAIN:
        start, result = result, minimize_error(rows, result)
    return result


def minimize_error(rows: list[Measurement], start: Constants) -> Constants:
    """Minimize the mean error by Nelder-Mead, over factors of the starting constants."""
    first = dataclasses.asdict(start)

    def scale_constants(factors: numpy.ndarray) -> Constants:
        values = {
            name: float(value * abs(factor)) for (name, value), factor in zip(first.items(), factors, strict=True)
        }
        return Constants(**values | {name: min(1.0, values[name]) for name in ("sustained", "hidden_share")})

    result = minimize(
        lambda factors: mean_error(rows, scale_constants(factors)), numpy.ones(len(first)), method="Nelder-Mead",
        options={"maxiter": 4000, "xatol": 1e-3, "fatol": 1e-5, "adaptive": True},
    )  # fmt: skip
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


OURS = "study predict"
ACCELERATE = "accelerate estimate-memory"
DEEPSPEED = "DeepSpeed estimate_zero2/3"
ELEUTHER = "EleutherAI calc_transformer_mem"
TOOLS = (ACCELERATE, DEEPSPEED, ELEUTHER)


@dataclasses.dataclass(frozen=True)
class EstimatorScore:
    """Score of one memory estimator on the measurements."""

    tool: str
    # Number of measured peaks that the tool estimates, and its errors.
    peaks: int
    median_error: float | None
    worst_error: float | None
    # Rows with a known result (fits or out of memory), and correct verdicts.
    judged: int
    right: int
    # Rows that ran out of memory, and those predicted to: a tool that always answers "fits" is right on most rows.
    ran_out: int
    called: int


def standings(rows: Sequence[Measurement]) -> list[EstimatorScore]:
    """Return each tool's errors and its accuracy on whether a row fits."""
    estimates_by_row = _other_estimates(rows)
    scores = []
    for tool in (OURS, *TOOLS):
        errors, verdicts = [], []
        for row, estimates in zip(rows, estimates_by_row, strict=True):
            request = row.request
            peak = predicted_peak(row) if tool == OURS else estimates[tool]
            if peak is None:
                continue
            if tool != OURS and request.box.is_cpu_only:
                # The measured process includes libraries, which no tool counts: this project's figure is added.
                peak += predict_memory(request).host_parts["libraries"] / request.box.ranks
            if row.peak_bytes is not None:
                errors.append(abs(peak / row.peak_bytes - 1))
            if row.fits is not None and request.box.device.memory_gib:
                fits = predicted_fit(row) if tool == OURS else peak <= request.box.device.visible_gib * GIB
                verdicts.append((fits, row.fits))
        scores.append(EstimatorScore(
            tool=tool, peaks=len(errors), median_error=statistics.median(errors) if errors else None,
            worst_error=max(errors, default=None), judged=len(verdicts),
            right=sum(fits == was_ok for fits, was_ok in verdicts), ran_out=sum(not was_ok for _, was_ok in verdicts),
            called=sum(not fits and not was_ok for fits, was_ok in verdicts),
        ))  # fmt: skip
    return scores


def _other_estimates(rows: Sequence[Measurement]) -> list[dict[str, float | None]]:
    """Return the other tools' estimates per row; those of libraries that import torch run in a subprocess."""
    figures = []
    for request in (row.request for row in rows):
        strategy = request.strategy
        figures.append({
            "parameters": request.shape.parameters,
            # DeepSpeed's "largest layer" is the module with the most direct parameters: mostly the embedding.
            "largest_layer": request.shape.largest,
            "gpus": request.box.gpus_per_node, "nodes": request.box.nodes, "precision": request.precision,
            # FSDP shards what stage 3 shards.
            "stage": 3 if strategy.is_fsdp else strategy.zero_stage,
            "optimizer": strategy.offload_device("optimizer") is not None,
            "weights": strategy.offload_device("param") is not None,
        })  # fmt: skip
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "study.metrics.flops", "estimates"], cwd=IMPORT_ROOT, input=json.dumps(figures),
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        estimates = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RunFailed(f"the other estimators failed ({first_line(error)})", install_command("train")) from None
    return [
        {ACCELERATE: estimate["accelerate"], DEEPSPEED: estimate["deepspeed"], ELEUTHER: eleuther_bytes(row.request)}
        for row, estimate in zip(rows, estimates, strict=True)
    ]


def eleuther_bytes(request: Request) -> float:
    """Return bytes per GPU by EleutherAI/cookbook's calc/calc_transformer_mem.py with its default settings.

    https://github.com/EleutherAI/cookbook/blob/827ee3b293a63f14403f1467d08c91fda213f4e6/calc/calc_transformer_mem.py
    It always counts an untied output layer and a position table, does not support offload, and uses fp32 gradients.
    """
    shape, ranks, length = request.shape, request.box.ranks, request.sequence_length
    stage = 3 if request.strategy.is_fsdp else request.strategy.zero_stage or 0
    parameters = (
        2 * shape.vocabulary * shape.hidden
        + shape.hidden * length
        + 8 * shape.hidden * shape.layers + 2 * shape.hidden
        + 2 * (1 + shape.key_value_heads / shape.heads) * shape.layers * shape.hidden**2
        + (3 if shape.gated else 2) * shape.layers * shape.hidden * shape.inner
    )  # fmt: skip
    low = 2
    weight = 4 if request.precision == "fp32" else low
    weights = parameters * weight / (ranks if stage == 3 else 1)
    gradients = parameters * 4 / (ranks if stage >= 2 else 1)
    optimizer = parameters * 12 / (ranks if stage >= 1 else 1)
    sent = (5e8 * weight if stage >= 1 else 0.0) + (1e9 * weight if stage == 3 else 0.0)
    tokens = length * request.micro_batch
    saved: float = 16 * low + 2
    if not request.gradient_checkpointing:
        saved += (2 * low + 1) * (shape.heads * length / shape.hidden)
    return weights + gradients + optimizer + (sent if ranks > 1 else 0.0) + tokens * shape.hidden * shape.layers * saved
