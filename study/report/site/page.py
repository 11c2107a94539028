"""The pages of a report. Everything in them is escaped, and everything they show is inside them."""

from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup

from study.report.plots.canvas import STRATEGIES
from study.report.questions.question import NOT_MEASURED, Answer, Link, Question, cell_text

TEMPLATES = Path(__file__).with_name("templates")
# So many refused records fit on a page that opens with answers; summary.md has the rest.
_REFUSED_SHOWN = 50
_LONG_TEXT = 40
_GROUPS = "Workload"
# A name between backticks, and nothing that could be markup of a record's.
_CODE = re.compile(r"`([\w.,:=+/() -]+)`")
_OUTCOMES = {
    **dict.fromkeys(("ok", "yes"), "good"),
    **dict.fromkeys(("oom", "failed", "timeout", "unsupported", "interrupted"), "bad"),
}


class Card(NamedTuple):
    """One question on the first page. `tables` are those that no notebook shows, `picture` is a PNG in base64."""

    question: Question
    answer: Answer
    tables: Mapping[str, pd.DataFrame]
    picture: str
    alt: str


def page_html(template: str, suite: str, pages: Mapping[str, str], current: str, **content: Any) -> str:
    """`pages` are the titles of all pages by name, this one among them."""
    css = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    content |= {"suite": suite, "pages": pages, "current": current, "css": css, "refused_shown": _REFUSED_SHOWN}
    return render(template, **content)


def render(template: str, **content: Any) -> str:
    return _templates().get_template(template).render(content)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"code": code_html, "table": table_html, "slug": slug}
    return environment


def slug(words: str) -> str:
    """As the name of a class or of an anchor."""
    return re.sub(r"[^\w-]+", "-", words)


def code_html(text: str) -> Markup:
    """Escaped, with names between backticks as code; a figure and its % stay on one line."""
    parts = [Markup("<code>{}</code>").format(part) if turn % 2 else Markup.escape(part)
             for turn, part in enumerate(_CODE.split(text.replace(" %", "\u00a0%")))]  # fmt: skip
    return Markup("").join(parts)


def paragraph_html(text: str, css_class: str) -> Markup:
    return Markup('<p class="{}">{}</p>').format(css_class, code_html(text))


def link_html(text: str, address: str) -> Markup:
    return Markup('<a href="{}">{}</a>').format(address, text)


def links_html(links: Mapping[str, str]) -> Markup:
    shown = Markup(" ").join(link_html(name, place) for name, place in links.items())
    return Markup('<p class="files">{}</p>').format(shown)


def table_html(frame: pd.DataFrame) -> Markup:
    """A table in a container of its own that scrolls; a row of its own names the workload of those below it."""
    is_grouped = _GROUPS in frame.columns
    groups = [cell_text(value) for value in frame[_GROUPS]] if is_grouped else [""] * len(frame)
    frame = frame.drop(columns=_GROUPS) if is_grouped else frame
    classes = [_class_of_column(frame.iloc[:, place].map(cell_text)) for place in range(frame.shape[1])]
    rows = [
        (group, [_cell(*cell) for cell in zip(row, classes, strict=True)])
        for group, row in zip(groups, frame.itertuples(index=False, name=None), strict=True)
    ]
    above = [
        (name, len(list(same)))
        for name, same in itertools.groupby(frame.columns.get_level_values(0))
        if frame.columns.nlevels > 1
    ]
    head = list(zip(frame.columns.get_level_values(-1), classes, strict=True))
    return Markup(_templates().get_template("table.html.j2").render(above=above, head=head, rows=rows))


def _class_of_column(texts: pd.Series) -> str:
    """Numbers, or texts that a table made of numbers and of "not measured" signs, stand at the right."""
    known = [text for text in texts if text not in (NOT_MEASURED, "", *_OUTCOMES)]
    width = texts.str.len().max()
    if known and width <= _LONG_TEXT / 2 and all(re.match(r"[-+~±\u2212<>≤≥]?\s?\d", text) for text in known):
        return "n"
    return "long" if width > _LONG_TEXT else "short"


def _cell(value: object, css_class: str) -> tuple[str, str, str]:
    """With its classes, and the colour of the strategy that it names."""
    text = cell_text(value)
    if isinstance(value, Link) and value.address:
        return link_html(value.text, value.address), css_class, ""
    words = text.replace(",", " ").split()
    if css_class != "n" and words and words[0] in STRATEGIES:
        return text, f"{css_class} name", STRATEGIES[words[0]].colour
    return text, f"{css_class} {_OUTCOMES.get(text, '')}".strip(), ""


def table_markdown(frame: pd.DataFrame) -> str:
    columns = [": ".join(filter(None, name)) if isinstance(name, tuple) else name for name in frame.columns]
    lines = [columns, ["---"] * len(columns), *frame.itertuples(index=False, name=None)]
    return "".join(f"| {' | '.join(map(_cell_markdown, line))} |\n" for line in lines)


def _cell_markdown(cell: object) -> str:
    text = markdown_text(cell_text(cell))
    return f"[{text}]({quote(cell.address, safe='/#.')})" if isinstance(cell, Link) and cell.address else text


def markdown_text(text: str) -> str:
    """One line that Markdown shows as it is, but for names between backticks: no markup of a record's gets through."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(f"`{part}`" if turn % 2 else _plain(part) for turn, part in enumerate(parts))


def _plain(text: str) -> str:
    escaped = html.escape(text, quote=False)
    return "".join(f"\\{sign}" if sign in "\\`*[]|~$" else sign for sign in escaped)


def summary_markdown(
    suite: str, facts: Sequence[str], cards: Sequence[Card], unanswered: Sequence[Question], refused: Sequence[str],
    failures: Mapping[str, str],
) -> str:  # fmt: skip
    parts = [f"# {markdown_text(suite)}\n\n{markdown_text(' · '.join(facts))}\n"]
    for card in cards:
        notes = "".join(f"- {markdown_text(note)}\n" for note in card.answer.notes)
        tables = [table_markdown(table) for table in (card.answer.table, *card.tables.values())]
        said = [f"## {card.question.title}", markdown_text(card.answer.sentence), *tables, *([notes] if notes else [])]
        parts.append("\n\n".join(part.rstrip("\n") for part in said) + "\n")
    for title, lines in (
        ("Not answered by these records", [f"{question.title} {question.nothing}" for question in unanswered]),
        ("Notebooks that did not finish", [f"`{name}`: {reason}" for name, reason in failures.items()]),
        ("Records left out", refused),
    ):
        if lines:
            parts.append(f"## {title}\n\n" + "".join(f"- {markdown_text(line)}\n" for line in lines))
    return "\n".join(parts)
