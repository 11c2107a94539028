"""The reading of a committed report: reading.md, the sentences of its authors, with the numbers of the records.

`{loss.1.value}` is the value of the first headline of the question `loss`; its other fields are those of `Headline`.
`read_reading` raises UserError for a number in the text, and for a headline that the records do not have. The sentences
thus stay in step with the records, and a change of a number is a change of the summary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from study.config.errors import UserError
from study.report.document import Answer, PageSection, Question
from study.report.facts import Headline
from study.report.site.publishing import READING

_PLACE = re.compile(r"\{(\w+)\.(\d)\.(\w+)\}")
# Not part of a name, such as H200 or bf16.
_LITERAL_NUMBER = re.compile(r"(?<!\w)\d[\d.,]*")
_CODE = re.compile(r"`[^`\n]*`")


def read_reading(folder: Path, answered: Mapping[Question, Answer]) -> PageSection | None:
    """Return the reading in the folder of a report with these answers; None without one. Raises UserError."""
    file = folder / READING
    if not file.is_file():
        return None
    headlines = {question.name: answer.headlines for question, answer in answered.items()}
    sentences = fill(file.read_text(encoding="utf-8"), headlines, str(file))
    return PageSection("Reading", "Written by hand; the numbers are those below.", notes=sentences, anchor="reading")


def fill(text: str, headlines: Mapping[str, Sequence[Headline]], name: str) -> list[str]:
    """Return the paragraphs of a reading with the numbers of these headlines; raise UserError for any other number."""
    literal = _LITERAL_NUMBER.search(_CODE.sub("", _PLACE.sub("", text)))
    if literal:
        raise UserError(f"{name} has the number {literal[0]}", "take it from a headline, such as {loss.1.value}")

    def number(place: re.Match[str]) -> str:
        question_headlines = headlines.get(place[1], ())
        count = int(place[2])
        if not 1 <= count <= len(question_headlines) or place[3] not in vars(question_headlines[count - 1]):
            listed = ", ".join(f"{question} {len(values)}" for question, values in headlines.items() if values)
            raise UserError(f"{name}: the records have no {place[0]}", f"their headlines by question: {listed}")
        return str(getattr(question_headlines[count - 1], place[3]))

    return [" ".join(_PLACE.sub(number, part).split()) for part in text.split("\n\n") if part.strip()]
