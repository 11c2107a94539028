"""`study claims`: the scoreboard and its page. `study claims check-table FILE`: a table compared with arithmetic."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from study.claims.verdicts import Verdict
from study.config.errors import UserError, require_extra
from study.config.places import install_command
from study.config.printing import TextTable, print_page

if TYPE_CHECKING:
    from study.records.frames import Records
    from study.report.questions.runs import DependentClaim

# The document of `study claims --json`, which `make claims` writes from the records.
VERDICTS = Path(__file__).with_name("verdicts.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study claims` to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="check-table FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--details", action="store_true", help="print a line for each claim")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write all verdicts with plots as one HTML page")
    table = actions.add_parser(
        "check-table",
        help="check whether a published table of models, GPUs, strategies and GB is possible",
        allow_abbrev=False,
    )
    table.add_argument(
        "file", type=Path, metavar="FILE", help="CSV or markdown: model, gpus, strategy, gb, device, trains"
    )
    # SUPPRESS: a default would override --json before the action.
    table.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print or write the result of `study claims`, and return the exit status."""
    if options.page and (options.action or options.json):
        raise UserError("--page cannot be combined with --json or check-table", "leave one of them out")
    with require_extra("report"):
        if options.page:
            from study.claims.page import write_page

            write_page(options.page)
            print(options.page)
        elif options.action == "check-table":
            from study.claims.published import check_table

            checked = check_table(options.file)
            if options.json:
                print(json.dumps([dataclasses.asdict(row) for row in checked], indent=1))
            else:
                for result in checked:
                    row, training = result.row, f"{result.row.model} on {result.row.gpus} under {result.row.strategy}"
                    print(f"line {row.line}: {result.plausibility}: {training}: {result.why}")
        else:
            document = _judged()
            if options.json:
                print(json.dumps(document, indent=1))
            else:
                print_page(scoreboard_text(document, options.details))
    return 0


def _judged() -> dict[str, Any]:
    """Return the scoreboard judged by the records; if pandas is missing, the one that `make claims` wrote."""
    try:
        from study.claims.scoreboard import build_scoreboard
    except ModuleNotFoundError as error:
        print(f"notice: verdicts of this release; {error.name} is not installed, so the records were not read."
              f" To judge them here: {install_command('report')}", file=sys.stderr)  # fmt: skip
        return dict(json.loads(VERDICTS.read_text(encoding="utf-8")))
    return build_scoreboard().document()


_LEGEND = (
    "S0 to S3: the replicated documents; Z0: the ZeRO paper",
    "partly: checks disagree, or some had no record or a smaller model; untestable: no record of ours could judge it",
)


def scoreboard_text(document: Mapping[str, Any], details: bool) -> list[str | TextTable]:
    """Return the total counts, a table per document, and with details one line per claim."""
    verdicts, total = get_args(Verdict), document["counts"]["all"]
    counts = [[name, *(str(count.get(verdict) or "-") for verdict in verdicts), str(sum(count.values()))]
              for name, count in document["counts"].items()]  # fmt: skip
    totals = ", ".join(f"{total[verdict]} {verdict}" for verdict in verdicts if total.get(verdict))
    claims = [[claim["id"], claim["verdict"], claim["sentence"]] for claim in document["claims"]]
    last = TextTable(["", "", ""], claims) if details else "--details prints each claim; docs/claims.md has all"
    head = f"{sum(total.values())} claims: {totals}"
    table = TextTable(["document", *verdicts, "claims"], counts)
    return [head, "", table, *_LEGEND, last]


def dependent_claims(records: Records, report: str, output: Path) -> list[DependentClaim]:
    """Return the claims that rest on a report's records, linked from `output`; none if the ledger is unreadable."""
    with require_extra("report"):
        from study.claims.ledger import read_ledger
        from study.claims.page import address
        from study.claims.scoreboard import claims_of_report
        from study.report.questions.runs import DependentClaim
    try:
        claims = claims_of_report(report, records, read_ledger())
    except UserError as error:
        print(f"notice: the report lists no claims: {error.problem}", file=sys.stderr)
        return []
    rows = []
    for judged, findings in claims:
        claim, more = judged.claim, f" And {len(findings) - 1} more." if len(findings) > 1 else ""
        sentence = f"{findings[0].sentence}.{more}"
        rows.append(DependentClaim(claim.id, address(claim.id, output), judged.verdict, claim.says, sentence))
    return rows
