"""The receipt of a training loop: two lines measure a few steps, and print memory and time by part at the end.

receipt = Receipt(model, optimizer)       # after accelerator.prepare, deepspeed.initialize or fully_shard
for batch in receipt.steps(loader):       # or: with receipt.step():
    ...

It takes part in no collective, draws no random number and changes no tensor. It has hooks only in the measured steps.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from study import __version__
from study.host.folders import resolve_path
from study.host.memory import available_cores
from study.host.stacks import package_version
from study.metrics.clock import StepClock, nvml_handle
from study.metrics.inventory import bytes_in_use
from study.metrics.state import base_optimizer
from study.predictor.hardware import mfu
from study.receipt import live_engine
from study.receipt.changes import predict_changes
from study.receipt.document import (
    PRECISIONS,
    CollectiveTime,
    CollectiveTraffic,
    EngineFacts,
    HostFacts,
    MeasuredForecast,
    ModelFacts,
    OwnCost,
    PeakFacts,
    RankFacts,
    ReceiptDocument,
    SpeedFacts,
    StateFacts,
    TimeFacts,
    WorkFacts,
    write_receipt,
)
from study.receipt.exchange import Exchange
from study.receipt.exposure import OFFLOAD_KINDS, Exposure, ExposureProfiler
from study.receipt.failures import Failures, WrongUse, print_notice
from study.receipt.faults import find_combination, find_faults, matrix_gap
from study.receipt.figures import list_figures, log_figures
from study.receipt.forecast import make_forecast
from study.receipt.loop import StepBlock, Steps
from study.receipt.mine_record import is_recording
from study.receipt.page import receipt_lines
from study.receipt.peak import GuardedState, GuardedTraffic, PeakWatch
from study.receipt.timing import PartTimer
from study.receipt.unexplained import explain_attribution
from study.receipt.wrong_uses import (
    AFTER_CLOSE,
    NESTED,
    TWICE,
    ModuleWatch,
    UseWatch,
    check_engine,
    check_optimizer,
    check_options,
    describe_error,
    error_of_the_program,
    has_receipt,
    is_ending_by_error,
    is_path,
    register_receipt,
    unregister_receipt,
)
from study.records.directory import utc_now

T = TypeVar("T")

DEFAULT_PATH = "receipt.json"
MIN_STEPS = 3
# Steps between two flushes of the clock, which wait for the device once.
_FLUSH_EVERY = 256
# Disturbed steps that are measured again.
_MAX_EXTRA_STEPS = 20
_WAIT_FOR_RANKS_S = 5.0
# Before the figures of rank 0 are logged: the others end the same step.
_WAIT_FOR_LOG_S = 1.0
# Steps after the measured ones at which rank 0 looks for the figures of other ranks, and at each power of two after it.
_FIRST_LOOK = 16
_PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "peft", "trl")


_UNKNOWN_MODEL = ModelFacts(name="a model", parameters=0, trained_parameters=0)


class Receipt:
    """Meter of a training loop that is not this study's.

    After `after` optimizer steps it measures `steps` of them: all but the last two by the time of their parts, one with
    torch's profiler, and the last one for memory and communication. Rank 0 writes `path` and prints it at the end.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *arguments: object,
        path: str | Path = DEFAULT_PATH,
        after: int = 5,
        steps: int = 5,
        quiet: bool = False,
        log: Callable[..., object] | None = None,
        **unknown: object,
    ) -> None:
        self._failures = Failures()
        self._uses = UseWatch(self._failures)
        # A TypeError of Python would end the program.
        self._wrong_options = (*map(repr, arguments), *unknown)
        self._log = log
        self._last_figures: dict[str, float] = {}
        # In the program of `study verify --mine` it compares steps with plain training, and measures nothing.
        self._is_off = is_recording()
        self._path, self._quiet = path, quiet
        self._after, self._measured = after, steps
        # Completed steps, and those of the optimizer since the last of them.
        self._step = self._optimizer_steps = 0
        self._is_disturbed = False
        self._is_closed = False
        # Of steps that have begun: more than one are inside of each other.
        self._depth = 0
        self._was_left = self._is_left_whole = False
        self._left_by: str | None = None
        self._modules: ModuleWatch | None = None
        self._timer: PartTimer | None = None
        self._watches: contextlib.ExitStack | None = None
        self._peak: PeakWatch | None = None
        self._traffic: GuardedTraffic | None = None
        self._state: GuardedState | None = None
        self._profiler: ExposureProfiler | None = None
        self._profiled: PartTimer | None = None
        self._timed: list[PartTimer] = []
        self._measured_steps: list[int] = []
        self._last_timer: PartTimer | None = None
        self._reduced: list[int] = []
        self._facts: tuple[EngineFacts, ModelFacts] | None = None
        self._measured_cost_s = self._later_cost_s = self._finish_s = 0.0
        self._later_steps = self._extra_steps = 0
        self._exchange: Exchange | None = None
        self._clock: StepClock | None = None
        self._model: Any = None
        self._given: Any = None
        self._optimizer: Any = None
        self._doing: str | None = None
        self._state_of_run = "too_short"
        self._has_begun = False
        self._counter: Any = None
        if self._is_off:
            self._is_closed = self._uses.is_off = True
            # Imported here: a receipt that measures needs none of it.
            from study.receipt.recorder import start_recording

            start_recording(model, optimizer)
            return
        if has_receipt(model):
            # It writes nothing: both may have the same path.
            self._is_off = self._is_closed = self._uses.is_off = True
            print_notice(f"wrong use: {TWICE}; training goes on")
            return
        try:
            self._prepare(model, optimizer)
        except Exception as error:
            self._turn_off("setting up", error)
        atexit.register(self._close_at_exit)

    def _prepare(self, model: Any, optimizer: Any) -> None:
        # First, since rank 0 alone writes, wrong uses included.
        self._exchange = Exchange()
        if not is_path(self._path):
            self._uses.note(f"path is {self._path!r}, so the file is {DEFAULT_PATH}: give it a file's name")
            self._path = DEFAULT_PATH
        check_options(self._wrong_options)
        if self._log is not None and not callable(self._log):
            raise WrongUse(f"log is {self._log!r}; give it a function, such as accelerator.log")
        if not isinstance(model, nn.Module):
            raise WrongUse(f"the model is a {type(model).__name__}; give Receipt the model that is trained")
        if optimizer is not None and not hasattr(optimizer, "step"):
            raise WrongUse(f"the optimizer is a {type(optimizer).__name__}; give Receipt the one that steps")
        for name, value, least in (("after", self._after, 1), ("steps", self._measured, MIN_STEPS)):
            if not isinstance(value, int) or value < least:
                raise WrongUse(f"{name} is {value!r}; give it a whole number from {least} up")
        self._model = live_engine.find_engine(model)
        self._optimizer = optimizer if optimizer is not None else getattr(self._model, "optimizer", None)
        if self._optimizer is not None:
            check_optimizer(self._model, self._optimizer)
        self._given = model
        self._first_kind = live_engine.find_kind(self._model)
        self._device = live_engine.find_device(self._model)
        # Steps that are watched or profiled are left out of the median.
        self._clock = StepClock(self._device, warmup_steps=self._after)
        base = base_optimizer(self._optimizer) if self._optimizer is not None else None
        self._counts_engine_steps = hasattr(self._model, "global_steps")
        self._engine_steps = getattr(self._model, "global_steps", 0)
        self._counts_steps = self._counts_engine_steps or isinstance(base, torch.optim.Optimizer)
        if isinstance(base, torch.optim.Optimizer) and not self._counts_engine_steps:
            self._counter = base.register_step_post_hook(self._count_step)
        register_receipt(self._model)

    def _begin_training(self) -> None:
        assert self._clock is not None
        assert self._exchange is not None
        check_engine(self._given, self._first_kind)
        copies = self._exchange.ranks // live_engine.find_groups(self._model).ranks_of_a_sample
        if copies > 1 and live_engine.find_kind(self._model) == "none":
            print_notice(
                f"{type(self._given).__name__} is in no engine, although there are {self._exchange.ranks} ranks:"
                " make the receipt after accelerator.prepare, deepspeed.initialize or fully_shard"
            )
        self._clock.resume()

    # --- The loop.

    def steps(self, loader: Iterable[T], *arguments: object, **unknown: object) -> Steps[T]:
        """Return the batches of a loader, for any number of passes; a step may have several batches."""
        self._uses.check_arguments("steps", arguments, unknown)
        return Steps(loader, self._enclose)

    def _enclose(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches of one pass over a loader."""
        self._check_open()
        while True:
            timer = self._timer
            if timer is not None:
                timer.begin_data()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                if timer is not None:
                    timer.end_data()
            self._enter_step()
            try:
                yield batch
            except GeneratorExit:
                # The loop was left before its end: by `break`, or by an error.
                self._leave_pass()
                raise
            self._exit_step()

    @property
    def step(self) -> StepBlock:
        """Block that encloses a step, or a micro-batch of one."""
        return StepBlock(self._uses, self._enter_block, self._leave_block)

    def _enter_block(self) -> None:
        self._check_open()
        self._enter_step()

    def _leave_block(self, error: BaseException | None) -> None:
        if error is not None:
            self._leave_step(error)
        else:
            self._exit_step()

    def _check_open(self) -> None:
        if self._is_closed:
            self._uses.note(AFTER_CLOSE)

    def _enter_step(self) -> None:
        self._depth += 1
        if self._depth > 1 and not self._is_closed:
            self._uses.note(NESTED)
        self._begin()

    def _exit_step(self) -> None:
        self._depth = max(0, self._depth - 1)
        self._end(is_certain=False)

    def begin_step(self, *arguments: object, **unknown: object) -> None:
        """Begin a step or, after a micro-batch without an optimizer step, continue it."""
        self._uses.check_arguments("begin_step", arguments, unknown)
        self._check_open()
        if not (self._is_off or self._is_closed):
            self._uses.begin(self._counts_steps and self._is_stepped)
        self._begin()

    def end_step(self, is_certain: bool = True, *arguments: object, **unknown: object) -> None:
        """End a step. If that is not certain, it has ended only if the optimizer has stepped meanwhile."""
        self._uses.check_arguments("end_step", arguments, unknown)
        self._check_open()
        if not (self._is_off or self._is_closed) and self._uses.end(is_inside=self._depth > 0):
            self._end(is_certain)

    def _begin(self) -> None:
        self._uses.begun += 1
        self._is_left_whole = False
        if self._is_off or self._is_closed:
            return
        began = time.perf_counter()
        try:
            if not self._has_begun:
                self._has_begun = True
                self._begin_training()
            if self._watches is None and self._doing in ("profile", "watch"):
                self._start_watching()
        except Exception as error:
            self._turn_off("beginning a step", error)
        self._count_cost(began)

    def _end(self, is_certain: bool) -> None:
        if self._is_off or self._is_closed:
            return
        began = time.perf_counter()
        try:
            if is_certain or self._has_stepped():
                self._end_step()
        except Exception as error:
            self._turn_off("ending a step", error)
        self._count_cost(began)

    def disturb(self) -> None:
        """Note that something else ran, such as an evaluation: this step is measured again at the next one."""
        self._is_disturbed = True

    @property
    def _is_stepped(self) -> bool:
        """Whether the optimizer has stepped since the end of the last step."""
        if self._counts_engine_steps:
            return int(self._model.global_steps) != self._engine_steps
        return self._optimizer_steps > 0

    def _has_stepped(self) -> bool:
        """Return whether a step has ended: without a counted optimizer each does."""
        if not self._counts_steps:
            return True
        is_stepped = self._is_stepped
        self._reset_steps()
        return is_stepped

    def _reset_steps(self) -> None:
        if self._counts_engine_steps:
            self._engine_steps = int(self._model.global_steps)
        self._optimizer_steps = 0

    def _count_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def _count_cost(self, began: float) -> None:
        seconds = time.perf_counter() - began
        if self._step > self._after + self._measured + self._extra_steps:
            self._later_cost_s += seconds
        elif self._step >= self._after:
            self._measured_cost_s += seconds

    def _end_step(self) -> None:
        clock = self._clock
        assert clock is not None
        self._step += 1
        self._reset_steps()
        if self._was_left and self._step > self._after and self._extra_steps < _MAX_EXTRA_STEPS:
            # An error has ended the measurement, and the program has caught it: measured again.
            self._extra_steps += 1
        self._was_left = False
        self._stop_measuring()
        clock.step_done(self._step)
        if self._step % _FLUSH_EVERY == 0:
            clock.flush()
        last = self._after + self._measured + self._extra_steps
        if self._step < last:
            self._start_measuring()
        elif self._step == last:
            began = time.perf_counter()
            self._finish_measuring()
            self._finish_s = time.perf_counter() - began
        else:
            self._later_steps += 1
            # Other ranks may have published later: look again, ever more rarely.
            later = self._step - last
            if later >= _FIRST_LOOK and later.bit_count() == 1:
                self._collect()
        self._is_disturbed = False

    def _plan(self) -> str | None:
        """Return the purpose of measuring the next step; None: it is not measured."""
        place = self._step + 1 - self._after - self._extra_steps
        if place <= 0:
            return None
        if place == self._measured:
            return "watch"
        return "profile" if place == self._measured - 1 else "time"

    def _start_measuring(self) -> None:
        self._doing = self._plan()
        if self._doing is None:
            return
        if self._doing != "time":
            assert self._clock is not None
            self._clock.exclude_next_step()
        if self._modules is None:
            self._modules = ModuleWatch(self._model)
        self._timer = PartTimer(self._model, self._optimizer, self._device, self._failures)
        self._timer.open()

    def _start_watching(self) -> None:
        """Enter the profiler or the dispatch modes, once the data is there."""
        timer = self._timer
        assert timer is not None
        self._watches = contextlib.ExitStack()
        if self._doing == "profile":
            with self._failures.caught("starting torch's profiler"):
                self._profiler = ExposureProfiler(self._device, self._step + 1)
                self._profiler.warm_up()
                self._profiler.start()
            return
        with self._failures.caught("watching a step"):
            self._traffic = GuardedTraffic(self._step + 1, self._failures)
            self._peak = PeakWatch(self._model, self._optimizer, timer, self._device, self._failures)
            timer.after_backward = self._note_reductions
            timer.on_phase = self._peak.log.enter_phase
            if self._counts_steps:
                self._state = GuardedState(self._model, self._optimizer, self._device, self._failures)
                self._watches.enter_context(self._state)
            self._watches.enter_context(self._traffic)
            self._watches.enter_context(self._peak)

    def _note_reductions(self) -> None:
        assert self._traffic is not None
        self._reduced.append(self._traffic.reduced_bytes)

    def _stop_measuring(self) -> None:
        timer, doing = self._timer, self._doing
        if timer is None:
            return
        if self._watches is not None:
            self._watches.close()
        if self._profiler is not None and self._watches is not None and doing == "profile":
            with self._failures.caught("reading torch's profiler"):
                self._profiler.stop()
        timer.close()
        self._timer = self._watches = self._doing = None
        assert self._modules is not None
        self._modules.check()
        if self._is_disturbed and self._extra_steps < _MAX_EXTRA_STEPS:
            # It is measured again.
            self._extra_steps += 1
            self._reduced = []
            return
        self._measured_steps.append(self._step)
        self._last_timer = timer
        if doing == "time":
            self._timed.append(timer)
        elif doing == "profile":
            self._profiled = timer

    def _leave_pass(self) -> None:
        """End the last step of a pass if its optimizer has stepped, as at a `break` behind it; else leave it."""
        is_on = not (self._is_off or self._is_closed)
        self._is_left_whole = is_on and self._counts_steps and self._is_stepped
        if self._is_left_whole:
            self._exit_step()
        else:
            self._leave_step()

    def _leave_step(self, error: BaseException | None = None) -> None:
        """Leave a step that has begun and does not end."""
        if isinstance(error, Exception) and not self._is_closed:
            self._left_by = describe_error(error)
            print_notice(f"step {self._step + 1} was left by {self._left_by}")
        self._was_left = self._was_left or self._timer is not None
        self._depth = 0
        self._abandon_step()

    def _abandon_step(self) -> None:
        """Take all hooks off in the middle of a step."""
        watches, timer, profiler = self._watches, self._timer, self._profiler
        self._timer = self._watches = None
        with self._failures.caught("leaving a step"):
            if watches is not None:
                watches.close()
        with self._failures.caught("leaving a step"):
            if timer is not None:
                timer.close()
        with self._failures.caught("leaving a step"):
            # torch has one profiler for the whole process, which the program may use later.
            if self._doing == "profile" and watches is not None and profiler is not None:
                profiler.stop()
        self._doing = None

    def _turn_off(self, doing: str, error: BaseException) -> None:
        """Note a failure after which nothing more is measured."""
        self._failures.note(doing, error)
        self._is_off = self._uses.is_off = True
        self._abandon_step()
        print_notice(f"{self._failures.texts[-1]}; training goes on, and nothing more is measured")

    # --- The figures.

    def _finish_measuring(self) -> None:
        self._state_of_run = "complete"
        with self._failures.caught("reading the engine"):
            facts = live_engine.read_facts(self._model, self._optimizer)
            if self._peak is not None and self._peak.flops_by_dtype:
                most = self._peak.flops_by_dtype.most_common(1)[0][0]
                facts = facts.model_copy(update={"compute_dtype": most})
            self._facts = facts, live_engine.read_model(self._model)
        with self._failures.caught("publishing to rank 0"):
            assert self._exchange is not None
            self._exchange.publish(self._rank_facts().model_dump(mode="json"))
        self._collect(_WAIT_FOR_LOG_S if self._log is not None else 0.0)
        if self._is_first:
            with self._failures.caught("writing the receipt"):
                self._write(self.document(judges=False))
        if self._log is not None:
            with self._failures.caught("logging the figures"):
                log_figures(self._log, self.figures(), self._step)

    def figures(self) -> dict[str, float]:
        """Return the figures for a tracker by name; empty before the measured steps have ended."""
        if self._is_closed or self._state_of_run != "complete":
            return dict(self._last_figures)
        receipt = self.document(judges=False)
        if self._is_first:
            receipt = receipt.model_copy(update={"forecast": self._forecast(receipt)})
        return list_figures(receipt)

    def _forecast(self, receipt: ReceiptDocument) -> MeasuredForecast:
        """Return the predicted figures next to the measured ones."""
        with self._failures.caught("asking the predictor"):
            return make_forecast(receipt)
        return MeasuredForecast()

    def _collect(self, wait_s: float = 0.0) -> None:
        if self._exchange is not None and self._is_first:
            with self._failures.caught("reading what other ranks measured"):
                self._exchange.collect(wait_s)

    @property
    def _is_first(self) -> bool:
        return self._exchange is None or self._exchange.rank == 0

    def _median_timer(self) -> PartTimer | None:
        """Return the timed step with the median time."""
        timers = sorted(self._timed, key=lambda timer: timer.total_s)
        return timers[len(timers) // 2] if timers else None

    def _exposure(self) -> Exposure | None:
        return self._profiler.exposure if self._profiler is not None else None

    def _time(self) -> TimeFacts:
        clock, timer, exposure = self._clock, self._median_timer(), self._exposure()
        assert clock is not None
        clock.flush()
        times = clock.counted_step_times
        parts: dict[str, float] = timer.parts if timer is not None else {}
        if parts:
            parts["communication"] = 0.0
        exposed: dict[str, CollectiveTime] = {}
        if exposure is not None and self._profiled is not None and parts:
            exposed = self._exposed_times(exposure, parts)
        offload = {kind: row for kind, row in exposed.items() if kind in OFFLOAD_KINDS}
        if timer is not None and timer.nvme.waited_s:
            waited_s = sum(timer.nvme.waited_s.values())
            offload["nvme"] = CollectiveTime(in_flight_s=timer.nvme.in_flight_s, exposed_s=waited_s)
        return TimeFacts(
            step_s=statistics.median(times) if times else None,
            steps=len(times),
            parts=parts,
            collectives={kind: row for kind, row in exposed.items() if kind not in OFFLOAD_KINDS},
            offload=offload,
        )

    def _exposed_times(self, exposure: Exposure, parts: dict[str, float]) -> dict[str, CollectiveTime]:
        """Move exposed communication and copies out of the other parts: fractions of the profiled step's parts."""
        assert self._profiled is not None
        profiled, timed = self._profiled.parts, dict(parts)
        exposed: defaultdict[str, float] = defaultdict(float)
        profiled_exposed: defaultdict[str, float] = defaultdict(float)
        for (part, kind), seconds in exposure.exposed.items():
            fraction = min(1.0, seconds / profiled[part]) if profiled.get(part) else 0.0
            moved = min(parts[part], fraction * timed[part])
            parts[part] -= moved
            parts["offload" if kind in OFFLOAD_KINDS else "communication"] += moved
            exposed[kind] += moved
            profiled_exposed[kind] += seconds
        times = {}
        for kind, seconds in exposure.in_flight.items():
            # The profiled step is slower than others.
            scale = exposed[kind] / profiled_exposed[kind] if profiled_exposed[kind] else 1.0
            times[kind] = CollectiveTime(in_flight_s=seconds * scale, exposed_s=exposed[kind])
        return times

    def _rank_facts(self) -> RankFacts:
        time_facts = self._time()
        busy = None
        if time_facts.parts:
            waits = sum(time_facts.parts[part] for part in ("communication", "offload", "data"))
            busy = sum(time_facts.parts.values()) - waits
        assert self._exchange is not None
        return RankFacts(
            rank=self._exchange.rank,
            busy_s=busy,
            process_peak_bytes=_process_peak(),
            peak_bytes=self._peak.peak_bytes if self._peak is not None and self._peak.parts else None,
        )

    def _memory(self) -> PeakFacts | None:
        peak = self._peak
        if peak is None or not peak.parts:
            return None
        # Without a meter of the heap the total is the sum of the parts.
        outside = peak.outside_bytes if bytes_in_use(self._device) is not None else None
        allocator_peak = None
        if self._device.type == "cuda":
            outside = _outside_torch(self._device)
            allocator_peak = torch.cuda.max_memory_allocated(self._device)
        return PeakFacts(
            moment=peak.moment,
            total_bytes=peak.peak_bytes,
            parts=peak.parts,
            host_parts=peak.host_parts,
            allocator_slack_bytes=peak.slack_bytes,
            outside_torch_bytes=outside,
            process_peak_bytes=_process_peak(),
            allocator_peak_bytes=allocator_peak,
            kept_output_bytes=self._last_timer.kept_output_bytes if self._last_timer is not None else None,
        )

    def _work(self) -> WorkFacts:
        timer = self._last_timer
        work = WorkFacts(steps=self._step, measured_steps=tuple(self._measured_steps))
        if timer is None or not timer.micro_batches:
            return work
        return work.model_copy(
            update={
                "micro_batches": timer.micro_batches,
                "samples": timer.samples,
                "sequence_length": timer.sequence_length,
            }
        )

    def _speed(self, facts: EngineFacts, work: WorkFacts, step_s: float | None) -> SpeedFacts:
        tokens = None
        if work.micro_batches and work.samples and work.sequence_length:
            tokens = work.micro_batches * work.samples * work.sequence_length * facts.input_ranks
        flops = self._peak.flops if self._peak is not None and self._peak.flops else None
        utilization, missing = None, None
        if flops is None:
            missing = "no matrix product was seen"
        elif facts.device == "cpu":
            missing = "the peak rate of CPU cores is not known"
        elif step_s is not None:
            precision = PRECISIONS.get(facts.compute_dtype or "", "fp32")
            utilization = mfu(flops, step_s, 1, facts.device, precision)
            missing = f"the peak rate of {facts.device} is not known" if utilization is None else None
        return SpeedFacts(
            tokens_per_s=tokens / step_s if tokens and step_s else None,
            flops_per_step=flops,
            mfu=utilization,
            mfu_missing=missing,
        )

    def document(self, judges: bool = True) -> ReceiptDocument:
        """Return the figures so far; `judges`: with the prediction and the faults, which take a moment."""
        engine, model = self._facts or (EngineFacts(engine="none"), _UNKNOWN_MODEL)
        time_facts, work = TimeFacts(), WorkFacts(steps=self._step)
        if self._clock is not None:
            with self._failures.caught("reading times"):
                time_facts, work = self._time(), self._work()
        receipt = ReceiptDocument(
            made_at=utc_now(),
            state=self._state_of_run,  # type: ignore[arg-type]
            packages={name: package_version(name) for name in _PACKAGES} | {"zero-study": __version__},
            engine=engine,
            model=model,
            work=work,
            time=time_facts,
            cost=self._cost(time_facts.step_s),
        )
        update: dict[str, Any] = {}
        with self._failures.caught("reading memory"):
            update["memory"] = self._memory()
            if self._peak is not None and self._peak.parts:
                update["timeline"] = self._peak.log.timeline
            update["host"] = HostFacts(cores=available_cores(), ranks=_ranks_of_this_machine())
            if self._state is not None and self._state.report is not None:
                update["model_state"] = StateFacts(**self._state.report["state_bytes"])
        with self._failures.caught("reading communication"):
            if self._traffic is not None and self._traffic.world_size > 1:
                update["traffic"] = self._traffic_facts()
                update["reduced_by_dtype"] = dict(self._traffic.reduced_by_dtype)
                ends = [0, *self._reduced]
                update["reduced_bytes"] = tuple(end - begin for begin, end in itertools.pairwise(ends))
        with self._failures.caught("computing the speed"):
            update["speed"] = self._speed(engine, work, time_facts.step_s)
        if self._exchange is not None:
            received = sorted(self._exchange.received.items())
            update["ranks"] = tuple(RankFacts.model_validate(document) for _, document in received)
        receipt = receipt.model_copy(update=update)
        if receipt.memory is not None:
            memory = receipt.memory.model_copy(update={"low_attribution": explain_attribution(receipt)})
            receipt = receipt.model_copy(update={"memory": memory})
        receipt = receipt.model_copy(update={"unavailable": tuple(self._unavailable(receipt))})
        if judges and self._state_of_run == "complete":
            receipt = receipt.model_copy(update={"forecast": self._forecast(receipt)})
            with self._failures.caught("predicting changes"):
                receipt = receipt.model_copy(update={"changes": predict_changes(receipt)})
            with self._failures.caught("looking for faults"):
                receipt = receipt.model_copy(update={"faults": tuple(find_faults(receipt))})
            with self._failures.caught("looking up the combination of features"):
                receipt = receipt.model_copy(update={"combination": find_combination(receipt)})
        return receipt.model_copy(update={"failures": tuple(self._failures.texts)})

    def _unavailable(self, receipt: ReceiptDocument) -> Iterator[str]:
        """Yield the figures that are not measurable on this machine or of this program."""
        if receipt.state != "complete":
            yield f"memory, communication and parts of time: {self._cause_of_end}"
            return
        if not receipt.counts_bytes_in_use:
            yield "bytes that no part has: psutil before 7.2 counts no heap, and the peak is the sum of its parts"
        if receipt.engine.device == "cpu":
            yield "the allocator's slack: malloc's free blocks are not counted on a CPU"
        elif receipt.memory is not None and receipt.memory.outside_torch_bytes is None:
            yield "memory outside of torch: NVML does not answer here"
        if receipt.engine.device == "cpu" and "cpu" in (receipt.engine.offload_optimizer, receipt.engine.offload_param):
            yield "time of host traffic: on CPU ranks the offloaded state is in the memory that computes"
        if receipt.engine.compiled:
            yield "single operations of code that is compiled into one kernel: its activations and FLOPs"
        if (gap := matrix_gap(receipt.engine)) is not None:
            yield f"its own row in the matrix of releases: {gap} is not in it; faults of the stage are looked for"
        if receipt.work.micro_batches is None:
            yield "micro-batches and tokens: no forward pass of the model was seen"
        if missing := receipt.engine.ranks - len(receipt.ranks):
            yield f"{missing} of {receipt.engine.ranks} ranks: they did not answer"

    @property
    def _cause_of_end(self) -> str:
        if self._is_off:
            return f"the receipt has measured nothing after step {self._step}"
        if self._left_by is not None:
            step = self._step if self._is_left_whole else self._step + 1
            return f"step {step} was left by {self._left_by}"
        first, last = self._after + 1, self._after + self._measured + self._extra_steps
        return (
            f"the run ended after {self._step} steps, and the receipt measures steps {first} to {last}:"
            f" train for longer, or make it with after=1, steps={MIN_STEPS}"
        )

    def _traffic_facts(self) -> dict[str, CollectiveTraffic]:
        assert self._traffic is not None
        return {
            kind: CollectiveTraffic(
                calls=int(counts["calls"]),
                payload_bytes=int(counts["payload_bytes"]),
                ring_bytes=counts["wire_bytes_per_rank"],
            )
            for kind, counts in sorted(self._traffic.collectives.items())
        }

    def _cost(self, step_s: float | None) -> OwnCost:
        later = None
        if self._later_steps and step_s:
            later = self._later_cost_s / self._later_steps / step_s
        added = None
        # The step that is measured last is the watched one.
        if self._state_of_run == "complete" and self._profiled is not None and self._last_timer is not None and step_s:
            slow = (self._profiled.total_s, self._last_timer.total_s)
            added = sum(max(0.0, seconds - step_s) for seconds in slow) + self._finish_s
        return OwnCost(measured_s=self._measured_cost_s, added_s=added, later_fraction=later)

    def _write(self, receipt: ReceiptDocument) -> None:
        path = resolve_path(str(self._path))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_receipt(path, receipt)

    def _close_at_exit(self) -> None:
        error = error_of_the_program()
        if isinstance(error, Exception):
            self._left_by = describe_error(error)
        self.close()

    def close(self) -> None:
        """Write and print the receipt on rank 0; later calls do nothing. It is called when the process ends."""
        if self._is_closed:
            return
        if isinstance(error := sys.exc_info()[1], Exception) and self._left_by is None:
            # In a program's `finally`.
            self._left_by = describe_error(error)
        if not self._step and self._left_by is None and not is_ending_by_error():
            self._uses.check_at_end(self._optimizer)
        with self._failures.caught("keeping the figures"):
            self._last_figures = list_figures(self.document(judges=False))
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        is_complete = self._state_of_run == "complete"
        if not is_complete and (self._depth or self._was_left or self._left_by is not None):
            self._state_of_run = "interrupted"
        self._abandon_step()
        if self._counter is not None:
            self._counter.remove()
        if self._is_first:
            self._publish_receipt()
        # A receipt lives as long as the process, and the model need not.
        if self._model is not None:
            unregister_receipt(self._model)
        self._model = self._given = self._modules = self._optimizer = self._peak = self._state = self._profiled = (
            self._last_timer
        ) = None
        self._timed = []

    def _publish_receipt(self) -> None:
        if self._state_of_run == "complete":
            self._collect(_WAIT_FOR_RANKS_S)
        with self._failures.caught("writing the receipt"):
            try:
                receipt = self.document()
            except KeyboardInterrupt:
                # A second Ctrl-C: without the prediction, which may trace a model.
                receipt = self.document(judges=False)
            self._last_figures = list_figures(receipt)
            if not self._quiet:
                print("\n".join(receipt_lines(receipt, str(self._path))), flush=True)
            self._write(receipt)
            return
        print_notice(self._failures.texts[-1])


def _process_peak() -> int:
    """Return the peak of the process's resident memory since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _ranks_of_this_machine() -> int:
    """Return the number of ranks that the launcher has started here; without one, that of all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)


def _outside_torch(device: torch.device) -> int | None:
    """Return the used memory of a GPU that torch has not reserved, of all processes; None if it cannot be read."""
    handle = nvml_handle(device)
    if handle is None:
        return None
    import pynvml

    used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    return max(0, used - torch.cuda.memory_reserved(device))
