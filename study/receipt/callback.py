"""The receipt of transformers' Trainer, and of trainers derived from it: `trainer.add_callback(ReceiptCallback())`.

With `ReceiptCallback(log=trainer.log)` the figures also go to all that the Trainer reports to: a callback has no
reference to its Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from study.receipt.session import Receipt
from study.receipt.wrong_uses import options_of_callback


class ReceiptCallback(TrainerCallback):
    """Makes a Receipt when training begins, with these options, and closes it when training ends."""

    def __init__(
        self, log: Callable[[dict[str, float]], object] | None = None, *arguments: object, **options: Any
    ) -> None:
        # The Trainer adds its own step.
        self._log = log
        self._arguments, self._options = arguments, options_of_callback(options)
        self.receipt: Receipt | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        log = self._log
        # The receipt names any other value as a wrong use.
        wrapped = (lambda figures, step: log(figures)) if callable(log) else log
        options = {**self._options, "log": wrapped}
        self.receipt = Receipt(kwargs.get("model"), kwargs.get("optimizer"), *self._arguments, **options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.receipt is not None:
            self.receipt.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.receipt is None:
            return
        should_log = control.should_log
        self.receipt.end_step()
        # Trainer.log clears it (CallbackHandler.on_log), and the Trainer would leave out its loss of this step.
        control.should_log = should_log

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
