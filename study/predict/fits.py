"""Whether what is predicted fits a box, by the figure itself and by the upper end of its interval."""

from __future__ import annotations

import math

from study.host.memory import GIB
from study.predict.request import Box, Estimate, Memory

# When a host holds most.
_WHEN = {"load": "while each process loads the model", "train": "in training", "save": "while the model is saved"}


def usable_bytes(box: Box) -> float:
    """Of a device, or without any of the node's memory for each rank."""
    if box.in_host_memory:
        return (box.host_gib_per_node or 0) * GIB / box.gpus_per_node
    return box.device.visible_gib * GIB


def device_bytes(memory: Memory, at_upper_end: bool = False) -> float:
    """All that the driver sees of a process: the allocator's pool, and the context beside it."""
    return _end(memory.peak_reserved, at_upper_end) + memory.device_parts["context"]


def excess_bytes(memory: Memory, box: Box, at_upper_end: bool = False) -> float:
    """What is missing, or else the room that is left, as a negative number."""
    host_bytes, held = (box.host_gib_per_node or 0) * GIB, _end(memory.host_peak, at_upper_end)
    if memory.process_peak is not None:
        doubt = _end(memory.process_peak, at_upper_end) - memory.process_peak.value
        return box.gpus_per_node * (memory.peak_reserved.value + doubt) + held - host_bytes
    on_host = held - host_bytes if box.host_gib_per_node is not None else -math.inf
    on_device = device_bytes(memory, at_upper_end) - usable_bytes(box)
    # What is on the host does not go by the samples.
    return max(on_device, on_host) if on_host > 0 else on_device


def fits(memory: Memory, box: Box, at_upper_end: bool = False) -> bool:
    return excess_bytes(memory, box, at_upper_end) <= 0


def left_share(memory: Memory, box: Box, at_upper_end: bool = False) -> float:
    """Of a device, or of the host where that is the device."""
    held = excess_bytes(memory, box, at_upper_end) if box.in_host_memory else None
    usable = usable_bytes(box)
    return 1 - device_bytes(memory, at_upper_end) / usable if held is None else -held / (usable * box.gpus_per_node)


def why(memory: Memory, box: Box) -> str:
    """One line: how much is left, or what is too large."""
    peak, usable = device_bytes(memory), usable_bytes(box)
    if fits(memory, box):
        at_most = excess_bytes(memory, box, at_upper_end=True)
        doubt = f"; may not fit: up to {at_most / GIB:.1f} GiB too much" if at_most > 0 else ""
        return f"{left_share(memory, box):.0%} of the {'memory' if box.in_host_memory else 'device'} is left{doubt}"
    if box.in_host_memory and box.host_gib_per_node is not None:
        needed = box.host_gib_per_node + excess_bytes(memory, box) / GIB
        return f"needs {needed:.1f} GiB of host memory for all ranks, of {box.host_gib_per_node:.1f}"
    if peak > usable or box.host_gib_per_node is None:
        part, size = max(memory.device_parts.items(), key=lambda item: item[1])
        return f"needs {peak / GIB:.1f} GiB of {usable / GIB:.1f}; {part} alone {size / GIB:.1f}"
    when = max(_WHEN, key=memory.host_parts.__getitem__)
    needed = memory.host_peak.value / GIB
    return f"needs {needed:.1f} GiB of host memory, of {box.host_gib_per_node:.1f}, {_WHEN[when]}"


def _end(figure: Estimate, upper: bool) -> float:
    """An interval that lies below its figure, as of a prediction that leans high, is no reason to hope."""
    return max(figure.value, figure.high or 0.0) if upper else figure.value
