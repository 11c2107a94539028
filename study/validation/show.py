"""What the notebook of predictions calls."""

from __future__ import annotations

import pandas as pd
from IPython.display import HTML, display

from study.errors import UserError
from study.report.site.page import table_html
from study.spec.strategies import from_root
from study.validation import tables


class Predictions:
    """Of one source or one strategy, or all."""

    def __init__(self, reports_dir: str, source: str = "", strategy: str = "") -> None:
        self._folder = from_root(reports_dir)
        self._scores = tables.read(self._folder)
        for column, asked in (("source", source), ("strategy", strategy)):
            known = list(dict.fromkeys(self._scores[column]))
            if asked and asked not in known:
                raise UserError(f"no row has the {column} {asked!r}", f"use one of {', '.join(known)}")
            if asked:
                self._scores = self._scores[self._scores[column] == asked]

    def headline(self) -> None:
        _show(tables.headline(self._scores))

    def drawing(self) -> None:
        display(tables.drawing(self._scores))

    def fits(self) -> None:
        _show(tables.fits(self._scores))

    def league(self) -> None:
        _show(tables.league(self._folder))

    def by(self, column: str) -> None:
        _show(tables.by(self._scores, column))

    def each(self) -> None:
        _show(tables.each(self._scores))

    def refused(self) -> None:
        _show(tables.refused(self._scores))


def _show(table: pd.DataFrame) -> None:
    display(HTML(table_html(table)) if len(table) else "nothing of that")
