"""The document model: a page is a title and sections, rendered as HTML, as Markdown, or as a terminal's table."""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup

from study.config.text import NOT_MEASURED, format_number, percent
from study.records.frames import Records
from study.records.statistics import Interval
from study.report.canvas import STRATEGIES
from study.report.facts import Headline

# Strategies that a sentence names before it counts the rest.
_MAX_NAMES = 3


@dataclasses.dataclass(frozen=True)
class Link:
    """A table cell with an address; without an address it is plain text."""

    text: str
    address: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class IntervalCell:
    """A table cell with an interval over seeds: a table has its text, and a figure its center and points."""

    interval: Interval
    text: str

    def __str__(self) -> str:
        return self.text


def cell_text(value: object) -> str:
    """Return a value as the text of a table cell."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return NOT_MEASURED
    if isinstance(value, float):
        return format_number(value, digits=4)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def format_or_dash(value: float, form: Callable[[float], str]) -> str:
    """Return the formatted value; the sign for "not measured" if it is NaN."""
    return NOT_MEASURED if math.isnan(value) else form(value)


def span_text(values: Iterable[float], form: Callable[[float], str]) -> str:
    """Return the lowest and the highest value as a text, without NaN."""
    measured = [value for value in values if not math.isnan(value)]
    return " to ".join(dict.fromkeys(form(end) for end in (min(measured), max(measured))))


def format_names(arms: Sequence[str], conjunction: str = "and") -> str:
    """Return strategies as an English list, with a count after the first three."""
    quoted = [f"`{name}`" for name in dict.fromkeys(arms)]
    more = len(quoted) - _MAX_NAMES
    if more > 1:
        quoted[_MAX_NAMES:] = [f"{more} more"]
    return f" {conjunction} ".join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else quoted[0]


# A ratio, and a relative change in percent with its sign.
times_text = "{:.2f}".format
change_text = functools.partial(percent, signed=True)
Table = Callable[[Records], pd.DataFrame]


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The first screen of a question: a table, at most two headlines, and notes that the reader needs with them."""

    table: pd.DataFrame
    headlines: Sequence[Headline] = ()
    notes: tuple[str, ...] = ()
    # The question, if these records answer only a part of the usual one.
    title: str = ""
    # The workload of headlines about only one: the first page has its figure.
    subject: str = ""
    # Whether the head of the first page has the headlines, too.
    leads: bool = True

    def _repr_markdown_(self) -> str:
        """Return the answer as Jupyter shows it in a notebook."""
        section = PageSection(headlines=self.headlines, table=self.table, notes=self.notes)
        return render_markdown("answer.md.j2", item=section)


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A question of a report: its answer, its tables, its figures and its page."""

    name: str
    title: str
    # Returns None if the records do not answer it; then it is not in the report.
    answer: Callable[[Records], Answer | None]
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    # Whether the summary has these tables, if the question has no page.
    tables_in_summary: bool = True
    # Name of its page and of its notebook in notebooks/. Without one, the first page has its tables.
    notebook: str | None = None
    # Names of the figures that its notebook draws, each of several workloads; the first is on the first page.
    figures: tuple[str, ...] = ()


class Picture(NamedTuple):
    """A figure of an executed notebook, with its content in words."""

    name: str
    png: bytes
    svg: str
    alt: str


@dataclasses.dataclass(frozen=True, eq=False)
class PageSection:
    """A heading and its content. Every field but `text` may quote a record, and is escaped."""

    title: str = ""
    # Text of this project, Markdown if the page is a document.
    text: str = ""
    # One word in front of the sentence.
    verdict: str = ""
    sentence: str = ""
    headlines: Sequence[Headline] = ()
    table: pd.DataFrame | None = None
    # Markup is HTML, for a page that is not rendered as Markdown.
    notes: Sequence[str] = ()
    # HTML folds the table below them.
    drawings: Sequence[Picture] = ()
    # Further tables by title; folded in HTML.
    tables: Mapping[str, pd.DataFrame] = dataclasses.field(default_factory=dict)
    level: int = 2
    # For HTML: CSS classes, anchor, and the end of the section.
    classes: str = ""
    anchor: str = ""
    below: Markup | str = ""


# Markdown

TEMPLATES = Path(__file__).parent / "site" / "templates"


def page_markdown(title: str, sections: Iterable[PageSection], numbers: Iterable[tuple[str, str]] = ()) -> str:
    """Return the page as Markdown; its head lists the numbers."""
    return render_markdown("page.md.j2", title=title, sections=sections, numbers=numbers)


def render_markdown(template: str, **values: Any) -> str:
    """Return a Markdown template with its values: a data frame is a table, everything else is escaped text."""
    text = _templates(as_markdown).get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def paragraphs(template: str, **values: Any) -> list[str]:
    """Return the paragraphs of a text template as the sentences and notes of sections, which are escaped later."""
    text = _templates(Markup).get_template(template).render(values)
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def as_markdown(value: object) -> Markup:
    """Return a value of a Markdown template; only Markup is not escaped."""
    if isinstance(value, Markup):
        return value
    return Markup(table_markdown(value) if isinstance(value, pd.DataFrame) else markdown_text(cell_text(value)))


def table_markdown(frame: pd.DataFrame) -> str:
    """Return a data frame as a Markdown table."""
    columns = column_names(frame)
    lines = [columns, ["---"] * len(columns), *frame.itertuples(index=False, name=None)]
    return "".join(f"| {' | '.join(map(_cell_markdown, line))} |\n" for line in lines)


def column_names(frame: pd.DataFrame) -> list[str]:
    """Return the names of the columns, each with the header above it."""
    return [": ".join(filter(None, name)) if isinstance(name, tuple) else name for name in frame.columns]


def _cell_markdown(cell: object) -> str:
    text = markdown_text(cell_text(cell))
    return f"[{text}]({quote(cell.address, safe='/#.')})" if isinstance(cell, Link) and cell.address else text


# A name between backticks, without characters that a record could use for markup.
_CODE = re.compile(r"`([\w.,:=+/() -]+)`")


def markdown_text(text: str) -> str:
    """Return one line that Markdown shows literally, except names between backticks: a record cannot inject markup."""
    parts = _CODE.split(" ".join(text.split()))
    plain = [re.sub(r"[\\`*\[\]|~$]", r"\\\g<0>", html.escape(part, quote=False)) for part in parts]
    return "".join(f"`{part}`" if turn % 2 else plain[turn] for turn, part in enumerate(parts))


# HTML

# Refused records listed on the first page, which starts with answers; summary.md has all of them.
_REFUSED_SHOWN = 50
_LONG_TEXT = 40
_GROUPS = "Workload"
_OUTCOMES = {
    **dict.fromkeys(("ok", "yes"), "good"),
    **dict.fromkeys(("oom", "failed", "timeout", "unsupported", "interrupted"), "bad"),
}


def page_html(template: str, suite: str, pages: Mapping[str, str], current: str, **content: Any) -> str:
    """Return a page as HTML; `pages` has every page's title by its name, `all_reports` the folder of all reports."""
    css = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    content |= {"suite": suite, "pages": pages, "current": current, "css": css, "refused_shown": _REFUSED_SHOWN}
    return _templates().get_template(template).render({"all_reports": "", "numbers": ()} | content)


