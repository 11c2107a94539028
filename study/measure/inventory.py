"""Tensors claimed by name, each storage counted once, and every other tensor alive in the process."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


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
