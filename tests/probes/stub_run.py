"""A launched run without an engine: two processes in sessions of their own, of which one writes a record.

python tests/probes/stub_run.py FOLDER STEPS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from study.records.directory import RunWriter
from study.records.lock import lock_run_directory
from study.records.outcome import Outcome

ROW = {"loss": 1.0, "lr": 0.1, "grad_norm": None, "step_time_s": None, "tokens": 1, "samples_hash": "0" * 16}


def main(folder: Path, steps: int) -> None:
    """Write a row every 20 ms, then the state of a cell that never runs again."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    with lock_run_directory(folder, str(folder)):
        record = RunWriter(folder)
        for step in range(1, steps + 1):
            record.append("steps.jsonl", {"step": step, **ROW})
            record.flush()
            time.sleep(0.02)
        record.close(Outcome("unsupported", "a stub"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
