"""The claims as pages: docs/claims.md of `make claims`, and the HTML page of `study claims --page`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pandas as pd
from markupsafe import Markup

from study.claims.command import VERDICTS as VERDICTS_FILE
from study.claims.evidence import KEYS_FILE, Evidence
from study.claims.ledger import CheckResult, ClaimCheck
from study.claims.provenance import NOT_OF_RUNS, provenance
from study.claims.published import derivation, published_tables
from study.claims.scoreboard import REPORTS, JudgedClaim, Scoreboard, build_scoreboard
from study.claims.verdicts import PROXY, FindingKind, Region, number
from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.report.document import (
    Link,
    Note,
    PageSection,
    code_html,
    link_html,
    page_html,
    page_markdown,
    slug,
)

PAGE = REPOSITORY / "docs" / "claims.md"
FINDINGS: tuple[str, ...] = get_args(FindingKind)
_TITLE = "Claims: which hold"
_HEAD = """<!-- Made by `make claims` from study/claims/ledger.yaml and the records in reports/. Change those. -->

The claims of the replicated documents, and six of the ZeRO paper's, judged by the committed records and by plain
arithmetic. `study claims` repeats all checks, without torch or a GPU. `study claims --page FILE` writes one HTML
page with plots, a filter by document and finding, and the provenance of the records. The codes name these documents:

- S0: *ZeRO Optimization Strategies for Large-Scale Model Training*, Hugging Face community article, 2025
- S1: *DeepSpeed ZeRO-3 Architecture: Gradient Partitioning and Performance Optimizations*, web article
- S2: *ZeRO: Zero Redundancy Optimizer*, C. Magri, R. Quadras and S. Dubois, University of Guelph
- S3: [*DeepSpeed ZeRO Optimization Stages: A Comprehensive Analysis*](https://www.newmind.ai/journal/64), NewMind AI
- Z0: [*ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*](https://arxiv.org/abs/1910.02054)"""
_RULE = {
    "holds": "every part of the claim holds",
    "holds in part": "a part holds, another one is false or untested, and the claim does not rest on that one",
    "does not hold": 'a part that the claim rests on is false, such as its number, its comparison or its "all"; or a'
    " part is false, and no other was shown to hold",
    "contradicts itself": "its figures exclude each other under every reading tried",
    "undecided": "evidence is missing, disputed, inside noise or only from small models; or it depends on the reading",
}
_EVIDENCE = {
    "at scale": "counted or measured on the model and ranks of the claim, or independent of both; virtual ranks count"
    " for state and bytes",
    "published": "a figure that others measured at the claim's scale, with its address",
    "derived": "arithmetic or logic, with its assumptions",
    PROXY: "measured here with a tiny model or on fewer ranks; alone it neither supports nor refutes",
    "none": "no check could be judged",
}
_READING = """\
If two claims disagree, a check is `disputed`: one of them is wrong, and the check does not show which. Model state is
16 bytes per parameter, as in mixed-precision Adam, unless a check sets another precision."""
_PLAUSIBLE = {
    "impossible": "less memory than 16-bit weights and gradients alone need on one GPU, or more than the device has",
    "suspicious": "less memory than mixed-precision Adam needs: another optimizer or precision, or an error",
    "possible": "at least the memory of mixed-precision Adam",
}
_TABLES = """\
A row that trains only adapters needs memory for its frozen weights alone; the column `trains` marks it, with the bits
per weight. A figure is read with a tolerance: half a unit of its last digit, and GiB written as GB. The tables are in
`study/claims/tables`."""


def sections(scoreboard: Scoreboard, evidence: Evidence | None = None, links_from: str = "") -> Iterator[PageSection]:
    """Yield the sections of the page; with evidence also plots, records and provenance, for HTML.

    `links_from` is the folder that links to reports are relative to; without it there are no links.
    """
    yield PageSection(text="How several checks make one finding:", table=_table(_RULE.items(), "finding", "when"))
    yield PageSection(text="Kinds of evidence:", table=_table(_EVIDENCE.items(), "evidence", "is"))
    yield PageSection(text=_READING)
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
    ]  # fmt: skip
    yield PageSection("Corrections", table=_table(corrections, "date", "claim", "correction", "because"))
    about = (
        "`study claims check-table FILE` compares a table of models, GPUs, strategies and gigabytes with arithmetic:"
    )
    yield PageSection("Published tables", about, table=_table(_PLAUSIBLE.items(), "verdict", "the row states"))
    yield PageSection(text=_TABLES)
    for table in published_tables():
        rows = [
            (row.model, str(row.gpus), row.strategy, row.trains, row.stated_gb, item.plausibility, item.why)
            for item in table.rows for row in (item.row,)
        ]  # fmt: skip
        columns = ("model", "GPUs", "strategy", "trains", "on one GPU", "verdict", "why")
        yield PageSection(table.title, f"{table.address}. {table.note}", table=_table(rows, *columns), level=3)


def _table(rows: object, *columns: str) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns))  # type: ignore[call-overload]


