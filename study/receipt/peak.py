"""Memory of one step at its peak, by part, and its FLOPs: every operation of one watched step is seen.

The model's state is claimed by the meters of the runs (study/metrics/state.py). Every other live tensor is known from
the step's beginning, or from the operation that made it. The sum is compared with the allocator's bytes in use.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from study.metrics.inventory import bytes_in_use, dtensor_type, live_tensors
from study.metrics.state import GATHERED, MODEL_BUFFERS, REDUCER_BUCKETS, StateWatch, claim_model_state
from study.metrics.traffic import REDUCTIONS, TrafficWatch
from study.receipt.document import MEMORY_PARTS
from study.receipt.failures import Failures
from study.receipt.live_engine import find_core, find_groups, find_inner
from study.receipt.timeline import MemoryLog, Parts
from study.receipt.timing import PartTimer

Origin = Literal["activations", "logits", "other_tensors", "buckets"]
# Attributes of modules that state a width of their tensors; `nf` and `nx` are those of transformers' Conv1D.
_WIDTHS = ("in_features", "out_features", "nf", "nx", "embedding_dim")
# The state is claimed again whenever the bytes in use have grown by this fraction, up to the peak.
_GROWTH = 0.01
# gloo's threads free their copies some time after a collective has ended; on busy cores later than this, so a new peak
# waits on while more of it than this fraction and these bytes has no owner, in all at most this often in a step.
_SETTLED_AFTER_S = 0.02
_UNOWNED_FRACTION, _UNOWNED_BYTES = 0.03, 2**18
_MAX_WAITS = 50


class GuardedTraffic(TrafficWatch):
    """TrafficWatch of a foreign program: a collective that it cannot count is a failure of the receipt."""

    def __init__(self, step: int, failures: Failures) -> None:
        super().__init__(step)
        self._failures = failures

    def _count(self, name: str, arguments: dict[str, Any], result: Any) -> None:
        with self._failures.caught("counting collectives"):
            super()._count(name, arguments, result)

    @property
    def reduced_bytes(self) -> int:
        """Payload of the reductions so far; the norm of gradients and a loss are a few bytes."""
        return int(sum(self.collectives[kind]["payload_bytes"] for kind in REDUCTIONS if kind in self.collectives))


class GuardedState(StateWatch):
    """StateWatch of a foreign program: an attribute that it cannot read is a failure of the receipt."""

    def __init__(self, model: Any, optimizer: Any, device: torch.device, failures: Failures) -> None:
        super().__init__(model, optimizer, device)
        self._failures = failures

    def _read(self, *, scan: bool = True) -> dict[str, Any] | None:
        if self.unknown:
            return None
        try:
            return super()._read(scan=False)
        except Exception as error:
            self._failures.note("reading the model state", error)
            self.unknown = str(error) or type(error).__name__
            return None


class PeakWatch(TorchDispatchMode):
    """Meter of memory: `with PeakWatch(...) as watch:` around one optimizer step."""

    def __init__(self, model: Any, optimizer: Any, timer: PartTimer, device: torch.device, failures: Failures) -> None:
        super().__init__()
        self._model, self._optimizer, self._timer = model, optimizer, timer
        self._device, self._failures = device, failures
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Origin]] = {}
        self._is_cuda = device.type == "cuda"
        self._waits_for_gloo = not self._is_cuda and dist.is_initialized()
        self._outside = self._reducer_bytes = 0
        self._is_new_peak = self._is_off = False
        self._waits_left = _MAX_WAITS
        self.flops = 0
        self.flops_by_dtype: Counter[str] = Counter()
        self.peak_bytes = 0
        self.moment = ""
        self._parts: Parts = {}
        self._vocabulary: int | None = None
        self.log = MemoryLog()
        self.host_parts: dict[str, int] = {}
        self.slack_bytes: int | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as TrafficWatch does."""
        return True

    @property
    def outside_bytes(self) -> int:
        """Bytes of the process's heap that no tensor has, before the step; 0 on a GPU."""
        return self._outside

    @property
    def parts(self) -> Parts:
        """Bytes by part at the peak; without logits if other tensors are as wide."""
        return {part: count for part, count in self._parts.items() if part != "logits" or self._vocabulary is not None}

    def _turn_off(self, error: Exception) -> None:
        """Note a failure after which nothing of this step's memory is known."""
        self._failures.note("watching memory", error)
        self._is_off, self._parts = True, {}

    def __enter__(self) -> PeakWatch:
        with self._failures.caught("looking for the vocabulary"):
            self._vocabulary = find_vocabulary(self._model)
        try:
            gc.collect()
            claims = claim_model_state(self._model, self._optimizer, self._device).claims
            self._reducer_bytes = claims.get(("buffers", "device", REDUCER_BUCKETS), 0)
            for tensor in live_tensors():
                self._see(tensor, "other_tensors")
            in_use = bytes_in_use(self._device)
            if not self._is_cuda and in_use is not None:
                self._outside = max(0, in_use - sum(self._split_device().values()))
            self.log.begin()
            with self.log:
                self._measure()
        except Exception as error:
            self._turn_off(error)
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if not self._is_off and kind is None:
            with self._failures.caught("watching memory"), self.log:
                self.log.add(self._tensor_bytes(), self._split_device())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, dtensor_type()) for kind in types):
            return NotImplemented
        if self._is_new_peak:
            with self.log:
                self._repeat_split()
        result = func(*args, **(kwargs or {}))
        if self._is_off:
            return result
        try:
            with self.log:
                self._follow(func, args, kwargs or {}, result)
        except Exception as error:
            # An exception in a thread of autograd would end the process.
            self._turn_off(error)
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # A tensor that an operation writes into without having allocated it is a buffer of C++ code.
        is_collective = func.namespace in ("c10d", "_c10d_functional")
        writes = func._schema.is_mutable or is_collective
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, "buckets" if writes else "activations")
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            with self._failures.caught("counting FLOPs"):
                count = int(formula(*args, **kwargs, out_val=result))
                self.flops += count
                self.flops_by_dtype[str(args[0].dtype).removeprefix("torch.")] += count
        # gloo has a copy of a collective's input until the program has released its handle.
        if not (self._waits_for_gloo and is_collective):
            self._measure()

    def _see(self, tensor: torch.Tensor, origin: Origin) -> None:
        if isinstance(tensor, FakeTensor) or tensor.device.type != self._device.type or tensor.layout != torch.strided:
            return
        if is_traceable_wrapper_subclass(tensor):
            # It only wraps other tensors, which are seen as well.
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = id(storage)
        if key not in self._known:
            origin = "logits" if self._is_of_logits(tensor) else origin
            self._known[key] = (weakref.ref(storage, lambda _: self._known.pop(key, None)), origin)

    def _is_of_logits(self, tensor: torch.Tensor) -> bool:
        """Whether it is logits, their gradient, or a tensor of the loss with the same elements."""
        vocabulary = self._vocabulary
        if vocabulary is None or tensor.dim() < 2 or tensor.shape[-1] != vocabulary:
            return False
        # Attention scores of a sequence of this length have it, too.
        return self._timer.sequence_length != vocabulary

    def _measure(self) -> None:
        total = self._tensor_bytes()
        if total <= self.peak_bytes * (1 + _GROWTH):
            self.log.note(total, self.peak_bytes, self._split_device)
            return
        if self._waits_for_gloo:
            total = self._wait_for_gloo()
        if total > self.peak_bytes:
            self.peak_bytes = total
            self._split_peak()
            self.log.add_peak(total, self._parts)
            self.moment = _MOMENTS[self._timer.phase]
            self._is_new_peak = True
            if self._is_cuda:
                self.slack_bytes = torch.cuda.memory_reserved(self._device) - total

    def _wait_for_gloo(self) -> int:
        """Return the bytes in use once gloo's threads have freed their copies."""
        time.sleep(_SETTLED_AFTER_S)
        total = self._tensor_bytes()
        while self._waits_left and total > self.peak_bytes:
            unowned = total - sum(self._split_device().values())
            if unowned <= max(_UNOWNED_BYTES, _UNOWNED_FRACTION * total):
                break
            self._waits_left -= 1
            time.sleep(_SETTLED_AFTER_S)
            total = self._tensor_bytes()
        return total

    def _repeat_split(self) -> None:
        """Split a new peak once more, before the next operation: by then the allocated tensor has its owner."""
        self._is_new_peak = False
        try:
            total = self._tensor_bytes()
            if total > self.peak_bytes * (1 + _GROWTH):
                # Something else was allocated meanwhile.
                self._measure()
            elif total >= self.peak_bytes * (1 - _GROWTH):
                self._split_peak()
                is_counted = bytes_in_use(self._device) is not None
                # Without a count of the heap the total is the sum of the parts.
                self.peak_bytes = max(total, self.peak_bytes) if is_counted else sum(self._parts.values())
                self.log.replace_peak(self.peak_bytes, self._parts)
        except Exception as error:
            self._turn_off(error)

    def _tensor_bytes(self) -> int:
        """Return the bytes in use for tensors: those of torch's allocator, or of the heap's growth."""
        in_use = bytes_in_use(self._device)
        return sum(self._split_device().values()) if in_use is None else in_use - self._outside

    def _split_peak(self) -> None:
        self._parts, self.host_parts = self._split()

    def _split_device(self) -> Parts:
        return self._split()[0]

    def _split(self) -> tuple[Parts, Parts]:
        """Return the bytes of live tensors on the device by part, and those of offloaded state."""
        inventory = claim_model_state(self._model, self._optimizer, self._device, in_step=True)
        parts = dict.fromkeys(MEMORY_PARTS, 0)
        host: defaultdict[str, int] = defaultdict(int)
        for (kind, place, name), count in inventory.claims.items():
            part = _find_part(kind, name)
            # Without a GPU, offloaded state is in the same memory.
            if place == "device" or (place == "host" and not self._is_cuda):
                parts[part] += count
            if place == "host":
                host[part] += count
        seen_buckets = 0
        for reference, origin in list(self._known.values()):
            storage = reference()
            if storage is None:
                continue
            rest = max(0, storage.nbytes() - inventory.claimed_bytes(storage))
            if origin == "buckets":
                seen_buckets += rest
            else:
                parts[origin] += rest
        # The reducer's buckets are known by their sizes, and may also have been seen.
        parts["buckets"] += max(self._reducer_bytes, seen_buckets)
        return parts, dict(host)


def find_vocabulary(model: Any) -> int | None:
    """Return the width of a language model's logits; None without one, or if another layer is as wide.

    A narrower vocabulary is the width of other tensors as well, such as those of a head of attention. Ranks that divide
    a layer have a part of the logits.
    """
    if find_groups(model).tensor > 1:
        return None
    core = find_core(find_inner(model))
    config: Any = getattr(core, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    find_head = getattr(core, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    vocabulary = getattr(head, "out_features", None) or getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return None
    head_ids = {id(module) for module in head.modules()} if isinstance(head, nn.Module) else set()
    layers = [module for module in core.modules() if id(module) not in head_ids]
    values = [getattr(module, name, None) for module in layers for name in _WIDTHS]
    widths = [width for width in values if isinstance(width, int)]
    if not head_ids and vocabulary in widths:
        # The head of a model that does not name it.
        widths.remove(vocabulary)
    return vocabulary if vocabulary > max(widths, default=0) else None


_MOMENTS = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "between": "between the passes",
}
_KINDS_OF_STATE = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer"}


def _find_part(kind: str, name: str) -> str:
    if name == GATHERED:
        return "gathered"
    if name == MODEL_BUFFERS:
        return "parameters"
    return _KINDS_OF_STATE.get(kind, "buckets")
