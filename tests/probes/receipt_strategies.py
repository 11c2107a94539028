"""Loops under engines that a program makes itself, each with and without a receipt, on two ranks of one process group.

receipt_strategies.py CASE...    each CASE is a function below; for each, the losses to the last bit, and the receipt
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from study import Receipt
from study.config.strategies import read_strategy
from study.host import folders, operators

STEPS, SAMPLES, LENGTH, VOCABULARY = 7, 2, 64, 512
DROPOUT = 0.1


def make_model(dropout: float = DROPOUT, layers: int = 2) -> Any:
    torch.manual_seed(7)
    dropouts = {f"{name}_pdrop": dropout for name in ("attn", "resid", "embd")}
    sizes = {"n_layer": layers, "n_embd": 128, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def make_adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=1e-3)


def make_ddp(model: Any) -> tuple[Any, Any]:
    return nn.parallel.DistributedDataParallel(model), make_adamw(model)


def make_deepspeed(strategy: str) -> tuple[Any, Any]:
    import deepspeed

    # Which find DeepSpeed's operators.
    operators.configure_build_environment(folders.cache_directory())
    settings: Any = copy.deepcopy(read_strategy(strategy).deepspeed)
    settings.pop("train_batch_size", None)
    settings |= {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": 1}
    settings |= {"gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
    # The study's buckets are larger than this model, and untouched memory would be most of what is in use.
    settings["zero_optimization"] |= {"reduce_bucket_size": 100_000, "stage3_param_persistence_threshold": 1000}
    model = make_model()
    if settings["zero_optimization"].get("offload_optimizer"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    else:
        optimizer = make_adamw(model)
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine, wrapped


def fsdp1() -> tuple[Any, Any]:
    policy = ModuleWrapPolicy({GPT2Block})
    model = FullyShardedDataParallel(make_model(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return model, make_adamw(model)


def zero0() -> tuple[Any, Any]:
    return make_deepspeed("zero0")


def zero1() -> tuple[Any, Any]:
    return make_deepspeed("zero1")


def zero2_cpu() -> tuple[Any, Any]:
    return make_deepspeed("zero2_cpu")


def zero3_cpu() -> tuple[Any, Any]:
    return make_deepspeed("zero3_cpu")


def lora() -> tuple[Any, Any]:
    import peft

    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return make_ddp(peft.get_peft_model(make_model(), settings))


def checkpointing() -> tuple[Any, Any]:
    model = make_model()
    model.gradient_checkpointing_enable()
    return make_ddp(model)


def compiled() -> tuple[Any, Any]:
    # Without inductor, which compiles C++ for half a minute: dynamo and AOTAutograd are the same.
    model, optimizer = make_ddp(make_model(dropout=0.0, layers=1))
    return torch.compile(model, backend="eager"), optimizer


def compiled_into_kernels() -> tuple[Any, Any]:
    model, optimizer = make_ddp(make_model(dropout=0.0))
    return torch.compile(model), optimizer


def qlora() -> tuple[Any, Any]:
    """Weights in 4 bits of bitsandbytes, which are frozen, below adapters in fp32."""
    import bitsandbytes  # type: ignore[import-not-found]  # not installed by this project
    import peft

    model = make_model()
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in {"c_attn", "c_proj", "c_fc"}:
                # GPT-2 has a Conv1D there, whose weight is transposed.
                linear = bitsandbytes.nn.Linear4bit(*child.weight.shape, quant_type="nf4", compute_dtype=torch.float32)
                linear.weight = bitsandbytes.nn.Params4bit(
                    child.weight.detach().T.contiguous(), requires_grad=False, compress_statistics=False
                )
                linear.bias = nn.Parameter(child.bias.detach().clone())
                setattr(module, name, linear.to("cpu"))
    model.is_loaded_in_4bit = True
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return make_ddp(peft.get_peft_model(model, settings))


def train_step(model: Any, optimizer: Any, batch: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Train with a batch, under DeepSpeed's engine or torch's optimizer; with a dtype, in autocast. Return the loss."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    if hasattr(model, "global_steps"):
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def train(make: Callable[[], tuple[Any, Any]], path: Path | None) -> list[str]:
    """Return the losses of a training, with a receipt at a path or without one."""
    model, optimizer = make()
    model.train()
    torch.manual_seed(11 + dist.get_rank())
    receipt = Receipt(model, optimizer, path=path, after=2, steps=3, quiet=True) if path is not None else None
    batches = [torch.randint(VOCABULARY, (SAMPLES, LENGTH)) for _ in range(STEPS)]
    losses = []
    for batch in batches if receipt is None else receipt.steps(batches):
        loss = train_step(model, optimizer, batch)
        losses.append(float(loss.detach()).hex())
    if receipt is not None:
        receipt.close()
    if hasattr(model, "global_steps"):
        model.destroy()
    return losses


def run(case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "receipt.json"
        losses_without = train(globals()[case], None)
        # What an earlier engine has left would be in the memory of the next one.
        gc.collect()
        losses = train(globals()[case], path)
        gc.collect()
        document = json.loads(path.read_text()) if path.exists() else None
    dist.barrier()
    torch._dynamo.reset()
    return {"losses": losses, "losses_without": losses_without, "receipt": document}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {case: run(case) for case in sys.argv[1:]}
    print("PROBE " + json.dumps({"rank": dist.get_rank(), "cases": results}), flush=True)