def _claim(judged: JudgedClaim, scoreboard: Scoreboard, evidence: Evidence | None, links_from: str) -> PageSection:
    claim = judged.claim
    notes: list[str | Note] = [f"True if: {claim.holds_if} Refuted if: {claim.falls_if}"]
    notes += [f"Not testable here: {claim.untestable}"] * bool(claim.untestable)
    for check, result in zip(claim.checks, judged.results, strict=True):
        records = result.figure.records if result.figure else ()
        more = f" and {len(records) - 1} more" if len(records) > 1 else ""
        rests = f" Records: `{records[0]}`{more}." if records else ""
        below = _check_html(check, result, evidence.root, links_from) if evidence and result.figure else ""
        role = ", necessary" * check.necessary
        notes.append(Note(f"{check.basis}, {result.answer}{role}: {result.sentence}.{rests}", below))
    if claim.protocol:
        notes.append(f"Published protocol: {claim.protocol.published} Here: {claim.protocol.here}")
    notes += [f"Another explanation: {alternative}" for alternative in claim.alternatives]
    notes += [f"Contradicts {ids}: {why}" for ids, why in scoreboard.find_contradictions(claim.id)]
    if settle := claim.settle:
        notes.append(f"Next experiment: `{settle.command}`, about {settle.minutes:g} minutes on {settle.box}.")
    facts = provenance(judged, evidence) if evidence else []
    rows = Markup("").join(Markup("<dt>{}</dt><dd>{}</dd>").format(about, code_html(text)) for about, text in facts)
    return PageSection(
        claim.id, f"{claim.says} ({claim.place})", judged.finding.kind,
        f"{_rest(judged)}({', '.join(judged.finding.basis)}) {judged.sentence}", notes=notes, level=3,
        classes=f"claim {claim.document} {slug(judged.finding.kind)}", anchor=claim.id.lower(),
        below=Markup('<details><summary>Evidence</summary><dl class="evidence">{}</dl></details>').format(rows)
        if facts else "",
    )  # fmt: skip


def _rest(judged: JudgedClaim) -> str:
    """Return the parts that a finding names, as text that follows its first words."""
    rest = judged.finding.text.removeprefix(judged.finding.kind).lstrip(":; ")
    return f"{rest[:1].upper()}{rest[1:]} " if rest else ""


def _check_html(check: ClaimCheck, result: CheckResult, reports: Path, links_from: str) -> Markup:
    """Return the plot of a figure, its derivation, and links to its records."""
    figure = result.figure
    assert figure is not None
    html = strip(result, check.region)
    if form := derivation(check):
        value = number(figure.value, result.unit)
        html += Markup('<code class="derivation">{} = {}</code>').format(form, value)
    if records := figure.records:
        items = [Markup("<li>{}</li>").format(link_html(record, _address(record, reports, links_from)))
                 for record in records]  # fmt: skip
        fold = '<details><summary>{} record{}</summary><ul class="records">{}</ul></details>'
        html += Markup(fold).format(len(records), "s" * (len(records) > 1), Markup("").join(items))
    return html


def _address(record: str, reports: Path, links_from: str) -> str:
    """Return a relative link to the runs of a record's report, or to its file; empty if there is none."""
    report = record.split("/")[0]
    folder = reports / report
    files = (REPOSITORY / record, folder / "index.html", folder / KEYS_FILE)
    file = next((file for file in files if file.is_file()), None)
    if not links_from or file is None:
        return ""
    path = os.path.relpath(file.resolve(), (REPOSITORY / links_from).resolve())
    return f"{path}#runs" if file.name == "index.html" and report not in NOT_OF_RUNS else path


# In percent of a plot's width: margin on both sides; distance from an edge at which labels align to it; distance at
# which two labels would overlap.
_MARGIN, _EDGE, _APART = 12.0, 18.0, 26.0
# Largest ratio of values on a linear scale.
_LINEAR_UP_TO = 20.0
_STRIP = Markup(
    '<svg class="strip" role="img" aria-label="{alt}" width="100%" height="46">'
    '<rect class="region" x="{left}%" width="{width}%" y="18" height="12" fill="currentColor" fill-opacity=".16"/>'
    '<line class="axis" x1="0%" x2="100%" y1="24" y2="24" stroke="currentColor" stroke-opacity=".35"/>{interval}'
    '<circle class="point {answer}" cx="{point}%" cy="24" r="5" fill="currentColor"/>{labels}</svg>'
)
_INTERVAL = Markup(
    '<line class="interval {}" x1="{}%" x2="{}%" y1="24" y2="24" stroke="currentColor" stroke-width="4"/>'
)
_LABEL = Markup('<text x="{}%" y="{}" text-anchor="{}" font-size="11" fill="currentColor">{}</text>')


