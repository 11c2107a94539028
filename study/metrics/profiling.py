"""Profile the last steps of a run with torch's profiler, and summarize their time in a small document.

On a GPU the kernels are counted; in the gaps between them the GPU waits for the host. On a CPU the operators are
counted by their self time; in the gaps between them Python runs.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, and not declared so
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig
from study.metrics.clock import warmup_steps
from study.records.schema import PROFILE_CATEGORIES

# A kernel's category is that of the operator that launched it or, in compiled code without operators, of its name.
# All work inside one of these regions has the region's category.
_REGIONS = (
    ("collectives", re.compile(r"^(c10d|_c10d_functional(_autograd)?)::|^record_param_comms$|^nccl|^gloo:")),
    ("optimizer", re.compile(r"^Optimizer\.step#|^aten::_fused_(adam|adamw|adagrad|sgd)_?$")),
    ("attention", re.compile(r"scaled_dot_product|ScaledDotProduct|(flash|efficient|flex)_attention")),
)
_OPERATOR = re.compile(r"^aten::_?(?:foreach_)?(\w+?)_?$")
_COPY_INSIDE_FSDP = re.compile(r"^fsdp::(chunk_cat|split_with_sizes_copy|all_gather_copy_in|copy_)")
_BACKWARD = re.compile(r"_backward(_data|_input|_weight)?$")
_OPERATORS = {
    "matmul": {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "linear",
        "matmul",
        "addmm_activation",
        "scaled_mm",
        "mkldnn_linear",
        "convolution",
        "conv1d",
        "conv2d",
        "cudnn_convolution",
        "mkldnn_convolution",
    },
    "copies": {
        "copy",
        "to",
        "to_copy",
        "clone",
        "contiguous",
        "cat",
        "stack",
        "pin_memory",
        "zero",
        "zeros",
        "zeros_like",
        "fill",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "repeat",
        "split_with_sizes_copy",
        "chunk_cat",
        "constant_pad_nd",
        "arange",
    },
    "elementwise": {
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "neg",
        "abs",
        "sign",
        "reciprocal",
        "pow",
        "sqrt",
        "rsqrt",
        "exp",
        "log",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "tanh",
        "erf",
        "sigmoid",
        "relu",
        "gelu",
        "silu",
        "elu",
        "threshold",
        "softplus",
        "lerp",
        "addcmul",
        "addcdiv",
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "where",
        "masked_fill",
        "eq",
        "ne",
        "lt",
        "gt",
        "le",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "isnan",
        "isinf",
        "isfinite",
        "floor_divide",
        "remainder",
        "dropout",
        "native_dropout",
        "bernoulli",
        "tril",
        "triu",
        "softmax",
        "log_softmax",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "fused_rms_norm",
        "batch_norm",
        "native_batch_norm",
        "group_norm",
        "native_group_norm",
        "sum",
        "mean",
        "var",
        "var_mean",
        "std",
        "prod",
        "amax",
        "amin",
        "max",
        "min",
        "any",
        "all",
        "argmax",
        "argmin",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "cumsum",
        "nll_loss",
        "nll_loss_forward",
        "nll_loss_nd",
        "cross_entropy_loss",
        "mse_loss",
        "sgn",
        "masked_scale",
        "amp_update_scale",
        "amp_foreach_non_finite_check_and_unscale",
    },
}
_KIND_OF_OPERATOR = {name: kind for kind, names in _OPERATORS.items() for name in names}

# Inductor names a kernel after its fused operators; a kernel that only moves data is a copy.
_MOVES = (
    "unsafe_view|_?to_copy|clone|copy|cat|stack|view|transpose|permute|expand|unsqueeze|squeeze|slice_scatter|slice|"
    "select|constant_pad_nd|zeros_like|zeros|ones|full_like|full|new_zeros|empty_like|empty|t"
)
# The first match in a kernel's name decides.
_KERNELS = (
    ("copies", re.compile(rf"^triton_(poi|for)_fused(_+({_MOVES}))+(_\d+)*$")),
    ("attention", re.compile(r"flash|fmha|sdpa|flex_attention|efficient_attention|AttentionKernel", re.I)),
    ("matmul", re.compile(r"^triton_(mm|bmm|tem_fused_\w*(mm|bmm|addmm|baddbmm))")),
    ("elementwise", re.compile(r"^triton_(poi|per|red|for|spl)(_|\d)")),
    ("optimizer", re.compile(r"Adam\w*Functor|FusedSgdMathFunctor")),
    ("copies", re.compile(r"^(Memcpy|Memset)|copy_kernel|CatArrayBatchedCopy|FillFunctor|chunk_cat|split_with_sizes")),
    (
        "matmul",
        re.compile(
            r"gemm|^nvjet|cublas|cutlass\w*::(Kernel2?|device_kernel)\b|splitK|gemv|xmma|\bdot_kernel|wgrad|dgrad", re.I
        ),
    ),
    (
        "elementwise",
        re.compile(
            r"elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel|layer_norm|LayerNorm|GammaBeta|RMSNorm|rms_norm|"
            r"[sS]oft_?[mM]ax|dropout|nll_loss|RowwiseMoments|ComputeGradInput|ComputeInternalGradients|triu_tril"
        ),
    ),
)


@functools.lru_cache(maxsize=4096)
def operator_category(name: str) -> str | None:
    """Return the category of an ATen operator or of a copy inside FSDP; None for other names."""
    if _COPY_INSIDE_FSDP.match(name):
        return "copies"
    if (match := _OPERATOR.match(name)) is None:
        return None
    plain = match[1].removesuffix("_")
    return _KIND_OF_OPERATOR.get(plain) or _KIND_OF_OPERATOR.get(_BACKWARD.sub("", plain))


@functools.lru_cache(maxsize=4096)
def first_match(patterns: tuple[tuple[str, re.Pattern[str]], ...], name: str) -> str | None:
    """Return the kind of the first pattern that occurs in the name; None without a match."""
    return next((kind for kind, pattern in patterns if pattern.search(name)), None)


def categorize(name: str, callers: Sequence[str] = ()) -> str:
    """Return the category of a kernel or operator; `callers` are the operators around it, the innermost first."""
    by_region = (first_match(_REGIONS, operator) for operator in (name, *reversed(callers)))
    by_operator = (operator_category(operator) for operator in (name, *callers))
    return next(filter(None, chain(by_region, by_operator)), None) or first_match(_KERNELS, name) or "other"


# Steps between the watched step and the profiler, so that a profiled run has undisturbed step times, too.
COUNTED_STEPS = 3
# Warm-up of the profiler, whose hooks into the driver are slow at first.
PROFILER_WARMUP_STEPS = 1
MAX_TOP_KERNELS = 25
MAX_NAME_LENGTH = 200
_RANGE = "zero-study: profiled steps"
_OPTIMIZER_RANGE = "Optimizer.step#"
# Calls into the CUDA runtime and driver are among the operators of a trace.
_DRIVER_CALL = re.compile(r"^cu(da)?[A-Z]")


def check_profiled_steps(config: RunConfig, steps: int) -> None:
    """Raise UserError if a run has too few steps to profile; `steps` excludes those before its checkpoint."""
    other_steps = 1 + COUNTED_STEPS + PROFILER_WARMUP_STEPS + config.profile_steps
    needed = next(count for count in itertools.count(other_steps) if count >= warmup_steps(count) + other_steps)
    if config.profile_steps and steps < needed:
        raise UserError(
            f"--profile_steps {config.profile_steps} needs {needed} steps (warm-up, the watched step, {COUNTED_STEPS}"
            f" timed steps, the profiler's warm-up), and this run does {steps}",
            f"use --max_steps {needed} or more, or fewer --profile_steps",
        )


class StepProfiler:
    """Profiler of consecutive steps: warm_up() one step before them, start() and stop() around them.

    Only work between begin() and end() is counted; the device is idle at both.
    """

    def __init__(self, device: torch.device, steps: range) -> None:
        self.steps = steps
        self.device = device
        self.document: dict[str, Any] | None = None
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
        # For torch's schedule all profiled steps are one step, since it can warm up in no other way.
        self._profile = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
        self._range: record_function | None = None
        self._records = False

    def warm_up(self) -> None:
        with warnings.catch_warnings():
            # torch 2.11 warns that the events of earlier cycles are lost; there are none.
            warnings.simplefilter("ignore")
            self._profile.start()

    def start(self) -> None:
        self._profile.step()
        self._records = True

    def stop(self) -> None:
        """Stop recording, and summarize the events in `document`."""
        self._records = False
        self._profile.stop()
        assert self._profile.profiler is not None
        results = self._profile.profiler.kineto_results
        assert results is not None, "the profiler recorded nothing"
        self._summarize(results.events())

    def _summarize(self, events: Sequence[Any]) -> None:
        self.document = profile_document(events, self.steps, self.device.type)

    def begin(self) -> None:
        if self._records:
            self._range = record_function(_RANGE)
            self._range.__enter__()

    def end(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


@dataclasses.dataclass
class Span:
    """A kernel, operator or annotation with its times in nanoseconds."""

    name: str
    start: int
    end: int
    parent: Span | None = None
    # False for an annotation, which only labels the work inside it.
    is_work: bool = True
    child_ns: int = 0

    @property
    def self_time(self) -> int:
        """Time excluding the operators that it calls, in nanoseconds."""
        return self.end - self.start - self.child_ns

    def callers(self) -> Iterator[Span]:
        span = self.parent
        while span is not None:
            yield span
            span = span.parent


def profile_document(events: Iterable[Any], steps: range, device: str) -> dict[str, Any]:
    """Return the content of profile.json from the events of torch's profiler."""
    host, kernels = [], []
    for event in events:
        if event.device_type() == DeviceType.CPU:
            host.append(event)
        elif not event.is_user_annotation():
            kernels.append(event)
    windows = sorted((event.start_ns(), event.end_ns()) for event in host if event.name() == _RANGE)
    operators, by_id = _operators(host, windows)
    if device == "cuda":
        if not kernels:
            # A property of the machine, so the next run would fail as well.
            problem = "the profiler saw no kernel of the GPU"
            raise Unsupported(problem, "CUPTI does not work here: leave --profile_steps out")
        work = []
        for event in kernels:
            if (span := _clip(event, windows)) is not None:
                span.parent = by_id.get(event.linked_correlation_id())
                work.append(span)
    else:
        work = [span for span in operators if span.is_work]
    return _document(work, sum(end - start for start, end in windows), steps, device)


