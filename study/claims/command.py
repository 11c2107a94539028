"""`study claims`: the scoreboard and its claims; with check-table, a table compared with arithmetic."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from study.claims.verdicts import Basis
from study.config.errors import UserError, did_you_mean, require_extra
from study.config.places import REPOSITORY, install_command
from study.config.printing import TextTable, print_page
from study.predictor.hardware import parse_int

if TYPE_CHECKING:
    from study.records.frames import Records
    from study.report.facts import ClaimRow

# The document of `study claims --json`, which `make claims` writes from the records.
VERDICTS = Path(__file__).with_name("verdicts.json")
_CHECK_TABLE = "check-table"
# Exit status if no claim has the words, as that of `study why` for a message that it does not have.
NOT_FOUND = 3
# A name that is meant as a document or a claim.
_CODE = re.compile(r"[sz]\d(-\w*)?", re.IGNORECASE)
_SAME_NAME = 0.8
_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study claims` to its parser."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="DOCUMENT | CLAIM | WORD | check-table FILE",
        help="print the claims of a document (S1) or one claim (S1-03); or list those with words in their title,"
        " text or source; or check whether a published table of models, GPUs, strategies and GB is possible (CSV"
        " or markdown: model, gpus, strategy, gb, device, trains)",
    )
    for flag, kinds, says in (
        ("--finding", _PLURAL, "print the claims with this finding"),
        ("--evidence", get_args(Basis), "print the claims whose strongest evidence is of this kind"),
    ):
        quoted = ", ".join(map(repr, kinds))
        kind = functools.partial(_kind, tuple(kinds))
        parser.add_argument(flag, type=kind, metavar="KIND", help=f"{says}: {quoted}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--details", action="store_true", help="print every claim with its finding and its figure")
    parser.add_argument(
        "--before_records",
        action="store_true",
        help="count the checks that were in the ledger before the records that they judge; it needs git's history",
    )
    parser.add_argument(
        "--blind",
        type=parse_int,
        metavar="N",
        help="print N claims with their words and evidence, without findings, as a form for a second reader",
    )
    parser.add_argument("--seed", type=parse_int, default=1, metavar="S", help="draw other claims for --blind")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="compare the answers of such forms with the findings: agreement, kappa and differences",
    )


def _kind(kinds: Sequence[str], text: str) -> str:
    """Return the kind with this name, as an argparse type; dashes and case do not matter."""
    plain = re.sub(r"[\W_]", "", text).lower()
    for kind in kinds:
        if plain == re.sub(r"[\W_]", "", kind):
            return kind
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is none of {', '.join(map(repr, kinds))}")


def run(options: argparse.Namespace) -> int:
    """Print or write the result of `study claims`, and return the exit status."""
    names: list[str] = options.what
    if options.blind is not None or options.compare:
        with require_extra("report"):
            _read_blind(options, names)
        return 0
    if (options.finding or options.evidence) and (options.before_records or _CHECK_TABLE in names):
        raise UserError("--finding and --evidence choose claims to print", "leave them out")
    if options.before_records and (options.json or _CHECK_TABLE in names):
        raise UserError(f"--before_records cannot be combined with --json or {_CHECK_TABLE}", "leave one of them out")
    with require_extra("report"):
        if options.before_records:
            _print_preregistration(names)
        elif _CHECK_TABLE in names:
            if len(names) != 2 or names[0] != _CHECK_TABLE:
                raise UserError(f"{_CHECK_TABLE} takes one file", f"write: study claims {_CHECK_TABLE} FILE")
            _print_table(Path(names[1]), options.json)
        else:
            return _print_claims(options, names)
    return 0


def _print_claims(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Print the scoreboard, or the chosen claims; return NOT_FOUND if no claim has the words among the names."""
    document = _judged(names)
    words = _words(document, names)
    document["claims"] = _filtered(_select(document, names), options)
    if options.json:
        print(json.dumps(document, indent=1))
    elif words and not options.details:
        print_page(_found_lines(document, words))
    else:
        documents = [name.upper() for name in names if name.upper() in document["findings"]]
        head = [f"{first_line(document, name)}\n" for name in documents] if names else scoreboard_text(document)
        is_filtered = options.finding is not None or options.evidence is not None
        if is_filtered:
            head = [f"{_filter_line(document, options)}\n"]
        print_page([*head, *(claim_lines(document) if names or options.details or is_filtered else [_MORE])])
    return NOT_FOUND if words and not document["claims"] else 0


