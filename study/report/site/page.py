"""The pages of a report. Everything in them is escaped, and everything they show is inside them."""

from __future__ import annotations

import base64
import dataclasses
import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup

from study.report.plots.palette import STRATEGIES

TEMPLATES = Path(__file__).with_name("templates")
# So many refused records fit on a page that opens with findings; summary.md has the rest.
_REFUSED_SHOWN = 50
_LONG_TEXT = 40
NOT_MEASURED = "-"
_GROUPS = "Workload"
# A name between backticks, and nothing that could be markup of a record's.
_CODE = re.compile(r"`([\w.,:=+/() -]+)`")
_OUTCOMES = {
    **dict.fromkeys(("ok", "yes"), "short good"),
    **dict.fromkeys(("oom", "failed", "timeout", "unsupported", "interrupted"), "short bad"),
}


class Figure(NamedTuple):
    """A figure as the index shows it; the picture itself goes into the page."""

    name: str
    alt: str
    png: bytes
    width: int
    height: int

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclasses.dataclass(frozen=True)
class Section:
    """What one notebook gives to the index: its title, its first paragraph, its figures, and what it could not show."""

    name: str
    title: str
    lead: str
    figures: Sequence[Figure]
    absent: Sequence[str]


def index_page(suite: str, **content: Any) -> str:
    return _page("index.html.j2", suite, title=suite, refused_shown=_REFUSED_SHOWN, **content)


def notebook_page(suite: str, title: str, body: str, **content: Any) -> str:
    """`body` is HTML that nbconvert made of an executed notebook."""
    return _page("notebook.html.j2", suite, title=title, body=Markup(body), **content)


def _page(template: str, suite: str, **content: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["code"] = code_html
    css = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(suite=suite, css=css, **content)


def code_html(text: str) -> Markup:
    """Escaped, with names between backticks as code."""
    parts = [Markup("<code>{}</code>").format(part) if turn % 2 else Markup.escape(part)
             for turn, part in enumerate(_CODE.split(text))]  # fmt: skip
    return Markup("").join(parts)


def paragraph_html(text: str, css_class: str) -> Markup:
    return Markup('<p class="{}">{}</p>').format(css_class, text)


def table_html(frame: pd.DataFrame) -> Markup:
    """A table in a container of its own that scrolls; a row of its own names the workload of those below it."""
    groups, frame = _without_workload(frame)
    numeric = [_is_numeric(frame[column]) for column in frame.columns]
    long = [not number and frame[column].astype(str).str.len().max() > _LONG_TEXT
            for column, number in zip(frame.columns, numeric, strict=True)]  # fmt: skip
    head = "".join(f"<th{_class_of('n' if number else '')}>{html.escape(str(column))}</th>"
                   for column, number in zip(frame.columns, numeric, strict=True))  # fmt: skip
    rows = []
    for place, row in enumerate(frame.itertuples(index=False, name=None)):
        if groups and (place == 0 or groups[place] != groups[place - 1]):
            name = f"<span>{html.escape(groups[place])}</span>"
            rows.append(f'<tr class="group"><th colspan="{len(frame.columns)}">{name}</th></tr>')
        rows.append(f"<tr>{''.join(_cell_html(*cell) for cell in zip(row, numeric, long, strict=True))}</tr>")
    body = "\n".join(rows)
    return Markup(
        f'<div class="table" tabindex="0" role="region" aria-label="table"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _without_workload(frame: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    if _GROUPS not in frame.columns:
        return [], frame
    return [cell_text(value) for value in frame[_GROUPS]], frame.drop(columns=_GROUPS)


def _cell_html(value: object, numeric: bool, long: bool) -> str:
    text = cell_text(value)
    words = text.replace(",", " ").split()
    first = words[0] if words else ""
    if not numeric and first in STRATEGIES:
        swatch = f'<span class="swatch" style="background:{STRATEGIES[first].colour}"></span>'
        return f'<td class="name">{swatch}{html.escape(text)}</td>'
    kind = "n" if numeric else "long" if long else _OUTCOMES.get(text, "short")
    return f"<td{_class_of(kind)}>{html.escape(text)}</td>"


def _class_of(name: str) -> str:
    return f' class="{name}"' if name else ""


def _is_numeric(column: pd.Series) -> bool:
    """Numbers, or texts that a table made of numbers and of "not measured" signs."""
    texts = [text for text in map(cell_text, column) if text not in (NOT_MEASURED, "")]
    return bool(texts) and all(re.match(r"[-+±\u2212<>≤≥]?\s?\d", text) for text in texts)


def cell_text(value: object) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return NOT_MEASURED
    if isinstance(value, float):
        whole = value.is_integer() or abs(value) >= 1000
        return f"{value:,.0f}" if whole and abs(value) < 1e9 else f"{value:#.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table_markdown(frame: pd.DataFrame) -> str:
    lines = [frame.columns, ["---"] * len(frame.columns), *frame.itertuples(index=False, name=None)]
    return "".join(f"| {' | '.join(markdown_text(cell_text(cell)) for cell in line)} |\n" for line in lines)


def markdown_text(text: str) -> str:
    """One line that Markdown shows as it is, but for names between backticks: no markup of a record's gets through."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(f"`{part}`" if turn % 2 else _plain(part) for turn, part in enumerate(parts))


def _plain(text: str) -> str:
    escaped = html.escape(text, quote=False)
    return "".join(f"\\{sign}" if sign in "\\`*[]|~$" else sign for sign in escaped)


def summary_markdown(
    suite: str, facts: Sequence[str], findings: Sequence[Any], tables: Mapping[str, pd.DataFrame],
    refused: Sequence[str], failures: Mapping[str, str],
) -> str:  # fmt: skip
    parts = [f"# {markdown_text(suite)}\n\n{markdown_text(' · '.join(facts))}\n"]
    for finding in findings:
        details = "".join(f"- {markdown_text(detail)}\n" for detail in finding.details)
        answer = "\n\n".join(markdown_text(line) for line in finding.answer.splitlines())
        parts.append(f"## {markdown_text(finding.question)}\n\n{answer}\n\n{details}")
    parts += [f"## {title}\n\n{table_markdown(table)}" for title, table in tables.items()]
    if failures:
        lines = "".join(f"- `{name}`: {markdown_text(reason)}\n" for name, reason in failures.items())
        parts.append(f"## Notebooks that did not finish\n\n{lines}")
    if refused:
        parts.append("## Records left out\n\n" + "".join(f"- {markdown_text(reason)}\n" for reason in refused))
    return "\n".join(parts)
