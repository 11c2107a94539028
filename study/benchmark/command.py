"""`study benchmark`: scores of memory and time predictors on published rows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from study.benchmark.answers import COLUMNS, Predictor, predictors_not_run, read_answers, shipped_predictors
from study.benchmark.contributed import contributed_document, contributed_page, predict_contributed
from study.benchmark.questions import SPLITS, BenchmarkQuestion, public_until, read_questions, write_rows
from study.benchmark.scores import (
    FIGURES,
    GROUPS,
    Errors,
    Figure,
    PairedErrors,
    Score,
    answered_figure,
    compare_pairs,
    judge_fits,
    league_document,
    measured_figure,
    scores,
)
from study.config.errors import UserError
from study.config.printing import TextTable, print_page
from study.records.shares import share_text

EPILOG = f"""\
An answers file is CSV with the columns {", ".join(COLUMNS)}; id and one figure are enough. `fitted` is memory, time or
both in a row that fitted the predictor, and that row does not score. docs/benchmark.md has an example.
"""
_DEFAULT_NAME = "your answers"
_FIGURE_NAMES = {"memory": "peak memory", "time": "step time"}
_NOTES = (
    "measured: rows with that figure; answered: by this predictor; common: by all predictors of the group",
    "error: predicted over measured, less one; leans: its median with the sign; *: these rows chose its rules",
    "without `fits` a peak is compared with the memory of the GPU; a row without an answer is never right",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study benchmark` to its parser."""
    parser.add_argument("--rows", action="store_true", help="print the rows to predict as CSV")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows to a file")
    parser.add_argument(
        "--answers", type=Path, metavar="FILE", help="score a CSV file with another predictor's answers"
    )
    parser.add_argument("--name", help="name of that predictor in the tables")
    parser.add_argument(
        "--split", choices=SPLITS, help="only rows read before the last rule of study predict, or only later rows"
    )
    parser.add_argument("--by", choices=tuple(GROUPS), default="kind", help="column that groups the rows of the tables")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the rows, the league, or the scores of an answers file; return the exit status."""
    if options.name is not None and options.answers is None:
        raise UserError("--name names the predictor of an answers file", "add --answers FILE, or leave --name out")
    prints_rows = options.rows or options.output is not None
    if prints_rows and options.answers is not None:
        raise UserError("--answers scores, and --rows and --output write rows", "leave one of them out")
    everything = read_questions()
    questions = [question for question in everything if options.split in (None, question.split)]
    if prints_rows:
        _write_file(questions, options.output, options.json)
        return 0
    league = shipped_predictors(questions)
    submitted = None
    if options.answers is not None:
        name = options.name or _DEFAULT_NAME
        if name in (item.name for item in league):
            raise UserError(f"{name} is a predictor of the league", "choose another --name")
        submitted = Predictor(name, read_answers(options.answers, questions, everything))
    if options.json:
        pairs = compare_pairs(questions, submitted, league) if submitted else []
        predictors = [submitted, *league] if submitted else league
        document = league_document(questions, predictors, options.by, pairs)
        print(json.dumps(document | {"contributed": contributed_document(predict_contributed())}, indent=1))
    else:
        page = league_page(questions, league, submitted, options.by)
        print_page([*page, *contributed_page(predict_contributed())])
    return 0


def _write_file(questions: Sequence[BenchmarkQuestion], output: Path | None, as_json: bool) -> None:
    if output is None:
        _write(questions, sys.stdout, as_json)
        return
    with output.open("w", encoding="utf-8", newline="") as file:
        _write(questions, file, as_json)
    print(f"{len(questions)} rows in {output}; to score answers: study benchmark --answers FILE")


def _write(questions: Sequence[BenchmarkQuestion], file: TextIO, as_json: bool) -> None:
    if as_json:
        print(json.dumps([question.row() for question in questions], indent=1), file=file)
    else:
        write_rows(questions, file)


def league_page(
    questions: Sequence[BenchmarkQuestion], league: Sequence[Predictor], submitted: Predictor | None, by: str
) -> Iterator[str | TextTable]:
    """Yield the tables and their notes; submitted answers first, compared with each predictor."""
    counts = {split: sum(question.split == split for question in questions) for split in SPLITS}
    yield f"{len(questions)} rows: {', '.join(f'{count} {split}' for split, count in counts.items())}"
    if not questions:
        yield f"no row was read after {public_until()}, the day of the last rule of study predict"
        return
    yield ""
    predictors = list(league)
    if submitted is not None:
        predictors = [submitted, *league]
        yield from _submitted_part(questions, submitted, league)
    lines = scores(questions, predictors, by)
    for figure in FIGURES:
        if figure_lines := [line for line in lines if line.figure == figure]:
            yield scores_table(figure_lines, figure, by)
            yield ""
    yield fits_table(questions, predictors)
    yield ""
    yield from _NOTES
    for item in predictors:
        if item.about:
            yield f"{item.name}: {item.about}"
    for entry in predictors_not_run():
        yield f"{entry['name']} is not here: {entry['why']}"


def _submitted_part(
    questions: Sequence[BenchmarkQuestion], submitted: Predictor, league: Sequence[Predictor]
) -> Iterator[str | TextTable]:
    for figure in FIGURES:
        measured = [row for row in questions if measured_figure(row, figure) is not None]
        answered = sum(answered_figure(row, submitted, figure) is not None for row in measured)
        skipped = len(measured) - answered
        yield f"{submitted.name}, {_FIGURE_NAMES[figure]}: {answered} of {len(measured)} rows answered, {skipped} not"
    yield ""
    if pairs := compare_pairs(questions, submitted, league):
        yield _pairs_table(pairs)
        yield "(without the rows that fitted one of the two)"
        yield ""


def _pairs_table(pairs: Sequence[PairedErrors]) -> TextTable:
    columns = (
        "rows that both answer",
        "beside",
        "rows",
        "median",
        "worst",
        "its median",
        "its worst",
        "closer than it",
    )
    return TextTable(
        columns,
        [
            [
                _FIGURE_NAMES[pair.figure],
                pair.second,
                str(pair.first_errors.rows),
                percent(pair.first_errors.median),
                percent(pair.first_errors.worst),
                percent(pair.second_errors.median),
                percent(pair.second_errors.worst),
                f"{pair.closer} of {pair.first_errors.rows}",
            ]
            for pair in pairs
        ],
    )


def scores_table(lines: Sequence[Score], figure: Figure, by: str) -> TextTable:
    """Return the table of one figure."""
    columns = (f"{_FIGURE_NAMES[figure]}, {by}", "predictor", *SCORE_COLUMNS)
    return TextTable(columns, [[line.group, marked_name(line), *score_cells(line)] for line in lines])


SCORE_COLUMNS = ("measured", "answered", "median", "worst", "leans", "common", "median ", "worst ")


def marked_name(line: Score) -> str:
    """Return the predictor's name, with a star if the rows are not held out."""
    return line.predictor if line.held_out else f"{line.predictor}*"


def score_cells(line: Score) -> list[str]:
    """Return the cells of SCORE_COLUMNS."""
    answered = line.answered
    leans = "-" if answered.leans is None else f"{answered.leans:+.0%}"
    return [str(line.measured), *_cells(answered), leans, *_cells(line.common)]


def _cells(errors: Errors) -> list[str]:
    return [str(errors.rows), percent(errors.median), percent(errors.worst)]


def percent(fraction: float | None) -> str:
    """Return an error in percent; a dash for None."""
    return "-" if fraction is None else f"{fraction:.1%}"


def fits_table(questions: Sequence[BenchmarkQuestion], predictors: Sequence[Predictor]) -> TextTable:
    """Return the table of fits-or-not, of predictors with an answer."""
    rows = []
    for item in predictors:
        judged = judge_fits(questions, item)
        if judged.answered:
            called = share_text(judged.called, judged.ran_out)
            rows.append([item.name, str(judged.judged), str(judged.answered), str(judged.right), called])
    return TextTable(("fits or not", "measured", "answered", "right", "out of memory, called (95 %)"), rows)
