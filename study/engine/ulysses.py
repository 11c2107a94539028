"""A sample's tokens divided over the ranks of a team: what DeepSpeed's Ulysses needs of loss, model and engine.

Attention sees whole sequences and a part of the heads, all else a part of the sequence and all heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import BatchPlan, RunConfig
from study.config.strategies import Team
from study.workloads.architecture import attention_of, model_class

if TYPE_CHECKING:
    from accelerate import Accelerator, ParallelismConfig
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

NOT_SCORED = -100


def check_divisible(config: RunConfig, architecture: PreTrainedConfig, strategy: str, ranks: int) -> None:
    """Refuse a model whose attention Ulysses cannot divide, or would train as another one without a word."""
    if config.seq_length % ranks:
        fitting = -(-config.seq_length // ranks) * ranks
        raise UserError(
            f"--seq_length {config.seq_length} does not divide over the {ranks} ranks of a team",
            f"use a multiple of {ranks}, such as {fitting}",
        )
    model, kind = f"{strategy} cannot train {config.model_name_or_path}", model_class(config, architecture)
    computed_by = attention_of(config, architecture)
    if computed_by not in ("sdpa", "flash_attention_2") or not kind._supports_attention_backend:
        # What goes around transformers' table of attentions would see its own rank's tokens, and nobody would know.
        raise UserError(
            f"{model}: its attention is {'its own' if computed_by == 'sdpa' else computed_by}, which is not divided",
            "use --attn_implementation sdpa and a model that has it, such as gpt2, or a strategy without ulysses",
        )
    text = architecture.get_text_config()
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks or (shared % ranks and ranks % shared):
        counted = f"{heads} heads" if shared == heads else f"{heads} heads over {shared} of keys and values"
        raise UserError(f"{model}: {counted} do not divide over {ranks} ranks", "set a --team_size that they divide by")
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True) and config.seq_length > window:
        raise UserError(
            f"{model}: it looks back {window} tokens at most, and Ulysses leaves that mask out",
            f"use --seq_length {window - window % ranks} or less",
        )


def parallelism(plan: BatchPlan, team: Team, config: RunConfig) -> ParallelismConfig:
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=config.attn_implementation
    )
    return ParallelismConfig(dp_shard_size=plan.teams, sp_size=team.ranks, sp_handler=handler)


def divides(accelerator: Accelerator) -> bool:
    # Earlier releases of Accelerate have no such sizes.
    return getattr(getattr(accelerator, "parallelism_config", None), "sp_size", 1) > 1


def following_tokens(labels: Tensor) -> Tensor:
    """Shifted before samples are cut: the last token of a part is followed by the first of another rank's."""
    import torch

    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=NOT_SCORED)


def own_tokens(micro_batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of every sample. The mean of the ranks' losses is the loss of the micro-batch."""
    import torch
    from deepspeed.utils import groups

    ranks, rank = groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()
    tokens = micro_batch["input_ids"]
    following = following_tokens(micro_batch["labels"])
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    own, own_positions, own_following = (
        whole.chunk(ranks, dim=1)[rank].contiguous() for whole in (tokens, positions, following)
    )
    return {
        "input_ids": own,
        "position_ids": own_positions,
        "labels": own_following,
        "shift_labels": own_following,
        # Ranks score unequally many tokens, so each divides by what is scored by a rank in the mean.
        "num_items_in_batch": (following != NOT_SCORED).sum() / ranks,
    }


def make_ready(model: PreTrainedModel) -> None:
    """Before Accelerate's `prepare`: DeepSpeed asks the config for numbers that GPT-2's and Mixtral's do not have."""
    text = model.config.get_text_config()
    if getattr(text, "head_dim", 0) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    if not hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = text.num_attention_heads


def put_right(engine: Any) -> None:
    """After `prepare`: gradients are averaged over all ranks at every stage, and attention answers head by head.

    Left alone, stages 0 to 2 average over teams and add up within one (stage_1_and_2.py, allreduce_bucket), and stage 3
    averages over all ranks where it scatters, as it does by default (coalesced_collectives.py). With the loss that
    DeepSpeed and Accelerate publish, the gradients of stages 0 to 2 are as many times too large as a team has ranks.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for holder in (engine, engine.optimizer):
        if hasattr(holder, "sequence_parallel_size"):
            holder.sequence_parallel_size = 1
    implementation = engine.module.config._attn_implementation
    ulysses = ALL_ATTENTION_FUNCTIONS[implementation]

    def head_by_head(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own do, and as GPT-2 needs it: Ulysses puts the heads side by side."""
        groups = getattr(module, "num_key_value_groups", None)
        answer, weights = ulysses(module, query, *args, **kwargs)
        if groups is not None:
            # A team with more ranks than there are heads of keys changes it for good, and the evaluation fails.
            module.num_key_value_groups = groups
        return answer if answer.dim() == 4 else answer.unflatten(-1, (-1, query.shape[-1])), weights

    ALL_ATTENTION_FUNCTIONS[implementation] = head_by_head


def live_team(_engine: Any) -> tuple[str, int]:
    """From the groups that exchange tokens."""
    from deepspeed.utils import groups

    return "sequence", groups._get_sequence_parallel_world_size()
