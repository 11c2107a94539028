"""The form of `study claims --blind`: claims with their words and evidence, without findings, for a second reader."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from study.claims.ledger import Claim, ClaimCheck
from study.claims.scoreboard import JudgedClaim, Scoreboard
from study.claims.verdicts import CheckResult, number
from study.report.document import paragraphs

COLUMNS = ("claim", "finding", "reason", "objection")
_WIDTH = 120
_NOT_IN_WORDS = re.compile("[\"'`$\u2018\u2019\u201c\u201d]")


def draw(judged: Sequence[JudgedClaim], count: int, seed: int) -> list[JudgedClaim]:
    """Return claims in the order of the ledger; a larger draw of the same seed has those of a smaller one."""
    ranks = {item.claim.id: hashlib.sha256(f"{seed} {item.claim.id}".encode()).digest() for item in judged}
    chosen = sorted(ranks, key=lambda claim: ranks[claim])[:count]
    return [item for item in judged if item.claim.id in chosen]


def form_lines(scoreboard: Scoreboard, judged: Sequence[JudgedClaim], seed: int) -> Iterator[str]:
    """Yield the lines of the form: how to fill it in, the rules, the claims, and the table for the answers."""
    legend = scoreboard.ledger.legend
    total = len(scoreboard.judged)
    yield "# Which of these claims hold?"
    for text in paragraphs("claims_form.j2", chosen=len(judged), claims=total, seed=seed):
        yield from ("", *_wrapped(text))
    for title, key in (("Findings", "findings"), ("Evidence", "evidence"), ("Readings that count", "readings")):
        yield from ("", f"## {title}", "")
        for name, words in legend[key].items():
            yield from _item(f"{name}: {words}")
    yield from ("", "## From lines of evidence to a finding", "")
    for text in paragraphs("claims_rules.j2"):
        yield from _item(text)
    for item in judged:
        yield ""
        yield from _claim_lines(scoreboard, item)
    yield from ("", "## Answers", "", ",".join(COLUMNS))
    for item in judged:
        yield f"{item.claim.id}{',' * (len(COLUMNS) - 1)}"


def _claim_lines(scoreboard: Scoreboard, judged: JudgedClaim) -> Iterator[str]:
    claim = judged.claim
    (document,) = [item for item in scoreboard.ledger.documents if item.code == claim.document]
    yield f"## {claim.id}"
    yield ""
    yield from _wrapped(f"Document {document.code}: {document.title}. Its scale: {document.scale}.")
    if claim.quote:
        yield from _wrapped(f"The document ({claim.place}): “{claim.quote}”")
        yield from _wrapped(f"In this project's words: {claim.says}")
    else:
        yield from _wrapped(f"The document ({claim.place}), in this project's words: {claim.says}")
    if claim.not_judged:
        yield from _wrapped(f"Not judged here: {', '.join(f'“{words}”' for words in claim.not_judged)}")
    yield from _wrapped(f"True if: {claim.holds_if}")
    if claim.readings:
        yield from _wrapped(f"Readings that count: {'; or '.join(claim.readings)}.")
    for item in claim.rejected:
        yield from _wrapped(f"Reading that does not count (rule: {item.rule}): {item.reading}.")
    if claim.untestable:
        yield from _wrapped(f"A test of all of it is out of reach: {claim.untestable}")
    if claim.protocol:
        yield from _wrapped(f"How the document measured: {claim.protocol['published']}")
        yield from _wrapped(f"How this project measured: {claim.protocol['here']}")
    by_part: dict[str, list[CheckResult]] = {}
    for result in judged.results:
        by_part.setdefault(result.check.tests, []).append(result)
    if len(by_part) > 1 and not any(check.decides for check in claim.checks):
        yield from _wrapped("The claim rests on no part alone.")
    for place, (words, results) in enumerate(by_part.items()):
        yield from _part_lines(claim, chr(ord("A") + place), words, results, is_only=len(by_part) == 1)


def _part_lines(claim: Claim, letter: str, words: str, results: Sequence[CheckResult], is_only: bool) -> Iterator[str]:
    """Yield the name of a part, whether the claim rests on it, and its evidence by reading."""
    name = "the whole claim"
    if words:
        name = f"“{words}”" if is_quoted(words, claim.quote) else f"in this project's words, {words}"
    rests = is_only or any(result.check.decides for result in results)
    readings = list(dict.fromkeys(result.check.reading for result in results))
    yield ""
    yield from _wrapped(f"Part {letter}{', on which the claim rests' * rests}: {name}")
    places = iter(range(1, len(results) + 1))
    for reading in sorted(readings, key=bool):
        if reading:
            yield from _item(f"Read as: {reading}")
        elif len(readings) > 1:
            yield from _item("Under each reading:")
        for result in results:
            if result.check.reading == reading:
                yield from _item(f"{letter}{next(places)}. {_evidence_text(result)}", indent=2 * (len(readings) > 1))


def is_quoted(words: str, quote: str) -> bool:
    """Return whether the words are the document's, apart from quotation marks and gaps marked by an ellipsis."""
    plain, text = (_NOT_IN_WORDS.sub("", item) for item in (words, quote))
    return bool(text) and all(part in text for part in plain.split(" ... "))


def _evidence_text(result: CheckResult) -> str:
    """Return the kind of a line of evidence, its figure, its limit, its description and its source."""
    check, figure = result.check, result.figure
    if figure is None:
        return f"[no figure] {result.sentence}."
    kinds = [
        check.basis,
        "internal" * check.internal,
        "can refute, cannot support" * check.necessary,
        f"compared with {check.against}" * bool(check.against),
    ]
    kind = ", ".join(filter(None, kinds))
    text = f"{number(figure.value, check.unit)}{figure.spread}"
    if figure.n is not None and check.basis != "derived":
        text += f", n = {figure.n}"
    if result.p is not None:
        text += f", p after correction {result.p:.2g}"
    note = f" ({figure.note})" if figure.note else ""
    text = f"[{kind}] {text}; limit: {_limit_text(check)}. It is: {check.shows}{note}."
    if " " in figure.derivation:
        text += f" Arithmetic: {figure.derivation}."
    reports = Counter(record.split("/")[0] for record in figure.records if not record.startswith("accelerate_configs/"))
    for report, count in reports.items():
        text += f" Records: {count} in reports/{report}."
    return f"{text} Source: {check.source}." if check.source else text


def _limit_text(check: ClaimCheck) -> str:
    words = check.region.words(check.unit)
    if check.about is None or not check.within:
        return words
    return f"{number(check.about, check.unit)} within {100 * check.within:.3g} %, which is {words}"


def _item(text: str, indent: int = 0) -> list[str]:
    return _wrapped(text, f"{' ' * indent}- ", " " * (indent + 2))


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )
