"""Print the peak bytes of rank 0 of 2 under FSDP1 with peft's adapters, of each case.

A case is [layers, tokens, where checkpoints are, what has adapters: "units" of their own by peft's policy of wrapping,
"layers" that a policy wraps, "nothing"]. The rank is virtual and on a CPU: torch's fake process group and peft's
adapters. Checkpoints are "inside" FSDP's units, as transformers has them since
4.52, or "around" them and reentrant, as it had them before.
"""

import functools
import gc
import json
import sys
from typing import Any

import peft
import torch
import transformers
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


class Checkpointed(torch.nn.Module):
    """A unit of FSDP that is called inside a reentrant checkpoint."""

    def __init__(self, unit: torch.nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        output: torch.Tensor = checkpoint(functools.partial(self.unit, **options), hidden_states, use_reentrant=True)
        return output


def measure(layers: int, tokens: int, place: str, adapters: str) -> int:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, use_cache=False, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    if adapters != "nothing":
        settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
        if adapters == "units":
            policy = fsdp_auto_wrap_policy(model)
    # Otherwise no layer's input requires a gradient, and a reentrant checkpoint has no backward pass.
    model.enable_input_require_grads()
    if place == "inside":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    whole = fsdp.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=adapters == "layers"
    )
    if place == "around":
        decoder = next(module for module in whole.modules() if isinstance(module, transformers.LlamaModel))
        decoder.layers = torch.nn.ModuleList(map(Checkpointed, decoder.layers))
    trained = [param for param in whole.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    ids = torch.randint(0, SIZES["vocab_size"], (1, tokens))

    def step() -> None:
        whole(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
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


for case in json.loads(sys.argv[1]):
    print("SAYS", measure(*case))
