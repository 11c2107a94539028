"""Every strategy for a model on a box, with the largest micro-batch that fits, ranked by speed."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from study.advisor.predict_command import precision_under, workload_text
from study.config.registry import REGISTRY
from study.config.strategies import WITH_REPLICAS, Strategy, read_strategy
from study.host.memory import GIB
from study.predictor.hardware import Hardware
from study.predictor.memory import predict_memory
from study.predictor.request import FP32_BYTES, Attention, MemoryUse, Request, StepTime
from study.predictor.shape import ModelShape
from study.predictor.state import MIN_SWAPPED_BYTES, unswapped_kind
from study.predictor.time import (
    device_bytes,
    excess_bytes,
    fits,
    free_fraction,
    max_offload_slowdown,
    predict_time,
    usable_bytes,
    why,
)

# Elements: 16-bit buckets of 100 MB keep a network busy.
_SMALL_BUCKET = 50_000_000
# Live parameters and reuse distance where memory is short, in layers.
_LIVE_LAYERS = 2
_FEWEST_SUB_GROUPS = 10
# A larger micro-batch makes a step no faster per token, on any device that is known here.
MAX_MICRO_BATCH = 512
# Where two strategies' speeds are within this share of each other, the simpler one is recommended.
SPEED_TOLERANCE = 0.05
# Rented machines have 1 TiB for eight GPUs; many have twice as much, and some half.
USUAL_HOST_GIB_PER_GPU = 128
# A sample makes these on its rank; more ranks do not divide them. "context" is the process's own.
_PARTS_OF_A_SAMPLE = ("logits", "activations", "attention", "context")
# Options that are slower than this share of the best one are not tried for the questions nearby.
_FAR_BEHIND = 0.5
_WORTH_SAYING = 0.05
_PARTS_OF_A_STEP = {
    "compute": "compute", "communication_exposed": "exposed communication", "offload": "transfers from and to the host",
    "cpu_adam": "the optimizer on the CPU", "nvme": "NVMe",
}  # fmt: skip
_SIMPLICITY = {name: row.simplicity for name, row in REGISTRY.items() if row.simplicity is not None}
SIMPLEST_FIRST = sorted(_SIMPLICITY, key=_SIMPLICITY.__getitem__)


@dataclasses.dataclass(frozen=True)
class AdviceRequest:
    shape: ModelShape
    box: Hardware
    sequence_length: int
    # bf16 and fp16 are mixed precision: 16-bit weights with fp32 masters where an engine has them, else autocast.
    precision: str
    # None: whatever is faster.
    gradient_checkpointing: bool | None = None
    attention: Attention = "sdpa"
    chunked_loss: bool = False
    global_batch: int | None = None
    price_per_gpu_hour: float | None = None

    @property
    def samples_per_rank(self) -> int | None:
        """Samples of one rank in an optimizer step; None: one micro-batch."""
        return None if self.global_batch is None else max(1, round(self.global_batch / self.box.ranks))


@dataclasses.dataclass(frozen=True)
class Option:
    """One strategy with its best settings."""

    # In accelerate_configs/, from whose files the settings come.
    name: str
    request: Request
    memory: MemoryUse
    # None where it does not fit.
    time: StepTime | None
    # One line: what is too large, or how much memory is left.
    why: str
    cost_per_million_tokens: float | None = None

    @property
    def fits(self) -> bool:
        return self.time is not None

    @property
    def is_safe(self) -> bool:
        """Whether it fits at the upper bound of its predicted peak too."""
        return fits(self.memory, self.request.box, at_upper=True)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
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


def advise(question: AdviceRequest, names: Sequence[str] | None = None, *, at_upper: bool = True) -> Advice:
    """Rank strategies; what fits at the upper bound of its peak comes first, and without `at_upper` the peak counts."""
    options = [_best_option(question, name, at_upper) for name in names or candidates(question)]
    return Advice(question, rank_options(sorted(options, key=functools.partial(_order, at_upper=at_upper)), at_upper))


def rank_options(options: Sequence[Option], at_upper: bool = True) -> tuple[Option, ...]:
    """Put the simplest option that is as fast as the first, and that a usual host can load, before the others.

    The first is the fastest, but for an offload that is ahead by less than such steps were longer than predicted: then
    an option that needs no host is the first, if it is as sure to fit. Two options that both stay on the device have
    similar errors, and `SPEED_TOLERANCE` is enough.
    """
    fastest = options[0]
    as_sure = [each for each in options if each.is_safe or not (at_upper and fastest.is_safe)]
    plain = next((each for each in as_sure if each.fits and not each.request.strategy.offloads), fastest)
    first = fastest if fastest.tokens_per_s > max_offload_slowdown() * plain.tokens_per_s else plain
    equal = [each for each in as_sure if each.tokens_per_s >= (1 - SPEED_TOLERANCE) * first.tokens_per_s
             and each.request.strategy.offloads == first.request.strategy.offloads]  # fmt: skip
    equal.sort(key=lambda option: (needs_large_host(option), SIMPLEST_FIRST.index(option.name)))
    return (*equal, *(option for option in options if option not in equal))


def needs_large_host(option: Option) -> bool:
    """Whether it needs more host memory than machines usually have, where the user did not say what this one has."""
    box = option.request.box
    usual = USUAL_HOST_GIB_PER_GPU * GIB * box.gpus_per_node
    return box.host_gib_per_node is None and option.memory.host_peak.value > usual


def _order(option: Option, at_upper: bool) -> tuple[bool, bool, float, float]:
    is_unsure = at_upper and not option.is_safe
    return is_unsure, not option.fits, -option.tokens_per_s, option.memory.peak_reserved.value


def candidates(question: AdviceRequest) -> list[str]:
    """Strategies to try. On one rank nothing is sharded, so those are plain training and offloads.

    In 16 bits also stage 1: plain training keeps fp32 weights and autocasts, an engine has 16-bit ones with fp32
    masters. Offloads have them too, and against plain training would be ahead by that.
    """
    left_out = {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"} if question.box.ranks == 1 else {"single"}
    if question.precision != "fp32":
        left_out -= {"zero1"}
    if question.precision == "fp16":
        # DeepSpeed's stage 0 divides by a loss scale that nothing was multiplied by.
        left_out |= {"zero0"}
    if question.box.nodes == 1 or question.box.gpus_per_node == 1:
        # On one machine several replicas only need more memory.
        left_out |= set(WITH_REPLICAS)
    return [name for name in _SIMPLICITY if name not in left_out]


def _best_option(question: AdviceRequest, name: str, at_upper: bool) -> Option:
    """Return the fastest option over the strategy's settings, with and without checkpointing."""
    checkpointing = (False, True) if question.gradient_checkpointing is None else (question.gradient_checkpointing,)
    tried = [
        _largest_option(question, name, strategy, each, at_upper)
        for strategy in tuned_variants(read_strategy(name), question.shape, question.box) for each in checkpointing
    ]  # fmt: skip
    return min(tried, key=functools.partial(_order, at_upper=at_upper))


