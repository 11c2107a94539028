"""Answers of predictors to the rows of the benchmark: read from CSV and checked, or this predictor's own."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study.benchmark.questions import FILE, BenchmarkQuestion
from study.config.errors import UserError, clip, did_you_mean, first_line
from study.config.yaml_sections import load_package_yaml
from study.predictor.validation import score

OURS = "study predict"
FOLDER = Path(__file__).with_name("answers")
_FIGURES = ("peak_gib", "step_s", "tokens_per_s_per_gpu", "fits")
COLUMNS = ("id", *_FIGURES, "fitted", "note")
# With 1.0 and 0.0, which pandas writes for a column with gaps.
_YES, _NO = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
# Words in the column `fitted`, with the figures for which that row fitted a constant or chose a rule.
_FITTED = {
    "": (),
    **dict.fromkeys(_NO, ()),
    **dict.fromkeys((*_YES, "both"), ("memory", "time")),
    "memory": ("memory",),
    "time": ("time",),
}
_HOW = "study benchmark --rows prints the rows with their ids"


@dataclasses.dataclass(frozen=True)
class PredictedAnswer:
    """A predictor's answer to one row; None: no answer."""

    peak_gib: float | None = None
    step_s: float | None = None
    fits: bool | None = None
    # Figures by which it was fitted on this row: these are not held out.
    fitted: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A predictor by name, with its answers by the id of a row."""

    name: str
    answers: Mapping[str, PredictedAnswer]
    # Release and inputs, for a line below the tables.
    about: str = ""


def study_predictor(questions: Iterable[BenchmarkQuestion]) -> Predictor:
    """Return the current answers of `study predict`, with all inputs of a published row."""
    answers = {}
    for question in questions:
        figures = score(question.measurement)
        answers[question.id] = PredictedAnswer(
            peak_gib=figures["predicted_peak_gib"],
            step_s=figures["predicted_step_s"],
            fits=figures["predicted_fits"],
            fitted=question.fitted,
        )
    return Predictor(OURS, answers)


def shipped_predictors(questions: Sequence[BenchmarkQuestion]) -> list[Predictor]:
    """Return this project's predictor, then those of benchmark.yaml with the answers that they gave."""
    entries = load_package_yaml(FILE.read_text(encoding="utf-8"))["predictors"]
    ids = {question.id for question in questions}
    predictors = [study_predictor(questions)]
    for entry in entries:
        text = (FOLDER / entry["file"]).read_text(encoding="utf-8")
        answers = parse_answers(text, entry["file"], questions, ids=None)
        chosen = {name: answer for name, answer in answers.items() if name in ids}
        predictors.append(Predictor(entry["name"], chosen, f"{entry['version']}; {entry['inputs']}"))
    return predictors


def predictors_not_run() -> list[dict[str, str]]:
    """Return the predictors without answers, with the reason of each."""
    return list(load_package_yaml(FILE.read_text(encoding="utf-8"))["not_run"])


def read_answers(
    file: Path, questions: Sequence[BenchmarkQuestion], everything: Sequence[BenchmarkQuestion]
) -> dict[str, PredictedAnswer]:
    """Return a file's answers to these questions of everything; UserError, with its line, if it cannot be scored."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not text in UTF-8", f"write CSV with the columns {', '.join(COLUMNS)}") from None
    answers = parse_answers(text, str(file), everything, {question.id for question in everything})
    ids = {question.id for question in questions}
    chosen = {name: answer for name, answer in answers.items() if name in ids}
    if not any(_has_answer(answer) for answer in chosen.values()):
        where = " of this split" if any(map(_has_answer, answers.values())) else ""
        raise UserError(f"{file} answers no row{where}", f"fill peak_gib, step_s or fits; {_HOW}")
    return chosen


def _has_answer(answer: PredictedAnswer) -> bool:
    return answer.peak_gib is not None or answer.step_s is not None or answer.fits is not None


def parse_answers(
    text: str, name: str, questions: Sequence[BenchmarkQuestion], ids: set[str] | None
) -> dict[str, PredictedAnswer]:
    """Return the answers of a CSV text by id; UserError for an unknown id, unless `ids` is None."""
    tokens = {question.id: question.tokens_per_step for question in questions}
    answers: dict[str, PredictedAnswer] = {}
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        _check_columns(reader.fieldnames or [], name)
        for row in reader:
            where = f"{name}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where} has not as many fields as the header", "quote a field that has a comma")
            key = row["id"].strip()
            if ids is not None and key not in ids:
                raise UserError(f"{where}: no row has the id {clip(key)}", f"{did_you_mean(key, ids)}{_HOW}")
            if key in answers:
                raise UserError(f"{where}: {clip(key)} is answered twice", "leave one of the two lines")
            answers[key] = _answer(row, where, tokens.get(key))
    except csv.Error as error:
        raise UserError(f"{name}, line {reader.line_num} is no CSV ({first_line(error)})", _HOW) from None
    return answers


def _check_columns(columns: Sequence[str], name: str) -> None:
    if unknown := [column for column in columns if column not in COLUMNS]:
        guess = did_you_mean(unknown[0], COLUMNS)
        raise UserError(f"{name} has the column {clip(unknown[0])}", f"{guess}columns: {', '.join(COLUMNS)}")
    if twice := {column for column in columns if columns.count(column) > 1}:
        raise UserError(f"{name} has the column {clip(min(twice))} twice", "leave one of them")
    if "id" not in columns or not set(columns) & set(_FIGURES):
        fix = f"its first line is id and one or more of {', '.join(_FIGURES)}"
        raise UserError(f"{name} has no column of ids or none of figures", fix)


def _answer(row: Mapping[str, Any], where: str, tokens: int | None) -> PredictedAnswer:
    peak, step, rate = (_number(row, name, where) for name in _FIGURES[:3])
    if step is not None and rate is not None:
        raise UserError(f"{where} has step_s and tokens_per_s_per_gpu", "leave one of them empty")
    if rate is not None and tokens is not None:
        step = tokens / rate
    fits = _word(row, "fits", where, {"": None, **dict.fromkeys(_YES, True), **dict.fromkeys(_NO, False)})
    return PredictedAnswer(peak, step, fits, _word(row, "fitted", where, _FITTED))


def _number(row: Mapping[str, Any], column: str, where: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise UserError(f"{where}: {column} is {clip(text)}", "write a number above 0, or nothing")
    return number


def _word(row: Mapping[str, Any], column: str, where: str, words: Mapping[str, Any]) -> Any:
    text = (row.get(column) or "").strip().lower()
    if text not in words:
        raise UserError(
            f"{where}: {column} is {clip(text)}", f"write one of {', '.join(filter(None, words))}, or nothing"
        )
    return words[text]
