"""Rank all strategies for a model on given hardware, each with the largest micro-batch that fits."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from study.advisor.fitted import (
    RankKey,
    find_best,
    fit_settings,
    loaded_where_it_fits,
    loads_16_bits,
    rank_key,
    speed_if_it_fits,
    tuned_variants,
    usual_weights,
)
from study.advisor.request_text import workload_text
from study.advisor.workload import Quantization, Workload
from study.config.errors import UserError
from study.config.registry import REGISTRY
from study.config.strategies import WITH_REPLICAS, Strategy, read_strategy
from study.config.text import rounded
from study.host.memory import GIB
from study.predictor import time as timing
from study.predictor.hardware import Hardware
from study.predictor.intervals import Ends, ends_text
from study.predictor.memory import estimate_host_peak, least_device_bytes, predict_memory
from study.predictor.request import MemoryUse, Program, Request, SetupCorrection, StepTime, with_tensor_group
from study.predictor.shape import ModelShape
from study.predictor.state import forces_cpu_adam, unswapped_kind
from study.releases.causes import unsound_releases

# On none of the listed devices a larger micro-batch raises the throughput.
MAX_MICRO_BATCH = 512
# The simpler of two strategies is recommended if their speeds differ by less than this fraction.
SPEED_TOLERANCE = 0.05
# A strategy that some release of DeepSpeed trains wrong makes way for one that is slower by less than this fraction.
_SOUND_TOLERANCE = 0.02
# Less than a digit of the printed percentage.
SAME_SPEED = 0.0005
# Peaks that differ by less are equal, as a fraction: of replicas with adapters only buckets differ.
_SAME_MEMORY = 0.02
# Rented machines have 1 TiB for eight GPUs; many have twice as much, and some half.
USUAL_HOST_GIB_PER_GPU = 128
# A host memory that is given has room for the system and for the error of the peak from this fraction on.
_HOST_USED = 0.9
# Parts of the peak that more ranks do not reduce: those of one sample, and the CUDA context.
_PARTS_OF_A_SAMPLE = ("logits", "activations", "attention", "context")
# What-if questions skip the options that are slower than this fraction of the best one.
_FAR_BEHIND = 0.5
_WORTH_SAYING = 0.05
# Speed of plain training with 16-bit weights over fp32 weights from which on it is named.
_MUCH_FASTER = 1.5
# Logits from this fraction of the memory on are worth a loss that never has them as a whole.
_LARGE_LOGITS = 0.1
# With at most this many samples per rank by default a batch of this many times is tried, and named if it is faster by
# this fraction.
_FEW_SAMPLES, _LARGER_BATCH, _WORTH_A_BATCH = 4, 8, 0.2
# An option is named whose bound leaves this fraction of the memory: a program also evaluates, logs and generates.
_ROOM = 0.05
# The changes that are tried if nothing fits.
_FEWEST_TOKENS = 128
_MACHINES = (2, 4, 8, 16, 32, 64)
# Strategies that are compared with tensor-parallel groups.
WITH_AUTOTP = ("zero0", "zero1", "zero2", "zero3")
# Strategies without an engine: they train the loaded weights.
PLAIN = ("single", "ddp")
# Flags of adapters on weights in 16 and 4 bits.
_ADAPTER_FLAGS: dict[str, Quantization] = {"--peft lora": "none", "--peft lora --quantization 4bit": "4bit"}
IN_16_BITS = "bf16 weights and no fp32 masters"
_PARTS_OF_A_STEP = {
    "compute": "compute",
    "communication_exposed": "exposed communication",
    "offload": "transfers from and to the host",
    "cpu_adam": "the optimizer on the CPU",
    "nvme": "NVMe",
}
_SIMPLICITY = {name: row.simplicity for name, row in REGISTRY.items() if row.simplicity is not None}
SIMPLEST_FIRST = sorted(_SIMPLICITY, key=_SIMPLICITY.__getitem__)


@dataclasses.dataclass(frozen=True)
class AdviceRequest(Program):
    """Model, hardware, program and batch for which strategies are ranked."""

    shape: ModelShape
    box: Hardware
    sequence_length: int
    # bf16 and fp16 are mixed precision: 16-bit weights with fp32 masters where an engine has them, else autocast.
    precision: str
    # None: the faster of the two.
    gradient_checkpointing: bool | None = None
    # None: each rank has one micro-batch per optimizer step.
    global_batch: int | None = None
    # The global batch is the default, the fewest samples that suit the ranks.
    is_default_batch: bool = False
    # None: the largest one that fits.
    micro_batch: int | None = None
    price_per_gpu_hour: float | None = None
    fsdp_version: int = 2
    # By measured runs.
    correction: SetupCorrection | None = None
    # Plain training loads its weights in bf16, and trains them without fp32 masters.
    plain_in_16_bits: bool = False
    # Ranks that divide the tensors of each layer, and process the same samples.
    tensor_ranks: int = 1

    @property
    def data_ranks(self) -> int:
        """Ranks with different samples."""
        return self.box.ranks // self.tensor_ranks

    def find_strategy(self, name: str) -> Strategy:
        """Return a strategy, with the tensor-parallel groups of the question."""
        strategy = read_strategy(name)
        return strategy if self.tensor_ranks == 1 else strategy.with_tensor_parallelism(self.tensor_ranks)

    def configuration(self, strategy: Strategy, micro_batch: int, accumulation: int, checkpointing: bool) -> Request:
        """Return the request of one configuration."""
        precision, is_pure = usual_weights(self.shape, strategy, self.precision)
        if self.plain_in_16_bits and strategy.name in PLAIN:
            precision, is_pure = "bf16-engine", True
        request = Request(
            shape=self.shape,
            strategy=strategy,
            box=self.box,
            sequence_length=self.sequence_length,
            micro_batch=micro_batch,
            accumulation=accumulation,
            precision=precision,
            pure=is_pure,
            loads_16_bits=loads_16_bits(self.shape, strategy, precision),
            gradient_checkpointing=checkpointing,
            # The files are for the user's program, not for study/train.py.
            autocast=not strategy.is_fsdp,
            fsdp_version=self.fsdp_version if strategy.is_fsdp else 2,
            correction=self.correction,
            **self.request_fields,
        )
        return with_tensor_group(loaded_where_it_fits(request))


@dataclasses.dataclass(frozen=True)
class Option:
    """One strategy with its best settings."""

    # Its file in accelerate_configs/ has the settings to start from.
    name: str
    request: Request
    memory: MemoryUse
    # None if it does not fit.
    time: StepTime | None
    # One line: the part that is too large, or the free memory.
    why: str
    cost_per_million_tokens: float | None = None

    @property
    def fits(self) -> bool:
        """Whether it can run: a step time is predicted only if the predicted peak fits."""
        return self.time is not None

    @property
    def is_safe(self) -> bool:
        """Whether the upper bound (90 %) of the predicted peak fits, too."""
        return timing.fits(self.memory, self.request.box, at_upper=True)

    @property
    def tokens_per_s(self) -> float:
        """Throughput summed over all ranks; 0 if it does not fit."""
        return self.time.tokens_per_s_per_gpu.value * self.request.box.ranks if self.time else 0.0

    @property
    def speed_ends(self) -> Ends | None:
        """Ends of the throughput of all ranks; None if too few measurements validate it."""
        return None if self.time is None else timing.speed_ends(self.request, self.time)

    @property
    def cost_ends(self) -> Ends | None:
        """Ends of the cost of a million tokens, from those of the throughput; None without a price or without those."""
        cost, ends = self.cost_per_million_tokens, self.speed_ends
        if cost is None or ends is None:
            return None
        return cost * self.tokens_per_s / ends[1], cost * self.tokens_per_s / ends[0]


@dataclasses.dataclass(frozen=True)
class Advice:
    """Options for one request, ranked."""

    question: AdviceRequest
    # Options whose upper bound fits, the fastest first; then those that may fit, and those that do not.
    options: tuple[Option, ...]

    @property
    def fitting(self) -> tuple[Option, ...]:
        return tuple(option for option in self.options if option.fits)

    @property
    def best(self) -> Option | None:
        """Recommended option; None if nothing fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def runner_up(self) -> Option | None:
        """Second option that fits; None if there is none."""
        return self.fitting[1] if len(self.fitting) > 1 else None


