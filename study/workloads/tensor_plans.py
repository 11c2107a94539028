"""Which tensors of a model are divided over the ranks of a team while it is loaded, and along which dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.config.strategies import Strategy
from study.workloads.architecture import model_class

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# For models that transformers has no plan for.
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


def divides_while_loading(strategy: Strategy | None) -> TypeGuard[Strategy]:
    """As Accelerate's tensor parallelism needs it; DeepSpeed divides what is loaded."""
    if strategy is None or strategy.deepspeed is not None:
        return False
    return strategy.team is not None and strategy.team.divides == "tensors"


def loading_options(architecture: PreTrainedConfig, strategy: Strategy | None) -> dict[str, Any]:
    """For from_pretrained: none where every rank loads all of a tensor, or DeepSpeed a part of each."""
    if not divides_while_loading(strategy):
        return {}
    from transformers.distributed import DistributedConfig

    plan = _OWN_PLANS.get(architecture.model_type)
    if plan is not None:
        from study.workloads import conv1d_styles  # noqa: F401 - the styles are known by name from then on
    return {"distributed_config": DistributedConfig(tp_size=strategy.team_size, tp_plan=plan)}


def check_divisible(config: RunConfig, architecture: PreTrainedConfig, strategy: Strategy) -> None:
    """What no rank of the team would have a whole part of."""
    model, ranks = f"{strategy.name} cannot train {config.model_name_or_path}", strategy.team_size
    has_plan = getattr(architecture, "base_model_tp_plan", None) and model_class(config, architecture)._tp_plan
    if not (has_plan or architecture.model_type in _OWN_PLANS):
        raise UserError(
            f"{model}: for {architecture.model_type} models there is no plan of which tensors are divided",
            "use a gpt2, bert or llama model, or a strategy without teams",
        )
    heads = architecture.num_attention_heads
    shared = getattr(architecture, "num_key_value_heads", None) or heads
    if heads % ranks or shared % ranks:
        counted = f"{heads} heads" if shared == heads else f"{heads} heads over {shared} of keys and values"
        raise UserError(f"{model}: {counted} do not divide over {ranks} ranks", "set a --team_size that they divide by")


def keep_own_parts(model: torch.nn.Module) -> None:
    """Without a GPU a part is a view of the whole tensor that was read, which would stay in memory."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            own = parameter._local_tensor
            if own.untyped_storage().nbytes() > own.nbytes:
                parameter._local_tensor = own.contiguous().clone()


def divided_stand_in(cls: Any, architecture: PreTrainedConfig, strategy: Strategy) -> Any:
    """A virtual rank's parts alone, with nothing in them. Divided before there is memory, as when loaded."""
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
