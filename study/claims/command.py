"""`study claims`: the scoreboard; `study claims check-table FILE`: a published table against arithmetic."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from study.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="check-table FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    table = actions.add_parser(
        "check-table", help="is a published table of models, GPUs, strategies and GB possible?", allow_abbrev=False
    )
    table.add_argument("file", type=Path, metavar="FILE", help="CSV or markdown: model, gpus, strategy, gb, device")
    # Without a default, which would undo a flag that stands before the action.
    table.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    try:
        from study.claims.board import board
        from study.claims.published import check_table
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed here", "run: pip install -e '.[report]'") from None
    if options.action == "check-table":
        rows = check_table(options.file)
        if options.json:
            print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        else:
            for each in rows:
                row = each.row
                print(
                    f"line {row.line}: {each.plausibility}: {row.model} on {row.gpus} under {row.strategy}: {each.why}"
                )
        return 0
    made = board()
    print(json.dumps(made.document(), indent=1) if options.json else "\n".join(made.lines()))
    return 0