def advise(question: AdviceRequest, names: Sequence[str] | None = None, *, at_upper_bound: bool = True) -> Advice:
    """Rank strategies: those that fit come first, by their upper bound or, without `at_upper_bound`, by their peak."""
    searches = [_Search(question, name, at_upper_bound) for name in names or candidates(question)]
    return _ranked(question, [search.option for search in searches], at_upper_bound)


def _ranked(question: AdviceRequest, options: Sequence[Option], at_upper_bound: bool) -> Advice:
    order = functools.partial(order_key, at_upper_bound=at_upper_bound)
    ranked = sorted(options, key=order)
    return Advice(question, rank_options(ranked, at_upper_bound) if ranked else ())


def advise_without_losers(
    question: AdviceRequest,
    names: Sequence[str],
    baseline: str | None = None,
    *,
    at_upper_bound: bool = True,
    worth: float = 0.0,
) -> Advice | None:
    """Return the advice of `advise`, without the options that cannot be its recommendation, but with that of
    `baseline` if it may fit.

    None if no option can have `worth` tokens/s. As in `rank_options`, the fastest option whose bound fits decides,
    and the fastest such one without an offload: one slower than both by more than `SPEED_TOLERANCE` changes nothing.
    """
    searches = [search for name in names if (search := _Search(question, name, at_upper_bound)).may_fit]
    for search in searches:
        search.leave_out_hopeless_variants()
    if worth and all(search.most_tokens_per_s < worth for search in searches):
        return None
    fastest, plain, options = 0.0, 0.0, dict[str, Option]()
    for search in sorted(searches, key=lambda search: (search.name != baseline, -search.most_tokens_per_s)):
        slowdown = timing.max_offload_slowdown(question.correction)
        ahead = max(fastest, slowdown * plain) if search.offloads else plain
        if search.name != baseline and search.most_tokens_per_s < (1 - SPEED_TOLERANCE) * ahead:
            continue
        option = options[search.name] = search.option
        if option.fits and (option.is_safe or not at_upper_bound):
            fastest = max(fastest, option.tokens_per_s)
            plain = plain if search.offloads else max(plain, option.tokens_per_s)
    return _ranked(question, [options[name] for name in names if name in options], at_upper_bound)


def rank_options(
    options: Sequence[Option], at_upper_bound: bool = True, *, counts_host: bool = True
) -> tuple[Option, ...]:
    """Reorder options: first the simplest of those within `SPEED_TOLERANCE` of the fastest, then the rest in their
    order.

    Of equally fast options those that fit a typical host come first (not without `counts_host`), and an option is not
    called simpler than one that is both faster and smaller. An offload counts as the fastest only if it leads
    by more than the largest error of a predicted offload step; otherwise an option without offload whose fit is as
    certain takes its place. Options that both stay on the device have similar errors, so `SPEED_TOLERANCE` is enough
    there. If no bound fits, only those that exceed the memory least are compared. One whose gradients a release of
    DeepSpeed computes wrong makes way for the simplest without such a release that is hardly slower.
    """
    surest = list(options)
    if at_upper_bound and options[0].fits and not options[0].is_safe:
        surest = _surest(options)
    fastest = surest[0]
    comparable = [candidate for candidate in surest if candidate.is_safe or not (at_upper_bound and fastest.is_safe)]
    plain = next(
        (candidate for candidate in comparable if candidate.fits and not candidate.request.strategy.offloads), fastest
    )
    slowdown = timing.max_offload_slowdown(fastest.request.correction)
    first = fastest if fastest.tokens_per_s > slowdown * plain.tokens_per_s else plain
    slowest = (1 - SPEED_TOLERANCE) * first.tokens_per_s
    equal = [
        candidate
        for candidate in comparable
        if candidate.tokens_per_s >= slowest and candidate.request.strategy.offloads == first.request.strategy.offloads
    ]
    equal = _simplest_first(equal, counts_host)
    first_of_all = _simplest_first([option for option in equal if _is_sounder(option, equal[0])], counts_host)
    return tuple({id(option): option for option in (*first_of_all, *equal, *options)}.values())


def _simplest_first(options: Sequence[Option], counts_host: bool) -> list[Option]:
    """Return equally fast options: those for a typical host first unless it is not counted, then those without a better
    rival, the simplest first."""
    large = [option for option in options if counts_host and needs_large_host(option)]
    dominated = [option for option in options if _is_dominated(option, options, large)]
    return sorted(options, key=lambda it: (it in large, it in dominated, SIMPLEST_FIRST.index(it.name)))


def _is_sounder(option: Option, best: Option) -> bool:
    """Whether an option that is hardly slower and needs no larger host has no release with wrong gradients, as the best
    one has."""
    is_near = speed_gap(option, best) > -_SOUND_TOLERANCE and needs_large_host(option) <= needs_large_host(best)
    return is_near and bool(wrong_releases(best)) and not wrong_releases(option)


def wrong_releases(option: Option) -> str:
    """Return the releases of DeepSpeed that compute wrong gradients with an option; empty if none is known."""
    return unsound_releases(option.name, option.request.accumulation, option.request.precision)


def _surest(options: Sequence[Option]) -> list[Option]:
    """Return the options, none of whose bounds fits, that exceed the limits least, in their order."""

    def excess(option: Option) -> float:
        box = option.request.box
        return timing.excess_bytes(option.memory, box, at_upper=True) / timing.usable_bytes(box)

    fitting = [option for option in options if option.fits]
    least = min(map(excess, fitting))
    return [option for option in fitting if excess(option) <= least + _SAME_MEMORY]


def _is_dominated(option: Option, rivals: Sequence[Option], large: Sequence[Option]) -> bool:
    """Whether a rival is both faster and notably smaller, and not of `large`, which need a large host, if the option is
    none of them."""
    peak = timing.device_bytes(option.memory)
    return any(
        speed_gap(rival, option) > SAME_SPEED and timing.device_bytes(rival.memory) < (1 - _SAME_MEMORY) * peak
        for rival in rivals
        if option in large or rival not in large
    )


def speed_gap(option: Option, base: Option) -> float:
    """Return how much faster an option is, as a fraction of the speed of `base`; negative if it is slower.

    Everything that is printed has the recommended option as its base, so that two lines state one figure.
    """
    return option.tokens_per_s / base.tokens_per_s - 1 if base.fits else 0.0


