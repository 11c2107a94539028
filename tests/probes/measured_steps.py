"""A tiny GPT trained for a few steps under whatever engine launched this, with every meter attached.

Prints one line per rank: `PROBE {...}`. Plain torch, because importing transformers costs more than training.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from torch import nn
from torch.nn import functional

from study.config.launch_context import read_launch
from study.host.folders import cache_directory
from study.host.operators import build_operators
from study.metrics import Meters

VOCABULARY, WIDTH, LAYERS, TOKENS, BATCH = 512, 256, 2, 16, 4
WATCHED_STEP, STEPS = 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(functional.gelu(self.mix(self.norm(hidden))))


class TinyModel(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def main() -> None:
    if not torch.cuda.is_available():
        state = PartialState(cpu=True)
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            # Accelerate turns a group of GPUs into FSDP, a group of CPUs it leaves as DDP (AcceleratorState.__init__).
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    # As a run does: DeepSpeed's own loading, beside a run that starts, can lose torch's lock to it.
    build_operators(read_launch().strategy, cache_directory())
    accelerator = Accelerator()
    if accelerator.distributed_type == "DEEPSPEED":
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        for argument in sys.argv[1:]:
            key, _, value = argument.partition("=")
            config["zero_optimization"][key] = json.loads(value)
        for key in ("offload_optimizer", "offload_param"):
            if config["zero_optimization"].get(key, {}).get("device") == "nvme":
                config["zero_optimization"][key]["nvme_path"] = os.environ["PROBE_NVME_PATH"]
    meters = Meters(accelerator.device, WATCHED_STEP)
    torch.manual_seed(0)
    model = TinyModel()
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    optimizer: torch.optim.Optimizer
    if "offload_optimizer" in str(getattr(accelerator.state.deepspeed_plugin, "deepspeed_config", "")):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: Any = torch.randint(0, VOCABULARY, (STEPS * BATCH * accelerator.num_processes, TOKENS))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    meters.start(model, optimizer)
    rows = []
    for step, tokens in enumerate(loader, start=1):
        with meters.step(step):
            loss = model(tokens)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        rows += meters.flush()
        if step == WATCHED_STEP - 1:
            with meters.untimed_phase("eval"), torch.no_grad():
                torch.ones(8 * 2**20)
                model.eval()
                model(tokens)
                model.train()
    meters.finish()
    report = {
        "rank": accelerator.process_index,
        "elements": elements,
        "rows": rows,
        "summary": meters.summary(),
        "memory": meters.memory.report(),
        "traffic": meters.traffic,
        "state": meters.state,
    }
    report["engine"] = f"{accelerator.distributed_type.value} {type(model).__name__}"
    print("PROBE " + json.dumps(report), flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    # Threads of native libraries can abort a process that is done ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    main()
