"""Predictions for this project's records, real and virtual, and their comparison with the measurements.

State and traffic are compared byte by byte, peaks and times by relative error. Without a GPU the peak is the resident
memory of a rank's process after the first steps, and times are not compared, since they depend on the machine's cores.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from study.config.flags import RunConfig
from study.config.places import REPOSITORY
from study.config.strategies import DEFAULT_RANKS_PER_NODE, STRATEGY_NAMES
from study.host.memory import GIB
from study.predictor import recorded_runs
from study.predictor.communication import sent_bytes
from study.predictor.hardware import CPU_CORE, Hardware, to_box
from study.predictor.memory import predict_memory
from study.predictor.recorded_runs import SENT, FigureComparison, compare_run_figures, read_measurement, request_if_any
from study.predictor.request import Request, request_for
from study.predictor.shape import resolve_length
from study.predictor.state import predict_state
from study.predictor.time import predict_time
from study.predictor.validation import Measurement
from study.records.frames import read_runs_table

# Device, sequence length and micro-batch for which the time of a virtual run is predicted.
PLANNED_DEVICE, PLANNED_LENGTH, PLANNED_MICRO_BATCH = "H100", 1024, 2


def predict_run(run: Any) -> dict[str, float]:
    """Predict the figures of one rank of a recorded run, and the speed of all ranks, by column; NaN if not predicted,
    as the speed on CPUs, or all figures of unsupported settings."""
    figures = dict.fromkeys(("predicted_state", "predicted_sent", "predicted_peak", "predicted_tokens_per_s"), math.nan)
    if (request := request_if_any(run)) is None:
        return figures
    state, timed = predict_state(request), request
    figures |= {"predicted_state": state.device + state.host + state.nvme, "predicted_sent": sent_bytes(request)}
    if run.virtual:
        # The same job on machines of eight GPUs, with a batch of realistic size.
        nodes = max(1, request.box.ranks // DEFAULT_RANKS_PER_NODE)
        timed = dataclasses.replace(
            request,
            box=to_box(f"{nodes}x{request.box.ranks // nodes}x{PLANNED_DEVICE}"),
            micro_batch=PLANNED_MICRO_BATCH,
            sequence_length=resolve_length(request.shape, None, PLANNED_LENGTH),
        )
    if not request.box.is_cpu_only:
        figures["predicted_peak"] = predict_memory(request).peak_allocated.value / GIB
    if not timed.box.is_cpu_only:
        figures["predicted_tokens_per_s"] = predict_time(timed).tokens_per_s_per_gpu.value * timed.box.ranks
    return figures


@functools.cache
def _records() -> tuple[tuple[Any, Request], ...]:
    """Return the records that succeeded or ran out of memory and can be predicted, with their requests."""
    reports = recorded_runs.REPORTS
    runs = pd.concat([read_runs_table(reports / suite).assign(suite=suite) for suite in recorded_runs.suites()])
    runs = runs[runs["trainer"].eq("study") & runs["micro_batch_size"].notna()]
    # As in `read_ended_runs`.
    is_ok = runs["status_state"].eq("ok") & runs["params_bytes_device"].notna()
    ran_out = runs["status_state"].eq("oom") & runs["status_cause"].eq("device memory")
    requests = ((run, request_if_any(run)) for run in pd.concat([runs[is_ok], runs[ran_out]]).itertuples())
    return tuple((run, request) for run, request in requests if request is not None)


def ended_runs() -> list[tuple[Any, Request]]:
    """Return the records that succeeded, with their requests."""
    return [(run, request) for run, request in _records() if run.status_state == "ok"]


def study_rows() -> list[Measurement]:
    """Return this project's measurements, for the table that has the published ones as well. The peak is that of the
    steps, without start and evaluations."""
    return [read_measurement(run, request) for run, request in _records()]


def compare_figures() -> Iterator[FigureComparison]:
    """Yield every figure of every successful record with its prediction."""
    for run, _ in ended_runs():
        yield from compare_run_figures(run)


def host_memory_table() -> pd.DataFrame:
    """Return the host memory of each run on a GPU, of one process, and its prediction, in GiB."""
    lines = []
    for run, request in ended_runs():
        if not (request.box.is_cpu_only or run.virtual) and request.box.ranks == 1:
            predicted = predict_memory(request).host_peak.value / GIB
            measured = run.host_peak_rss_gib
            lines.append((run.strategy, run.model_name_or_path, measured, predicted, predicted / measured - 1))
    return pd.DataFrame(lines, columns=["strategy", "model", "measured", "predicted", "error"])


def table() -> pd.DataFrame:
    rows = pd.DataFrame([{**dataclasses.asdict(figure), "error": abs(figure.error)} for figure in compare_figures()])
    # Runs without other communication still send a few bytes of norms and flags.
    rows = rows[~((rows["figure"] == SENT) & (rows["measured"] < 1000) & (rows["predicted"] < 1000))]
    errors = rows.groupby("figure", sort=False)["error"].agg(["count", "median", "max"]).reset_index()
    return errors.set_axis(["figure", "records", "median error", "worst error"], axis="columns")


def saving_table() -> pd.DataFrame:
    """Return a table of host memory while a checkpoint is saved, for unmodified strategies. Without a GPU the process
    includes the device state."""
    measurements = json.loads((REPOSITORY / "reports" / "checkpoints" / "memory.json").read_text(encoding="utf-8"))
    flags = dict(zip(measurements["flags"][::2], measurements["flags"][1::2], strict=True))
    ranks, lines = measurements["ranks"], []
    config = RunConfig(
        model_name_or_path=flags["--model_name_or_path"],
        seq_length=int(flags["--seq_length"]),
        precision=flags["--precision"],
    )
    box = Hardware("processes", CPU_CORE, ranks, gloo_copies_gathers=True)
    for name in (name for name in measurements["arms"] if name in STRATEGY_NAMES):
        memory = predict_memory(request_for(name, config, box, int(flags["--global_batch_size"]) // ranks, 1))
        expected = (memory.steady_allocated.value + memory.host_parts["rank"]) / GIB
        measured = max(rank["phases_host_gib"]["save"] for rank in measurements["arms"][name]["save"])
        lines.append(
            {
                "strategy": name,
                "while it saves, GiB": round(measured, 2),
                "predicted": round(expected, 2),
                "error": f"{expected / measured - 1:+.0%}",
            }
        )
    return pd.DataFrame(lines)
