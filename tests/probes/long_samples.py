"""Write the saved bytes, the peak and the loss of rank 0 of two whose samples Ulysses divides, or with tiled blocks.

A case has `config`, `dtype`, `batch`, `tokens` of a whole sample, `checkpoints`, `ulysses` and `tiled`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, UlyssesSPAttentionHF
from tensor_plans import changes_of_passes  # type: ignore[import-not-found]  # found beside this file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from study.host.divided_sequence import ulysses_part, with_shifted_labels

RANKS = 2
ATTENTION = "sdpa"


def forward_in_tiles(block: Any, states: torch.Tensor) -> torch.Tensor:
    """Return what DeepSpeed's tiled_mlp_forward does, for its number of tiles."""
    tiles = math.ceil(states.shape[1] / states.shape[2])
    weights = [block.down_proj.weight, block.gate_proj.weight, block.up_proj.weight]
    result: torch.Tensor = TiledMLP.apply(type(block).forward, block, states, tiles, weights)
    return result


def build(case: dict[str, Any]) -> Any:
    config, dtype = AutoConfig.for_model(**case["config"]), getattr(torch, case["dtype"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    model.train()
    if case["ulysses"]:
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=ATTENTION,
            sequence_parallel_size=RANKS,
            micro_batch_size=case["batch"],
            seq_length_is_variable=True,
        )
    if case["tiled"]:
        for layer in model.model.layers:
            layer.mlp.forward = forward_in_tiles.__get__(layer.mlp)
    if case["checkpoints"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def measure(case: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shape = (case["batch"], case["tokens"])
    ids = torch.randint(0, case["config"]["vocab_size"], shape, generator=generator)
    whole = {"input_ids": ids, "labels": ids}
    plain = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    model = build(case)
    if case["ulysses"]:
        inputs = ulysses_part(whole, RANKS, dist.get_rank())
    else:
        inputs, scored = with_shifted_labels(whole, 1)
        inputs["num_items_in_batch"] = scored
    losses = list[torch.Tensor]()

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        losses.append(loss.detach())
        return loss

    forward().backward()
    model.zero_grad()
    losses.clear()
    saved, peak = changes_of_passes(forward)
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = plain
    # DeepSpeed has no function that forgets a registration.
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
    parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    loss = losses[0].clone()
    if case["ulysses"]:
        dist.all_reduce(loss)
        loss /= RANKS
    return {"saved": saved, "peak": peak, "loss": loss.item()}


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    output = [measure(case) for case in json.loads(sys.argv[1])]
    if dist.get_rank() == 0:
        (Path(sys.argv[2]) / "output.json").write_text(json.dumps(output), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
