"""Count the bytes of a rank's tensors under stage 0 in bf16, by type, with the DeepSpeed that is imported.

    pip install --no-deps --target FOLDER deepspeed==0.17.5     # with DS_BUILD_OPS=0
    PYTHONPATH=FOLDER:. python tools/stage0_bytes.py [--ranks 8]

Up to 0.17.5 stage 0 in bf16 is BF16_Optimizer, which divides its states over the ranks; in newer releases it does not.
All tensors count that are alive at the end of the third backward pass.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

LAYERS, WIDTH = 8, 512
# Smaller tensors are inputs, activations of one sample and counters.
MIN_TENSOR_BYTES = WIDTH * WIDTH // 8
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
}


def main(arguments: list[str] | None = None) -> int:
    """Train for three steps on each rank, and print the bytes of rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args(arguments).ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        record_file = Path(folder) / "bytes.json"
        spawn(functools.partial(_train, ranks=ranks, port=port, record_file=record_file), nprocs=ranks)
        record = json.loads(record_file.read_text(encoding="utf-8"))
    print(f"deepspeed {record['deepspeed']}, {record['optimizer']}, {ranks} ranks, {record['parameters']:,} parameters")
    for kind, nbytes in sorted(record["bytes"].items()):
        print(f"{kind:<10} {nbytes / record['parameters']:6.3f} bytes per parameter")
    print(f"{'all':<10} {sum(record['bytes'].values()) / record['parameters']:6.3f} bytes per parameter")
    return 0


def _train(rank: int, *, ranks: int, port: int, record_file: Path) -> None:
    import deepspeed

    # DeepSpeed reads it instead of the rank that it is given.
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        auto_mpi_discovery=False,
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS)
    for _ in range(2):
        _backward(engine)
        engine.step()
    _backward(engine)
    if rank == 0:
        record = {
            "deepspeed": deepspeed.__version__,
            "optimizer": type(engine.optimizer).__name__,
            "parameters": parameters,
            "bytes": _tensor_bytes(),
        }
        record_file.write_text(json.dumps(record), encoding="utf-8")
    torch.distributed.barrier()


def _backward(engine: Any) -> None:
    sample = torch.randn(1, WIDTH, dtype=torch.bfloat16)
    engine.backward(engine(sample).float().pow(2).mean())


def _tensor_bytes() -> Counter[str]:
    """Return the bytes of all large tensors by type; of two views of one storage one counts."""
    storages: dict[int, tuple[str, int]] = {}
    for item in gc.get_objects():
        # Some objects in there do not bear to be asked for their class.
        if not issubclass(type(item), torch.Tensor):
            continue
        tensors = [item, item.grad] if item.is_leaf and item.grad is not None else [item]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= MIN_TENSOR_BYTES:
                storages[storage.data_ptr()] = (str(tensor.dtype).removeprefix("torch."), storage.nbytes())
    counts: Counter[str] = Counter()
    for kind, nbytes in storages.values():
        counts[kind] += nbytes
    return counts


if __name__ == "__main__":
    sys.exit(main())
