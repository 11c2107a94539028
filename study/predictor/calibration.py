"""Corrections of predictions by measured configurations of the same setup: one model, hardware and program.

reports/prediction has the errors with and without them, on published pages with several configurations.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from study.config.errors import UserError
from study.config.precisions import computing_type
from study.config.text import rounded, rounded_seconds
from study.host.memory import GIB
from study.predictor.intervals import SINGLE_ERROR
from study.predictor.memory import predict_memory
from study.predictor.micro_batch import model_flops
from study.predictor.request import Configuration, MemoryUse, Request, SetupCorrection
from study.predictor.state import predict_state
from study.predictor.time import fits, predict_time, why

# Programs pad vocabularies and shorten positions: a model whose parameters differ by less than this is the same.
_SAME_MODEL = 0.05
# A measured step that differs from its prediction by this factor is more often one of another unit or batch.
_DOUBTFUL = 3.0
_SAME_SETUP = "give a run of the same model, hardware and program"
# Torch's tensors, what its allocator reserves, and the process in the driver (`nvidia-smi`).
PeakKind = Literal["allocated", "reserved", "device"]


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One configuration with its measured figures."""

    # The file or flag that they come from.
    name: str
    request: Request
    step_s: float | None = None
    peak_bytes: float | None = None
    peak_kind: PeakKind = "allocated"


@dataclasses.dataclass(frozen=True)
class PredictedRun:
    """A measured run with its predicted figures."""

    run: MeasuredRun
    step_s: float
    peak_bytes: float
    # The part of the peak that is certain: weights and optimizer.
    state_bytes: float
    # The step waits for the CPU to launch kernels.
    is_launch_bound: bool = False
    # Why its memory is predicted not to fit; empty if it fits.
    misfit: str = ""

    @classmethod
    def predict(cls, run: MeasuredRun) -> PredictedRun:
        memory, state, time = predict_memory(run.request), predict_state(run.request), predict_time(run.request)
        box = run.request.box
        return cls(
            run=run,
            step_s=time.step_s.value,
            peak_bytes=peak_of_kind(memory, run.peak_kind),
            state_bytes=state.params_device + state.optimizer_device,
            is_launch_bound=time.is_launch_bound,
            misfit="" if fits(memory, box) else why(memory, box),
        )

    @property
    def step_factor(self) -> float | None:
        """Ratio of the measured time to the predicted one."""
        return None if self.run.step_s is None else self.run.step_s / self.step_s

    @property
    def excess_bytes(self) -> float | None:
        """Bytes by which the measured peak is above the predicted one."""
        return None if self.run.peak_bytes is None else self.run.peak_bytes - self.peak_bytes


def peak_of_kind(memory: MemoryUse, kind: PeakKind, context_bytes: float | None = None) -> float:
    """Return a predicted peak as torch or the driver measures it on a device with free memory.

    `context_bytes`: the driver's memory of a process without tensors, if it was measured.
    """
    if kind == "allocated":
        return memory.peak_allocated.value
    context = context_bytes or memory.device_parts["context"]
    return memory.pool_with_room + (context if kind == "device" else 0.0)


def find_implausibility(request: Request, step_s: float | None, peak_bytes: float | None) -> str | None:
    """Return why figures cannot be those of a request; None if they can."""
    if peak_bytes is not None:
        state = predict_state(request, unreduced=False)
        minimum = state.params_device + state.optimizer_device
        if peak_bytes < minimum:
            return f"{peak_bytes / GIB:.1f} GiB, but weights and optimizer alone are {minimum / GIB:.1f}"
    peak = request.box.device.peak_tflops.get(computing_type(request.precision))
    if step_s is not None and peak is not None:
        rate = model_flops(request) / step_s / 1e12
        if rate > peak:
            return f"{rate:.0f} TFLOP/s, but the device's peak is {peak:g}"
    return None


