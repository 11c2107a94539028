"""docs/claims.md, which `make claims` writes: every claim with its checks."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from study.claims import gpu_checks
from study.claims.agreement import stored_comparison
from study.claims.agreement_page import reading_tables
from study.claims.command import VERDICTS as VERDICTS_FILE
from study.claims.command import first_line, records_digest
from study.claims.ledger import CLAIM_ID
from study.claims.published import published_tables
from study.claims.scoreboard import JudgedClaim, Scoreboard, build_scoreboard
from study.claims.verdicts import Figure, FindingKind, number
from study.config.places import REPOSITORY
from study.config.text import percent
from study.records.shares import CONFIDENCE
from study.records.statistics import POWER, t_quantile
from study.report.document import Link, PageSection, paragraphs, render_markdown

PAGE = REPOSITORY / "docs" / "claims.md"
FINDINGS: tuple[str, ...] = get_args(FindingKind)
_TITLE = "Which published claims hold?"
_READINGS = (
    "One rule for all claims. A reading that alone rescues a claim must be the only one left or the most natural one; a"
    " reading is not rejected because it refutes a claim. Each claim lists the readings that were tried and rejected."
)


def sections(scoreboard: Scoreboard) -> Iterator[PageSection]:
    """Yield the sections of the page."""
    legend = scoreboard.ledger.legend
    *reading, check_table, reading_tables = paragraphs("claims_about.j2")
    yield PageSection(
        "How several checks make one finding",
        table=_table(legend["findings"], "finding", "when"),
        notes=paragraphs("claims_rules.j2"),
    )
    strongest = scoreboard.counts(lambda item: f"{item.finding.kind}, {item.finding.basis[0]}")["all"]
    kinds = [
        [name, words, *(strongest[f"{kind}, {name}"] or "-" for kind in FINDINGS)]
        for name, words in legend["evidence"].items()
    ]
    yield PageSection(
        "Evidence of a finding",
        "The strongest first, with the number of claims for which it is the strongest.",
        table=_table(kinds, "evidence", "is", *FINDINGS),
    )
    yield PageSection(
        "Readings that count",
        _READINGS,
        table=_table(legend["readings"], "rule", "a reading counts if"),
    )
    yield PageSection("How a check is judged", "\n\n".join(reading))
    yield _second_readings(scoreboard)
    for document in scoreboard.ledger.documents:
        code = document.code
        yield PageSection(f"{code}: {document.title}", f"{document.scale}.")
        for judged in scoreboard.judged:
            if judged.claim.document == code:
                yield _claim(judged, scoreboard)
    corrections = [
        (item.date, Link(item.claim, f"#{item.claim.lower()}"), item.what, item.why)
        for item in scoreboard.ledger.corrections
    ]
    yield PageSection("Corrections", table=_table(corrections, "date", "claim", "correction", "because"))
    yield PageSection("Published tables", check_table, table=_table(legend["tables"], "verdict", "the row states"))
    yield PageSection(text=reading_tables)
    for table in published_tables():
        rows = [
            (row.model, str(row.gpus), row.strategy, row.trains, row.stated_gb, item.plausibility, item.why)
            for item in table.rows
            for row in (item.row,)
        ]
        columns = ("model", "GPUs", "strategy", "trains", "on one GPU", "verdict", "why")
        yield PageSection(table.title, f"{table.address}. {table.note}", table=_table(rows, *columns), level=3)


def _second_readings(scoreboard: Scoreboard) -> PageSection:
    """Return the readings of others, compared to these findings, and the command that prints the form."""
    comparison = stored_comparison(scoreboard.document()["claims"])
    text = "\n\n".join(paragraphs("claims_readings.j2", count=len(comparison.readings)))
    tables = {table.title: _table(map(_linked, table.rows), *table.columns) for table in reading_tables(comparison)}
    return PageSection("Readings by others", text, tables=tables)


def _linked(row: Sequence[str]) -> Sequence[object]:
    """Return a row with a link in its first cell, if that is a claim."""
    return (Link(row[0], f"#{row[0].lower()}"), *row[1:]) if re.fullmatch(CLAIM_ID, row[0]) else row


def _table(rows: Iterable[object] | Mapping[str, str], *columns: str) -> pd.DataFrame:
    return pd.DataFrame(list(rows.items() if isinstance(rows, Mapping) else rows), columns=list(columns))


def _claim(judged: JudgedClaim, scoreboard: Scoreboard) -> PageSection:
    claim, finding = judged.claim, judged.finding
    notes = paragraphs(
        "claim_notes.j2",
        claim=claim,
        results=judged.results,
        contradictions=scoreboard.find_contradictions(claim.id),
        sizes=_sizes,
    )
    details = finding.details
    basis, parts = ", ".join(finding.basis), f" {details[:1].upper()}{details[1:]}." * bool(details)
    return PageSection(
        claim.id,
        claim.says,
        finding.kind,
        f"{judged.sentence}{parts} Evidence: {basis}.",
        notes=notes,
        level=3,
    )


def _sizes(figure: Figure) -> list[str]:
    """Return the least significant difference and the minimum detectable effect."""
    df, error = figure.df or 0.0, figure.standard_error or 0.0
    least = t_quantile((1 + CONFIDENCE) / 2, df)
    sizes = (least * error, (least + t_quantile(POWER, df)) * error)
    return [number(size) if figure.is_slope else percent(math.expm1(size)) for size in sizes]


def page(claims: Scoreboard) -> str:
    """Return docs/claims.md as text."""
    rows = [
        [name, *(counts[kind] or "-" for kind in FINDINGS), counts.total()] for name, counts in claims.counts().items()
    ]
    return render_markdown(
        "claims.md.j2",
        title=_TITLE,
        lead=f"{first_line(claims.document())}.",
        documents=claims.ledger.documents,
        sections=sections(claims),
        counts=_table(rows, "document", *FINDINGS, "claims"),
    )


def address(claim: str, folder: Path) -> str:
    """Return a link to a claim's entry, relative to a folder; empty outside this repository."""
    start = folder.resolve()
    is_inside = start.is_relative_to(REPOSITORY.resolve())
    return f"{os.path.relpath(PAGE.resolve(), start)}#{claim.lower()}" if is_inside else ""


def main() -> None:
    """Write docs/claims.md, docs/gpu_checks.md and the findings file, which is printed while its records stay."""
    scoreboard = build_scoreboard()
    PAGE.write_text(page(scoreboard), encoding="utf-8")
    gpu_checks.PAGE.write_text(gpu_checks.page(scoreboard), encoding="utf-8")
    # CPUs differ in the last digits.
    rounded = json.loads(json.dumps(scoreboard.document()), parse_float=lambda figure: float(f"{float(figure):.10g}"))
    VERDICTS_FILE.write_text(findings_text({"records_sha256": records_digest(), **rounded}), encoding="utf-8")


def findings_text(document: Mapping[str, Any]) -> str:
    """Return the scoreboard's document as JSON with a line per claim."""
    dump = functools.partial(json.dumps, separators=(",", ":"))
    head = dump({key: value for key, value in document.items() if key != "claims"})
    claims = ",\n".join(map(dump, document["claims"]))
    return f'{head[:-1]},"claims":[\n{claims}\n]}}\n'


if __name__ == "__main__":
    main()
