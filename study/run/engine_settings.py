"""DeepSpeed's settings, the file's and `--engine_override`'s, checked by its own types before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from study.errors import Unsupported, UserError
from study.host.releases import package_version
from study.spec.config import RunConfig
from study.spec.names import BATCH_KEYS
from study.spec.overrides import override, parse_overrides
from study.spec.strategies import KEEPS_PARTS, Strategy

_DEEPCOMPILE = "compile.deepcompile"
# Left to itself DeepSpeed fails in the first step, each time in other words.
_WANT_A_GPU = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.offload_optimizer.super_offload",
    _DEEPCOMPILE,
)


def check_engine_settings(config: RunConfig, strategy: Strategy) -> None:
    """By DeepSpeed's own types. A key of the outermost level that it does not know it would leave out in silence."""
    from deepspeed.runtime import config as constants
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if config.precision in ("bf16", "fp16") and not hasattr(DeepSpeedEngine, "torch_autocast_enabled"):
        raise Unsupported(
            f"--precision {config.precision} is autocast, which DeepSpeed {package_version('deepspeed')} does not have",
            f"use --precision {config.precision}-engine, or a later release",
        )
    assert strategy.deepspeed is not None
    known = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    known |= {"aio", "compile", "timers", "zero_optimization", KEEPS_PARTS.split(".")[0], *strategy.deepspeed}
    for key in parse_overrides(config.engine_override):
        section = key.split(".")[0]
        if section not in known:
            raise UserError(f"--engine_override {key}: DeepSpeed has no setting {section}", "fix the key")
        if section in BATCH_KEYS:
            raise UserError(
                f"--engine_override {key}: the batch of the run decides it",
                "use --global_batch_size and --per_device_train_batch_size",
            )
    settings = override(strategy.deepspeed, config.engine_override)
    if _value(settings, _DEEPCOMPILE) and not config.torch_compile:
        raise UserError(f"{_DEEPCOMPILE} does nothing in a model that is not compiled", "add --torch_compile")
    _refuse_what_wants_a_gpu(settings)
    zero = settings["zero_optimization"]
    if isinstance(zero, dict):
        # Accelerate fills these in.
        zero = {key: value for key, value in zero.items() if value != "auto"}
    # Before 0.15 its types are those of the first pydantic, whose errors are a ValueError too.
    validate = getattr(DeepSpeedZeroConfig, "model_validate", None) or DeepSpeedZeroConfig.parse_obj
    try:
        validate(zero)
    except ValueError as error:
        found = error.errors()[0]  # type: ignore[attr-defined]
        raise UserError(
            f"DeepSpeed refuses {'.'.join(['zero_optimization', *map(str, found['loc'])])}: {found['msg']}",
            "fix --engine_override, or the strategy's file",
        ) from None


def _refuse_what_wants_a_gpu(settings: Mapping[str, Any]) -> None:
    import torch

    asked = [key for key in _WANT_A_GPU if _value(settings, key)]
    if asked and not torch.cuda.is_available():
        raise Unsupported(f"{asked[0]} runs on GPUs alone, and none is visible", "leave it out")


def _value(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings
