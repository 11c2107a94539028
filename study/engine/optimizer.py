"""The optimizer of a run, the same for every strategy, and the loss scale of fp16 with the steps that it skips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.config.errors import RunFailed
from study.config.flags import RunConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel


# One rule for every engine, read back from each: a step whose gradients are not finite is skipped, halves the scale and
# does not advance the schedule; after a window of good steps the scale doubles. torch's GradScaler and DeepSpeed's
# scalers all do this, with other defaults. These are torch's, which DeepSpeed's stage 0 under autocast cannot change.
_INITIAL_POWER, _WINDOW, _FACTOR = 16, 2000, 2.0
# Hysteresis is how many bad steps it takes to halve the scale.
LOSS_SCALER = {"initial_scale": 2.0**_INITIAL_POWER, "factor": _FACTOR, "window": _WINDOW, "hysteresis": 1}
# The section of DeepSpeed's settings.
FP16_SECTION = {
    "enabled": True, "loss_scale": 0, "initial_scale_power": _INITIAL_POWER, "loss_scale_window": _WINDOW,
    "hysteresis": 1, "min_loss_scale": 1,
}  # fmt: skip
# The arguments of torch's GradScaler.
GRAD_SCALER: dict[str, Any] = {
    "init_scale": 2.0**_INITIAL_POWER, "growth_factor": _FACTOR, "backoff_factor": 1 / _FACTOR,
    "growth_interval": _WINDOW,
}  # fmt: skip


def read_loss_scaler(accelerator: Accelerator, model: Any) -> dict[str, Any] | None:
    """Read the live engine's LOSS_SCALER; None where nothing scales the loss."""
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
    """Detects, once after every optimizer step, whether the engine skipped it."""

    def __init__(self, accelerator: Accelerator, scaler: Any = None):
        self._accelerator = accelerator
        self._scaler = scaler or accelerator.scaler
        self._scale = self._scaler.get_scale() if self._scaler else None

    def last_was_skipped(self) -> bool:
        if self._scaler is None:
            return bool(self._accelerator.optimizer_step_was_skipped)
        # Accelerate reports no skipped step of a fused optimizer, which is called either way and skips by itself.
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._scale < 1:
            # DeepSpeed's scalers stop here by themselves.
            raise RunFailed(
                "gradients are not finite at a loss scale of 1", "lower --learning_rate, or use --precision bf16"
            )
        return bool(self._scale < before)


BETAS, EPSILON = (0.9, 0.999), 1e-8
MOMENTUM = 0.95
# DeepSpeed's default: the same iteration as the original's on a smaller matrix.
NEWTON_SCHULZ = "gram"


def make_optimizer(model: PreTrainedModel, config: RunConfig) -> torch.optim.Optimizer:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        # A fused step works on tensors of one type: DTensors are in another group than plain ones.
        types: dict[type, list[torch.nn.Parameter]] = {}
        for parameter in trained:
            types.setdefault(type(parameter), []).append(parameter)
        by_type = [{"params": parameters} for parameters in types.values()]
        return torch.optim.AdamW(by_type, betas=BETAS, eps=EPSILON, fused=True, **adam)
    # Imported here, as its import compiles.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    # Muon trains the weights of the linear layers below the head.
    layers = (module for module in model.base_model.modules() if type(module).__name__ in ("Linear", "Conv1D"))
    matrices = {id(layer.weight) for layer in layers}
    for parameter in trained:
        # DeepSpeed's stages read it to orthogonalize gradients. By default they match names, and include GPT-2's wte
        # and wpe.
        parameter.use_muon = id(parameter) in matrices
    muon = {"use_muon": True, "momentum": MOMENTUM, "ns_method": NEWTON_SCHULZ, **adam}
    groups = [
        {"params": [one for one in trained if id(one) in matrices], **muon},
        {"params": [one for one in trained if id(one) not in matrices], "use_muon": False, "betas": BETAS,
         "eps": EPSILON, **adam},
    ]  # fmt: skip
    return MuonWithAuxAdam([group for group in groups if group["params"]])


def asked_settings(config: RunConfig) -> dict[str, Any]:
    """Return what `live_settings` must equal."""
    settings = {
        "lr": config.learning_rate, "weight_decay": config.weight_decay, "betas": list(BETAS), "eps": EPSILON,
        "decoupled_weight_decay": True,
    }  # fmt: skip
    return settings | ({"momentum": MOMENTUM, "ns_method": NEWTON_SCHULZ} if config.optimizer == "muon" else {})


def live_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read the settings of all parameter groups; a list of values where groups differ."""
    found: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        # torch.optim.AdamW decouples by its class, DeepSpeed's by a switch that defaults to on.
        settings = {"decoupled_weight_decay": getattr(optimizer, "adam_w_mode", type(optimizer).__name__ == "AdamW")}
        settings |= {key: group[key] for key in ("weight_decay", "eps", "momentum", "ns_method") if key in group}
        settings["lr"] = group.get("initial_lr", group["lr"])
        if "betas" in group:
            settings["betas"] = list(group["betas"])
        for key, value in settings.items():
            if value not in (values := found.setdefault(key, [])):
                values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}
