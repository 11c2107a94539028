"""Stages 0 to 2 under Ulysses double the gradients of two ranks that divide a sequence; stage 3 does not.

Stages 0 to 2 average gradients over groups of ranks with the same part of a sequence and sum them within a sequence's
group (stage_1_and_2.py, allreduce_bucket). The loss of DeepSpeed's own tutorial is the mean over whole sequences by a
differentiable all_gather, whose backward pass sums already. Stage 3 averages over all ranks.
"""

import os
import sys

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import safe_get_full_grad

TOKENS, WIDTH = 8, 4


def gradient_factor(stage: int) -> float:
    """Return the gradient of two ranks with half a sequence each, as a multiple of that of one process."""
    torch.manual_seed(0)
    model, sample = torch.nn.Linear(WIDTH, WIDTH), torch.randn(1, TOKENS, WIDTH)
    model(sample).square().mean().backward()
    right = model.weight.grad.clone()
    model.zero_grad()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, optimizer=torch.optim.AdamW(model.parameters()), mpu=parallel_state_sp
    )
    part = sample.chunk(2, dim=1)[torch.distributed.get_rank()]
    losses = torch.distributed.nn.functional.all_gather(engine(part).square().mean())
    engine.backward(sum(losses) / len(losses))
    gradient = safe_get_full_grad(model.weight)
    return float((gradient * right).sum() / right.square().sum())


def run(rank: int, status: "torch.multiprocessing.SimpleQueue") -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
    parallel_state_sp.initialize_sequence_parallel(2)
    factors = {stage: gradient_factor(stage) for stage in range(4)}
    if rank == 0:
        status.put(factors)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29524")
    # Forks need no imports, and are none of a process that uses a GPU.
    method = "spawn" if torch.cuda.is_available() else "fork"
    answers = torch.multiprocessing.get_context(method).SimpleQueue()
    torch.multiprocessing.start_processes(run, (answers,), nprocs=2, start_method=method)
    found = answers.get()
    print(
        "gradients by stage, in multiples of one process's:", {stage: round(value, 3) for stage, value in found.items()}
    )
    sys.exit(0 if all(abs(value - 1) < 0.01 for value in found.values()) else 1)
