"""The figures of a receipt in trackers of the Trainer and of Accelerate: prints what each of them got.

receipt_trackers.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

from study import Receipt, ReceiptCallback

LENGTH, VOCABULARY = 32, 256


def make_llama() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, attention_dropout=0.1))


def train_by_trainer(folder: Path, receipt: str) -> list[dict[str, Any]]:
    """Return the Trainer's log, and write tensorboard's events below the folder."""
    set_seed(3)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (64, LENGTH), generator=generator).tolist()
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "events")
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        max_steps=12,
        # The receipt's last measured step is the tenth, too.
        logging_steps=5,
        save_strategy="no",
        report_to="tensorboard",
        learning_rate=1e-3,
    )
    trainer = Trainer(model=make_llama(), args=arguments, train_dataset=rows, data_collator=default_data_collator)
    if receipt == "logged":
        trainer.add_callback(ReceiptCallback(log=trainer.log, path=folder / "receipt.json", quiet=True))
    trainer.train()
    return trainer.state.log_history


class LinesTracker(GeneralTracker):
    """A tracker of somebody's own, as Accelerate's guide on tracking has it: one line of JSON for each log."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    @property
    def tracker(self) -> Path:
        return self._path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def train_by_loop(folder: Path) -> dict[str, float]:
    """Return the figures that the receipt has for other trackers."""
    folder.mkdir(exist_ok=True)
    lines = LinesTracker(folder / "lines.jsonl")
    accelerator = Accelerator(log_with=["tensorboard", lines], project_dir=str(folder))
    accelerator.init_trackers("loop")
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    receipt = Receipt(model, optimizer, path=folder / "receipt.json", quiet=True, log=accelerator.log)
    assert receipt.figures() == {}
    for _ in range(12):
        with receipt.step():
            accelerator.backward(model(torch.randn(8, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    figures = receipt.figures()
    receipt.close()
    assert receipt.figures() == figures
    return figures


def main() -> None:
    folder = Path(sys.argv[1])
    PartialState(cpu=True)
    histories = {name: train_by_trainer(folder / name, name) for name in ("alone", "logged")}
    figures = train_by_loop(folder / "loop")
    rank = int(os.environ.get("RANK", "0"))
    print("PROBE " + json.dumps({"rank": rank, "histories": histories, "figures": figures}), flush=True)


main()
