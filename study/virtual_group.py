"""The process group of a virtual rank: everything is sent, and nothing arrives.

PyTorch's fake backend takes every collective and returns at once. A gather is filled with copies of this rank's own
part, all other buffers keep what they held. So what a rank allocates and sends is real, and what it computes on is not.
"""

from __future__ import annotations

import os
from typing import Any

from study.strategies import Launch


def join_virtual_group(launch: Launch) -> None:
    """Become rank R of N. Before the Accelerator: it takes the group that is there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Accelerate and DeepSpeed read these once more for themselves.
    here = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in here.items()})
    dist.init_process_group("fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size)
    if launch.strategy.deepspeed is not None and launch.rank:
        _take_own_word_for_rank_0s()


def let_ddp_go_on(model: Any) -> None:
    """DDP's reducer waits for the reduced bucket, and the fake backend's answer holds no tensor (comm.cpp asserts).

    Its own hook, but for where the answer is taken from: one all-reduce per bucket, divided as before.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def reduce_bucket(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer().div_(group.size())
        dist.all_reduce(gradients, group=group)
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(gradients)
        return answer

    if isinstance(model, DistributedDataParallel):
        # Without annotations: DDP compares them, and cannot read postponed ones.
        model.register_comm_hook(model.process_group, lambda group, bucket: reduce_bucket(group, bucket))


def _take_own_word_for_rank_0s() -> None:
    """DeepSpeed compares the order of layers with rank 0's, which comes by broadcast: here it never would.

    The same bytes are sent as before, and the comparison is this rank's with itself.
    """
    from deepspeed.runtime.zero import utils

    def broadcast(values: list[int]) -> list[int]:
        import torch

        device = utils.get_accelerator().device_name(os.environ["LOCAL_RANK"])
        utils.dist.broadcast(torch.tensor(values, dtype=torch.int64, device=device), src=0, async_op=False)
        return values

    def same_length(values: list[Any]) -> None:
        broadcast([len(values)])

    utils.get_lst_from_rank0 = broadcast
    utils.assert_lst_len_same_as_other_ranks = same_length