def _largest_option(
    question: AdviceRequest, name: str, strategy: Strategy, checkpointing: bool, at_upper: bool
) -> Option:
    """Return the largest micro-batch that is sure to fit, else the largest that may, else the smallest."""
    share, box = question.samples_per_rank, question.box
    largest = min(MAX_MICRO_BATCH, share or MAX_MICRO_BATCH)
    sizes = [size for size in range(1, largest + 1) if not share or share % size == 0]

    @functools.cache
    def predicted(micro_batch: int) -> tuple[Request, MemoryUse]:
        request = Request(
            shape=question.shape, strategy=strategy, box=box, sequence_length=question.sequence_length,
            micro_batch=micro_batch, accumulation=share // micro_batch if share else 1,
            precision=precision_under(strategy, question.precision), gradient_checkpointing=checkpointing,
            # The files are for a user's own program.
            attention=question.attention, chunked_loss=question.chunked_loss, autocast=not strategy.is_fsdp,
        )  # fmt: skip
        return request, predict_memory(request)

    count = 0
    for at_upper_end in (True, False) if at_upper else (False,):
        # All of a rank's samples in one micro-batch leave no accumulated gradients, and may fit where fewer do not.
        # Among the others more samples never need less memory.
        if not count and fits(predicted(sizes[-1])[1], box, at_upper_end):
            count = len(sizes)
        count = count or bisect.bisect_left(
            sizes[:-1], True, key=lambda size: not fits(predicted(size)[1], box, at_upper_end)
        )
    request, memory = predicted(sizes[max(count - 1, 0)])
    unused_nvme = unswapped_kind(request)
    time = predict_time(request) if fits(memory, box) and unused_nvme is None else None
    cost = None
    if question.price_per_gpu_hour is not None and time is not None:
        cost = question.price_per_gpu_hour / 3600 / time.tokens_per_s_per_gpu.value * 1e6
    reason = why(memory, box) if unused_nvme is None else f"no part of the {unused_nvme} has the 1 MiB that is swapped"
    return Option(name, request, memory, time, reason, cost)


