"""Layers divided over the ranks of a team: what DeepSpeed's AutoTP needs of a model.

Column-wise into attention and the MLP, row-wise out of them; each rank has whole samples and a part of the heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import RunConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedConfig, PreTrainedModel

# Nobody publishes a plan for GPT-2. Its first matrix is queries, keys and values side by side.
_GPT2_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attn\.c_attn\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*\.mlp\.c_fc\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.c_proj\.weight$"], "partition_type": "row"},
    ],
}


def check_divisible(config: RunConfig, architecture: PreTrainedConfig, strategy: str, ranks: int) -> None:
    model, text = f"{strategy} cannot train {config.model_name_or_path}", architecture.get_text_config()
    if not getattr(text, "base_model_tp_plan", None) and architecture.model_type != "gpt2":
        # DeepSpeed would guess by the names of layers, or divide the head alone.
        raise UserError(
            f"{model}: nobody has said how the layers of {architecture.model_type} are divided",
            "use gpt2 or a model that transformers has a tp_plan for, or a strategy without _tp",
        )
    for what, count in (
        ("heads", text.num_attention_heads), ("heads of keys and values", getattr(text, "num_key_value_heads", None)),
        ("columns of the MLP", getattr(text, "intermediate_size", None)),
    ):  # fmt: skip
        if count is not None and count % ranks:
            raise UserError(f"{model}: {count} {what} do not divide over {ranks} ranks", "use a smaller --team_size")


def _size(accelerator: Accelerator) -> int:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0) if plugin else 0


def divides(accelerator: Accelerator) -> bool:
    return _size(accelerator) > 1


def load_whole() -> None:
    """Before the model: transformers refuses to load one in parts whose layers are to be divided, at stage 3.

    It asks DeepSpeed's configuration for that, whatever the launched file's zero3_init_flag says.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def make_ready(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Before Accelerate's `prepare`. AutoTP divides nn.Linear, and GPT-2 has transposed layers of its own instead."""
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
        block.attn.split_size //= _size(accelerator)
    section = accelerator.state.deepspeed_plugin.deepspeed_config["tensor_parallel"]
    section.setdefault("partition_config", _GPT2_PLAN)


def put_right(engine: Any, virtual: bool) -> None:
    """After `prepare`: the ranks of a virtual team cannot tell each other that their samples are the same."""
    if virtual:
        engine.first_dataloader_check.remove()


def elements(parameters: Iterable[torch.nn.Parameter], ranks: int) -> int:
    """Of the whole parameters, whatever part of them this rank has."""
    return sum(getattr(one, "ds_numel", one.numel()) * (ranks if _is_divided(one) else 1) for one in parameters)


def _is_divided(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def live_team(engine: Any) -> tuple[str | None, int]:
    from deepspeed.utils import groups

    divided = any(map(_is_divided, engine.module.parameters()))
    return "tensors" if divided else None, groups.get_tensor_model_parallel_world_size()
