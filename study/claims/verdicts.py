"""Findings from figures: the region that a claim allows, the answer of a check, and the rule that combines answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from study.claims.ledger import ClaimCheck

Kind = Literal["arithmetic", "consistency", "virtual", "measured"]
Answer = Literal["holds", "fails", "inside noise", "disputed", "not judged"]
FindingKind = Literal["holds", "holds in part", "does not hold", "contradicts itself", "undecided"]
# From strongest to weakest.
Basis = Literal["at scale", "published", "derived", "small-scale proxy", "none"]
PROXY: Basis = "small-scale proxy"
_STATUS_ORDER = ("does not hold", "contradicts itself", "holds")


class NotJudged(Exception):
    """The reason why a check has no figure, with the report that is its subject, if it has one."""

    def __init__(self, reason: str, report: str = ""):
        self.reason, self.report = reason, report
        super().__init__(f"{report} {reason}".strip())

    @property
    def sentence(self) -> str:
        """The reason as the beginning of a sentence: the name of a folder has no capital letter."""
        return f"reports/{self.report} {self.reason}" if self.report else _capitalized(self.reason)


class NoRecords(NotJudged):
    """The suite has not run yet."""


def awaited(needs: str) -> str:
    """Return the reason for a check whose records do not exist yet."""
    return f"no record yet; it needs {needs}"


def _capitalized(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


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
    # Of the mean over pairs or sessions: of the logs of ratios, or of slopes.
    standard_error: float | None = None
    # Of the standard error.
    df: float | None = None
    # Whether low and high are the minimum and maximum, and not an interval.
    is_range: bool = False
    is_slope: bool = False
    # The arithmetic that it comes from.
    derivation: str = ""

    @property
    def spread(self) -> str:
        """Interval as text, or the range with the names of its bounds; empty if both bounds are equal."""
        if self.low is None or self.high is None or self.low >= self.high:
            return ""
        if self.is_range:
            return f" (minimum {number(self.low)}, maximum {number(self.high)})"
        return f" [{number(self.low)}, {number(self.high)}]"


@dataclasses.dataclass(frozen=True)
class Region:
    """Range of figures that the claim allows."""

    low: float = -math.inf
    high: float = math.inf

    def judge(self, figure: Figure) -> Answer:
        """Return the answer; `inside noise` if the interval crosses a bound of the region."""
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
class CheckResult:
    """The result of one check."""

    check: ClaimCheck
    answer: Answer
    sentence: str = ""
    figure: Figure | None = None
    # Of the bound of the region that is nearest to a mean over pairs or sessions; None for other figures.
    p: float | None = None

    @property
    def reports(self) -> set[str]:
        """Reports whose records its figure uses."""
        records = self.figure.records if self.figure else ()
        return {record.split("/")[0] for record in records if not record.startswith("accelerate_configs/")}


# The footnote of a status, a finding or an evidence.
_FOOTNOTES = {
    "at scale": "at_scale",
    "published": "published",
    "derived": "derived",
    "holds in part": "in_part",
    "depends on the reading": "reading",
    "inside noise": "noise",
}


def _status_text(status: str, is_small: bool) -> str:
    return f"{status} at small scale" if is_small else status


@dataclasses.dataclass(frozen=True)
class PartFinding:
    """Result of the checks of one part of a claim, at its scale and at a small scale."""

    words: str
    # holds, does not hold, contradicts itself, depends on the reading, inside noise, disputed, or untested
    status: str
    # reproduced, not reproduced, depends on the reading, inside noise, or empty
    proxy: str
    # The status under each reading, if they differ.
    by_reading: str
    basis: tuple[Basis, ...]
    decides: bool

    @property
    def label(self) -> str:
        """Status as text; without one at the claim's scale, the result at a small scale."""
        return _status_text(*self.shown_status)

    @property
    def shown_status(self) -> tuple[str, bool]:
        """The status, and whether it is one at a small scale."""
        is_small = self.status == "untested" and bool(self.proxy)
        return (self.proxy if is_small else self.status), is_small


