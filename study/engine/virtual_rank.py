"""The process group of a virtual rank, which has no peers, and a check that its model fits this machine's memory.

PyTorch's fake backend returns from every collective at once. It fills a gather with copies of this rank's part and
leaves other buffers unchanged. So memory and traffic of a rank are real, and the data that it computes on is not.
Without a GPU real ranks use gloo, which allocates copies. A virtual rank allocates the same copies for as long as gloo.
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

from study.config.errors import ModelTooLarge
from study.config.flags import RunConfig
from study.config.launch_context import Launch
from study.config.strategies import Strategy
from study.host.memory import (
    GIB,
    MALLOC_MMAP_THRESHOLD_MAX_BYTES,
    host_memory,
    libraries_bytes,
    required_pinned_bytes,
)
from study.workloads.architecture import ModelSize, model_size
from study.workloads.presets import MAX_LAYERS, find_preset

# The rest is for other processes of the machine.
USABLE_HOST_FRACTION = 0.85
# Interpreter, torch, DeepSpeed and their libraries without a GPU, with a reserve: they need 0.4 GiB.
LIBRARIES_WITHOUT_GPU_BYTES = 1.2 * GIB


def check_host_memory(config: RunConfig, launch: Launch, strategy: Strategy) -> None:
    """Raise ModelTooLarge, with the largest depth that fits, if the model does not fit this machine's host memory."""
    import torch

    on_gpu = torch.cuda.is_available()
    needed = needed_host_bytes(config, launch, strategy, model_size(config), on_gpu)
    available = USABLE_HOST_FRACTION * host_memory().available_gib * GIB
    if needed <= available:
        return
    layers = max_layers_that_fit(available, config, launch, strategy, on_gpu)
    raise ModelTooLarge(
        f"one rank of {launch.strategy.name} on {launch.world_size} needs about {needed / GIB:.1f} GiB of host memory"
        f" for {config.model_name_or_path}, and {available / GIB:.1f} GiB are usable on this machine",
        "extrapolate over layers with `study virtual --layers_fit A,B,C` and depths that fit: "
        + (f"here up to {layers}" if layers else "here not even one layer fits, so use a machine with more memory"),
        layers,
    )


