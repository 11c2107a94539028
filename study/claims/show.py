"""What the notebook of claims calls: the scoreboard, every claim with its plots, the tables found elsewhere."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import nbformat
import pandas as pd
from IPython.display import display
from markupsafe import Markup

from study.claims.board import Board, JudgedClaim, board
from study.claims.evidence import KEYS_FILE, Evidence
from study.claims.ledger import ClaimCheck, ClaimFinding
from study.claims.published import derivation, published_tables
from study.claims.sceptic import facts
from study.claims.verdicts import Region, Verdict, number
from study.config.errors import UserError
from study.config.strategies import REPOSITORY, from_root
from study.report.site.build import NOTEBOOKS, TIME_LIMIT_S, NotebookFailed, body_of, execute
from study.report.site.page import page_html, paragraph_html, render, slug, table_html

# Of the width, left free on both sides of what is shown; labels nearer to an edge than the second stay inside.
_MARGIN, _EDGE = 12.0, 18.0
# A larger ratio of what is shown needs a log scale.
_LINEAR_UP_TO = 20.0
# Labels of two edges that are nearer than this would cover each other.
_APART = 26.0


def strip(finding: ClaimFinding, region: Region) -> Markup:
    figure = finding.figure
    assert figure is not None
    low, high = (figure.value if end is None else end for end in (figure.low, figure.high))
    edges = [edge for edge in (region.low, region.high) if math.isfinite(edge)]
    if not all(map(math.isfinite, (figure.value, low, high))):
        return Markup("")
    at = _scale([figure.value, low, high, *edges])
    start, end = (at(edge) if math.isfinite(edge) else side for edge, side in ((region.low, 0.0), (region.high, 100.0)))
    labels = [(*_side(at(figure.value)), number(figure.value, finding.unit))]
    shown = [(x, 12, side, text) for x, side, text in labels]
    shown += [(x, 43, side, text) for x, side, text in _edge_labels(region, edges, at, finding.unit)]
    return Markup(render(
        "strip.html.j2", alt=f"{finding.sentence}.", answer=finding.answer, point=_percent(at(figure.value)),
        region=(_percent(start), _percent(max(end - start, 0.6))), labels=shown,
        interval=(_percent(at(low)), _percent(at(high))) if low < high else None,
    ))  # fmt: skip


def _edge_labels(
    region: Region, edges: list[float], at: Callable[[float], float], unit: str
) -> list[tuple[float, str, str]]:
    if len(edges) == 2 and at(edges[1]) - at(edges[0]) < _APART:
        return [(*_side((at(edges[0]) + at(edges[1])) / 2), f"claimed: {region.words(unit)}")]
    return [
        (*_side(at(edge)), f"{'at least' if edge == region.low else 'at most'} {number(edge, unit)}") for edge in edges
    ]


def _scale(values: list[float]) -> Callable[[float], float]:
    """From a value to its place, in percent of the width."""
    least, most = min(values), max(values)
    if least > 0 and most / least > _LINEAR_UP_TO:
        inner = _scale([math.log(least), math.log(most)])
        return lambda value: inner(math.log(value))
    if least == most:
        return lambda _value: 50.0
    return lambda value: _MARGIN + (100 - 2 * _MARGIN) * (value - least) / (most - least)


def _side(place: float) -> tuple[float, str]:
    """Where a label stands that must not leave the strip."""
    if place < _EDGE:
        return 0.0, "start"
    return (100.0, "end") if place > 100 - _EDGE else (round(place, 2), "middle")


def _percent(place: float) -> float:
    return round(place, 2)


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

    def _claim(self, judged: JudgedClaim) -> dict[str, Any]:
        claim = judged.claim
        return {
            "id": claim.id, "verdict": judged.verdict, "says": claim.says, "place": claim.place,
            "sentence": judged.sentence, "figure": _figure(judged.leading), "untestable": claim.untestable,
            "checks": [self._check(*each) for each in zip(claim.checks, judged.findings, strict=True)],
            "contradictions": [(ids.split(", "), why) for ids, why in self._board.contradictions_of(claim.id)],
            "settle": claim.settle, "holds_if": claim.holds_if, "falls_if": claim.falls_if,
            "protocol": claim.protocol, "facts": facts(judged, self._evidence), "alternatives": claim.alternatives,
        }  # fmt: skip

    def _check(self, check: ClaimCheck, finding: ClaimFinding) -> dict[str, Any]:
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


def _figure(finding: ClaimFinding | None) -> str:
    if finding is None or finding.figure is None:
        return ""
    figure = finding.figure
    count = f", n = {figure.n}" if figure.n else ", exact"
    return f"{number(figure.value, finding.unit)}{figure.spread}{count}"


def _table(frame: pd.DataFrame) -> None:
    _show(table_html(frame), frame.to_string(index=False))


def _show(html: str, text: str) -> None:
    display({"text/html": html, "text/plain": text}, raw=True)


NOTEBOOK = NOTEBOOKS / "claims.ipynb"
# In a page that was written here, and so may be written over.
_MADE_HERE = "as <code>notebooks/claims.ipynb</code> ran"


def write_page(file: Path, reports_dir: Path = REPOSITORY / "reports") -> None:
    _check_place(file)
    inside = file.resolve().is_relative_to(REPOSITORY.resolve())
    links_from = os.path.relpath(file.resolve().parent, REPOSITORY.resolve()) if inside else ""
    with tempfile.TemporaryDirectory(prefix="zero-study-claims-") as folder:
        ran = Path(folder) / NOTEBOOK.name
        parameters = {"reports_dir": str(reports_dir.resolve()), "links_from": links_from}
        try:
            execute(NOTEBOOK, ran, parameters, Path(folder), TIME_LIMIT_S)
        except NotebookFailed as error:
            raise UserError(f"notebooks/{NOTEBOOK.name} did not finish: {error}", "fix what it says") from None
        notebook = nbformat.read(ran, as_version=4)
    # It would name a place of this machine.
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    title = notebook.cells[0].source.partition("\n")[0].lstrip("# ")
    text = page_html("claims.html.j2", "claims", {file.stem: title}, file.stem, body=body_of(notebook))
    beside = file.with_name(f".{file.name}.building")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"--page {file} is not writable ({error.strerror})", "name another file") from None


def _check_place(file: Path) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"--page {file} is no place for a file", "name a file in a folder that is there")
    try:
        if file.exists() and _MADE_HERE not in file.read_text(encoding="utf-8"):
            raise UserError(f"--page {file} is there, and no page of claims", "name another file, or remove it")
    except (OSError, ValueError):
        raise UserError(f"--page {file} is there, and not readable", "name another file, or remove it") from None
