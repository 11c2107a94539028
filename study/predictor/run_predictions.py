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
from typing import Any, Literal

import numpy as np
import pandas as pd

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.places import REPOSITORY
from study.config.strategies import DEFAULT_RANKS_PER_NODE, STRATEGY_NAMES
from study.host.memory import GIB
from study.predictor.communication import sent_bytes
from study.predictor.hardware import CPU_CORE, Hardware, box_from_device_name, box_of_ranks, to_box
from study.predictor.memory import predict_memory
from study.predictor.request import Request, request_for
from study.predictor.shape import resolve_length
from study.predictor.state import predict_state
from study.predictor.time import predict_time
from study.predictor.validation import Measurement
from study.records.frames import RUNS_FILE, read_runs_table
from study.records.outcome import DEVICE_RAN_OUT
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.virtual_summary import ring_bytes

REPORTS = REPOSITORY / "reports"
SUITES = (
    "laptop",
    "claims",
    "paper_table1",
    "neighbours",
    "virtual_scaling",
    "virtual_settings",
    "virtual_claims",
    "virtual_neighbours",
    "virtual_lora",
    "virtual_models",
    "virtual_tuning",
)
# Suite of GPU records, if there are any.
GPU = "gpu"
ALL_STATE, SENT = "state, all", "ring bytes (NCCL) of a step"
# Commits whose recorded peaks follow an older rule: virtual ranks did not make gloo's copies, and the phase of steps
# included the last evaluation. Without these 284 peaks only 78 real ones would remain.
_WITHOUT_COPIES, _WITH_LAST_EVALUATION = ("1f63150", "771d7fe"), ("dd505bf", "6edd112")
# Options that change the memory of a rank. Older records lack some.
_OPTIONS = (
    "model_name_or_path",
    "seq_length",
    "precision",
    "gradient_checkpointing",
    "attn_implementation",
    "dropout",
    "torch_compile",
    "peft",
    "lora_rank",
    "optimizer",
    "bf16_states",
)
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


def request_if_any(run: Any) -> Request | None:
    """Return a record's request; None if it cannot be predicted."""
    try:
        return request_from_record(run)
    except UserError:
        return None


def request_from_record(run: Any) -> Request:
    """Return a record's request; UserError if its model or settings cannot be predicted."""
    options = {name: value for name in _OPTIONS if not pd.isna(value := getattr(run, name))}
    # pandas reads an integer column with missing values as floats.
    options |= {name: int(options[name]) for name in ("seq_length", "lora_rank") if name in options}
    config = RunConfig(engine_override=tuple(json.loads(run.engine_override)), **options)
    devices, ranks = json.loads(run.devices) if isinstance(run.devices, str) else [], int(run.world_size)
    if devices:
        box = box_from_device_name(devices[0], ranks, 1 if pd.isna(run.machines) else int(run.machines))
    else:
        copies = not str(run.git_commit).startswith(_WITHOUT_COPIES)
        box = dataclasses.replace(box_of_ranks("processes", CPU_CORE, ranks), gloo_copies_gathers=copies)
    return request_for(run.strategy, config, box, int(run.micro_batch_size), int(run.gradient_accumulation_steps))


@functools.cache
def _records() -> tuple[tuple[Any, Request], ...]:
    """Return the records that succeeded or ran out of memory and can be predicted, with their requests."""
    gpu_suites = [GPU] if (REPORTS / GPU / RUNS_FILE).is_file() else []
    runs = pd.concat([read_runs_table(REPORTS / suite).assign(suite=suite) for suite in (*SUITES, *gpu_suites)])
    runs = runs[runs["trainer"].eq("study") & runs["micro_batch_size"].notna()]
    # Runs without measured state changed the engine, and are none of the study's strategies.
    is_ok = runs["status_state"].eq("ok") & runs["params_bytes_device"].notna()
    ran_out = runs["status_state"].eq("oom") & runs["status_reason"].str.startswith(DEVICE_RAN_OUT, na=False)
    requests = ((run, request_if_any(run)) for run in pd.concat([runs[is_ok], runs[ran_out]]).itertuples())
    return tuple((run, request) for run, request in requests if request is not None)


def ended_runs() -> list[tuple[Any, Request]]:
    """Return the records that succeeded, with their requests."""
    return [(run, request) for run, request in _records() if run.status_state == "ok"]


def study_rows() -> list[Measurement]:
    """Return this project's measurements, for the table that has the published ones as well. The peak is that of the
    steps, without start and evaluations."""
    return [read_measurement(run, request) for run, request in _records()]


def read_measurement(run: Any, request: Request) -> Measurement:
    """Return a record's measured peak and step time."""
    name = f"{run.suite} {run.run}"
    if not request.box.device.memory_gib:
        evaluated: Literal["never", "between", "last"] = "never"
        if 0 < run.eval_steps < run.steps:
            evaluated = "between"
        elif not pd.isna(run.eval_loss_final) and str(run.git_commit).startswith(_WITH_LAST_EVALUATION):
            evaluated = "last"
        return Measurement(
            "own",
            name,
            request,
            run.memory_steady_host_gib * GIB,
            "resident_returned" if run.virtual else "resident",
            evaluated,
        )
    if not pd.isna(run.device_memory_cap_gib):
        # A cap limits the allocator, which does not include the context.
        context = predict_memory(request).device_parts["context"] / GIB
        device = dataclasses.replace(request.box.device, visible_gib=run.device_memory_cap_gib + context)
        request = dataclasses.replace(request, box=dataclasses.replace(request.box, device=device))
    if run.status_state != "ok":
        return Measurement("own", name, request, fits=False)
    peak = float(np.nanmax([run.memory_first_step_allocated_gib, run.memory_steady_allocated_gib])) * GIB
    # Profiling slows a run down, and no record has the bandwidth of its NVMe.
    is_timed = not (run.virtual or run.profile_steps or request.strategy.uses_nvme)
    return Measurement("own", name, request, peak, step_s=run.step_time_s_median if is_timed else None, fits=True)


@dataclasses.dataclass(frozen=True)
class FigureComparison:
    """One figure of one record and its prediction, in bytes."""

    suite: str
    run: str
    figure: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


def compare_figures() -> Iterator[FigureComparison]:
    """Yield every figure of every successful record with its prediction."""
    for run, _ in ended_runs():
        yield from compare_run_figures(run)


def compare_run_figures(run: Any) -> Iterator[FigureComparison]:
    """Yield one record's state by kind and place, its total state, and the bytes sent per step."""
    request = request_from_record(run)
    state, all_measured, all_predicted = predict_state(request), 0.0, 0.0
    for kind in STATE_KINDS:
        for place in STATE_PLACES:
            value = getattr(run, f"{kind}_bytes_{place}")
            measured, expected = 0.0 if pd.isna(value) else value, getattr(state, f"{kind}_{place}")
            all_measured, all_predicted = all_measured + measured, all_predicted + expected
            if measured or expected:
                yield FigureComparison(run.suite, run.run, f"{kind}, {place}", measured, expected)
    yield FigureComparison(run.suite, run.run, ALL_STATE, all_measured, all_predicted)
    yield FigureComparison(run.suite, run.run, SENT, ring_bytes(json.loads(run.collectives)), sent_bytes(request))


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
