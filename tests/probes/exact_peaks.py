"""study/train.py, but what is freed goes back to the system at once, and garbage is collected where a phase begins.

So a peak is what a rank held. By default how much of either stays around depends on chance.
"""

from __future__ import annotations

import ctypes
import gc
import os

from study.host import devices
from study.measure.memory import MemoryMeter, Phase
from study.run.exit import exit_status_of
from study.train import main

_M_MMAP_THRESHOLD = -3
_enter_phase = MemoryMeter.enter_phase


def enter_phase_collected(self: MemoryMeter, phase: Phase) -> None:
    # The reference cycles of a parameter hold its part: transformers drops the output layer that it ties.
    gc.collect()
    _enter_phase(self, phase)


def keep_nothing() -> None:
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 2**10)


devices._keep_freed_memory = keep_nothing
MemoryMeter.enter_phase = enter_phase_collected  # type: ignore[method-assign]
os._exit(exit_status_of(main))
