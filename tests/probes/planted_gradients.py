"""A fault of the backward pass and one of the reduction, for `plant_fault`: both end in wrong reduced gradients."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Fault:
    """How to put a fault into the imported engines."""

    plant: Callable[[], None]
    given: str = ""


def _double_a_gradient_on_rank_1() -> None:
    """Double the gradient of the position embedding in the backward pass of rank 1."""
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    forward = OPTLearnedPositionalEmbedding.forward

    def forward_with_hook(self, *arguments, **keywords):
        output = forward(self, *arguments, **keywords)
        if output.requires_grad and os.environ["RANK"] == "1":
            output.register_hook(lambda gradient: 2 * gradient)
        return output

    OPTLearnedPositionalEmbedding.forward = forward_with_hook


def _add_instead_of_averaging() -> None:
    """Let the ranks of DDP, FSDP2 and ZeRO-2 add their gradients instead of averaging them."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from torch.distributed import ReduceOp, all_reduce
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    from torch.nn.parallel import DistributedDataParallel

    def add(state, bucket):
        work = all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    initialize = DistributedDataParallel.__init__

    def initialize_with_sums(self, *arguments, **keywords) -> None:
        initialize(self, *arguments, **keywords)
        self.register_comm_hook(None, add)

    average = DeepSpeedZeroOptimizer.average_tensor

    def average_doubled(self, tensor, communication_data_type) -> None:
        average(self, tensor.mul_(torch.distributed.get_world_size()), communication_data_type)

    DistributedDataParallel.__init__ = initialize_with_sums  # type: ignore[method-assign]
    DeepSpeedZeroOptimizer.average_tensor = average_doubled
    _fsdp_collectives._get_gradient_divide_factors = lambda *arguments, **keywords: (
        None,
        None,
        ReduceOp.SUM,
        ReduceOp.SUM,
    )


FAULTS = {"backward": Fault(_double_a_gradient_on_rank_1), "reduction": Fault(_add_instead_of_averaging)}
