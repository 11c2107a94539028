"""Time that a step waits for NVMe: DeepSpeed's swappers read and write through handles of its asynchronous I/O."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

# Methods of a handle (csrc/aio/py_lib/deepspeed_py_io_handle.h): the last ones return when the data is there.
_SUBMITS = ("async_pread", "async_pwrite")
_WAITS = ("wait", "sync_pread", "sync_pwrite", "read", "write")


def find_handle_types(model: Any) -> list[type]:
    """Return the types of the handles of a DeepSpeed engine's swappers; empty without NVMe."""
    zero = getattr(model, "optimizer", None)
    swappers = [getattr(zero, "optimizer_swapper", None)]
    swappers += [getattr(parameter, "nvme_swapper", None) for parameter in model.parameters()]
    types: dict[type, None] = {}
    for swapper in {id(it): it for it in swappers if it is not None}.values():
        for name, handle in vars(swapper).items():
            # One of the attributes is the type itself.
            if "aio" in name and name.endswith("_handle") and not isinstance(handle, type) and hasattr(handle, "wait"):
                types[type(handle)] = None
    return list(types)


class NvmeTimer:
    """Meter of one step's waits for NVMe, by the part of the step in which they are."""

    def __init__(self, read_part: Callable[[], str]) -> None:
        self._read_part = read_part
        self._depth = 0
        self._submitted: dict[int, float] = {}
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        # From a submission to the end of the wait for it.
        self._in_flight: list[tuple[float, float]] = []

    @property
    def in_flight_s(self) -> float:
        """Return the time with at least one read or write in flight."""
        total, reached = 0.0, float("-inf")
        for begin, end in sorted(self._in_flight):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total

    @contextlib.contextmanager
    def around(self, handle_type: Any) -> Iterator[None]:
        """Time the calls of all handles of a type until the context ends."""
        originals = {name: getattr(handle_type, name) for name in (*_SUBMITS, *_WAITS) if hasattr(handle_type, name)}
        for name, original in originals.items():
            setattr(handle_type, name, self._timed(original, submits=name in _SUBMITS))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(handle_type, name, original)

    def _timed(self, original: Any, *, submits: bool) -> Any:
        def timed(handle: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            if self._depth == 0:
                self._submitted.setdefault(id(handle), began)
            self._depth += 1
            try:
                return original(handle, *args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._note(id(handle), began, submits=submits)

        return timed

    def _note(self, handle: int, began: float, *, submits: bool) -> None:
        ended = time.perf_counter()
        self.waited_s[self._read_part()] += ended - began
        if not submits:
            self._in_flight.append((self._submitted.pop(handle, began), ended))
