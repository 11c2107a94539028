"""With zero_hpz_partition_size frozen weights of a loaded checkpoint are not used.

hpZ gathers a second copy of the weights. `load_checkpoint` renews it for the weights of the optimizer, so that frozen
ones stay those with which the model was built.
"""

import os
import sys
import tempfile

import deepspeed
import torch


def build(seed: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model[1].parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    # hpZ makes its copy in the first forward pass.
    engine(torch.ones(1, 8))
    return engine


def run(rank: int, folder: str, status: "torch.multiprocessing.SimpleQueue") -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
    saved, resumed = build(0), build(1)
    saved.save_checkpoint(folder)
    resumed.load_checkpoint(folder)
    sample = torch.ones(1, 8)
    outputs = saved(sample).detach().cpu(), resumed(sample).detach().cpu()
    if rank == 0:
        status.put(float((outputs[0] - outputs[1]).abs().max()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29535")
    # Forks need no imports, and are none of a process that uses a GPU.
    method = "spawn" if torch.cuda.is_available() else "fork"
    answers = torch.multiprocessing.get_context(method).SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.start_processes(run, (place, answers), nprocs=2, start_method=method)
    difference = answers.get()
    print(f"outputs of the model that was saved and of the one that loaded it differ by {difference:.3g}")
    sys.exit(0 if difference < 1e-6 else 1)
