"""The claims as pages: docs/claims.md of `make claims`, and the HTML page of `study claims --page`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import pandas as pd
from markupsafe import Markup

from study.claims import gpu_checks
from study.claims.agreement import stored_comparison
from study.claims.agreement_page import reading_tables
from study.claims.command import VERDICTS as VERDICTS_FILE
from study.claims.command import first_line
from study.claims.evidence import KEYS_FILE, Evidence
from study.claims.ledger import CLAIM_ID
from study.claims.provenance import NOT_OF_RUNS, provenance
from study.claims.published import published_tables
from study.claims.scoreboard import REPORTS, JudgedClaim, Scoreboard, build_scoreboard
from study.claims.verdicts import CheckResult, Figure, FindingKind, number
from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.config.text import percent
from study.records.shares import CONFIDENCE
from study.records.statistics import POWER, t_quantile
from study.report.canvas import VERDICTS
from study.report.document import Link, PageSection, code_html, link_html, page_html, paragraphs, render_markdown

PAGE = REPOSITORY / "docs" / "claims.md"
FINDINGS: tuple[str, ...] = get_args(FindingKind)
_TITLE = "Which published claims hold?"
_READINGS = (
    "One rule for all claims. A reading that alone rescues a claim must be the only one left or the most natural one; a"
    " reading is not rejected because it refutes a claim. Each claim lists the readings that were tried and rejected."
)


def sections(scoreboard: Scoreboard, evidence: Evidence | None = None, links_from: str = "") -> Iterator[PageSection]:
    """Yield the sections of the page; with evidence also derivations, records and provenance, for HTML.

    `links_from` is the folder that links to reports are relative to; without it there are no links.
    """
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
    yield PageSection("How a check is judged", "\n\n".join(reading), classes="method")
    yield _second_readings(scoreboard)
    for document in scoreboard.ledger.documents:
        code = document.code
        yield PageSection(
            f"{code}: {document.title}", f"{document.scale}.", classes=f"document {code}", anchor=code.lower()
        )
        for judged in scoreboard.judged:
            if judged.claim.document == code:
                yield _claim(judged, scoreboard, evidence, links_from)
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
    return PageSection("Readings by others", text, tables=tables, classes="method")


def _linked(row: Sequence[str]) -> Sequence[object]:
    """Return a row with a link in its first cell, if that is a claim."""
    return (Link(row[0], f"#{row[0].lower()}"), *row[1:]) if re.fullmatch(CLAIM_ID, row[0]) else row


def _table(rows: Iterable[object] | Mapping[str, str], *columns: str) -> pd.DataFrame:
    return pd.DataFrame(list(rows.items() if isinstance(rows, Mapping) else rows), columns=list(columns))


def _claim(judged: JudgedClaim, scoreboard: Scoreboard, evidence: Evidence | None, links_from: str) -> PageSection:
    claim, finding = judged.claim, judged.finding
    notes = paragraphs(
        "claim_notes.j2",
        claim=claim,
        results=judged.results,
        contradictions=scoreboard.find_contradictions(claim.id),
        provenance=provenance(judged, evidence) if evidence else (),
        sizes=_sizes,
    )
    if evidence:
        first = 2 + bool(claim.readings) + len(claim.rejected) + bool(claim.untestable)
        for place, result in enumerate(judged.results, first):
            if result.figure:
                notes[place] = code_html(notes[place]) + _below(result, result.figure, evidence.root, links_from)
    rest = finding.text.removeprefix("undecided: ") if finding.text != finding.kind else ""
    basis, parts = ", ".join(finding.basis), f" {rest[:1].upper()}{rest[1:]}." * bool(rest)
    return PageSection(
        claim.id,
        claim.says,
        finding.kind,
        f"{judged.sentence}{parts}{'' if evidence else f' Evidence: {basis}.'}",
        notes=notes,
        level=3,
        anchor=claim.id.lower(),
        below=basis,
        classes=f"claim {claim.document} {finding.kind.replace(' ', '-')}",
    )


def _sizes(figure: Figure) -> list[str]:
    """Return the least significant difference and the minimum detectable effect."""
    df, error = figure.df or 0.0, figure.standard_error or 0.0
    least = t_quantile((1 + CONFIDENCE) / 2, df)
    sizes = (least * error, (least + t_quantile(POWER, df)) * error)
    return [number(size) if figure.is_slope else percent(math.expm1(size)) for size in sizes]


def _below(result: CheckResult, figure: Figure, reports: Path, links_from: str) -> Markup:
    """Return the derivation of a figure, or links to its records."""
    items = [link_html(name, _address(name, reports, links_from)) for name in figure.records]
    value = f"{figure.derivation} = {number(figure.value, result.check.unit)}"
    html = Markup('<code class="derivation">{}</code>').format(value) if figure.derivation else Markup("")
    if items:
        fold = '<details><summary>{} record{}</summary><p class="records">{}</p></details>'
        html += Markup(fold).format(len(items), "s" * (len(items) > 1), Markup(", ").join(items))
    return html


def _address(record: str, reports: Path, links_from: str) -> str:
    """Return a relative link to the runs of a record's report, or to its file; empty if there is none."""
    report = record.split("/")[0]
    folder = reports / report
    # The page with all runs is there after `make reports`, the summary always.
    files = (REPOSITORY / record, folder / "index.html", folder / "summary.md", folder / KEYS_FILE)
    file = next((file for file in files if file.is_file()), None)
    if not links_from or file is None:
        return ""
    path = os.path.relpath(file.resolve(), (REPOSITORY / links_from).resolve())
    return f"{path}#runs" if file.name == "index.html" and report not in NOT_OF_RUNS else path


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


