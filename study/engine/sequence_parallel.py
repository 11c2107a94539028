"""Sequence parallelism: the tokens of a sample divided over the ranks of a model-parallel group.

In Ulysses (DeepSpeed) each rank computes attention for some heads over whole sequences, and all other layers for its
part of each sequence. In context parallelism (torch) ranks pass keys and values around a ring, and FSDP2 shards the
state over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.host.cpu_ring import register_cpu_ring
from study.host.divided_sequence import context_parallel_part, leave_out_masks, ulysses_part
from study.workloads.architecture import check_heads, model_class, resolve_attention, uses_sliding_window

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

# Suffix of the attention modules that Accelerate hooks, and suffixes in other models.
_HOOKED, _ALSO = ".self_attn", (".attn", ".attention", ".self_attention")


def check_sequence(
    config: RunConfig, architecture: PreTrainedConfig, strategy: str, ranks: int, is_context: bool
) -> None:
    """Raise UserError if sequences do not divide over the ranks, or if attention would silently be wrong."""
    # Context parallelism gives each rank a part from the front and one from the back, which balances causal attention.
    parts, word = (2 * ranks, f"two parts for each of {ranks} ranks") if is_context else (ranks, f"{ranks} equal parts")
    if config.seq_length % parts:
        problem = f"--seq_length {config.seq_length} does not divide into {word}"
        raise UserError(problem, f"use a multiple of {parts}, such as {-(-config.seq_length // parts) * parts}")
    model = f"{strategy} cannot train {config.model_name_or_path}"
    implementation = resolve_attention(config, architecture)
    supported = ("sdpa",) if is_context else ("sdpa", "flash_attention_2")
    if implementation not in supported or not model_class(config, architecture)._supports_attention_backend:
        # Ranks exchange tokens only in transformers' table of attention functions.
        raise UserError(
            f"{model}: its attention is {'custom' if implementation == 'sdpa' else implementation}, and would cover"
            " only the tokens of one rank",
            "use --attn_implementation sdpa and a model that supports it, such as gpt2",
        )
    if is_context:
        if uses_sliding_window(architecture):
            problem = f"{model}: its attention has a window, and the mask would be ignored"
            raise UserError(problem, "use a model without a window")
        return
    check_heads(model, architecture, ranks, may_repeat=True)
    text = architecture.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True) and config.seq_length > window:
        problem = f"{model}: its attention has a window of {window} tokens, and Ulysses ignores that mask"
        raise UserError(problem, f"use --seq_length {window - window % ranks} or less")


def uses_ulysses(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed's Ulysses divides the sequence."""
    # Older releases of Accelerate have no such sizes.
    return getattr(getattr(accelerator, "parallelism_config", None), "sp_size", 1) > 1


def uses_context_parallelism(accelerator: Accelerator) -> bool:
    """Whether torch's context parallelism divides the sequence."""
    return getattr(getattr(accelerator, "parallelism_config", None), "cp_size", 1) > 1


@contextmanager
def shard_sequence(accelerator: Accelerator, micro_batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the model's inputs on its device, for one forward and one backward pass within the block.

    Under sequence parallelism they are this rank's part of every sample, else the whole micro-batch. The mean of the
    ranks' losses is the loss of the micro-batch.
    """
    from accelerate.utils import send_to_device

    inputs = send_to_device(micro_batch, accelerator.device, non_blocking=True)
    is_context = uses_context_parallelism(accelerator)
    if not (is_context or uses_ulysses(accelerator)):
        yield inputs
        return
    if is_context:
        ranks = accelerator.parallelism_config.cp_size
        with context_parallel_part(inputs, ranks, accelerator.maybe_context_parallel) as part:
            yield part
    else:
        from deepspeed.utils import groups

        ranks = groups._get_sequence_parallel_world_size()
        yield ulysses_part(inputs, ranks, groups._get_sequence_parallel_rank())


def prepare_ulysses(model: PreTrainedModel) -> None:
    """Add config entries that DeepSpeed reads and GPT-2 and Mixtral lack. Call it before Accelerate's `prepare`."""
    text = model.config.get_text_config()
    if getattr(text, "head_dim", 0) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    if not hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = text.num_attention_heads


def correct_ulysses(engine: Any) -> None:
    """Patch Ulysses to average gradients over all ranks and keep the head dimension. Call it after `prepare`.

    By default stages 0 to 2 average over groups and sum within a group (stage_1_and_2.py, allreduce_bucket), and stage
    3 averages over all ranks when it scatters (coalesced_collectives.py). With the loss that DeepSpeed and Accelerate
    publish, the gradients of stages 0 to 2 are too large by the number of ranks in a group.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for part in (engine, engine.optimizer):
        if hasattr(part, "sequence_parallel_size"):
            part.sequence_parallel_size = 1
    implementation = engine.module.config._attn_implementation
    ulysses = ALL_ATTENTION_FUNCTIONS[implementation]

    def head_by_head(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return attention with a head dimension, which GPT-2 needs and Ulysses removes."""
        groups = getattr(module, "num_key_value_groups", None)
        output, weights = ulysses(module, query, *args, **kwargs)
        if groups is not None:
            # Ulysses overwrites it if a group has more ranks than key heads, and the evaluation would fail.
            module.num_key_value_groups = groups
        return output if output.dim() == 4 else output.unflatten(-1, (-1, query.shape[-1])), weights

    ALL_ATTENTION_FUNCTIONS[implementation] = head_by_head


def prepare_context_parallelism(model: PreTrainedModel) -> None:
    """Make all attention causal, as Accelerate hooks only modules named self_attn. Call it before its `prepare`."""
    import torch

    leave_out_masks(
        module for name, module in model.named_modules() if name.endswith(_ALSO) and not name.endswith(_HOOKED)
    )
    if not torch.cuda.is_available():
        register_cpu_ring()
