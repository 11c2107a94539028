"""Measure time, memory, energy, communication and model state of a run:

meters = Meters(device, watched_step=7, warmup_steps=6, profiled_steps=range(28, 31), records_profile=is_main)
model, optimizer = accelerator.prepare(...)
meters.start(model, optimizer)
for step in ...:
    with meters.step(step):
        ...forward, backward, optimizer step...
    rows = meters.flush()
    with meters.untimed_phase("eval"):
        ...
meters.finish()
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from study.metrics.clock import MIN_WARMUP_STEPS, EnergyMeter, MeasurementOverhead, StepClock, step_time_statistics
from study.metrics.inventory import ForwardWatch
from study.metrics.memory import MemoryMeter, Phase
from study.metrics.profiling import PROFILER_WARMUP_STEPS, StepProfiler
from study.metrics.state import StateWatch, release_gathered
from study.metrics.traffic import TrafficWatch


class Meters:
    """All meters of one rank. Create them before the model.

    The last steps of a run can be profiled. All ranks exclude them from their step times, and one rank records them.
    """

    def __init__(
        self,
        device: torch.device,
        watched_step: int | None,
        warmup_steps: int = MIN_WARMUP_STEPS,
        profiled_steps: range = range(0),
        records_profile: bool = False,
        ranks_per_machine: int | None = None,
    ) -> None:
        self.ranks_per_machine = ranks_per_machine
        self.cost = MeasurementOverhead()
        self._device = device
        self.energy = EnergyMeter(device)
        self.memory = MemoryMeter(device, self.cost)
        self.clock = StepClock(device, warmup_steps, cost=self.cost, on_segment=self._segment)
        self.warmup_steps = warmup_steps
        self.watched_step = watched_step
        self.profiled_steps = profiled_steps
        self.profiler = StepProfiler(device, profiled_steps) if profiled_steps and records_profile else None
        self.traffic: dict[str, Any] | None = None
        self.state: dict[str, Any] | None = None
        self._started: tuple[Any, Any] | None = None
        self._first_step = True
        self._follows_evaluation = False

    def start(self, model: Any, optimizer: Any) -> None:
        """Start all meters; call it after accelerator.prepare, right before the first step."""
        self._started = (model, optimizer)
        # Free tensors in reference cycles, such as the output layer that transformers replaces to tie it.
        gc.collect()
        self.memory.enter_phase("first_step")
        self.clock.resume()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self.profiled_steps and step == self.profiled_steps[0] - PROFILER_WARMUP_STEPS:
            self.clock.exclude_next_step(PROFILER_WARMUP_STEPS + len(self.profiled_steps))
            if self.profiler is not None:
                with self.paused():
                    self.profiler.warm_up()
        elif self.profiler is not None and step == self.profiled_steps[0]:
            with self.paused():
                self.profiler.start()
        if step == self.watched_step and step not in self.profiled_steps:
            self.clock.exclude_next_step()
            assert self._started is not None, "start() comes before the first step"
            if self._follows_evaluation:
                release_gathered(self._started[0])
            with (
                TrafficWatch(step, self.ranks_per_machine) as traffic,
                ForwardWatch(self._started[0], self._device) as forward,
                StateWatch(*self._started, self._device) as state,
            ):
                yield
            self.traffic, self.state = traffic.report(), state.report and state.report | forward.report
            if state.report is None and state.unknown is None:
                # A loss scaler skipped this step, so the next one is watched.
                self.watched_step = step + 1
        else:
            yield
        self._follows_evaluation = False
        self.clock.step_done(step)
        self.memory.step_done()
        if self._first_step:
            self._first_step = False
            with self.paused():
                self.memory.enter_phase("steady")
        if self.profiler is not None and step == self.profiled_steps[-1]:
            with self.paused():
                self.profiler.stop()

    @contextlib.contextmanager
    def untimed_phase(self, phase: Phase) -> Iterator[None]:
        """Exclude an evaluation or a checkpoint from the step times, and report its memory as a separate phase."""
        self.clock.pause()
        with self.memory.phase(phase):
            yield
        self._follows_evaluation = phase == "eval"
        self.clock.resume_cold()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude short work from the step times: a checkpoint, a gathered metric."""
        self.clock.pause()
        yield
        self.clock.resume()

    def peak_gib(self) -> float:
        """Return the peak memory so far: allocated on the GPU, or resident on the host."""
        phases = self.memory.report()["phases"].values()
        return max(phase["allocated"] or phase["host"] for phase in phases) / 2**30

    def flush(self) -> list[tuple[int, float]]:
        """Return (step, step_time_s) of the steps since the last flush."""
        return self.clock.flush()

    def finish(self) -> None:
        self.clock.pause()

    @property
    def profile(self) -> dict[str, Any] | None:
        """Content of profile.json; None on ranks that do not record it."""
        return self.profiler.document if self.profiler is not None else None

    def summary(self) -> dict[str, float | None]:
        """Return this rank's time and energy for summary.json; call flush() before it."""
        return {
            **step_time_statistics(self.clock.counted_step_times),
            "window_s": self.clock.window_s if self.clock.window_steps else None,
            "window_steps": self.clock.window_steps or None,
            "warmup_steps": self.warmup_steps,
            "self_cost_s": self.cost.seconds,
            "energy_j": self.energy.joules,
        }

    def _segment(self, counted: bool, opened: bool) -> None:
        if counted:
            (self.energy.resume if opened else self.energy.pause)()
        elif self.profiler is not None:
            (self.profiler.begin if opened else self.profiler.end)()
