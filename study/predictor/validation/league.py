"""Fits the constants of time to published rows, and compares the predicted memory with public estimators."""

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
from study.config.strategies import REPOSITORY
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.request import Request
from study.predictor.time import FITTED_FILE, Constants
from study.predictor.validation import (
    Measured,
    impossible,
    predicted_fit,
    predicted_peak,
    predicted_step_s,
    published_rows,
)

_HEAD = """\
# Written by `python -m study.report.pages.prediction fit`: constants of study/predictor/time.py with the smallest mean
# absolute error over {rows} rows of validation/published.yaml, {error:.1%}. None of those rows scores a prediction.
"""
# Where the search begins, always, so that it ends in one place.
_START = Constants(
    sustained=0.8, eager_traffic=1.5, compiled_traffic=0.8, hidden_share=0.3, launch_s=0.001, hooks_s=0.002,
    host_gb_per_s=15.0,
)  # fmt: skip
# A search that ends a new one begins from there, as long as it gains so much.
_GAIN = 1e-3


def fit_rows() -> list[Measured]:
    return [row for row in published_rows() if row.use == "fit" and row.step_s and not impossible(row)]


def mean_error(rows: list[Measured], constants: Constants) -> float:
    return float(numpy.mean([abs(predicted_step_s(row, constants) / (row.step_s or 1.0) - 1) for row in rows]))


def fitted(rows: list[Measured], start: Constants = _START) -> Constants:
    """One search alone ends in a shallow place, and in another one for every row more or less."""
    found = searched(rows, start)
    while mean_error(rows, start) - mean_error(rows, found) > _GAIN:
        start, found = found, searched(rows, found)
    return found


def searched(rows: list[Measured], start: Constants) -> Constants:
    """Search by Nelder and Mead, each constant as a factor of where it starts."""
    first = dataclasses.asdict(start)

    def constants_of(factors: numpy.ndarray) -> Constants:
        values = {
            name: float(value * abs(factor)) for (name, value), factor in zip(first.items(), factors, strict=True)
        }
        return Constants(**values | {name: min(1.0, values[name]) for name in ("sustained", "hidden_share")})

    found = minimize(
        lambda factors: mean_error(rows, constants_of(factors)), numpy.ones(len(first)), method="Nelder-Mead",
        options={"maxiter": 4000, "xatol": 1e-3, "fatol": 1e-5, "adaptive": True},
    )  # fmt: skip
    return constants_of(found.x)


def write() -> str:
    rows = fit_rows()
    rounded = {name: float(f"{value:.3g}") for name, value in dataclasses.asdict(fitted(rows)).items()}
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
class Standing:
    tool: str
    # Rows with a measured peak that the tool estimates, and their errors.
    peaks: int
    median_error: float | None
    worst_error: float | None
    # Rows where it is known whether it fitted.
    judged: int
    right: int
    # Of those that ran out of memory, how many were called: a tool that says yes to all is right of most rows.
    ran_out: int
    called: int


def standings(rows: Sequence[Measured]) -> list[Standing]:
    """Return each tool's errors, and its verdicts on whether a row fits."""
    others = _other_estimates(rows)
    found = []
    for tool in (OURS, *TOOLS):
        errors, verdicts = [], []
        for row, estimates in zip(rows, others, strict=True):
            request = row.request
            peak = predicted_peak(row) if tool == OURS else estimates[tool]
            if peak is None:
                continue
            if tool != OURS and request.box.in_host_memory:
                # A process without a GPU is measured with its libraries, which no tool counts: it is given ours.
                peak += predict_memory(request).host_parts["libraries"] / request.box.ranks
            if row.peak_bytes is not None:
                errors.append(abs(peak / row.peak_bytes - 1))
            if row.fits is not None and request.box.device.memory_gib:
                fits = predicted_fit(row) if tool == OURS else peak <= request.box.device.visible_gib * GIB
                verdicts.append((fits, row.fits))
        found.append(Standing(
            tool=tool, peaks=len(errors), median_error=statistics.median(errors) if errors else None,
            worst_error=max(errors, default=None), judged=len(verdicts),
            right=sum(fits == was for fits, was in verdicts), ran_out=sum(not was for _, was in verdicts),
            called=sum(not fits and not was for fits, was in verdicts),
        ))  # fmt: skip
    return found


def _other_estimates(rows: Sequence[Measured]) -> list[dict[str, float | None]]:
    """Accelerate's and DeepSpeed's are asked in a process of its own: they are parts of libraries that import torch."""
    figures = []
    for request in (row.request for row in rows):
        strategy = request.strategy
        figures.append({
            "parameters": request.shape.parameters,
            # DeepSpeed's "largest layer" is the largest module's own tensors: mostly the embedding.
            "largest_layer": request.shape.largest,
            "gpus": request.box.gpus_per_node, "nodes": request.box.nodes, "precision": request.precision,
            # FSDP shards what stage 3 shards.
            "stage": 3 if strategy.is_fsdp else strategy.zero_stage,
            "optimizer": strategy.offload_device("optimizer") is not None,
            "weights": strategy.offload_device("param") is not None,
        })  # fmt: skip
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "study.metrics.flops", "estimates"], cwd=REPOSITORY, input=json.dumps(figures),
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        estimates = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RunFailed(
            f"the other estimators did not answer ({first_line(error)})", "pip install -e '.[train]'"
        ) from None
    return [
        {ACCELERATE: each["accelerate"], DEEPSPEED: each["deepspeed"], ELEUTHER: eleuther_bytes(row.request)}
        for row, each in zip(rows, estimates, strict=True)
    ]


def eleuther_bytes(request: Request) -> float:
    """Return bytes of a GPU by EleutherAI/cookbook's calc/calc_transformer_mem.py with its default settings.

    https://github.com/EleutherAI/cookbook/blob/827ee3b293a63f14403f1467d08c91fda213f4e6/calc/calc_transformer_mem.py
    It counts an untied output layer and a position table always, knows no offload, and takes gradients as fp32.
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
    kept: float = 16 * low + 2
    if not request.gradient_checkpointing:
        kept += (2 * low + 1) * (shape.heads * length / shape.hidden)
    return weights + gradients + optimizer + (sent if ranks > 1 else 0.0) + tokens * shape.hidden * shape.layers * kept
