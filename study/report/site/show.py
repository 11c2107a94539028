"""What a notebook calls: records from a folder, and a question's answer, figures and tables where the reader is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from IPython.display import display
from matplotlib.figure import Figure
from PIL import Image

from study.config.errors import UserError
from study.config.strategies import REPOSITORY, from_root
from study.records import frames
from study.records.frames import Records
from study.report.plots.canvas import SETTINGS
from study.report.questions import QUESTIONS
from study.report.questions.question import Question
from study.report.site.page import links_html, paragraph_html, table_html

_DOTS_PER_INCH, _CSS_PIXELS_PER_INCH = 200, 100
_COLOURS = 128
_NOTHING_HERE = "These records hold nothing to show here."


def records(folder: str) -> Records:
    """Records of a runs directory or a report."""
    found = from_root(folder)
    if not found.exists():
        raise UserError(
            f"there is no folder {folder}, neither here nor in {REPOSITORY.name}", "name another records_dir"
        )
    read = frames.read_records(found)
    _sentence(
        f"{len(read.runs)} runs and {len(read.steps):,} steps from {'this folder' if folder == '.' else folder}"
        + (f"; {len(read.refused)} records were refused, and are not in what follows." if read.refused else ".")
    )
    return read


class Shown:
    """One question in a notebook. With a folder, its figures are also kept there as PNG and SVG."""

    def __init__(self, question: Question, records: Records, figures_dir: str) -> None:
        self._question, self._records, self._folder = question, records, figures_dir
        self._answer = question.answer(records)

    def answer(self) -> None:
        if self._answer is None:
            _sentence(self._question.nothing, "absent")
            return
        _sentence(self._answer.sentence, "answer")
        for note in self._answer.notes:
            _sentence(note)

    def figure(self, name: str) -> None:
        draw = self._question.figures[name]
        drawings = draw(self._records) if self._answer else []
        if self._answer and not drawings:
            _sentence(_NOTHING_HERE, "absent")
        links = {}
        for drawing in drawings:
            png = as_png(drawing.figure)
            width = round(drawing.figure.get_figwidth() * _CSS_PIXELS_PER_INCH)
            _show({"image/png": png, "text/plain": drawing.alt}, {"image/png": {"width": width, "alt": drawing.alt}})
            if self._folder:
                folder = Path(self._folder)
                folder.mkdir(parents=True, exist_ok=True)
                for kind, content in (("png", png), ("svg", as_svg(drawing.figure))):
                    (folder / f"{drawing.name}.{kind}").write_bytes(content)
                    links[f"{drawing.name}.{kind}"] = f"{self._folder}/{drawing.name}.{kind}"
        if links:
            _show({"text/html": links_html(links), "text/plain": ", ".join(links)}, {})

    def table(self, name: str) -> None:
        make = self._question.tables[name]
        frame = make(self._records) if self._answer else None
        if frame is not None and frame.empty:
            _sentence(_NOTHING_HERE, "absent")
        elif frame is not None:
            _show({"text/html": table_html(frame), "text/plain": frame.to_string(index=False)}, {})


def question(name: str, records: Records, figures_dir: str = "") -> Shown:
    return Shown(next(each for each in QUESTIONS if each.name == name), records, figures_dir)


def as_png(figure: Figure) -> bytes:
    """In as few colours as the eye needs: a third of the size."""
    with matplotlib.rc_context(SETTINGS):
        full = io.BytesIO()
        figure.savefig(full, format="png", dpi=_DOTS_PER_INCH)
    small = io.BytesIO()
    # Median cut, the default, would mix the colours of arms that have few points.
    tree, plain = Image.Quantize.FASTOCTREE, Image.Dither.NONE
    image = Image.open(full).convert("RGB").quantize(_COLOURS, method=tree, dither=plain)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def as_svg(figure: Figure) -> bytes:
    with matplotlib.rc_context(SETTINGS):
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()


def _sentence(text: str, css_class: str = "note") -> None:
    _show({"text/html": paragraph_html(text, css_class), "text/plain": text}, {})


def _show(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    display(data, metadata=metadata, raw=True)
