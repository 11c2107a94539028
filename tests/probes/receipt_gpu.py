"""Does a receipt change the losses of a loop, and what does it cost? For a GPU; elsewhere it is tiny, and in fp32.

    python tests/probes/receipt_gpu.py FOLDER [LOOP ...] [--deterministic]

Each LOOP, a function below, trains GPT-2 three times from the same weights and data: without a receipt, without
one again, which is the control, and with one. Where the first two differ, a kernel is not deterministic, and a
difference of the third shows nothing. A row of JSON per loop is printed after PROBE and appended to FOLDER/rows.jsonl;
receipts are FOLDER/LOOP.json. One process is one rank; torchrun starts several.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from study import Receipt
from study.config.strategies import read_strategy
from study.host import folders, operators
from study.receipt.document import ReceiptDocument, read_receipt

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if IS_GPU else torch.device("cpu")
BACKEND = "nccl" if IS_GPU else "gloo"
SIZES = (
    {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 512, "vocab_size": 50257}
    if IS_GPU
    else {"n_layer": 2, "n_embd": 192, "n_head": 4, "n_positions": 32, "vocab_size": 512}
)
SAMPLES = 8 if IS_GPU else 2
# Optimizer steps of a loop: 5 unmeasured ones, 5 measured ones, and later ones.
STEPS, FIRST_COUNTED = 16, 5
ACCUMULATION = {"checkpointed": 2}


class Training(NamedTuple):
    """Losses of each micro-batch, to the last bit, seconds of each optimizer step, and torch's peak of memory."""

    losses: list[str]
    seconds: list[float]
    peak_bytes: int | None


def make_model() -> Any:
    torch.manual_seed(1)
    config = GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def make_batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3 + int(os.environ["RANK"]))
    shape = (SAMPLES, SIZES["n_positions"])
    return [torch.randint(SIZES["vocab_size"], shape, generator=generator) for _ in range(count)]


def make_adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=IS_GPU)


def train(model: Any, optimizer: Any, path: Path | None, accumulation: int = 1, autocasts: bool = True) -> Training:
    """Train a model or an engine; with a receipt at the path, if one is given."""
    is_engine = hasattr(model, "backward")
    batches: Any = make_batches(STEPS * accumulation)
    receipt = Receipt(model, optimizer, path=path) if path is not None else None
    losses, seconds = [], []
    synchronize()
    began = time.perf_counter()
    for number, batch in enumerate(receipt.steps(batches) if receipt is not None else batches):
        batch = batch.to(DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocasts and IS_GPU):
            loss = model(input_ids=batch, labels=batch).loss
        (model if is_engine else loss).backward(*([loss] if is_engine else []))
        losses.append(loss.detach())
        if is_engine:
            model.step()
        elif (number + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        if (number + 1) % accumulation == 0:
            synchronize()
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
    if receipt is not None:
        receipt.close()
    peak = torch.cuda.max_memory_allocated() if IS_GPU else None
    return Training([float(loss).hex() for loss in losses], seconds, peak)


def plain(path: Path | None) -> Training:
    model = make_model().to(DEVICE)
    return train(model, make_adamw(model), path)


def checkpointed(path: Path | None) -> Training:
    model = make_model().to(DEVICE)
    model.gradient_checkpointing_enable()
    model.train()
    return train(model, make_adamw(model), path, ACCUMULATION["checkpointed"])


def compiled(path: Path | None) -> Training:
    model = make_model().to(DEVICE)
    optimizer = make_adamw(model)
    return train(torch.compile(model), optimizer, path)


def ddp(path: Path | None) -> Training:
    start_group()
    model = torch.nn.parallel.DistributedDataParallel(make_model().to(DEVICE))
    return train(model, make_adamw(model), path)


def fsdp2(path: Path | None) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    start_group()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if IS_GPU else None, reduce_dtype=torch.float32)
    model = make_model().to(DEVICE)
    for block in [*model.transformer.h, model]:
        fully_shard(block, mp_policy=policy)
    return train(model, make_adamw(model), path, autocasts=False)


def zero2(path: Path | None) -> Training:
    return train_deepspeed(path, {"stage": 2})


