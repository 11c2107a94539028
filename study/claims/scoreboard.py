"""Scoreboard: every claim with its finding, from the ledger and the committed records, as text and as JSON."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

from study.claims.evidence import Evidence
from study.claims.ledger import Claim, Ledger, read_ledger
from study.claims.verdicts import PROXY, Answer, CheckResult, ClaimFinding, FindingKind, combine
from study.config.places import REPOSITORY
from study.records.statistics import SIGNIFICANCE, apply_holm

REPORTS = REPOSITORY / "reports"
# The value of the key `verdict` in JSON, by finding; kept for readers of earlier releases.
_VERDICTS = {
    "holds": "supported",
    "holds in part": "partly",
    "does not hold": "contradicted",
    "contradicts itself": "contradicted",
}
# Answers of the check that the sentence of a claim quotes, the first one that there is.
_LEADING: dict[FindingKind, tuple[Answer, ...]] = {
    "holds": ("holds",),
    "holds in part": ("fails", "holds"),
    "does not hold": ("fails",),
    "contradicts itself": ("fails",),
    "undecided": ("fails", "inside noise", "disputed", "not judged", "holds"),
}


@dataclasses.dataclass(frozen=True)
class JudgedClaim:
    """A claim with its finding and the results of its checks."""

    claim: Claim
    results: tuple[CheckResult, ...]

    @functools.cached_property
    def finding(self) -> ClaimFinding:
        """The finding that the answers of the checks make."""
        return combine(self.results)

    @property
    def leading(self) -> CheckResult | None:
        """The first result that the finding rests on; None without a check."""
        return self.lead(self.results)

    def lead(self, results: Iterable[CheckResult]) -> CheckResult | None:
        """Return the first of these results that the finding rests on; None if it rests on none of them."""
        deciding, order = {part.words for part in self.finding.parts if part.decides}, _LEADING[self.finding.kind]
        resting = (result for result in results if result.answer in order)
        return min(
            resting,
            default=None,
            key=lambda result: (
                order.index(result.answer),
                result.check.basis == PROXY,
                result.check.tests not in deciding,
            ),
        )

    @property
    def sentence(self) -> str:
        """One sentence with the figure that decides, or the reason why there is none."""
        if self.leading is None or self._is_untestable:
            return self.claim.untestable or "No record here can judge it yet."
        return f"{self.leading.sentence}."

    @property
    def evidence_in(self) -> str:
        """Folders of records, files or the publication with the evidence of that figure."""
        if self.leading is None or self._is_untestable or self.leading.figure is None:
            return "none yet"
        places = Counter(
            record if record.startswith("accelerate_configs/") else f"reports/{record.split('/')[0]}"
            for record in self.leading.figure.records
        )
        texts = [
            f"{place} ({count} record{'s' * (count > 1)})" if place.startswith("reports/") else place
            for place, count in places.items()
        ]
        return ", ".join(texts) or self.leading.check.source or "figures of the document, by arithmetic"

    @property
    def _is_untestable(self) -> bool:
        return bool(self.claim.untestable) and self.finding.kind == "undecided"

    @property
    def kinds(self) -> list[str]:
        """Kinds of evidence with at least one judged check."""
        return list(dict.fromkeys(result.check.kind for result in self.results if result.answer != "not judged"))

    @property
    def verdict(self) -> str:
        """The finding in the words of earlier releases."""
        if self.finding.kind != "undecided":
            return _VERDICTS[self.finding.kind]
        return "untestable" if self._is_untestable else "inconclusive"

    def document(self) -> dict[str, Any]:
        """Return the claim for JSON."""
        figure = self.leading.figure if self.leading else None
        claim = dataclasses.asdict(self.claim)
        del claim["checks"]
        return {
            **claim,
            "document": self.claim.document,
            "finding": self.finding.kind,
            "evidence": self.finding.basis,
            "finding_text": self.finding.text,
            "parts": [
                {"words": part.words, "finding": part.label, "evidence": part.basis} for part in self.finding.parts
            ],
            "verdict": self.verdict,
            "sentence": self.sentence,
            "rests_on": self.kinds,
            **_figure(self.leading),
            "evidence_in": self.evidence_in,
            "records": list(dict.fromkeys(run for item in self.results if item.figure for run in item.figure.records)),
            "checks": [
                {
                    "kind": result.check.kind,
                    "tests": result.check.tests,
                    "reading": result.check.reading,
                    "evidence": result.check.basis,
                    "answer": result.answer,
                    "p": result.p,
                    "sentence": result.sentence,
                    "source": result.check.source,
                    **_figure(result),
                }
                for result in self.results
            ],
            "n": figure.n if figure else None,
        }


def _figure(result: CheckResult | None) -> dict[str, Any]:
    if result is None or result.figure is None:
        return {"figure": None, "unit": "", "interval": None}
    figure = {"figure": result.figure.value, "unit": result.check.unit, "interval": None}
    ends = None if result.figure.low is None else [result.figure.low, result.figure.high]
    return figure | {"range" if result.figure.is_range else "interval": ends}


def judge(claim: Claim, evidence: Evidence) -> JudgedClaim:
    """Run the checks of a claim and combine their answers into a finding."""
    return JudgedClaim(claim, tuple(check.find(evidence) for check in claim.checks))


@dataclasses.dataclass(frozen=True)
class Scoreboard:
    """All claims of a ledger, judged."""

    ledger: Ledger
    judged: tuple[JudgedClaim, ...]

    def counts(self, of: Callable[[JudgedClaim], str] = lambda item: item.finding.kind) -> dict[str, Counter[str]]:
        """Return the counts of findings, or of something else, by document and in total."""
        return {
            name: Counter(of(item) for item in self.judged if name in ("all", item.claim.document))
            for name in (*(document.code for document in self.ledger.documents), "all")
        }

    def find_contradictions(self, claim: str) -> list[tuple[str, str]]:
        """Return the ids of contradicting claims, or `itself`, each with the reason."""
        return [
            (", ".join(name for side in item.between if claim not in side for name in side) or "itself", item.why)
            for item in self.ledger.contradictions
            if any(claim in side for side in item.between)
        ]

    def document(self) -> dict[str, Any]:
        """Return the scoreboard for JSON."""
        return {
            "documents": {document.code: document.title for document in self.ledger.documents},
            "sources": {document.code: document.source for document in self.ledger.documents},
            "counts": {name: dict(counts) for name, counts in self.counts(lambda item: item.verdict).items()},
            "findings": {name: dict(counts) for name, counts in self.counts().items()},
            "evidence": {
                kind: dict(Counter(item.finding.basis[0] for item in self.judged if item.finding.kind == kind))
                for kind in get_args(FindingKind)
            },
            "claims": [
                item.document()
                | {"contradicts": [{"claims": ids, "why": why} for ids, why in self.find_contradictions(item.claim.id)]}
                for item in self.judged
            ],
            "corrections": [dataclasses.asdict(item) for item in self.ledger.corrections],
        }


def build_scoreboard(
    reports: Path = REPORTS, ledger: Ledger | None = None, evidence: Evidence | None = None
) -> Scoreboard:
    """Judge every claim of a ledger by the records of a folder.

    The p values of all timed and trained checks are one family, in which a test that two claims share counts once. An
    answer that is not significant after Holm's correction is `inside noise`.
    """
    entries = ledger or read_ledger()
    source = evidence or Evidence(reports)
    results = [[check.find(source) for check in claim.checks] for claim in entries.claims]
    tests = {_test(result): result.p for row in results for result in row if result.p is not None}
    ps = dict(zip(tests, apply_holm(tests.values()), strict=True))

    def corrected(result: CheckResult) -> CheckResult:
        if result.p is None:
            return result
        p = ps[_test(result)]
        return dataclasses.replace(result, p=p, answer="inside noise" if p > SIGNIFICANCE else result.answer)

    rows = (tuple(map(corrected, row)) for row in results)
    return Scoreboard(entries, tuple(map(JudgedClaim, entries.claims, rows)))


def _test(result: CheckResult) -> tuple[str, str, float | None]:
    """Return what identifies a statistical test: the figure of a form, and its p at the bound."""
    return result.check.form, repr(sorted(result.check.numbers.items())), result.p
