"""A plain loop under wrappers that nobody's Accelerator made: FSDP in both versions, some of them wrapped wrongly.

It prints the receipt of each way of wrapping.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from study import Receipt

VOCABULARY, WIDTH, LENGTH = 1000, 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class NanoGpt(nn.Module):
    """In the style of small repositories: the model returns logits and loss, and has no config of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.wte(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def wrap(model: NanoGpt, way: str) -> Any:
    if way.startswith("fsdp1"):
        device = torch.device("cpu")
        kinds = {Block, nn.Embedding} if way == "fsdp1_whole" else {Block}
        if way == "fsdp1_tied":
            model.head.weight = model.wte.weight
        ignored = [model.wte] if way == "fsdp1_outside" else None
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(kinds),
            device_id=device,
            ignored_modules=ignored,
            use_orig_params=way == "fsdp1_outside",
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    if way.startswith("whole"):
        fully_shard(model.wte, mesh=mesh)
        fully_shard(model.head, mesh=mesh)
    if way != "outside":
        fully_shard(model, mesh=mesh)
    return model


def without_reduction(model: Any, way: str, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Leave the reduction to the last micro-batch, unless the loop of this way forgets to."""
    if way.endswith("_forgets"):
        return contextlib.nullcontext()
    if way.startswith("fsdp1"):
        return contextlib.nullcontext() if is_last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def train(way: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model = wrap(NanoGpt(), way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "receipt.json"
        receipt = Receipt(model, optimizer, path=path, after=2, steps=3, quiet=True)
        for _ in range(7):
            with receipt.step():
                count = 2 if way.endswith(("_forgets", "_waits")) else 1
                for number in range(count):
                    tokens = torch.randint(VOCABULARY, (4, LENGTH))
                    with without_reduction(model, way, is_last=number == count - 1):
                        _, loss = model(tokens, tokens.roll(-1, 1))
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        receipt.close()
        document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    dist.barrier()
    return document


dist.init_process_group("gloo")
receipts = {way: train(way) for way in sys.argv[1:]}
print("PROBE " + json.dumps({"rank": dist.get_rank(), "receipts": receipts}), flush=True)
dist.destroy_process_group()
