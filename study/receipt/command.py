"""`study receipt`: print a receipt again, draw its memory timeline, compare two, or make a row of the benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from study.benchmark.contributed import FOLDER
from study.config.errors import UserError
from study.config.printing import TextTable, print_page
from study.host.folders import resolve_path
from study.receipt.changes import repeat_forecast, repeat_prediction
from study.receipt.compare import comparison_page, confounded_by
from study.receipt.contribution import check_rows, file_name, list_problems, make_row, row_text
from study.receipt.document import MemoryTimeline, ReceiptDocument, read_receipt
from study.receipt.drawing import draw_timeline
from study.receipt.page import all_lines, receipt_lines
from study.receipt.trace import trace_document

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
    add("--timeline", metavar="FILE", help="draw the memory of the watched step by part, as SVG")
    add("--trace", metavar="FILE", help="write the same as a trace for ui.perfetto.dev")
    add("--contribute", action="store_true", help="print the row that this receipt gives the open benchmark")
    add("--output", metavar="FILE", help="with --contribute: write the row to this file or folder")
    add("--check_rows", action="store_true", help="check files of such rows: schema, and whether they can be true")


def run(options: argparse.Namespace) -> int:
    """Print one receipt, two next to each other, or a row; return the exit status."""
    if options.output is not None and not options.contribute:
        raise UserError("--output is without --contribute", "add it")
    if options.check_rows:
        return _check_rows(options)
    if options.contribute:
        return _contribute(options)
    return _print(options)


def _print(options: argparse.Namespace) -> int:
    if len(options.files) > 2:
        raise UserError(f"{len(options.files)} receipts are given", "give one to print it, or two to compare them")
    receipts = [read_receipt(name) for name in options.files]
    written = list(_write_timeline(options, receipts))
    confounds = confounded_by(*receipts) if len(receipts) == 2 else []
    # A comparison has no changes.
    repeat = repeat_prediction if options.json or len(receipts) == 1 else repeat_forecast
    receipts = [repeat(receipt) for receipt in receipts]
    if options.json:
        print(json.dumps(_document(receipts, confounds), indent=2))
    else:
        print_page([*_page(options, receipts), *written])
    if not options.strict:
        return 0
    if any(receipt.faults or receipt.failures or receipt.state != "complete" for receipt in receipts):
        return _FAULTY
    return _CONFOUNDED if confounds else 0


def _document(receipts: list[ReceiptDocument], confounds: list[str]) -> object:
    documents = [receipt.model_dump(mode="json") for receipt in receipts]
    return documents[0] if len(documents) == 1 else {"confounded_by": confounds, "receipts": documents}


def _page(options: argparse.Namespace, receipts: list[ReceiptDocument]) -> list[str | TextTable]:
    if len(receipts) == 2:
        first, second = options.files
        return list(comparison_page((first, second), (receipts[0], receipts[1])))
    make = all_lines if options.details else receipt_lines
    return list(make(receipts[0], options.files[0]))


def _write_timeline(options: argparse.Namespace, receipts: list[ReceiptDocument]) -> Iterator[str]:
    """Write the files of the memory timeline, and yield a line for each."""
    if options.timeline is None and options.trace is None:
        return
    if len(receipts) != 1:
        raise UserError("a timeline is that of one receipt, and two are given", "give one")
    receipt, timeline = receipts[0], _timeline(options.files[0], receipts[0])
    if options.timeline is not None:
        resolve_path(options.timeline).write_text(draw_timeline(receipt, timeline), encoding="utf-8")
        yield f"{options.timeline}: memory of the watched step as a picture"
    if options.trace is not None:
        text = json.dumps(trace_document(receipt, timeline), allow_nan=False)
        resolve_path(options.trace).write_text(text, encoding="utf-8")
        yield f"{options.trace}: memory of the watched step as a trace; open it at https://ui.perfetto.dev"


def _timeline(name: str, receipt: ReceiptDocument) -> MemoryTimeline:
    if receipt.timeline is None:
        fix = "train for 11 steps or more with this release of zero-study"
        raise UserError(f"{name} has no memory timeline", fix)
    return receipt.timeline


def _contribute(options: argparse.Namespace) -> int:
    """Print the row of a receipt, and write it if that is asked and the row can be true."""
    if len(options.files) != 1:
        raise UserError(f"a row is that of one receipt, and {len(options.files)} are given", "give one")
    row = make_row(read_receipt(options.files[0]), options.files[0])
    problems = list_problems(row)
    notes = [f"this row cannot be true: {problem}" for problem in problems]
    print(row_text(row), end="")
    if not problems and options.output is None:
        notes = [f"nothing is written; with --output {FOLDER} it becomes {FOLDER}/{file_name(row)}"]
    elif not problems:
        path = resolve_path(options.output)
        path = path / file_name(row) if path.is_dir() else path
        path.write_text(row_text(row), encoding="utf-8")
        notes = [f"{path} is written; open a pull request with this file and ?template=receipt.md in its address"]
    if not options.json:
        print_page(notes)
    return _FAULTY if problems else 0


def _check_rows(options: argparse.Namespace) -> int:
    """Print the problems of each file of a row."""
    results = dict(check_rows(options.files))
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        print_page(f"{name}: {'; '.join(problems) or 'ok'}" for name, problems in results.items())
    return _FAULTY if any(results.values()) else 0
