"""study/train.py, where DeepSpeed's accelerator is named as a GPU is: stage 3 then steps what `ratio` leaves on the
device with a second optimizer, as it does there."""

from __future__ import annotations

import os
from typing import Any

from study.engine import setup as engine
from study.run.console import run_for_exit_status
from study.train import main

make_accelerator = engine.make_accelerator


def make_named_accelerator(run: Any) -> Any:
    from deepspeed.accelerator import get_accelerator

    accelerator = make_accelerator(run)
    get_accelerator()._name = "cpu:0"
    return accelerator


engine.make_accelerator = make_named_accelerator
if __name__ == "__main__":
    os._exit(run_for_exit_status(main))
