"""Accelerate replaces DeepSpeedCPUAdam by one whose weight decay is part of the gradient, as in Adam and not in AdamW.

DeepSpeedCPUAdam is AdamW by default. `map_pytorch_optim_to_deepspeed` makes a new one for every offloaded optimizer,
with `adamw_mode=False` unless the class derives from torch's AdamW; DeepSpeedCPUAdam does not.
"""

import os
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from deepspeed.ops.adam import DeepSpeedCPUAdam

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29532")
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(cpu=not torch.cuda.is_available())
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
model = torch.nn.Linear(4, 4)
given = DeepSpeedCPUAdam(model.parameters(), lr=0.1, weight_decay=0.5)
_, optimizer = accelerator.prepare(model, given)
used = optimizer.optimizer.optimizer
torch.distributed.destroy_process_group()
print(f"decay apart from the gradient (AdamW): given {given.adam_w_mode}, used {used.adam_w_mode}")
sys.exit(0 if used.adam_w_mode == given.adam_w_mode else 1)
