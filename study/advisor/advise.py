"""Every strategy for a model on a box, with the largest micro-batch that fits, and which of them to take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from study.config.errors import UserError
from study.config.flags import Precision
from study.config.registry import REGISTRY
from study.config.strategies import WITH_COPIES, Strategy, read_strategy
from study.host.memory import GIB
from study.predictor.activations import has_fused
from study.predictor.memory import predict_memory
from study.predictor.request import Attention, Hardware, Memory, ModelShape, Request, Time
from study.predictor.state import FP32_BYTES, SMALLEST_SWAPPED_BYTES, unswapped
from study.predictor.time import excess_bytes, fits, predict_time, slowest_offload, why

# The settings that a strategy is tried with: its own, fitted to the model and the box.

# Elements: 16-bit buckets of 100 MB keep a network busy.
_SMALL_BUCKET = 50_000_000
# What is live and kept for reuse where memory is short, in layers.
_LAYERS_LIVE = 2
_SMALLEST_SUB_GROUPS = 10


def fitted(strategy: Strategy, shape: ModelShape, box: Hardware) -> Iterator[Strategy]:
    """With buckets that suit the model; at stage 3 also with little of it live at once."""
    if strategy.deepspeed is None or not strategy.zero_stage:
        yield strategy
        return
    largest = shape.largest_trained
    layer = sum(tensor.elements for tensor in shape.tensors if tensor.in_layer)
    small = min(_SMALL_BUCKET, shape.trained_parameters)
    # A bucket between the two takes in no more of the large tensors' gradients than the small one. Where all are
    # smaller a bucket of the largest would be many calls.
    for bucket in sorted({small, max(small, largest)}):
        base = _with(strategy, reduce_bucket_size=bucket, allgather_bucket_size=bucket)
        if strategy.zero_stage == 3:
            base = _with(base, stage3_prefetch_bucket_size=min(_SMALL_BUCKET, layer))
        base = _with_offloads(base, shape, box.ranks)
        if (of_a_copy := strategy.ranks_of_a_copy(box.ranks, box.gpus_per_node)) is not None:
            base = _with(base, zero_hpz_partition_size=of_a_copy)
        live = _LAYERS_LIVE * layer
        # A second copy is read only where parameters are released and gathered again.
        if of_a_copy is None or live >= shape.parameters:
            yield base
        if strategy.zero_stage == 3 and live < shape.parameters and bucket == small:
            yield _with(base, stage3_max_live_parameters=live, stage3_max_reuse_distance=0)


def _with_offloads(strategy: Strategy, shape: ModelShape, ranks: int) -> Strategy:
    """Buffers of the drive that hold the largest part, and sub-groups that leave room for some of them."""
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    if strategy.offload_device("param") == "nvme":
        part = -(-shape.largest * 11 // 10 // ranks)
        strategy = _with(strategy, offload_param={**zero["offload_param"], "buffer_size": 1}).with_swap_buffers(part)
    if strategy.offload_device("optimizer") == "nvme":
        part = shape.trained_parameters // ranks // _SMALLEST_SUB_GROUPS
        swapped = SMALLEST_SWAPPED_BYTES // FP32_BYTES
        size = min(1_000_000_000, max(part, shape.largest_trained // ranks, swapped))
        strategy = _with(strategy, sub_group_size=size)
    return strategy


def _with(strategy: Strategy, **settings: Any) -> Strategy:
    assert strategy.deepspeed is not None
    zero = {**strategy.deepspeed["zero_optimization"], **settings}
    return dataclasses.replace(strategy, deepspeed={**strategy.deepspeed, "zero_optimization": zero})


# A larger micro-batch makes a step no faster per token, on any device that is known here.
LARGEST_MICRO_BATCH = 512
# Of two that are so near each other in speed the simpler one is taken.
AS_FAST = 0.05
# Of rented machines: 1 TiB beside eight GPUs. Many have twice as much, and some half.
USUAL_HOST_GIB_OF_A_GPU = 128
_SIMPLICITY = {name: row.simplicity for name, row in REGISTRY.items() if row.simplicity is not None}
SIMPLEST_FIRST = sorted(_SIMPLICITY, key=_SIMPLICITY.__getitem__)
# What a micro-batch makes of a question.
Asked = Callable[[int], tuple[Request, Memory]]


@dataclasses.dataclass(frozen=True)
class AdviceRequest:
    shape: ModelShape
    box: Hardware
    sequence_length: int
    # bf16 and fp16 are mixed precision: 16-bit weights with fp32 masters where an engine has them, else autocast.
    precision: str
    # None: whatever trains faster.
    gradient_checkpointing: bool | None = None
    attention: Attention = "sdpa"
    chunked_loss: bool = False
    global_batch: int | None = None
    price_per_gpu_hour: float | None = None

    @property
    def ranks(self) -> int:
        return self.box.ranks

    @property
    def share(self) -> int | None:
        """Samples of one rank in a step; None: one micro-batch."""
        return None if self.global_batch is None else max(1, round(self.global_batch / self.ranks))


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
    def batches(self) -> str:
        """Of one rank before each step: samples of one, and how many."""
        return f"{self.request.micro_batch} x {self.request.accumulation}"

    @property
    def is_sure(self) -> bool:
        return fits(self.memory, self.request.box, at_upper_end=True)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.time.tokens_per_s_per_gpu.value * self.request.box.ranks if self.time else 0.0


@dataclasses.dataclass(frozen=True)
class Advice:
    question: AdviceRequest
    # What is sure to fit, the fastest first; then what may fit, and what does not.
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


def advise(question: AdviceRequest, names: Sequence[str] | None = None, *, surely: bool = True) -> Advice:
    """What fits at the upper end of its peak's interval comes first; without `surely` the peak itself counts."""
    found = [_best_of(question, name, surely) for name in names or candidates(question)]
    return Advice(question, ranked(sorted(found, key=_order if surely else _speed), surely))