def write_page(file: Path, reports_dir: Path = REPORTS) -> None:
    """Write the HTML page of `study claims --page`; raise UserError rather than replace another file."""
    marker = "made from the ledger of claims and the committed records"
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"--page {file} is not a path for a file", "name a file in an existing folder")
    if file.exists() and marker not in file.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"--page {file} exists, but is not a page of claims", "name another file, or remove it")
    evidence = Evidence(reports_dir)
    claims = build_scoreboard(reports_dir, evidence=evidence)
    inside = file.resolve().is_relative_to(REPOSITORY.resolve())
    links_from = os.path.relpath(file.resolve().parent, REPOSITORY.resolve()) if inside else ""
    text = page_html(
        "claims.html.j2",
        "claims",
        {file.stem: _TITLE},
        file.stem,
        findings=VERDICTS,
        marker=marker,
        lead=f"{first_line(claims.document())}.",
        counts=claims.counts(),
        legend=claims.ledger.legend,
        documents={item.code: item.title for item in claims.ledger.documents} | {"all": ""},
        all_reports=links_from and os.path.relpath(REPORTS, (REPOSITORY / links_from).resolve()),
        sections=[*sections(claims, evidence, links_from)],
    )
    file.write_text(text, encoding="utf-8")


def address(claim: str, folder: Path) -> str:
    """Return a link to a claim's entry, relative to a folder; empty outside this repository."""
    start = folder.resolve()
    is_inside = start.is_relative_to(REPOSITORY.resolve())
    return f"{os.path.relpath(PAGE.resolve(), start)}#{claim.lower()}" if is_inside else ""


def main() -> None:
    """Write docs/claims.md, docs/gpu_checks.md and the findings file, which installations that lack pandas print."""
    scoreboard = build_scoreboard()
    PAGE.write_text(page(scoreboard), encoding="utf-8")
    gpu_checks.PAGE.write_text(gpu_checks.page(scoreboard), encoding="utf-8")
    # CPUs differ in the last digits.
    rounded = json.loads(json.dumps(scoreboard.document()), parse_float=lambda figure: float(f"{float(figure):.10g}"))
    # A value a line: a change is a readable difference, and spaces would be an eighth of the file.
    VERDICTS_FILE.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
