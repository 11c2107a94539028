"""Tensor parallelism: each layer's tensors divided over the ranks of a model-parallel group.

DeepSpeed's AutoTP divides column-wise into attention and the MLP and row-wise out of them. Without an engine
transformers divides while it loads (study/workloads/tensor_plans.py). ZeRO-R's partitioned activations are here too:
each rank of a group stores a part of what gradient checkpointing keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.workloads.tensor_plans import check_divisible

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedConfig, PreTrainedModel

# GPT-2 has no published plan. Its first matrix is queries, keys and values in one.
_GPT2_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attn\.c_attn\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*\.mlp\.c_fc\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.c_proj\.weight$"], "partition_type": "row"},
    ],
}


def check_autotp(config: RunConfig, architecture: PreTrainedConfig, strategy: str, ranks: int) -> None:
    model, text = f"{strategy} cannot train {config.model_name_or_path}", architecture.get_text_config()
    if not getattr(text, "base_model_tp_plan", None) and architecture.model_type != "gpt2":
        # DeepSpeed would guess by the names of layers, or divide the head alone.
        raise UserError(
            f"{model}: {architecture.model_type} has no tensor-parallel plan",
            "use gpt2 or a model that transformers has a tp_plan for, or a strategy without _tp",
        )
    for what, count in (
        ("heads", text.num_attention_heads), ("heads of keys and values", getattr(text, "num_key_value_heads", None)),
        ("columns of the MLP", getattr(text, "intermediate_size", None)),
    ):  # fmt: skip
        if count is not None and count % ranks:
            raise UserError(f"{model}: {count} {what} do not divide over {ranks} ranks", "use a smaller --group_size")


def check_tensors(config: RunConfig, launch: Launch, architecture: PreTrainedConfig) -> None:
    """Refuse what does not divide without an engine, or does not work with divided tensors."""
    strategy, ranks = launch.strategy, launch.world_size
    if strategy.group_size != ranks:
        # Accelerate combines it with data parallelism under FSDP alone.
        raise UserError(
            f"{strategy.name} divides tensors over a group of {strategy.group_size} ranks, and all {ranks} must be"
            " in it",
            f"add --group_size {ranks}" if ranks > 1 else "launch 2 ranks",
        )
    for flag, is_asked, why in (
        ("checkpointing_steps", config.checkpointing_steps, "Accelerate cannot save the parts"),
        ("resume_from_checkpoint", config.resume_from_checkpoint, "Accelerate cannot load the parts"),
        ("precision fp16", config.precision == "fp16", "torch unscales divided and whole tensors in no one call"),
        ("torch_compile", config.torch_compile, "GPT-2's parts are assembled outside of the compiled graph"),
    ):
        if is_asked:
            raise UserError(f"--{flag}: {strategy.name} divides tensors, and {why}", "leave it out")
    check_divisible(config, architecture, strategy)


def autotp_size(accelerator: Accelerator) -> int:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0) if plugin else 0


def prepare_autotp(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Before Accelerate's `prepare`: AutoTP divides nn.Linear, and GPT-2 has transposed layers of its own instead."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if model.config.model_type != "gpt2":
        return
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                # The parameters stay the same objects: the optimizer has them already.
                layer.weight.data = layer.weight.data.t().contiguous()
                linear = torch.nn.Linear(layer.nx, layer.nf, device="meta")
                linear.weight, linear.bias = layer.weight, layer.bias
                setattr(parent, name, linear)
    for block in model.base_model.h:
        block.attn.split_size //= autotp_size(accelerator)
    section = accelerator.state.deepspeed_plugin.deepspeed_config["tensor_parallel"]
    section.setdefault("partition_config", _GPT2_PLAN)


def count_elements(parameters: Iterable[torch.nn.Parameter], ranks: int) -> int:
    """Count the elements of the whole parameters, whichever part this rank has."""
    return sum(getattr(one, "ds_numel", one.numel()) * (ranks if is_divided(one) else 1) for one in parameters)


def is_divided(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def partition_activations(model: Any) -> None:
    """Make the layers checkpoint through DeepSpeed: transformers uses torch's, whatever DeepSpeed's settings are."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.checkpointing.configure(groups, partition_activations=True)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_checkpoint_partitioned)


def _checkpoint_partitioned(layer: Callable[..., Any], hidden: Any, *rest: Any) -> Any:
    import deepspeed
    import torch

    kind = hidden.device.type
    # DeepSpeed recomputes the layer outside of the autocast of its forward pass.
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))

    def compute(states: Any) -> Any:
        with autocast:
            return layer(states, *rest)

    # The hidden states are its only argument: DeepSpeed passes others twice where activations are partitioned.
    return deepspeed.checkpointing.checkpoint(compute, hidden)


def has_partitioned_activations(model: Any) -> bool:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    return _checkpoint_partitioned in functions and bool(checkpointing.PARTITION_ACTIVATIONS)
