"""`study receipt`: print a receipt again, or compare two of them."""

from __future__ import annotations

import argparse
import json

from study.config.errors import UserError
from study.config.printing import print_page
from study.receipt.compare import comparison_page, confounded_by
from study.receipt.document import read_receipt
from study.receipt.page import all_lines, receipt_lines

EPILOG = """\
A receipt is made by two lines in any training script (docs/receipt.md). The exit status is 0; with --strict it is 1 if
a receipt names a fault, a failure or no measured step, and 3 if two receipts are not comparable.
"""
_FAULTY, _CONFOUNDED = 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a receipt.json or its folder; two of them are compared")
    add("--strict", action="store_true", help="exit with 1 if a receipt names a fault, with 3 if two are confounded")
    add("--details", action="store_true", help="print all lines, not one screen")
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")


def run(options: argparse.Namespace) -> int:
    """Print one receipt, or two next to each other; return the exit status."""
    if len(options.files) > 2:
        raise UserError(f"{len(options.files)} receipts are given", "give one to print it, or two to compare them")
    receipts = [read_receipt(name) for name in options.files]
    is_faulty = any(receipt.faults or receipt.failures or receipt.state != "complete" for receipt in receipts)
    confounds: list[str] = []
    if len(receipts) == 2:
        first, second = receipts
        confounds = confounded_by(first, second)
        page = list(comparison_page((options.files[0], options.files[1]), (first, second)))
        document: object = {"confounded_by": confounds, "receipts": [it.model_dump(mode="json") for it in receipts]}
    else:
        make = all_lines if options.details else receipt_lines
        page = list(make(receipts[0], options.files[0]))
        document = receipts[0].model_dump(mode="json")
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print_page(page)
    if not options.strict:
        return 0
    if is_faulty:
        return _FAULTY
    return _CONFOUNDED if confounds else 0
