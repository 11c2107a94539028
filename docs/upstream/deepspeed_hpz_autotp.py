"""With zero_hpz_partition_size AutoTP's layers are gathered from a rank that has another part of them.

hpZ's groups are neighbouring ranks of the whole job (`_create_zero_param_parallel_group`, deepspeed/utils/groups.py).
AutoTP gives neighbouring ranks different parts of each matrix, so that a group's copy is none of any matrix.
"""

import os
import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8
    )
    return LlamaForCausalLM(config)


def loss_of_engine(hpz: int, sample: torch.Tensor) -> float:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": hpz, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=torch.optim.AdamW(model.parameters()))
    engine(input_ids=sample, labels=sample)
    # hpZ makes its copy in the first forward pass, and gathers from it afterwards.
    loss = engine(input_ids=sample, labels=sample).loss
    return float(loss.detach())


def run(rank: int, status: "torch.multiprocessing.SimpleQueue") -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
    sample = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(1))
    losses = (
        float(make_model()(input_ids=sample, labels=sample).loss.detach()),
        loss_of_engine(1, sample),
        loss_of_engine(2, sample),
    )
    if rank == 0:
        status.put(losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29527")
    # Forks need no imports, and are none of a process that uses a GPU.
    method = "spawn" if torch.cuda.is_available() else "fork"
    answers = torch.multiprocessing.get_context(method).SimpleQueue()
    torch.multiprocessing.start_processes(run, (answers,), nprocs=4, start_method=method)
    plain, without, with_hpz = answers.get()
    print(f"loss {plain:.4f} in one process, {without:.4f} under AutoTP at stage 3, {with_hpz:.4f} with hpZ as well")
    sys.exit(0 if abs(with_hpz - plain) < 1e-3 else 1)
