"""This project's prediction of a GPU's memory beside public estimators, on the same rows."""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy
import yaml
from scipy.optimize import minimize

import study.predictor
from study.config.errors import RunFailed, first_line
from study.config.strategies import REPOSITORY, read_strategy
from study.config.yaml_sections import read_own
from study.host.memory import GIB
from study.predictor.buckets import COPIES, GAPS, kept_bytes, small_activations
from study.predictor.floor import ANY_DEVICE
from study.predictor.memory import points_of, predict_memory
from study.predictor.request import Hardware, Request
from study.predictor.shape import model_shape
from study.predictor.time import Constants
from study.predictor.validation.measured import Measured, impossible, predicted_fit, predicted_peak, predicted_step_s
from study.predictor.validation.published import published_rows

FILE = Path(study.predictor.__file__).with_name("fitted.yaml")
_HEAD = """\
# Written by `python -m study.report.pages.prediction fit`: constants of study/predictor/time.py with the smallest mean
# absolute error over {rows} rows of validation/published.yaml, {error:.1%}. None of those rows scores a prediction.
"""


KEPT_FILE = Path(__file__).with_name("kept.yaml")


def kept_fit() -> tuple[float, float]:
    """GAPS and COPIES of study/predictor/buckets.py."""
    document = read_own(KEPT_FILE.read_text(encoding="utf-8"))
    box = Hardware(
        "processes", dataclasses.replace(ANY_DEVICE, memory_gib=0.0), document["ranks"], gathers_into_copies=True
    )
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


OURS = "study predict"
ACCELERATE = "accelerate estimate-memory"
DEEPSPEED = "DeepSpeed estimate_zero2/3"
ELEUTHER = "EleutherAI calc_transformer_mem"
TOOLS = (OURS, ACCELERATE, DEEPSPEED, ELEUTHER)
_LIMIT_S = 300


@dataclasses.dataclass(frozen=True)
class Standing:
    tool: str
    # Rows with a measured peak that it says anything of, and their errors.
    peaks: int
    median_error: float | None
    worst_error: float | None
    # Rows where it is known whether it fitted.
    judged: int
    right: int
    # Of those that ran out of memory, how many it said so of: a tool that says yes to all is right of most rows.
    ran_out: int
    called: int


def standings(rows: Sequence[Measured]) -> list[Standing]:
    said = _asked(rows)
    by_tool: dict[str, Callable[[int, Measured], float | None]] = {
        OURS: lambda place, row: predicted_peak(row),
        ACCELERATE: lambda place, row: _with_libraries(said[place]["accelerate"], row),
        DEEPSPEED: lambda place, row: _with_libraries(said[place]["deepspeed"], row),
        ELEUTHER: lambda place, row: _with_libraries(eleuther_bytes(row.request), row),
    }
    return [_standing(tool, rows, by_tool[tool]) for tool in TOOLS]


def _standing(tool: str, rows: Sequence[Measured], ask: Callable[[int, Measured], float | None]) -> Standing:
    errors, verdicts = [], []
    for place, row in enumerate(rows):
        peak = ask(place, row)
        if peak is None:
            continue
        if row.peak_bytes is not None:
            errors.append(abs(peak / row.peak_bytes - 1))
        if row.fits is not None and row.request.box.device.memory_gib:
            said = predicted_fit(row) if tool == OURS else peak <= row.request.box.device.visible_gib * GIB
            verdicts.append((said, row.fits))
    return Standing(
        tool=tool,
        peaks=len(errors),
        median_error=statistics.median(errors) if errors else None,
        worst_error=max(errors, default=None),
        judged=len(verdicts),
        right=sum(said == was for said, was in verdicts),
        ran_out=sum(not was for _, was in verdicts),
        called=sum(not said and not was for said, was in verdicts),
    )


def _with_libraries(said: float | None, row: Measured) -> float | None:
    """Of a process without a GPU all memory is measured, and no tool speaks of its libraries: it is given ours."""
    if said is None or not row.request.box.in_host_memory:
        return said
    return said + predict_memory(row.request).host_parts["libraries"] / row.request.box.ranks


def _asked(rows: Sequence[Measured]) -> list[Mapping[str, int | None]]:
    """In a process of its own: the estimators are parts of libraries that import torch."""
    command = [sys.executable, "-m", "study.metrics.flops"]
    given = json.dumps([_figures(row.request) for row in rows])
    try:
        answer = subprocess.run(
            command, cwd=REPOSITORY, input=given, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
        said = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RunFailed(
            f"the other estimators did not answer ({first_line(error)})", "pip install -e '.[train]'"
        ) from None
    return list(said)


def _figures(request: Request) -> dict[str, object]:
    strategy = request.strategy
    return {
        "parameters": request.shape.parameters,
        # DeepSpeed's "largest layer" is the largest module's own tensors: mostly the embedding.
        "largest_layer": max(tensor.elements for tensor in request.shape.tensors),
        "gpus": request.box.gpus_per_node,
        "nodes": request.box.nodes,
        "precision": request.precision,
        # FSDP shards what stage 3 shards.
        "stage": 3 if strategy.is_fsdp else strategy.zero_stage,
        "optimizer": strategy.offload_device("optimizer") is not None,
        "weights": strategy.offload_device("param") is not None,
    }


def eleuther_bytes(request: Request) -> float:
    """Of a GPU, by the arithmetic of EleutherAI/cookbook's calc/calc_transformer_mem.py with its default settings.

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
