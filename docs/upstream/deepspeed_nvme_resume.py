"""With the optimizer on NVMe a loaded checkpoint does not restore the fp32 weights.

`load_checkpoint` skips the optimizer's states there, and copies the swap files instead. A tensor that is too small to
be swapped is in none of them, so that the next step starts from the weights with which the model was built.
"""

import os
import sys
import tempfile

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29534")


def build(folder: str) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": folder}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    return deepspeed.initialize(model=model, config=settings)[0]


def step(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    engine.backward(engine(torch.ones(1, 16)).sum())
    engine.step()
    return safe_get_full_fp32_param(engine.module.weight).clone()


with tempfile.TemporaryDirectory() as folder:
    first = build(f"{folder}/first")
    step(first)
    first.save_checkpoint(f"{folder}/checkpoint")
    right = step(first)
    second = build(f"{folder}/second")
    second.load_checkpoint(f"{folder}/checkpoint")
    resumed = step(second)
torch.distributed.destroy_process_group()
difference = float((resumed - right).abs().max())
print(f"the step after loading differs from the same step without by {difference:.3g}; a step is 0.1")
sys.exit(0 if difference < 1e-6 else 1)
