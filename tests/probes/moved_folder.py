"""study/train.py, whose folder is moved away before its second checkpoint, while another run takes its name."""

from __future__ import annotations

import os
from typing import Any

from study import train
from study.records.directory import RunWriter, read_status
from study.run import checkpoint
from study.run.console import run_for_exit_status

save = checkpoint.save_checkpoint


def move_and_save(run: Any, accelerator: Any, schedule: Any, step: int) -> None:
    if step > 2 and run.launch.is_main:
        hint = read_status(run.output_dir)["hint"]
        assert hint == "--resume_from_checkpoint latest resumes from step_0000002", hint
        other = run.output_dir
        other.rename(other.with_name("moved"))
        RunWriter(other).set_crash_hint("another run's")
        (other / "checkpoints" / "step_0000004").mkdir(parents=True)
        (other / "checkpoints" / "step_0000004" / "scheduler.bin").write_text("another run's")
    save(run, accelerator, schedule, step)


checkpoint.save_checkpoint = move_and_save
if __name__ == "__main__":
    os._exit(run_for_exit_status(train.main))