def check_run(run: MeasuredRun) -> None:
    """Raise UserError for figures that cannot be those of the run."""
    if run.request.box.is_cpu_only:
        raise UserError(f"{run.name}: steps and peaks on CPUs do not correct those of GPUs", "measure on a GPU")
    for what, value in (("step", run.step_s), ("peak", run.peak_bytes)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{run.name}: its {what} is {value:g}", "give a positive number")
    if run.step_s is None and run.peak_bytes is None:
        raise UserError(f"{run.name}: neither a step nor a peak was measured", "add step_ms=... or peak_gib=...")
    device_gib = run.request.box.device.memory_gib
    if run.peak_bytes is not None and run.peak_bytes > device_gib * GIB:
        problem = f"its peak is {rounded(run.peak_bytes / GIB)} GiB, and the GPU has {device_gib:g}"
        raise UserError(f"{run.name}: {problem}", "give the peak of one GPU, in GiB")
    if (reason := find_implausibility(run.request, run.step_s, run.peak_bytes)) is not None:
        raise UserError(f"{run.name}: {reason}", "check unit, strategy, precision, batch and accumulation")


def check_setup(run: MeasuredRun, question: Request) -> None:
    """Raise UserError unless a run has the model, hardware and program of the question."""
    for what in ("parameters", "trained_parameters"):
        measured, expected = (getattr(request.full_shape, what) for request in (run.request, question))
        if abs(measured / expected - 1) > _SAME_MODEL:
            problem = (
                f"{run.name} was measured with {measured:,} {what.replace('_', ' ')}, and the question has {expected:,}"
            )
            raise UserError(problem, _SAME_SETUP)
    for what, measured, expected in _setup_figures(run.request, question):
        if measured != expected:
            problem = f"{run.name} was measured with {what} {measured}, and the question has {expected}"
            raise UserError(problem, _SAME_SETUP)


def _setup_figures(measured: Request, expected: Request) -> Iterator[tuple[str, object, object]]:
    """Yield what makes two requests one setup, as words, and both values."""
    yield "the GPU", measured.box.device.name, expected.box.device.name
    if measured.strategy.name != "single" and expected.strategy.name != "single":
        yield "ranks", measured.box.ranks, expected.box.ranks
        yield "nodes", measured.box.nodes, expected.box.nodes
    yield "tensor-parallel ranks", measured.tensor_ranks, expected.tensor_ranks
    for what, name in (
        ("attention", "attention"),
        ("loss kernel", "loss_kernel"),
        ("optimizer", "optimizer"),
        ("4-bit weights", "quantized"),
        ("8-bit weights", "in_8_bits"),
        ("a reference model", "reference_model"),
    ):
        yield what, getattr(measured, name), getattr(expected, name)
    yield "precision", computing_type(measured.precision), computing_type(expected.precision)


def make_correction(runs: Sequence[PredictedRun], single_error: float = SINGLE_ERROR) -> SetupCorrection:
    """Return the correction by measured runs of one setup."""
    timed = [run for run in runs if run.step_factor is not None]
    kinds: dict[str, list[PredictedRun]] = {"plain": [], "offload": [], "launch": []}
    for run in timed:
        offloads = run.run.request.offloads
        kinds["offload" if offloads else "launch" if run.is_launch_bound else "plain"].append(run)
    return SetupCorrection(
        step_factor=_shared_factor(kinds["plain"], single_error),
        offload_step_factor=_shared_factor(kinds["offload"], single_error),
        launch_factor=_shared_factor(kinds["launch"], single_error),
        excesses=tuple(
            (run.excess_bytes, run.peak_bytes - run.state_bytes) for run in runs if run.excess_bytes is not None
        ),
        measured_step_factors=_own(timed, "step_factor"),
        measured_excesses=_own([run for run in runs if run.excess_bytes is not None], "excess_bytes"),
    )


def _shared_factor(runs: Sequence[PredictedRun], single_error: float) -> float | None:
    """Return the factor of configurations that were not measured.

    A small difference is an error of the measured configuration alone. The excess of a large one over it is shared by
    the setup. The mean of n runs has a single error that is smaller by the root of n.
    """
    if not runs:
        return None
    mean = statistics.mean(math.log(run.step_factor) for run in runs if run.step_factor)
    return math.exp(math.copysign(max(0.0, abs(mean) - single_error / math.sqrt(len(runs))), mean))


def _own(runs: Sequence[PredictedRun], figure: str) -> tuple[tuple[Configuration, float], ...]:
    """Return a figure's mean by measured configuration."""
    by_configuration: dict[Configuration, list[float]] = {}
    for run in runs:
        by_configuration.setdefault(run.run.request.configuration, []).append(getattr(run, figure))
    return tuple((configuration, statistics.mean(values)) for configuration, values in by_configuration.items())


def run_document(predicted: PredictedRun) -> dict[str, object]:
    """Return a run as in the documents of --json."""
    run = predicted.run
    return {
        "name": run.name,
        **dataclasses.asdict(run.request.configuration),
        "step_s": run.step_s,
        "predicted_step_s": predicted.step_s,
        "peak_kind": run.peak_kind,
        "peak_bytes": run.peak_bytes,
        "predicted_peak_bytes": predicted.peak_bytes,
    }


def _doubt(factor: float) -> str:
    """Return what to check of a measured step that is far from the prediction."""
    if 1 / _DOUBTFUL < factor < _DOUBTFUL:
        return ""
    return ": check its unit (step_s, step_ms, tokens_per_s of all ranks), micro-batch and accumulation"


def calibration_lines(runs: Sequence[PredictedRun]) -> Iterator[str]:
    """Yield the measured figures of each run next to its predicted ones."""
    for run in runs:
        request, figures = run.run.request, []
        if run.run.step_s is not None:
            step = f"{rounded_seconds(run.run.step_s)} a step, predicted {rounded_seconds(run.step_s)}"
            assert run.step_factor is not None
            figures.append(f"{step} (x {run.step_factor:.2f}){_doubt(run.step_factor)}")
        if run.run.peak_bytes is not None:
            peak = f"{rounded(run.run.peak_bytes / GIB)} GiB {run.run.peak_kind}"
            figures.append(f"{peak}, predicted {rounded(run.peak_bytes / GIB)}")
        checkpointing = "checkpointing" if request.gradient_checkpointing else "no checkpointing"
        batch = f"micro-batch {request.micro_batch} x accumulation {request.accumulation}"
        configuration = f"{request.strategy.name}, {batch}, {checkpointing}, {request.sequence_length} tokens"
        yield f"{run.run.name}: {configuration}: {'; '.join(figures)}"
        if run.misfit:
            yield f"  it is predicted not to fit ({run.misfit}): was it in full, and without offload?"
