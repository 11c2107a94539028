"""Scoreboard: every claim with its verdict, from the ledger and the committed records, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from study.claims.evidence import Evidence
from study.claims.ledger import Claim, ClaimFinding, Ledger, read_ledger
from study.claims.verdicts import Answer, CheckOutcome, Verdict, combine
from study.config.places import REPOSITORY
from study.records.frames import Records

REPORTS = REPOSITORY / "reports"
_DECISIVE: dict[Verdict, tuple[Answer, ...]] = {
    "supported": ("holds",), "contradicted": ("fails",), "partly": ("fails", "holds"),
    "inside noise": ("inside noise",), "inconclusive": ("disputed", "not judged", "holds"),
    "untestable": ("disputed", "holds"),
}  # fmt: skip
_SEVERAL: dict[Answer, str] = {
    "holds": "hold", "fails": "fail", "inside noise": "inside noise", "disputed": "disputed",
    "not judged": "not judged",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict and the findings of its checks."""

    claim: Claim
    verdict: Verdict
    findings: tuple[ClaimFinding, ...]

    @property
    def leading(self) -> ClaimFinding | None:
        """The first finding that the verdict rests on; None if no check was judged."""
        decisive = (
            finding for answer in _DECISIVE[self.verdict] for finding in self.findings if finding.answer == answer
        )
        return next(decisive, None)

    @property
    def sentence(self) -> str:
        """One sentence that states why the verdict is as it is."""
        if self.verdict == "untestable" and not (self.leading and self.leading.answer == "disputed"):
            return self.claim.untestable
        leading = self.leading
        if leading is None:
            return "No record here can judge it yet."
        if self.verdict == "partly":
            counts = Counter(finding.answer for finding in self.findings)
            parts = [f"{counts[answer]} {answer if counts[answer] == 1 else several}"
                     for answer, several in _SEVERAL.items() if counts[answer]]  # fmt: skip
            return f"Of {len(self.findings)} checks {', '.join(parts)}. {leading.sentence}."
        return f"{leading.sentence}."

    @property
    def kinds(self) -> list[str]:
        """Kinds of evidence with at least one judged check."""
        return list(dict.fromkeys(finding.kind for finding in self.findings if finding.answer != "not judged"))

    def document(self) -> dict[str, Any]:
        """Return the claim for JSON."""
        figure = self.leading.figure if self.leading else None
        claim = dataclasses.asdict(self.claim)
        del claim["checks"]
        return {
            **claim, "document": self.claim.document, "verdict": self.verdict, "sentence": self.sentence,
            "rests_on": self.kinds, **_figure(self.leading),
            "records": list(dict.fromkeys(run for item in self.findings if item.figure for run in item.figure.records)),
            "checks": [
                {"kind": item.kind, "answer": item.answer, "sentence": item.sentence, **_figure(item)}
                for item in self.findings
            ],
            "n": figure.n if figure else None,
        }  # fmt: skip


def _figure(finding: ClaimFinding | None) -> dict[str, Any]:
    figure = finding.figure if finding else None
    interval = None if figure is None or figure.low is None else [figure.low, figure.high]
    return {"figure": figure.value if figure else None, "unit": finding.unit if finding else "", "interval": interval}


def judge(claim: Claim, evidence: Evidence) -> JudgedClaim:
    """Run the checks of a claim and combine their answers into a verdict."""
    findings = tuple(check.find(evidence) for check in claim.checks)
    parts = [
        CheckOutcome(finding.answer, check.necessary, check.elsewhere)
        for check, finding in zip(claim.checks, findings, strict=True)
    ]
    return JudgedClaim(claim, combine(parts, bool(claim.untestable)), findings)


@dataclasses.dataclass(frozen=True)
class Scoreboard:
    """All claims of a ledger, judged."""

    ledger: Ledger
    judged: tuple[JudgedClaim, ...]

    def counts(self) -> list[tuple[str, Counter[str]]]:
        """Return verdict counts per document, then in total."""
        codes = [document.code for document in self.ledger.documents]
        rows = [(code, [item for item in self.judged if item.claim.document == code]) for code in codes]
        return [
            (name, Counter(str(item.verdict) for item in group)) for name, group in [*rows, ("all", list(self.judged))]
        ]

    def find_contradictions(self, claim: str) -> list[tuple[str, str]]:
        """Return the ids of contradicting claims, or `itself`, each with the reason."""
        return [
            (", ".join(contradiction.other_claims(claim)) or "itself", contradiction.why)
            for contradiction in self.ledger.contradictions
            if any(claim in side for side in contradiction.between)
        ]

    def document(self) -> dict[str, Any]:
        """Return the scoreboard for JSON."""
        return {
            "counts": {name: dict(counts) for name, counts in self.counts()},
            "claims": [
                item.document()
                | {"contradicts": [{"claims": ids, "why": why} for ids, why in self.find_contradictions(item.claim.id)]}
                for item in self.judged
            ],
            "corrections": [dataclasses.asdict(item) for item in self.ledger.corrections],
        }


def claims_of_report(
    report: str, records: Records, ledger: Ledger
) -> list[tuple[JudgedClaim, tuple[ClaimFinding, ...]]]:
    """Return the claims with a figure from these records of a report, each with its findings on them."""
    evidence = Evidence(REPORTS).with_records(report, records)
    claims = []
    for claim in ledger.claims:
        if any(check.numbers.get("report") == report for check in claim.checks):
            judged = judge(claim, evidence)
            findings = tuple(finding for finding in judged.findings if report in finding.reports)
            claims += [(judged, findings)] if findings else []
    return claims


def build_scoreboard(
    reports: Path = REPORTS, ledger: Ledger | None = None, evidence: Evidence | None = None
) -> Scoreboard:
    """Judge every claim of a ledger by the records of a folder."""
    entries = ledger or read_ledger()
    source = evidence or Evidence(reports)
    return Scoreboard(entries, tuple(judge(claim, source) for claim in entries.claims))
