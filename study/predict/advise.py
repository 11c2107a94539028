"""Every strategy for a model on a box, with the largest micro-batch that fits, and which of them to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from study.host.memory import GIB
from study.predict.memory import predict_memory
from study.predict.request import Attention, Box, Memory, ModelShape, Request, Time
from study.predict.time import predict_time
from study.spec.config import Precision
from study.spec.strategies import STUDIED_STRATEGIES, Strategy, read_strategy

# A larger micro-batch makes a step no faster per token, on any device that is known here.
LARGEST_MICRO_BATCH = 512
# What a micro-batch makes of a question.
Asked = Callable[[int], tuple[Request, Memory]]
# Elements: 16-bit buckets of 100 MB keep a network busy.
_SMALL_BUCKET = 50_000_000
# What is live and kept for reuse where memory is short, in layers.
_LAYERS_LIVE = 2
_SMALLEST_SUB_GROUPS = 10
_FAR_BEHIND = 0.5


@dataclasses.dataclass(frozen=True)
class Question:
    shape: ModelShape
    box: Box
    sequence_length: int
    # bf16 and fp16 are mixed precision: 16-bit weights with fp32 masters where an engine has them, else autocast.
    precision: str
    # None: whatever trains faster.
    gradient_checkpointing: bool | None = None
    attention: Attention = "sdpa"
    global_batch: int | None = None
    price_per_gpu_hour: float | None = None

    @property
    def ranks(self) -> int:
        return self.box.ranks


@dataclasses.dataclass(frozen=True)
class Option:
    """One strategy, at its best."""

    # Of accelerate_configs/, from whose files the settings come.
    name: str
    request: Request
    memory: Memory
    # None where it does not fit.
    time: Time | None
    # One line: what is too large, or how much is left.
    why: str
    cost_per_million_tokens: float | None = None

    @property
    def fits(self) -> bool:
        return self.time is not None

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.time.tokens_per_s_per_gpu.value * self.request.box.ranks if self.time else 0.0


@dataclasses.dataclass(frozen=True)
class Advice:
    question: Question
    # Fastest first, then what does not fit.
    options: tuple[Option, ...]

    @property
    def fitting(self) -> tuple[Option, ...]:
        return tuple(option for option in self.options if option.fits)

    @property
    def best(self) -> Option | None:
        return self.fitting[0] if self.fitting else None

    @property
    def runner_up(self) -> Option | None:
        return self.fitting[1] if len(self.fitting) > 1 else None

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.name == name), None)


def advise(question: Question, names: Sequence[str] | None = None) -> Advice:
    found = [_best_of(question, name) for name in names or candidates(question)]
    return Advice(question, tuple(sorted(found, key=_order)))


def _order(option: Option) -> tuple[bool, float, float]:
    """Of two that are equally fast, the one that leaves more of the device."""
    digits = -math.floor(math.log10(option.tokens_per_s)) + 2 if option.fits else 0
    return not option.fits, -round(option.tokens_per_s, digits), option.memory.peak_reserved.value


def candidates(question: Question) -> list[str]:
    """Of those with formulas. On one rank plain data parallelism and stage 0 are `single` with something added."""
    alone = question.ranks == 1
    left_out = {"ddp", "zero0"} if alone else {"single"}
    if question.precision == "fp16":
        # DeepSpeed's stage 0 divides by a loss scale that nothing was multiplied by.
        left_out |= {"zero0"}
    # What holds more than one copy nobody predicts.
    return [name for name in STUDIED_STRATEGIES if name not in left_out]


def precision_under(strategy: Strategy, precision: str) -> Precision:
    engine: Mapping[str, Precision] = {"bf16": "bf16-engine", "fp16": "fp16-engine", "fp32": "fp32"}
    plain: Mapping[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    return (plain if strategy.deepspeed is None else engine)[precision]


def _best_of(question: Question, name: str) -> Option:
    """Of the strategy's settings, with and without checkpointing."""
    checkpointing = (False, True) if question.gradient_checkpointing is None else (question.gradient_checkpointing,)
    tried = [
        _largest(question, name, strategy, again)
        for strategy in fitted(read_strategy(name), question) for again in checkpointing
    ]  # fmt: skip
    return min(tried, key=_order)


