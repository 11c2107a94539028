"""The same training run with HF Trainer and with a bare loop, to measure the overhead of study/train.py."""

from __future__ import annotations

from study.config import errors, flags


def check_baseline_flags(trainer: str, config: flags.RunConfig) -> None:
    """Raise UserError for flags that a baseline does not support: checkpoints, trackers, LoRA, Muon."""
    only_the_study_has = (
        "checkpointing_steps",
        "resume_from_checkpoint",
        "report_to",
        "optimizer",
        "peft",
        "bf16_states",
    )
    for flag in only_the_study_has:
        if getattr(config, flag) not in (None, False, 0, "none", "adamw"):
            raise errors.UserError(f"{trainer} is a baseline without --{flag}", "leave it out, or use study/train.py")
