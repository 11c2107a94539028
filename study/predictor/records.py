"""This project's own records, real and virtual: their requests, what is predicted of them, and their measurements.

State and traffic are held against the prediction to the byte, peaks and times as figures. Without a GPU a peak is the
resident memory of a rank's process in the steps after the first ones, and time counts as no figure: another box has
other cores.
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
from study.config.strategies import RANKS_OF_A_MACHINE, REPOSITORY, STRATEGY_NAMES, read_strategy
from study.host.memory import GIB
from study.predictor.communication import sent_bytes
from study.predictor.hardware import CPU_CORE, Hardware, box_of, box_of_devices, box_of_ranks
from study.predictor.memory import predict_memory
from study.predictor.request import Request, request_for
from study.predictor.shape import model_shape, sequence_length
from study.predictor.state import state_of
from study.predictor.time import predict_time
from study.predictor.validation import Measured
from study.records.frames import RUNS_FILE, read_runs_table
from study.records.outcome import DEVICE_RAN_OUT
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.virtual_summary import ring_bytes

REPORTS = REPOSITORY / "reports"
SUITES = ("laptop", "claims", "paper_table1", "neighbours", "virtual_scaling", "virtual_settings", "virtual_claims",
          "virtual_neighbours", "virtual_lora", "virtual_models", "virtual_tuning")  # fmt: skip
# Of GPUs, once there are any.
GPU = "gpu"
ALL_STATE, SENT = "state, all", "ring bytes (NCCL) of a step"
# Commits whose records of peaks differ from today's by one rule each: virtual ranks did not make the copies that gloo
# makes, and the phase of steps went on after the last evaluation. Leaving these 284 peaks out would leave 78 real ones.
_WITHOUT_COPIES, _WITH_LAST_EVALUATION = ("1f63150", "771d7fe"), ("dd505bf", "6edd112")
# Options that change what a rank holds. Older records lack some.
_OPTIONS = (
    "model_name_or_path", "seq_length", "precision", "gradient_checkpointing", "attn_implementation", "dropout",
    "torch_compile", "peft", "lora_rank", "optimizer", "bf16_states",
)  # fmt: skip
# What a virtual job is planned for.
PLANNED_DEVICE, PLANNED_LENGTH, PLANNED_MICRO_BATCH = "H100", 1024, 2


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Figures of one rank, but for the speed, which is that of all. A box without a GPU has no speed."""

    state_bytes: float = math.nan
    sent_bytes: float = math.nan
    peak_bytes: float = math.nan
    tokens_per_s: float = math.nan


