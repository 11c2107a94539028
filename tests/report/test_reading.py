"""Readings of committed reports: sentences whose numbers are those of the records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.report.document import PageSection, markdown_text, page_html
from study.report.facts import Headline
from study.report.site.publishing import READING
from study.report.site.reading import fill

FOLDERS = sorted(file.parent for file in REPOSITORY.glob(f"reports/*/{READING}"))
LOSS = {"loss": [Headline("0.1 %", "largest difference", strategy="zero3", n=3)]}


def test_the_largest_reports_have_a_reading() -> None:
    assert {"claims", "gpu", "releases"} <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_reading_is_short_and_the_summary_has_it(folder: Path) -> None:
    """test_report_build.py rebuilds the summaries, with the numbers of the records."""
    text = (folder / READING).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 15
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    sentences = summary.partition("## Reading\n")[2].partition("\n## ")[0].split("\n\n")[1].splitlines()
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    assert len(sentences) == len(paragraphs)
    for sentence, paragraph in zip(sentences, paragraphs, strict=True):
        pattern = re.escape(markdown_text(re.sub(r"\{[\w.]+\}", "NUMBER", paragraph)))
        assert re.fullmatch(f"\\- {pattern.replace('NUMBER', '.+')}", sentence), sentence


def test_a_number_comes_from_a_headline() -> None:
    text = "Under `zero3`\nit is {loss.1.value}, n = {loss.1.n}.\n\nOn an H200 in bf16."
    assert fill(text, LOSS, "reading.md") == ["Under `zero3` it is 0.1 %, n = 3.", "On an H200 in bf16."]
    for wrong, problem in {
        "It is 0.1 %.": "reading.md has the number 0.1",
        "{loss.2.value}": "the records have no {loss.2.value}",
        "{memory.1.value}": "the records have no {memory.1.value}",
        "{loss.1.median}": "the records have no {loss.1.median}",
    }.items():
        with pytest.raises(UserError) as refusal:
            fill(wrong, LOSS, "reading.md")
        assert problem in refusal.value.problem


def test_a_page_has_the_reading_before_the_answers_and_escapes_it() -> None:
    reading = PageSection("Reading", notes=["<i>a name"], anchor="reading")
    content: dict[str, Any] = {"title": "t", "facts": [], "lists": [], "environment": pd.DataFrame()}
    content |= {"readings": [reading], "cards": [PageSection("Loss", anchor="loss")]}
    html = page_html("index.html.j2", "suite", {"index": "Overview"}, "index", **content)
    assert html.index("&lt;i&gt;a name") < html.index('id="loss"')