def speed_range(option: Option) -> str:
    """Return the ends of the speed of all ranks in brackets, or that it is not known within a factor of 2."""
    return ends_text(option.tokens_per_s, option.speed_ends, causes=timing.range_causes(option.request))


def speed_text(option: Option, base: Option) -> str:
    """Return `speed_gap` as text, such as "4.5% faster"."""
    gap = speed_gap(option, base)
    if abs(gap) < SAME_SPEED:
        return "as fast"
    digits = 0 if abs(gap) >= 0.1 else 1
    return f"{abs(gap):.{digits}%} {'faster' if gap > 0 else 'slower'}"


def reason_against(option: Option, simpler: Option) -> str:
    """Return what `simpler` has ahead of an option that is as fast: its host memory, or else the first difference that
    decides the registry's order of simplicity.
    """
    ours, theirs = simpler.request.strategy, option.request.strategy
    if needs_large_host(option) and not needs_large_host(simpler):
        sizes = (rounded(item.memory.host_peak.value / GIB) for item in (simpler, option))
        return f"needs less host memory ({' and not '.join(sizes)} GiB a node)"
    if wrong_releases(option) and not wrong_releases(simpler):
        return "has no release of DeepSpeed that computes wrong gradients"
    stages = [3 if strategy.is_fsdp else strategy.zero_stage or 0 for strategy in (ours, theirs)]
    if stages[0] < stages[1]:
        return "shards fewer parts of the model state" if option.request.box.ranks > 1 else "is of a lower stage"
    if ours.name not in WITH_REPLICAS and theirs.name in WITH_REPLICAS:
        return "has no replicas"
    if ours.deepspeed is None and theirs.deepspeed is not None:
        return "needs no DeepSpeed"
    if ours.offloads and not theirs.offloads:
        sizes = (rounded(timing.device_bytes(item.memory, at_upper=True) / GIB) for item in (simpler, option))
        return f"has a smaller 90 % bound ({' and not '.join(sizes)} GiB)"
    return "keeps more of the state in faster memory"


def needs_large_host(option: Option) -> bool:
    """Whether it exceeds the host memory of a typical node, or nearly fills the one that the request sets."""
    box = option.request.box
    most: float = USUAL_HOST_GIB_PER_GPU * box.gpus_per_node
    if box.host_gib_per_node is not None:
        most = _HOST_USED * box.host_gib_per_node
    return option.memory.host_peak.value > most * GIB


def loads_whole_in_fp32(request: Request) -> bool:
    """Whether each process is assumed to load the full model in fp32."""
    return not (request.strategy.zero_stage == 3 or request.pure or request.loads_16_bits or request.quantized)


def order_key(option: Option, at_upper_bound: bool) -> RankKey:
    """Return the key by which options are sorted before `rank_options`."""
    speed = option.time.tokens_per_s_per_gpu.value if option.time else 0.0
    return rank_key(option.memory, speed, option.request.box, at_upper_bound)