@functools.cache
def _templates(finalize: Callable[[object], object] | None = None) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters |= {"code": code_html, "table": table_html, "slug": slug, "png": png_html}
    return environment


def slug(words: str) -> str:
    """Return the text as a name for CSS classes and anchors."""
    return re.sub(r"[^\w-]+", "-", words)


def code_html(text: str) -> Markup:
    """Return the escaped text with names between backticks as code; a number and its % stay on one line."""
    if isinstance(text, Markup):
        return text
    parts = [
        Markup("<code>{}</code>").format(part) if turn % 2 else Markup.escape(part)
        for turn, part in enumerate(_CODE.split(text.replace(" %", "\u00a0%")))
    ]
    return Markup("").join(parts)


def link_html(text: str, address: str) -> Markup:
    """Return a link; the escaped text if there is no address."""
    return Markup('<a href="{}">{}</a>').format(address, text) if address else Markup.escape(text)


def png_html(picture: Picture) -> Markup:
    """Return the figure as an embedded image."""
    content = base64.b64encode(picture.png).decode()
    return Markup('<img src="data:image/png;base64,{}" alt="{}">').format(content, picture.alt)


def table_html(frame: pd.DataFrame) -> Markup:
    """Return a table in a scrolling container; a header row names the workload of the rows below it."""
    groups = [cell_text(value) for value in frame.get(_GROUPS, [""] * len(frame))]
    frame = frame.drop(columns=_GROUPS, errors="ignore")
    classes = [_class_of_column(frame.iloc[:, place].map(cell_text)) for place in range(frame.shape[1])]
    rows = [
        (group, [_cell(*cell) for cell in zip(row, classes, strict=True)])
        for group, row in zip(groups, frame.itertuples(index=False, name=None), strict=True)
    ]
    shared = itertools.groupby(frame.columns.get_level_values(0)) if frame.columns.nlevels > 1 else ()
    above = [(name, len(list(same))) for name, same in shared]
    head = list(zip(frame.columns.get_level_values(-1), classes, strict=True))
    labels = column_names(frame)
    return Markup(_templates().get_template("table.html.j2").render(above=above, head=head, labels=labels, rows=rows))


def _class_of_column(texts: pd.Series) -> str:
    """Return the CSS class of a column. Numbers are aligned right, also if some cells are "not measured"."""
    values = [text for text in texts if text not in (NOT_MEASURED, "", *_OUTCOMES)]
    width = texts.str.len().max()
    are_numbers = all(re.match(r"[-+~±\u2212<>≤≥]?\s?\d++(?! layer)", text) for text in values)
    if values and are_numbers and width <= 0.6 * _LONG_TEXT:
        return "n"
    return "long" if width > _LONG_TEXT else "short"


def _cell(value: object, css_class: str) -> tuple[str, str, str]:
    """Return a cell's text, its CSS classes, and the color of the strategy that it names."""
    text = cell_text(value)
    if isinstance(value, Link) and value.address:
        return link_html(value.text, value.address), css_class, ""
    words = text.replace(",", " ").split()
    if css_class != "n" and words and words[0] in STRATEGIES:
        return code_html(text), f"{css_class} name", STRATEGIES[words[0]].colour
    return code_html(text), f"{css_class} {_OUTCOMES.get(text, '')}".strip(), ""
