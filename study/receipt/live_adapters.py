"""Facts about a live model's frozen weights: its LoRA adapters, their modules and type, or its frozen modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from study.engine.audit import dtype_name

# Parts of a module's name that FSDP1, torch's checkpoints and its compiler add.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def adapter_facts(model: nn.Module, rank: int) -> dict[str, Any]:
    """Return the facts of a model whose adapters have one rank."""
    # A wrapper comes before its module, which has the same name here and takes its place.
    modules = {_plain_name(name): module for name, module in model.named_modules()}
    adapted = {name: module for name, module in modules.items() if hasattr(module, "lora_A")}
    unadapted = [f".{name}" for name in modules if name not in adapted]
    saved = [name for name, module in modules.items() if hasattr(module, "original_module")]
    matrices = [matrix for module in adapted.values() for matrix in module.lora_A.parameters()]
    return {
        "lora_rank": rank,
        "lora_targets": tuple(sorted({_target(name, unadapted) for name in adapted})),
        "lora_saved": tuple(sorted({name.rpartition(".")[2] for name in saved})),
        "lora_dora": any(len(getattr(module, "lora_magnitude_vector", ())) for module in adapted.values()),
        "lora_dtype": dtype_name(matrices[0].dtype) if matrices else None,
    }


def frozen_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of the outermost modules whose weights are all frozen, and of other frozen weights."""
    trains = {_plain_name(name): weight.requires_grad for name, weight in model.named_parameters()}
    frozen = [name for name, is_trained in trains.items() if not is_trained]
    if len(frozen) in (0, len(trains)):
        return ()
    trained = [f"{name}." for name, is_trained in trains.items() if is_trained]
    outermost = dict[str, None]()
    for name in frozen:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        outermost[next(prefix for prefix in prefixes if not any(at.startswith(f"{prefix}.") for at in trained))] = None
    return tuple(outermost)


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _target(name: str, unadapted: list[str]) -> str:
    """Return the shortest end of an adapted module's name that is not the end of a module's without adapters."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1))
    return next((end for end in ends if not any(path.endswith(f".{end}") for path in unadapted)), name)
