"""`study claims`: the scoreboard and its page; `study claims check-table FILE`: a table compared with arithmetic."""

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
    actions = parser.add_subparsers(dest="action", metavar="check-table FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--details", action="store_true", help="print a line for each claim")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write every verdict with its plots as one HTML page")
    table = actions.add_parser(
        "check-table", help="is a published table of models, GPUs, strategies and GB possible?", allow_abbrev=False
    )
    table.add_argument(
        "file", type=Path, metavar="FILE", help="CSV or markdown: model, gpus, strategy, gb, device, trains"
    )
    # Without a default, which would undo a flag that stands before the action.
    table.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    if options.page and (options.action or options.json):
        raise UserError("--page goes with neither --json nor check-table", "leave one of them out")
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
                for each in checked:
                    row, training = each.row, f"{each.row.model} on {each.row.gpus} under {each.row.strategy}"
                    print(f"line {row.line}: {each.plausibility}: {training}: {each.why}")
        else:
            from study.claims.scoreboard import build_scoreboard

            made = build_scoreboard()
            if options.json:
                print(json.dumps(made.document(), indent=1))
            else:
                print_page(made.text(options.details))
    return 0


def dependent_claims(records: Records, report: str, output: Path) -> list[DependentClaim]:
    """Return the claims that rest on the records of a report at this place; none where the ledger is not readable."""
    with require_extra("report"):
        from study.claims.ledger import read_ledger
        from study.claims.page import address
        from study.claims.scoreboard import claims_of_report
        from study.report.questions.runs import DependentClaim
    try:
        found = claims_of_report(report, records, read_ledger())
    except UserError as error:
        print(f"notice: the report names no claims: {error.problem}", file=sys.stderr)
        return []
    rows = []
    for judged, findings in found:
        claim, more = judged.claim, f" And {len(findings) - 1} more." if len(findings) > 1 else ""
        sentence = f"{findings[0].sentence}.{more}"
        rows.append(DependentClaim(claim.id, address(claim.id, output), judged.verdict, claim.says, sentence))
    return rows
