"""Print the bytes of rank 0 of 4 under FSDP, of each case.

A case is [version, vocabulary, tokens, checkpoints, micro-batches, bf16, keeps weights gathered, tied, unwrapped,
reduces in each micro-batch, experts of a layer]. The rank is virtual and on a CPU: torch's fake process group, and
FSDP as Accelerate sets it up. The model is a GPT-2, or with experts a Mixtral.
"""

import contextlib
import functools
import gc
import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    version: int
    vocabulary: int
    tokens: int
    checkpoints: bool
    micro_batches: int
    is_bf16: bool
    keeps_gathered: bool
    tied: bool
    is_unwrapped: bool
    syncs: bool
    experts: int


def build_model(case: Case) -> Any:
    sizes = {"vocab_size": case.vocabulary, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
    config = transformers.GPT2Config(
        **sizes,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=case.tied,
    )
    if case.experts:
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 4, "num_local_experts": case.experts, "max_position_embeddings": 128}
        config = transformers.MixtralConfig(**sizes, vocab_size=case.vocabulary, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if case.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def wrap_in_version_1(case: Case, model: Any) -> Any:
    half = torch.bfloat16
    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
    keeps, frees = fsdp.ShardingStrategy.SHARD_GRAD_OP, fsdp.ShardingStrategy.FULL_SHARD
    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=None if case.is_unwrapped else layers,
        sharding_strategy=keeps if case.keeps_gathered else frees,
        mixed_precision=fsdp.MixedPrecision(half, half, half) if case.is_bf16 else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def wrap_in_version_2(case: Case, model: Any) -> Any:
    half = torch.bfloat16
    policy = fsdp.MixedPrecisionPolicy(half, half, half) if case.is_bf16 else fsdp.MixedPrecisionPolicy()
    inner = model.base_model
    layers, norm = (inner.layers, inner.norm) if case.experts else (inner.h, inner.ln_f)
    units = [] if case.is_unwrapped else list(layers)
    tail = [norm, model.lm_head]
    # Tied weights are of one unit.
    (tail if case.tied else units).append(model.get_input_embeddings())
    for unit in units:
        fsdp.fully_shard(unit, reshard_after_forward=not case.keeps_gathered, mp_policy=policy)
    fsdp.fully_shard(tail, reshard_after_forward=False, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
    return model


def local_shards(case: Case, model: Any) -> list[torch.Tensor]:
    if case.version == 2:
        return [param.to_local() for param in model.parameters()]
    handles = [module._handle for module in fsdp.FullyShardedDataParallel.fsdp_modules(model)]
    return [handle.flat_param._local_shard for handle in handles if handle is not None]


def peak_during(step: Callable[[], None]) -> int:
    """Return the most bytes in use during the step, above those in use before it."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.name() == "[memory]"
    )
    now = peak = 0
    for _, size in changes:
        now += size
        peak = max(peak, now)
    return peak


def measure(case: Case) -> dict[str, int]:
    wrap = wrap_in_version_2 if case.version == 2 else wrap_in_version_1
    model = wrap(case, build_model(case))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, case.vocabulary, (2, case.tokens))

    def step() -> None:
        for left in reversed(range(case.micro_batches)):
            waits = left > 0 and not case.syncs
            if case.version == 2:
                model.set_requires_gradient_sync(not waits)
            with model.no_sync() if case.version == 1 and waits else contextlib.nullcontext():
                model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    params = sum(shard.nbytes for shard in local_shards(case, model))
    moments = sum(
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
    )
    # The profile does not have the release of the last step's gradients, when this one begins.
    return {"params": params, "optimizer": moments, "peak": params + moments + peak_during(step)}


def say(case: Case) -> None:
    print("SAYS", json.dumps(measure(case)), flush=True)


# The profiler remembers the addresses of earlier profiles, and where one was used again it counts the release of a
# tensor that it never saw: now and then 7 % of a peak. A process of its own has no earlier profile.
fork = multiprocessing.get_context("fork")
for case in json.loads(sys.argv[1]):
    process = fork.Process(target=say, args=(Case(*case),))
    process.start()
    process.join()
