"""Receipts under older releases, in loops as people write them: does it end a run, and what does it not see?

    OLDER/bin/python -m torch.distributed.run --standalone --nproc_per_node 2 tests/probes/receipt_older.py ROWS

OLDER is an environment with the releases. For each engine rank 0 appends a row of JSON to the file ROWS; that of the
stacks of docs/receipt.md is tests/data/receipts/older.jsonl.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import receipt_strategies as strategies  # type: ignore[import-not-found]  # found beside this file
import torch.distributed as dist
from accelerate import Accelerator

BUCKET = 100_000


def make_ddp() -> tuple[Any, Any]:
    made: tuple[Any, Any] = strategies.make_ddp(strategies.make_model())
    return made


def make_by_accelerate() -> tuple[Any, Any]:
    model = strategies.make_model()
    made: tuple[Any, Any] = Accelerator(cpu=True).prepare(model, strategies.make_adamw(model))
    return made


def make_stage(stage: int) -> tuple[Any, Any]:
    import deepspeed

    model = strategies.make_model()
    zero = {"stage": stage, "reduce_bucket_size": BUCKET}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_param_persistence_threshold": 1000}
    settings = {
        "train_micro_batch_size_per_gpu": strategies.SAMPLES,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = strategies.make_adamw(model)
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine, wrapped


ENGINES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "DDP": make_ddp,
    "DDP by Accelerate": make_by_accelerate,
    "FSDP1": strategies.fsdp1,
    **{f"ZeRO-{stage}": functools.partial(make_stage, stage) for stage in (1, 2, 3)},
}


def run(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "receipt.json"
        without = strategies.train(ENGINES[name], None)
        # What an earlier engine has left would be in the memory of the next one.
        gc.collect()
        losses = strategies.train(ENGINES[name], path)
        gc.collect()
        receipt = json.loads(path.read_text()) if path.exists() else {}
    parts = receipt["memory"]["parts"] if receipt.get("memory") else {}
    return {
        "packages": receipt.get("packages"),
        "engine": name,
        "equal": losses == without,
        "attributed": sum(parts.values()) / receipt["memory"]["total_bytes"] if parts else None,
        "communication_s": receipt.get("time", {}).get("parts", {}).get("communication"),
        "missing": [*receipt.get("failures", ()), *receipt.get("unavailable", ())],
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in ENGINES:
        row = run(name)
        dist.barrier()
        if dist.get_rank() == 0:
            print(row, flush=True)
            with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
