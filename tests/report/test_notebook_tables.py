"""A notebook draws the table of its question: each number is computed once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from report_folders import drawn, few, figures, laptop
from study.config.places import REPOSITORY
from study.metrics import traffic
from study.records.frames import Records, read_parquet, read_records
from study.report.document import IntervalCell
from study.report.questions import memory, releases, scaling
from study.report.questions.memory import MEMORY, RING_COLUMNS, TRAFFIC
from study.report.questions.time import ADVICE, PROFILE, TIME, frontier_table
from study.report.questions.virtual import SETTINGS, TABLE1
from synthetic_records import write_run
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


def twice(cell: Any) -> Any:
    """Return a cell of a table with double its number."""
    return IntervalCell(cell.interval.scaled(2), cell.text) if isinstance(cell, IntervalCell) else 2 * cell


def with_double(column: str, table: Callable[..., pd.DataFrame], *of: object) -> pd.DataFrame:
    rows = table(*of)
    return rows.assign(**{column: rows[column].map(twice)})


@functools.cache
def select_runs(report: str, selection: str) -> Records:
    """Return the committed runs of a report that match a query, with their steps."""
    records = read_parquet(REPOSITORY / "reports" / report)
    runs = records.runs.query(selection)
    return Records(runs, records.steps[records.steps["run"].isin(runs["run"])])


@functools.cache
def neighbours() -> Records:
    """Return the committed records of the four-rank strategies."""
    records = select_runs("neighbours", "strategy in ('single', 'zero1', 'zero2', 'hsdp', 'tp')")
    return Records(records.runs[records.runs["workload"] == records.runs["workload"].iloc[0]], records.steps.iloc[:0])


RECORDS: dict[str, Callable[[], Records]] = {
    "neighbours": neighbours,
    "batch_size": lambda: select_runs("claims", "strategy in ('ddp', 'zero2')"),
    "table1": lambda: select_runs("paper_table1", "strategy == 'zero2' and virtual_world_size in (4, 16)"),
    "settings": lambda: select_runs("virtual_settings", "strategy == 'zero2' and model_name_or_path == 'gpt2-xl'"),
}


# The first number behind the words, in the words of the figure.
@pytest.mark.parametrize(
    ("notebook", "tables", "column", "figure", "before"),
    [
        ("peak_memory", (MEMORY.tables, "memory"), "Peak of the host process, GiB", "peak_memory", "zero2 "),
        ("runtime", (TIME.tables, "runtime"), "Step time, ms", "step_time", "zero2 "),
        ("runtime", (ADVICE.tables, "frontier"), "Tokens/s", "frontier", "zero2 "),
        ("runtime", (TRAFFIC.tables, "traffic"), "Ring bytes (NCCL) per step, MiB", "traffic", "zero2 "),
        ("runtime", (PROFILE.tables, "step_profile"), "Profiled step, ms", "step_profile", "zero2, profiled "),
        ("single_vs_multi", (vars(scaling), "single_vs_multi_table"), "x reference", "scaling", "zero2 on 2: "),
        ("offload", (vars(memory), "offload_table"), "State left, MiB", "offload", "zero2_cpu leaves "),
        ("neighbours", (vars(memory), "shown_neighbours_table"), "Ring bytes (NCCL), MiB", "neighbours", "sends "),
        ("batch_size", (vars(scaling), "speeds_by"), "percent", "batch_size", "zero2 "),
        ("virtual_cluster", (TABLE1.tables, "table1"), "Here, GB", "table1", "zero2 at 4 "),
        ("virtual_cluster", (SETTINGS.tables, "settings"), "Ring bytes (NCCL), x weights", "settings", "zero2 "),
    ],
)
def test_a_figure_has_the_numbers_of_its_question(
    notebook: str,
    tables: tuple[dict[str, Any], str],
    column: str,
    figure: str,
    before: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = RECORDS.get(figure, few)()
    if figure == "step_profile":
        write_run(tmp_path / "runs", "zero2", config={"profile_steps": 3, "max_steps": 8})
        records = read_records(tmp_path / "runs")

    def number() -> float:
        drawings = {drawing.name: drawing for drawing in drawn(notebook, records)}
        numbers = re.findall(rf"(?<![\w]){re.escape(before)}([\d.,]*\d)", drawings[figure].alt)
        # Plain training sends nothing.
        return next(value for text in numbers if (value := float(text.replace(",", ""))))

    measured = number()
    holder, name = tables
    monkeypatch.setitem(holder, name, functools.partial(with_double, column, holder[name]))
    # Three digits are written.
    assert number() == pytest.approx(2 * measured, rel=0.01)


def test_the_grid_of_releases_is_drawn_from_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    records = select_runs("releases", "stack in ('0.18.2', '0.18.6') and precision == 'fp32' and max_grad_norm > 0")

    def diverging() -> list[str]:
        grids = [drawing.alt for drawing in drawn("releases", records) if drawing.name == "release_grid"]
        return [re.findall(r"0\.18\.6: (\w+)", grid)[0] for grid in grids]

    before = diverging()
    table = releases.grid_table(records)
    # Stacks are in the order of the figures: fp32 and the packages of today come first.
    assert table["stack"].cat.categories[0] == "fp32, with today's Accelerate and torch"
    assert set(table.loc[table["kind"] == "different", "letters"]) >= {"a"}
    assert set(table.loc[table["kind"] == "mismatch", "letters"]) == {"c"}
    assert set(table.loc[table["kind"] == "equal", "letters"]) == {""}
    as_equal = table.assign(verdict="equal", kind="equal", letters="")
    monkeypatch.setattr(releases, "grid_table", lambda records: as_equal)
    assert before == ["zero0"]
    assert diverging() == ["none"]


def test_a_named_baseline_is_what_speed_and_offload_are_relative_to() -> None:
    for baseline in ("", "ddp"):
        speeds = figures("single_vs_multi", few(), baseline=baseline)["scaling"].alt
        assert f"{baseline or 'single'} on {1 + bool(baseline)}: 1.00" in speeds.replace(": 1,", ": 1.00,")
        moved = figures("offload", few(), baseline=baseline)["offload"].alt
        assert re.search(rf"zero2_cpu leaves [\d.]+ of [\d.]+ MiB of {baseline or 'zero2'},", moved)


def test_the_fastest_in_its_memory_is_beaten_by_no_strategy_with_as_little() -> None:
    table = frontier_table(laptop())
    timed = table.dropna(subset=["Tokens/s"])
    compared = timed[(timed["Comparable"] == "yes") & timed["Not judged"].isna()]
    marked = 0
    for _, rows in compared.groupby("Workload"):
        for _, row in rows.iterrows():
            competitors = rows[rows["Strategy"] != row["Strategy"]]
            is_beaten = (
                (competitors["Peak memory, GiB"] <= row["Peak memory, GiB"])
                & (competitors["Tokens/s"] >= row["Tokens/s"])
            ).any()
            assert (row["Fastest in its memory"] == "yes") == (not is_beaten), row["Strategy"]
            marked += not is_beaten
    assert 0 < marked < len(compared)
    assert set(table.loc[table["Fastest in its memory"] == "yes", "Strategy"]) <= set(compared["Strategy"])


def test_each_kind_of_collective_has_its_column() -> None:
    assert set(RING_COLUMNS) == set(traffic._KINDS)
