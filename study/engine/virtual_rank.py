"""The process group of a virtual rank: everything is sent, and nothing arrives.

PyTorch's fake backend takes every collective and returns at once. A gather is filled with copies of this rank's own
part, all other buffers keep what they held. So what a rank allocates and sends is real, and what it computes on is not.
Without a GPU real ranks talk over gloo, which allocates as well. Here the same memory is held for as long as gloo does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from study.config.errors import CannotBeHeld
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.config.names import override
from study.config.strategies import Strategy
from study.host.memory import GIB, LARGEST_KEPT_BYTES, LIBRARIES_BYTES, host_memory, locked_bytes
from study.workloads.architecture import Shape, shape_of
from study.workloads.presets import LARGEST_LAYERS, find_preset

# Can this box hold one virtual rank? Estimated before anything is allocated, since a host that runs full kills others.
# Rough, and on the safe side. What a rank really takes is measured by running it.

# What is left to the rest of the box.
USABLE_SHARE = 0.85


def check_can_be_held(config: RunConfig, launch: Launch) -> None:
    """Refuse a model that this box's memory cannot hold, and say how many of its layers it can."""
    import torch

    on_gpu = torch.cuda.is_available()
    needed = needed_host_bytes(config, launch, shape_of(config), on_gpu)
    available = USABLE_SHARE * host_memory().available_bytes
    if needed <= available:
        return
    layers = layers_within(available, config, launch, on_gpu)
    raise CannotBeHeld(
        f"one rank of {launch.strategy.name} on {launch.world_size} takes about {needed / GIB:.1f} GiB of host memory"
        f" for {config.model_name_or_path}, and {available / GIB:.1f} GiB may be used here",
        "extrapolate over layers with `study virtual --layers-fit A,B,C` and depths that fit: "
        + (f"here up to {layers}" if layers else "here not even one layer does, so use a box with more memory"),
        layers,
    )


def layers_within(available: float, config: RunConfig, launch: Launch, on_gpu: bool) -> int:
    """How deep the model could be; 0 where no layer fits, or where it is no preset whose depth can be changed."""
    preset = find_preset(config.model_name_or_path)
    if preset is None:
        return 0
    names = [preset.with_layers(depth).name for depth in (1, 2)]
    shallow = [shape_of(dataclasses.replace(config, model_name_or_path=name)) for name in names]
    first, second = (needed_host_bytes(config, launch, shape, on_gpu) for shape in shallow)
    # Where every layer goes to the GPU, what the host needs is the same at any depth.
    return min(LARGEST_LAYERS, max(0, 1 + int((available - first) // (second - first)))) if second > first else 0


def needed_host_bytes(config: RunConfig, launch: Launch, shape: Shape, on_gpu: bool) -> float:
    strategy, model = launch.strategy, shape.architecture
    per_weight = 2 if config.precision.endswith("-engine") else 4
    # Outside ZeRO-3, and where its layers are to be divided, the whole model is made in fp32 on the host first.
    in_parts = strategy.zero_stage == 3 and _ranks_of_a_layer(strategy) == 1
    built = 3 * 4 * shape.largest_parameter if in_parts else 4 * shape.parameters
    always = LIBRARIES_BYTES + locked_bytes(strategy)
    if on_gpu:
        return always + built + _offloaded_bytes(config, launch, shape, per_weight)
    tokens = config.seq_length * config.batch_plan(launch.world_size, strategy.team_size).per_device_train_batch_size
    # Activations as counted for a transformer layer in "Reducing Activation Recomputation" (34 and 5 bytes), in fp32.
    per_layer = 2 * 34 * model.hidden_size + 2 * 5 * model.num_attention_heads * config.seq_length
    per_token = model.num_hidden_layers * per_layer + 3 * 4 * model.vocab_size
    return always + _state_and_working_bytes(config, launch, shape, per_weight, built) + tokens * per_token


def _offloaded_bytes(config: RunConfig, launch: Launch, shape: Shape, per_weight: int) -> float:
    """What of this rank's state is in host memory where there is a GPU for the rest."""
    strategy, elements = launch.strategy, shape.parameters / launch.world_size
    per_element = per_weight if strategy.offload_device("param") == "cpu" else 0
    optimizer = strategy.offload_device("optimizer") if _trains_all(config) else None
    if optimizer is not None:
        # Gradients as they come, and in fp32 for the step.
        per_element += per_weight + 4
    if optimizer == "cpu":
        per_element += 12
    size = per_element * elements
    if optimizer == "nvme":
        zero = _zero_settings(strategy, config)
        size += 4 * zero["offload_optimizer"]["buffer_count"] * min(elements, zero["sub_group_size"])
    return size


def _state_and_working_bytes(
    config: RunConfig, launch: Launch, shape: Shape, per_weight: int, built_bytes: float
) -> float:
    strategy = launch.strategy
    divided = _ranks_of_a_layer(strategy)
    elements, ranks = shape.parameters / divided, launch.world_size / divided
    if config.peft != "none" and strategy.zero_stage != 3:
        return built_bytes + per_weight * elements
    if divided > 1 and strategy.deepspeed is None:
        # Weights, gradients and two moments, and some copies of the largest, which is divided as well.
        return 16 * elements + 4 * 4 * shape.largest_parameter / divided
    if strategy.name == "ddp":
        # Weights, gradients, the reducer's copy of them, and two moments.
        return 20 * elements
    if strategy.deepspeed is None:
        shards = launch.ranks_of_a_copy(config) or ranks
        return built_bytes + 4 * elements + 20 * elements / shards + 4 * 4 * shape.largest_parameter
    zero = _zero_settings(strategy, config)
    # A gradient that is larger than the bucket is held beside it.
    bucket = 2 * per_weight * max(shape.largest_parameter, min(elements, zero["reduce_bucket_size"]))
    if strategy.zero_stage == 0:
        return bucket + (16 if per_weight == 4 else 20) * elements
    shard = (per_weight + _trains_all(config) * (per_weight + 16)) * elements / ranks
    shard += per_weight * elements / (launch.ranks_of_a_copy(config) or float("inf"))
    if strategy.zero_stage == 3:
        # Gloo scatters out of a copy, and group.py holds one as large.
        bucket *= 1.5
        live = min(elements, zero["stage3_max_live_parameters"] + 2 * shape.largest_parameter)
        return shard + max(built_bytes, bucket + per_weight * (live + 3 * shape.largest_parameter))
    return shard + max(built_bytes + per_weight * elements, 2 * per_weight * elements + bucket)


def _trains_all(config: RunConfig) -> bool:
    """Frozen weights have no gradients and no states, and adapters are small."""
    return config.peft == "none"


def _ranks_of_a_layer(strategy: Strategy) -> int:
    return strategy.team.ranks if strategy.team and strategy.team.divides == "tensors" else 1


def _zero_settings(strategy: Strategy, config: RunConfig) -> dict[str, Any]:
    assert strategy.deepspeed is not None
    settings: dict[str, Any] = override(strategy.deepspeed, config.engine_override)["zero_optimization"]
    return settings


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
