"""Bytes that torch counts as allocated on a GPU beyond those of the model's tensors."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from study.predictor.hardware import Device
from study.predictor.request import Request, cache_by_request

MIB = 2**20
# parseChosenWorkspaceSize (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CublasHandlePool.cpp):
# ":4096:2:16:8 default, 32MiB for Hopper and Blackwell", in releases before that for Hopper alone; 64 MiB were measured
# on an H200 with torch 2.11. Each thread that multiplies matrices has a handle, and each handle and stream a workspace,
# which stays until the process ends: one of the forward pass, and one of autograd's thread.
WORKSPACE_BYTES, LARGE_WORKSPACE_BYTES, LARGE_WORKSPACE_CAPABILITY = 8 * MIB + 128 * 2**10, 32 * MIB, 9.0
MULTIPLYING_THREADS = 2
# kMinBlockSize, kSmallSize, kMinLargeAlloc, kLargeBuffer and kRoundLarge in c10/cuda/CUDACachingAllocator.h and .cpp
# (https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp).
_ROUNDED_TO, _SMALL, _OWN_SEGMENT, _SHARED_SEGMENT, _SEGMENT_ROUNDED_TO = 512, MIB, 10 * MIB, 20 * MIB, 2 * MIB
# Tensors of moments per trained tensor. Those of other optimizers are smaller.
_MOMENTS = {"adamw": 2, "lion": 1}


def cublas_workspace_bytes(device: Device) -> float:
    """Return the bytes of cuBLAS' workspaces on a device; 0 if it is not known to have CUDA."""
    if device.compute_capability is None:
        return 0.0
    is_large = device.compute_capability >= LARGE_WORKSPACE_CAPABILITY
    return float(MULTIPLYING_THREADS * (LARGE_WORKSPACE_BYTES if is_large else WORKSPACE_BYTES))


def blocks_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of the blocks that torch's caching allocator gives to tensors, allocated in this order.

    A tensor of more than 1 MiB has the smallest free block that is large enough, or a new segment's. What remains of
    the block is split off only if it exceeds 1 MiB, else it counts as allocated (should_split).
    """
    free, total = list[int](), 0
    for size in sizes:
        rounded = -(-size // _ROUNDED_TO) * _ROUNDED_TO
        if rounded <= _SMALL:
            total += rounded
            continue
        place = bisect.bisect_left(free, rounded)
        if place < len(free):
            block = free.pop(place)
        elif rounded < _OWN_SEGMENT:
            block = _SHARED_SEGMENT
        else:
            block = -(-rounded // _SEGMENT_ROUNDED_TO) * _SEGMENT_ROUNDED_TO
        if block - rounded > _SMALL:
            bisect.insort(free, block - rounded)
            block = rounded
        total += block
    return total


class Unsplit(NamedTuple):
    """Bytes that the blocks of model state have beyond its tensors."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0


@cache_by_request
def unsplit_bytes(request: Request) -> Unsplit:
    """Return the bytes of remainders that are not split off, if the state is one tensor per parameter: without an
    engine and under DDP. Expandable segments split off all remainders."""
    if request.box.is_cpu_only or request.expandable_segments or request.strategy.name not in ("single", "ddp"):
        return Unsplit()
    trained, count = request.stored.trained_params, _MOMENTS.get(request.optimizer, 0)
    parameters = [param.elements * request.bytes_per_weight(param) for param in request.stored.params]
    gradients = [param.elements * request.bytes_per_weight(param) for param in reversed(trained)]
    moments = [int(param.elements * request.moments_bytes) // count for param in trained for _ in range(count)]
    return Unsplit(*(float(blocks_bytes(sizes) - sum(sizes)) for sizes in (parameters, gradients, moments)))
