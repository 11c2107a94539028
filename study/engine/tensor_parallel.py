"""Tensor parallelism: each layer's tensors divided over the ranks of a model-parallel group.

DeepSpeed's AutoTP divides the input matrices of attention and the MLP by columns, and their output matrices by rows.
Without an engine transformers divides tensors while it loads them (study/workloads/tensor_plans.py). ZeRO-R's
partitioned activations are here too: each rank of a group stores a part of the checkpointed activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.launch_context import Launch
from study.workloads.tensor_plans import check_divisible

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedConfig, PreTrainedModel

# GPT-2 has no published plan. Its first matrix concatenates queries, keys and values.
_GPT2_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attn\.c_attn\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*\.mlp\.c_fc\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.c_proj\.weight$"], "partition_type": "row"},
    ],
}


def check_autotp(config: RunConfig, architecture: PreTrainedConfig, strategy: str, ranks: int) -> None:
    """Raise UserError if AutoTP cannot divide the model over this number of ranks."""
    model, text = f"{strategy} cannot train {config.model_name_or_path}", architecture.get_text_config()
    if not getattr(text, "base_model_tp_plan", None) and architecture.model_type != "gpt2":
        # DeepSpeed would guess from the names of layers, or divide only the head.
        problem = f"{model}: {architecture.model_type} has no tensor-parallel plan"
        raise UserError(problem, "use gpt2 or a model that transformers has a tp_plan for, or a strategy without _tp")
    for unit, count in (
        ("heads", text.num_attention_heads),
        ("heads of keys and values", getattr(text, "num_key_value_heads", None)),
        ("columns of the MLP", getattr(text, "intermediate_size", None)),
    ):
        if count is not None and count % ranks:
            raise UserError(f"{model}: {count} {unit} do not divide over {ranks} ranks", "use a smaller --group_size")


def check_tensors(config: RunConfig, launch: Launch, architecture: PreTrainedConfig) -> None:
    """Raise UserError if a flag does not work with divided tensors, or if tensors do not divide without an engine."""
    strategy, ranks = launch.strategy, launch.world_size
    if strategy.group_size != ranks:
        # Accelerate combines tensor and data parallelism only under FSDP.
        raise UserError(
            f"{strategy.name} divides tensors over a group of {strategy.group_size} ranks, and all {ranks} must be"
            " in it",
            f"add --group_size {ranks}" if ranks > 1 else "launch 2 ranks",
        )
    for flag, is_set, reason in (
        ("checkpointing_steps", config.checkpointing_steps, "Accelerate cannot save the parts"),
        ("resume_from_checkpoint", config.resume_from_checkpoint, "Accelerate cannot load the parts"),
        ("precision fp16", config.precision == "fp16", "torch cannot unscale divided and whole tensors in one call"),
        ("torch_compile", config.torch_compile, "GPT-2's parts are gathered outside of the compiled graph"),
    ):
        if is_set:
            raise UserError(f"--{flag}: {strategy.name} divides tensors, and {reason}", "leave it out")
    check_divisible(config, architecture, strategy)


def autotp_size(accelerator: Accelerator) -> int:
    """Return the number of ranks that DeepSpeed's AutoTP divides tensors over; 0 without it."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0) if plugin else 0


def prepare_autotp(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Replace GPT-2's Conv1D by nn.Linear, the layer that AutoTP divides. Call it before Accelerate's `prepare`."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if model.config.model_type != "gpt2":
        return
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                # The parameters stay the same objects, because the optimizer already refers to them.
                layer.weight.data = layer.weight.data.t().contiguous()
                linear = torch.nn.Linear(layer.nx, layer.nf, device="meta")
                linear.weight, linear.bias = layer.weight, layer.bias
                setattr(parent, name, linear)
    for block in model.base_model.h:
        block.attn.split_size //= autotp_size(accelerator)
    section = accelerator.state.deepspeed_plugin.deepspeed_config["tensor_parallel"]
    section.setdefault("partition_config", _GPT2_PLAN)


def count_elements(parameters: Iterable[torch.nn.Parameter], ranks: int) -> int:
    """Return the number of elements of the whole parameters, whichever part this rank has."""
    return sum(
        getattr(tensor, "ds_numel", tensor.numel()) * (ranks if is_divided(tensor) else 1) for tensor in parameters
    )


def is_divided(parameter: torch.nn.Parameter) -> bool:
    """Whether tensor parallelism divides this parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def partition_activations(model: Any) -> None:
    """Make the layers use DeepSpeed's gradient checkpointing; by default transformers uses torch's."""
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

    # The hidden states are its only argument: DeepSpeed passes others twice if activations are partitioned.
    return deepspeed.checkpointing.checkpoint(compute, hidden)


def has_partitioned_activations(model: Any) -> bool:
    """Whether DeepSpeed partitions the checkpointed activations of this model."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    return _checkpoint_partitioned in functions and bool(checkpointing.PARTITION_ACTIVATIONS)
