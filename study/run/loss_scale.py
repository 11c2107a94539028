"""The loss scale of fp16: one rule for every engine, read back from each, and the steps that it leaves out.

A step whose gradients are not finite is left out, halves the scale and does not advance the schedule; after so many
good steps in a row the scale doubles. torch's GradScaler and DeepSpeed's scalers all do this, with other defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.errors import RunFailed

if TYPE_CHECKING:
    from accelerate import Accelerator

# torch's own defaults: DeepSpeed makes the scaler of its stage 0 under autocast with these, and nothing changes them.
_INITIAL_POWER, _WINDOW, _FACTOR = 16, 2000, 2.0
# Hysteresis is how many bad steps it takes to halve the scale.
LOSS_SCALER = {"initial_scale": 2.0**_INITIAL_POWER, "factor": _FACTOR, "window": _WINDOW, "hysteresis": 1}
# Of DeepSpeed's settings.
FP16_SECTION = {
    "enabled": True, "loss_scale": 0, "initial_scale_power": _INITIAL_POWER, "loss_scale_window": _WINDOW,
    "hysteresis": 1, "min_loss_scale": 1,
}  # fmt: skip
# Of torch's GradScaler.
GRAD_SCALER: dict[str, Any] = {
    "init_scale": 2.0**_INITIAL_POWER, "growth_factor": _FACTOR, "backoff_factor": 1 / _FACTOR,
    "growth_interval": _WINDOW,
}  # fmt: skip


def read_loss_scaler(accelerator: Accelerator, model: Any) -> dict[str, Any] | None:
    """LOSS_SCALER as the live engine has it; None where nothing scales the loss."""
    if (scaler := accelerator.scaler) is not None:
        return {
            "initial_scale": scaler.get_scale(), "factor": scaler.get_growth_factor(),
            "window": scaler.get_growth_interval(), "hysteresis": 1,
        }  # fmt: skip
    own = getattr(getattr(model, "optimizer", None), "loss_scaler", None)
    if own is None or not own.dynamic:
        return None
    return {
        "initial_scale": float(own.cur_scale), "factor": own.scale_factor, "window": own.scale_window,
        "hysteresis": own.delayed_shift,
    }  # fmt: skip


class SkippedSteps:
    """Asked once after every optimizer step: was it left out?"""

    def __init__(self, accelerator: Accelerator, scaler: Any = None):
        self._accelerator = accelerator
        self._scaler = scaler or accelerator.scaler
        self._scale = self._scaler.get_scale() if self._scaler else None

    def last_was_skipped(self) -> bool:
        if self._scaler is None:
            return bool(self._accelerator.optimizer_step_was_skipped)
        # Accelerate believes that a fused optimizer took every step: it is called either way, and leaves out bad ones.
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._scale < 1:
            # DeepSpeed's scalers stop here by themselves.
            raise RunFailed(
                "gradients are not finite at a loss scale of 1", "lower --learning_rate, or use --precision bf16"
            )
        return bool(self._scale < before)
