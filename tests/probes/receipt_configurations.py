"""Receipts of loops whose engines have settings of their own: FSDP's policies, offload and replicas, and precision.

receipt_configurations.py CASE...    each CASE is a function below
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from receipt_strategies import train_step  # type: ignore[import-not-found]  # found beside this file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from study import Receipt
from study.host import folders, operators
from study.receipt.live_fsdp import fsdp1_facts

STEPS, SAMPLES, LENGTH, VOCABULARY = 7, 2, 64, 1024
BF16 = torch.bfloat16


def make_model() -> Any:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def make_adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_fsdp2(replicas: int = 1, **policies: Any) -> tuple[Any, Any]:
    model = make_model()
    ranks = dist.get_world_size()
    sizes, names = ((ranks,), ("shard",)) if replicas == 1 else ((replicas, ranks // replicas), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    # The head is in the outermost group, as the predictor assumes.
    for part in (*model.model.layers, model.model.embed_tokens):
        fully_shard(part, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    return model, make_adamw(model)


def make_fsdp1(**options: Any) -> tuple[Any, Any]:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    device = torch.device("cpu")
    model = FullyShardedDataParallel(make_model(), auto_wrap_policy=policy, device_id=device, **options)
    return model, make_adamw(model)


def fsdp2_cast() -> tuple[Any, Any]:
    model, optimizer = make_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model.gradient_checkpointing_enable()
    return model, optimizer


def fsdp2_cast_and_reduced_in_fp32() -> tuple[Any, Any]:
    return make_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))


def fsdp2_offload() -> tuple[Any, Any]:
    return make_fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp() -> tuple[Any, Any]:
    return make_fsdp2(replicas=2)


def fsdp1_cast() -> tuple[Any, Any]:
    return make_fsdp1(mixed_precision=MixedPrecision(param_dtype=BF16))


def fsdp1_gradients() -> tuple[Any, Any]:
    return make_fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def fsdp1_unsharded() -> tuple[Any, Any]:
    return make_fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD)


def fsdp1_hybrid() -> tuple[Any, Any]:
    # On four ranks. On two, shard groups have one rank: torch makes it NO_SHARD, and reduces within each of them.
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return make_fsdp1(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def embedding_in_fp32() -> tuple[Any, Any]:
    """All weights in bf16 but those of the embedding, as a program does that keeps it for its precision."""
    model = make_model().to(BF16)
    model.model.embed_tokens.to(torch.float32)
    return nn.parallel.DistributedDataParallel(model), make_adamw(model)


def make_zero1(**settings: Any) -> tuple[Any, Any]:
    """Stage 1 in bf16 with its optimizer on the host, as in DeepSpeed's example HelloDeepSpeed."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # Which find DeepSpeed's operators.
    operators.configure_build_environment(folders.cache_directory())
    model = make_model()
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}, "reduce_bucket_size": 100_000}
    engine, wrapped, _, _ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            **settings,
        },
    )
    return engine, wrapped


def zero1_cpu() -> tuple[Any, Any]:
    return make_zero1()


def zero1_cpu_reduced_in_fp32() -> tuple[Any, Any]:
    return make_zero1(communication_data_type="fp32")


def train(case: str, path: Path) -> dict[str, Any]:
    model, optimizer = globals()[case]()
    receipt = Receipt(model, optimizer, path=path, after=2, steps=3, quiet=True)
    batches = [torch.randint(VOCABULARY, (SAMPLES, LENGTH)) for _ in range(STEPS)]
    dtype = BF16 if case == "embedding_in_fp32" else None
    for batch in receipt.steps(batches):
        train_step(model, optimizer, batch, dtype)
    receipt.close()
    if hasattr(model, "global_steps"):
        model.destroy()
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return document


if __name__ == "__main__":
    dist.init_process_group("gloo")
    documents = {}
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            documents[case] = train(case, Path(folder) / "receipt.json")
        # What an engine has left would be in the memory of the next one.
        gc.collect()
        dist.barrier()
    # It trains on GPUs alone: it pins its shards, and waits for a stream.
    model, _ = make_fsdp1(cpu_offload=CPUOffload(offload_params=True))
    results = {"receipts": documents, "facts_of_fsdp1_offload": fsdp1_facts(model)}
    print("PROBE " + json.dumps({"rank": dist.get_rank(), **results}), flush=True)
