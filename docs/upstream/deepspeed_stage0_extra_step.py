"""Stage 0 with bf16 weights takes an optimizer step with gradients of zero before training.

Adam counts it in its bias correction, and weight decay changes the fp32 weights: `FP16_UnfusedOptimizer` makes the
optimizer's state by a step.
"""

import os
import sys

import deepspeed
import torch

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29518")
model = torch.nn.Linear(4, 4, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
(state,) = engine.optimizer.optimizer.state.values()
steps, weight = float(state["step"]), float(engine.optimizer.fp32_groups[0][0][0, 0])
torch.distributed.destroy_process_group()
print(f"before the first step Adam has counted {steps:g}, and a weight of 1 is {weight:.3f}")
sys.exit(0 if steps == 0 and weight == 1 else 1)
