"""How much of a suite that is made of slices is measured, and what is left of it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from study.records.frames import Records, Remaining
from study.report.questions.question import Answer, Question
from study.sweep.progress import show_duration


def answer(records: Records) -> Answer | None:
    slices = records.remaining
    if not slices:
        return None
    planned, left = sum(each.planned for each in slices), sum(len(each.left) for each in slices)
    time = show_duration(sum(each.seconds for each in slices))
    if not left:
        sentence = f"All of it is measured: {planned} cells and searches."
    elif not any(each.ok + each.other for each in slices):
        sentence = f"None of it is measured yet: {planned} cells and searches remain, about {time}."
    else:
        sentence = f"{planned - left} of {planned} cells and searches are measured; {left} remain, about {time}."
    rows = []
    for suite in dict.fromkeys(each.suite for each in slices):
        rows.append(_row(suite, [each for each in slices if each.suite == suite]))
    return Answer(sentence, pd.DataFrame(rows), ("Times are by earlier records and the suites' arithmetic.",))


def _row(suite: str, slices: Sequence[Remaining], of_it: str = "") -> dict[str, object]:
    """Runs may be more than were planned: a search is one thing to do, and each of its probes a run."""
    left = sum(len(each.left) for each in slices)
    return {
        "Suite": suite,
        **({"Of it": of_it} if of_it else {}),
        "Planned": sum(each.planned for each in slices),
        "Runs that ended ok": sum(each.ok for each in slices),
        "Runs that did not": sum(each.other for each in slices),
        "Left": left,
        "Time for it": show_duration(sum(each.seconds for each in slices)) if left else "-",
    }


def slices_table(records: Records) -> pd.DataFrame:
    return pd.DataFrame([_row(each.suite, [each], _of_it(each, records.remaining)) for each in records.remaining])


def _of_it(one: Remaining, remaining: Sequence[Remaining]) -> str:
    first = next(each for each in remaining if each.suite == one.suite)
    return one.only or ("all" if first is one else "the rest")


def left_table(records: Records) -> pd.DataFrame:
    rows = [
        {"Suite": each.suite, "Of it": _of_it(each, records.remaining), "Cells left": "; ".join(each.left)}
        for each in records.remaining
        if each.left
    ]
    return pd.DataFrame(rows)


QUESTION = Question(
    name="remaining",
    title="How much of this study is measured, and what remains?",
    answer=answer,
    nothing="These records are no part of a plan in slices.",
    tables={"slices": slices_table, "left": left_table},
)
