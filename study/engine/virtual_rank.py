"""The process group of a virtual rank, which has no peers, and a check that its model fits this machine's memory.

PyTorch's fake backend returns from every collective at once. It fills a gather with copies of this rank's part and
leaves other buffers unchanged. So memory and traffic of a rank are real, and the data that it computes on is not.
Without a GPU real ranks use gloo, which allocates copies. A virtual rank allocates the same copies for as long as gloo.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from study.config.errors import ModelTooLarge, UserError
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
from study.predictor.families import FAMILIES
from study.predictor.hardware import ANY_DEVICE, CPU_CORE, Hardware
from study.predictor.memory import CPU_LIBRARIES_BYTES, predict_host_memory, predict_memory
from study.predictor.models import model_shape, shape_of_document
from study.predictor.request import FP32_BYTES, Request, request_of_flags
from study.predictor.shape import ModelShape, in_tensor_parts, with_adapters
from study.predictor.state import bytes_per_parameter
from study.workloads.architecture import model_config, model_size
from study.workloads.presets import MAX_LAYERS, find_preset

# The rest is for other processes of the machine.
USABLE_HOST_FRACTION = 0.85
# Predictions of recorded virtual ranks over 4 GiB are at most 5 % low (tests/unit/test_virtual_memory.py).
RESERVE = 1.1


def check_host_memory(config: RunConfig, launch: Launch, strategy: Strategy) -> None:
    """Raise ModelTooLarge, with the largest depth that fits, if the model does not fit this machine's host memory."""
    import torch

    on_gpu = torch.cuda.is_available()
    needed = predict_host_bytes(config, launch, strategy, on_gpu)
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
    """Return the largest depth that fits; 0 if no layer fits, if all do, or if the model is not a preset."""
    preset = find_preset(config.model_name_or_path)
    if preset is None:
        return 0

    def exceeds(depth: int) -> bool:
        shallow = dataclasses.replace(config, model_name_or_path=preset.with_layers(depth).name)
        return predict_host_bytes(shallow, launch, strategy, on_gpu) > available

    depths = range(1, MAX_LAYERS + 1)
    # If all layers are on the GPU, host memory does not depend on the depth.
    return bisect.bisect_left(depths, True, key=exceeds) if exceeds(MAX_LAYERS) else 0


def predict_host_bytes(config: RunConfig, launch: Launch, strategy: Strategy, on_gpu: bool) -> float:
    """Return the predicted peak of a rank's host memory with a reserve, in bytes: a full host kills other processes."""
    try:
        shape = _model_shape(config)
    except UserError:
        return RESERVE * _state_bytes(config, launch, strategy, on_gpu)
    divided = _ranks_of_a_layer(strategy)
    plan = config.batch_plan(launch.world_size, launch.strategy.group_size)
    # One process, alone on its machine.
    box = Hardware("virtual", ANY_DEVICE if on_gpu else CPU_CORE, 1, gloo_copies_gathers=not on_gpu)

    def request(tensors: ModelShape, ranks: int) -> Request:
        return request_of_flags(
            config,
            tensors,
            strategy,
            dataclasses.replace(box, nodes=ranks),
            plan.per_device_train_batch_size,
            plan.gradient_accumulation_steps,
        )

    # Before an engine divides its tensors, a rank has all of them.
    loading = predict_host_memory(request(shape, launch.world_size)).load
    parts = in_tensor_parts(shape, divided, only_layers=strategy.deepspeed is not None) if divided > 1 else shape
    training = request(parts, launch.world_size // divided)
    memory = predict_memory(training)
    if memory.process_peak is None:
        return RESERVE * max(loading, memory.host_parts["train"])
    return RESERVE * max(loading, memory.process_peak.value + _fp32_bucket_bytes(training))


def _model_shape(config: RunConfig) -> ModelShape:
    """Return the shape of a run's model with its adapters; UserError for an architecture without a table.

    That would be traced with transformers, which adds to the memory of this process, and that is measured.
    """
    if find_preset(config.model_name_or_path) is not None:
        shape = model_shape(config.model_name_or_path)
    else:
        document = model_config(config).to_dict()
        if document["model_type"] not in FAMILIES:
            raise UserError(f"no table has {document['model_type']}", "trace it: study predict --traced")
        shape = shape_of_document(document, config.model_name_or_path)
    return shape if config.peft == "none" else with_adapters(shape, config.lora_rank)


def _fp32_bucket_bytes(request: Request) -> float:
    """Return the bytes that Ulysses adds to 16-bit gradients, which it reduces in fp32.

    seq_parallel_communication_data_type is fp32 by default (_configure_distributed_model in DeepSpeed's engine.py). A
    bucket has a copy in fp32, and the copy from which gloo scatters under stage 3 is in fp32, too.
    """
    strategy = request.strategy
    if strategy.deepspeed is None or strategy.group is None or strategy.group.divides != "sequence":
        return 0.0
    if request.weight_bytes == FP32_BYTES:
        return 0.0
    bucket = max(request.shape.largest, min(request.shape.parameters, request.settings.reduce_bucket_size))
    fp32_copy = float(FP32_BYTES * bucket)
    wider_copy = float((FP32_BYTES - request.weight_bytes) * bucket)
    return fp32_copy + (wider_copy if strategy.zero_stage == 3 else 0.0)


def _state_bytes(config: RunConfig, launch: Launch, strategy: Strategy, on_gpu: bool) -> float:
    """Return a rank's host memory of an architecture without a table: without activations."""
    parameters = model_size(config).parameters
    state = bytes_per_parameter(strategy, config.precision, launch.world_size, trained=config.peft == "none")
    libraries = libraries_bytes(launch.strategy.deepspeed is not None) if on_gpu else CPU_LIBRARIES_BYTES
    in_steps = parameters * (state.host if on_gpu else state.host + state.device)
    # Outside stage 3 each process first creates the model in fp32.
    created = 0.0 if launch.strategy.zero_stage == 3 else 4.0 * parameters
    return libraries + required_pinned_bytes(launch.strategy) + max(created, in_steps)


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
