"""What the notebook of claims calls: the scoreboard, every claim with its plots, the tables found elsewhere."""

from __future__ import annotations

import math
import os
import re
import tempfile
import textwrap
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
from study.claims.published import PublishedTable, derivation, published_tables
from study.claims.sceptic import facts
from study.claims.verdicts import Region, Verdict, number
from study.config.errors import UserError
from study.config.strategies import REPOSITORY, from_root
from study.report.site.build import NOTEBOOKS, TIME_LIMIT_S, NotebookFailed, body_of, execute
from study.report.site.page import page_html, paragraph_html, render, slug, table_html, table_markdown

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
        _claims_table(pd.DataFrame(rows)) if rows else _show(paragraph_html("None yet.", "note"), "None yet.")

    def published_tables(self) -> None:
        rows = [
            {"Workload": table.title, "Model": each.row.model, "Verdict": each.plausibility,
             "On one GPU": each.row.said_gb, "GPUs": each.row.gpus, "Strategy": each.row.strategy,
             "Trains": each.row.trains, "Why": each.why}
            for table in published_tables() for each in table.rows
        ]  # fmt: skip
        _claims_table(pd.DataFrame(rows))

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


def _claims_table(frame: pd.DataFrame) -> None:
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


PAGE = REPOSITORY / "docs" / "claims.md"
README = REPOSITORY / "README.md"
_LINES = re.compile(r"(<!-- claims -->\n).*?(<!-- end of claims -->)", re.DOTALL)
_HEAD = """# Claims: what holds

<!-- Made by `make claims` from study/claims/ledger.yaml and the records in reports/. Change those. -->

The claims of the replicated documents, and six of the ZeRO paper's, with what the committed records and plain
arithmetic say of them. `study claims` makes all of it anew, without torch or a GPU. `study claims --page FILE` writes
one HTML page with plots, a filter by document and verdict, and what a sceptic asks of the records. The codes
of the documents are in the [README](../README.md#what-it-replicates).

"""
_RULE = """
How several checks make one verdict:

| verdict | when |
| --- | --- |
| supported | every check holds, one of them at the scale that the claim speaks of |
| contradicted | a check that the claim cannot do without fails; or all others do, one of them at the claim's scale |
| partly | some checks hold or fail, and others do not, could not be judged, or were made at another scale only |
| inside noise | nothing is decided, and an interval lies across what is claimed |
| inconclusive | no record here can judge it yet |
| untestable | no record of this study ever could; the ledger says what would |

What "Overturned if" names is what a failing check has shown of its part of the claim: where another part holds, or
could not be judged, the verdict is partly. A check that the claim cannot do without counts where it fails alone.

Where two claims disagree, a check is `disputed`: one of them is wrong, and it does not say which. Model state counts 16
bytes a parameter, as Adam in mixed precision keeps them, unless a check says otherwise.
"""
_TABLES = """
## Published tables

`study claims check-table FILE` holds a table of models, GPUs, strategies and gigabytes against arithmetic, row by row:

| verdict | when |
| --- | --- |
| impossible | it says less than 16-bit weights and gradients alone take on one GPU, or more than the device has |
| suspicious | it says less than these and Adam in mixed precision: another optimizer or precision, or an error |
| possible | it says that or more |

A row that trains adapters alone needs its frozen weights and no more; the column `trains` says so, and in how many bits
they are. A figure gets the benefit of its last digit, and of GiB written as GB. The tables are in
[study/claims/tables](../study/claims/tables).
"""


def address(claim: str, folder: Path) -> str:
    """Of a claim's entry as seen from a folder; nothing from one that is not in this repository."""
    here = folder.resolve()
    is_inside = here.is_relative_to(REPOSITORY.resolve())
    return f"{os.path.relpath(PAGE.resolve(), here)}#{anchor(claim)}" if is_inside else ""


def anchor(claim: str) -> str:
    return claim.lower()


