"""Every claim with its verdict, from the ledger and the committed records; as text and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from study.claims.evidence import Evidence
from study.claims.ledger import Claim, ClaimFinding, Ledger, read_ledger
from study.claims.verdicts import Answer, CheckOutcome, Verdict, combine
from study.config.printing import TextTable
from study.config.strategies import REPOSITORY
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
    claim: Claim
    verdict: Verdict
    findings: tuple[ClaimFinding, ...]

    @property
    def leading(self) -> ClaimFinding | None:
        """The first finding that the verdict comes from."""
        decisive = (each for answer in _DECISIVE[self.verdict] for each in self.findings if each.answer == answer)
        return next(decisive, None)

    @property
    def sentence(self) -> str:
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
        """The kinds of evidence that answered."""
        return list(dict.fromkeys(each.kind for each in self.findings if each.answer != "not judged"))

    def document(self) -> dict[str, Any]:
        figure = self.leading.figure if self.leading else None
        claim = dataclasses.asdict(self.claim)
        del claim["checks"]
        return {
            **claim, "document": self.claim.document, "verdict": self.verdict, "sentence": self.sentence,
            "rests_on": self.kinds, **_figure(self.leading),
            "records": list(dict.fromkeys(run for each in self.findings if each.figure for run in each.figure.records)),
            "checks": [
                {"kind": each.kind, "answer": each.answer, "sentence": each.sentence, **_figure(each)}
                for each in self.findings
            ],
            "n": figure.n if figure else None,
        }  # fmt: skip


def _figure(finding: ClaimFinding | None) -> dict[str, Any]:
    figure = finding.figure if finding else None
    interval = None if figure is None or figure.low is None else [figure.low, figure.high]
    return {"figure": figure.value if figure else None, "unit": finding.unit if finding else "", "interval": interval}


def judge(claim: Claim, evidence: Evidence) -> JudgedClaim:
    findings = tuple(check.find(evidence) for check in claim.checks)
    parts = [
        CheckOutcome(finding.answer, check.necessary, check.elsewhere)
        for check, finding in zip(claim.checks, findings, strict=True)
    ]
    return JudgedClaim(claim, combine(parts, bool(claim.untestable)), findings)


@dataclasses.dataclass(frozen=True)
class Scoreboard:
    ledger: Ledger
    judged: tuple[JudgedClaim, ...]

    def counts(self) -> list[tuple[str, Counter[str]]]:
        """The verdicts by document, then of all claims."""
        codes = [each.code for each in self.ledger.documents]
        rows = [(code, [one for one in self.judged if one.claim.document == code]) for code in codes]
        return [(name, Counter(str(one.verdict) for one in of)) for name, of in [*rows, ("all", list(self.judged))]]

    def find_contradictions(self, claim: str) -> list[tuple[str, str]]:
        """The other claims' ids, or `itself`, with the reason."""
        return [
            (", ".join(each.other_claims(claim)) or "itself", each.why)
            for each in self.ledger.contradictions
            if any(claim in side for side in each.between)
        ]

    def document(self) -> dict[str, Any]:
        return {
            "counts": {name: dict(counts) for name, counts in self.counts()},
            "claims": [
                each.document()
                | {"contradicts": [{"claims": ids, "why": why} for ids, why in self.find_contradictions(each.claim.id)]}
                for each in self.judged
            ],
            "corrections": [dataclasses.asdict(each) for each in self.ledger.corrections],
        }

    def text(self, details: bool) -> list[str | TextTable]:
        """The counts, their table by document, and with details a line for each claim."""
        verdicts = get_args(Verdict)
        counts = [[name, *(str(count[each] or "-") for each in verdicts), str(count.total())]
                  for name, count in self.counts()]  # fmt: skip
        _, every = self.counts()[-1]
        said = ", ".join(f"{every[each]} {each}" for each in verdicts if every[each])
        claims = [[one.claim.id, one.verdict, one.sentence] for one in self.judged]
        last = TextTable(["", "", ""], claims) if details else "--details prints each claim; docs/claims.md has all"
        return [f"{every.total()} claims: {said}", "", TextTable(["document", *verdicts, "claims"], counts), "", last]


def claims_of_report(
    report: str, records: Records, ledger: Ledger
) -> list[tuple[JudgedClaim, tuple[ClaimFinding, ...]]]:
    """Return the claims with a figure from these records of a report, each with those findings."""
    evidence = Evidence(REPORTS).with_records(report, records)
    found = []
    for claim in ledger.claims:
        if any(check.numbers.get("report") == report for check in claim.checks):
            judged = judge(claim, evidence)
            own = tuple(each for each in judged.findings if report in each.reports)
            found += [(judged, own)] if own else []
    return found


def build_scoreboard(
    reports: Path = REPORTS, ledger: Ledger | None = None, evidence: Evidence | None = None
) -> Scoreboard:
    read = ledger or read_ledger()
    found = evidence or Evidence(reports)
    return Scoreboard(read, tuple(judge(claim, found) for claim in read.claims))