def max_layers_that_fit(available: float, config: RunConfig, launch: Launch, strategy: Strategy, on_gpu: bool) -> int:
    """Return the largest depth that fits; 0 if no layer fits or the model is not a preset."""
    preset = find_preset(config.model_name_or_path)
    if preset is None:
        return 0
    names = [preset.with_layers(depth).name for depth in (1, 2)]
    shallow = [model_size(dataclasses.replace(config, model_name_or_path=name)) for name in names]
    first, second = (needed_host_bytes(config, launch, strategy, shape, on_gpu) for shape in shallow)
    # If all layers are on the GPU, host memory does not depend on the depth.
    return min(MAX_LAYERS, max(0, 1 + int((available - first) // (second - first)))) if second > first else 0


def needed_host_bytes(config: RunConfig, launch: Launch, strategy: Strategy, shape: ModelSize, on_gpu: bool) -> float:
    """Estimate the host memory of one rank, in bytes, before it allocates: a full host kills other processes.

    The estimate is rough and conservative. Running the rank measures its memory.
    """
    launched, model = launch.strategy, shape.architecture
    per_weight = 2 if config.precision.endswith("-engine") else 4
    # Except under ZeRO-3 without tensor parallelism, the whole model is first built in fp32 on the host.
    by_layer = launched.zero_stage == 3 and _ranks_of_a_layer(launched) == 1
    built = 3 * 4 * shape.largest_parameter if by_layer else 4 * shape.parameters
    libraries = libraries_bytes(launched.deepspeed is not None) if on_gpu else LIBRARIES_WITHOUT_GPU_BYTES
    fixed = libraries + required_pinned_bytes(launched)
    if on_gpu:
        elements = shape.parameters / launch.world_size
        # Frozen weights have no gradients and no optimizer states, and adapters are small.
        optimizer = strategy.offload_device("optimizer") if config.peft == "none" else None
        per_element = per_weight if strategy.offload_device("param") == "cpu" else 0
        if optimizer is not None:
            # Gradients in the engine's dtype, and in fp32 for the step; master weights and moments in fp32.
            per_element += per_weight + 4 + (12 if optimizer == "cpu" else 0)
        buffers = 0.0
        if optimizer == "nvme":
            assert strategy.deepspeed is not None
            zero = strategy.deepspeed["zero_optimization"]
            buffers = 4 * zero["offload_optimizer"]["buffer_count"] * min(elements, zero["sub_group_size"])
        return fixed + built + per_element * elements + buffers
    tokens = config.seq_length * config.batch_plan(launch.world_size, launched.group_size).per_device_train_batch_size
    # Activations of a transformer layer in fp32, from "Reducing Activation Recomputation" (34 and 5 bytes).
    per_layer = 2 * 34 * model.hidden_size + 2 * 5 * model.num_attention_heads * config.seq_length
    per_token = model.num_hidden_layers * per_layer + 3 * 4 * model.vocab_size
    return fixed + _state_and_working_bytes(config, launch, strategy, shape, per_weight, built) + tokens * per_token


def _state_and_working_bytes(
    config: RunConfig, launch: Launch, strategy: Strategy, shape: ModelSize, per_weight: int, built_bytes: float
) -> float:
    trains_all = config.peft == "none"
    divided = _ranks_of_a_layer(strategy)
    elements, ranks = shape.parameters / divided, launch.world_size / divided
    per_replica = launch.ranks_per_replica(strategy)
    if not trains_all and strategy.zero_stage != 3:
        return built_bytes + per_weight * elements
    if divided > 1 and strategy.deepspeed is None:
        # Weights, gradients, two moments, and some copies of the largest tensor, which is divided as well.
        return 16 * elements + 4 * 4 * shape.largest_parameter / divided
    if strategy.name == "ddp":
        # Weights, gradients, the reducer's copy of the gradients, and two moments.
        return 20 * elements
    if strategy.deepspeed is None:
        return built_bytes + 4 * elements + 20 * elements / (per_replica or ranks) + 4 * 4 * shape.largest_parameter
    zero = strategy.deepspeed["zero_optimization"]
    # A gradient that is larger than the bucket has a separate buffer.
    bucket = 2 * per_weight * max(shape.largest_parameter, min(elements, zero["reduce_bucket_size"]))
    if strategy.zero_stage == 0:
        return bucket + (16 if per_weight == 4 else 20) * elements
    shard = (per_weight + trains_all * (per_weight + 16)) * elements / ranks
    shard += per_weight * elements / (per_replica or float("inf"))
    if strategy.zero_stage == 3:
        # gloo scatters from a copy; this module's kernels allocate one of the same size.
        bucket *= 1.5
        live = min(elements, zero["stage3_max_live_parameters"] + 2 * shape.largest_parameter)
        return shard + max(built_bytes, bucket + per_weight * (live + 3 * shape.largest_parameter))
    return shard + max(built_bytes + per_weight * elements, 2 * per_weight * elements + bucket)


def _ranks_of_a_layer(strategy: Strategy) -> int:
    return strategy.group.ranks if strategy.group and strategy.group.divides == "tensors" else 1


def join_virtual_group(launch: Launch) -> None:
    """Join the fake process group as rank R of N. Call it before the Accelerator is created, which uses the group."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Accelerate and DeepSpeed read these variables.
    variables = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in variables.items()})
    dist.init_process_group("fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size)
    if not torch.cuda.is_available():
        _copy_as_gloo_does()
    if launch.strategy.deepspeed is not None and launch.rank:
        _patch_layer_order_check()


def answer_ddp(model: Any) -> None:
    """Register a hook with which DDP runs on the fake backend, which returns no tensor for a reduced bucket.

    Without it an assert in DDP's comm.cpp fails. Like DDP's default hook it makes one all-reduce per bucket; it returns
    the bucket that was sent.
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
        # A lambda has no annotations: DDP compares annotations with types, and in this module they are strings.
        model.register_comm_hook(model.process_group, lambda group, bucket: reduce_bucket(group, bucket))


@functools.cache
def _copy_as_gloo_does() -> Any:
    """Allocate the copies that gloo makes: of the whole result of a gather, of the whole input of a scatter.

    ProcessGroupGloo.cpp: AsyncAllgatherWork::allgather (`flatOutputTensor`) and reduce_scatter_tensor_coalesced
    (`buffers`). NCCL and the fake backend have no such copies.
    """
    import torch

    overrides = torch.library.Library("c10d", "IMPL")

    def add_copy(operator: str, place: int, copy: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        """Wrap an operator whose argument at this place is its large tensor."""
        backends = torch.library.get_kernel(f"c10d::{operator}", "CPU")

        def with_copy(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
            large, group = arguments[place], torch.distributed.ProcessGroup.unbox(arguments[2]).group_name
            copied = copy(large, group) if _may_be_the_peak(large.nbytes) else None
            result = backends.call_boxed(keys, *arguments)
            del copied
            return result

        overrides.impl(operator, with_copy, "CPU", with_keyset=True, allow_override=True)

    with warnings.catch_warnings():
        # Torch warns of a replaced kernel, which is intended here.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        add_copy("_allgather_base_", 0, lambda all_, name: next(_threads(name)).submit(torch.ones_like, all_).result())
        add_copy("_reduce_scatter_base_", 1, lambda all_, _: all_.clone())
    # Kernels stay replaced as long as this object exists.
    return overrides


@functools.cache
def _threads(group: str) -> Iterator[ThreadPoolExecutor]:
    """Return an endless iterator over a gloo group's two threads. Each has a heap, and keeps freed memory in it."""
    return itertools.cycle([ThreadPoolExecutor(1), ThreadPoolExecutor(1)])


def _may_be_the_peak(copied_bytes: int) -> bool:
    """Whether a copy could set a new memory peak; other copies are skipped, as large ones are slow."""
    status = Path("/proc/self/status")
    if copied_bytes < MALLOC_MMAP_THRESHOLD_MAX_BYTES or not status.exists():
        return True
    sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
    resident, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    # The tensor itself may not be resident yet either.
    return resident + 2 * copied_bytes > peak


def _patch_layer_order_check() -> None:
    """Make DeepSpeed compare its layer order with this rank's, as no broadcast from rank 0 would arrive."""
    from deepspeed.runtime.zero import utils

    def broadcast(values: list[int]) -> list[int]:
        import torch

        device = utils.get_accelerator().device_name(os.environ["LOCAL_RANK"])
        utils.dist.broadcast(torch.tensor(values, dtype=torch.int64, device=device), src=0, async_op=False)
        return values

    utils.get_lst_from_rank0 = broadcast
    utils.assert_lst_len_same_as_other_ranks = lambda values: broadcast([len(values)])
