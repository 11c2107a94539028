"""Accelerate's schedules run ahead where ranks share samples: twice as fast with two ranks that divide a sequence.

`AcceleratedScheduler.step` takes a step for each process, as each process has a batch of its own under data
parallelism. Ranks of Ulysses, context or tensor parallelism share their batches.
"""

import os
import sys

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLES = 8


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    return LlamaForCausalLM(config)


def make_sample(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(8)}


def run(rank: int, status: "torch.multiprocessing.SimpleQueue") -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=not torch.cuda.is_available())
    deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
        parallelism_config=ParallelismConfig(
            sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
        ),
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / SAMPLES / 4)
    loader = torch.utils.data.DataLoader([make_sample(seed) for seed in range(SAMPLES)], batch_size=1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    steps = 0
    for batch in loader:
        loss = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            labels=batch["shift_labels"],
            shift_labels=batch["shift_labels"],
        ).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
    if rank == 0:
        status.put((steps, schedule.scheduler.last_epoch))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29525")
    # Forks need no imports, and are none of a process that uses a GPU.
    method = "spawn" if torch.cuda.is_available() else "fork"
    answers = torch.multiprocessing.get_context(method).SimpleQueue()
    torch.multiprocessing.start_processes(run, (answers,), nprocs=2, start_method=method)
    steps_taken, steps_of_schedule = answers.get()
    print(f"two ranks shared {SAMPLES} samples in {steps_taken} steps; the schedule took {steps_of_schedule}")
    sys.exit(0 if steps_of_schedule == steps_taken else 1)
