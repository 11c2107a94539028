"""With its optimizer offloaded Accelerate trains SGD, Muon and others as Adam, without a message.

`map_pytorch_optim_to_deepspeed` takes DeepSpeedCPUAdam for every class that it does not know: it knows AdamW, Adagrad
and Lion.
"""

import os
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29531")
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(cpu=not torch.cuda.is_available())
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
model = torch.nn.Linear(4, 4)
_, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
used = type(optimizer.optimizer.optimizer).__name__
torch.distributed.destroy_process_group()
print(f"given torch's SGD, trained with {used}")
sys.exit(0 if used == "SGD" else 1)