@dataclasses.dataclass(frozen=True)
class ClaimFinding:
    """The finding on a claim and on each of its parts."""

    kind: FindingKind
    parts: tuple[PartFinding, ...] = ()

    @property
    def basis(self) -> tuple[Basis, ...]:
        """Evidence of the parts that the finding rests on, the strongest first."""
        resting = [part for part in self.parts if part.status == self.kind]
        if self.kind == "holds in part":
            resting = [part for part in self.parts if part.status in _STATUS_ORDER]
        used = {basis for part in resting or self.parts for basis in part.basis}
        order: tuple[Basis, ...] = ("at scale", "published", "derived", PROXY)
        return tuple(basis for basis in order if basis in used) or ("none",)

    @property
    def short(self) -> str:
        """The finding with its strongest evidence or, if it is undecided, with the result at a small scale or why."""
        if self.kind == "undecided":
            return f"undecided ({_status_text(*self._open_status)})"
        return f"{self.kind} ({self.basis[0]})"

    @property
    def footnotes(self) -> frozenset[str]:
        """Names of the footnotes that explain `short`: captions of the question of claims."""
        if self.kind == "undecided":
            status, is_small = self._open_status
            needed = [_FOOTNOTES.get(status), "small_scale" if is_small else None]
        else:
            needed = [_FOOTNOTES.get(self.kind), _FOOTNOTES.get(self.basis[0])]
        return frozenset(name for name in needed if name is not None)

    @property
    def _open_status(self) -> tuple[str, bool]:
        """The status that `short` has of an undecided claim, and whether it is one at a small scale."""
        proxies = {part.proxy for part in self.parts} - {""}
        if len(proxies) == 1:
            return proxies.pop(), True
        return next((part.shown_status for part in self.parts if part.label != "holds"), ("untested", False))

    @property
    def text(self) -> str:
        """The finding with every part named."""
        if self._all_hold:
            return "holds"
        return f"undecided: {self.details}" if self.kind == "undecided" else self.details or self.kind

    @property
    def details(self) -> str:
        """The parts by their finding, for a page that has the finding already; empty if they add nothing to it."""
        if self._all_hold:
            return "" if self.kind == "holds" else "holds"
        first = "holds" if self.kind == "holds in part" else self.kind
        groups: dict[str, list[str]] = {}
        for part in sorted(self.parts, key=lambda part: part.label != first):
            groups.setdefault(part.label, []).append(f"{part.words} {part.by_reading}".strip())
        texts = [": ".join(filter(None, (label, " / ".join(filter(None, words))))) for label, words in groups.items()]
        texts = [text.replace(": (", " (") for text in texts]
        if self.kind == "undecided":
            return "; ".join(texts) or "untested"
        text = "; ".join([self.kind + texts[0].removeprefix(first), *texts[1:]])
        return "" if text == self.kind else text

    @property
    def _all_hold(self) -> bool:
        return {part.label for part in self.parts} == {"holds"}


def combine(outcomes: Sequence[CheckResult]) -> ClaimFinding:
    """Combine the answers of a claim's checks into its finding.

    - Contradicts itself: figures of the claim exclude each other under every reading.
    - Does not hold: a part that decides is false, or a part is false and none was shown to hold.
    - Holds in part: a part holds, another one is false, untested or depends on the reading, and none of those decides.
    - Holds: every part holds.
    - Undecided: everything else, so also whatever only small-scale proxies judge.
    """
    parts = [
        _judge_part([item for item in outcomes if item.check.tests == words])
        for words in dict.fromkeys(item.check.tests for item in outcomes)
    ]
    statuses = [part.status for part in parts]
    deciding = {part.status for part in parts if part.decides or len(parts) == 1}
    kind: FindingKind = "undecided"
    if "contradicts itself" in statuses:
        kind = "contradicts itself"
    elif "does not hold" in deciding or ("does not hold" in statuses and "holds" not in statuses):
        kind = "does not hold"
    elif parts and set(statuses) == {"holds"}:
        kind = "holds"
    elif "holds" in statuses and deciding <= {"holds"}:
        kind = "holds in part"
    return ClaimFinding(kind, tuple(parts))


def _judge_part(outcomes: Sequence[CheckResult]) -> PartFinding:
    """Combine the answers on one part: false or true only if it is so under every reading."""
    large = [item for item in outcomes if item.check.basis != PROXY]
    status, by_reading = _under_readings(large, {})
    if status == "does not hold" and all(item.check.internal for item in large if item.answer == "fails"):
        status = "contradicts itself"
    proxy, small = _under_readings([item for item in outcomes if item.check.basis == PROXY], _AT_SMALL_SCALE)
    answer = {"does not hold": "fails", "contradicts itself": "fails", "holds": "holds"}.get(status)
    judged = [item for item in outcomes if item.answer != "not judged"]
    used = [item.check.basis for item in judged if item.check.basis == PROXY or answer in (None, item.answer)]
    decides = any(item.check.decides for item in outcomes)
    return PartFinding(outcomes[0].check.tests, status, proxy, by_reading or small, tuple(dict.fromkeys(used)), decides)


_AT_SMALL_SCALE = {"does not hold": "not reproduced", "holds": "reproduced", "disputed": "", "untested": ""}


def _under_readings(outcomes: Sequence[CheckResult], words: Mapping[str, str]) -> tuple[str, str]:
    """Return the status under every reading, or that it depends on the reading, with the status under each."""
    readings = list(dict.fromkeys(item.check.reading for item in outcomes if item.check.reading)) or [""]
    statuses = {name: _status([item for item in outcomes if item.check.reading in ("", name)]) for name in readings}
    statuses = {name: words.get(status, status) for name, status in statuses.items()}
    if len(set(statuses.values())) == 1:
        return statuses[readings[0]], ""
    texts = (f"{status or 'undecided'} if read as: {name}" for name, status in statuses.items())
    return "depends on the reading", f"({', '.join(texts)})"


def _status(outcomes: Sequence[CheckResult]) -> str:
    answers = {item.answer for item in outcomes}
    if "fails" in answers:
        return "does not hold"
    if answers == {"holds"} and not all(item.check.necessary for item in outcomes):
        return "holds"
    return next((answer for answer in ("inside noise", "disputed") if answer in answers), "untested")


def number(value: float, unit: str = "") -> str:
    """Return a number with four digits, seven for a ratio near 1, and its unit."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{7 if 0.99 < value < 1.01 else 4}g}"
    return f"{text} {unit}".strip()
