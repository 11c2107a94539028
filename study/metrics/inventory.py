"""Tensors claimed by name, each storage counted once, and every other tensor alive in the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_SETTLED_AFTER_S = 0.05


class ForwardWatch:
    """`with ForwardWatch(model) as watch:` around one optimizer step; then `watch.report`, of its fullest forward pass.

    Counted where tensors are allocated, so that it does not matter who holds them: autograd, a checkpointed layer or an
    engine of its own. The logits and the loss are among them.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._hooks = contextlib.ExitStack()
        self._before: tuple[int, int] | None = None
        self._held: list[tuple[int, int]] = []

    def __enter__(self) -> ForwardWatch:
        if bytes_in_use(self._device) is not None:
            # Before FSDP's own hook, which gathers the root.
            self._hooks.callback(self._model.register_forward_pre_hook(self._read_before, prepend=True).remove)
            self._hooks.callback(self._model.register_forward_hook(self._read_after).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    @property
    def report(self) -> dict[str, int | None]:
        held, gathered = max(self._held, default=(None, None))
        return {"forward_holds_bytes": held, "forward_gathers_bytes": gathered}

    def _read_before(self, *_: Any) -> None:
        gc.collect()
        self._before = self._read()

    def _read_after(self, *_: Any) -> None:
        assert self._before is not None
        (used_before, whole_before), (used, whole) = self._before, self._read()
        gathered = max(0, whole - whole_before)
        self._held.append((max(0, used - used_before - gathered), gathered))

    def _read(self) -> tuple[int, int]:
        if self._device.type == "cpu":
            # A thread of gloo's lets go of a buffer some time after its collective is done.
            time.sleep(_SETTLED_AFTER_S)
        used = bytes_in_use(self._device)
        assert used is not None
        return used, sum(_bytes_here(parameter) for parameter in self._model.parameters())


def _bytes_here(parameter: nn.Parameter) -> int:
    """Whole and beside its part: stage 3 leaves nothing of a parameter where it is not gathered, and FSDP a DTensor.
    Where the part of one rank is the whole, it is looked at in place, and nothing was allocated."""
    part = getattr(parameter, "ds_tensor", None)
    is_in_place = part is not None and part.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    if is_in_place or hasattr(parameter, "_local_tensor"):
        return 0
    return parameter.numel() * parameter.element_size()


def bytes_in_use(device: torch.device) -> int | None:
    """What tensors, and on a CPU all else in this process, have allocated and not freed."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _malloced()


class _MallocFigures(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


def _malloced() -> int | None:
    """None without a C library that counts past 4 GiB."""
    library = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if not hasattr(library, "mallinfo2"):
        return None
    count = library.mallinfo2  # type: ignore[union-attr]
    count.restype = _MallocFigures
    figures = count()
    return int(figures.uordblks + figures.hblkhd)


class Inventory:
    """Tensors claimed one piece at a time; a storage claimed before is not counted again."""

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = compute_device
        self.pieces: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._claimed: dict[int, list[tuple[int, int]]] = {}
        self._sizes: dict[int, int] = {}
        self._unreachable: list[int] = []
        self.grads_in_bucket_bytes = 0

    def claim(self, kind: str, piece: str, tensors: Any, offloaded: bool = False) -> None:
        """`kind` is one of STATE_KINDS or "buffers". Counts what the tensors span, not the rest of their storage."""
        for tensor in tensors_in(tensors):
            place = self._place(tensor, offloaded)
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            if not key or not size:
                continue
            self._sizes[key] = size
            start = int(tensor.storage_offset()) * tensor.element_size()
            end = start + tensor.numel() * tensor.element_size()
            self._claimed[key], new_bytes = _cover(self._claimed.get(key, []), start, end)
            self.pieces[kind, place, piece] += new_bytes

    def add_files(self, kind: str, piece: str, paths: Iterable[str]) -> None:
        self.pieces[kind, "nvme", piece] += sum(Path(path).stat().st_size for path in paths if Path(path).exists())

    def add_unreachable(self, piece: str, sizes: list[int]) -> None:
        """Buffers of C++ objects, known by size alone. A dispatch mode may have made Python objects of them."""
        self.pieces["buffers", "device", piece] += sum(sizes)
        self._unreachable += sizes

    def note_bucketed(self, parameters: list[nn.Parameter]) -> None:
        """Whole gradients that wait in the bucket for their reduction. Call when only the bucket is claimed."""
        grads = tensors_in([gradients_of(parameter) for parameter in parameters])
        held = [t for t in grads if t.untyped_storage().data_ptr() in self._claimed]
        self.grads_in_bucket_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)

    def total(self, kind: str, place: str) -> int:
        return sum(count for (k, p, _), count in self.pieces.items() if (k, p) == (kind, place))

    def other_tensor_bytes(self) -> int:
        """What a scan of the whole process finds in storages nobody claimed, and unclaimed parts of claimed ones."""
        gc.collect()
        other: dict[int, int] = {}
        for found in gc.get_objects():
            if not issubclass(type(found), torch.Tensor) or issubclass(type(found), FakeTensor):
                continue
            for tensor in tensors_in(found):
                if tensor.device.type == "meta" or tensor.layout != torch.strided:
                    continue
                storage = tensor.untyped_storage()
                if storage.data_ptr() and storage.data_ptr() not in self._claimed:
                    other[storage.data_ptr()] = storage.nbytes()
        sizes = list(other.values())
        for size in self._unreachable:
            if size in sizes:
                sizes.remove(size)
        for key, spans in self._claimed.items():
            sizes.append(max(0, self._sizes[key] - sum(end - start for start, end in spans)))
        return sum(sizes)

    def _place(self, tensor: torch.Tensor, offloaded: bool) -> str:
        if self.compute_device.type == "cpu":
            return "host" if offloaded else "device"
        return "host" if tensor.device.type == "cpu" else "device"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor in nested containers; a DTensor yields this rank's shard."""
    if isinstance(value, dtensor_type()):
        yield from tensors_in(value._local_tensor)
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def dtensor_type() -> Any:
    """Importing DTensor costs half a second. If nothing has imported it, no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", ())


def _cover(spans: list[tuple[int, int]], start: int, end: int) -> tuple[list[tuple[int, int]], int]:
    """The disjoint `spans` of a storage with [start, end) added, and how many bytes that added."""
    touching = [span for span in spans if span[0] < end and start < span[1]]
    known = sum(min(end, span[1]) - max(start, span[0]) for span in touching)
    merged = (min([start, *(span[0] for span in touching)]), max([end, *(span[1] for span in touching)]))
    return [span for span in spans if span not in touching] + [merged], end - start - known


def gradients_of(parameter: nn.Parameter) -> list[torch.Tensor | None]:
    return [parameter.grad, getattr(parameter, "grad_accum", None)]
