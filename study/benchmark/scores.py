"""Scores of predictors by kind of row, on the rows that a predictor answers and on the rows that all answer."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from study.benchmark.answers import PredictedAnswer, Predictor
from study.benchmark.questions import BenchmarkQuestion

Figure = Literal["memory", "time"]
FIGURES: tuple[Figure, ...] = get_args(Figure)


def _code(question: BenchmarkQuestion) -> str:
    inputs = question.inputs
    is_fused = inputs["compiled"] or inputs["loss_kernel"] != "transformers"
    return f"{inputs['memory_kind']}, {'fused' if is_fused else 'eager'}"


# Groups of rows: `kind` includes the engine; `code` is the kind of memory, and whether kernels or the loss are fused.
GROUPS: dict[str, Callable[[BenchmarkQuestion], str]] = {
    "kind": lambda question: question.group,
    "source": lambda question: question.source,
    "code": _code,
    "memory_kind": lambda question: str(question.inputs["memory_kind"]),
    "gpu": lambda question: str(question.inputs["gpu"]),
    "precision": lambda question: str(question.inputs["precision"]),
    "checkpointing": lambda question: str(question.inputs["checkpointing"]).lower(),
}


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors over some rows: predicted over measured, less one."""

    rows: int
    median: float | None = None
    worst: float | None = None
    # The median with its sign.
    leans: float | None = None

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        """Summarize signed errors."""
        signed = list(errors)
        if not signed:
            return cls(0)
        sizes = [abs(error) for error in signed]
        return cls(len(signed), statistics.median(sizes), max(sizes), statistics.median(signed))


@dataclasses.dataclass(frozen=True)
class Fits:
    """Right and wrong answers to whether a row fits."""

    # Rows with a known end.
    judged: int
    answered: int
    # A row without an answer is never right.
    right: int
    # Rows that ran out of memory, and the number of them that the predictor called.
    ran_out: int
    called: int


@dataclasses.dataclass(frozen=True)
class Score:
    """A predictor's errors of one figure in one group of rows."""

    group: str
    figure: Figure
    predictor: str
    # Rows of the group with this figure.
    measured: int
    answered: Errors
    # On the rows that every predictor with an answer in this group answers.
    common: Errors
    # False: all of its rows here fitted a constant or chose a rule.
    held_out: bool


@dataclasses.dataclass(frozen=True)
class PairedErrors:
    """Errors of two predictors on the rows that both answer."""

    figure: Figure
    first: str
    second: str
    first_errors: Errors
    second_errors: Errors
    # Rows on which the first has the smaller error.
    closer: int


def measured_figure(question: BenchmarkQuestion, figure: Figure) -> float | None:
    """Return the measured peak or step time."""
    return question.peak_gib if figure == "memory" else question.step_s


def answered_figure(question: BenchmarkQuestion, predictor: Predictor, figure: Figure) -> float | None:
    """Return the predicted peak or step time."""
    answer = predictor.answers.get(question.id, PredictedAnswer())
    return answer.peak_gib if figure == "memory" else answer.step_s


def held_out_errors(
    questions: Iterable[BenchmarkQuestion], predictor: Predictor, figure: Figure
) -> tuple[dict[str, float], bool]:
    """Return errors by id, and whether they are held out.

    Rows that fitted the predictor are left out. If it has no other rows, they are returned as not held out.
    """
    errors, fitted = dict[str, float](), set[str]()
    for question in questions:
        measured = measured_figure(question, figure)
        predicted = answered_figure(question, predictor, figure)
        if measured is None or predicted is None:
            continue
        errors[question.id] = predicted / measured - 1
        if figure in predictor.answers[question.id].fitted:
            fitted.add(question.id)
    scored = {name: error for name, error in errors.items() if name not in fitted}
    return (scored, True) if scored or not errors else (errors, False)


def scores(questions: Sequence[BenchmarkQuestion], predictors: Sequence[Predictor], by: str = "kind") -> list[Score]:
    """Return the scores by figure and group, of every predictor that answers there."""
    return [
        line
        for figure in FIGURES
        for group, rows in group_rows(questions, by).items()
        for line in _scores_of_group(group, rows, predictors, figure)
    ]


def _scores_of_group(
    group: str, rows: Sequence[BenchmarkQuestion], predictors: Sequence[Predictor], figure: Figure
) -> list[Score]:
    measured = sum(measured_figure(row, figure) is not None for row in rows)
    by_name = {item.name: held_out_errors(rows, item, figure) for item in predictors}
    by_name = {name: result for name, result in by_name.items() if result[0]}
    if not by_name:
        return []
    common = set.intersection(*(set(errors) for errors, _ in by_name.values()))
    return [
        Score(
            group=group,
            figure=figure,
            predictor=name,
            measured=measured,
            answered=Errors.of(errors.values()),
            common=Errors.of(errors[key] for key in common),
            held_out=held_out,
        )
        for name, (errors, held_out) in by_name.items()
    ]


def group_rows(questions: Iterable[BenchmarkQuestion], by: str) -> dict[str, list[BenchmarkQuestion]]:
    """Return the rows by group, in alphabetical order."""
    groups: dict[str, list[BenchmarkQuestion]] = {}
    for question in questions:
        groups.setdefault(GROUPS[by](question), []).append(question)
    return dict(sorted(groups.items()))


def predicted_fit(question: BenchmarkQuestion, predictor: Predictor) -> bool | None:
    """Return whether a predictor expects a row to fit: by its answer, or by its peak and the memory of the GPU."""
    answer = predictor.answers.get(question.id, PredictedAnswer())
    if answer.fits is not None:
        return answer.fits
    return None if answer.peak_gib is None else answer.peak_gib <= question.gpu_memory_gib


def judge_fits(questions: Iterable[BenchmarkQuestion], predictor: Predictor) -> Fits:
    """Count a predictor's right and wrong answers to whether rows fit."""
    ends = [(row.fits, predicted_fit(row, predictor)) for row in questions if row.fits is not None]
    ran_out = [predicted for measured, predicted in ends if not measured]
    return Fits(
        judged=len(ends),
        answered=sum(predicted is not None for _, predicted in ends),
        right=sum(predicted is measured for measured, predicted in ends),
        ran_out=len(ran_out),
        called=sum(predicted is False for predicted in ran_out),
    )


def compare_pairs(
    questions: Sequence[BenchmarkQuestion], predictor: Predictor, league: Iterable[Predictor]
) -> list[PairedErrors]:
    """Compare a predictor with each of the league, on the rows that both answer and that fitted neither."""
    pairs = []
    for item in league:
        for figure in FIGURES:
            first, _ = held_out_errors(questions, predictor, figure)
            second, _ = held_out_errors(questions, item, figure)
            if common := sorted(first.keys() & second.keys()):
                pairs.append(
                    PairedErrors(
                        figure=figure,
                        first=predictor.name,
                        second=item.name,
                        first_errors=Errors.of(first[name] for name in common),
                        second_errors=Errors.of(second[name] for name in common),
                        closer=sum(abs(first[name]) < abs(second[name]) for name in common),
                    )
                )
    return pairs


def league_document(
    questions: Sequence[BenchmarkQuestion], predictors: Sequence[Predictor], by: str, pairs: Iterable[PairedErrors]
) -> dict[str, Any]:
    """Return the scores as one JSON document."""
    return {
        "rows": len(questions),
        "scores": [dataclasses.asdict(line) for line in scores(questions, predictors, by)],
        "fits": {item.name: dataclasses.asdict(judge_fits(questions, item)) for item in predictors},
        "pairs": [dataclasses.asdict(line) for line in pairs],
    }
