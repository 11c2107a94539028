"""`python -m study.validation`: predictions against measurements, and beside other estimators."""

from __future__ import annotations

import argparse
import sys

from study.errors import RunFailed, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="fit|report")
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
    else:
        from study.validation import report

        report.write()
        print(report.FOLDER / "summary.md")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m study.validation", allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except (UserError, RunFailed) as refusal:
        print(refusal, file=sys.stderr)
        return 2