def tuned_variants(strategy: Strategy, shape: ModelShape, box: Hardware) -> Iterator[Strategy]:
    """Yield the strategy with buckets that suit the model; stage 3 also with few live parameters."""
    if strategy.deepspeed is None or not strategy.zero_stage:
        yield strategy
        return
    layer = sum(tensor.elements for tensor in shape.tensors if tensor.in_layer)
    small = min(_SMALL_BUCKET, shape.trained_parameters)
    # A bucket between the two has room for no more of the large tensors' gradients than the small one. Where all
    # tensors are smaller, a bucket of the largest would be many calls.
    for bucket in sorted({small, max(small, shape.largest_trained)}):
        base = _with_zero(strategy, reduce_bucket_size=bucket, allgather_bucket_size=bucket)
        if strategy.zero_stage == 3:
            base = _with_zero(base, stage3_prefetch_bucket_size=min(_SMALL_BUCKET, layer))
        base = _with_offloads(base, shape, box.ranks)
        if (ranks_per_replica := strategy.ranks_per_replica(box.ranks, box.gpus_per_node)) is not None:
            base = _with_zero(base, zero_hpz_partition_size=ranks_per_replica)
        live = _LIVE_LAYERS * layer
        # A second copy is read only where parameters are released and gathered again.
        if ranks_per_replica is None or live >= shape.parameters:
            yield base
        if strategy.zero_stage == 3 and live < shape.parameters and bucket == small:
            yield _with_zero(base, stage3_max_live_parameters=live, stage3_max_reuse_distance=0)


