"""The receipt of Lightning's Trainer: `Trainer(callbacks=[LightningReceiptCallback()])`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from study.receipt.failures import print_notice
from study.receipt.session import Receipt
from study.receipt.wrong_uses import options_of_callback


def _lightning_callback() -> Any:
    """Return the class of callbacks of the package that the program uses: the same project has two."""
    names = ("lightning.pytorch", "pytorch_lightning")
    name = next((it for it in names if it in sys.modules), names[0])
    return importlib.import_module(name).Callback


class LightningReceiptCallback(_lightning_callback()):  # type: ignore[misc]  # found at run time
    """Makes a Receipt when training begins, with these options, and closes it when training ends.

    With `log=True` the figures also go to the Trainer's loggers.
    """

    def __init__(self, *arguments: object, log: bool = False, **options: Any) -> None:
        self._log, self._arguments, self._options = log, arguments, options_of_callback(options)
        self.receipt: Receipt | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) > 1:
            print_notice(f"of {len(trainer.optimizers)} optimizers the receipt has the first")
        if self._log:
            self._options["log"] = lambda figures, step: _log(trainer, figures)
        # Of DDP, FSDP or DeepSpeed; without one, the LightningModule.
        model = trainer.strategy.model
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        self.receipt = Receipt(model, optimizer, *self._arguments, **self._options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.receipt is not None:
            self.receipt.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.receipt is not None:
            self.receipt.end_step(is_certain=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._disturb()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._disturb()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.receipt is not None:
            self.receipt.close()

    def _disturb(self) -> None:
        if self.receipt is not None:
            self.receipt.disturb()


def _log(trainer: Any, figures: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(figures, step=trainer.global_step)
