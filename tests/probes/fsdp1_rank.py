"""Print the bytes of rank 0 of 4 under FSDP1, of each case: [vocabulary, tokens, checkpoints, micro-batches, bf16].

The rank is virtual and on a CPU: torch's fake process group, and FSDP as Accelerate sets it up. A case is a GPT-2.
"""

import functools
import gc
import json
import sys

import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


def measure(vocabulary: int, tokens: int, checkpoints: bool, micro_batches: int, is_bf16: bool) -> dict[str, int]:
    sizes = {"vocab_size": vocabulary, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
    config = transformers.GPT2Config(
        **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    half = torch.bfloat16
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block}),
        mixed_precision=MixedPrecision(half, half, half) if is_bf16 else None, device_id=torch.device("cpu"),
        use_orig_params=True,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
    ids = torch.randint(0, vocabulary, (2, tokens))

    def step() -> None:
        for _ in range(micro_batches - 1):
            with sharded.no_sync():
                sharded(input_ids=ids, labels=ids).loss.backward()
        sharded(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    handles = [module._handle for module in FullyShardedDataParallel.fsdp_modules(sharded)]
    flat = [handle.flat_param for handle in handles if handle is not None]
    params = sum(param._local_shard.nbytes for param in flat)
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    changes = sorted((event.start_ns(), event.nbytes()) for event in profile.kineto_results.events()
                     if event.name() == "[memory]")  # fmt: skip
    now = peak = 0
    for _, size in changes:
        now += size
        peak = max(peak, now)
    # The profile does not have the release of the last step's gradients, when this one begins.
    return {"params": params, "optimizer": moments, "peak": params + moments + peak}


for case in json.loads(sys.argv[1]):
    print("SAYS", json.dumps(measure(*case)))