def _with_offloads(strategy: Strategy, shape: ModelShape, ranks: int) -> Strategy:
    """Return NVMe buffers with room for the largest shard, and sub-groups that leave room for several of them."""
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    if strategy.offload_device("param") == "nvme":
        shard = -(-shape.largest * 11 // 10 // ranks)
        strategy = _with_zero(strategy, offload_param={**zero["offload_param"], "buffer_size": 1})
        strategy = strategy.with_swap_buffers(shard)
    if strategy.offload_device("optimizer") == "nvme":
        swapped = MIN_SWAPPED_BYTES // FP32_BYTES
        least = max(shape.trained_parameters // ranks // _FEWEST_SUB_GROUPS, shape.largest_trained // ranks, swapped)
        strategy = _with_zero(strategy, sub_group_size=min(1_000_000_000, least))
    return strategy


def _with_zero(strategy: Strategy, **settings: Any) -> Strategy:
    assert strategy.deepspeed is not None
    zero = {**strategy.deepspeed["zero_optimization"], **settings}
    return dataclasses.replace(strategy, deepspeed={**strategy.deepspeed, "zero_optimization": zero})


# How sure the advice is, and what would change it.


def explain_best(advice: Advice) -> str:
    best, other = advice.best, advice.runner_up
    if best is None:
        return _why_nothing_fits(advice)
    memory = "; ".join([_memory_text(best), *unchecked_needs(best)])
    if other is None:
        return f"it is the only one that fits; {memory}"
    if best.is_safe and not other.is_safe:
        return f"it is the only one that is sure to fit; {memory}"
    gap = best.tokens_per_s / other.tokens_per_s - 1
    if other.request.strategy.offloads and not best.request.strategy.offloads and gap < 0:
        ahead, slowest = other.tokens_per_s / best.tokens_per_s - 1, max_offload_slowdown()
        return (
            f"no offload: one is predicted {ahead:.0%} faster, but such steps took up to {slowest:.1f} x the"
            f" prediction; {memory}"
        )
    if gap <= SPEED_TOLERANCE:
        reason = " and simpler"
        if needs_large_host(other) and not needs_large_host(best):
            reason = f" and the next needs {other.memory.host_peak.value / GIB:,.0f} GiB of host memory"
        return f"within {SPEED_TOLERANCE:.0%} of the fastest that fits,{reason}; {memory}"
    error = None if error_of_time(other) is None else error_of_time(best)
    if error is None:
        return f"{gap:.0%} faster than the next, but step times are not validated here; {memory}"
    verb = "more than" if gap > error else "but no more than"
    return f"{gap:.0%} faster than the next, {verb} the error of a step time ({error:.0%}); {memory}"


def error_of_time(option: Option) -> float | None:
    """Half the width of the step time's interval, as a share; None where nothing was validated."""
    time = option.time
    if time is None or time.step_s.low is None or time.step_s.high is None:
        return None
    return (time.step_s.high - time.step_s.low) / 2 / time.step_s.value


def _why_nothing_fits(advice: Advice) -> str:
    least = min(advice.options, key=lambda option: device_bytes(option.memory))
    request, parts, box = least.request, least.memory.device_parts, least.request.box
    if box.host_gib_per_node is not None and not box.is_cpu_only:
        any_host = dataclasses.replace(box, host_gib_per_node=None)
        short = [option for option in advice.options if excess_bytes(option.memory, any_host) <= 0]
        if short:
            nearest = min(short, key=lambda option: option.memory.host_peak.value)
            needed = nearest.memory.host_peak.value / GIB
            return f"nothing fits this host: {nearest.name} needs {needed:,.0f} GiB, the least of what fits on the GPUs"
    # More ranks divide a model's state, and not what a sample makes on its rank.
    undivided = {name: parts[name] for name in _PARTS_OF_A_SAMPLE if parts[name]}
    if sum(undivided.values()) <= (usable := usable_bytes(box)):
        return "nothing fits: use more GPUs, fewer tokens per sample, or a smaller model"
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in undivided.items())
    helps = ["fewer tokens per sample"]
    if not request.gradient_checkpointing:
        helps.append("gradient checkpointing")
    if parts["logits"] and not request.chunked_loss:
        helps.append("a chunked loss (--chunked_loss)")
    return (
        f"nothing fits, and no number of GPUs helps: one sample needs {sum(undivided.values()) / GIB:.1f} GiB on its"
        f" rank ({named}) of {usable / GIB:.1f}; what helps: {', '.join(helps)}, or its tokens divided over ranks"
        " (strategies cp and ulysses_zero1 to ulysses_zero3, which are not predicted)"
    )


def _memory_text(best: Option) -> str:
    memory, box = best.memory, best.request.box
    if (memory.process_peak or memory.peak_reserved).high is None:
        return f"{free_fraction(memory, box):.0%} of the memory is left, but peaks are not validated here"
    if not best.is_safe:
        return "it may not fit: its 90 % bound does not"
    return f"its 90 % bound fits, with {free_fraction(memory, box, True):.0%} of the memory left"


def unchecked_needs(option: Option) -> Iterator[str]:
    """Yield what an offload needs and the user did not say that the box has."""
    box, strategy = option.request.box, option.request.strategy
    if strategy.offloads and box.host_gib_per_node is None:
        needed = option.memory.host_peak.value / GIB
        yield f"not checked: it needs {needed:,.0f} GiB of host memory; --host_memory says what there is"
    if strategy.uses_nvme:
        read, write = box.nvme_read_gb_per_s, box.nvme_write_gb_per_s
        yield f"NVMe is taken to read {read:g} and write {write:g} GB/s (--nvme_gb_per_s)"


def explain_slowdown(option: Option, best: Option) -> str:
    """Say why `option` is slower, by what it would do with the micro-batch and the checkpointing of `best`."""
    ours, box = best.request, best.request.box
    same = dataclasses.replace(
        option.request, micro_batch=ours.micro_batch, accumulation=ours.accumulation,
        gradient_checkpointing=ours.gradient_checkpointing,
    )  # fmt: skip
    if not fits(predict_memory(same), box, at_upper=best.is_safe):
        return f": with {workload_text(ours)}, as {best.name} trains, it does not fit"
    assert best.time is not None
    time, bests = predict_time(same), best.time
    part = max(_PARTS_OF_A_STEP, key=lambda name: time.parts[name] - bests.parts[name])
    its, other = (f"{each.parts[part] / each.step_s.value:.0%}" for each in (time, bests))
    return (
        f": trained as {best.name} is, {_PARTS_OF_A_STEP[part]} takes {its} of its step, and {other} of {best.name}'s"
    )


def faster_riskier_option(advice: Advice) -> Option | None:
    """Return an option that is faster than the recommended one, and not as sure to fit."""
    best = advice.best
    if best is None or not best.is_safe:
        return None
    faster = advise(advice.question, _near(advice, advice.question), at_upper=False).best
    enough = (1 + _WORTH_SAYING) * best.tokens_per_s
    return faster if faster is not None and faster.tokens_per_s >= enough else None


def _near(advice: Advice, question: AdviceRequest) -> list[str]:
    """Return the candidates without the slowest ones, which are no better for another question."""
    slowest = 0.0 if advice.best is None else _FAR_BEHIND * advice.best.tokens_per_s
    slow = {option.name for option in advice.options if option.is_safe and option.tokens_per_s <= slowest}
    return [name for name in candidates(question) if name not in slow]


def sensitivity_lines(advice: Advice) -> Iterator[str]:
    """Yield questions near this one where the answer is another."""
    question, best = advice.question, advice.best
    box = question.box
    more = "twice the nodes" if box.nodes > 1 else "a second such box" if box.ranks > 1 else "a second GPU"
    twice: dict[str, Any] = {"gpus_per_node": 2} if box.ranks == 1 else {"nodes": 2 * box.nodes}
    others: dict[str, dict[str, Any]] = {more: {"box": dataclasses.replace(box, **twice)}}
    if box.nodes > 1:
        alone = advise(dataclasses.replace(question, box=dataclasses.replace(box, nodes=1))).best
        if alone is not None and (best is None or _is_as_good(alone, best)):
            times = "enough" if best is None else f"{alone.tokens_per_s / best.tokens_per_s:.1f} x as fast"
            yield "; ".join([f"one of these machines alone is {times}, under {alone.name}", *unchecked_needs(alone)])
        slower = dataclasses.replace(box, network_gb_per_s=box.network_gb_per_s / 8)
        others["an eighth of the network"] = {"box": slower}
    longer, positions = 2 * question.sequence_length, question.shape.positions
    if positions is None or longer <= positions:
        others[f"{longer} tokens per sample"] = {"sequence_length": longer}
    if box.gpus_per_node > 1:
        others["half the GPUs"] = {"box": dataclasses.replace(box, gpus_per_node=box.gpus_per_node // 2)}
    for label, changed in others.items():
        asked = dataclasses.replace(question, **changed)
        there = advise(asked, _near(advice, asked))
        still = best and there.option(best.name)
        if there.best is None:
            if best is not None:
                yield f"with {label} nothing would fit"
        elif best is not None and there.best.name == best.name:
            if best.is_safe and not there.best.is_safe:
                yield f"with {label} it may not fit"
        elif still is None or not still.is_safe or still.tokens_per_s < (1 - _WORTH_SAYING) * there.best.tokens_per_s:
            yield f"with {label} it would be {there.best.name}"


def _is_as_good(alone: Option, best: Option) -> bool:
    """Whether fewer machines are as fast; with an offload, as in `ranked`, only where it is far ahead."""
    is_offload = alone.request.strategy.offloads and not best.request.strategy.offloads
    least = max_offload_slowdown() if is_offload else 1 - SPEED_TOLERANCE
    return (alone.is_safe or not best.is_safe) and alone.tokens_per_s >= least * best.tokens_per_s