def _print_preregistration(names: Sequence[str]) -> None:
    """Print how many checks of these documents or claims are older than their records."""
    from study.claims.evidence import Evidence
    from study.claims.preregistration import preregistration_text
    from study.claims.scoreboard import REPORTS, build_scoreboard

    evidence = Evidence(REPORTS)
    scoreboard = build_scoreboard(evidence=evidence)
    chosen = {claim["id"] for claim in _select(scoreboard.document(), names)}
    print_page(preregistration_text([item for item in scoreboard.judged if item.claim.id in chosen], evidence))


def _read_blind(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Print the form for a second reader, or compare its answers to the findings."""
    from study.claims.agreement import compare
    from study.claims.agreement_page import comparison_text
    from study.claims.blind import draw, form_lines
    from study.claims.scoreboard import build_scoreboard

    excluded = [options.finding, options.evidence, options.before_records, options.details, _CHECK_TABLE in names]
    if (
        any(excluded)
        or (options.blind is not None and (options.compare or options.json))
        or (options.compare and names)
    ):
        raise UserError(
            "--blind takes only documents, claims and --seed, and --compare only --json", "leave the rest out"
        )
    scoreboard = build_scoreboard()
    document = scoreboard.document()
    if options.compare:
        comparison = compare(options.compare, document["claims"])
        if options.json:
            print(json.dumps(comparison.document(), indent=1))
        else:
            print_page(comparison_text(comparison))
        return
    claims = {claim["id"] for claim in _select(document, names)}
    if not 1 <= options.blind <= len(claims):
        raise UserError(f"--blind {options.blind}: there are {len(claims)} claims", f"take 1 to {len(claims)}")
    chosen = draw([item for item in scoreboard.judged if item.claim.id in claims], options.blind, options.seed)
    print("\n".join(form_lines(scoreboard, chosen, options.seed)))


def _print_table(file: Path, as_json: bool) -> None:
    from study.claims.published import Plausibility, check_table

    checked = check_table(file)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in checked], indent=1))
        return
    counts = Counter(result.plausibility for result in checked)
    counted = ", ".join(f"{counts[kind]} {kind}" for kind in get_args(Plausibility) if counts[kind])
    print(f"{counted} of {len(checked)} rows")
    for result in checked:
        row, training = result.row, f"{result.row.model} on {result.row.gpus} under {result.row.strategy}"
        print(f"line {row.line}: {result.plausibility}: {training}: {result.why}")


def records_digest(reports: Path = REPOSITORY / "reports") -> str:
    """Return the SHA-256 of the ledger and of the records that judge its claims."""
    digest = hashlib.sha256()
    records = sorted([*reports.glob("*/*.parquet"), *reports.glob("*/keys.json")])
    for file in (Path(__file__).with_name("ledger.yaml"), *records):
        digest.update(f"{file.parent.name}/{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def _judged(names: Sequence[str]) -> dict[str, Any]:
    """Return the scoreboard judged by the records: the one that `make claims` wrote if they are those of it, or if
    pandas is missing."""
    document = dict(json.loads(VERDICTS.read_text(encoding="utf-8")))
    if document.pop("records_sha256") == records_digest():
        return document
    try:
        from study.claims.scoreboard import build_scoreboard
    except ModuleNotFoundError as error:
        _select(document, names)  # A wrong name ends the command before the notice.
        print(
            f"notice: findings of this release; {error.name} is not installed, so the records were not read."
            f" To judge them here: {install_command('report')}",
            file=sys.stderr,
        )
        return document
    return build_scoreboard().document()


def _select(document: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the claims of these documents or with these ids, all without any, that have every word of the names.

    Raise UserError with the nearest name for one that looks like a document, a claim or check-table.
    """
    claims = document["claims"]
    names_of_ledger = [*document["findings"], *(claim["id"] for claim in claims)]
    words = _words(document, names)
    for name in words:
        if _CODE.fullmatch(name) or did_you_mean(name, [_CHECK_TABLE], _SAME_NAME):
            likely = [entry for entry in names_of_ledger if ("-" in entry) == ("-" in name)]
            guess = did_you_mean(name, [_CHECK_TABLE]) or did_you_mean(name.upper(), likely, 0.5)
            fix = f"{guess}documents: {', '.join(list(document['findings'])[:-1])}"
            raise UserError(f"{name!r} is neither a document nor a claim", f"{fix}; claims: study claims --details")
    chosen = {name.upper() for name in names if name not in words}
    return [
        claim
        for claim in claims
        if (not chosen or chosen & {claim["id"], claim["document"]})
        and all(word.lower() in _searched_text(document, claim) for word in words)
    ]


def _words(document: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the names that are neither a document nor a claim."""
    names_of_ledger = {*document["findings"], *(claim["id"] for claim in document["claims"])} - {"all"}
    return [name for name in names if name.upper() not in names_of_ledger]


def _searched_text(document: Mapping[str, Any], claim: Mapping[str, Any]) -> str:
    """Return the title, the text and the sources of a claim, in small letters."""
    code = claim["document"]
    texts = [document["documents"][code], document["sources"][code], claim["id"]]
    texts += [claim[key] for key in ("place", "says", "quote", "finding_text", "sentence", "evidence_in")]
    texts += [check[key] for check in claim["checks"] for key in ("sentence", "source")]
    return "\n".join(texts).lower()


def _found_lines(document: Mapping[str, Any], words: Sequence[str]) -> list[str | TextTable]:
    """Return a row for each claim that has the words: id, finding and text."""
    claims, quoted = document["claims"], " and ".join(map(repr, words))
    if not claims:
        return [f"no claim has {quoted} in its title, text or source; study claims --details prints all of them"]
    verb = "has" if len(claims) == 1 else "have"
    first = f"{len(claims)} claim{'s'[: len(claims) != 1]} {verb} {quoted}; study claims {claims[0]['id']} prints one"
    return [first, TextTable(("", "", ""), [(claim["id"], claim["finding"], claim["says"]) for claim in claims])]


def _filtered(claims: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the claims with the finding and the strongest evidence of the flags, as the scoreboard counts them."""
    return [
        claim
        for claim in claims
        if options.finding in (None, claim["finding"]) and options.evidence in (None, _strongest(claim))
    ]


def _strongest(claim: Mapping[str, Any]) -> str:
    evidence: list[str] = claim["evidence"]
    return evidence[0] if evidence else "none"


def _filter_line(document: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return how many claims the flags leave, and the flags."""
    count, total = len(document["claims"]), sum(document["findings"]["all"].values())
    kinds = {"finding": options.finding, "strongest evidence": options.evidence}
    filters = ", ".join(f"{what}: {kind}" for what, kind in kinds.items() if kind)
    return f"{count} of {total} claims ({filters})"


_PLURAL = {
    "holds": "hold",
    "holds in part": "hold in part",
    "does not hold": "do not hold",
    "contradicts itself": "contradict themselves",
    "undecided": "are undecided",
}
_MORE = (
    "study claims S1 prints the claims of one document, study claims --details those of all; "
    "docs/claims.md has every check"
)


def first_line(document: Mapping[str, Any], of: str = "all") -> str:
    """Return the number of claims by finding, of all documents or of one."""
    total = document["findings"][of]
    counts = [
        f"{total[kind]} {plural if total[kind] > 1 else kind}" for kind, plural in _PLURAL.items() if kind in total
    ]
    return f"{f'{of}: ' * (of != 'all')}{sum(total.values())} claims: {', '.join(counts)}"


def scoreboard_text(document: Mapping[str, Any]) -> list[str | TextTable]:
    """Return the counts by finding and evidence, and by document."""
    total, basis = document["findings"]["all"], get_args(Basis)
    crossed = [
        [kind, *(str(document["evidence"][kind].get(name, "-")) for name in basis), str(total.get(kind, "-"))]
        for kind in _PLURAL
    ]
    rows = [
        [name, *(str(count.get(kind, "-")) for kind in _PLURAL), str(sum(count.values()))]
        for name, count in document["findings"].items()
    ]
    return [
        first_line(document),
        "",
        TextTable(["strongest evidence", *basis, "claims"], crossed),
        TextTable(["document", *_PLURAL, "claims"], rows),
        "S0 to S3: the replicated documents; Z0: the ZeRO paper.",
        "In part: a part holds; another, on which the claim does"
        " not rest, is false, untested or depends on the reading.",
        "at scale: the claim's model on virtual CPU ranks, some extrapolated over layers; published: others' GPU"
        " measurements;\nderived: arithmetic; small-scale proxy: tiny models on CPU ranks, which alone decide nothing.",
    ]


def claim_lines(document: Mapping[str, Any]) -> list[str]:
    """Return a line each for a claim's document, its sentence, the finding, the deciding figure and the evidence."""
    lines = []
    for claim in document["claims"]:
        lines += [
            f"{claim['id']}  {document['documents'][claim['document']]}",
            f"  Claim:    {claim['says']}",
            f"  Finding:  {claim['finding_text']} ({', '.join(claim['evidence'])})",
            f"  Figure:   {claim['sentence']}",
            f"  Evidence: {claim['evidence_in']}; every check: docs/claims.md#{claim['id'].lower()}",
        ]
    return [textwrap.fill(line, _WIDTH, subsequent_indent=" " * 12, break_on_hyphens=False) for line in lines]


def dependent_claims(records: Records, report: str, output: Path) -> list[ClaimRow]:
    """Return a table row for each claim that rests on a report's records, linked from `output`."""
    with require_extra("report"):
        from study.claims.evidence import Evidence
        from study.claims.ledger import committed_ledger
        from study.claims.page import address
        from study.claims.scoreboard import REPORTS, judge
        from study.claims.verdicts import PROXY
        from study.report.document import Link
        from study.report.facts import ClaimRow
    rows: list[ClaimRow] = []
    evidence = Evidence(REPORTS).with_records(report, records)
    for claim in committed_ledger().claims:
        if not any(check.numbers.get("report") == report for check in claim.checks):
            continue
        judged = judge(claim, evidence)
        if not (results := [result for result in judged.results if report in result.reports]):
            continue
        shown = judged.lead(results) or results[0]
        is_undecided = judged.finding.kind == "undecided"
        is_met = is_undecided and shown.check.necessary and shown.answer == "holds"
        finding = "undecided (a necessary condition holds)" if is_met else judged.finding.short
        notes = frozenset({"necessary"}) if is_met else judged.finding.footnotes
        # A proxy decides nothing, nor does a check without an answer.
        decides = any(item.check.basis != PROXY and item.answer in ("holds", "fails") for item in results)
        elsewhere = "" if decides or is_undecided else ", by other evidence"
        text = f"{shown.sentence}." + (f" And {len(results) - 1} more." if len(results) > 1 else "")
        if judged.leading and judged.leading.answer != shown.answer:
            text += f" The claim rests on another check: {judged.sentence}"
        cells = {
            "Claim": Link(claim.id, address(claim.id, output)),
            "Finding": f"{finding}{elsewhere}",
            "It says": claim.says,
            "These records": text,
        }
        is_decided = decides and not is_undecided
        rows.append(ClaimRow(cells, judged.finding.kind, f"{finding}{elsewhere}", is_decided, notes))
    return rows
