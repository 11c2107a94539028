"""Cells and their records as tables a person reads: a dash where nothing was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from study.host.memory import MIB
from study.records.directory import Run, read_run
from study.records.schema import RecordError
from study.sweep.cell import Cell
from study.sweep.notes import left_to_run
from study.sweep.progress import show_duration
from study.sweep.search import Search, cell_states
from study.sweep.slices import Slice
from study.sweep.verdict import CellState

_RESULT_COLUMNS = (
    "strategy", "task", "model", "world", "seed", "state", "train loss", "eval loss", "acc/ppl", "tokens/s", "step ms",
    "GPU GiB", "host GiB", "state MiB/rank", "ring MiB/step",
)  # fmt: skip
# Every other state is listed with its reason.
_NEEDS_NO_REASON = ("ok", "to do")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the command here with a status of its own."""
        raise BrokenPipeError


def print_tables(tables: Iterator[Table]) -> None:
    """Their last column is wrapped to the terminal; in a file or a pipe a row is a line."""
    console = _Console(markup=False, emoji=False, highlight=False)
    terminal_width = console.width
    for number, table in enumerate(tables):
        needed = Measurement.get(console, console.options.update(width=100_000), table)
        console.width = max(needed.minimum, terminal_width) if console.is_terminal else needed.maximum
        if number:
            console.print()
        console.print(table)


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A column of figures is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        texts = [row[place] for row in rows]
        figures = all(text == "-" or text[:1].isdigit() for text in texts)
        # Names and figures stay whole; the last column is a reason.
        whole = None if column is columns[-1] else max(map(len, [column, *texts]))
        table.add_column(column, justify="right" if figures else "left", min_width=whole)
    for row in rows:
        table.add_row(*row)
    return table


def result_tables(cells: Sequence[Cell | Search], root: Path) -> Iterator[Table]:
    """One row per cell that has a record, and per search what it has found, from the records alone."""
    if plain := [cell for cell in cells if isinstance(cell, Cell)]:
        rows = []
        for cell in plain:
            with suppress(RecordError):
                rows.append(_result_row(cell, read_run(root / cell.id)))
        rows.sort(key=lambda row: row[:5])
        yield table_of(_RESULT_COLUMNS, rows) if rows else table_of(["no cell has a record yet"], [])
    if searches := [cell for cell in cells if isinstance(cell, Search)]:
        yield _search_table(searches, root)


def status_tables(part: Slice) -> Iterator[Table]:
    """How many cells are in which state, then each that is not ok, with the reason; then the searches."""
    states = cell_states(part.cells, part.root)
    counts = Counter(record.state for _, record in states)
    yield table_of(("state", "cells"), [(state, str(count)) for state, count in sorted(counts.items())])
    if others := _with_reasons(states):
        yield table_of(("state", "cell", "reason"), sorted(others))
    if part.searches:
        yield _search_table(part.searches, part.root)


def series_tables(slices: Sequence[Slice]) -> Iterator[Table]:
    """A row per slice, in the order in which they run; then each cell that is not ok, and the searches that began."""
    rows, others = [], []
    for part in slices:
        states = cell_states(part.cells, part.root)
        left = list(left_to_run(part.cells, part.root))
        counts = Counter(record.state for _, record in states)
        rows.append(
            [part.suite.name, " ".join(part.only) or "-", str(len(part.cells)), str(counts["ok"]),
             str(counts.total() - sum(counts[state] for state in (*_NEEDS_NO_REASON, "at work"))), str(len(left)),
             show_duration(sum(seconds for _, seconds in left))]
        )  # fmt: skip
        others += [(state, part.suite.name, *rest) for state, *rest in _with_reasons(states)]
    yield table_of(("suite", "of it", "cells", "ok", "not ok", "left", "about"), rows)
    if others:
        yield table_of(("state", "suite", "cell", "reason"), sorted(others))
    for part in slices:
        if begun := [search for search in part.searches if search.states(part.root)]:
            yield _search_table(begun, part.root)


def _with_reasons(states: Sequence[tuple[Cell, CellState]]) -> list[tuple[str, ...]]:
    return [(record.state, cell.id, record.why) for cell, record in states if record.state not in _NEEDS_NO_REASON]


def _search_table(searches: Sequence[Search], root: Path) -> Table:
    rows = []
    for search in searches:
        finding = search.finding(root)
        cell = search.first
        model = "-" if search.axis == "largest_model" else cell.config.model_name
        rows.append(
            [search.axis, cell.arm, cell.config.task, model, str(cell.ranks), search.label or "-",
             finding.state, finding.what_fits.answer, str(len(finding.states)),
             finding.what_fits.why_not_more or "-"]
        )  # fmt: skip
    columns = "search", "strategy", "task", "model", "world", "under", "state", "largest", "probes", "why not more"
    return table_of(columns, sorted(rows, key=lambda row: (row[0], *row[2:4], row[5], row[1])))


def _result_row(cell: Cell, run: Run) -> list[str]:
    # A run that did not end ok may still have a summary of what it measured; it is not a result.
    summary = run.summary if run.state == "ok" else {}
    accuracy = summary.get("eval_accuracy")
    places = summary.get("state_bytes_per_rank", {}).values()
    state_bytes = [size for place in places for size in place.values() if size is not None]
    figures: list[tuple[Any, str, float]] = [
        (summary.get("train_loss_final"), "{:.4f}", 1),
        (summary.get("eval_loss_final"), "{:.4f}", 1),
        (accuracy, "{:.1%}", 1) if accuracy is not None else (summary.get("eval_perplexity"), "{:.1f}", 1),
        (summary.get("tokens_per_s"), "{:,.0f}", 1),
        (summary.get("step_time_s_median"), "{:.0f}", 1000),
        (summary.get("peak_memory_gib_device"), "{:.2f}", 1),
        (summary.get("host_peak_rss_gib"), "{:.2f}", 1),
        (sum(state_bytes) if state_bytes else None, "{:.1f}", 1 / MIB),
        (summary.get("sent_bytes_per_step"), "{:.1f}", 1 / MIB),
    ]
    texts = ["-" if value is None else form.format(value * factor) for value, form, factor in figures]
    return [
        cell.arm,
        cell.config.task,
        cell.config.model_name,
        str(cell.ranks),
        str(cell.config.seed),
        run.state,
        *texts,
    ]
