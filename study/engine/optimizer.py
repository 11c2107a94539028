"""The optimizer of a run, which is the same for every strategy, and the fp16 loss scaler with its skipped steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.config.errors import NotFinite
from study.config.flags import RunConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel


# Every engine follows one rule, and the audit compares its settings. A step whose gradients are not finite is skipped,
# halves the scale and does not advance the schedule; after a window of finite steps the scale doubles. torch's
# GradScaler and DeepSpeed's scalers do this with different defaults. These are torch's, because DeepSpeed's stage 0
# under autocast cannot change them.
_INITIAL_POWER, _WINDOW, _FACTOR = 16, 2000, 2.0
# Hysteresis is the number of non-finite steps that halves the scale.
LOSS_SCALER = {"initial_scale": 2.0**_INITIAL_POWER, "factor": _FACTOR, "window": _WINDOW, "hysteresis": 1}
# The `fp16` section of DeepSpeed's settings.
FP16_SECTION = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": _INITIAL_POWER,
    "loss_scale_window": _WINDOW,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
# The arguments of torch's GradScaler.
GRAD_SCALER: dict[str, Any] = {
    "init_scale": 2.0**_INITIAL_POWER,
    "growth_factor": _FACTOR,
    "backoff_factor": 1 / _FACTOR,
    "growth_interval": _WINDOW,
}


def read_loss_scaler(accelerator: Accelerator, model: Any) -> dict[str, Any] | None:
    """Return the live engine's settings in the form of LOSS_SCALER; None without a dynamic loss scaler."""
    if (scaler := accelerator.scaler) is not None:
        values = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_growth_interval(), 1
    else:
        scaler = getattr(getattr(model, "optimizer", None), "loss_scaler", None)
        if scaler is None or not scaler.dynamic:
            return None
        values = float(scaler.cur_scale), scaler.scale_factor, scaler.scale_window, scaler.delayed_shift
    return dict(zip(LOSS_SCALER, values, strict=True))


class SkippedSteps:
    """Detector of optimizer steps that the engine skipped."""

    def __init__(self, accelerator: Accelerator, scaler: Any = None):
        self._accelerator = accelerator
        self._scaler = scaler or accelerator.scaler
        self._scale = self._scaler.get_scale() if self._scaler else None

    def last_was_skipped(self) -> bool:
        """Whether the engine skipped the last optimizer step. Call it once after each step."""
        if self._scaler is None:
            return bool(self._accelerator.optimizer_step_was_skipped)
        # Accelerate does not detect skipped steps of a fused optimizer, which is called either way and skips by itself.
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._scale < 1:
            # DeepSpeed's scalers raise an error here by themselves.
            problem = "gradients are not finite at a loss scale of 1"
            raise NotFinite(problem, "lower --learning_rate, or use --precision bf16")
        return bool(self._scale < before)


BETAS, EPSILON = (0.9, 0.999), 1e-8
MOMENTUM = 0.95
# DeepSpeed's default: Muon's original iteration on a smaller matrix.
NEWTON_SCHULZ = "gram"


def make_optimizer(model: PreTrainedModel, config: RunConfig) -> torch.optim.Optimizer:
    """Return AdamW or Muon over the trainable parameters."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        # A fused step works on tensors of one type: DTensors and plain tensors are in separate groups.
        types: dict[type, list[torch.nn.Parameter]] = {}
        for parameter in trained:
            types.setdefault(type(parameter), []).append(parameter)
        by_type = [{"params": parameters} for parameters in types.values()]
        return torch.optim.AdamW(by_type, betas=BETAS, eps=EPSILON, fused=True, **adam)
    assert config.optimizer == "muon", config.optimizer
    # Imported here, as its import compiles.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    # Muon trains the weights of the linear layers below the head.
    layers = (module for module in model.base_model.modules() if type(module).__name__ in ("Linear", "Conv1D"))
    matrices = {id(layer.weight) for layer in layers}
    for parameter in trained:
        # DeepSpeed orthogonalizes the gradients of parameters with this attribute. By default it sets the attribute by
        # name, and includes GPT-2's wte and wpe.
        parameter.use_muon = id(parameter) in matrices
    muon = {"use_muon": True, "momentum": MOMENTUM, "ns_method": NEWTON_SCHULZ, **adam}
    groups = [
        {"params": [tensor for tensor in trained if id(tensor) in matrices], **muon},
        {
            "params": [tensor for tensor in trained if id(tensor) not in matrices],
            "use_muon": False,
            "betas": BETAS,
            "eps": EPSILON,
            **adam,
        },
    ]
    return MuonWithAuxAdam([group for group in groups if group["params"]])


def expected_settings(config: RunConfig) -> dict[str, Any]:
    """Return the optimizer settings of the flags, which `live_settings` must equal."""
    settings = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "betas": list(BETAS),
        "eps": EPSILON,
        "decoupled_weight_decay": True,
    }
    return settings | ({"momentum": MOMENTUM, "ns_method": NEWTON_SCHULZ} if config.optimizer == "muon" else {})


def live_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of all parameter groups; a setting is a list of values if the groups differ."""
    values_of_settings: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        # torch.optim.AdamW decouples by its class, DeepSpeed's by a switch that defaults to on.
        settings = {"decoupled_weight_decay": getattr(optimizer, "adam_w_mode", type(optimizer).__name__ == "AdamW")}
        settings |= {key: group[key] for key in ("weight_decay", "eps", "momentum", "ns_method") if key in group}
        settings["lr"] = group.get("initial_lr", group["lr"])
        if "betas" in group:
            settings["betas"] = list(group["betas"])
        for key, value in settings.items():
            if value not in (values := values_of_settings.setdefault(key, [])):
                values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in values_of_settings.items()}
