"""Figures of torch's message for a GPU that is out of memory, and the remedies that follow."""

from __future__ import annotations

import dataclasses
import functools
import re

from study.advisor.full_gpu_moment import SAVE, STEP
from study.config.text import percent, rounded
from study.host.memory import GIB
from study.predictor.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from study.workloads.presets import PRESETS

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
# A rank, a GPU or a number of processes that one GPU alone has not: rank1, cuda:1, GPU 1, world_size=2.
_SEVERAL = re.compile(
    r"(?:(?<!lora )\brank|local_rank|cuda:|\bGPU)\W{0,3}[1-9]"
    r"|(?:world.size|num_processes|nproc_per_node)\W{1,3}(?!1\b)[1-9]",
    re.IGNORECASE,
)
_SAVED_IN_SHARDS = (
    "while saving, for which whole weights are gathered: a smaller micro-batch does little. Save shards: "
    '"stage3_gather_16bit_weights_on_model_save": false, then zero_to_fp32.py; under FSDP fsdp_state_dict_type '
    "SHARDED_STATE_DICT, then accelerate merge-weights; or torch.cuda.empty_cache() on all ranks before it"
)
# The next message of a log is another rank's.
_NEXT = "Tried to allocate"
_MAX_LETTERS = 4000
# CUDA's context and NCCL's buffers vary by release and card; more than twice the prediction is another program.
_OWN_OUTSIDE_BYTES = 2 * (CONTEXT_BYTES + COMMUNICATOR_BYTES)
# A failed request is often of a few MiB, which unused memory of any full GPU exceeds. Joining fragments helps only if
# they are a larger share of the GPU.
_FRAGMENTED_SHARE = 0.1
# torch rounds a request of at least 10 MiB up to a multiple of 2 MiB, and prints two decimals.
_ROUNDED_BYTES = 2**21
_LOGIT_BYTES = {4: "fp32", 2: "16 bits"}
# Models of tests and of images have fewer.
_MIN_VOCABULARY = 10_000
_MIN_TOKENS = 512
# 32,768 and 49,152 times a power of two is the size of many other tensors.
_MIN_ODD_PART = 5
# Upper bound of the share of random sizes that match; it is a tenth in test_why.py.
_FALSE_MATCHES = 0.4
# The vocabulary of one model may be four times that of another.
_MAX_LOGITS = 3


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
    # Largest rounding of the printed size that was asked for.
    tried_rounding: int = 0
    # The text names no other GPU or rank: ZeRO has none to shard over.
    is_alone: bool = False
    # STEP or SAVE; empty in a forward or backward pass.
    moment: str = ""

    @property
    def outside(self) -> int:
        """Bytes outside of this process's pool: CUDA's context, NCCL, other processes."""
        return max(0, self.capacity - self.free - self.allocated - self.unused)

    @property
    def is_fragmented(self) -> bool:
        """Whether free and unused bytes together are enough."""
        return self.free + self.unused >= self.tried

    @property
    def is_full(self) -> bool:
        """Whether tensors are the largest part, and joined fragments would free a small share of the GPU."""
        return self.allocated >= self.outside and self.free + self.unused < _FRAGMENTED_SHARE * self.capacity

    def parts(self) -> str:
        """Return the bytes of each part, in GiB."""
        return (
            f"{_gib(self.tried)} GiB asked for. Of {_gib(self.capacity)} GiB: {_gib(self.allocated)} in tensors, "
            f"{_gib(self.unused)} in torch's pool without a tensor, {_gib(self.outside)} outside of that pool, "
            f"{_gib(self.free)} free"
        )

    def remedies(self) -> list[str]:
        """Return the remedies that follow from these bytes, the surest first."""
        if self.tried > self.capacity and not self.moment:
            return [
                "one tensor larger than the GPU: fewer tokens in a micro-batch, or a loss in chunks",
                *self._logits(),
            ]
        missing = self.tried - self.free - self.unused
        remedies = self._full(missing) if self.moment else [*self._logits(), *self._full(missing)]
        if missing <= 0:
            words = (
                f"at most {_gib(self.unused + self.free)} GiB are won by joining fragments"
                if self.is_full
                else "free and unused memory is enough, but fragmented"
            )
            setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (before torch 2.1 max_split_size_mb:128)"
            remedies.append(f"{words}: {setting}")
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
            remedies.append(f"tensors fill the GPU, at least {_gib(missing)} GiB are missing: see study advise")
        return remedies

    def _full(self, missing: int) -> list[str]:
        """Return the remedy for tensors that fill the GPU, by the moment of the allocation."""
        if self.moment == SAVE:
            return [_SAVED_IN_SHARDS]
        if not self.is_full and not (self.moment == STEP and missing > 0):
            return []
        filled = f"tensors fill {percent(self.allocated / self.capacity)} of the GPU"
        if missing > 0:
            filled += f", at least {_gib(missing)} GiB are missing"
        if self.moment == STEP:
            shards = "" if self.is_alone else "over more GPUs (ZeRO, FSDP), "
            return [
                f"{filled} as the optimizer makes its state or steps, when activations are freed: a smaller micro-"
                f"batch and gradient checkpointing do little. State {shards}on the host (offload), in 8 bits or paged "
                "(optim: paged_adamw_8bit, not under FSDP2) or of adapters alone needs less here (study advise)"
            ]
        state = "adapters on 4-bit weights" if self.is_alone else "a higher ZeRO stage"
        return [f"{filled}: a smaller micro-batch, gradient checkpointing, {state} or offload (study advise)"]

    def _logits(self) -> list[str]:
        logits = find_logits(self.tried, self.tried_rounding)
        if not logits:
            return []
        sizes = " or of ".join(
            f"{item.tokens:,} tokens in {_LOGIT_BYTES[item.element_bytes]} with a vocabulary of {item.vocabulary:,} "
            f"({item.model})"
            for item in logits[:_MAX_LOGITS]
        )
        return [
            f"{_gib(self.tried)} GiB are the size of the logits of {sizes}. If those are yours: fewer tokens in a "
            "micro-batch, or a loss in chunks (use_liger_kernel)"
        ]


