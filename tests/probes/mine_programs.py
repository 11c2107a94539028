"""Programs with the two lines of a receipt, right and wrong ones, for `study verify --mine`.

mine_programs.py PROGRAM [FAULT]    each PROGRAM is a function below
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerator_on_cores import make_accelerator  # type: ignore[import-not-found]  # found beside this file
from torch import nn

from study import Receipt, ReceiptCallback

LENGTH, VOCABULARY, SAMPLES, ACCUMULATION, STEPS = 16, 64, 2, 2, 6


def make_gpt(fault: str = "") -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {f"{name}_pdrop": 0.1 for name in ("attn", "resid", "embd")}
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
    if fault == "checkpoints":
        model.gradient_checkpointing_enable()
    if fault == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def make_rows(count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(5))


def make_optimizer(layers: nn.Sequential, fault: str) -> torch.optim.Optimizer:
    if fault == "other_optimizer":
        return torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=1e-3)
    if fault not in ("part", "two_optimizers"):
        return torch.optim.AdamW(layers.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(layers[3].parameters(), lr=1e-3)
    if fault == "two_optimizers":
        others = torch.optim.SGD([*layers[0].parameters(), *layers[1].parameters()], lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: others.step())
    return optimizer


def clip(model: nn.Module, fault: str) -> None:
    if fault != "clips_alone":
        nn.utils.clip_grad_norm_(model.parameters(), 100 if fault == "keeps_gradients" else 0.1)
        return
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def own_loop(fault: str) -> None:
    """A loop of plain torch under DDP, which computes its loss outside of the model, clips and accumulates."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers: Any = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
    model: Any = nn.parallel.DistributedDataParallel(layers)
    optimizer = make_optimizer(layers, fault)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if fault == "sums":
        # A wrong communication hook: it reduces without the mean. DDP refuses one whose annotations are texts.
        reduce_bucket: Any = lambda _, bucket: (  # noqa: E731
            dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])
        )
        model.register_comm_hook(None, reduce_bucket)
    if fault == "tampers":
        optimizer.register_step_post_hook(lambda *_: layers[3].weight.data.mul_(1.001))
    rows = make_rows(STEPS * ACCUMULATION * SAMPLES * ranks).split(SAMPLES)
    mine = rows[0 if fault == "same_data" else rank :: ranks]
    receipt = Receipt(model, optimizer)
    if fault == "second_receipt":
        Receipt(layers, torch.optim.SGD(layers.parameters(), lr=1.0))
    for number, row in enumerate(receipt.steps(mine), start=1):
        is_last = number % ACCUMULATION == 0
        waits = not is_last and fault != "forgets_no_sync"
        with model.no_sync() if waits else contextlib.nullcontext():
            logits = (model.module if fault == "bypasses" else model)(row)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), row[:, 1:].flatten())
            (loss / ACCUMULATION).backward()
        if is_last:
            clip(model, fault)
            optimizer.step()
            schedule.step()
            if fault != "keeps_gradients":
                model.zero_grad()
            if fault == "drifts" and rank == 1:
                with torch.no_grad():
                    layers[1].weight[0, 0] += 1e-3
    print("the loop went on to its end")


