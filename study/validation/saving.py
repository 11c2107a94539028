"""What processes held while they saved a checkpoint (reports/checkpoints), beside the prediction for rank 0."""

from __future__ import annotations

import json

import pandas as pd

from study.host.memory import GIB
from study.predict.memory import predict_memory
from study.predict.request import Box, Request
from study.predict.shape import model_shape
from study.report.records.predicted import PROCESSOR
from study.spec.strategies import REPOSITORY, STRATEGY_NAMES, read_strategy

FILE = REPOSITORY / "reports" / "checkpoints" / "memory.json"


def table() -> pd.DataFrame:
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
            box=Box("processes", PROCESSOR, ranks, gathers_into_copies=True),
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
