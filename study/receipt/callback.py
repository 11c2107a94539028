"""The receipt of transformers' Trainer, and of trainers derived from it: `trainer.add_callback(ReceiptCallback())`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from study.receipt.session import Receipt


class ReceiptCallback(TrainerCallback):
    """Makes a Receipt when training begins, with these options, and closes it when training ends."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.receipt: Receipt | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.receipt = Receipt(kwargs.get("model"), kwargs.get("optimizer"), **self._options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.receipt is not None:
            self.receipt.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.receipt is not None:
            self.receipt.end_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._disturb()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._disturb()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.receipt is not None:
            self.receipt.close()

    def _disturb(self) -> None:
        if self.receipt is not None:
            self.receipt.disturb()
