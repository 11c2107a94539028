"""A sample's tokens divided over the ranks of a team, and keys and values passed around: context parallelism of torch.

FSDP2 divides the state over all ranks meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError
from study.config.flags import BatchPlan, RunConfig
from study.config.strategies import Team
from study.engine.ulysses import NOT_SCORED, following_tokens
from study.workloads.architecture import attention_of, has_window, model_class

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, ParallelismConfig
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

# Where Accelerate looks for the attention of a layer, and where other models have it.
_HOOKED, _ALSO = ".self_attn", (".attn", ".attention", ".self_attention")


def check_divisible(config: RunConfig, architecture: PreTrainedConfig, strategy: str, ranks: int) -> None:
    """Refuse a model whose attention would be trained as another one without a word."""
    model = f"{strategy} cannot train {config.model_name_or_path}"
    computed_by = attention_of(config, architecture)
    if computed_by != "sdpa" or not model_class(config, architecture)._supports_attention_backend:
        # Torch passes keys and values around within this one function; any other sees a rank's own tokens alone.
        raise UserError(
            f"{model}: its attention is {'its own' if computed_by == 'sdpa' else computed_by},"
            " which would see the tokens of its own rank alone",
            "use --attn_implementation sdpa and a model that has it, such as gpt2",
        )
    if has_window(architecture):
        raise UserError(
            f"{model}: it has attention with a window, and its mask would be left out", "use a model without"
        )
    # Each rank takes a part from the front and one from the back, so that causal attention is as much work for all.
    if config.seq_length % (2 * ranks):
        fitting = -(-config.seq_length // (2 * ranks)) * 2 * ranks
        raise UserError(
            f"--seq_length {config.seq_length} does not divide into two parts for each of {ranks} ranks",
            f"use a multiple of {2 * ranks}, such as {fitting}",
        )


def parallelism(plan: BatchPlan, team: Team) -> ParallelismConfig:
    from accelerate import ParallelismConfig

    return ParallelismConfig(dp_shard_size=plan.teams, cp_size=team.ranks)


def divides(accelerator: Accelerator) -> bool:
    return getattr(getattr(accelerator, "parallelism_config", None), "cp_size", 1) > 1


@contextmanager
def own_tokens(accelerator: Accelerator, micro_batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """This rank's part of every sample. The mean of the ranks' losses is the loss of the micro-batch."""
    import torch

    tokens = micro_batch["input_ids"].clone()
    following = following_tokens(micro_batch["labels"])
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    # Ranks score unequally many tokens, so each divides by what is scored by a rank in the mean.
    scored = (following != NOT_SCORED).sum() / accelerator.parallelism_config.cp_size
    parts = {"input_ids": tokens, "position_ids": positions, "labels": following.clone(), "shift_labels": following}
    buffers = list(parts.values())
    # Torch cuts them in place.
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        yield parts | {"num_items_in_batch": scored}


def make_ready(model: PreTrainedModel) -> None:
    """Before Accelerate's `prepare`, which tells no attention to be causal but modules called self_attn."""
    import torch

    def leave_out_mask(_module: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, options | {"attention_mask": None, "is_causal": True}

    for name, module in model.named_modules():
        if name.endswith(_ALSO) and not name.endswith(_HOOKED):
            module.register_forward_pre_hook(leave_out_mask, with_kwargs=True)
    if not torch.cuda.is_available():
        _pass_around_on_processors()


def live_team(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Any]:
    """From the mesh whose ranks pass keys and values around, and from those over which a parameter is divided."""
    from torch.distributed.tensor import DTensor

    over = {one.device_mesh.size() for one in model.parameters() if isinstance(one, DTensor)}
    return {
        "divides": "context",
        "ranks": accelerator._cp_context.keywords["mesh"].size(),
        "state_over": over.pop() if len(over) == 1 else sorted(over),
    }


@functools.cache
def _pass_around_on_processors() -> None:
    """Torch has its ring for the kernels of GPUs; this is the same one around the kernel of processors."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tokens = 2

    def divided(parts: Any, mesh: Any) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(part, mesh, [Shard(tokens)], run_check=False) for part in parts)

    def forward(_operator: Any, args: Any, options: dict[str, Any]) -> Any:
        query, key, value, dropout, is_causal = (*args, 0.0, False)[:5] if len(args) < 5 else args[:5]
        mesh = query.device_mesh
        answer = ring._templated_ring_attention(
            mesh.get_group(), tokens, kernel, query.to_local(), key.to_local(), value.to_local(),
            is_causal=options.get("is_causal", is_causal), dropout_p=options.get("dropout_p", dropout),
            scale=options.get("scale"),
        )  # fmt: skip
        return divided(answer, mesh)

    def backward(_operator: Any, args: Any, options: dict[str, Any]) -> Any:
        *divided_args, dropout, is_causal = args
        gradient, query, key, value, answer, logsumexp = (one.to_local() for one in divided_args)
        mesh = args[1].device_mesh
        gradients = ring._templated_ring_attention_backward(
            mesh.get_group(), tokens, kernel_backward.default, grad_out=gradient, grad_out_name="grad_out",
            query=query, key=key, value=value, out=answer, logsumexp=logsumexp, is_causal=is_causal,
            dropout_p=dropout, scale=options.get("scale"),
        )  # fmt: skip
        return divided(gradients, mesh)

    operators: dict[Any, Any] = {kernel.default: forward, kernel_backward.default: backward}
    ring.custom_ops.update(operators)
