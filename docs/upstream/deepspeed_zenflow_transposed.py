"""With ZenFlow `deepspeed.initialize` leaves the model with other weights than it was given, from DeepSpeed 0.19.7 on.

ZenFlow flattens transposed matrices (zenflow_utils._flatten_dense_tensors). `_update_model_bit16_weights` of stages 1
and 2 took them apart with ZenFlow's own function, and has viewed the flat buffer in the matrices' shapes since 0.19.7.
"""

import os
import sys

import deepspeed
import torch

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29519")
model = torch.nn.Linear(8, 8)
given = model.weight.detach().clone()
zenflow = {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 1, "update_interval": 1}
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": zenflow},
}
deepspeed.initialize(model=model, config=settings)
weight = model.weight.detach()
torch.distributed.destroy_process_group()
print(f"the weight is as given: {torch.equal(weight, given)}; its transpose: {torch.equal(weight, given.T)}")
sys.exit(0 if torch.equal(weight, given) else 1)
