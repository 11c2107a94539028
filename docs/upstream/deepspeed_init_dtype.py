"""`deepspeed.zero.Init(dtype=torch.float32)` builds bfloat16 weights on a device without fp16, such as a CPU.

`_set_dtype` has `dtype or torch.float16 if fp16_supported else torch.bfloat16 ...`, which Python reads as
`(dtype or torch.float16) if fp16_supported else ...`: without fp16 the given dtype is dropped.
"""

import os
import sys

import deepspeed
import torch

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29517")
deepspeed.init_distributed("gloo", verbose=False)
with deepspeed.zero.Init(dtype=torch.float32):
    weight = torch.nn.Linear(4, 4).weight
torch.distributed.destroy_process_group()
print(f"float32 was asked for; the weight is {weight.dtype}")
sys.exit(0 if weight.dtype == torch.float32 else 1)
