"""`python -m study.validation`: predictions against measurements, and beside other estimators."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from study.errors import RunFailed, UserError

if TYPE_CHECKING:
    import pandas as pd


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="score|own|league|fit|report")
    actions.add_parser("score", help="errors of memory and time, by source and strategy", allow_abbrev=False)
    actions.add_parser("own", help="state, traffic and peaks of this project's records", allow_abbrev=False)
    actions.add_parser("league", help="the same rows given to other estimators of memory", allow_abbrev=False)
    actions.add_parser("fit", help="fit the constants of study/predict/time.py anew", allow_abbrev=False)
    actions.add_parser("report", help="write reports/prediction and the intervals", allow_abbrev=False)


def run(options: argparse.Namespace) -> int:
    try:
        return _run(options.action)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed", "python -m pip install -e '.[report]'") from None


def _run(action: str) -> int:
    if action == "fit":
        from study.validation.fit import write as write_fit

        print(write_fit(), end="")
        return 0
    from study.validation import report, tables

    if action == "report":
        report.write()
        print(report.FOLDER / "summary.md")
        return 0
    if action == "own":
        from study.validation.own import own_rows, table

        _show(table())
        _show(tables.by(report.scores_frame(own_rows()), "strategy"))
        return 0
    if action == "league":
        frame = report.league_frame(report.all_rows())
        _show(tables.league_table(frame))
        return 0
    scores = report.scores_frame(report.all_rows())
    for table in (
        tables.headline(scores),
        tables.fits(scores),
        tables.by(scores, "source"),
        tables.by(scores, "strategy"),
    ):
        _show(table)
    return 0


def _show(table: pd.DataFrame) -> None:
    print(table.to_string(index=False), end="\n\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m study.validation", allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except (UserError, RunFailed) as refusal:
        print(refusal, file=sys.stderr)
        return 2
