"""What a forward pass leaves behind for the backward pass, in this rank: activations, and parameters still gathered."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import time
from typing import Any

import torch
from torch import nn

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
