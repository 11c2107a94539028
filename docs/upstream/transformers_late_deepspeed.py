"""`TrainingArguments.deepspeed` has no effect after construction: the Trainer trains without DeepSpeed.

The plugin is built in `TrainingArguments.__post_init__`; an assignment afterwards changes the field alone.
"""

import sys
import tempfile

import torch
from transformers import Trainer, TrainingArguments

ZERO_3 = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none")
    arguments.deepspeed = ZERO_3
    trainer = Trainer(torch.nn.Linear(4, 4), arguments)
print(f"arguments.deepspeed is set: {arguments.deepspeed is ZERO_3}; DeepSpeed is on: {trainer.is_deepspeed_enabled}")
sys.exit(0 if trainer.is_deepspeed_enabled else 1)
