"""What a notebook calls: records from a folder, and figures and tables where the reader is."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from IPython.display import display
from matplotlib.figure import Figure
from PIL import Image

from study.errors import UserError
from study.report.plots import Drawing
from study.report.plots.palette import SETTINGS
from study.report.questions import tables
from study.report.records import frames
from study.report.records.frames import Records
from study.report.site.page import paragraph_html, table_html
from study.spec.strategies import REPOSITORY

# The key under which a report finds its figures and sentences again in an executed notebook.
METADATA_KEY = "zero_study"
_DOTS_PER_INCH, _CSS_PIXELS_PER_INCH = 200, 100
_COLOURS = 128


def records(folder: str) -> Records:
    """Records of a runs directory or a report; a relative path is looked for here, then from the repository's root."""
    here, from_root = Path(folder), REPOSITORY / folder
    found = here if here.exists() else from_root
    if not found.exists():
        raise UserError(
            f"there is no folder {folder}, neither here nor in {REPOSITORY.name}", "name another records_dir"
        )
    read = frames.read_records(found)
    sentence(
        f"{len(read.runs)} runs and {len(read.steps):,} steps from {'this folder' if folder == '.' else folder}"
        + (f"; {len(read.refused)} records were refused, and are not in what follows." if read.refused else ".")
    )
    return read


def figures(drawings: Sequence[Drawing] | str, folder: str = "") -> None:
    """Shows figures, or the sentence that stands for them; with a folder, also keeps them there as PNG and SVG."""
    if isinstance(drawings, str):
        sentence(drawings, absent=True)
        return
    for drawing in drawings:
        png = as_png(drawing.figure)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{drawing.name}.png").write_bytes(png)
            (Path(folder) / f"{drawing.name}.svg").write_bytes(as_svg(drawing.figure))
        width = round(drawing.figure.get_figwidth() * _CSS_PIXELS_PER_INCH)
        _show(
            {"image/png": png, "text/plain": drawing.alt},
            {"image/png": {"width": width, "alt": drawing.alt},
             METADATA_KEY: {"figure": drawing.name, "title": drawing.title, "alt": drawing.alt}},
        )  # fmt: skip


def table(name: str, read: Records) -> None:
    """Shows the table of that name, or the sentence that says what the records would have to hold."""
    if missing := tables.absent(name, read):
        sentence(missing, absent=True)
        return
    frame = tables.TABLES[name](read)
    _show({"text/html": table_html(frame), "text/plain": frame.to_string(index=False)}, {})


def sentence(text: str, absent: bool = False) -> None:
    _show({"text/html": paragraph_html(text, "absent" if absent else "note"), "text/plain": text},
          {METADATA_KEY: {"absent": text}} if absent else {})  # fmt: skip


def as_png(figure: Figure) -> bytes:
    """In as few colours as the eye needs: a third of the size."""
    with matplotlib.rc_context(SETTINGS):
        full = io.BytesIO()
        figure.savefig(full, format="png", dpi=_DOTS_PER_INCH)
    small = io.BytesIO()
    image = Image.open(full).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def as_svg(figure: Figure) -> bytes:
    with matplotlib.rc_context(SETTINGS):
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()


def _show(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    display(data, metadata=metadata, raw=True)
