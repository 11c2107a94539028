"""CPU time of FSDP1's units of adapters, over that of a layer's forward pass.

peft's fsdp_auto_wrap_policy makes a unit of each A and each B of an adapter. The step time of `study predict` has the
two ratios (study/predictor/passes.py). One process on torch's fake process group, so nothing is sent.

python tools/fsdp_units.py
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

LAYERS, STEPS = 16, 40
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def make_model(adapted: bool) -> torch.nn.Module:
    """Return a Llama whose products take no time to speak of."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes))
    return get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS)) if adapted else model


def pass_times(models: dict[str, torch.nn.Module]) -> dict[str, tuple[float, float]]:
    """Return the least CPU seconds of a forward and a backward pass of each model; they take turns."""
    ids = torch.zeros(1, 8, dtype=torch.long)
    least = {name: (float("inf"), float("inf")) for name in models}
    for _ in range(STEPS):
        for name, model in models.items():
            model.zero_grad()
            start = time.process_time()
            loss = model(input_ids=ids, labels=ids).loss
            middle = time.process_time()
            loss.backward()
            end = time.process_time()
            forward, backward = least[name]
            least[name] = min(forward, middle - start), min(backward, end - middle)
    return least


def main() -> None:
    """Print both ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = LlamaDecoderLayer.__name__
    cpu = torch.device("cpu")
    adapted = make_model(True)
    units = FullyShardedDataParallel(adapted, auto_wrap_policy=fsdp_auto_wrap_policy(adapted), device_id=cpu)
    layers_alone = FullyShardedDataParallel(
        make_model(True), auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), use_orig_params=True, device_id=cpu
    )
    times = pass_times({"plain": make_model(False), "layers": layers_alone, "adapters": units})
    count = sum(isinstance(module, FullyShardedDataParallel) for module in units.modules()) - LAYERS - 1
    layer_s = times["plain"][0] / LAYERS
    for index, name in enumerate(("forward", "backward")):
        unit_s = (times["adapters"][index] - times["layers"][index]) / count
        print(f"{name}: a unit {1e6 * unit_s:.0f} us, {unit_s / layer_s:.2f} of a layer's forward pass")


if __name__ == "__main__":
    main()