def ranked(options: Sequence[Option], surely: bool = True) -> tuple[Option, ...]:
    """The simplest of those that are as fast as the first and that a usual host can load, then the others as they come.

    First is the fastest, but for an offload that is ahead by less than such steps were longer than predicted: what
    needs no host is taken then, if it is as sure to fit. Of two that both stay on the device the errors are alike, and
    `AS_FAST` is enough.
    """
    fastest = options[0]
    as_sure = [each for each in options if each.is_sure or not (surely and fastest.is_sure)]
    plain = next((each for each in as_sure if each.fits and not each.request.strategy.offloads), fastest)
    first = fastest if fastest.tokens_per_s > slowest_offload() * plain.tokens_per_s else plain
    equal = [each for each in as_sure if each.tokens_per_s >= (1 - AS_FAST) * first.tokens_per_s
             and each.request.strategy.offloads == first.request.strategy.offloads]  # fmt: skip
    equal.sort(key=lambda option: (asks_much_of_a_host(option), SIMPLEST_FIRST.index(option.name)))
    return (*equal, *(option for option in options if option not in equal))


def asks_much_of_a_host(option: Option) -> bool:
    """Where nobody said what the host has."""
    box = option.request.box
    usual = USUAL_HOST_GIB_OF_A_GPU * GIB * box.gpus_per_node
    return box.host_gib_per_node is None and option.memory.host_peak.value > usual


def error_of_time(option: Option) -> float | None:
    """Half the width of the interval of its step, as a share; None where nothing was validated."""
    time = option.time
    if time is None or time.step_s.low is None or time.step_s.high is None:
        return None
    return (time.step_s.high - time.step_s.low) / 2 / time.step_s.value


def _order(option: Option) -> tuple[bool, bool, float, float]:
    return not option.is_sure, *_speed(option)


def _speed(option: Option) -> tuple[bool, float, float]:
    return not option.fits, -option.tokens_per_s, option.memory.peak_reserved.value


