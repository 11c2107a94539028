"""What the notebook of claims calls: the scoreboard, every claim with its plots, the tables found elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, get_args

import pandas as pd
from IPython.display import display
from markupsafe import Markup

from study.claims.board import Board, Judged, board
from study.claims.derivation import derivation
from study.claims.evidence import KEYS_FILE, Evidence
from study.claims.ledger import Check, Finding
from study.claims.published import published_tables
from study.claims.sceptic import facts
from study.claims.strip import strip
from study.claims.verdicts import Verdict, number
from study.errors import UserError
from study.report.site.page import paragraph_html, render, slug, table_html
from study.spec.strategies import REPOSITORY, from_root

VERDICTS: tuple[str, ...] = get_args(Verdict)


class Claims:
    """All of them; with a document's code or a verdict, `each` shows those alone.

    `links_from` is the folder from which a link leads to a report; without one there are no such links.
    """

    def __init__(self, reports_dir: str, links_from: str = "") -> None:
        self._reports = from_root(reports_dir)
        if not self._reports.is_dir():
            raise UserError(f"there is no folder {reports_dir}", "name another reports_dir")
        self._evidence = Evidence(self._reports)
        self._board: Board = board(self._reports, evidence=self._evidence)
        self._links_from = links_from

    def scoreboard(self) -> None:
        titles = {each.code: each.title for each in self._board.ledger.documents}
        rows = [(name, titles.get(name, ""), counts, counts.total()) for name, counts in self._board.counts()]
        rules = Markup("\n").join(_rule(*each) for each in _filters(list(titles)))
        _show(render("scoreboard.html.j2", verdicts=VERDICTS, rows=rows, rules=rules), "\n".join(self._board.lines()))

    def each(self, document: str = "", verdict: str = "") -> None:
        known = [each.code for each in self._board.ledger.documents]
        for asked, names in ((document, known), (verdict, VERDICTS)):
            if asked and asked not in names:
                raise UserError(f"{asked} is not there", f"use one of {', '.join(names)}")
        chosen = [one for one in self._board.judged
                  if document in ("", one.claim.document) and verdict in ("", one.verdict)]  # fmt: skip
        documents = [
            (each, [self._claim(one) for one in chosen if one.claim.document == each.code])
            for each in self._board.ledger.documents
        ]
        filters = [(name, ", ".join(filter(None, (code, of)))) for name, code, of in _filters(known)]
        shown = [(each, claims) for each, claims in documents if claims]
        text = "\n".join(f"{one.claim.id} {one.verdict}: {one.sentence}" for one in chosen)
        _show(render("claims_list.html.j2", documents=shown, filters=filters), text)

    def corrections(self) -> None:
        rows = [{"Date": each.date, "Claim": each.claim, "Said wrongly": each.what, "Because": each.why}
                for each in self._board.ledger.corrections]  # fmt: skip
        _table(pd.DataFrame(rows)) if rows else _show(paragraph_html("None yet.", "note"), "None yet.")

    def published_tables(self) -> None:
        rows = [
            {"Workload": table.title, "Model": each.row.model, "Verdict": each.plausibility,
             "On one GPU": each.row.said_gb, "GPUs": each.row.gpus, "Strategy": each.row.strategy,
             "Trains": each.row.trains, "Why": each.why}
            for table in published_tables() for each in table.rows
        ]  # fmt: skip
        _table(pd.DataFrame(rows))

    def _claim(self, judged: Judged) -> dict[str, Any]:
        claim = judged.claim
        return {
            "id": claim.id, "verdict": judged.verdict, "says": claim.says, "place": claim.place,
            "sentence": judged.sentence, "figure": _figure(judged.leading), "untestable": claim.untestable,
            "checks": [self._check(*each) for each in zip(claim.checks, judged.findings, strict=True)],
            "contradictions": [(ids.split(", "), why) for ids, why in self._board.contradictions_of(claim.id)],
            "settle": claim.settle, "holds_if": claim.holds_if, "falls_if": claim.falls_if,
            "protocol": claim.protocol, "facts": facts(judged, self._evidence), "alternatives": claim.alternatives,
        }  # fmt: skip

    def _check(self, check: Check, finding: Finding) -> dict[str, Any]:
        figure = finding.figure
        records = figure.records if figure else ()
        return {
            "answer": finding.answer, "kind": finding.kind, "role": check.role, "sentence": finding.sentence,
            "strip": strip(finding, check.region) if figure else "", "derivation": derivation(check) if figure else "",
            "value": number(figure.value, finding.unit) if figure else "",
            "records": [(record, self._address(record)) for record in records],
        }  # fmt: skip

    def _address(self, record: str) -> str:
        """Of the runs of its report, or of the file itself."""
        folder = record.split("/")[0]
        report = self._reports / folder
        file = next(
            (file for file in (REPOSITORY / record, report / "index.html", report / KEYS_FILE) if file.is_file()), None
        )
        if not self._links_from or file is None:
            return ""
        here = os.path.relpath(file.resolve(), (REPOSITORY / self._links_from).resolve())
        return f"{here}#runs" if file.name == "index.html" else here


def _filters(codes: list[str]) -> Iterator[tuple[str, str, str]]:
    """Each by its anchor, with the document and the verdict that it keeps; empty keeps all."""
    for code in ("", *codes):
        for verdict in ("", *VERDICTS):
            if code or verdict:
                yield "-".join(filter(None, (code, slug(verdict)))), code, verdict


def _rule(name: str, code: str, verdict: str) -> Markup:
    """What an anchor hides: a page needs no script for that."""
    kept = "".join(f".{part}" for part in (code, slug(verdict)) if part)
    hidden = [f".claim:not({kept})", *([f".document:not(.{code})"] if code else [])]
    return Markup(",".join(f"body:has(#only-{name}:target) {each}" for each in hidden) + "{display:none}")


def _figure(finding: Finding | None) -> str:
    if finding is None or finding.figure is None:
        return ""
    figure = finding.figure
    count = f", n = {figure.n}" if figure.n else ", exact"
    return f"{number(figure.value, finding.unit)}{figure.spread}{count}"


def _table(frame: pd.DataFrame) -> None:
    _show(table_html(frame), frame.to_string(index=False))


def _show(html: str, text: str) -> None:
    display({"text/html": html, "text/plain": text}, raw=True)
