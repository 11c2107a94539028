"""A user's Accelerate loop on tiny data, with and without a receipt: prints each rank's losses, to the last bit."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

LENGTH, VOCABULARY, SAMPLES = 64, 512, 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--receipt", type=Path)
    add("--steps", type=int, default=12)
    add("--accumulation", type=int, default=1)
    add("--dropout", type=float, default=0.0)
    add("--sleep_s", type=float, default=0.0)
    add("--forgets_no_sync", action="store_true")
    add("--checkpoints", action="store_true")
    add("--lora", action="store_true")
    add("--offloads_parameters", action="store_true")
    # Wide enough for tensors that DeepSpeed swaps to NVMe: of a MiB and more.
    add("--width", type=int, default=128)
    add("--swap_folder", default="")
    # Larger than any layer, so that logits are told from activations.
    add("--vocabulary", type=int, default=VOCABULARY)
    # Functions of the receipt that fail on one rank: MODULE.NAME,MODULE.CLASS.NAME.
    add("--breaks", default="")
    # Release of DeepSpeed that the receipt has in its packages.
    add("--deepspeed_release", default="")
    # First without a receipt, then with one.
    add("--twice", action="store_true")
    return parser.parse_args()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int, vocabulary: int, sleep_s: float) -> None:
        self.rows = torch.randint(vocabulary, (count, LENGTH))
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return self.rows[index]


def make_accelerator(accumulation: int, offloads_parameters: bool, swap_folder: str) -> Accelerator:
    """Return the launched file's Accelerator; on cores Accelerate needs help with FSDP and DeepSpeed."""
    state = PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    if (plugin := accelerator.state.deepspeed_plugin) is not None:
        zero = plugin.deepspeed_config["zero_optimization"]
        # The study's buckets are larger than this model, and untouched memory would be most of what is in use.
        zero["reduce_bucket_size"] = 100_000
        if offloads_parameters:
            zero["offload_param"] = {"device": "cpu"}
        if swap_folder:
            zero["offload_optimizer"]["nvme_path"] = swap_folder
        if zero["stage"] == 3:
            zero["stage3_param_persistence_threshold"] = 1000
    return accelerator


def make_model(options: argparse.Namespace) -> Any:
    dropout = {f"{name}_pdrop": options.dropout for name in ("attn", "resid", "embd")}
    sizes = {
        "vocab_size": options.vocabulary,
        "n_layer": 2,
        "n_embd": options.width,
        "n_head": 4,
        "n_positions": LENGTH,
    }
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    if options.checkpoints:
        model.gradient_checkpointing_enable()
    if options.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def break_receipt(target: str) -> None:
    from study.receipt import live_engine, peak

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    module, *inner, name = target.split(".")
    owner: Any = {"live_engine": live_engine, "peak": peak}[module]
    for part in inner:
        owner = getattr(owner, part)
    setattr(owner, name, fail)


def name_release(release: str) -> None:
    """Make the receipt read a release of DeepSpeed that is not installed."""
    from study.host.stacks import package_version
    from study.receipt import session

    versions = {"deepspeed": release}
    session.package_version = lambda name: versions.get(name) or package_version(name)  # type: ignore[attr-defined]


def train(options: argparse.Namespace, accelerator: Accelerator, path: Path | None) -> list[str]:
    """Return the losses of a training, with a receipt at a path or without one."""
    set_seed(7)
    model: Any = make_model(options)
    optimizer: Any = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=1e-3)
    count = options.steps * options.accumulation * SAMPLES * accelerator.num_processes
    rows = Rows(count, options.vocabulary, options.sleep_s)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=SAMPLES)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    batches, receipt = loader, None
    if path is not None:
        if options.breaks and accelerator.process_index == 0:
            for target in options.breaks.split(","):
                break_receipt(target)
        from study import Receipt

        if options.deepspeed_release:
            name_release(options.deepspeed_release)
        receipt = Receipt(model, optimizer, path=path)
        batches = receipt.steps(loader)
    losses = []
    for number, batch in enumerate(batches):
        accumulating = contextlib.nullcontext() if options.forgets_no_sync else accelerator.accumulate(model)
        with accumulating:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if not options.forgets_no_sync or (number + 1) % options.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    if receipt is not None:
        receipt.close()
    # DeepSpeed's wrapper belongs to one model.
    accelerator.free_memory()
    return losses


def main() -> None:
    options = parse()
    accelerator = make_accelerator(options.accumulation, options.offloads_parameters, options.swap_folder)
    results: dict[str, Any] = {"rank": accelerator.process_index}
    if options.twice:
        results["losses_without"] = train(options, accelerator, None)
    results["losses"] = train(options, accelerator, options.receipt)
    print("PROBE " + json.dumps(results), flush=True)


main()
