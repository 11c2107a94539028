"""What a report answers: one file per question, in the order in which a reader meets them.

A new question is a file here with its `QUESTION`, its name in `QUESTIONS`, and a notebook that shows its tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from study.records.frames import Records
from study.report.questions import (
    advice,
    batch_size,
    claims,
    fits,
    layers,
    loss,
    memory,
    model_size,
    neighbours,
    nodes,
    offload,
    profile,
    ranks,
    releases,
    remaining,
    runs,
    settings,
    table1,
    time,
    traffic,
)
from study.report.questions.question import Answer, Question, Table

QUESTIONS: tuple[Question, ...] = (
    remaining.QUESTION,
    releases.QUESTION,
    loss.QUESTION,
    memory.QUESTION,
    time.QUESTION,
    traffic.QUESTION,
    offload.QUESTION,
    advice.QUESTION,
    ranks.QUESTION,
    nodes.QUESTION,
    neighbours.QUESTION,
    batch_size.QUESTION,
    model_size.QUESTION,
    profile.QUESTION,
    fits.QUESTION,
    table1.QUESTION,
    settings.QUESTION,
    layers.QUESTION,
    claims.QUESTION,
    runs.QUESTION,
)
# Of all questions, by name.
TABLES: dict[str, Table] = {name: table for question in QUESTIONS for name, table in question.tables.items()}


def answers(records: Records, resting: Sequence[claims.Resting] = ()) -> dict[Question, Answer]:
    """Of the questions that these records answer; which claims rest on them, the ledger says."""
    given = {claims.QUESTION: claims.answer(resting)}
    asked = QUESTIONS
    if (about_releases := releases.QUESTION.answer(records)) is not None:
        # Each stack is a workload of its own there: what else a report asks would be a heap.
        given[releases.QUESTION] = about_releases
        asked = (remaining.QUESTION, releases.QUESTION, claims.QUESTION, runs.QUESTION)
    found = ((question, given.get(question) or question.answer(records)) for question in asked)
    return {question: answer for question, answer in found if answer is not None}
