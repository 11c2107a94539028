"""With ZenFlow at stage 3 Adam's bias correction begins again after a resume, from DeepSpeed 0.18.1 on.

While ZenFlow warms up, Adam's step is ZenFlow's own count (engine_stage3.zenflow_cpu_optimizer_step). No checkpoint has
it, so that the moments of eleven steps are corrected as those of one.
"""

import os
import sys
import tempfile

import deepspeed
import torch

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29543")
zenflow = {
    "topk_ratio": 0.5,
    "select_strategy": "step",
    "select_interval": 1,
    "update_interval": 1,
    "full_warm_up_rounds": 100,
}
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "zenflow": zenflow},
}


def build() -> deepspeed.DeepSpeedEngine:
    return deepspeed.initialize(model=torch.nn.Linear(8, 8), config=settings)[0]


def read_bias(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([engine.module.bias]):
        return engine.module.bias.detach().clone()


def step(engine: deepspeed.DeepSpeedEngine) -> float:
    """Train a step, whose gradient of the bias is always 1, and return how far the bias moves."""
    before = read_bias(engine)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    return float((read_bias(engine) - before).abs().max())


with tempfile.TemporaryDirectory() as folder:
    first, second = build(), build()
    for _ in range(10):
        step(first)
    first.save_checkpoint(folder)
    second.load_checkpoint(folder)
    ratio = step(second) / step(first)
torch.distributed.destroy_process_group()
print(f"the first step after a resume is {ratio:.3g} times the step without one")
sys.exit(0 if abs(ratio - 1) < 1e-3 else 1)