def _clip(event: Any, windows: Sequence[tuple[int, int]]) -> Span | None:
    """Return the part of the event inside a window of profiled time; None if it does not start in one."""
    start = event.start_ns()
    place = bisect.bisect_right(windows, start, key=lambda window: window[0]) - 1
    if place < 0 or start >= (end := windows[place][1]):
        return None
    return Span(event.name(), start, min(event.end_ns(), end))


def _operators(host: Sequence[Any], windows: Sequence[tuple[int, int]]) -> tuple[list[Span], dict[int, Span]]:
    """Return the host's operators and annotations with their callers, and a map by the id that kernels refer to."""
    spans_on_host: list[Span] = []
    by_id: dict[int, Span] = {}
    threads: defaultdict[Any, list[Span]] = defaultdict(list)
    for event in host:
        if event.name() == _RANGE or event.is_hidden_event() or _DRIVER_CALL.match(event.name()):
            continue
        span = _clip(event, windows)
        if span is None:
            continue
        span.is_work = not event.is_user_annotation() or span.name.startswith(_OPTIMIZER_RANGE)
        spans_on_host.append(span)
        if event.correlation_id() > 0 and event.linked_correlation_id() == 0:
            by_id[event.correlation_id()] = span
        # Work that begins in one thread and ends in another has no caller.
        if not event.is_async() and event.start_thread_id() == event.end_thread_id():
            threads[event.start_thread_id()].append(span)
    for spans in threads.values():
        _set_callers(spans)
    return spans_on_host, by_id