def fitted(strategy: Strategy, question: Question) -> Iterator[Strategy]:
    """The strategy's own settings with buckets that suit the model; at stage 3 also with little of it live at once."""
    if strategy.deepspeed is None or not strategy.zero_stage:
        yield strategy
        return
    largest = max(tensor.elements for tensor in question.shape.tensors)
    layer = sum(tensor.elements for tensor in question.shape.tensors if tensor.in_layer)
    small = min(_SMALL_BUCKET, question.shape.parameters)
    # A bucket between the two takes in no more of the large tensors' gradients than the small one.
    for bucket in sorted({small, largest}):
        base = _with(strategy, reduce_bucket_size=bucket, allgather_bucket_size=bucket)
        if strategy.zero_stage == 3:
            base = _with(base, stage3_prefetch_bucket_size=min(_SMALL_BUCKET, layer))
        base = _with_offloads(base, question, largest)
        yield base
        live = _LAYERS_LIVE * layer
        if strategy.zero_stage == 3 and live < question.shape.parameters and bucket == small:
            yield _with(base, stage3_max_live_parameters=live, stage3_max_reuse_distance=0)


def _with_offloads(strategy: Strategy, question: Question, largest: int) -> Strategy:
    """Buffers of the drive that hold the largest part, and sub-groups that leave room for some of them."""
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    if strategy.offload_device("param") == "nvme":
        part = -(-largest // question.ranks)
        size = -(-part * 11 // 10 // 1024) * 1024
        strategy = _with(strategy, offload_param={**zero["offload_param"], "buffer_size": size})
    if strategy.offload_device("optimizer") == "nvme":
        part = question.shape.parameters // question.ranks // _SMALLEST_SUB_GROUPS
        strategy = _with(strategy, sub_group_size=min(1_000_000_000, max(part, largest // question.ranks)))
    return strategy


def _with(strategy: Strategy, **settings: Any) -> Strategy:
    assert strategy.deepspeed is not None
    zero = {**strategy.deepspeed["zero_optimization"], **settings}
    return dataclasses.replace(strategy, deepspeed={**strategy.deepspeed, "zero_optimization": zero})


def _largest(question: Question, name: str, strategy: Strategy, again: bool) -> Option:
    """At the largest micro-batch that fits, or at the smallest where none does."""

    def asked(micro_batch: int) -> tuple[Request, Memory]:
        steps = (question.global_batch or 0) // (micro_batch * question.ranks)
        request = Request(
            shape=question.shape, strategy=strategy, box=question.box, sequence_length=question.sequence_length,
            micro_batch=micro_batch, accumulation=max(1, steps),
            precision=precision_under(strategy, question.precision), gradient_checkpointing=again,
            attention=question.attention,
        )  # fmt: skip
        return request, predict_memory(request)

    request, memory = _search(_micro_batches(question), asked, question.box)
    time = predict_time(request) if fits(memory, question.box) else None
    cost = None
    if question.price_per_gpu_hour is not None and time is not None:
        cost = question.price_per_gpu_hour / 3600 / time.tokens_per_s_per_gpu.value * 1e6
    return Option(name, request, memory, time, why(memory, question.box), cost)


def _search(sizes: list[int], asked: Asked, box: Box) -> tuple[Request, Memory]:
    """More samples never hold less, and each about as much: where a line over the two ends crosses is a good guess."""
    best, last = asked(sizes[0]), asked(sizes[-1])
    if fits(last[1], box):
        return last
    low, high = 0, len(sizes) - 1
    room, missing = -excess_bytes(best[1], box), excess_bytes(last[1], box)
    while room >= 0 and high - low > 1:
        guess = low + int((high - low) * room / (room + missing))
        place = min(max(guess, low + 1), high - 1)
        tried = asked(sizes[place])
        if (excess := excess_bytes(tried[1], box)) <= 0:
            low, room, best = place, -excess, tried
        else:
            high, missing = place, excess
    return best


def _micro_batches(question: Question) -> list[int]:
    """With a global batch those that divide a rank's share of it."""
    share = question.global_batch and question.global_batch // question.ranks
    limit = min(LARGEST_MICRO_BATCH, share or LARGEST_MICRO_BATCH)
    return [size for size in range(1, limit + 1) if not share or share % size == 0]


def usable_bytes(box: Box) -> float:
    """Of a device, or without any of the node's memory for each rank."""
    if box.in_host_memory:
        return (box.host_gib_per_node or 0) * GIB / box.gpus_per_node
    return box.device.visible_gib * GIB


def device_bytes(memory: Memory) -> float:
    """All that the driver sees of a process: the allocator's pool, and the context beside it."""
    return memory.peak_reserved.value + memory.device_parts["context"]


def excess_bytes(memory: Memory, box: Box) -> float:
    """What is missing, or else the room that is left, as a negative number."""
    host_bytes = (box.host_gib_per_node or 0) * GIB
    if box.in_host_memory:
        return box.gpus_per_node * memory.peak_reserved.value + memory.host_peak.value - host_bytes
    on_host = memory.host_peak.value - host_bytes if box.host_gib_per_node is not None else -math.inf
    on_device = device_bytes(memory) - usable_bytes(box)
    # What is on the host does not go by the samples.
    return max(on_device, on_host) if on_host > 0 else on_device


def fits(memory: Memory, box: Box) -> bool:
    return excess_bytes(memory, box) <= 0


def why(memory: Memory, box: Box) -> str:
    peak, usable = device_bytes(memory), usable_bytes(box)
    if fits(memory, box):
        return "fits" if box.in_host_memory else f"{1 - peak / usable:.0%} of the device is left"
    if peak > usable or box.host_gib_per_node is None:
        part, size = max(memory.device_parts.items(), key=lambda item: item[1])
        return f"needs {peak / GIB:.1f} GiB of {usable / GIB:.1f}; {part} alone {size / GIB:.1f}"
    return f"needs {memory.host_peak.value / GIB:.0f} GiB of host memory, of {box.host_gib_per_node:.0f}"


def error_of_time(option: Option) -> float | None:
    """Half the width of the interval of its step, as a share; None where nothing was validated."""
    time = option.time
    if time is None or time.step_s.low is None or time.step_s.high is None:
        return None
    return (time.step_s.high - time.step_s.low) / 2 / time.step_s.value


def how_sure(advice: Advice) -> str:
    best, other = advice.best, advice.runner_up
    if best is None:
        return "nothing fits, by the model's arithmetic"
    peak = best.memory.peak_reserved
    margin = 1 - (device_bytes(best.memory) + (peak.high or peak.value) - peak.value) / usable_bytes(
        advice.question.box
    )
    memory = f"{margin:.0%} of the device left" + (" at the upper end of its interval" if peak.high else "")
    if margin < 0:
        memory = "but it may not fit: the upper end of its interval does not"
    if other is None:
        return f"it is the only one that fits, {memory}"
    gap, error = best.tokens_per_s / other.tokens_per_s - 1, error_of_time(best)
    if error is None:
        return f"{gap:.0%} ahead of the next, and nobody has validated times here; {memory}"
    sure = "sure" if gap > error else "not sure"
    return f"{sure}: {gap:.0%} ahead of the next, where a step's time may be {error:.0%} off; {memory}"


def changes(advice: Advice) -> Iterator[str]:
    """Other questions near this one, where the answer is another."""
    question = advice.question
    box, best = question.box, advice.best
    # The slowest ones here are no better there.
    slowest = 0.0 if best is None else _FAR_BEHIND * best.tokens_per_s
    names = [option.name for option in advice.options if not option.fits or option.tokens_per_s > slowest]
    others = {
        f"{2 * question.sequence_length} tokens a sample": {"sequence_length": 2 * question.sequence_length},
        "twice the nodes": {"box": dataclasses.replace(box, nodes=2 * box.nodes)},
    }
    if box.gpus_per_node > 1:
        others["half the GPUs"] = {"box": dataclasses.replace(box, gpus_per_node=box.gpus_per_node // 2)}
    for label, changed in others.items():
        there = advise(dataclasses.replace(question, **changed), names).best  # type: ignore[arg-type]
        now, then = (option.name if option else "nothing" for option in (best, there))
        if now != then:
            yield f"with {label} it would be {then}"
