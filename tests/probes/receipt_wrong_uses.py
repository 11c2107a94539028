"""Loops that use their receipt wrongly, each with and without it, on two ranks of one process group.

receipt_wrong_uses.py USE...    each USE is a key of USES below; for each, losses, lines on standard error and receipt
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from study import Receipt, ReceiptCallback

STEPS, ROWS, WIDTH = 14, 4, 16
# Within the measured steps, 6 to 10.
CHANGED_STEP = 7


class LossOfRows(nn.Module):
    """A model in the form that transformers' Trainer takes."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(rows).square().mean()}


class Loop:
    """A training of a few steps; `path` is that of its receipt, None without one."""

    def __init__(self, path: Path | None, make_engine: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        torch.manual_seed(3)
        self.path, self.receipts = path, list[Receipt]()
        plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        if make_engine is None:
            self.model: Any = nn.parallel.DistributedDataParallel(plain)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            return
        # The receipt is made too early.
        self.add_receipt(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        self.model, self.optimizer = make_engine(plain)

    def add_receipt(self, model: Any, optimizer: Any, **options: Any) -> None:
        if self.path is not None:
            self.receipts.append(Receipt(model, optimizer, **{"path": self.path, **options}))

    def batches(self, count: int = STEPS) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]

    def steps(self, rows: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        return iter(self.receipts[0].steps(rows)) if self.receipts else iter(rows)

    def step(self) -> contextlib.AbstractContextManager[None]:
        return self.receipts[0].step() if self.receipts else contextlib.nullcontext()

    def train_step(self, rows: torch.Tensor) -> str:
        loss = self.model(rows).square().mean()
        if hasattr(self.model, "global_steps"):
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach()).hex()


def optimizer_of_another_model(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    other = copy.deepcopy(loop.model.module)
    loop.add_receipt(loop.model, torch.optim.SGD(other.parameters(), lr=0.1))
    return loop, [loop.train_step(rows) for rows in loop.steps(loop.batches())]


def unknown_option(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer, aftr=3)
    return loop, [loop.train_step(rows) for rows in loop.steps(loop.batches())]


def train_with_trainer(path: Path | None, **options: Any) -> tuple[Loop, list[str]]:
    """Train with transformers' Trainer, whose callback makes the receipt."""
    from transformers import Trainer, TrainingArguments

    loop = Loop(None)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"rows": row} for batch in loop.batches() for row in batch]
    trainer = Trainer(LossOfRows(loop.model.module), arguments, train_dataset=rows)
    if path is not None:
        callback = ReceiptCallback(path=path, **options)
        trainer.add_callback(callback)
    trainer.train()
    if path is not None and callback.receipt is not None:
        loop.receipts.append(callback.receipt)
    return loop, [repr(row["loss"]) for row in trainer.state.log_history if "loss" in row]


def unknown_option_of_the_callback(path: Path | None) -> tuple[Loop, list[str]]:
    return train_with_trainer(path, aftr=3)


def model_of_the_callback(path: Path | None) -> tuple[Loop, list[str]]:
    return train_with_trainer(path, model=nn.Linear(1, 1))


def two_receipts(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    loop.add_receipt(loop.model.module, loop.optimizer)
    losses = []
    for rows in loop.steps(loop.batches()):
        with loop.receipts[1].step() if loop.receipts else contextlib.nullcontext():
            losses.append(loop.train_step(rows))
    return loop, losses


def before_ddp(path: Path | None) -> tuple[Loop, list[str]]:
    def make(plain: Any) -> tuple[Any, Any]:
        return nn.parallel.DistributedDataParallel(plain), torch.optim.AdamW(plain.parameters(), lr=1e-2)

    loop = Loop(path, make)
    return loop, [loop.train_step(rows) for rows in loop.steps(loop.batches())]


def before_fully_shard(path: Path | None) -> tuple[Loop, list[str]]:
    def make(plain: Any) -> tuple[Any, Any]:
        fully_shard(plain, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)

    loop = Loop(path, make)
    return loop, [loop.train_step(rows) for rows in loop.steps(loop.batches())]


def before_deepspeed(path: Path | None) -> tuple[Loop, list[str]]:
    import deepspeed

    def make(plain: Any) -> tuple[Any, Any]:
        settings = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 10_000},
        }
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        engine, wrapped, _, _ = deepspeed.initialize(
            model=plain, optimizer=optimizer, config={**settings, "zero_allow_untested_optimizer": True}
        )
        return engine, wrapped

    loop = Loop(path, make)
    return loop, [loop.train_step(rows) for rows in loop.steps(loop.batches())]


