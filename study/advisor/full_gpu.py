"""Figures of torch's message for a GPU that is out of memory, and the remedies that follow."""

from __future__ import annotations

import dataclasses
import re

from study.config.text import rounded
from study.host.memory import GIB
from study.predictor.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
# Each as torch 2.1 and later have it (2.1 with "capacty"), and as earlier ones do.
_TRIED = rf"Tried to allocate {_SIZE}"
_CAPACITY = rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity"
_FREE = rf"of which {_SIZE} is free|{_SIZE} free"
_ALLOCATED = rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated"
_PRIVATE = rf"{_SIZE} allocated in private pools"
# Before 1.4 the word is "cached".
_UNUSED = rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached"
_RESERVED = rf"{_SIZE} reserved in total by PyTorch"
_NAMED_PROCESS = r"Process \d+ has"
_THIS_PROCESS = "this process has"
# The next message of a log is another rank's.
_NEXT = "Tried to allocate"
_MAX_LETTERS = 4000
# CUDA's context and NCCL's buffers vary by release and card; more than twice the prediction is another program.
_OWN_OUTSIDE_BYTES = 2 * (CONTEXT_BYTES + COMMUNICATOR_BYTES)


@dataclasses.dataclass(frozen=True)
class FullGpu:
    """Bytes of a GPU when an allocation failed."""

    tried: int
    capacity: int
    free: int
    # Of torch's pool: with a tensor in it, and without.
    allocated: int
    unused: int
    # How many processes besides this one are named.
    other_processes: int

    @property
    def outside(self) -> int:
        """Bytes outside of this process's pool: CUDA's context, NCCL, other processes."""
        return max(0, self.capacity - self.free - self.allocated - self.unused)

    @property
    def is_fragmented(self) -> bool:
        """Whether free and unused bytes together are enough."""
        return self.free + self.unused >= self.tried

    def parts(self) -> str:
        """Return the bytes of each part, in GiB."""
        return (
            f"{_gib(self.tried)} GiB asked for. Of {_gib(self.capacity)} GiB: {_gib(self.allocated)} in tensors, "
            f"{_gib(self.unused)} in torch's pool without a tensor, {_gib(self.outside)} outside of that pool, "
            f"{_gib(self.free)} free"
        )

    def remedies(self) -> list[str]:
        """Return the remedies that follow from these bytes, the surest first."""
        if self.tried > self.capacity:
            return ["one tensor larger than the GPU: fewer tokens in a micro-batch, or a loss in chunks"]
        remedies = []
        if self.is_fragmented:
            remedies.append(
                "free and unused memory is enough, but fragmented: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (before torch 2.1 max_split_size_mb:128)"
            )
        if self.outside > _OWN_OUTSIDE_BYTES:
            text = (
                f"{_gib(self.outside)} GiB are not of this process's pool: nvidia-smi shows the processes of this GPU. "
                "Ranks that share one lack torch.cuda.set_device(local_rank)"
            )
            # The larger part is the cause.
            remedies.insert(0 if self.outside > self.unused else len(remedies), text)
        elif self.other_processes:
            remedies.append(
                f"other processes are on this GPU ({self.other_processes}): if they are ranks, each lacks "
                "torch.cuda.set_device(local_rank)"
            )
        if not remedies:
            missing = self.tried - self.free - self.unused
            remedies.append(f"tensors fill the GPU, at least {_gib(missing)} GiB are missing: see study advise")
        return remedies


def read_full_gpu(text: str) -> FullGpu | None:
    """Return the figures of the first such message of a text; None if it has not all of them."""
    start = text.find(_NEXT)
    if start < 0:
        return None
    end = text.find(_NEXT, start + len(_NEXT))
    message = text[start : end if end > 0 else None][:_MAX_LETTERS]
    tried, capacity, free = _bytes(_TRIED, message), _bytes(_CAPACITY, message), _bytes(_FREE, message)
    allocated = _bytes(_ALLOCATED, message)
    unused = _bytes(_UNUSED, message)
    reserved = _bytes(_RESERVED, message)
    if tried is None or capacity is None or free is None or allocated is None:
        return None
    if unused is None:
        if reserved is None:
            return None
        unused = max(0, reserved - allocated)
    allocated += _bytes(_PRIVATE, message) or 0
    processes = len(re.findall(_NAMED_PROCESS, message))
    # In a container this process has another number, and is one of them.
    other_processes = processes if _THIS_PROCESS in message else max(0, processes - 1)
    return FullGpu(tried, capacity, free, allocated, unused, other_processes)


def _bytes(pattern: str, text: str) -> int | None:
    """Return the first size that a pattern finds."""
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return round(float(number) * _UNITS[unit])


def _gib(size: int) -> str:
    return rounded(size / GIB) if size else "0"
