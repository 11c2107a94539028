"""Count the bytes of named tensors, of all other live tensors, and of a forward pass."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_SETTLED_AFTER_S = 0.05
_RELEASED_WITHIN_S = 1.0


class ForwardWatch:
    """Meter of the memory of the largest forward pass: `with ForwardWatch(...) as watch:` around one optimizer step.

    It reads the allocator, so it includes all tensors of autograd, checkpointed layers and the engine, the logits and
    the loss.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._hooks = contextlib.ExitStack()
        self._before: tuple[int, int] | None = None
        self._passes: list[tuple[int, int]] = []

    def __enter__(self) -> ForwardWatch:
        if bytes_in_use(self._device) is not None:
            # Prepended, to run before FSDP's hook, which gathers the root.
            self._hooks.callback(self._model.register_forward_pre_hook(self._read_before, prepend=True).remove)
            self._hooks.callback(self._model.register_forward_hook(self._read_after).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    @property
    def report(self) -> dict[str, int | None]:
        """Bytes of the largest forward pass, without and with gathered parameters; None if they are not readable."""
        allocated, gathered = max(self._passes, default=(None, None))
        return {"forward_holds_bytes": allocated, "forward_gathers_bytes": gathered}

    def _read_before(self, *_: Any) -> None:
        gc.collect()
        self._before = self._read()

    def _read_after(self, *_: Any) -> None:
        assert self._before is not None
        (used_before, gathered_before), (used, now_gathered) = self._before, self._read()
        gathered = max(0, now_gathered - gathered_before)
        self._passes.append((max(0, used - used_before - gathered), gathered))

    def _read(self) -> tuple[int, int]:
        if self._device.type == "cpu":
            # A gloo thread frees a buffer some time after its collective has ended.
            time.sleep(_SETTLED_AFTER_S)
        used = bytes_in_use(self._device)
        assert used is not None
        gathered = 0
        for parameter in self._model.parameters():
            # Part of the state, which the forward pass allocates with zero_hpz_partition_size.
            if (copy := getattr(parameter, "ds_secondary_tensor", None)) is not None:
                used -= copy.untyped_storage().nbytes()
            # A shard that is the full parameter is used in place. FSDP's are DTensors.
            if (shard := getattr(parameter, "ds_tensor", None)) is not None:
                is_shard = shard.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            else:
                is_shard = hasattr(parameter, "_local_tensor")
            gathered += 0 if is_shard else parameter.numel() * parameter.element_size()
        return used, gathered + sum(buffer.nbytes() for buffer in _gather_buffers(self._model))


def _gather_buffers(model: nn.Module) -> list[torch.UntypedStorage]:
    """Return stage 3's buffers of gathers of several parameters (partition_parameters.py, AllGatherCoalescedHandle).

    The parameters are empty until the first of them is used; the buffer stays until the last one is.
    """
    parts = [partition.untyped_storage() for partition in gathers_in_flight(model)]
    return list({storage.data_ptr(): storage for storage in parts}.values())


def gathers_in_flight(model: nn.Module) -> list[torch.Tensor]:
    """Return the first partition of each of stage 3's gathers in flight: all partitions share its storage."""
    registries = [getattr(module, "ds_inflight_param_registry", {}) for module in model.modules()]
    handles = [handle for registry in registries for handle in registry.values()]
    handles = [part for handle in handles for part in getattr(handle, "handles", [handle])]
    # All parameters of one gather have its handle. A quantized one has its partitions later.
    return [handle.partitions[0] for handle in handles if getattr(handle, "partitions", None)]


def bytes_in_use(device: torch.device) -> int | None:
    """Return the allocated bytes of tensors on a GPU, or of the process on a CPU; None before psutil 7.2."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if not hasattr(psutil, "heap_info"):
        return None
    heap = psutil.heap_info()
    return int(heap.heap_used + heap.mmap_used)


class Inventory:
    """Tensors claimed by kind and name; a storage that was claimed before is not counted again."""

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = compute_device
        self.claims: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._claimed: dict[int, list[tuple[int, int]]] = {}
        self._sizes: dict[int, int] = {}
        self._unreachable: list[int] = []
        self.grads_in_bucket_bytes = 0

    def claim(self, kind: str, name: str, tensors: Any, offloaded: bool = False) -> None:
        """Count the span of the tensors, not the rest of their storage. `kind` is one of STATE_KINDS or "buffers"."""
        for tensor in tensors_in(tensors):
            is_on_host = offloaded if self.compute_device.type == "cpu" else tensor.device.type == "cpu"
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            if not key or not size:
                continue
            self._sizes[key] = size
            start = int(tensor.storage_offset()) * tensor.element_size()
            end = start + tensor.numel() * tensor.element_size()
            # Keeps the spans of a storage disjoint.
            spans = self._claimed.get(key, [])
            touching = [span for span in spans if span[0] < end and start < span[1]]
            covered = sum(min(end, span[1]) - max(start, span[0]) for span in touching)
            merged = (min([start, *(span[0] for span in touching)]), max([end, *(span[1] for span in touching)]))
            self._claimed[key] = [span for span in spans if span not in touching] + [merged]
            self.claims[kind, "host" if is_on_host else "device", name] += end - start - covered

    def add_files(self, kind: str, name: str, paths: Iterable[str]) -> None:
        self.claims[kind, "nvme", name] += sum(Path(path).stat().st_size for path in paths if Path(path).exists())

    def add_unreachable(self, name: str, sizes: list[int]) -> None:
        """Count buffers of C++ objects by their sizes. A dispatch mode may have created Python objects of them."""
        self.claims["buffers", "device", name] += sum(sizes)
        self._unreachable += sizes

    def note_bucketed(self, parameters: list[nn.Parameter]) -> None:
        """Count unreduced gradients in the bucket. Call it when only the bucket is claimed."""
        grads = tensors_in([find_gradients(parameter) for parameter in parameters])
        waiting = [grad for grad in grads if grad.untyped_storage().data_ptr() in self._claimed]
        self.grads_in_bucket_bytes = sum(grad.numel() * grad.element_size() for grad in waiting)

    def claimed_bytes(self, storage: torch.UntypedStorage) -> int:
        """Return the claimed bytes of a storage."""
        return sum(end - start for start, end in self._claimed.get(storage.data_ptr(), []))

    def total(self, kind: str, place: str) -> int:
        return sum(count for (k, p, _), count in self.claims.items() if (k, p) == (kind, place))

    def other_tensor_bytes(self) -> int:
        """Return the bytes of unclaimed storages in the process, and of unclaimed parts of claimed ones.

        A gloo thread refers to the tensors of a completed collective until it gets a core and the interpreter's lock.
        So a tensor to which only C++ refers has time to be freed before it counts.
        """
        gc.collect()
        deadline = time.monotonic() + _RELEASED_WITHIN_S
        while self._any_only_of_cpp(tensors := self._unclaimed_tensors()) and time.monotonic() < deadline:
            del tensors
            time.sleep(0.001)
        sizes = _storage_sizes(tensors)
        for size in self._unreachable:
            if size in sizes:
                sizes.remove(size)
        for key, spans in self._claimed.items():
            sizes.append(max(0, self._sizes[key] - sum(end - start for start, end in spans)))
        return sum(sizes)

    def _unclaimed_tensors(self) -> list[torch.Tensor]:
        claimed = {0, *self._claimed}
        return [
            tensor
            for tensor in live_tensors()
            if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in claimed
        ]

    def _any_only_of_cpp(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether only C++ objects other than the known buffers refer to one of the tensors.

        The garbage collector does not see local variables, such as a scalar loss.
        """
        holders = [holder for holder in gc.get_referrers(*tensors) if holder is not tensors]
        python_ids = {id(referent) for referent in gc.get_referents(*holders)}
        cpp_tensors = [tensor for tensor in tensors if tensor.dim() and id(tensor) not in python_ids]
        return sum(_storage_sizes(cpp_tensors)) > sum(self._unreachable)


def _storage_sizes(tensors: list[torch.Tensor]) -> list[int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every plain tensor in nested containers, and this rank's shard of a DTensor."""
    if isinstance(value, dtensor_type()):
        yield from tensors_in(value._local_tensor)
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def live_tensors() -> list[torch.Tensor]:
    """Return every tensor with data that Python refers to, and this rank's shards of DTensors."""
    return [
        tensor
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.Tensor) and not issubclass(type(candidate), FakeTensor)
        for tensor in tensors_in(candidate)
        if tensor.device.type != "meta"
    ]


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of all bytes of this tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of a model; nothing under another engine."""
    for module in model.modules():
        if (find_state := getattr(module, "_get_fsdp_state", None)) is not None:
            yield from fsdp_state_groups(find_state())


def fsdp_state_groups(state: Any) -> list[Any]:
    """Return the parameter groups of one of FSDP2's states, of which modules that are sharded together share one."""
    attributes = vars(state)
    if "_fsdp_param_groups" in attributes:
        return list(attributes["_fsdp_param_groups"])
    # Earlier releases of torch, such as 2.11, have one group, or None.
    group = attributes.get("_fsdp_param_group")
    return [] if group is None else [group]


def dtensor_type() -> Any:
    """Return DTensor, or () before its import, which takes half a second; until then no tensor is one."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def find_gradients(parameter: nn.Parameter) -> list[torch.Tensor | None]:
    """Return the gradients that torch and DeepSpeed store on a parameter."""
    return [parameter.grad, getattr(parameter, "grad_accum", None)]
