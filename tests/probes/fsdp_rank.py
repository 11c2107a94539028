"""Print the bytes of rank 0 of 4 under FSDP, of each case.

A case is [version, vocabulary, tokens, checkpoints, micro-batches, bf16, keeps weights gathered, tied, unwrapped]. The
rank is virtual and on a CPU: torch's fake process group, and FSDP as Accelerate sets it up. The model is a GPT-2.
"""

import contextlib
import functools
import gc
import json
import multiprocessing
import sys

import torch
import transformers
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

# oneDNN's scratch of a bf16 product differs between processors, and a GPU has none.
torch.backends.mkldnn.set_flags(False)
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


def measure(case: list[int]) -> dict[str, int]:  # noqa: PLR0914
    version, vocabulary, tokens, checkpoints, micro_batches, is_bf16, keeps, tied, unwrapped = case
    sizes = {"vocab_size": vocabulary, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
    config = transformers.GPT2Config(
        **sizes,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=bool(tied),
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    half = torch.bfloat16
    if version == 2:
        policy = fsdp.MixedPrecisionPolicy(half, half, half) if is_bf16 else fsdp.MixedPrecisionPolicy()
        tail = [model.transformer.ln_f, model.lm_head] + [model.transformer.wte] * tied
        for module in (*([] if unwrapped else model.transformer.h), *[model.transformer.wte] * (not tied)):
            fsdp.fully_shard(module, reshard_after_forward=not keeps, mp_policy=policy)
        fsdp.fully_shard(tail, reshard_after_forward=False, mp_policy=policy)
        fsdp.fully_shard(model, mp_policy=policy)
    else:
        layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
        model = fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=None if unwrapped else layers,
            sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP if keeps else fsdp.ShardingStrategy.FULL_SHARD,
            mixed_precision=fsdp.MixedPrecision(half, half, half) if is_bf16 else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, vocabulary, (2, tokens))

    def step() -> None:
        for left in reversed(range(micro_batches)):
            if version == 2:
                model.set_requires_gradient_sync(left == 0)
            with model.no_sync() if version == 1 and left else contextlib.nullcontext():
                model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    if version == 2:
        shards = [param.to_local() for param in model.parameters()]
    else:
        handles = [module._handle for module in fsdp.FullyShardedDataParallel.fsdp_modules(model)]
        shards = [handle.flat_param._local_shard for handle in handles if handle is not None]
    params = sum(shard.nbytes for shard in shards)
    moments = sum(
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
    )
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.name() == "[memory]"
    )
    now = peak = 0
    for _, size in changes:
        now += size
        peak = max(peak, now)
    # The profile does not have the release of the last step's gradients, when this one begins.
    return {"params": params, "optimizer": moments, "peak": params + moments + peak}


def say(case: list[int]) -> None:
    print("SAYS", json.dumps(measure(case)), flush=True)


# The profiler remembers the addresses of earlier profiles, and where one was used again it counts the release of a
# tensor that it never saw: now and then 7 % of a peak. A process of its own has no earlier profile.
fork = multiprocessing.get_context("fork")
for case in json.loads(sys.argv[1]):
    process = fork.Process(target=say, args=(case,))
    process.start()
    process.join()
