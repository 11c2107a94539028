"""Whether a run computes what `single` computes under the same stack, and else what differs first.

It needs each step's loss, reported gradient norm and learning rate from a record, and no torch. The loss of the first
step is computed before any update: if that differs, the weights or the forward pass do. The norm of the first step
shows the gradient. AdamW's first update is the same for a gradient of any scale: a loss that is right after it and
wrong after the second one means a wrong scale or clipping, and one that is wrong at once a wrong direction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from study.records.directory import read_run
from study.records.schema import RecordError

Kind = Literal["equal", "different", "refuses", "crashes", "not installable", "not judged"]
What = Literal["weights", "gradient", "scale", "clipping", "update", "norm", "loss"]
# In words, for a reader who sees one of them in a table.
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
    """How far a loss and a norm may be from `single`'s, as a share of it."""

    loss: float
    norm: float


# What rounding alone may do: some ten times what the verified pair was seen to differ in, over six steps on two ranks.
# fp32 there: 6e-7 of a loss and 1e-5 of a norm, and a fault that counts moves the loss by 1e-3 or more. bf16 keeps 8
# bits: 3e-4 and 6e-3; tests/test_equivalence.py derives 2**-9. bf16-engine rounds weights, activations and gradients
# too, where `single` has autocast over fp32: 3e-3 and 2e-2.
ROUNDING = {
    "fp32": Tolerance(1e-5, 1e-4),
    "bf16": Tolerance(2**-9, 2**-6),
    "bf16-engine": Tolerance(2**-7, 2**-4),
}
# A tolerance is this many times the difference of `ddp` from `single`, where that is more: so that a box whose kernels
# sum in many orders accuses no engine. Beyond the second factor ddp itself is what is wrong.
_NOISE_FACTOR, _MOST_NOISE = 4, 10
_NOT_FINITE = re.compile(r"the loss is (?:NaN|infinite) at step (\d+)")


@dataclasses.dataclass(frozen=True)
class Trace:
    """Loss, norm and learning rate of each step of a run, and how it ended."""

    losses: Sequence[float | None]
    # None where the engine reports none.
    norms: Sequence[float | None]
    rates: Sequence[float]
    state: str = "ok"
    reason: str = ""
    weights: str | None = None
    samples: Sequence[str] = ()
    max_norm: float = 0.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    kind: Kind
    what: What | None = None
    # The first step whose figure differs, from 1, and the largest difference of a loss, as a share of the right one;
    # None where a loss is not finite.
    first_step: int | None = None
    size: float | None = None
    # The first norm that differs over the right one.
    norm_ratio: float | None = None
    reason: str = ""

    @property
    def differs(self) -> str | None:
        """The word of a cause for it; None where there is nothing to explain."""
        return {"crashes": "crash", "refuses": "refuses", "different": self.what}.get(self.kind)

    @property
    def says(self) -> str:
        if self.kind == "equal":
            return f"equal (to {self.size:.0e})" if self.size else "equal (to the last digit)"
        if self.kind != "different":
            return f"{self.kind}: {self.reason}" if self.reason else self.kind
        assert self.what is not None
        parts = [f"different from step {self.first_step} on, {WHAT[self.what]}"]
        parts += [f"max difference of a loss {self.size:.2g} of the right one"] if self.size else []
        parts += [f"norm {self.norm_ratio:.3g} times the right one"] if self.norm_ratio is not None else []
        return "; ".join([*parts, *filter(None, [self.reason])])


def trace_at(folder: Path) -> Trace:
    try:
        run = read_run(folder)
    except RecordError as error:
        # No run began there, or its record is damaged: the sweep has reported that.
        return Trace([], [], [], "failed", f"it left no record ({error.reason})")
    return Trace(
        [row["loss"] for row in run.steps], [row["grad_norm"] for row in run.steps], [row["lr"] for row in run.steps],
        run.state, run.status["reason"], run.engine.get("initial_weights_sha256"),
        [row["samples_hash"] for row in run.steps], run.config.get("max_grad_norm") or 0.0,
    )  # fmt: skip


def tolerance_of(precision: str, single: Trace, ddp: Iterable[Trace]) -> Tolerance:
    """Return what rounding allows, or more if plain data parallelism differs more from one process here."""
    runs = [trace for trace in ddp if trace.state == "ok"]

    def allowed(rounding: float, seen: Iterable[float]) -> float:
        noise = max(seen, default=0.0)
        return max(rounding, _NOISE_FACTOR * noise) if noise <= _MOST_NOISE * rounding else rounding

    return Tolerance(
        allowed(ROUNDING[precision].loss, (_max_difference(trace.losses, single.losses) for trace in runs)),
        allowed(ROUNDING[precision].norm, (_max_difference(trace.norms, single.norms) for trace in runs)),
    )


