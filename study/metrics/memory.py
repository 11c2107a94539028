"""Measure peak memory per phase of a run, on the device and on the host, and the mean device memory over steps.

There are three device figures: `allocated` by tensors, `reserved` by the caching allocator, and `device`, the used
memory of the GPU, including contexts, communicators and all other processes. The peaks of torch and of Linux are reset
when a phase begins.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from study.metrics.clock import MeasurementOverhead, nvml_handle

Phase = Literal["init", "load", "first_step", "steady", "eval", "save"]


class MemoryMeter:
    """Peaks in bytes by phase. If a phase is entered several times, its peak is the maximum over all times."""

    def __init__(self, device: torch.device, cost: MeasurementOverhead | None = None) -> None:
        self.device = device
        self.cost = cost or MeasurementOverhead()
        self._nvml = nvml_handle(device)
        self._host = _HostPeak()
        self._peaks: dict[str, dict[str, int | None]] = {}
        self._device_peak: int | None = None
        self._device_sum = 0
        self._device_samples = 0
        self._phase: Phase = "init"
        self._has_stepped = False
        self._reset()

    def enter_phase(self, phase: Phase) -> None:
        self._harvest()
        self._phase, self._has_stepped = phase, False
        self._reset()

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        interrupted = self._phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(interrupted)

    def step_done(self) -> None:
        """Sample the device's memory once; the peaks need no samples."""
        self._has_stepped = True
        with self.cost:
            used = self._sample_device()
            if used is not None:
                self._device_sum += used
                self._device_samples += 1

    def report(self) -> dict[str, Any]:
        """Return this rank's `{phase: {allocated, reserved, device, host}}` and its mean device memory over steps."""
        self._harvest()
        mean = self._device_sum / self._device_samples if self._device_samples else None
        return {"phases": {name: dict(peaks) for name, peaks in self._peaks.items()}, "device_mean_over_steps": mean}

    def _harvest(self) -> None:
        if self._phase == "steady" and not self._has_stepped and "steady" in self._peaks:
            # No step follows the last evaluation, and modules that it imported do not belong to this phase.
            return
        self._sample_device()
        on_cuda = self.device.type == "cuda"
        now = {
            "allocated": torch.cuda.max_memory_allocated(self.device) if on_cuda else None,
            "reserved": torch.cuda.max_memory_reserved(self.device) if on_cuda else None,
            "device": self._device_peak,
            "host": self._host.read(),
        }
        peaks = self._peaks.setdefault(self._phase, now)
        for name, value in now.items():
            if value is not None:
                peaks[name] = max(peaks[name] or 0, value)

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._host.reset()
        self._device_peak = None
        self._sample_device()

    def _sample_device(self) -> int | None:
        if self._nvml is None:
            return None
        import pynvml

        try:
            # Version 1 of this call includes the driver's reserved memory.
            used = int(pynvml.nvmlDeviceGetMemoryInfo(self._nvml, version=pynvml.nvmlMemory_v2).used)
        except pynvml.NVMLError:
            # Some virtual machines forbid this; no run depends on it. Earlier samples alone would not be a peak.
            self._nvml = self._device_peak = None
            self._device_samples = 0
            for peaks in self._peaks.values():
                peaks["device"] = None
            return None
        self._device_peak = max(used, self._device_peak or 0)
        return used


class _HostPeak:
    def __init__(self) -> None:
        self._process = psutil.Process()
        self._resettable = True
        self._lifetime_at_reset = 0
        self._resident_at_reset = 0
        self.reset()

    def reset(self) -> None:
        if hasattr(psutil, "heap_trim"):
            # Return the memory freed so far to the system. psutil before 7.2, which `study verify` takes, cannot.
            psutil.heap_trim()
        try:
            # proc(5): "5" resets VmHWM. Some containers do not permit that.
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._resettable = False
        self._lifetime_at_reset = _lifetime_peak()
        self._resident_at_reset = self._process.memory_info().rss

    def read(self) -> int:
        if self._resettable:
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        lifetime = _lifetime_peak()
        if lifetime > self._lifetime_at_reset:
            return lifetime
        # An earlier phase had the larger peak, so only the start and the end of this one are measurable.
        return max(self._resident_at_reset, self._process.memory_info().rss)


def _lifetime_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
