"""Under Ulysses, Accelerate divides evaluation samples over ranks, whose attention then sees only their own part.

`prepare` wraps every loader that it gets with the model in DeepSpeed's adapter, which divides sequences
(accelerator.py, `_prepare_deepspeed`), and registers Ulysses with disable_in_eval=True, so that attention does not
exchange tokens after `model.eval()`.
"""

import os
import sys

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 16


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=8,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def make_sample(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(TOKENS)}


def mean_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], accelerator: Accelerator) -> float:
    """Return the loss of a sample that two ranks share."""
    labels = batch["shift_labels"]
    with torch.no_grad():
        loss = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=torch.tensor(TOKENS - 1),
        ).loss
    return float(accelerator.reduce(loss, "sum"))


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
    model, samples = make_model(), [make_sample(0)]
    whole = {name: tensor[None] for name, tensor in samples[0].items()}
    right = float(model(**whole).loss.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loaders = [torch.utils.data.DataLoader(samples, batch_size=1) for _ in range(2)]
    model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, *loaders)
    in_training = mean_loss(model, next(iter(training)), accelerator)
    model.eval()
    in_evaluation = mean_loss(model, next(iter(evaluation)), accelerator)
    if rank == 0:
        status.put((right, in_training, in_evaluation))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29526")
    # Forks need no imports, and are none of a process that uses a GPU.
    method = "spawn" if torch.cuda.is_available() else "fork"
    answers = torch.multiprocessing.get_context(method).SimpleQueue()
    torch.multiprocessing.start_processes(run, (answers,), nprocs=2, start_method=method)
    right_loss, training_loss, evaluation_loss = answers.get()
    print(
        f"the loss of one sample: {right_loss:.4f} in one process, {training_loss:.4f} on two ranks in training,"
        f" {evaluation_loss:.4f} after model.eval()"
    )
    sys.exit(0 if abs(evaluation_loss - right_loss) < 1e-3 else 1)
