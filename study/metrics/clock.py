"""Measure time and energy per optimizer step, without synchronizing the device at every step.

On CUDA an event is recorded at the end of each step, and read back in batches; elsewhere the host's clock is read.
Warm-up, watched and profiled steps have a time in their row, but are excluded from all statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# In 26 laptop runs of 40 steps the first ones took 54, 27, 1, -, 4 and 2 % longer than later ones (the fourth was
# watched), and from the seventh on there was no difference; the step after the evaluation took 12 % longer (medians).
_WARMUP_DIVISOR, MIN_WARMUP_STEPS, _MAX_WARMUP_STEPS = 5, 3, 10
# If evaluations are closer together, the step after one counts, since too few steps would be left.
STEPS_BETWEEN_EVALUATIONS = 5


def warmup_steps(steps: int) -> int:
    """Return the number of warm-up steps: a fifth of the run, within limits that leave enough steps to count."""
    return min(max(MIN_WARMUP_STEPS, steps // _WARMUP_DIVISOR), _MAX_WARMUP_STEPS)


class MeasurementOverhead:
    """Seconds that the host spends on measuring inside steps. Meters work under `with cost:`, which is never nested."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class StepClock:
    """Clock of every step, and of the window of all counted steps.

    The run is cut into segments with the device synchronized at both ends. The window is the sum of the counted
    segments; uncounted steps (warm-up, watched, profiled) are in separate segments. `on_segment(counted, opened)` is
    called at the start and at the end of a segment.
    """

    def __init__(
        self,
        device: torch.device,
        warmup_steps: int = MIN_WARMUP_STEPS,
        cost: MeasurementOverhead | None = None,
        on_segment: Callable[[bool, bool], None] = lambda counted, opened: None,
    ) -> None:
        self.device = device
        self.cost = cost or MeasurementOverhead()
        self.window_s = 0.0
        self.window_steps = 0
        self.counted_step_times: list[float] = []
        self._on_segment = on_segment
        self._uncounted_left = warmup_steps
        self._counted_in_a_row = 0
        self._marks: list[tuple[int, bool, Any, Any]] = []
        self._last_mark: Any = None
        self._segment_counted: bool | None = None
        self._segment_steps = 0
        self._segment_started = 0.0

    def resume(self) -> None:
        """Start the clock, before the first step and after a pause. The window opens after the warm-up steps."""
        assert self._segment_counted is None, "the clock runs already"
        self._open(counted=self._uncounted_left == 0)

    def step_done(self, step: int) -> None:
        assert self._segment_counted is not None, "resume() comes before a step"
        with self.cost:
            mark = time_mark(self.device)
            self._marks.append((step, self._segment_counted, self._last_mark, mark))
            self._last_mark = mark
            self._segment_steps += 1
        if self._segment_counted:
            self._counted_in_a_row += 1
        else:
            self._uncounted_left -= 1
            if self._uncounted_left == 0:
                self.pause()
                self.resume()

    def pause(self) -> None:
        assert self._segment_counted is not None, "the clock is not running"
        wait_for(self.device)
        if self._segment_counted:
            self.window_s += time.perf_counter() - self._segment_started
            self.window_steps += self._segment_steps
        self._on_segment(self._segment_counted, False)
        self._segment_counted = None

    def exclude_next_step(self, count: int = 1) -> None:
        self.pause()
        self._uncounted_left = max(self._uncounted_left, count)
        self._open(counted=False)

    def resume_cold(self) -> None:
        """Resume after work that evicted the caches: the first step is not counted."""
        self.resume()
        if self._counted_in_a_row >= STEPS_BETWEEN_EVALUATIONS:
            self.exclude_next_step()
            self._counted_in_a_row = 0

    def flush(self) -> list[tuple[int, float]]:
        """Return (step, step_time_s) of the steps since the last flush; on CUDA, wait for the last of them."""
        rows = []
        if self._marks and self.device.type == "cuda":
            self._marks[-1][3].synchronize()
        for step, counted, begin, end in self._marks:
            seconds = elapsed_s(begin, end)
            rows.append((step, seconds))
            if counted:
                self.counted_step_times.append(seconds)
        self._marks.clear()
        return rows

    def _open(self, counted: bool) -> None:
        wait_for(self.device)
        self._segment_counted, self._segment_steps = counted, 0
        self._on_segment(counted, True)
        self._segment_started = time.perf_counter()
        self._last_mark = time_mark(self.device)


def time_mark(device: torch.device) -> Any:
    """Return the time, on a GPU as an event of its stream that does not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_s(begin: Any, end: Any) -> float:
    """Return the seconds between two marks; those of a GPU are known once it has reached them."""
    if isinstance(begin, float):
        return float(end) - begin
    return float(begin.elapsed_time(end)) / 1000


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_time_statistics(times: Sequence[float]) -> dict[str, float | None]:
    """Return the 10th, 50th and 90th percentile of step times; None without any."""
    names = ("step_time_s_p10", "step_time_s_median", "step_time_s_p90")
    values = map(float, np.percentile(times, (10, 50, 90))) if len(times) else (None,) * 3
    return dict(zip(names, values, strict=True))


def nvml_handle(device: torch.device) -> Any | None:
    """Return the NVML handle of this GPU, independent of CUDA_VISIBLE_DEVICES; None without one."""
    # The UUID identifies the GPU (or MIG instance) itself; an index would have to be translated.
    return find_nvml_handle(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None


def find_nvml_handle(uuid: str) -> Any | None:
    """Return the NVML handle of a GPU or MIG instance; None if NVML has none, or only that of a GPU in MIG mode."""
    import pynvml

    try:
        pynvml.nvmlInit()
        for name in (f"MIG-{uuid}", f"GPU-{uuid}"):
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
                continue
            try:
                # In MIG mode the figures of the GPU are not those of the instance.
                is_mig = name.startswith("GPU") and pynvml.nvmlDeviceGetMigMode(handle)[0]
            except pynvml.NVMLError_NotSupported:  # most GPUs have no MIG
                is_mig = False
            return None if is_mig else handle
    except pynvml.NVMLError:
        pass  # no NVML library, or no permission: not measurable here
    return None


class EnergyMeter:
    """Energy in joules between `resume()` and `pause()`, summed over segments; None if NVML cannot read it."""

    def __init__(self, device: torch.device) -> None:
        self._handle = nvml_handle(device)
        self._started_mj: int | None = None
        self._total_mj: int | None = None

    @property
    def joules(self) -> float | None:
        return None if self._total_mj is None else self._total_mj / 1000

    def resume(self) -> None:
        self._started_mj = self._read_mj()

    def pause(self) -> None:
        now = self._read_mj()
        if now is not None and self._started_mj is not None:
            self._total_mj = (self._total_mj or 0) + now - self._started_mj
        self._started_mj = None

    def _read_mj(self) -> int | None:
        if self._handle is None:
            return None
        import pynvml

        try:
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except pynvml.NVMLError:
            self._handle = self._total_mj = None
            return None