def _set_callers(spans: Sequence[Span]) -> None:
    """Set the parent of each span of one thread, and add the time of work to the work that called it."""
    open_spans: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        if open_spans:
            span.parent = open_spans[-1]
            span.end = min(span.end, span.parent.end)
        caller = next((around for around in span.callers() if around.is_work), None)
        if span.is_work and caller is not None:
            caller.child_ns += span.end - span.start
        open_spans.append(span)


def _document(work: Sequence[Span], wall: int, steps: range, device: str) -> dict[str, Any]:
    per_step = 1e-9 / len(steps)
    # The time in which at least one span ran.
    busy, reached = 0, 0
    for start, end in sorted((span.start, span.end) for span in work):
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    categories = dict.fromkeys(PROFILE_CATEGORIES, 0)
    totals: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for span in work:
        kind = categorize(span.name, [caller.name for caller in span.callers()])
        name = "".join(letter if letter.isprintable() else " " for letter in span.name)[:MAX_NAME_LENGTH]
        categories[kind] += span.self_time
        totals[name, kind][0] += 1
        totals[name, kind][1] += span.self_time
    largest = sorted(totals.items(), key=lambda item: (-item[1][1], item[0]))[:MAX_TOP_KERNELS]
    return {
        "device": device,
        "steps": list(steps),
        "wall_s_per_step": wall * per_step,
        "busy_s_per_step": busy * per_step,
        "idle_s_per_step": (wall - busy) * per_step,
        # If spans overlap, the sum of their times is longer than the device was busy.
        "summed_s_per_step": sum(categories.values()) * per_step,
        "calls_per_step": len(work) / len(steps),
        "categories_s_per_step": {kind: time * per_step for kind, time in categories.items()},
        "top": [
            {"name": name, "category": kind, "calls_per_step": calls / len(steps), "s_per_step": time * per_step}
            for (name, kind), (calls, time) in largest
        ],
    }
