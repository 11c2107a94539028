"""Verdict on a run: equal to `single` under the same stack, or the quantity that differs first.

It reads each step's loss, reported gradient norm and learning rate from a record, without torch. The loss of the first
step precedes any update, so a difference is one of the weights or the forward pass. The norm of the first step shows
the gradient. AdamW's first update is the same for a gradient of any scale: a loss that is right after it and wrong
after the second one indicates a wrong scale or clipping; one that is wrong at once, a wrong direction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from study.config.precisions import computing_type
from study.records.directory import read_run
from study.records.outcome import Outcome
from study.records.schema import RecordError

Kind = Literal["equal", "different", "refuses", "crashes", "not installable", "not judged"]
What = Literal["weights", "gradient", "scale", "clipping", "update", "norm", "loss"]
# Descriptions for tables.
WHAT: dict[What, str] = {
    "weights": "the weights or the forward pass, before any update",
    "gradient": "the gradient: its norm and its direction",
    "scale": "the gradient's scale, or its clipping",
    "clipping": "the clipping: norms are right, and what becomes of them is not",
    "update": "the update: the first norm is right or not reported",
    "norm": "the reported norm alone: losses are right",
    "loss": "the loss, and nothing before it shows why",
}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest relative differences of a loss and of a norm to those of `single` that count as equal."""

    loss: float
    norm: float


# Tolerances for rounding: about ten times the largest difference of the verified pair, over six steps on two ranks.
# Measured in fp32: 6e-7 of a loss and 1e-5 of a norm; a relevant fault changes the loss by 1e-3 or more. bf16 has 8
# bits: 3e-4 and 6e-3; tests/runs.py derives 2**-9. bf16-engine also rounds weights, activations and
# gradients, while `single` uses autocast over fp32: 3e-3 and 2e-2. fp16 has 11 bits: an eighth of the tolerances of
# bf16, not measured.
ROUNDING = {
    "fp32": Tolerance(1e-5, 1e-4),
    "bf16": Tolerance(2**-9, 2**-6),
    "bf16-engine": Tolerance(2**-7, 2**-4),
    "fp16": Tolerance(2**-12, 2**-9),
    "fp16-engine": Tolerance(2**-10, 2**-7),
}
# A tolerance is at least _NOISE_FACTOR times the difference of `ddp` to `single`, because the kernels of some machines
# sum in varying order. A difference of more than _MAX_NOISE tolerances is a fault of ddp, and is not used.
_NOISE_FACTOR, _MAX_NOISE = 4, 10


_OK = Outcome("ok")


@dataclasses.dataclass(frozen=True)
class TrainingTrace:
    """Loss, norm and learning rate of each step of a run, with its outcome."""

    losses: Sequence[float | None]
    # None if the engine does not report norms.
    norms: Sequence[float | None]
    rates: Sequence[float]
    ending: Outcome = _OK
    weights: str | None = None
    samples: Sequence[str] = ()
    max_norm: float = 0.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of comparing one run with `single`."""

    kind: Kind
    what: What | None = None
    # The first step that differs, counted from 1, and the largest relative difference of a loss; None if a loss is not
    # finite.
    first_step: int | None = None
    size: float | None = None
    # Ratio of the first norm that differs to that of `single`.
    norm_ratio: float | None = None
    reason: str = ""

    @property
    def differs(self) -> str | None:
        """The `differs` key of causes.yaml for this verdict; None if no cause is needed."""
        return {"crashes": "crash", "refuses": "refuses", "different": self.what}.get(self.kind)

    @property
    def describe(self) -> str:
        if self.kind == "equal":
            return f"equal (to {self.size:.0e})" if self.size else "equal (to the last digit)"
        if self.kind != "different":
            return f"{self.kind}: {self.reason}" if self.reason else self.kind
        assert self.what is not None
        parts = [f"different from step {self.first_step} on, {WHAT[self.what]}"]
        parts += [f"max difference of a loss {self.size:.2g} of the right one"] if self.size else []
        parts += [f"norm {self.norm_ratio:.3g} times the right one"] if self.norm_ratio is not None else []
        return "; ".join([*parts, *filter(None, [self.reason])])


def trace_at(folder: Path) -> TrainingTrace:
    """Read the trace of a run directory; a missing or damaged record is a failed run."""
    try:
        run = read_run(folder)
    except RecordError as error:
        # The sweep has already reported why.
        return TrainingTrace([], [], [], Outcome("failed", f"it left no record ({error.reason})"))
    weights, max_norm = run.engine.get("initial_weights_sha256"), run.config.get("max_grad_norm") or 0.0
    return make_trace(run.steps, run.config.get("optimizer"), run.ending, weights, max_norm)


def make_trace(
    steps: Sequence[Mapping[Any, Any]], optimizer: Any, ending: Outcome, weights: str | None, max_norm: float
) -> TrainingTrace:
    """Return the trace of these steps; with Muon, DeepSpeed's stages report the norm of updates, not of gradients."""
    losses, norms, rates, samples = ([row[key] for row in steps] for key in ("loss", "grad_norm", "lr", "samples_hash"))
    norms = [None] * len(steps) if optimizer == "muon" else norms
    return TrainingTrace(losses, norms, rates, ending, weights, samples, max_norm)


