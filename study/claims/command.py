"""`study claims`: the scoreboard and its page. `study claims check-table FILE`: a table compared with arithmetic."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from study.config.errors import UserError, require_extra
from study.config.printing import print_page

if TYPE_CHECKING:
    from study.records.frames import Records
    from study.report.questions.runs import DependentClaim


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
            from study.claims.scoreboard import build_scoreboard

            scoreboard = build_scoreboard()
            if options.json:
                print(json.dumps(scoreboard.document(), indent=1))
            else:
                print_page(scoreboard.text(options.details))
    return 0


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