def predicted(run: Any) -> Predicted:
    if (request := request_if_any(run)) is None:
        return Predicted()
    state, timed = state_of(request), request
    if run.virtual:
        # The same job on machines of eight GPUs, with batches as one trains there.
        nodes = max(1, request.box.ranks // RANKS_OF_A_MACHINE)
        timed = dataclasses.replace(
            request, box=box_of(f"{nodes}x{request.box.ranks // nodes}x{PLANNED_DEVICE}"),
            micro_batch=PLANNED_MICRO_BATCH, sequence_length=sequence_length(request.shape, None, PLANNED_LENGTH),
        )  # fmt: skip
    peak_bytes = tokens_per_s = math.nan
    if not request.box.in_host_memory:
        peak_bytes = predict_memory(request).peak_allocated.value
    if not timed.box.in_host_memory:
        tokens_per_s = predict_time(timed).tokens_per_s_per_gpu.value * timed.box.ranks
    return Predicted(state.device + state.host + state.nvme, sent_bytes(request), peak_bytes, tokens_per_s)


def request_if_any(run: Any) -> Request | None:
    try:
        return request_of(run)
    except UserError:
        return None


def request_of(run: Any) -> Request:
    """Return a record's request; a model and settings without arithmetic are refused."""
    given = {name: value for name in _OPTIONS if not pd.isna(value := getattr(run, name))}
    # A column in which some are missing is one of floats.
    given |= {name: int(given[name]) for name in ("seq_length", "lora_rank") if name in given}
    config = RunConfig(engine_override=tuple(json.loads(run.engine_override)), **given)
    devices, ranks = json.loads(run.devices) if isinstance(run.devices, str) else [], int(run.world_size)
    if devices:
        box = box_of_devices(devices[0], ranks, 1 if pd.isna(run.machines) else int(run.machines))
    else:
        copies = not str(run.git_commit).startswith(_WITHOUT_COPIES)
        box = dataclasses.replace(box_of_ranks("processes", CPU_CORE, ranks), gathers_into_copies=copies)
    return request_for(run.strategy, config, box, int(run.micro_batch_size), int(run.gradient_accumulation_steps))


@functools.cache
def _records() -> tuple[tuple[Any, Request], ...]:
    """Every record that ended well or ran out of memory and has a prediction, with its request."""
    of_gpus = [GPU] if (REPORTS / GPU / RUNS_FILE).is_file() else []
    runs = pd.concat([read_runs_table(REPORTS / suite).assign(suite=suite) for suite in (*SUITES, *of_gpus)])
    runs = runs[runs["trainer"].eq("study") & runs["micro_batch_size"].notna()]
    # A run that changed what a record measures is none of the study's arms.
    is_ok = runs["status_state"].eq("ok") & runs["params_bytes_device"].notna()
    ran_out = runs["status_state"].eq("oom") & runs["status_reason"].str.startswith(DEVICE_RAN_OUT, na=False)
    requests = ((run, request_if_any(run)) for run in pd.concat([runs[is_ok], runs[ran_out]]).itertuples())
    return tuple((run, request) for run, request in requests if request is not None)


def ended_runs() -> list[tuple[Any, Request]]:
    return [(run, request) for run, request in _records() if run.status_state == "ok"]


def own_rows() -> list[Measured]:
    """Peaks, for the table that has the published ones too."""
    return [_gpu_row(*pair) if pair[1].box.device.memory_gib else _process_row(*pair) for pair in _records()]


def _process_row(run: Any, request: Request) -> Measured:
    evaluated: Literal["never", "between", "last"] = "never"
    if 0 < run.eval_steps < run.steps:
        evaluated = "between"
    elif not pd.isna(run.eval_loss_final) and str(run.git_commit).startswith(_WITH_LAST_EVALUATION):
        evaluated = "last"
    return Measured(
        source="own", name=f"{run.suite} {run.run}", request=request, evaluated=evaluated,
        peak_bytes=run.memory_steady_host_gib * GIB, peak_kind="resident_returned" if run.virtual else "resident",
    )  # fmt: skip


def _gpu_row(run: Any, request: Request) -> Measured:
    """Its time counts where all ranks were there, no kernels were profiled, and no NVMe took part, whose speed no
    record has. Its peak is that of steps: the start and evaluations have their own."""
    is_ok, is_timed = run.status_state == "ok", not (run.virtual or run.profile_steps or request.strategy.uses_nvme)
    if not pd.isna(run.device_memory_cap_gib):
        # A cap is the allocator's, and does not see the context.
        context = predict_memory(request).device_parts["context"] / GIB
        device = dataclasses.replace(request.box.device, visible_gib=run.device_memory_cap_gib + context)
        request = dataclasses.replace(request, box=dataclasses.replace(request.box, device=device))
    peak = float(np.nanmax([run.memory_first_step_allocated_gib, run.memory_steady_allocated_gib])) if is_ok else None
    return Measured(
        source="own", name=f"{run.suite} {run.run}", request=request, fits=is_ok,
        peak_bytes=None if peak is None else peak * GIB,
        step_s=run.step_time_s_median if is_ok and is_timed else None,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compared:
    """One figure of one record and its prediction, in bytes."""

    suite: str
    run: str
    figure: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


def compared() -> Iterator[Compared]:
    for run, _ in ended_runs():
        yield from compared_of(run)


def compared_of(run: Any) -> Iterator[Compared]:
    """Every figure of state by kind and place, all of it, and what left the rank in a step."""
    request = request_of(run)
    state, all_measured, all_predicted = state_of(request), 0.0, 0.0
    for kind in STATE_KINDS:
        for place in STATE_PLACES:
            value = getattr(run, f"{kind}_bytes_{place}")
            measured, expected = 0.0 if pd.isna(value) else value, getattr(state, f"{kind}_{place}")
            all_measured, all_predicted = all_measured + measured, all_predicted + expected
            if measured or expected:
                yield Compared(run.suite, run.run, f"{kind}, {place}", measured, expected)
    yield Compared(run.suite, run.run, ALL_STATE, all_measured, all_predicted)
    yield Compared(run.suite, run.run, SENT, ring_bytes(json.loads(run.collectives)), sent_bytes(request))


def table() -> pd.DataFrame:
    """Return the number of records and the prediction's errors by figure."""
    rows = pd.DataFrame([{**dataclasses.asdict(one), "error": abs(one.error)} for one in compared()])
    # A few bytes of norms and flags are sent even where nothing else is.
    rows = rows[~((rows["figure"] == SENT) & (rows["measured"] < 1000) & (rows["predicted"] < 1000))]
    found = rows.groupby("figure", sort=False)["error"]
    return pd.DataFrame({
        "figure": list(found.groups), "records": found.count().to_list(),
        "median error": found.median().to_list(), "worst error": found.max().to_list(),
    })  # fmt: skip


def saving_table() -> pd.DataFrame:
    """Host memory while a checkpoint is saved. Runs with settings of their own are left out. Without a GPU the state on
    the device is in the process as well."""
    found = json.loads((REPOSITORY / "reports" / "checkpoints" / "memory.json").read_text(encoding="utf-8"))
    flags = dict(zip(found["flags"][::2], found["flags"][1::2], strict=True))
    ranks, lines = found["ranks"], []
    for name in (name for name in found["arms"] if name in STRATEGY_NAMES):
        memory = predict_memory(Request(
            shape=model_shape(flags["--model_name_or_path"]), strategy=read_strategy(name),
            box=Hardware("processes", CPU_CORE, ranks, gathers_into_copies=True),
            sequence_length=int(flags["--seq_length"]), micro_batch=int(flags["--global_batch_size"]) // ranks,
            accumulation=1, precision=flags["--precision"], gradient_checkpointing=False, attention="sdpa",
        ))  # fmt: skip
        expected = (memory.steady_allocated.value + memory.host_parts["rank"]) / GIB
        measured = max(rank["phases_host_gib"]["save"] for rank in found["arms"][name]["save"])
        lines.append({
            "strategy": name, "while it saves, GiB": round(measured, 2), "predicted": round(expected, 2),
            "error": f"{expected / measured - 1:+.0%}",
        })  # fmt: skip
    return pd.DataFrame(lines)
