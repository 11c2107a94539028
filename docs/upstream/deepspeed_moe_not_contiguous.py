"""Stage 1 without contiguous_gradients mixes the gradients of different experts.

`reduce_independent_p_g_buckets_and_remove_grads` of stages 1 and 2 hands a bucket of experts to
`buffered_reduce_fallback`, which names no process group: experts that only one rank has are reduced over all ranks.
Stage 2 refuses MoE without contiguous_gradients, stage 1 warns that it is experimental.
"""

import os
import sys

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import safe_get_full_grad


def gradient_of_expert(contiguous: bool) -> torch.Tensor:
    """Return the gradient of this rank's expert, of two on two ranks."""
    torch.manual_seed(0)
    model = MoE(4, torch.nn.Linear(4, 4), num_experts=2, ep_size=2, k=1, min_capacity=0, drop_tokens=False)
    experts = [parameter for name, parameter in model.named_parameters() if "experts" in name]
    gate = [parameter for name, parameter in model.named_parameters() if "experts" not in name]
    groups = [
        {"params": gate, "name": "gate"},
        {"params": experts, "name": experts[0].group_name, "moe": True},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "contiguous_gradients": contiguous},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=torch.optim.AdamW(groups))
    torch.manual_seed(torch.distributed.get_rank())
    engine.backward(engine(torch.randn(8, 4))[0].square().sum())
    gradient: torch.Tensor = safe_get_full_grad(experts[0])
    return gradient


def run(rank: int, status: "torch.multiprocessing.SimpleQueue") -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
    right, other = gradient_of_expert(True), gradient_of_expert(False)
    if rank == 0:
        status.put((float(right.norm()), float(other.norm()), bool(torch.allclose(right, other, rtol=1e-4))))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29523")
    # Forks need no imports, and are none of a process that uses a GPU.
    method = "spawn" if torch.cuda.is_available() else "fork"
    answers = torch.multiprocessing.get_context(method).SimpleQueue()
    torch.multiprocessing.start_processes(run, (answers,), nprocs=2, start_method=method)
    right_norm, other_norm, is_equal = answers.get()
    print(
        f"an expert's gradient has a norm of {other_norm:.3f} without contiguous_gradients, right is {right_norm:.3f}"
    )
    sys.exit(0 if is_equal else 1)
