"""LoRA by peft: small matrices beside every linear layer are trained, and the model's own weights are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.models.presets import FAMILY_OF_TASK
from study.spec.config import RunConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, config: RunConfig) -> None:
    """In place, the same ones for every arm: drawn from the seed, on the host, and leaving the random state alone."""
    if config.peft == "none":
        return
    import torch
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    is_classifier = FAMILY_OF_TASK[config.task] == "sequence-classification"
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        # peft leaves the output layer out: of a language model it is the embedding, of a classifier it is new.
        target_modules="all-linear",
        task_type=TaskType.SEQ_CLS if is_classifier else TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        inject_adapter_in_model(settings, model)
    if is_classifier:
        for child in model.children():
            if child is not model.base_model:
                child.requires_grad_(True)


def asked_adapters(config: RunConfig) -> dict[str, Any] | None:
    if config.peft == "none":
        return None
    return {"kind": "lora", "rank": config.lora_rank, "alpha": config.lora_alpha}


def adapters_in(model: torch.nn.Module) -> Any:
    """What the live modules have; a list where they do not have the same."""
    layers: list[Any] = [
        module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "lora_alpha")
    ]
    found = {(*layer.r.values(), *layer.lora_alpha.values()) for layer in layers}
    kinds = [{"kind": "lora", "rank": rank, "alpha": alpha} for rank, alpha in sorted(found)]
    return kinds if len(kinds) > 1 else next(iter(kinds), None)
