"""Stage 0 in fp16 divides gradients by the loss scale, and has not multiplied the loss by it.

`engine.backward` scales the loss for ZeRO's optimizers alone; the step of `FP16_UnfusedOptimizer`, or of
`FP16_Optimizer`, divides by the scale. With SGD an update is too small by the scale, 65,536 at first where it is
dynamic.
It needs a GPU, or a CPU that computes in fp16.
"""

import os
import sys

import deepspeed
import torch

LOSS_SCALE = 256.0

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29519")
model = torch.nn.Linear(4, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True, "loss_scale": LOSS_SCALE},
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 0.0,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
(master,) = engine.optimizer.fp32_groups[0]
before = master.detach().clone()
loss = engine(torch.ones(1, 4, dtype=torch.float16, device=engine.device)).sum()
engine.backward(loss)
engine.step()
# The gradient of each weight is 1.
update = (before - master).mean().item()
torch.distributed.destroy_process_group()
print(f"a step of SGD at a rate of 0.5 with a gradient of 1 has changed weights by {update:.6f}")
sys.exit(0 if abs(update - 0.5) < 0.01 else 1)
