"""study/train.py, which writes a digest of every whole parameter beside its checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from study import train
from study.records.lock import CHECKPOINTS
from study.run import checkpoint
from study.run.console import run_for_exit_status

save = checkpoint.save_checkpoint


def save_and_write(run: Any, accelerator: Any, schedule: Any, step: int) -> None:
    import deepspeed

    save(run, accelerator, schedule, step)
    digests = {}
    for name, parameter in accelerator.unwrap_model(accelerator._models[0]).named_parameters():
        # Does nothing to a parameter that is not partitioned.
        with deepspeed.zero.GatheredParameters([parameter]):
            digests[name] = hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest()
    if run.launch.is_main:
        (run.output_dir / CHECKPOINTS / "live_weights.json").write_text(json.dumps(digests))


checkpoint.save_checkpoint = save_and_write
if __name__ == "__main__":
    os._exit(run_for_exit_status(train.main))
