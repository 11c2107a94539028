"""The questions that a report answers, by subject, in the order of its pages.

A new question is a `Question` in the file of its subject, its name in `QUESTIONS`, its words in captions.yaml and, if
it has figures, a notebook named as its page.
"""

from __future__ import annotations

from collections.abc import Sequence

from study.records.frames import Records
from study.report.document import Answer, Question, Table
from study.report.facts import ClaimRow
from study.report.questions import fits, gpu_ranks, loss, memory, releases, runs, scaling, time, virtual
from study.virtual.summaries import setting_pairs

QUESTIONS: tuple[Question, ...] = (
    releases.QUESTION, loss.QUESTION, time.ADVICE, memory.MEMORY, time.TIME, memory.TRAFFIC,
    memory.OFFLOAD, scaling.RANKS, scaling.NODES, memory.NEIGHBOURS, scaling.BATCH_SIZE, scaling.MODEL_SIZE,
    time.PROFILE, fits.QUESTION, virtual.TUNING, virtual.LORA, virtual.TABLE1, virtual.SETTINGS, gpu_ranks.QUESTION,
    virtual.LAYERS, runs.REMAINING, runs.CLAIMS, runs.RUNS,
)  # fmt: skip
TABLES: dict[str, Table] = {name: table for question in QUESTIONS for name, table in question.tables.items()}


def answers(records: Records, claims: Sequence[ClaimRow] = (), suite: str = "") -> dict[Question, Answer]:
    """Return the questions that records, or claims on them, answer; first those in the suite's name, then settings.

    Memory comes before the others where model state is most of it.
    """
    answered = {runs.CLAIMS: runs.claims_answer(claims, suite)}
    questions = QUESTIONS
    if (about_releases := releases.QUESTION.answer(records)) is not None:
        # Each stack is a separate workload, too many for the other questions.
        answered[releases.QUESTION] = about_releases
        questions = (releases.QUESTION, runs.REMAINING, runs.CLAIMS, runs.RUNS)
    words, first = {*suite.split("_")}, virtual.SETTINGS if setting_pairs(records) else None
    if memory.find_mostly_state(records):
        first = memory.MEMORY
    ordered = sorted(questions, key=lambda item: (not {item.name, item.notebook} & words, item is not first))
    pairs = ((question, answered.get(question) or question.answer(records)) for question in ordered)
    return {question: answer for question, answer in pairs if answer is not None}