def candidates(question: AdviceRequest) -> list[str]:
    """Return the strategies to try; on one rank, where nothing is sharded, plain training and offloads.

    In 16 bits stage 1 is added there: it has 16-bit weights with fp32 masters as offloads have, while plain training
    keeps fp32 weights and autocasts. Without it an offload would be credited with that difference. With adapters plain
    training has 16-bit weights too.
    """
    if question.tensor_ranks > 1:
        # DeepSpeed's stage 0 as below.
        return [name for name in WITH_AUTOTP if name != "zero0" or question.precision == "fp32"]
    left_out = {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"} if question.box.ranks == 1 else {"single"}
    if question.precision != "fp32" and not question.shape.lora_rank:
        left_out -= {"zero1"}
    if question.precision != "fp32":
        # DeepSpeed's stage 0 takes a step with gradients of zero before training in bf16, and in fp16 divides gradients
        # by a loss scale that the loss was not multiplied by.
        left_out |= {"zero0"}
    if question.box.nodes == 1 or question.box.gpus_per_node == 1:
        # On one machine several replicas only need more memory.
        left_out |= set(WITH_REPLICAS)
    if question.optimizer != "adamw":
        # DeepSpeed raises an error there, or Accelerate replaces the optimizer.
        left_out |= {name for name in _SIMPLICITY if forces_cpu_adam(read_strategy(name))}
    if question.trainer.in_8_bits:
        # Sharded ones are not modelled.
        strategies = {name: read_strategy(name) for name in _SIMPLICITY}
        left_out |= {name for name, it in strategies.items() if it.is_fsdp or it.zero_stage == 3}
    if question.fsdp_version == 1:
        # Its replica groups are HYBRID_SHARD, for which accelerate_configs/ has no file.
        left_out |= {"hsdp"}
    if why_no_fsdp(question):
        left_out |= {name for name in _SIMPLICITY if read_strategy(name).is_fsdp}
    return [name for name in _SIMPLICITY if name not in left_out]


def why_no_fsdp(question: AdviceRequest) -> str | None:
    """Return the reason why FSDP cannot train the model with the optimizer; None if it can."""
    # https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633
    if question.fsdp_version == 2 and question.optimizer.endswith("8bit"):
        return "bitsandbytes' optimizers end with an illegal memory access on the tensors of version 2 (its issue 1633)"
    return question.shape.why_no_fsdp(question.fsdp_version)


class _Search:
    """The search for a strategy's best settings: bucket sizes, checkpointing and the largest micro-batch that fits."""

    def __init__(
        self, question: AdviceRequest, name: str, at_upper_bound: bool, *, replicas_sync_last: bool = False
    ) -> None:
        self.name, self._question, self._at_upper_bound = name, question, at_upper_bound
        self._strategy = question.find_strategy(name)
        shape = question.shape
        if question.tensor_ranks > 1:
            shape = question.configuration(self._strategy, 1, 1, checkpointing=False).shape
        strategies = tuned_variants(self._strategy, shape, question.box)
        requested = question.gradient_checkpointing
        checkpointing = (False, True) if requested is None else (requested,)
        # Of adapters the gradients are small.
        is_fsdp, is_requested = self._strategy.is_fsdp, question.trainer.sync_each_batch
        is_open = is_fsdp and not (question.shape.lora_rank or is_requested)
        syncs = (False, True) if is_open else (is_fsdp and is_requested,)
        if replicas_sync_last:
            syncs = (True,)
        variants = itertools.product(strategies, checkpointing, syncs)
        self._variants = [_Variant(question, *variant, at_upper_bound, replicas_sync_last) for variant in variants]

    @property
    def offloads(self) -> bool:
        return self._strategy.offloads

    @property
    def may_fit(self) -> bool:
        """Whether the least memory of a variant fits."""
        return any(variant.may_fit for variant in self._variants)

    def leave_out_hopeless_variants(self) -> None:
        """Leave out the variants of which no micro-batch fits."""
        self._variants = [variant for variant in self._variants if variant.may_fit]

    @functools.cached_property
    def most_tokens_per_s(self) -> float:
        """Throughput of all ranks that no variant exceeds at any micro-batch whose upper bound may fit."""
        return max(variant.most_speed for variant in self._variants) * self._question.box.ranks

    @functools.cached_property
    def option(self) -> Option:
        """The strategy with its best settings."""

        def evaluate(variant: _Variant) -> tuple[RankKey, Option]:
            option = variant.largest_option()
            return order_key(option, self._at_upper_bound), option

        largest = find_best(self._variants, lambda variant: variant.most_speed, evaluate)
        # At this micro-batch other settings may be better; `study predict --fitted` compares the same ones.
        request = fit_settings(dataclasses.replace(largest.request, strategy=self._strategy), self._at_upper_bound)
        return largest if request == largest.request else _option(self._question, request, predict_memory(request))


class _Variant:
    """A strategy with fitted settings, with or without checkpointing, at every micro-batch of a request.

    `syncs`: FSDP reduces gradients in each micro-batch; `replicas_sync_last`: over replicas in the last one alone.
    """

    def __init__(
        self,
        question: AdviceRequest,
        strategy: Strategy,
        checkpointing: bool,
        syncs: bool,
        at_upper_bound: bool,
        replicas_sync_last: bool = False,
    ) -> None:
        self._question, self._strategy, self._checkpointing = question, strategy, checkpointing
        self._syncs, self._at_upper_bound, self._replicas_sync_last = syncs, at_upper_bound, replicas_sync_last
        batch = question.global_batch
        samples = None if batch is None else max(1, round(batch / question.data_ranks))
        most = question.micro_batch or MAX_MICRO_BATCH
        largest = min(most, samples or most)
        self._samples = samples
        sizes = [size for size in range(1, largest + 1) if not samples or samples % size == 0]
        if question.reference_model:
            # DPO trains pairs.
            sizes = [size for size in sizes if size % 2 == 0] or sizes
        # With other hardware a rank may have fewer samples than the asked micro-batch.
        self._sizes = sizes[-1:] if question.micro_batch else sizes
        self._requests = dict[int, Request]()
        self._least_bytes = dict[tuple[int, bool], float]()

    def _request(self, micro_batch: int) -> Request:
        if micro_batch not in self._requests:
            self._requests[micro_batch] = self._make_request(micro_batch)
        return self._requests[micro_batch]

    def _make_request(self, micro_batch: int) -> Request:
        accumulation = self._samples // micro_batch if self._samples else 1
        request = self._question.configuration(self._strategy, micro_batch, accumulation, self._checkpointing)
        syncs = self._syncs and accumulation > 1
        return dataclasses.replace(
            request, sync_each_batch=syncs, replicas_sync_last=syncs and self._replicas_sync_last
        )

    def _may_fit(self, micro_batch: int, at_upper_end: bool) -> bool:
        box, key = self._question.box, (micro_batch, at_upper_end)
        if box.is_cpu_only:
            return True
        if key not in self._least_bytes:
            self._least_bytes[key] = least_device_bytes(self._request(micro_batch), at_upper_end)
        if self._least_bytes[key] > timing.usable_bytes(box):
            return False
        return timing.host_fits(estimate_host_peak(self._request(micro_batch)), box, at_upper_end)

    def _fits(self, micro_batch: int, at_upper_end: bool) -> bool:
        request, box = self._request(micro_batch), self._question.box
        return self._may_fit(micro_batch, at_upper_end) and timing.fits(predict_memory(request), box, at_upper_end)

    @functools.cached_property
    def may_fit(self) -> bool:
        """Whether the least memory of a micro-batch fits."""
        return any(self._may_fit(size, False) for size in (self._sizes[-1], self._sizes[0]))

    def _sizes_that_may_fit(self, at_upper_end: bool) -> list[int]:
        """Return the sizes whose least memory fits.

        It never falls with the size, but at the largest one, which may accumulate no gradients.
        """
        *smaller, largest = self._sizes
        count = bisect.bisect_left(smaller, True, key=lambda size: not self._may_fit(size, at_upper_end))
        return [*smaller[:count], *[largest] * self._may_fit(largest, at_upper_end)]

    @functools.cached_property
    def most_speed(self) -> float:
        """Tokens/s of one GPU that no micro-batch exceeds whose upper bound may fit; infinite without a global batch,
        since there are too many to try."""
        if self._samples is None:
            return math.inf
        possible = self._sizes_that_may_fit(self._at_upper_bound)
        return max((speed_if_it_fits(self._request(size)) for size in possible), default=0.0)

    def largest_option(self) -> Option:
        """Return the largest micro-batch whose bound fits, else the largest whose peak fits, else the smallest."""
        sizes, count = self._sizes, 0
        for at_upper_end in (True, False) if self._at_upper_bound else (False,):
            # A single micro-batch accumulates no gradients, so the largest size may fit even if smaller ones do not.
            # Among the others memory never falls with the size.
            if not count and self._fits(sizes[-1], at_upper_end):
                count = len(sizes)
            count = count or bisect.bisect_left(sizes[:-1], True, key=lambda size: not self._fits(size, at_upper_end))
        request = self._request(sizes[max(count - 1, 0)])
        return _option(self._question, request, predict_memory(request))


def _option(question: AdviceRequest, request: Request, memory: MemoryUse) -> Option:
    box = request.box
    unused_nvme = unswapped_kind(request)
    time = timing.predict_time(request, has_notes=False) if timing.fits(memory, box) and unused_nvme is None else None
    cost = None
    if question.price_per_gpu_hour is not None and time is not None:
        cost = question.price_per_gpu_hour / 3600 / time.tokens_per_s_per_gpu.value * 1e6
    reason = f"no part of the {unused_nvme} has the 1 MiB that is swapped" if unused_nvme else timing.why(memory, box)
    option = Option(request.strategy.name, request, memory, time, reason, cost)
    return dataclasses.replace(option, why=f"{reason} ({host_flag(option)})") if lacks_host_alone(option) else option


def lacks_host_alone(option: Option) -> bool:
    """Whether an option fits the GPUs, and not the given host memory of a node."""
    box = option.request.box
    if option.fits or box.host_gib_per_node is None or box.is_cpu_only or unswapped_kind(option.request) is not None:
        return False
    return timing.fits(option.memory, dataclasses.replace(box, host_gib_per_node=None))


def host_flag(option: Option) -> str:
    """Return the flag of a host memory, in GiB or tenths of TB, in which the upper bound of an option's fits, and which
    its need does not nearly fill."""
    peak = option.memory.host_peak
    needed = max(peak.value / _HOST_USED, peak.high or 0.0)
    size = f"{math.ceil(needed / GIB)}" if needed <= 1024 * GIB else f"{math.ceil(needed / 1e11) / 10:g}TB"
    return f"--host_memory {size}"


def _large_host_line(advice: Advice) -> Iterator[str]:
    """Yield the option that only its host memory keeps from being recommended, if the request sets no host memory."""
    best, order = advice.best, functools.partial(order_key, at_upper_bound=True)
    if best is None or not any(map(needs_large_host, advice.fitting)):
        return
    first = rank_options(sorted(advice.options, key=order), counts_host=False)[0]
    if first.name != best.name:
        usual = USUAL_HOST_GIB_PER_GPU * first.request.box.gpus_per_node
        needed = rounded(first.memory.host_peak.value / GIB)
        how = ", if each process loads the full model in fp32" * loads_whole_in_fp32(first.request)
        yield (
            f"with {host_flag(first)} it would be {first.name}, {speed_text(first, best)}: it needs {needed} GiB of a"
            f" node's host memory {timing.when(first.memory)}{how}; a usual host has {usual:,}"
        )


# Confidence and sensitivity of a recommendation.


def explain_best(advice: Advice) -> str:
    """Return the reason for the recommendation, with its free memory."""
    best = advice.best
    if best is None:
        return _why_nothing_fits(advice)
    memory = "; ".join([_free_memory(best), *unchecked_needs(best)])
    return f"{_why_best(advice, best)}; {memory}"


def _free_memory(option: Option) -> str:
    """Return the fraction of memory that an option leaves, at its 90 % bound if it has one."""
    memory, box = option.memory, option.request.box
    if (memory.process_peak or memory.peak_reserved).high is None:
        return f"{timing.free_fraction(memory, box):.0%} of the memory is left, but peaks are not validated here"
    if not option.is_safe:
        return "it may not fit: its 90 % bound does not"
    return f"its 90 % bound leaves {timing.free_fraction(memory, box, True):.0%} of the memory"


def _why_best(advice: Advice, best: Option) -> str:
    """Return how the recommendation compares with the option that comes closest."""
    runner_up, offloads = advice.runner_up, best.request.strategy.offloads
    if runner_up is None:
        return "it is the only strategy that fits"
    if best.is_safe and not runner_up.is_safe:
        return "it is the only strategy whose 90 % bound fits"
    if runner_up.request.strategy.offloads and not offloads and speed_gap(runner_up, best) > 0:
        slowdown = timing.max_offload_slowdown(best.request.correction)
        slowest = f"measured offload steps took up to {slowdown:.1f} times their prediction"
        return f"no offload: {runner_up.name} is predicted {speed_text(runner_up, best)}, but {slowest}"
    rivals = [
        option
        for option in advice.fitting
        if option.request.strategy.offloads == offloads and (option.is_safe or not best.is_safe)
    ]
    fastest = max(rivals, key=lambda option: option.tokens_per_s)
    rival = runner_up if fastest is best else fastest
    gap, text = speed_gap(rival, best), speed_text(rival, best)
    if gap > 0 and not best.is_safe and _bound_bytes(rival) > _bound_bytes(best):
        return f"no 90 % bound fits, and its is the least; that of {rival.name}, {text}, is {_bound_text(rival)} GiB"
    if abs(gap) < SAME_SPEED:
        return f"as fast as {rival.name}, but {reason_against(rival, best)}"
    if gap > 0:
        is_sounder = wrong_releases(rival) and not wrong_releases(best)
        how = "safer" if is_sounder else "simpler"
        return f"{rival.name} is {text}, but {best.name} is {how} ({reason_against(rival, best)})"
    if -gap <= SPEED_TOLERANCE:
        return f"the fastest that fits, {rival.name} is {text}"
    return f"the next, {runner_up.name}, is {text}, {_certainty_of_gap(best, runner_up, -gap)}"


def _bound_bytes(option: Option) -> float:
    return timing.device_bytes(option.memory, at_upper=True)


def _bound_text(option: Option) -> str:
    return rounded(_bound_bytes(option) / GIB)


def _certainty_of_gap(best: Option, runner_up: Option, gap: float) -> str:
    """Return whether a difference in speed exceeds the error of a step time."""
    step, next_time = best.time and best.time.step_s, runner_up.time
    if not (step and step.low and step.high and next_time and next_time.step_s.high):
        return "but step times are not validated here"
    # Half the width of the interval.
    error = (step.high - step.low) / 2 / step.value
    where = "more than" if gap > error else "within"
    return f"{where} the error of a step time ({error:.0%})"


def _why_nothing_fits(advice: Advice) -> str:
    least = min(advice.options, key=lambda option: timing.device_bytes(option.memory))
    if least.memory.missing:
        return f"under {least.name}, which needs least: {least.why}"
    request, parts, box = least.request, least.memory.device_parts, least.request.box
    if box.host_gib_per_node is not None and not box.is_cpu_only:
        any_host = dataclasses.replace(box, host_gib_per_node=None)
        short = [option for option in advice.options if timing.excess_bytes(option.memory, any_host) <= 0]
        if short:
            nearest = min(short, key=lambda option: option.memory.host_peak.value)
            needed = f"{rounded(nearest.memory.host_peak.value / GIB)} GiB, the least of all that fit on the GPUs"
            return f"nothing fits this host: {nearest.name} needs {needed} ({host_flag(nearest)})"
    # Data parallelism shards model state, but not the activations of one sample.
    undivided = {name: parts[name] for name in _PARTS_OF_A_SAMPLE if parts[name]}
    if sum(undivided.values()) <= (usable := timing.usable_bytes(box)):
        if least.memory.loading > usable:
            return f"nothing fits: under {least.name}, which needs least, {least.why}"
        return "nothing fits: use more GPUs, fewer tokens per sample, or a smaller model"
    breakdown = ", ".join(f"{name} {rounded(size / GIB)}" for name, size in undivided.items())
    helps = ["fewer tokens per sample"]
    if not request.gradient_checkpointing:
        helps.append("gradient checkpointing")
    if parts["logits"] and request.loss_kernel == "transformers":
        helps.append("a chunked loss (--chunked_loss)")
    needed = rounded(sum(undivided.values()) / GIB)
    return (
        f"nothing fits, and no number of GPUs helps: one sample needs {needed} GiB on its"
        f" rank ({breakdown}) of {rounded(usable / GIB)}; use {', '.join(helps)}, or split its tokens over ranks"
        " (strategies cp and ulysses_zero3)"
    )


def unchecked_needs(option: Option) -> Iterator[str]:
    """Yield the requirements of an offload that could not be checked: host memory and NVMe bandwidth."""
    box, strategy = option.request.box, option.request.strategy
    needed = rounded(option.memory.host_peak.value / GIB)
    if strategy.offloads and box.host_gib_per_node is None:
        yield f"its {needed} GiB of host memory are not checked (--host_memory GIB)"
    if box.host_gib_per_node is not None and needs_large_host(option) and not box.is_cpu_only:
        yield f"its {needed} GiB of host memory leave little of the {timing.host_limit(box)} that are given"
    if strategy.uses_nvme and not box.is_nvme_given:
        read, write = box.nvme_read_gb_per_s, box.nvme_write_gb_per_s
        yield f"NVMe is assumed to read {read:g} and write {write:g} GB/s (--nvme_gb_per_s){_slow_disk_text(option)}"


def _slow_disk_text(option: Option) -> str:
    """Return the speed of an option with NVMe on a slow disk, to put after its assumed rates; empty without a time."""
    if option.time is None:
        return ""
    step_s = option.time.step_s.value
    speed = rounded(option.tokens_per_s * step_s / (step_s + timing.slow_disk_s(option.request)))
    read, write = timing.SLOW_DISK_GB_PER_S
    return (
        f", and a disk with {read} and {write} makes it {speed} tokens/s: study doctor --nvme_path DIR measures yours"
    )


def explain_slowdown(option: Option, best: Option) -> str:
    """Return why `option` is slower than `best`, compared at the micro-batch and checkpointing of `best`."""
    ours, box = best.request, best.request.box
    same = _at_settings(option.request, ours)
    if not timing.fits(predict_memory(same), box, at_upper=best.is_safe):
        return f": with {workload_text(ours)}, the settings of {best.name}, it does not fit"
    assert best.time is not None
    times = timing.predict_time(same, has_notes=False), best.time
    part = max(_PARTS_OF_A_STEP, key=lambda name: times[0].parts[name] - times[1].parts[name])
    fraction, best_fraction = (f"{time.parts[part] / time.step_s.value:.0%}" for time in times)
    return (
        f": with the settings of {best.name}, {_PARTS_OF_A_STEP[part]} takes {fraction} of its step, and"
        f" {best_fraction} of {best.name}'s"
    )


def roomier_option(advice: Advice) -> Option | None:
    """Return the fastest option whose bound leaves `_ROOM`, if that of the recommendation leaves less: another
    strategy, or half the micro-batch. None if there is none.

    The recommendation stays: its bound has the errors of predictions in it, but no memory that a program adds.
    """
    best = advice.best
    if best is None or not best.is_safe or _room(best) >= _ROOM:
        return None
    offloads, request = best.request.strategy.offloads, best.request
    candidates = [option for option in advice.fitting if option.request.strategy.offloads == offloads]
    if request.micro_batch % 2 == 0:
        halved = dataclasses.replace(
            request, micro_batch=request.micro_batch // 2, accumulation=2 * request.accumulation
        )
        candidates.append(_option(advice.question, halved, predict_memory(halved)))
    roomy = [option for option in candidates if option.fits and _room(option) >= _ROOM]
    return max(roomy, key=lambda option: option.tokens_per_s, default=None)


def _room(option: Option) -> float:
    """Return the fraction of memory that the 90 % bound of an option leaves."""
    return timing.free_fraction(option.memory, option.request.box, at_upper=True)


def roomier_text(option: Option, best: Option) -> str:
    """Return the room and the price of a roomier option."""
    gap = speed_gap(option, best)
    cost = speed_text(option, best)
    if -gap > SPEED_TOLERANCE:
        cost += f", {_certainty_of_gap(best, option, -gap)}"
    return f"its 90 % bound leaves {_room(option):.0%} of the memory; {cost}"


def faster_riskier_option(advice: Advice) -> Option | None:
    """Return a faster option whose peak fits, but not its upper bound; None if there is none."""
    best = advice.best
    if best is None or not best.is_safe:
        return None
    enough = (1 + _WORTH_SAYING) * best.tokens_per_s
    names = _near(advice, advice.question)
    risky = advise_without_losers(advice.question, names, at_upper_bound=False, worth=enough)
    faster = None if risky is None else risky.best
    return faster if faster is not None and faster.tokens_per_s >= enough else None


def option_of_late_replicas(advice: Advice) -> Option | None:
    """Return hsdp in which each replica group reduces gradients in every micro-batch, and the groups add them up in the
    last one alone, if its bound fits and it is faster; None if not.

    It is not recommended: Accelerate has no setting for it, so that the program calls set_requires_all_reduce.
    """
    question, best = advice.question, advice.best
    if best is None or "hsdp" not in candidates(question) or question.shape.lora_rank:
        return None
    search, enough = _Search(question, "hsdp", True, replicas_sync_last=True), (1 + _WORTH_SAYING) * best.tokens_per_s
    if not search.may_fit or search.most_tokens_per_s < enough:
        return None
    option = search.option
    is_faster = option.is_safe and option.fits and option.tokens_per_s >= enough
    return option if is_faster and option.request.replicas_sync_last else None


def plain_option_in_16_bits(advice: Advice) -> Option | None:
    """Return plain training of a model that is loaded in bf16 if it changes the answer: its bound fits, and it is about
    as fast as the recommendation, much faster than with fp32 weights, or with those it does not certainly fit. None if
    nothing else fits.

    It is not recommended: weights and moments have 16 bits, and no fp32 masters keep small updates.
    """
    question, best, name = advice.question, advice.best, _plain_name(advice.question)
    if best is None or question.tensor_ranks > 1 or not _can_train_in_16_bits(question):
        return None
    with_fp32 = [option.tokens_per_s for option in advice.options if option.name == name and option.is_safe]
    enough = _FAR_BEHIND * best.tokens_per_s
    if with_fp32:
        as_fast = (1 - SPEED_TOLERANCE) * best.tokens_per_s
        much_faster = _MUCH_FASTER * with_fp32[0]
        enough = max(enough, (1 + _WORTH_SAYING) * with_fp32[0], min(as_fast, much_faster))
    search = _Search(dataclasses.replace(question, plain_in_16_bits=True), name, at_upper_bound=True)
    if not search.may_fit:
        return None
    search.leave_out_hopeless_variants()
    if search.most_tokens_per_s < enough:
        return None
    option = search.option
    return option if option.fits and option.is_safe and option.tokens_per_s >= enough else None


def _can_train_in_16_bits(question: AdviceRequest) -> bool:
    """Whether plain training of 16-bit weights is another option.

    fp16 needs fp32 weights to scale its loss, a model with adapters has 16-bit weights already, and a measured run of
    plain training corrects no other weights.
    """
    measured = question.correction.measured_step_factors if question.correction else ()
    is_measured = any(configuration.strategy == _plain_name(question) for configuration, _ in measured)
    return question.precision == "bf16" and not question.shape.lora_rank and not is_measured


def _plain_name(question: AdviceRequest) -> str:
    return "single" if question.box.ranks == 1 else "ddp"


def _near(advice: Advice, question: AdviceRequest) -> list[str]:
    """Return the candidates without those far behind the best option, which would not win a what-if question."""
    slowest = 0.0 if advice.best is None else _FAR_BEHIND * advice.best.tokens_per_s
    slow = {option.name for option in advice.options if option.is_safe and option.tokens_per_s <= slowest}
    return [name for name in candidates(question) if name not in slow]


def sensitivity_lines(advice: Advice) -> Iterator[str]:
    """Yield what-if lines: changes of hardware or sequence length that change the recommendation.

    If nothing fits, also a chunked loss, adapters, and the least change of tokens or machines that makes something fit.
    """
    question, best = advice.question, advice.best
    if question.tensor_ranks > 1:
        yield _line_without_groups(question, best)
        return
    yield from _large_host_line(advice)
    if best is not None:
        if best.is_safe:
            yield from _chunked_loss_line(question, best)
        yield from _larger_batch_line(question, best)
    if question.box.nodes > 1:
        worth = (1 - SPEED_TOLERANCE) * best.tokens_per_s if best is not None and best.is_safe else 0.0
        one_node = _with_box(question, nodes=1)
        on_one_node = advise_without_losers(one_node, candidates(one_node), worth=worth)
        alone = None if on_one_node is None else on_one_node.best
        if alone is not None and (best is None or _is_as_good(alone, best)):
            times = "enough" if best is None else f"{alone.tokens_per_s / best.tokens_per_s:.1f} x as fast"
            yield "; ".join([f"one of these machines alone is {times}, under {alone.name}", *unchecked_needs(alone)])
    is_twice_enough = False
    for label, scenario in _scenarios(question).items():
        changed = advise_without_losers(scenario, _near(advice, scenario), None if best is None else best.name)
        if changed is not None and (change := _changed_advice(best, changed)) is not None:
            without = _without_chunked_loss(scenario) if changed.best is None else ""
            yield f"with {label} {change}{without}"
            is_twice_enough |= scenario.box.nodes == 2 * question.box.nodes
    if best is None:
        yield from _fitting_lines(question, is_twice_enough)


def _line_without_groups(question: AdviceRequest, best: Option | None) -> str:
    """Return the recommendation without tensor parallelism, for the same samples per step if all ranks have some."""
    plain = advise(dataclasses.replace(question, tensor_ranks=1)).best
    if plain is None:
        return "without --tensor_parallel nothing fits"
    peak = f"{rounded(timing.device_bytes(plain.memory) / GIB)} GiB, 90 % bound {_bound_text(plain)}"
    speed = f"{rounded(plain.tokens_per_s)} tokens/s"
    if best is not None:
        speed += f", {speed_text(plain, best)}"
    return f"without --tensor_parallel {_name_with_loading(plain)} ({workload_text(plain.request)}): {peak}, {speed}"


def safer_lines(advice: Advice) -> Iterator[str]:
    """Yield a change of the program with which a 90 % bound fits, if that of the recommendation does not: a chunked
    loss, else fewer tokens per sample."""
    question, best, scenarios = advice.question, advice.best, dict[str, AdviceRequest]()
    if best is None or best.is_safe:
        return
    if question.trainer.loss_kernel == "transformers" and question.shape.has_word_logits:
        scenarios["--chunked_loss"] = _with_chunked_loss(question)
    for label, scenario in (scenarios | _with_fewer_tokens(question)).items():
        changed = advise_without_losers(scenario, candidates(scenario))
        option = None if changed is None else changed.best
        if option is not None and option.is_safe:
            peak, usable = (
                rounded(size / GIB) for size in (timing.device_bytes(option.memory), timing.usable_bytes(question.box))
            )
            figures = f"{peak} of {usable} GiB (90 % bound {_bound_text(option)}), {speed_text(option, best)}"
            settings = f"{_name_with_loading(option)} ({workload_text(option.request)})"
            yield f"With {label} a 90 % bound fits: {settings}, {figures}"
            return


def _larger_batch_line(question: AdviceRequest, best: Option) -> Iterator[str]:
    """Yield the gain of more samples per step if the default gives each rank few of them."""
    batch, ranks = question.global_batch, question.box.ranks
    if batch is None or not question.is_default_batch or batch > _FEW_SAMPLES * ranks:
        return
    larger = dataclasses.replace(question, global_batch=_LARGER_BATCH * batch)
    worth = (1 + _WORTH_A_BATCH) * best.tokens_per_s
    changed = advise_without_losers(larger, candidates(larger), worth=worth)
    option = None if changed is None else changed.best
    if option is not None and option.tokens_per_s >= worth and (option.is_safe or not best.is_safe):
        settings = workload_text(option.request)
        samples = f"with {larger.global_batch} samples per step (--global_batch_size)"
        yield f"{samples} {_name_with_loading(option)} ({settings}), {speed_text(option, best)}"


def _with_chunked_loss(question: AdviceRequest) -> AdviceRequest:
    trainer = dataclasses.replace(question.trainer, loss_kernel="liger", keeps_outputs=False)
    return dataclasses.replace(question, trainer=trainer)


def _without_chunked_loss(scenario: AdviceRequest) -> str:
    """Return the strategy that fits with a chunked loss, of a request that nothing fits; empty without one."""
    if scenario.trainer.loss_kernel != "transformers":
        return ""
    chunked = _with_chunked_loss(scenario)
    changed = advise_without_losers(chunked, candidates(chunked))
    if changed is None or changed.best is None:
        return ""
    return f" without --chunked_loss, and {changed.best.name} with it"


def _chunked_loss_line(question: AdviceRequest, best: Option) -> Iterator[str]:
    """Yield the higher speed of a chunked loss if the logits take a large part of the memory."""
    large = _LARGE_LOGITS * timing.usable_bytes(question.box)
    if question.trainer.loss_kernel != "transformers" or best.memory.device_parts["logits"] < large:
        return
    chunked = _with_chunked_loss(question)
    worth = (1 + _WORTH_SAYING) * best.tokens_per_s
    changed = advise_without_losers(chunked, candidates(chunked), worth=worth)
    option = None if changed is None else changed.best
    if option is not None and option.is_safe and option.tokens_per_s >= worth:
        peak = rounded(timing.device_bytes(option.memory) / GIB)
        figures = f"{peak} GiB, 90 % bound {_bound_text(option)}, {speed_text(option, best)}"
        yield f"with --chunked_loss {_name_with_loading(option)} ({workload_text(option.request)}), {figures}"


def _fitting_lines(question: AdviceRequest, is_twice_enough: bool) -> Iterator[str]:
    """Yield the changes of a request that nothing fits with which something does.

    `is_twice_enough`: something fits twice the machines, and a line with it is printed already.
    """
    scenarios = dict[str, AdviceRequest]()
    if question.trainer.loss_kernel == "transformers":
        scenarios["--chunked_loss"] = _with_chunked_loss(question)
    if _can_train_in_16_bits(question):
        scenarios[IN_16_BITS] = dataclasses.replace(question, plain_in_16_bits=True)
    # Not every class has layers that peft gives adapters by default.
    with contextlib.suppress(UserError):
        if question.shape.lora_rank is None:
            scenarios["LoRA"] = _with_adapters(question, "none")
            scenarios["QLoRA (4-bit weights)"] = dataclasses.replace(_with_adapters(question, "4bit"), quantized=True)
    for label, scenario in scenarios.items():
        yield from _fitting_line(label, scenario)
    more = dict[str, AdviceRequest]()
    for times in _MACHINES:
        label = f"{times} such machines" if question.box.nodes == 1 else f"{times} x the nodes"
        more[label] = _resized(question, nodes=times * question.box.nodes)
    yield from _smallest_change(_with_fewer_tokens(question))
    if is_twice_enough:
        return
    label = [*more][-1]
    # For a model that is far too large not even the most machines are enough, which one question shows.
    if [*_fitting_line(label, more[label])]:
        yield from _smallest_change(more)


def _with_fewer_tokens(question: AdviceRequest) -> dict[str, AdviceRequest]:
    """Return requests of half the tokens per sample, of a quarter, and so on, by the words for their change."""
    shorter = dict[str, AdviceRequest]()
    length = question.sequence_length // 2
    while length >= _FEWEST_TOKENS:
        shorter[f"{length} tokens per sample"] = dataclasses.replace(question, sequence_length=length)
        length //= 2
    return shorter


def _smallest_change(scenarios: dict[str, AdviceRequest]) -> Iterator[str]:
    """Yield the line of the first of ever larger changes that is enough."""
    lines = (line for label, scenario in scenarios.items() for line in _fitting_line(label, scenario))
    yield from itertools.islice(lines, 1)


def _fitting_line(label: str, scenario: AdviceRequest) -> Iterator[str]:
    changed = advise_without_losers(scenario, candidates(scenario))
    if changed is not None and changed.best is not None:
        yield f"with {label} it would be {_name_with_doubt(changed.best)}"


def _name_with_loading(option: Option) -> str:
    """Return the name of an option, with the flag that it needs to be loaded."""
    is_added = option.request.loads_on_host
    return f"{option.name} (--quantized_on_host)" if is_added else option.name


def _name_with_doubt(option: Option) -> str:
    """Return the name of an option, and whether its bound does not fit."""
    doubt = "" if option.is_safe else f", which may not fit (90 % bound {_bound_text(option)} GiB)"
    return f"{_name_with_loading(option)}{doubt}"


def _with_adapters(question: AdviceRequest, quantization: Quantization) -> AdviceRequest:
    """Return a request that trains LoRA adapters with peft's defaults."""
    adapters = Workload(peft="lora", quantization=quantization)
    return dataclasses.replace(question, shape=adapters.adapt(question.shape))


def adapters_lines(advice: Advice) -> Iterator[str]:
    """Yield what adapters need without an offload, if the recommended full training has one and adapters that certainly
    fit have none."""
    question, best, texts = advice.question, advice.best, list[str]()
    if best is None or not best.request.strategy.offloads or question.shape.lora_rank is not None:
        return
    for flags, quantization in _ADAPTER_FLAGS.items():
        # Not every class has layers that peft gives adapters by default.
        with contextlib.suppress(UserError):
            scenario = dataclasses.replace(_with_adapters(question, quantization), quantized=quantization == "4bit")
            names = [name for name in candidates(scenario) if not read_strategy(name).offloads]
            adapted = advise_without_losers(scenario, names)
            option = adapted.best if adapted is not None else None
            if option is not None and option.is_safe:
                memory = option.memory
                peak, bound = (rounded(timing.device_bytes(memory, at_upper=upper) / GIB) for upper in (False, True))
                figures = f"{peak} GiB, 90 % bound {bound}, {rounded(option.tokens_per_s)} tokens/s"
                figures += f" with {workload_text(option.request)}"
                on_host = " --quantized_on_host" * option.request.loads_on_host
                texts.append(f"{flags}{on_host} under {option.name}: {figures}")
    if texts:
        yield f"adapters need no offload: {'; '.join(texts)}"


def what_if_lines(question: AdviceRequest) -> Iterator[str]:
    """Yield the recommendation, its peak and its speed with one more GPU or node, or with those of one more
    tensor-parallel group, and with half the tokens."""
    box, scenarios = question.box, dict[str, AdviceRequest]()
    if box.nodes > 1:
        more = max(1, question.tensor_ranks // box.gpus_per_node)
        scenarios[_more(more, "node")] = _resized(question, nodes=box.nodes + more)
    else:
        more = question.tensor_ranks
        scenarios[_more(more, "GPU")] = _resized(question, gpus_per_node=box.gpus_per_node + more)
    if (half := question.sequence_length // 2) >= _FEWEST_TOKENS:
        scenarios[f"{half} tokens per sample"] = dataclasses.replace(question, sequence_length=half)
    for label, scenario in scenarios.items():
        best = advise(scenario).best
        if best is None:
            yield f"with {label} nothing fits"
        else:
            peak, speed = rounded(timing.device_bytes(best.memory) / GIB), rounded(best.tokens_per_s)
            samples = f", {scenario.global_batch} samples per step" * (scenario.global_batch != question.global_batch)
            figures = f"{peak} GiB, 90 % bound {_bound_text(best)}, {speed} tokens/s{speed_range(best)}"
            yield f"with {label}{samples}: {_name_with_loading(best)} ({workload_text(best.request)}), {figures}"


def _more(count: int, unit: str) -> str:
    return f"one more {unit}" if count == 1 else f"{count} more {unit}s"


def offload_line(advice: Advice) -> str | None:
    """Return the effect of the optimizer on the host: memory at the recommended settings, speed at the best ones.

    None if nothing fits, or if the recommendation has an offload itself.
    """
    best = advice.best
    if best is None or best.request.strategy.offloads:
        return None
    options = [option for option in advice.options if _has_only_optimizer_on_host(option.request.strategy)]
    if not options:
        return None
    option = options[0]
    start = f"with the optimizer on the host ({option.name})"
    if not option.fits:
        return f"{start} it would not fit: {option.why}"
    memory = predict_memory(_at_settings(option.request, best.request))
    peak, usual_peak = (rounded(timing.device_bytes(item) / GIB) for item in (memory, best.memory))
    bound = rounded(timing.device_bytes(memory, at_upper=True) / GIB)
    host, usual_host = (rounded(item.host_peak.value / GIB) for item in (memory, best.memory))
    speed, ends = option.tokens_per_s / best.tokens_per_s, option.speed_ends
    relative_ends = ends and (ends[0] / best.tokens_per_s, ends[1] / best.tokens_per_s)
    return (
        f"{start} the same micro-batch takes {peak} GiB of a GPU (90 % bound {bound}) instead of {usual_peak}"
        f" ({_bound_text(best)}), and {host} GiB of a node's host memory instead of {usual_host}; with"
        f" {workload_text(option.request)} it has {speed:.0%} of the speed"
        f"{ends_text(speed, relative_ends, lambda end: f'{end:.0%}')}"
    )


def _at_settings(request: Request, settings: Request) -> Request:
    """Return a request with the micro-batch, the accumulation and the checkpointing of another one."""
    return dataclasses.replace(
        request,
        micro_batch=settings.micro_batch,
        accumulation=settings.accumulation,
        gradient_checkpointing=settings.gradient_checkpointing,
    )


def _has_only_optimizer_on_host(strategy: Strategy) -> bool:
    return strategy.offload_device("optimizer") == "cpu" and strategy.offload_device("param") is None


def _with_box(question: AdviceRequest, **changes: Any) -> AdviceRequest:
    return dataclasses.replace(question, box=dataclasses.replace(question.box, **changes))


def _resized(question: AdviceRequest, **changes: Any) -> AdviceRequest:
    """Return a request on more hardware, with as many more samples per step as its ranks need to share them."""
    changed = _with_box(question, **changes)
    batch, ranks = question.global_batch, changed.box.ranks
    return dataclasses.replace(changed, global_batch=batch and -(-batch // ranks) * ranks)


def _scenarios(question: AdviceRequest) -> dict[str, AdviceRequest]:
    """Return the changed requests by the words for their change."""
    box = question.box
    if box.ranks == 1:
        scenarios = {"a second GPU": _with_box(question, gpus_per_node=2)}
    else:
        more = "twice the nodes" if box.nodes > 1 else "a second such machine"
        scenarios = {more: _with_box(question, nodes=2 * box.nodes)}
    if box.nodes > 1:
        scenarios["an eighth of the network"] = _with_box(question, network_gb_per_s=box.network_gb_per_s / 8)
    longer, positions = 2 * question.sequence_length, question.shape.positions
    if positions is None or longer <= positions or not question.shape.has_position_table:
        scenarios[f"{longer} tokens per sample"] = dataclasses.replace(question, sequence_length=longer)
    if box.gpus_per_node > 1:
        scenarios["half the GPUs"] = _with_box(question, gpus_per_node=box.gpus_per_node // 2)
    return scenarios


def _changed_advice(best: Option | None, changed: Advice) -> str | None:
    """Return the effect of changed advice on the recommendation; None if it stays the same."""
    first, still = changed.best, [item for item in changed.options if best and item.name == best.name]
    if first is None:
        return None if best is None else "nothing would fit"
    if first in still:
        return "it may not fit" if best and best.is_safe and not first.is_safe else None
    least = (1 - _WORTH_SAYING) * first.tokens_per_s
    is_nearly_as_fast = any(item.is_safe and item.tokens_per_s >= least for item in still)
    return None if is_nearly_as_fast else f"it would be {_name_with_doubt(first)}"


def _is_as_good(alone: Option, best: Option) -> bool:
    """Whether fewer machines are as fast; as in `ranked`, an offload must be far ahead."""
    is_offload = alone.request.strategy.offloads and not best.request.strategy.offloads
    least = timing.max_offload_slowdown(best.request.correction) if is_offload else 1 - SPEED_TOLERANCE
    return (alone.is_safe or not best.is_safe) and alone.tokens_per_s >= least * best.tokens_per_s
