"""Print the elements of rank 0's parameters of a tiny Llama, over two FSDP2 ranks by two tensor-parallel ranks."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from study.workloads.presets import PRESETS

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
preset = PRESETS["llama-tiny"]
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(preset.model_type, **preset.architecture))
for layer in model.model.layers:
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    parallelize_module(layer, mesh["tp"], plan)
parallelize_module(model, mesh["tp"], {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()})
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh["dp_shard"])
fully_shard(model, mesh=mesh["dp_shard"])
print("SAYS", json.dumps([param.to_local().numel() for param in model.parameters()]))
