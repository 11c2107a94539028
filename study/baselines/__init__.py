"""The same run through other people's loops: what study/train.py's own loop costs, or saves, against them."""

from __future__ import annotations

from study.config.errors import UserError
from study.config.flags import RunConfig


def refuse_what_only_the_study_does(trainer: str, config: RunConfig) -> None:
    """A baseline is there to be compared with: it saves nothing, and is followed by nobody."""
    asked = {
        "checkpointing_steps": config.checkpointing_steps,
        "resume_from_checkpoint": config.resume_from_checkpoint,
        "report_to": config.report_to not in (None, "none"),
        "optimizer": config.optimizer != "adamw",
        "peft": config.peft != "none",
        "bf16_states": config.bf16_states,
    }
    for flag, is_asked in asked.items():
        if is_asked:
            raise UserError(f"{trainer} is a baseline and knows no --{flag}", "leave it out, or use study/train.py")
