"""Does a run compute what `single` computes under the same stack? And where it does not, what differs first.

Of a record this takes each step's loss, reported gradient norm and learning rate, and needs no torch. The loss of the
first step is taken before any update: if that differs, the weights or the forward pass do. The norm of the first step
tells of the gradient. AdamW's first update is the same for a gradient of any scale, so a loss that is right behind it
and wrong behind the second one tells of a scale or of clipping, and one that is wrong at once of another direction.
"""

from __future__ import annotations

import dataclasses
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
    "loss": "the loss, and nothing before it tells why",
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
# A tolerance is this many times what `ddp` was seen to differ from `single`, where that is more: so that a box whose
# kernels sum in many orders accuses nobody. Beyond the second factor ddp itself is what is wrong.
_NOISE_FACTOR, _MOST_NOISE = 4, 10
# What a stack says that pip could not make.
_NOT_INSTALLABLE = "is not installable"
_NOT_FINITE = re.compile(r"the loss is (?:NaN|infinite) at step (\d+)")


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a run left: of each step its loss, norm and learning rate, and how it ended."""

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
    # None where a loss is no number.
    first_step: int | None = None
    size: float | None = None
    # The first norm that differs over the right one.
    norm_ratio: float | None = None
    reason: str = ""

    @property
    def differs(self) -> str | None:
        """As a cause says it; None where there is nothing to explain."""
        return {"crashes": "crash", "refuses": "refuses", "different": self.what}.get(self.kind)

    @property
    def says(self) -> str:
        """In one line."""
        if self.kind == "equal":
            return f"equal (to {self.size:.0e})" if self.size else "equal (to the last digit)"
        if self.kind != "different":
            return f"{self.kind}: {self.reason}" if self.reason else self.kind
        assert self.what is not None
        parts = [f"different from step {self.first_step} on, {WHAT[self.what]}"]
        parts += [f"losses off by up to {self.size:.2g} of what is right"] if self.size else []
        parts += [f"norm {self.norm_ratio:.3g} times what is right"] if self.norm_ratio is not None else []
        return "; ".join([*parts, *filter(None, [self.reason])])


def trace_at(folder: Path) -> Trace:
    try:
        run = read_run(folder)
    except RecordError as error:
        # Nothing began there, or it is damaged: the sweep has said so.
        return Trace([], [], [], "failed", f"it left no record ({error.reason})")
    return Trace(
        [row["loss"] for row in run.steps], [row["grad_norm"] for row in run.steps], [row["lr"] for row in run.steps],
        run.state, run.status["reason"], run.engine.get("initial_weights_sha256"),
        [row["samples_hash"] for row in run.steps], run.config.get("max_grad_norm") or 0.0,
    )  # fmt: skip


def tolerance_of(precision: str, single: Trace, ddp: Iterable[Trace]) -> Tolerance:
    """From what rounding allows, and from how far plain data parallelism is from one process here."""
    rounding = ROUNDING[precision]
    runs = [trace for trace in ddp if trace.state == "ok"]
    seen = Tolerance(
        max((_largest(trace.losses, single.losses) for trace in runs), default=0.0),
        max((_largest(trace.norms, single.norms) for trace in runs), default=0.0),
    )
    return Tolerance(_allowed(rounding.loss, seen.loss), _allowed(rounding.norm, seen.norm))


def _allowed(rounding: float, seen: float) -> float:
    return max(rounding, _NOISE_FACTOR * seen) if seen <= _MOST_NOISE * rounding else rounding


def judge(trace: Trace, single: Trace, tolerance: Tolerance) -> Verdict:
    not_finite = _NOT_FINITE.search(trace.reason)
    if trace.state == "unsupported":
        return Verdict("not installable" if _NOT_INSTALLABLE in trace.reason else "refuses", reason=trace.reason)
    if trace.state == "interrupted":
        return Verdict("not judged", reason="it was ended before it had ended")
    if trace.state in ("oom", "timeout"):
        # The box was too small or too slow for it, which says nothing of what it computes.
        return Verdict("not judged", reason=trace.reason)
    if trace.state != "ok" and not not_finite:
        return Verdict("crashes", reason=trace.reason or trace.state)
    if single.state != "ok":
        return Verdict("not judged", reason="`single` did not end well under this stack")
    if trace.weights and single.weights and trace.weights != single.weights:
        return Verdict("not judged", reason="it began with other weights than `single`")
    if list(trace.samples) != list(single.samples)[: len(trace.samples)]:
        return Verdict("not judged", reason="it took other samples than `single`")
    return _compared(trace, single, tolerance, int(not_finite[1]) if not_finite else None)


def _compared(trace: Trace, single: Trace, tolerance: Tolerance, not_finite_step: int | None) -> Verdict:
    size = _largest(trace.losses, single.losses)
    bad_loss = _first_beyond(trace.losses, single.losses, tolerance.loss) or not_finite_step
    bad_norm = _first_beyond(trace.norms, single.norms, tolerance.norm)
    if bad_loss is None and bad_norm is None:
        return Verdict("equal", size=size)
    right = single.norms[bad_norm - 1] if bad_norm else None
    wrong = trace.norms[bad_norm - 1] if bad_norm else None
    return Verdict(
        "different",
        _what(trace, single, tolerance, bad_loss, bad_norm),
        min(step for step in (bad_loss, bad_norm) if step is not None),
        None if not_finite_step else size,
        wrong / right if right and wrong is not None else None,
        trace.reason if not_finite_step else "",
    )


def _what(trace: Trace, single: Trace, tolerance: Tolerance, bad_loss: int | None, bad_norm: int | None) -> What:
    if bad_loss is None:
        return "norm"
    # The first step whose loss has seen an update, which is none while the rate warms up from 0.
    first_updated = next((place + 2 for place, rate in enumerate(single.rates) if rate > 0), 1)
    if bad_loss < first_updated:
        return "weights"
    scale_or_direction: What = "gradient" if bad_loss == first_updated else "scale"
    if bad_loss > len(trace.losses) or trace.losses[bad_loss - 1] is None:
        return "loss"
    if tolerance.loss > ROUNDING["bf16"].loss / 10:
        # A loss that differs by less is not seen, so the step of the first one that is tells nothing.
        return "gradient" if bad_norm == 1 else "loss"
    if bad_norm is not None and bad_norm < bad_loss:
        return scale_or_direction
    if bad_loss == first_updated:
        return "update"
    before = single.norms[bad_loss - 2]
    is_reported = trace.norms[0] is not None
    return "clipping" if is_reported and single.max_norm and before and before > single.max_norm else "scale"


def _largest(mine: Sequence[float | None], its: Sequence[float | None]) -> float:
    return max(map(_difference, mine, its), default=0.0)


def _first_beyond(mine: Sequence[float | None], its: Sequence[float | None], tolerance: float) -> int | None:
    differences = map(_difference, mine, its)
    return next((step for step, difference in enumerate(differences, start=1) if difference > tolerance), None)


def _difference(mine: float | None, its: float | None) -> float:
    """As a share of the right one. A figure that is not reported differs from nothing."""
    if mine is None or its is None or math.isnan(mine) or math.isnan(its):
        return 0.0
    return abs(mine - its) / abs(its) if its else float(mine != its)
