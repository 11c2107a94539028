"""Count the collectives of one rank in one optimizer step: calls, payload, and the bytes that the rank sends.

A TorchDispatchMode counts the dispatcher's `c10d::` and `_c10d_functional::` operators, which all engines use.
`torch.distributed`, DeepSpeed, FSDP2 and DDP's C++ reducer all call methods of the C++ ProcessGroup
(ProcessGroup.hpp), and each goes through the dispatcher before it reaches gloo, NCCL or the fake backend. Modes are
part of the thread-local state that autograd gives to its worker threads and final callbacks (GraphTask in
torch/csrc/autograd/engine.cpp), so collectives of backward hooks are counted on a GPU as well. Sizes and types are
exact; the profiler's are not: it drops the types of tensor lists, and only some backends write `record_param_comms`.

`wire_bytes_per_rank` are ring bytes: those of the bandwidth-optimal algorithm, with the factors of nccl-tests, on any
backend. Gloo uses other algorithms for some collectives; `gloo_bytes_per_rank` are the bytes that gloo sends, within
1 % of the counters of the loopback interface (tests/engine/test_measure.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from study.metrics.inventory import dtensor_type

# By the operator's name without namespace and outer underscores: `c10d::_allgather_base_`, or
# `_c10d_functional::all_gather_into_tensor_coalesced`.
_KINDS = {
    "all_reduce": re.compile(r"^all_?reduce"),
    "all_gather": re.compile(r"^all_?gather"),
    "reduce_scatter": re.compile(r"^reduce_scatter"),
    "broadcast": re.compile(r"^broadcast"),
    "all_to_all": re.compile(r"all_?to_?all"),
    "reduce": re.compile(r"^reduce$"),
    "send": re.compile(r"^i?send$"),
    "recv": re.compile(r"^i?recv"),
}
# Kinds that add up the gradients of the ranks.
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
_BARRIERS = ("c10d::barrier", "c10d::monitored_barrier_")
# DeepSpeed's operators call collectives that the mode does not see.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "deepspeed")


class TrafficWatch(TorchDispatchMode):
    """Counter of collectives: `with TrafficWatch(step) as watch:` around exactly one optimizer step."""

    def __init__(self, step: int, ranks_per_machine: int | None = None) -> None:
        super().__init__()
        self.step = step
        self.ranks_per_machine = ranks_per_machine
        # Bytes sent in groups with ranks on several machines. A ring enters and leaves each machine once, so a machine
        # sends the same number of bytes to the next one.
        self.across_machines_bytes = 0.0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.is_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        # Ring bytes have the name that they have in records.
        zeros = {"calls": 0, "payload_bytes": 0, "wire_bytes_per_rank": 0.0, "gloo_bytes_per_rank": 0.0}
        self.collectives: defaultdict[str, dict[str, float]] = defaultdict(zeros.copy)
        # Payload of all reductions by the type of their elements.
        self.reduced_by_dtype = Counter[str]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, since with False Dynamo would discard its compiled code from the watched step on."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, dtensor_type()) for kind in types):
            # DTensor dispatches to its local operators and collectives first, which call this again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) in _NAMESPACES:
            names = [argument.name for argument in func._schema.arguments]
            self._count(func._schema.name, dict(zip(names, args, strict=False)) | (kwargs or {}), result)
        return result

    def _count(self, name: str, arguments: dict[str, Any], result: Any) -> None:
        group = arguments.get("process_group", arguments.get("group_name"))
        if group is None:
            return  # it waits for a result, or wraps one
        if name in _BARRIERS:
            self.collectives["barrier"]["calls"] += 1
            return
        namespace, _, operator = name.partition("::")
        kind = next((kind for kind, pattern in _KINDS.items() if pattern.search(operator.strip("_"))), None)
        values = list(arguments.values())
        # Payload is the full logical tensor: the output of a gathering collective, the input of a scattering one.
        if kind is None:
            # An unknown operator counts with all its arguments, rather than not at all.
            kind, payload = name, values
        elif namespace == "c10d":
            # The output tensors come first.
            payload = values[1] if kind in ("reduce_scatter", "all_to_all") else values[0]
        else:
            payload = result if kind == "all_gather" else values[0]
        tensors = [leaf for leaf in tree_leaves(payload) if isinstance(leaf, torch.Tensor)]
        count = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if kind in REDUCTIONS:
            for tensor in tensors:
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.reduced_by_dtype[dtype] += tensor.numel() * tensor.element_size()
        counts = self.collectives[kind]
        counts["calls"] += 1
        counts["payload_bytes"] += count
        # c10d operators pass a group boxed, and functional ones its name.
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        group_name = group if isinstance(group, str) else group.group_name
        ranks = dist.get_process_group_ranks(_resolve_process_group(group_name))  # type: ignore[arg-type]  # a NewType
        if kind == "all_to_all":
            ring = gloo = _all_to_all_bytes(arguments, ranks)
        else:
            ring, gloo = _ring_bytes(kind, count, len(ranks)), _gloo_bytes(kind, count, len(ranks))
        counts["wire_bytes_per_rank"] += ring
        counts["gloo_bytes_per_rank"] += gloo
        if self.ranks_per_machine and len({rank // self.ranks_per_machine for rank in ranks}) > 1:
            self.across_machines_bytes += ring

    def report(self) -> dict[str, Any]:
        left_out = () if self.is_gloo else ("gloo_bytes_per_rank",)
        collectives = {
            kind: {name: count for name, count in counts.items() if name not in left_out}
            for kind, counts in sorted(self.collectives.items())
        }
        report = {"step": self.step, "world_size": self.world_size, "collectives": collectives}
        if (ranks := self.ranks_per_machine) and self.world_size > ranks:
            report |= {"ranks_per_machine": ranks, "across_machines_bytes_per_rank": self.across_machines_bytes}
        return report


def _ring_bytes(kind: str, size: int, ranks: int) -> float:
    if ranks == 1 or kind == "recv":
        return 0.0
    fraction = (ranks - 1) / ranks
    return size * {"all_reduce": 2 * fraction, "all_gather": fraction, "reduce_scatter": fraction}.get(kind, 1.0)


def _gloo_bytes(kind: str, size: int, ranks: int) -> float:
    """Return the sent bytes, mean over ranks. ProcessGroupGloo.cpp implements reduce-scatter as an all-reduce."""
    fraction = (ranks - 1) / ranks
    if kind == "reduce_scatter":
        return _ring_bytes("all_reduce", size, ranks)
    if kind == "broadcast":
        return size * fraction
    if kind == "reduce" and ranks > 1 and size:
        # Each rank forwards all but the last two segments of its chunk, which then goes to the root (gloo/reduce.cc).
        segment = min(math.ceil(size / (2 * ranks)), 2**20)
        segments_per_chunk = max(2, math.ceil(size / segment / ranks))
        ends = range(segments_per_chunk, (ranks + 1) * segments_per_chunk, segments_per_chunk)
        not_forwarded = sum(min(segment, max(0, size - (end - back) * segment)) for end in ends for back in (1, 2))
        return size - not_forwarded / ranks + size * fraction / ranks
    return _ring_bytes(kind, size, ranks)


def _all_to_all_bytes(arguments: dict[str, Any], ranks: list[int]) -> float:
    """Return the bytes of an all-to-all's input that are addressed to other ranks."""
    local_rank = ranks.index(dist.get_rank())
    if "input_tensors" in arguments:
        tensors = arguments["input_tensors"]
        return sum(t.numel() * t.element_size() for place, t in enumerate(tensors) if place != local_rank)
    tensor, rows = arguments["input"], arguments.get("input_split_sizes")
    # Without sizes all ranks get equal splits.
    local_fraction = rows[local_rank] / max(1, tensor.shape[0]) if rows else 1 / len(ranks)
    return tensor.numel() * tensor.element_size() * (1 - local_fraction)
