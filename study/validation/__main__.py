"""`python -m study.validation fit|report`: predictions against measurements, and beside other estimators."""

from __future__ import annotations

import argparse
import sys

from study.errors import RunFailed, UserError, extra


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m study.validation", allow_abbrev=False)
    parser.add_argument(
        "action", choices=("fit", "report"), metavar="fit|report",
        help="fit the constants of study/predict/time.py anew; or write reports/prediction and the intervals",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        with extra("report"):
            _run(options.action)
    except (UserError, RunFailed) as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return 0


def _run(action: str) -> None:
    if action == "fit":
        from study.validation.fit import write as write_fit

        print(write_fit(), end="")
    else:
        from study.validation import report

        report.write()
        print(report.FOLDER / "summary.md")


raise SystemExit(main())
