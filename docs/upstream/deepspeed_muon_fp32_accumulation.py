"""Muon at stage 2 with bf16 weights and fp32 gradients loses the gradients of biases, in DeepSpeed 0.19.8.

`average_tensor` of stages 1 and 2 merges neighbouring ranges of a bucket that have one destination. The range of a Muon
matrix has no place in the fp32 gradients, and merged with the range before it, it takes that range's place away.
"""

import os
import sys

import deepspeed
import torch
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.utils import safe_get_full_grad

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29521")
model = torch.nn.Linear(8, 8)
model.weight.use_muon, model.bias.use_muon = True, False
groups = [
    {"params": [model.weight], "use_muon": True, "lr": 1e-2, "momentum": 0.95},
    {"params": [model.bias], "use_muon": False, "lr": 1e-2},
]
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=MuonWithAuxAdam(groups))
# The gradient of this loss for the bias is 1.
engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
gradient = safe_get_full_grad(model.bias)
torch.distributed.destroy_process_group()
print(f"the bias has a gradient of {gradient.tolist()[0]:g}, right is 1")
sys.exit(0 if bool((gradient == 1).all()) else 1)
