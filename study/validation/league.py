"""This project's prediction of a GPU's memory beside public estimators, on the same rows."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from study.errors import RunFailed, first_line
from study.host.memory import GIB
from study.predict.memory import predict_memory
from study.predict.request import Request
from study.spec.strategies import REPOSITORY
from study.validation.measured import Measured, predicted_fit, predicted_peak

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
    command = [sys.executable, "-m", "study.measure.estimators"]
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