def accelerate_loop(fault: str) -> None:
    """The loop of Accelerate's guide, with dropout."""
    accelerator = make_accelerator(ACCUMULATION, "bf16" if fault == "bf16" else "no")
    model = make_gpt(fault)
    optimizer: Any = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=1e-3)
    rows = make_rows(STEPS * ACCUMULATION * SAMPLES * accelerator.num_processes)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=SAMPLES)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    receipt = Receipt(model, optimizer)
    for batch in receipt.steps(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            # DeepSpeed, or Accelerate, divides.
            accelerator.backward(loss / ACCUMULATION if fault == "divides_twice" else loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def trainer(fault: str) -> None:
    """transformers' Trainer with its callback."""
    import tempfile

    from transformers import Trainer, TrainingArguments, default_data_collator

    rows: Any = [{"input_ids": row, "labels": row} for row in make_rows(64).tolist()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=SAMPLES,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=STEPS,
            save_strategy="no",
            report_to="none",
            learning_rate=1e-3,
        )
        program = Trainer(model=make_gpt(), args=arguments, train_dataset=rows, data_collator=default_data_collator)
        program.add_callback(ReceiptCallback())
        program.train()


def lightning_trainer(fault: str) -> None:
    """Lightning's Trainer, whose optimizer calls the passes of a step's last micro-batch."""
    # Runs hide scipy from transformers (study/host/stacks.py), and Lightning's metrics import it.
    sys.modules.pop("scipy", None)
    import lightning

    from study import LightningReceiptCallback

    class Program(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_gpt()
            if fault == "own_layers":
                self.head = nn.Linear(VOCABULARY, VOCABULARY)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            logits = self.model(input_ids=batch).logits
            if fault == "own_layers":
                logits = self.head(logits)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            return loss * ACCUMULATION if fault == "not_divided" else loss

        def on_after_backward(self) -> None:
            if fault == "scales" and self.global_rank == 1:
                for parameter in self.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= 2

        def configure_optimizers(self) -> torch.optim.Optimizer:
            kind = torch.optim.LBFGS if fault == "lbfgs" else torch.optim.AdamW
            return kind(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=None if fault == "lbfgs" else 0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningReceiptCallback()],
    )
    rows = make_rows(STEPS * ACCUMULATION * SAMPLES * 2)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=SAMPLES)  # type: ignore[arg-type]
    trainer.fit(Program(), loader)


class Layers(nn.Module):
    """A model that returns its loss, as in nanoGPT."""

    def __init__(self, normalizes: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 32)
        self.hidden = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.lm_head = nn.Linear(32, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.norm: nn.Module = nn.BatchNorm1d(32) if normalizes else nn.Identity()

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.wte(idx)
        for layer in self.hidden:
            hidden = hidden + layer(hidden)
        logits = self.lm_head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        return logits, nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def wrap(way: str, layers: Layers) -> Any:
    """Return the layers in an engine of torch."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

    if way.startswith("fsdp1"):
        precision = MixedPrecision(param_dtype=torch.bfloat16) if "bf16" in way else None
        return FullyShardedDataParallel(
            layers, use_orig_params="flat" not in way, mixed_precision=precision, device_id=torch.device("cpu")
        )
    if way.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "bf16" in way else MixedPrecisionPolicy()
        for layer in layers.hidden:
            fully_shard(layer, mp_policy=policy)
        if "outside" not in way:
            fully_shard(layers, mp_policy=policy)
        return layers
    return torch.compile(layers, backend="eager") if way == "compiled" else nn.parallel.DistributedDataParallel(layers)


def torch_loop(way: str) -> None:
    """A loop of nanoGPT in an engine of torch: the loss comes from the model, under autocast with DDP."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    # Torch's CPU kernel takes no half precision.
    model = wrap(way, Layers(normalizes="bf16" not in way))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    rows = make_rows(STEPS * ACCUMULATION * SAMPLES * dist.get_world_size()).split(SAMPLES)
    receipt = Receipt(model, optimizer)
    for number, row in enumerate(rows[dist.get_rank() :: dist.get_world_size()], start=1):
        with receipt.step():
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in way):
                _, loss = model(row[:, :-1], row[:, 1:])
            if way == "calls_a_layer":
                loss = loss + model.module.lm_head(torch.ones(1, 32)).square().mean()
            (loss if "not_divided" in way else loss / ACCUMULATION).backward()
            if number % ACCUMULATION == 0:
                if way.startswith("fsdp1"):
                    model.clip_grad_norm_(0.5, math.inf if way == "fsdp1-largest" else 2.0)
                elif "outside" not in way:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5, math.inf if way == "largest" else 2.0)
                optimizer.step()
                optimizer.zero_grad()


def deepspeed_loop(way: str) -> None:
    """The loop of DeepSpeed's own guide, in bf16."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    layers = Layers(normalizes=False)
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "bf16" in way},
        "fp16": {"enabled": "fp16" in way},
        "zero_optimization": {"stage": int(way[0]), "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    early = Receipt(layers, optimizer) if "early" in way else None
    engine, *_ = deepspeed.initialize(model=layers, optimizer=optimizer, config=settings)
    receipt = early or Receipt(engine)
    rows = make_rows(STEPS * ACCUMULATION * SAMPLES * dist.get_world_size()).split(SAMPLES)
    for row in receipt.steps(rows[dist.get_rank() :: dist.get_world_size()]):
        _, loss = engine(row[:, :-1], row[:, 1:])
        engine.backward(loss)
        engine.step()


def main() -> None:
    program, *faults = sys.argv[1:]
    torch.manual_seed(1)
    globals()[program](faults[0] if faults else "")


main()
