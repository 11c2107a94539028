"""From figures to verdicts: the region that a claim allows, the answer of a check, and the rule that combines them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

Kind = Literal["arithmetic", "consistency", "virtual", "measured"]
Answer = Literal["holds", "fails", "inside noise", "disputed", "not judged"]
Verdict = Literal["supported", "contradicted", "partly", "inside noise", "inconclusive", "untestable"]


class NotJudged(Exception):
    """The reason why a check has no figure."""


class NoRecords(NotJudged):
    """The suite has not run yet."""


def awaited(needs: str) -> str:
    return f"no record here can judge it yet: it needs {needs}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number; without an interval it is exact, as arithmetic and the bytes of a virtual rank are."""

    value: float
    low: float | None = None
    high: float | None = None
    # Runs or pairs of runs; None for arithmetic.
    n: int | None = None
    # Run names, each after the folder of its record.
    records: tuple[str, ...] = ()
    note: str = ""

    @property
    def spread(self) -> str:
        """Return the interval as text; empty where both ends are equal."""
        if self.low is not None and self.high is not None and self.low < self.high:
            return f" [{number(self.low)}, {number(self.high)}]"
        return ""


@dataclasses.dataclass(frozen=True)
class Region:
    """The figures that the claim allows."""

    low: float = -math.inf
    high: float = math.inf

    def judge(self, figure: Figure) -> Answer:
        """Return the answer: an interval that is partly inside and partly outside decides nothing."""
        low = figure.value if figure.low is None else figure.low
        high = figure.value if figure.high is None else figure.high
        if math.isnan(low) or math.isnan(high):
            return "not judged"
        if self.low <= low and high <= self.high:
            return "holds"
        return "fails" if high < self.low or low > self.high else "inside noise"

    def words(self, unit: str) -> str:
        if math.isinf(self.high):
            return f"at least {number(self.low, unit)}"
        if self.low == self.high:
            return number(self.low, unit)
        return f"{'at most' if math.isinf(self.low) else f'{number(self.low)} to'} {number(self.high, unit)}"


@dataclasses.dataclass(frozen=True)
class CheckOutcome:
    """One check, as the rule that combines them reads it."""

    answer: Answer
    # Its failure refutes the claim; its success does not support it.
    necessary: bool = False
    # Made at another scale than that of the claim.
    elsewhere: bool = False


def combine(parts: Sequence[CheckOutcome], is_untestable: bool = False) -> Verdict:
    """Combine the answers of a claim's checks.

    - A necessary check that fails contradicts the claim.
    - Supported: every check holds, and one of them is more than necessary and was made at the claim's own scale.
    - Contradicted: every check that is more than necessary fails, and one of them was made at the claim's own scale.
    - Partly: some of these hold or fail, and others do not, or only at another scale, or some could not be judged.
    - Inside noise: nothing is decided, and an interval spans the claimed limit.
    - Otherwise nothing is known: untestable where the ledger says why, else inconclusive.
    """
    if any(part.necessary and part.answer == "fails" for part in parts):
        return "contradicted"
    own = [part for part in parts if not part.necessary]
    decided = [part for part in own if part.answer in ("holds", "fails")]
    if any(not part.elsewhere for part in decided):
        if all(part.answer == "holds" for part in parts):
            return "supported"
        if all(part.answer == "fails" for part in own):
            return "contradicted"
    if decided:
        return "partly"
    if any(part.answer == "inside noise" for part in parts):
        return "inside noise"
    return "untestable" if is_untestable else "inconclusive"


def number(value: float, unit: str = "") -> str:
    """Return four digits, and more of a ratio that is almost 1."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{7 if 0.99 < value < 1.01 else 4}g}"
    return f"{text} {unit}".strip()
