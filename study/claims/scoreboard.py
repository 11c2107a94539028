"""Scoreboard: every claim with its finding, from the ledger and the committed records, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from study.claims.evidence import Evidence
from study.claims.ledger import CheckResult, Claim, Ledger, read_ledger
from study.claims.verdicts import Answer, CheckOutcome, ClaimFinding, FindingKind, combine
from study.config.places import REPOSITORY
from study.records.frames import Records
from study.records.statistics import SIGNIFICANCE, apply_holm

REPORTS = REPOSITORY / "reports"
# The value of the key `verdict` in JSON, by finding; kept for readers of earlier releases.
_VERDICTS = {
    "holds": "supported", "holds in part": "partly", "does not hold": "contradicted",
    "contradicts itself": "contradicted",
}  # fmt: skip
# Answers of the check that the sentence of a claim quotes, the first one that there is.
_LEADING: dict[FindingKind, tuple[Answer, ...]] = {
    "holds": ("holds",), "holds in part": ("fails", "holds"), "does not hold": ("fails",),
    "contradicts itself": ("fails",), "undecided": ("fails", "inside noise", "disputed", "holds", "not judged"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class JudgedClaim:
    """A claim with its finding and the results of its checks."""

    claim: Claim
    finding: ClaimFinding
    results: tuple[CheckResult, ...]

    @property
    def leading(self) -> CheckResult | None:
        """The first result that the finding rests on; None if no check was judged."""
        pairs = list(zip(self.claim.checks, self.results, strict=True))
        deciding = {part.words for part in self.finding.parts if part.decides}
        pairs.sort(key=lambda pair: (pair[0].proxy, pair[0].tests not in deciding))
        results = (result for answer in _LEADING[self.finding.kind] for _, result in pairs if result.answer == answer)
        return next(results, None)

    @property
    def sentence(self) -> str:
        """One sentence with the figure that decides, or the reason why there is none."""
        if self.leading is None or (self.claim.untestable and self.finding.kind == "undecided"):
            return self.claim.untestable or "No record here can judge it yet."
        return f"{self.leading.sentence}."

    @property
    def kinds(self) -> list[str]:
        """Kinds of evidence with at least one judged check."""
        return list(dict.fromkeys(result.kind for result in self.results if result.answer != "not judged"))

    @property
    def verdict(self) -> str:
        """The finding in the words of earlier releases."""
        if self.finding.kind != "undecided":
            return _VERDICTS[self.finding.kind]
        return "untestable" if self.claim.untestable else "inconclusive"

    def document(self) -> dict[str, Any]:
        """Return the claim for JSON."""
        figure = self.leading.figure if self.leading else None
        claim = dataclasses.asdict(self.claim)
        del claim["checks"]
        return {
            **claim, "document": self.claim.document, "finding": self.finding.kind, "evidence": self.finding.basis,
            "finding_text": self.finding.text,
            "parts": [
                {"words": part.words, "finding": part.label, "evidence": part.basis} for part in self.finding.parts
            ],
            "verdict": self.verdict, "sentence": self.sentence, "rests_on": self.kinds, **_figure(self.leading),
            "records": list(dict.fromkeys(run for item in self.results if item.figure for run in item.figure.records)),
            "checks": [
                {"kind": result.kind, "tests": check.tests, "reading": check.reading, "evidence": check.basis,
                 "answer": result.answer, "p": result.p, "sentence": result.sentence, **_figure(result)}
                for check, result in zip(self.claim.checks, self.results, strict=True)
            ],
            "n": figure.n if figure else None,
        }  # fmt: skip


def _figure(result: CheckResult | None) -> dict[str, Any]:
    figure = result.figure if result else None
    interval = None if figure is None or figure.low is None else [figure.low, figure.high]
    return {"figure": figure.value if figure else None, "unit": result.unit if result else "", "interval": interval}


def judge(claim: Claim, evidence: Evidence) -> JudgedClaim:
    """Run the checks of a claim and combine their answers into a finding."""
    return _combined(claim, [check.find(evidence) for check in claim.checks])


def _combined(claim: Claim, results: Sequence[CheckResult]) -> JudgedClaim:
    outcomes = [
        CheckOutcome(
            result.answer, check.tests, check.reading, check.basis, check.necessary, check.decides, check.internal
        )
        for check, result in zip(claim.checks, results, strict=True)
    ]
    return JudgedClaim(claim, combine(outcomes), tuple(results))


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


def claims_of_report(
    report: str, records: Records, ledger: Ledger
) -> list[tuple[JudgedClaim, tuple[CheckResult, ...]]]:
    """Return the claims with a figure from these records of a report, each with its results on them."""
    evidence = Evidence(REPORTS).with_records(report, records)
    claims = []
    for claim in ledger.claims:
        if any(check.numbers.get("report") == report for check in claim.checks):
            judged = judge(claim, evidence)
            results = tuple(result for result in judged.results if report in result.reports)
            claims += [(judged, results)] if results else []
    return claims


def build_scoreboard(
    reports: Path = REPORTS, ledger: Ledger | None = None, evidence: Evidence | None = None
) -> Scoreboard:
    """Judge every claim of a ledger by the records of a folder.

    The p values of all timed and trained checks are one family. An answer that is not significant after Holm's
    correction is `inside noise`.
    """
    entries = ledger or read_ledger()
    source = evidence or Evidence(reports)
    results = [[check.find(source) for check in claim.checks] for claim in entries.claims]
    ps = iter(apply_holm(result.p for row in results for result in row if result.p is not None))
    results = [[result if result.p is None else dataclasses.replace(result, p=next(ps)) for result in row]
               for row in results]  # fmt: skip
    results = [[dataclasses.replace(result, answer="inside noise") if (result.p or 0) > SIGNIFICANCE else result
                for result in row] for row in results]  # fmt: skip
    return Scoreboard(entries, tuple(map(_combined, entries.claims, results)))
