"""What study/predict says of a record: its request, and the figures that a page shows beside the measured ones."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pandas as pd

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.strategies import RANKS_OF_A_MACHINE
from study.predictor.boxes import box_of, box_of_devices
from study.predictor.communication import sent_bytes
from study.predictor.hardware import Device
from study.predictor.memory import predict_memory
from study.predictor.request import Hardware, Request, box_of_ranks
from study.predictor.runs import request_for
from study.predictor.shape import sequence_length
from study.predictor.state import state_of
from study.predictor.time import predict_time

# Virtual ranks of these commits did not make the copies that gloo makes yet (3b78753).
WITHOUT_COPIES = ("1f63150", "771d7fe")
PROCESSOR = Device(
    name="CPU core", pattern="CPU core", peak_tflops=dict.fromkeys(("fp32", "tf32", "bf16", "fp16")),
    memory_bandwidth_gb_per_s=0.0, memory_gib=0.0,
)  # fmt: skip
# Options that change what a rank holds. Older records lack some.
_OPTIONS = (
    "model_name_or_path", "seq_length", "precision", "gradient_checkpointing", "attn_implementation", "dropout",
    "torch_compile", "peft", "lora_rank", "optimizer", "bf16_states",
)  # fmt: skip
# What a virtual job is planned for.
PLANNED_DEVICE, PLANNED_LENGTH, PLANNED_MICRO_BATCH = "H100", 1024, 2


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Of one rank, but for the speed, which is that of all. A box without a GPU has no speed."""

    state_bytes: float = math.nan
    sent_bytes: float = math.nan
    peak_bytes: float = math.nan
    tokens_per_s: float = math.nan


def predicted(run: Any) -> Predicted:
    request = request_if_any(run)
    if request is None:
        return Predicted()
    state = state_of(request)
    timed = _planned(request) if run.virtual else request
    return Predicted(
        state_bytes=state.device + state.host + state.nvme,
        sent_bytes=sent_bytes(request),
        peak_bytes=math.nan if request.box.in_host_memory else predict_memory(request).peak_allocated.value,
        tokens_per_s=math.nan
        if timed.box.in_host_memory
        else predict_time(timed).tokens_per_s_per_gpu.value * timed.box.ranks,
    )


def request_if_any(run: Any) -> Request | None:
    try:
        return request_of(run)
    except UserError:
        return None


def request_of(run: Any) -> Request:
    """Refuses a model and settings that nobody has arithmetic for."""
    known = {name: value for name in _OPTIONS if not pd.isna(value := getattr(run, name))}
    # A column in which some are missing is one of floats.
    known |= {name: int(known[name]) for name in ("seq_length", "lora_rank") if name in known}
    config = RunConfig(engine_override=tuple(json.loads(run.engine_override)), **known)
    return request_for(
        run.strategy, config, _box_of(run), int(run.micro_batch_size), int(run.gradient_accumulation_steps)
    )


def _box_of(run: Any) -> Hardware:
    devices = json.loads(run.devices) if isinstance(run.devices, str) else []
    ranks = int(run.world_size)
    if not devices:
        copies = not str(run.git_commit).startswith(WITHOUT_COPIES)
        return dataclasses.replace(box_of_ranks("processes", PROCESSOR, ranks), gathers_into_copies=copies)
    return box_of_devices(devices[0], ranks, 1 if pd.isna(run.machines) else int(run.machines))


def _planned(request: Request) -> Request:
    """The same job on machines of eight GPUs, with batches as one trains there."""
    nodes = max(1, request.box.ranks // RANKS_OF_A_MACHINE)
    return dataclasses.replace(
        request, box=box_of(f"{nodes}x{request.box.ranks // nodes}x{PLANNED_DEVICE}"), micro_batch=PLANNED_MICRO_BATCH,
        sequence_length=sequence_length(request.shape, None, PLANNED_LENGTH),
    )  # fmt: skip