def zero3(path: Path | None) -> Training:
    return train_deepspeed(path, {"stage": 3, "stage3_param_persistence_threshold": 10_000})


def zero2_cpu(path: Path | None) -> Training:
    return train_deepspeed(path, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": IS_GPU}})


def train_deepspeed(path: Path | None, zero: dict[str, Any]) -> Training:
    """Train under DeepSpeed, whose engine is taken down afterwards: its hooks keep it alive."""
    import deepspeed

    # A lock of a killed build would stop DeepSpeed for ever.
    built_for = read_strategy("zero2_cpu" if "offload_optimizer" in zero else "zero2")
    operators.build_operators(built_for, folders.cache_directory())
    deepspeed.init_distributed(dist_backend=BACKEND, auto_mpi_discovery=False)
    if not IS_GPU:
        # Untouched memory of a bucket would be most of what a tiny model has in use.
        zero = {**zero, "reduce_bucket_size": 100_000}
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": IS_GPU},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": "offload_optimizer" not in zero}},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=make_model(), config=settings)
    try:
        return train(engine, optimizer, path, autocasts=False)
    finally:
        engine.destroy()


LOOPS: dict[str, Callable[[Path | None], Training]] = {
    loop.__name__: loop for loop in (plain, checkpointed, compiled, ddp, fsdp2, zero2, zero3, zero2_cpu)
}


def start_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def free() -> int | None:
    """Free what a loop has left, and return the bytes that are still allocated on the GPU."""
    gc.collect()
    if (compiler := sys.modules.get("torch._dynamo")) is not None:
        compiler.reset()
    if not IS_GPU:
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train a loop three times; return its row."""
    path = folder / f"{name}.json"
    runs, left = {}, []
    for run, receipt in (("without", None), ("control", None), ("with", path)):
        runs[run] = LOOPS[name](receipt)
        left.append(free())
    losses = [training.losses for training in runs.values()]
    row: dict[str, Any] = {
        "equal_control": losses[0] == losses[1],
        "equal_with_receipt": losses[0] == losses[2],
        "losses": [float.fromhex(loss) for loss in (losses[0][0], losses[0][-1])],
        "left_bytes": left,
    }
    for run, training in runs.items():
        row[f"median_ms_{run}"] = 1e3 * statistics.median(training.seconds[FIRST_COUNTED:])
        row[f"step_ms_{run}"] = [round(1e3 * seconds, 1) for seconds in training.seconds]
        row[f"peak_bytes_{run}"] = training.peak_bytes
    return row | (figures_of(read_receipt(str(path))) if os.environ["RANK"] == "0" else {})


def figures_of(receipt: ReceiptDocument) -> dict[str, Any]:
    return {
        "state": receipt.state,
        "attributed": receipt.memory.attributed if receipt.memory is not None else None,
        "added_s": receipt.cost.added_s,
        "failures": receipt.failures,
        "faults": [fault.id for fault in receipt.faults],
        "outside": [row.figure for row in receipt.forecast.comparisons if row.is_outside],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("loops", nargs="*", metavar="LOOP", help=f"of {', '.join(LOOPS)}; default: all")
    parser.add_argument("--deterministic", action="store_true", help="ask torch for deterministic kernels; slower")
    options = parser.parse_args()
    if unknown := [name for name in options.loops if name not in LOOPS]:
        parser.error(f"no such loop: {', '.join(unknown)}; there are {', '.join(LOOPS)}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    if IS_GPU:
        torch.cuda.set_device(DEVICE)
    options.folder.mkdir(parents=True, exist_ok=True)
    rank, has_failed = int(os.environ["RANK"]), False
    facts = {
        "rank": rank,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(DEVICE) if IS_GPU else "cpu",
        "deterministic": options.deterministic,
    }
    for name in options.loops or LOOPS:
        try:
            row = facts | {"loop": name} | measure(name, options.folder)
        except Exception as error:  # of an engine; the other loops are measured
            traceback.print_exc()
            row, has_failed = facts | {"loop": name, "error": f"{type(error).__name__}: {error}"}, True
            free()
        print("PROBE " + json.dumps(row), flush=True)
        if rank == 0:
            with (options.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