def page(made: Board) -> str:
    verdicts = get_args(Verdict)
    rows = [[name, *(counts[each] or "-" for each in verdicts), counts.total()] for name, counts in made.counts()]
    text = _HEAD + table_markdown(pd.DataFrame(rows, columns=["document", *verdicts, "claims"])) + _RULE
    for document in made.ledger.documents:
        text += f"\n## {document.code}: {document.title}\n\n{document.scale}.\n"
        text += "".join(_claim(each, made) for each in made.judged if each.claim.document == document.code)
    return text + _corrections(made) + _TABLES + "".join(map(_table, published_tables()))


def _claim(judged: JudgedClaim, made: Board) -> str:
    claim = judged.claim
    lines = [
        f"\n### {claim.id}\n", f"{claim.says} ({claim.place})\n",
        f"**{judged.verdict.capitalize()}.** {judged.sentence}\n",
        f"- True if: {claim.holds_if} Overturned if: {claim.falls_if}",
    ]  # fmt: skip
    if claim.untestable:
        lines.append(f"- Not testable here: {claim.untestable}")
    for check, finding in zip(claim.checks, judged.findings, strict=True):
        lines.append(f"- {finding.kind}, {finding.answer}{check.role}: {finding.sentence}.")
        if finding.figure and finding.figure.records:
            runs = finding.figure.records
            more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
            lines.append(f"  Rests on `{runs[0]}`{more}.")
    if claim.protocol:
        lines.append(f"- Published protocol: {claim.protocol.published} Here: {claim.protocol.here}")
    lines += [f"- Another explanation: {each}" for each in claim.alternatives]
    lines += [f"- Contradicts {ids}: {why}" for ids, why in made.contradictions_of(claim.id)]
    if settle := claim.settle:
        lines.append(f"- Would say more: `{settle.command}`, about {settle.minutes:g} minutes on {settle.box}.")
    return "\n".join(lines) + "\n"


def _corrections(made: Board) -> str:
    rows = [f"- {each.date}, [{each.claim}](#{anchor(each.claim)}): {each.what} {each.why}\n"
            for each in made.ledger.corrections]  # fmt: skip
    return "\n## Corrections\n\n" + ("".join(rows) or "None yet.\n")


def _table(table: PublishedTable) -> str:
    rows = [
        {"model": row.model, "GPUs": str(row.gpus), "strategy": row.strategy, "trains": row.trains,
         "on one GPU": row.said_gb, "verdict": each.plausibility, "why": each.why}
        for each in table.rows for row in (each.row,)
    ]  # fmt: skip
    return f"\n### {table.title}\n\n{table.address}. {table.note}\n\n{table_markdown(pd.DataFrame(rows))}"


def front_page(made: Board) -> str:
    """The claims that the head of the ledger lists, each with its verdict and the figure that leads to it."""
    found = {each.claim.id: each for each in made.judged}
    counts = made.counts()[-1][1]
    said = [f"{counts[each]} {'are ' * (each == 'supported')}{each}" for each in get_args(Verdict) if counts[each]]
    head = (
        f"Of {counts.total()} published claims {', '.join(said)}, by `make claims` ([all of them](docs/{PAGE.name}))."
        ' "Partly" also stands where every check fails and none was made at the scale that the claim speaks of.'
        " Some of them:"
    )
    return _wrapped(head) + "\n" + "".join(map(_front_line, (found[name] for name in made.ledger.front_page)))


def _front_line(judged: JudgedClaim) -> str:
    claim = judged.claim
    link = f"[{claim.id}](docs/{PAGE.name}#{anchor(claim.id)})"
    return _wrapped(f"- **{judged.verdict.capitalize()}** ({link}): {claim.says} *{judged.sentence}*", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def rewritten(readme: str, made: Board) -> str:
    """A README whose marked lines are what the ledger says today."""
    return _LINES.sub(lambda match: f"{match[1]}\n{front_page(made)}\n{match[2]}", readme)


def main() -> None:
    made = board()
    PAGE.write_text(page(made), encoding="utf-8")
    README.write_text(rewritten(README.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
