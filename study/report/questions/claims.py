"""The published claims whose verdicts rest on these records.

The ledger of claims says which: it is made of reports, and hands its verdicts in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from study.report.questions.question import Answer, Link, Question


class Resting(NamedTuple):
    """A claim with what these records say of it."""

    claim: str
    # Of its entry among all claims, beside the report; empty where that cannot be reached from there.
    address: str
    verdict: str
    says: str
    found: str


def answer(resting: Sequence[Resting]) -> Answer | None:
    if not resting:
        return None
    rows = [
        {"Claim": Link(each.claim, each.address), "Verdict": each.verdict, "It says": each.says,
         "These records": each.found}
        for each in resting
    ]  # fmt: skip
    sentence = f"The verdicts of {len(rows)} published claims rest on these records, some of them on others too."
    return Answer(sentence, pd.DataFrame(rows).astype(object))


QUESTION = Question(
    name="claims",
    title="Which published claims rest on these records?",
    answer=lambda _records: None,
    nothing="No verdict of the ledger of claims rests on these records.",
    tables={},
)