@dataclasses.dataclass(frozen=True)
class Reference:
    """`single` under a run's stack, in its precision without an engine, and `ddp`, which sets the tolerance."""

    precision: str
    single: Trace
    ddp: tuple[Trace, ...] = ()

    @functools.cached_property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.precision, self.single, self.ddp)

    def judge(self, trace: Trace) -> Verdict:
        return judge(trace, self.single, self.tolerance)


def reference_precision(precision: str) -> str:
    """Return the precision of `single`, which has no engine and so none of an engine's own precisions."""
    return "bf16" if precision == "bf16-engine" else precision


def judge(trace: Trace, single: Trace, tolerance: Tolerance) -> Verdict:
    not_finite = _NOT_FINITE.search(trace.reason)
    if trace.state == "unsupported":
        return Verdict("not installable" if "is not installable" in trace.reason else "refuses", reason=trace.reason)
    if trace.state in ("oom", "timeout", "interrupted"):
        # The box was too small or too slow for it, or the user stopped it.
        return Verdict("not judged", reason="it was interrupted" if trace.state == "interrupted" else trace.reason)
    if trace.state != "ok" and not not_finite:
        return Verdict("crashes", reason=trace.reason or trace.state)
    if single.state != "ok":
        return Verdict("not judged", reason="`single` did not end well under this stack")
    if trace.weights and single.weights and trace.weights != single.weights:
        return Verdict("not judged", reason="it began with other weights than `single`")
    if list(trace.samples) != list(single.samples)[: len(trace.samples)]:
        return Verdict("not judged", reason="it trained on other samples than `single`")
    return _compared(trace, single, tolerance, int(not_finite[1]) if not_finite else None)


def _compared(trace: Trace, single: Trace, tolerance: Tolerance, not_finite_step: int | None) -> Verdict:
    size = _max_difference(trace.losses, single.losses)
    bad_loss = _first_beyond(trace.losses, single.losses, tolerance.loss) or not_finite_step
    bad_norm = _first_beyond(trace.norms, single.norms, tolerance.norm)
    if bad_loss is None and bad_norm is None:
        return Verdict("equal", size=size)
    right, wrong = (each.norms[bad_norm - 1] if bad_norm else None for each in (single, trace))
    return Verdict(
        "different", _what(trace, single, tolerance, bad_loss, bad_norm), min(filter(None, (bad_loss, bad_norm))),
        None if not_finite_step else size, wrong / right if right and wrong is not None else None,
        trace.reason if not_finite_step else "",
    )  # fmt: skip


def _what(trace: Trace, single: Trace, tolerance: Tolerance, bad_loss: int | None, bad_norm: int | None) -> What:
    if bad_loss is None:
        return "norm"
    # The first step whose loss follows an update; while the rate warms up from 0 there is none.
    first_updated = next((place + 2 for place, rate in enumerate(single.rates) if rate > 0), 1)
    if bad_loss < first_updated:
        return "weights"
    scale_or_direction: What = "gradient" if bad_loss == first_updated else "scale"
    if bad_loss > len(trace.losses) or trace.losses[bad_loss - 1] is None:
        return "loss"
    if tolerance.loss > ROUNDING["bf16"].loss / 10:
        # Smaller differences of a loss are not seen, so the step of the first one shows nothing.
        return "gradient" if bad_norm == 1 else "loss"
    if bad_norm is not None and bad_norm < bad_loss:
        return scale_or_direction
    if bad_loss == first_updated:
        return "update"
    before = single.norms[bad_loss - 2]
    is_reported = trace.norms[0] is not None
    return "clipping" if is_reported and single.max_norm and before and before > single.max_norm else "scale"


def _max_difference(mine: Sequence[float | None], its: Sequence[float | None]) -> float:
    return max(map(_difference, mine, its), default=0.0)


def _first_beyond(mine: Sequence[float | None], its: Sequence[float | None], tolerance: float) -> int | None:
    differences = map(_difference, mine, its)
    return next((step for step, difference in enumerate(differences, start=1) if difference > tolerance), None)


def _difference(mine: float | None, its: float | None) -> float:
    """Difference as a share of the right figure; 0 where one is not reported."""
    if mine is None or its is None or math.isnan(mine) or math.isnan(its):
        return 0.0
    return abs(mine - its) / abs(its) if its else float(mine != its)