def loader_that_ends_early(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    return loop, [loop.train_step(rows) for rows in loop.steps(loop.batches(8))]


def nested_steps(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    losses = []
    for rows in loop.batches():
        with loop.step(), loop.step():
            losses.append(loop.train_step(rows))
    return loop, losses


def replaced_module(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    losses = []
    for number, rows in enumerate(loop.steps(loop.batches()), start=1):
        if number == CHANGED_STEP:
            # One without parameters, which DDP would miss.
            loop.model.module[1] = nn.GELU()
        losses.append(loop.train_step(rows))
    return loop, losses


def caught_error(path: Path | None) -> tuple[Loop, list[str]]:
    """A program that leaves out a bad batch."""
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    losses = []
    for number, rows in enumerate(loop.batches(), start=1):
        with contextlib.suppress(ValueError), loop.step():
            if number == CHANGED_STEP + 1:
                raise ValueError("a bad batch")
            losses.append(loop.train_step(rows))
    return loop, losses


def error_that_ends_training(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    losses: list[str] = []
    with contextlib.suppress(ValueError):
        try:
            for number, rows in enumerate(loop.steps(loop.batches()), start=1):
                losses.append(loop.train_step(rows))
                if number == CHANGED_STEP:
                    raise ValueError("no more data")
        finally:
            for receipt in loop.receipts:
                receipt.close()
    return loop, losses


def train_with(loop_path: Path | None, begin: str, end: str, **options: Any) -> tuple[Loop, list[str]]:
    """Train with a call of the receipt before and after each step; an empty name is none."""
    loop = Loop(loop_path)
    loop.add_receipt(loop.model, loop.optimizer, **options)
    losses = []
    for rows in loop.batches():
        for receipt in loop.receipts if begin else ():
            getattr(receipt, begin)()
        losses.append(loop.train_step(rows))
        for receipt in loop.receipts if end else ():
            getattr(receipt, end)()
    return loop, losses


def step_without_with(path: Path | None) -> tuple[Loop, list[str]]:
    return train_with(path, "step", "")


def begin_without_end(path: Path | None) -> tuple[Loop, list[str]]:
    return train_with(path, "begin_step", "")


def end_without_begin(path: Path | None) -> tuple[Loop, list[str]]:
    return train_with(path, "", "end_step")


def never_used(path: Path | None) -> tuple[Loop, list[str]]:
    return train_with(path, "", "")


def path_of_none(path: Path | None) -> tuple[Loop, list[str]]:
    return train_with(path, "begin_step", "end_step", path=None)


def used_after_close(path: Path | None) -> tuple[Loop, list[str]]:
    """A program of two epochs that closes its receipt after the first one."""
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    losses = []
    for _ in range(2):
        losses += [loop.train_step(rows) for rows in loop.steps(loop.batches())]
        for receipt in loop.receipts:
            receipt.close()
    return loop, losses


def optimizer_that_does_not_step(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, torch.optim.SGD(loop.model.parameters(), lr=0.1))
    losses = []
    for rows in loop.batches():
        with loop.step():
            losses.append(loop.train_step(rows))
    return loop, losses


def unknown_argument_of_steps(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    batches: Any = loop.batches()
    for receipt in loop.receipts:
        batches = receipt.steps(batches, total=STEPS)
    return loop, [loop.train_step(rows) for rows in batches]


def step_without_parentheses(path: Path | None) -> tuple[Loop, list[str]]:
    loop = Loop(path)
    loop.add_receipt(loop.model, loop.optimizer)
    losses = []
    for rows in loop.batches():
        with loop.receipts[0].step if loop.receipts else contextlib.nullcontext():
            losses.append(loop.train_step(rows))
    return loop, losses


@contextlib.contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run(use: str) -> dict[str, Any]:
    train = globals()[use]
    _, losses_without = train(None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "receipt.json"
        errors, printed = io.StringIO(), io.StringIO()
        redirected = contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed)
        with redirected[0], redirected[1], working_directory(path.parent):
            loop, losses = train(path)
            for receipt in loop.receipts:
                receipt.close()
        document = json.loads(path.read_text()) if path.exists() else None
        files = sorted(file.name for file in path.parent.iterdir())
    notices = [line for line in errors.getvalue().splitlines() if line.startswith("receipt: ")]
    dist.barrier()
    return {
        "losses": losses,
        "losses_without": losses_without,
        "notices": notices,
        "screen": printed.getvalue(),
        "receipt": document,
        "files": files,
    }


dist.init_process_group("gloo")
results = {use: run(use) for use in sys.argv[1:]}
print("PROBE " + json.dumps({"rank": dist.get_rank(), "uses": results}), flush=True)