def candidates(question: AdviceRequest) -> list[str]:
    """On one rank nothing is sharded: plain training, and offloads.

    In 16 bits also stage 1: plain training keeps fp32 weights and autocasts, an engine has 16-bit ones with fp32
    masters. Offloads have them too, and against plain training would be ahead by that.
    """
    left_out = {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"} if question.ranks == 1 else {"single"}
    if question.precision != "fp32":
        left_out -= {"zero1"}
    if question.precision == "fp16":
        # DeepSpeed's stage 0 divides by a loss scale that nothing was multiplied by.
        left_out |= {"zero0"}
    if question.box.nodes == 1 or question.box.gpus_per_node == 1:
        # On one machine a copy in each part of it only holds more.
        left_out |= set(WITH_COPIES)
    return [name for name in _SIMPLICITY if name not in left_out]


def precision_under(strategy: Strategy, precision: str) -> Precision:
    engine: Mapping[str, Precision] = {"bf16": "bf16-engine", "fp16": "fp16-engine", "fp32": "fp32"}
    plain: Mapping[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    # Stage 0 has no fp16 of its own that trains.
    has_own = strategy.deepspeed is not None and (strategy.zero_stage != 0 or precision != "fp16")
    return (engine if has_own else plain)[precision]


def usual_precision(box: Hardware) -> str:
    """Where nobody says one."""
    if box.in_host_memory:
        return "fp32"
    return "bf16" if box.device.peak_tflops["bf16"] else "fp16"


def refuse_precision(box: Hardware, precision: str) -> None:
    """As a run on such a device is refused."""
    if precision.startswith("bf16") and usual_precision(box) == "fp16":
        raise UserError(f"{box.device.name} has no bf16", "use --precision fp16 or --precision fp32")


def refuse_attention(request: Request | AdviceRequest) -> None:
    """What cannot run, and what nobody has counted."""
    device, shape = request.box.device, request.shape
    if request.attention != "flash_attention_2":
        return
    if usual_precision(request.box) != "bf16":
        raise UserError(f"{device.name} has no flash_attention_2", "use --attn_implementation sdpa")
    if request.precision == "fp32":
        raise UserError("flash_attention_2 does not compute in fp32", "use --attn_implementation sdpa, or 16 bits")
    if not has_fused(shape):
        raise UserError(f"no arithmetic for flash_attention_2 of {shape.model_type}", "use --attn_implementation eager")


def _best_of(question: AdviceRequest, name: str, surely: bool) -> Option:
    """Of the strategy's settings, with and without checkpointing."""
    checkpointing = (False, True) if question.gradient_checkpointing is None else (question.gradient_checkpointing,)
    tried = [
        _largest(question, name, strategy, again, surely)
        for strategy in fitted(read_strategy(name), question.shape, question.box) for again in checkpointing
    ]  # fmt: skip
    return min(tried, key=_order if surely else _speed)


def _largest(question: AdviceRequest, name: str, strategy: Strategy, again: bool, surely: bool) -> Option:
    """At the largest micro-batch that is sure to fit, else at the largest that may, else at the smallest."""

    @functools.cache
    def asked(micro_batch: int) -> tuple[Request, Memory]:
        steps = (question.share or 0) // micro_batch
        request = Request(
            shape=question.shape, strategy=strategy, box=question.box, sequence_length=question.sequence_length,
            micro_batch=micro_batch, accumulation=max(1, steps),
            precision=precision_under(strategy, question.precision), gradient_checkpointing=again,
            # A user's own program is what the files are for.
            attention=question.attention, chunked_loss=question.chunked_loss, autocast=not strategy.is_fsdp,
        )  # fmt: skip
        return request, predict_memory(request)

    sizes, box = _micro_batches(question), question.box
    request, memory = _search(sizes, asked, box, surely)
    if surely and not fits(memory, box, at_upper_end=True):
        request, memory = _search(sizes, asked, box, False)
    unused_drive = unswapped(request)
    time = predict_time(request) if fits(memory, box) and unused_drive is None else None
    cost = None
    if question.price_per_gpu_hour is not None and time is not None:
        cost = question.price_per_gpu_hour / 3600 / time.tokens_per_s_per_gpu.value * 1e6
    told = why(memory, box) if unused_drive is None else f"no part of the {unused_drive} has the 1 MiB that is swapped"
    return Option(name, request, memory, time, told, cost)


def _search(sizes: list[int], asked: Asked, box: Hardware, surely: bool) -> tuple[Request, Memory]:
    """More samples never hold less, and each about as much: where a line over the two ends crosses is a good guess."""
    best, last = asked(sizes[0]), asked(sizes[-1])
    if fits(last[1], box, surely):
        return last
    low, high = 0, len(sizes) - 1
    room, missing = -excess_bytes(best[1], box, surely), excess_bytes(last[1], box, surely)
    while room >= 0 and high - low > 1:
        guess = low + int((high - low) * room / (room + missing))
        place = min(max(guess, low + 1), high - 1)
        tried = asked(sizes[place])
        if (excess := excess_bytes(tried[1], box, surely)) <= 0:
            low, room, best = place, -excess, tried
        else:
            high, missing = place, excess
    return best


def _micro_batches(question: AdviceRequest) -> list[int]:
    """With a global batch those that divide a rank's share of it."""
    share = question.share
    limit = min(LARGEST_MICRO_BATCH, share or LARGEST_MICRO_BATCH)
    return [size for size in range(1, limit + 1) if not share or share % size == 0]