def strip(result: CheckResult, region: Region) -> Markup:
    """Return an SVG of a figure with its interval and the region that the claim allows; empty if it is not finite."""
    figure = result.figure
    assert figure is not None
    low, high = (figure.value if end is None else end for end in (figure.low, figure.high))
    if not all(map(math.isfinite, (figure.value, low, high))):
        return Markup("")
    edges = [edge for edge in (region.low, region.high) if math.isfinite(edge)]
    at = _scale([figure.value, low, high, *edges])
    left, right = (
        at(edge) if math.isfinite(edge) else side for edge, side in ((region.low, 0.0), (region.high, 100.0))
    )
    labels = [(at(figure.value), 12, number(figure.value, result.unit))]
    if len(edges) == 2 and right - left < _APART:
        labels.append(((left + right) / 2, 43, f"claimed: {region.words(result.unit)}"))
    else:
        labels += [(at(edge), 43, f"{'at least' if edge == region.low else 'at most'} {number(edge, result.unit)}")
                   for edge in edges]  # fmt: skip
    answer = slug(result.answer)
    return _STRIP.format(
        alt=f"{result.sentence}.", left=round(left, 2), width=round(max(right - left, 0.6), 2), answer=answer,
        interval=_INTERVAL.format(answer, round(at(low), 2), round(at(high), 2)) if low < high else "",
        point=round(at(figure.value), 2), labels=Markup("").join(_label(*label) for label in labels),
    )  # fmt: skip


def _label(place: float, y: int, text: str) -> Markup:
    side = "start" if place < _EDGE else "end" if place > 100 - _EDGE else "middle"
    return _LABEL.format({"start": 0, "end": 100, "middle": round(place, 2)}[side], y, side, text)


def _scale(values: list[float]) -> Callable[[float], float]:
    """Return a function that maps a value to its position, in percent of the width."""
    least, most = min(values), max(values)
    if least > 0 and most / least > _LINEAR_UP_TO:
        inner = _scale([math.log(least), math.log(most)])
        return lambda value: inner(math.log(value))
    if least == most:
        return lambda _value: 50.0
    return lambda value: _MARGIN + (100 - 2 * _MARGIN) * (value - least) / (most - least)


def page(claims: Scoreboard) -> str:
    """Return docs/claims.md as text."""
    rows = [
        [name, *(counts[kind] or "-" for kind in FINDINGS), counts.total()] for name, counts in claims.counts().items()
    ]
    scoreboard = _table(rows, "document", *FINDINGS, "claims")
    return page_markdown(_TITLE, [PageSection(text=_HEAD, table=scoreboard), *sections(claims)])


def write_page(file: Path, reports_dir: Path = REPORTS) -> None:
    """Write the HTML page of `study claims --page`; raise UserError rather than replace another file."""
    marker = "made from the ledger of claims and the committed records"
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"--page {file} is not a path for a file", "name a file in an existing folder")
    try:
        if file.exists() and marker not in file.read_text(encoding="utf-8"):
            raise UserError(f"--page {file} exists, but is not a page of claims", "name another file, or remove it")
    except (OSError, ValueError):
        raise UserError(f"--page {file} exists, but is not readable", "name another file, or remove it") from None
    evidence = Evidence(reports_dir)
    claims = build_scoreboard(reports_dir, evidence=evidence)
    inside = file.resolve().is_relative_to(REPOSITORY.resolve())
    links_from = os.path.relpath(file.resolve().parent, REPOSITORY.resolve()) if inside else ""
    titles = {item.code: item.title for item in claims.ledger.documents}
    chosen = [(code, kind) for code in ("", *titles) for kind in ("", *FINDINGS) if code or kind]
    text = page_html(
        "claims.html.j2", "claims", {file.stem: _TITLE}, file.stem, findings=FINDINGS, marker=marker,
        rows=[(name, titles.get(name, ""), counts, counts.total()) for name, counts in claims.counts().items()],
        rules=Markup("\n").join(_rule(*item) for item in chosen),
        filters=[(_anchor(*item), ", ".join(filter(None, item))) for item in chosen],
        sections=sections(claims, evidence, links_from),
    )  # fmt: skip
    partial = file.with_name(f".{file.name}.building")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"--page {file} is not writable ({error.strerror})", "name another file") from None


def _anchor(code: str, kind: str) -> str:
    return "-".join(filter(None, (code, slug(kind))))


def _rule(code: str, kind: str) -> Markup:
    """Return the CSS rule that hides claims outside a filter, so that the page needs no script."""
    classes = "".join(f".{part}" for part in (code, slug(kind)) if part)
    hidden = [f".claim:not({classes})", *([f".document:not(.{code})"] if code else [])]
    target = f"body:has(#only-{_anchor(code, kind)}:target)"
    return Markup(",".join(f"{target} {selector}" for selector in hidden) + "{display:none}")


def address(claim: str, folder: Path) -> str:
    """Return a link to a claim's entry, relative to a folder; empty outside this repository."""
    start = folder.resolve()
    is_inside = start.is_relative_to(REPOSITORY.resolve())
    return f"{os.path.relpath(PAGE.resolve(), start)}#{claim.lower()}" if is_inside else ""


def main() -> None:
    """Write docs/claims.md and the findings file, which installations that lack pandas print."""
    scoreboard = build_scoreboard()
    PAGE.write_text(page(scoreboard), encoding="utf-8")
    VERDICTS_FILE.write_text(json.dumps(scoreboard.document(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
