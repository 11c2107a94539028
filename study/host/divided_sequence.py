"""Inputs of a causal model whose sequences are divided over ranks: DeepSpeed's Ulysses, torch's context parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

TOKENS = 1
_NOT_SCORED = -100


def with_shifted_labels(batch: Mapping[str, Tensor], ranks: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return whole inputs of a causal model, and the number by which each rank divides its sum of losses.

    Labels are shifted before samples are divided: the label of a part's last token is another rank's first token.
    Ranks score different numbers of tokens. With the mean number the mean of their losses is that of the samples.
    """
    import torch

    tokens = batch["input_ids"]
    following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=_NOT_SCORED)
    positions = torch.arange(tokens.shape[TOKENS], device=tokens.device).expand_as(tokens)
    inputs = {"input_ids": tokens, "position_ids": positions, "labels": following, "shift_labels": following}
    return inputs, (following != _NOT_SCORED).sum() / ranks


def ulysses_part(batch: Mapping[str, Tensor], ranks: int, place: int) -> dict[str, Tensor]:
    """Return the inputs of one rank of Ulysses: neighbouring tokens."""
    inputs, scored_by_a_rank = with_shifted_labels(batch, ranks)
    parts = {name: tensor.chunk(ranks, TOKENS)[place].contiguous() for name, tensor in inputs.items()}
    return parts | {"num_items_in_batch": scored_by_a_rank}


@contextlib.contextmanager
def context_parallel_part(
    batch: Mapping[str, Tensor], ranks: int, ring: Callable[..., contextlib.AbstractContextManager[Any]]
) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's inputs within torch's context parallelism, which `ring` enters."""
    inputs, scored_by_a_rank = with_shifted_labels(batch, ranks)
    # torch divides the tensors in place, and two of them are one.
    parts = {name: tensor.clone() for name, tensor in inputs.items()}
    tensors = list(parts.values())
    with ring(buffers=tensors, buffer_seq_dims=[TOKENS] * len(tensors), no_restore_buffers=set(tensors)):
        yield parts | {"num_items_in_batch": scored_by_a_rank}


def leave_out_masks(modules: Iterable[Module]) -> None:
    """Make attention modules causal without a mask, which transformers would make for the tokens of a rank."""
    for module in modules:
        module.register_forward_pre_hook(_leave_out_mask, with_kwargs=True)


def _leave_out_mask(_module: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, options | {"attention_mask": None, "is_causal": True}
