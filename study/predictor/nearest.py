"""The measurements most similar to a request: published ones, and records of this project."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from study.host.memory import GIB
from study.predictor.request import Request
from study.predictor.shape import trained_text
from study.predictor.validation import (
    Measurement,
    implausibility,
    predicted_peak,
    predicted_step_s,
    published_entries,
)

# Published rows that are named.
_PUBLISHED = 3
# Runs without other communication still send a few bytes of norms and flags.
_FEW_BYTES = 1000


def distance(first: Request, second: Request) -> float:
    """Dissimilarity of two requests: a model e times as large counts as much as a different ZeRO stage."""

    def ratio(a: float, b: float) -> float:
        return abs(math.log(a / b))

    sizes = ratio(first.full_shape.parameters, second.full_shape.parameters) + 0.5 * ratio(
        first.box.ranks, second.box.ranks
    )
    tokens = ratio(first.micro_batch * first.sequence_length, second.micro_batch * second.sequence_length)
    kinds = (
        (
            3 if request.strategy.is_fsdp else request.strategy.zero_stage or 0,
            request.box.device.name,
            [request.strategy.offload_device(what) for what in ("optimizer", "param")],
        )
        for request in (first, second)
    )
    different = sum(kind != second_kind for kind, second_kind in zip(*kinds, strict=True))
    return float(sizes + different) + 0.3 * (tokens + (first.gradient_checkpointing != second.gradient_checkpointing))


def describe_nearest(request: Request) -> Iterator[str]:
    """Yield lines about the most similar measurements: published ones to which no constant was fitted, then this
    project's. A request with LoRA is compared only with rows and records of LoRA, and one without only with others."""
    yield from _published_lines(request)
    # Records need pyarrow, which a prediction does not.
    with contextlib.suppress(ModuleNotFoundError):
        yield from _record_lines(request)


def _published_lines(request: Request) -> Iterator[str]:
    usable = _usable_rows(bool(request.shape.lora_rank))
    for row in sorted(usable, key=lambda row: distance(request, row.request))[:_PUBLISHED]:
        yield f"similar measurement: {row.name}: {'; '.join(_errors(row))} ({row.url or row.source})"


# Once in a process: for a second question on the page, or in a test, it would be a quarter of the time.
@functools.cache
def _usable_rows(has_adapters: bool) -> tuple[Measurement, ...]:
    """Return the published rows to which no constant was fitted, of adapters or of full training."""
    # All rows of adapters led to rules.
    uses = {"score", "rule"} if has_adapters else {"score"}

    def is_wanted(keys: Mapping[str, Any]) -> bool:
        return ("lora_rank" in keys) == has_adapters and keys.get("use", "score") in uses

    return tuple(
        row
        for _, _, row in published_entries(is_wanted)
        if (row.step_s is not None or row.peak_bytes is not None) and implausibility(row) is None
    )


@functools.cache
def _ended_runs() -> tuple[tuple[Any, Request], ...]:
    """Return this project's records that succeeded, with their requests."""
    from study.predictor import recorded_runs

    return tuple(recorded_runs.read_ended_runs())


def _errors(row: Measurement) -> Iterator[str]:
    """Yield the measured peak and step time with their predictions."""
    if row.peak_bytes is not None:
        peak = predicted_peak(row)
        error = peak / row.peak_bytes - 1
        yield f"{row.peak_bytes / GIB:.1f} GiB, predicted {peak / GIB:.1f} ({error:+.0%})"
    if row.step_s is not None:
        step = predicted_step_s(row)
        yield f"{row.step_s:.3g} s per step, predicted {step:.3g} ({step / row.step_s - 1:+.0%})"


def _kind(run: Any, request: Request) -> str:
    if run.virtual:
        return "a virtual rank"
    return "processes without a GPU" if request.box.is_cpu_only else "a GPU"


def _record_lines(request: Request) -> Iterator[str]:
    """Yield the most similar records: of a GPU, of a virtual rank, and of processes without a GPU."""
    from study.predictor import recorded_runs

    has_adapters = bool(request.shape.lora_rank)
    by_kind: dict[str, list[tuple[Any, Request]]] = {"a GPU": [], "a virtual rank": [], "processes without a GPU": []}
    for run, match in _ended_runs():
        if bool(match.shape.lora_rank) == has_adapters:
            by_kind[_kind(run, match)].append((run, match))
    names = {recorded_runs.ALL_STATE: "state", recorded_runs.SENT: "traffic"}
    for kind, pairs in by_kind.items():
        if not pairs:
            continue
        nearest, match = min(pairs, key=lambda pair: distance(request, pair[1]))
        run = recorded_runs.read_whole_run(nearest)
        errors = [
            f"{names[at.figure]} of {at.measured / GIB:.3g} GiB, predicted {at.predicted / GIB:.3g} ({at.error:+.1%})"
            for at in recorded_runs.compare_run_figures(run)
            if at.figure in names and at.measured > _FEW_BYTES
        ]
        if kind == "a GPU":
            errors += _errors(recorded_runs.read_measurement(run, match))
        what = f"{match.shape.name}{trained_text(match.shape)}, {match.strategy.name} on {match.box.ranks} ranks"
        yield f"similar record of this project, {kind}: {what}: {'; '.join(errors)} (reports/{run.suite})"
