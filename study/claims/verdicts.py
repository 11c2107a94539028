"""Verdicts from figures: the region that a claim allows, the answer of a check, and the rule that combines answers."""

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
    """Return the reason for a check whose records do not exist yet."""
    return f"no record yet; it needs {needs}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number with its interval and records; exact without an interval, like arithmetic or bytes of a virtual rank."""

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
        """Interval as text; empty if both bounds are equal."""
        if self.low is not None and self.high is not None and self.low < self.high:
            return f" [{number(self.low)}, {number(self.high)}]"
        return ""


@dataclasses.dataclass(frozen=True)
class Region:
    """Range of figures that the claim allows."""

    low: float = -math.inf
    high: float = math.inf

    def judge(self, figure: Figure) -> Answer:
        """Return the answer; `inside noise` if the interval is only partly inside the region."""
        low = figure.value if figure.low is None else figure.low
        high = figure.value if figure.high is None else figure.high
        if math.isnan(low) or math.isnan(high):
            return "not judged"
        if self.low <= low and high <= self.high:
            return "holds"
        return "fails" if high < self.low or low > self.high else "inside noise"

    def words(self, unit: str) -> str:
        """Return the region as text."""
        if math.isinf(self.high):
            return f"at least {number(self.low, unit)}"
        if self.low == self.high:
            return number(self.low, unit)
        return f"{'at most' if math.isinf(self.low) else f'{number(self.low)} to'} {number(self.high, unit)}"


@dataclasses.dataclass(frozen=True)
class CheckOutcome:
    """Input of `combine` for one check."""

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
    - Partly: checks disagree, could not all be judged, or were decided at another scale only.
    - Inside noise: no check is decided, and an interval spans the claimed limit.
    - Otherwise untestable if the ledger gives a reason, else inconclusive.
    """
    if any(part.necessary and part.answer == "fails" for part in parts):
        return "contradicted"
    supporting = [part for part in parts if not part.necessary]
    decided = [part for part in supporting if part.answer in ("holds", "fails")]
    if any(not part.elsewhere for part in decided):
        if all(part.answer == "holds" for part in parts):
            return "supported"
        if all(part.answer == "fails" for part in supporting):
            return "contradicted"
    if decided:
        return "partly"
    if any(part.answer == "inside noise" for part in parts):
        return "inside noise"
    return "untestable" if is_untestable else "inconclusive"


def number(value: float, unit: str = "") -> str:
    """Return a number with four digits, seven for a ratio near 1, and its unit."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{7 if 0.99 < value < 1.01 else 4}g}"
    return f"{text} {unit}".strip()
