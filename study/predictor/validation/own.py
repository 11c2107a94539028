"""This project's own records, real and virtual, as measurements: state and traffic to the byte, peaks and times.

Without a GPU a peak is the resident memory of a rank's process in the steps after the first ones, and time counts as no
figure: another box has other cores.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pandas as pd

from study.config.strategies import REPOSITORY, STRATEGY_NAMES, read_strategy
from study.host.memory import GIB
from study.predictor.communication import sent_bytes
from study.predictor.memory import predict_memory
from study.predictor.records import PROCESSOR, request_if_any, request_of
from study.predictor.request import Hardware, Request
from study.predictor.shape import model_shape
from study.predictor.state import state_of
from study.predictor.validation.measured import Measured
from study.records.frames import RUNS_FILE, read_parquet
from study.records.outcome import DEVICE_RAN_OUT
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.virtual_summary import ring_bytes

REPORTS = REPOSITORY / "reports"
SUITES = ("laptop", "claims", "paper_table1", "neighbours", "virtual_scaling", "virtual_settings", "virtual_claims",
          "virtual_neighbours", "virtual_lora", "virtual_models", "virtual_tuning")  # fmt: skip
# Of GPUs, once there are any.
GPU = "gpu"
ALL_STATE, SENT = "state, all", "ring bytes (NCCL) of a step"
# The phase of steps went on after the last evaluation.
_COUNTS_WHAT_THE_LAST_EVALUATION_LEFT = ("dd505bf", "6edd112")


@dataclasses.dataclass(frozen=True)
class Compared:
    """One figure of one record beside its prediction, in bytes."""

    suite: str
    run: str
    figure: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


@functools.cache
def _records() -> pd.DataFrame:
    of_gpus = [GPU] if (REPORTS / GPU / RUNS_FILE).is_file() else []
    tables = [read_parquet(REPORTS / suite).runs.assign(suite=suite) for suite in (*SUITES, *of_gpus)]
    records = pd.concat(tables, ignore_index=True)
    return records[records["trainer"] == "study"]


def runs() -> pd.DataFrame:
    """Every record that has ended well, of what has a prediction."""
    records = _records()
    # A run that changed what a record measures is none of the study's arms.
    return _predictable(records[records["status_state"].eq("ok") & records["params_bytes_device"].notna()])


def _out_of_device_memory() -> pd.DataFrame:
    ended = _records()
    ended = ended[ended["status_state"].eq("oom") & ended["micro_batch_size"].notna()]
    return _predictable(ended[ended["status_reason"].str.startswith(DEVICE_RAN_OUT)])


def _predictable(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[[request_if_any(run) is not None for run in runs.itertuples()]]


def own_rows() -> list[Measured]:
    """Peaks, for the table that has the published ones too."""
    every = (*runs().itertuples(), *_out_of_device_memory().itertuples())
    rows = [(run, request_of(run)) for run in every]
    return [_on_gpu(*row) if row[1].box.device.memory_gib else _in_a_process(*row) for row in rows]


def _in_a_process(run: Any, request: Request) -> Measured:
    return Measured(
        source="own", name=f"{run.suite} {run.run}", request=request, evaluated=_evaluated(run),
        peak_bytes=run.memory_steady_host_gib * GIB, peak_kind="resident_returned" if run.virtual else "resident",
    )  # fmt: skip


def _on_gpu(run: Any, request: Request) -> Measured:
    """Its time counts where all ranks were there, nobody watched its kernels, and no drive took part, whose speed no
    record has."""
    is_ok, is_timed = run.status_state == "ok", not (run.virtual or run.profile_steps or request.strategy.uses_nvme)
    if not pd.isna(run.device_memory_cap_gib):
        # A cap is the allocator's, and does not see the context.
        context = predict_memory(request).device_parts["context"] / GIB
        device = dataclasses.replace(request.box.device, visible_gib=run.device_memory_cap_gib + context)
        request = dataclasses.replace(request, box=dataclasses.replace(request.box, device=device))
    return Measured(
        source="own", name=f"{run.suite} {run.run}", request=request, fits=is_ok,
        peak_bytes=_peak_of_steps(run) if is_ok else None,
        step_s=run.step_time_s_median if is_ok and is_timed else None,
    )  # fmt: skip


def _peak_of_steps(run: Any) -> float:
    """What is predicted: the start and evaluations have peaks of their own."""
    return float(np.nanmax([run.memory_first_step_allocated_gib, run.memory_steady_allocated_gib])) * GIB


def _evaluated(run: Any) -> Literal["never", "between", "last"]:
    if 0 < run.eval_steps < run.steps:
        return "between"
    at_end = not pd.isna(run.eval_loss_final) and str(run.git_commit).startswith(_COUNTS_WHAT_THE_LAST_EVALUATION_LEFT)
    return "last" if at_end else "never"


def compared() -> Iterator[Compared]:
    """Every figure of state by kind and place, all of it, and what left the rank in a step."""
    for run in runs().itertuples():
        yield from compared_of(run)


def compared_of(run: Any) -> Iterator[Compared]:
    request = request_of(run)
    state = state_of(request)
    total = dict.fromkeys(("measured", "predicted"), 0.0)
    for kind in STATE_KINDS:
        for place in STATE_PLACES:
            value = getattr(run, f"{kind}_bytes_{place}")
            measured, predicted = 0.0 if pd.isna(value) else value, getattr(state, f"{kind}_{place}")
            total["measured"] += measured
            total["predicted"] += predicted
            if measured or predicted:
                yield Compared(run.suite, run.run, f"{kind}, {place}", measured, predicted)
    yield Compared(run.suite, run.run, ALL_STATE, **total)
    yield Compared(run.suite, run.run, SENT, ring_bytes(json.loads(run.collectives)), sent_bytes(request))


def table() -> pd.DataFrame:
    """By figure: of how many records, and how far off the prediction is."""
    rows = pd.DataFrame([{**dataclasses.asdict(one), "error": abs(one.error)} for one in compared()])
    # A few bytes of norms and flags are sent even where nothing else is.
    rows = rows[~((rows["figure"] == SENT) & (rows["measured"] < 1000) & (rows["predicted"] < 1000))]
    found = rows.groupby("figure", sort=False)["error"]
    return pd.DataFrame({
        "figure": list(found.groups), "records": found.count().to_list(),
        "median error": found.median().to_list(), "worst error": found.max().to_list(),
    })  # fmt: skip


FILE = REPOSITORY / "reports" / "checkpoints" / "memory.json"


def saving_table() -> pd.DataFrame:
    """Arms with settings of their own are left out. Without a GPU the state on the device is in the process as well."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    flags = dict(zip(found["flags"][::2], found["flags"][1::2], strict=True))
    lines = []
    for name, arm in found["arms"].items():
        if name not in STRATEGY_NAMES:
            continue
        ranks = found["ranks"]
        memory = predict_memory(Request(
            shape=model_shape(flags["--model_name_or_path"]), strategy=read_strategy(name),
            box=Hardware("processes", PROCESSOR, ranks, gathers_into_copies=True),
            sequence_length=int(flags["--seq_length"]), micro_batch=int(flags["--global_batch_size"]) // ranks,
            accumulation=1, precision=flags["--precision"], gradient_checkpointing=False, attention="sdpa",
        ))  # fmt: skip
        predicted = (memory.steady_allocated.value + memory.host_parts["rank"]) / GIB
        measured = max(rank["phases_host_gib"]["save"] for rank in arm["save"])
        lines.append({
            "strategy": name, "while it saves, GiB": round(measured, 2), "predicted": round(predicted, 2),
            "error": f"{predicted / measured - 1:+.0%}",
        })  # fmt: skip
    return pd.DataFrame(lines)
