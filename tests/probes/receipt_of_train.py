"""study/train.py with the two lines of a receipt in its text: its record and its receipt are of one run.

accelerate launch tests/probes/receipt_of_train.py FLAGS... writes the receipt beside the run's folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[2] / "study" / "train.py"
PREPARED = "        model, optimizer = engine.prepare(accelerator, model, make_optimizer(model, config), config)\n"
LOOP = "        for step, micro_batches in run.steps():\n"
# Steps 2 to 4 are measured.
ADDED = "        receipt = Receipt(model, optimizer, path=RECEIPT, after=1, steps=3, quiet=True)\n"


def main() -> int:
    from study import Receipt
    from study.run.console import run_for_exit_status

    source = TRAIN.read_text()
    for line in (PREPARED, LOOP):
        assert source.count(line) == 1, line
    source = source.replace(PREPARED, PREPARED + ADDED).replace(
        LOOP, LOOP.replace("run.steps()", "receipt.steps(run.steps())")
    )
    # The process leaves by os._exit, which calls no atexit function.
    source = source.replace("        meters.finish()\n", "        meters.finish()\n        receipt.close()\n")
    folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    names: dict[str, Any] = {"__name__": "train_with_receipt", "Receipt": Receipt}
    names["RECEIPT"] = folder.parent / "receipt.json"
    exec(compile(source, str(TRAIN), "exec"), names)  # the study's own file
    return int(run_for_exit_status(names["main"]))


if __name__ == "__main__":
    os._exit(main())
