"""A notebook draws the table of its question: each number is computed once."""

from __future__ import annotations

import pandas as pd
import pytest

from study.config.places import REPOSITORY
from study.records.frames import Records
from study.report.questions.memory import MEMORY
from tools.golden import drawn_by


def parameters_drawn() -> float:
    """Return the sum of the bars of weights in the figures of model state."""
    notebook = REPOSITORY / "notebooks" / "peak_memory.ipynb"
    figures = drawn_by(notebook, REPOSITORY / "reports" / "reviews")
    states = [figure for figure in figures if figure["name"] == "model_state"]
    assert states
    # The first bar of each strategy begins at the axis.
    bars = [bar for figure in states for axes in figure["axes"] for bar in axes["bars"]]
    return sum(width for start, _, width, _ in bars if start == 0)


def test_the_figure_of_model_state_has_the_numbers_of_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    table = MEMORY.tables["memory"]
    measured = parameters_drawn()

    def with_double_weights(records: Records) -> pd.DataFrame:
        doubled = table(records)
        doubled["Parameters, MiB"] *= 2
        return doubled

    monkeypatch.setitem(MEMORY.tables, "memory", with_double_weights)
    assert parameters_drawn() == pytest.approx(2 * measured)
    assert measured > 0
