"""Tensor-parallel plans: the tensors that a tensor-parallel group shards on load, and their sharded dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.strategies import Strategy
from study.workloads.architecture import check_heads, model_class

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# Plans for models without a plan in transformers.
_OWN_PLANS = {
    "bert": {
        "bert.embeddings.word_embeddings": "embedding_rowwise",
        "bert.encoder.layer.*.attention.self.query": "colwise",
        "bert.encoder.layer.*.attention.self.key": "colwise",
        "bert.encoder.layer.*.attention.self.value": "colwise",
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
    },
    "gpt2": {
        "transformer.wte": "embedding_rowwise",
        "transformer.h.*.attn": "own_heads",
        "transformer.h.*.attn.c_attn": "conv1d_packed_columns",
        "transformer.h.*.attn.c_proj": "conv1d_rows",
        "transformer.h.*.mlp.c_fc": "conv1d_columns",
        "transformer.h.*.mlp.c_proj": "conv1d_rows",
        "lm_head": "colwise_gather_output",
    },
}


def is_sharded_on_load(strategy: Strategy | None) -> TypeGuard[Strategy]:
    """Whether a strategy shards tensors on load, as Accelerate's tensor parallelism; DeepSpeed shards after loading."""
    if strategy is None or strategy.deepspeed is not None:
        return False
    return strategy.group is not None and strategy.group.divides == "tensors"


def loading_options(architecture: PreTrainedConfig, strategy: Strategy | None) -> dict[str, Any]:
    """Return options of from_pretrained; empty if every rank loads full tensors."""
    if not is_sharded_on_load(strategy):
        return {}
    from transformers.distributed import DistributedConfig

    plan = _OWN_PLANS.get(architecture.model_type)
    if plan is not None:
        from study.workloads import conv1d_styles  # noqa: F401 - registers its styles by name
    return {"distributed_config": DistributedConfig(tp_size=strategy.group_size, tp_plan=plan)}


def check_divisible(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy) -> None:
    """Raise UserError if the model has no plan, or its heads do not divide over the ranks of the group."""
    model, ranks = f"{strategy.name} cannot train {config.model_name_or_path}", strategy.group_size
    has_plan = getattr(architecture, "base_model_tp_plan", None) and model_class(config, architecture)._tp_plan
    if not (has_plan or architecture.model_type in _OWN_PLANS):
        problem = f"{model}: for {architecture.model_type} models there is no tensor-parallel plan"
        raise UserError(problem, "use a gpt2, bert or llama model, or a strategy without tensor parallelism")
    check_heads(model, architecture, ranks)


def keep_own_shards(model: torch.nn.Module) -> None:
    """Copy this rank's shards. Without a GPU each is a view of the full tensor, which would stay in memory."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            shard = parameter._local_tensor
            if shard.untyped_storage().nbytes() > shard.nbytes:
                parameter._local_tensor = shard.contiguous().clone()


def build_stand_in_shards(cls: Any, architecture: PreTrainedConfig, strategy: Strategy) -> Any:
    """Build a virtual rank's model with uninitialized shards, sharded before memory is allocated, as on load."""
    import torch
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    options = loading_options(architecture, strategy)
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = cls(architecture)
    distributed, _, mesh = cls.prepare_distribute_model(options["distributed_config"])
    model = cls.maybe_distribute_model(model, distributed, mesh)
    buffers = dict(model.named_buffers())
    model = model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model