@dataclasses.dataclass(frozen=True)
class Reference:
    """`single` under a run's stack, in its precision without an engine, and `ddp`, which sets the tolerance."""

    precision: str
    single: TrainingTrace
    ddp: tuple[TrainingTrace, ...] = ()

    @functools.cached_property
    def tolerance(self) -> Tolerance:
        """The tolerance for rounding, or a larger one if `ddp` differs more from `single` on this machine."""
        runs, rounding = [trace for trace in self.ddp if trace.ending.state == "ok"], ROUNDING[self.precision]

        def allowed(least: float, differences: Iterable[float]) -> float:
            noise = max(differences, default=0.0)
            return max(least, _NOISE_FACTOR * noise) if noise <= _MAX_NOISE * least else least

        return Tolerance(
            allowed(rounding.loss, (_max_difference(trace.losses, self.single.losses) for trace in runs)),
            allowed(rounding.norm, (_max_difference(trace.norms, self.single.norms) for trace in runs)),
        )

    def judge(self, trace: TrainingTrace) -> Verdict:
        return judge(trace, self.single, self.tolerance)


def reference_precision(precision: str) -> str:
    """Return the precision in which `single` is the reference: bf16 for bf16-engine, fp16 for fp16-engine."""
    return computing_type(precision)


def judge(trace: TrainingTrace, single: TrainingTrace, tolerance: Tolerance) -> Verdict:
    """Return the verdict on a run; "not judged" if it or `single` cannot be compared."""
    ending = trace.ending
    not_finite_step = ending.not_finite_step
    if ending.state == "unsupported":
        return Verdict("not installable" if ending.cause == "not installable" else "refuses", reason=ending.reason)
    if ending.state in ("oom", "timeout", "interrupted"):
        # The machine was too small or too slow, or the user stopped the run.
        reason = "the run was interrupted" if ending.state == "interrupted" else ending.reason
        return Verdict("not judged", reason=reason)
    if ending.state != "ok" and not_finite_step is None:
        return Verdict("crashes", reason=ending.reason or ending.state)
    if single.ending.state != "ok":
        return Verdict("not judged", reason="`single` failed under this stack")
    if trace.weights and single.weights and trace.weights != single.weights:
        return Verdict("not judged", reason="its initial weights differ from those of `single`")
    if list(trace.samples) != list(single.samples)[: len(trace.samples)]:
        return Verdict("not judged", reason="its samples differ from those of `single`")
    size = _max_difference(trace.losses, single.losses)
    bad_loss = _first_beyond(trace.losses, single.losses, tolerance.loss)
    if bad_loss is None:
        bad_loss = not_finite_step
    bad_norm = _first_beyond(trace.norms, single.norms, tolerance.norm)
    if bad_loss is None and bad_norm is None:
        return Verdict("equal", size=size)
    right, wrong = (run.norms[bad_norm - 1] if bad_norm else None for run in (single, trace))
    return Verdict(
        "different",
        _what(trace, single, tolerance, bad_loss, bad_norm),
        min(filter(None, (bad_loss, bad_norm))),
        size if not_finite_step is None else None,
        wrong / right if right and wrong is not None else None,
        "" if not_finite_step is None else ending.reason,
    )


def _what(
    trace: TrainingTrace, single: TrainingTrace, tolerance: Tolerance, bad_loss: int | None, bad_norm: int | None
) -> What:
    if bad_loss is None:
        return "norm"
    # The first step whose loss follows an update; a step with rate 0 updates nothing.
    first_updated = next((index + 2 for index, rate in enumerate(single.rates) if rate > 0), 1)
    if bad_loss < first_updated:
        return "weights"
    scale_or_direction: What = "gradient" if bad_loss == first_updated else "scale"
    if bad_loss > len(trace.losses) or trace.losses[bad_loss - 1] is None:
        return "loss"
    if tolerance.loss > ROUNDING["bf16"].loss / 10:
        # This tolerance hides small differences of the loss, so the first step that differs is not informative.
        return "gradient" if bad_norm == 1 else "loss"
    if bad_norm is not None and bad_norm < bad_loss:
        return scale_or_direction
    if bad_loss == first_updated:
        return "update"
    before = single.norms[bad_loss - 2]
    is_reported = trace.norms[0] is not None
    return "clipping" if is_reported and single.max_norm and before and before > single.max_norm else "scale"


def _max_difference(values: Sequence[float | None], references: Sequence[float | None]) -> float:
    return max(map(_difference, values, references), default=0.0)


def _first_beyond(values: Sequence[float | None], references: Sequence[float | None], tolerance: float) -> int | None:
    differences = map(_difference, values, references)
    return next((step for step, difference in enumerate(differences, start=1) if difference > tolerance), None)


def _difference(value: float | None, reference: float | None) -> float:
    """Relative difference of two figures; 0 if one is not reported."""
    if value is None or reference is None or math.isnan(value) or math.isnan(reference):
        return 0.0
    return abs(value - reference) / abs(reference) if reference else float(value != reference)