@dataclasses.dataclass(frozen=True)
class Logits:
    """Logits of a micro-batch."""

    tokens: int
    vocabulary: int
    element_bytes: int
    # One that has this vocabulary.
    model: str


def find_logits(size: int, rounding: int = 0) -> list[Logits]:
    """Return the logits whose size a request can be, those in fp32 of the largest vocabulary first.

    Micro-batches have round numbers of tokens. The more numbers are within the rounding, the rounder one has to be.
    """
    if rounding < _ROUNDED_BYTES:
        # Of such a multiple the printed size is exact.
        rounding = 0
    lowest = size - rounding - _ROUNDED_BYTES
    tries = len(_vocabularies()) * len(_LOGIT_BYTES)
    results = []
    for vocabulary, model in _vocabularies().items():
        for element_bytes in _LOGIT_BYTES:
            token_bytes = vocabulary * element_bytes
            largest = (size + rounding) // token_bytes
            window = (size + rounding - lowest) / token_bytes
            # The roundest number of tokens within the window.
            power = 1
            while largest // (2 * power) * 2 * power * token_bytes > lowest:
                power *= 2
            tokens = largest // power * power
            is_chance = tries * window > _FALSE_MATCHES * power
            if tokens * token_bytes > lowest and tokens >= _MIN_TOKENS and not is_chance:
                results.append(Logits(tokens, vocabulary, element_bytes, model))
    return sorted(results, key=lambda logits: (-logits.element_bytes, -logits.vocabulary))


@functools.cache
def _vocabularies() -> dict[int, str]:
    """Return the vocabularies of presets, each with one that has it: with those of all known models more sizes match
    without a cause."""
    sizes: dict[int, str] = {}
    for name, preset in PRESETS.items():
        size = preset.architecture.get("vocab_size", 0)
        odd_part = size // (size & -size) if size else 0
        if size >= _MIN_VOCABULARY and odd_part >= _MIN_ODD_PART:
            sizes.setdefault(size, name)
    return sizes


def names_several_gpus(text: str) -> bool:
    """Whether a text names a GPU or a rank besides the first, or several processes."""
    return bool(_SEVERAL.search(text))


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
    return FullGpu(tried, capacity, free, allocated, unused, other_processes, _rounding(message))


def _bytes(pattern: str, text: str) -> int | None:
    """Return the first size that a pattern finds."""
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return round(float(number) * _UNITS[unit])


def _rounding(message: str) -> int:
    """Return half of the last printed decimal of the size that was asked for."""
    match = re.search(_TRIED, message)
    assert match is not None
    decimals = len(match[1].partition(".")[2])
    return round(_UNITS[match[2]] / 10.0**decimals / 2)


def _gib(size: int) -> str:
    return rounded(size / GIB) if size else "0"
