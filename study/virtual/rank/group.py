"""The process group of a virtual rank: everything is sent, and nothing arrives.

PyTorch's fake backend takes every collective and returns at once. A gather is filled with copies of this rank's own
part, all other buffers keep what they held. So what a rank allocates and sends is real, and what it computes on is not.
Without a GPU real ranks talk over gloo, which allocates as well. Here the same memory is held for as long as gloo does.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from study.host.memory import LARGEST_KEPT_BYTES
from study.spec.launched import Launch


def join_virtual_group(launch: Launch) -> None:
    """Become rank R of N. Before the Accelerator: it takes the group that is there."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Accelerate and DeepSpeed read these again.
    here = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in here.items()})
    dist.init_process_group("fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size)
    if not torch.cuda.is_available():
        _hold_what_gloo_would()
    if launch.strategy.deepspeed is not None and launch.rank:
        _compare_layer_order_with_itself()


def let_ddp_go_on(model: Any) -> None:
    """DDP waits for a reduced bucket, and the fake backend answers with no tensor (an assert in DDP's comm.cpp fails).

    This hook does what DDP's own does, one all-reduce per bucket, and answers with the bucket that was sent.
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
        # A lambda has no annotations: DDP compares those with types, and here they are strings.
        model.register_comm_hook(model.process_group, lambda group, bucket: reduce_bucket(group, bucket))


@functools.cache
def _hold_what_gloo_would() -> Any:
    """Make the copies that gloo makes: of the whole result when it gathers, of the whole input when it scatters.

    ProcessGroupGloo.cpp: AsyncAllgatherWork::allgather (`flatOutputTensor`) and reduce_scatter_tensor_coalesced
    (`buffers`). NCCL and the fake backend have no such copies.
    """
    import torch

    overrides = torch.library.Library("c10d", "IMPL")

    def add_copy(operator: str, whole: int, copy: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        """`whole` is the place of the large tensor among the operator's arguments."""
        backends = torch.library.get_kernel(f"c10d::{operator}", "CPU")

        def with_copy(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
            group = torch.distributed.ProcessGroup.unbox(arguments[2]).group_name
            held = copy(arguments[whole], group) if _may_be_the_peak(arguments[whole].nbytes) else None
            result = backends.call_boxed(keys, *arguments)
            del held
            return result

        overrides.impl(operator, with_copy, "CPU", with_keyset=True, allow_override=True)

    with warnings.catch_warnings():
        # Torch warns of a replaced kernel, which is what is wanted here.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        add_copy(
            "_allgather_base_", 0, lambda whole, group: next(_threads_of(group)).submit(torch.ones_like, whole).result()
        )
        add_copy("_reduce_scatter_base_", 1, lambda whole, _: whole.clone())
    # Kernels stay replaced for as long as this object lives.
    return overrides


@functools.cache
def _threads_of(group: str) -> Iterator[ThreadPoolExecutor]:
    """The two threads of a gloo group, which take turns. Each keeps the memory that it freed in a heap of its own."""
    return itertools.cycle([ThreadPoolExecutor(1), ThreadPoolExecutor(1)])


def _may_be_the_peak(copied_bytes: int) -> bool:
    """A large copy takes time to make, and one that stays below the peak of its phase would not be seen."""
    status = Path("/proc/self/status")
    if copied_bytes < LARGEST_KEPT_BYTES or not status.exists():
        return True
    sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
    resident, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    # The tensor itself may not be in memory yet either.
    return resident + 2 * copied_bytes > peak


def _compare_layer_order_with_itself() -> None:
    """DeepSpeed compares its order of layers with that of rank 0, which a broadcast brings; here nothing would arrive.

    The same bytes are sent as before, and this rank's order is compared with itself.
    """
    from deepspeed.runtime.zero import utils

    def broadcast(values: list[int]) -> list[int]:
        import torch

        device = utils.get_accelerator().device_name(os.environ["LOCAL_RANK"])
        utils.dist.broadcast(torch.tensor(values, dtype=torch.int64, device=device), src=0, async_op=False)
        return values

    utils.get_lst_from_rank0 = broadcast
    utils.assert_lst_len_same_as_other_ranks = lambda values: broadcast([len(values)])
