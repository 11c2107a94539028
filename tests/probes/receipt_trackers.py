"""The figures of a receipt in trackers of the Trainer and of Accelerate: prints what each of them got.

receipt_trackers.py FOLDER           tensorboard, and a tracker of somebody's own
receipt_trackers.py FOLDER TRACKER   wandb, trackio or mlflow, which send nothing, and also tensorboard
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

from study import Receipt, ReceiptCallback
from study.receipt.exchange import Exchange

LENGTH, VOCABULARY = 32, 256
# Run, name, step and value of each figure that a tracker has.
Rows = Iterator[tuple[str, str, int, float]]
# wandb's offline file is a log of LevelDB: blocks with records of a header and a fragment, after a header of its own.
WANDB_HEADER, WANDB_BLOCK, WANDB_RECORD = 7, 32_768, struct.Struct("<IHB")
WANDB_LAST_FRAGMENTS = (1, 4)


def make_llama() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, attention_dropout=0.1))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def publish_late() -> None:
    """Let this rank publish its figures after rank 0 has logged, as it happens where ranks share a core."""
    publish = Exchange.publish

    def sleep_and_publish(self: Exchange, document: dict[str, Any]) -> None:
        time.sleep(1.5)
        publish(self, document)
        Exchange.publish = publish  # type: ignore[method-assign]  # as it was

    Exchange.publish = sleep_and_publish  # type: ignore[method-assign]  # for one receipt


def train_by_trainer(
    folder: Path, receipt: str, tracker: str = "tensorboard", is_last_late: bool = False
) -> list[dict[str, Any]]:
    """Return the Trainer's log; the tracker writes below the folder."""
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
        report_to=tracker,
        learning_rate=1e-3,
    )
    trainer = Trainer(model=make_llama(), args=arguments, train_dataset=rows, data_collator=default_data_collator)
    if receipt == "logged" and is_last_late and rank() > 0:
        publish_late()
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


def train_by_loop(folder: Path, tracker: str | None = None) -> dict[str, float]:
    """Return the figures that the receipt has for other trackers."""
    folder.mkdir(exist_ok=True)
    second: Any = tracker or LinesTracker(folder / "lines.jsonl")
    accelerator = Accelerator(log_with=["tensorboard", second], project_dir=str(folder))
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


def keep_on_this_machine(folder: Path) -> None:
    """Set what the trackers read, so that they write below the folder and send nothing."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def list_requests() -> list[str]:
    """Return a list that gets the address of each connection from Python to another machine."""
    addresses: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            host = str(arguments[1][0])
        elif event == "socket.getaddrinfo":
            host = str(arguments[0])
        else:
            return
        if not host.startswith("127.") and host not in ("localhost", "::1", "None"):
            addresses.append(host)

    sys.addaudithook(note)
    return addresses


def split_wandb_file(data: bytes) -> Iterator[bytes]:
    place, fragments = WANDB_HEADER, b""
    while place + WANDB_RECORD.size <= len(data):
        if WANDB_BLOCK - place % WANDB_BLOCK < WANDB_RECORD.size:
            # No record begins in the last bytes of a block.
            place += WANDB_BLOCK - place % WANDB_BLOCK
            continue
        _, length, kind = WANDB_RECORD.unpack_from(data, place)
        place += WANDB_RECORD.size
        fragments += data[place : place + length]
        place += length
        if kind in WANDB_LAST_FRAGMENTS:
            yield fragments
            fragments = b""


def read_wandb(folder: Path) -> Rows:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]  # not installed by this project

    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        for data in split_wandb_file(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            # The Trainer logs without a step, and has its own among the figures.
            step = int(row.get("train/global_step", record.history.step.num))
            yield from ((file.name, name, step, float(value)) for name, value in row.items() if name[0] != "_")


def read_trackio(folder: Path) -> Rows:
    for file in folder.glob("trackio/*.db"):
        for run, step, text in sqlite3.connect(file).execute("select run_id, step, metrics from metrics"):
            row = json.loads(text)
            # As with wandb.
            own = row.get("train/global_step", step)
            yield from ((run, name, own, value) for name, value in row.items())


def read_mlflow(folder: Path) -> Rows:
    yield from sqlite3.connect(folder / "mlflow.db").execute("select run_uuid, key, step, value from metrics")


READERS: dict[str, Callable[[Path], Rows]] = {"wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}


def main() -> None:
    folder = Path(sys.argv[1])
    trackers = sys.argv[2:]
    requests = list_requests()
    keep_on_this_machine(folder)
    PartialState(cpu=True)
    outcome: dict[str, Any] = {"rank": rank()}
    if not trackers:
        names = ("alone", "logged")
        outcome["histories"] = {name: train_by_trainer(folder / name, name, is_last_late=True) for name in names}
        outcome["figures"] = train_by_loop(folder / "loop")
    for tracker in trackers:
        train_by_trainer(folder / "logged", "logged", tracker)
        if tracker == "wandb" and rank() == 0:
            import wandb  # type: ignore[import-not-found]  # as above

            # The Trainer leaves its run open.
            wandb.finish()
        # Last: its end_training destroys the process group.
        train_by_loop(folder / "loop", tracker)
        outcome["rows"] = list(READERS[tracker](folder)) if rank() == 0 else []
    print("PROBE " + json.dumps(outcome | {"requests": requests}), flush=True)


main()
