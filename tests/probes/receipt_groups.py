"""Receipts of loops whose ranks share samples: tensor parallelism alone, and inside of FSDP2.

accelerate launch tests/probes/receipt_groups.py FOLDER tensor|fsdp2
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from study import Receipt

STEPS = 12
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def main(folder: str, kind: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    copies = ranks // 2 if kind == "fsdp2" else 1
    mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("dp", "tp"))
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        if kind == "fsdp2":
            fully_shard(layer, mesh=mesh["dp"])
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh["dp"])
    # Weights on two meshes cannot be in one operation.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    receipt = Receipt(model, optimizer, path=str(Path(folder) / f"{kind}.json"))
    torch.manual_seed(mesh.get_local_rank("dp"))
    for _ in receipt.steps(range(STEPS)):
        tokens = torch.randint(SHAPE["vocab_size"], (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    receipt.close()
    dist.destroy_process_group()


main(*sys.argv[1:])
