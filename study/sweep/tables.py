"""Cells and their records as text a person reads: aligned columns, a dash where nothing was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study.launch.cell import Cell
from study.launch.verdict import Standing
from study.record.directory import Run, read_run
from study.record.schema import RecordError
from study.sweep.execute import standings_of
from study.sweep.notes import left_to_run
from study.sweep.progress import show_duration
from study.sweep.search import Search
from study.sweep.slices import Slice

_MIB = 2**20
_RIGHT = {
    "world", "train loss", "eval loss", "acc/ppl", "tokens/s", "step ms", "GPU GiB", "host GiB", "state MiB/rank",
    "MiB/step", "cells", "largest", "probes", "ok", "not ok", "left", "about",
}  # fmt: skip
_RESULT_COLUMNS = (
    "strategy", "task", "model", "world", "state", "train loss", "eval loss", "acc/ppl", "tokens/s", "step ms",
    "GPU GiB", "host GiB", "state MiB/rank", "MiB/step",
)  # fmt: skip
_SEARCH_COLUMNS = (
    "search", "strategy", "task", "model", "world", "under", "state", "largest", "probes", "why not more",
)  # fmt: skip
_SERIES_COLUMNS = ("suite", "of it", "cells", "ok", "not ok", "left", "about")
# Every other state has a reason, and is told.
_SPEAKS_FOR_ITSELF = ("ok", "to do")


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column in _RIGHT else text.ljust(width)
            for column, text, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def result_table(cells: Sequence[Cell | Search], root: Path) -> str:
    """One row per cell that has a record, and per search what it has found, from the records alone."""
    plain = [cell for cell in cells if isinstance(cell, Cell)]
    searches = [cell for cell in cells if isinstance(cell, Search)]
    tables = [_cell_table(plain, root)] if plain else []
    return "\n\n".join(tables + ([search_table(searches, root)] if searches else []))


def search_table(searches: Sequence[Search], root: Path) -> str:
    rows = []
    for search in searches:
        finding = search.finding(root)
        cell = search.first
        model = "-" if search.axis == "largest_model" else _model(cell)
        rows.append(
            [search.axis, cell.arm, cell.config.task, model, str(cell.ranks), search.label or "-",
             finding.state, finding.answer(), str(len(finding.standings)), finding.reason() or "-"]
        )  # fmt: skip
    return text_table(_SEARCH_COLUMNS, sorted(rows, key=lambda row: (row[0], *row[2:4], row[5], row[1])))


def _cell_table(cells: Sequence[Cell], root: Path) -> str:
    rows = []
    for cell in cells:
        try:
            rows.append(_result_row(cell, read_run(root / cell.id)))
        except RecordError:
            continue
    rows.sort(key=lambda row: row[:4])
    return text_table(_RESULT_COLUMNS, rows) if rows else "no cell has a record yet"


def _result_row(cell: Cell, run: Run) -> list[str]:
    # A run that did not end ok may still have a summary of what it measured; it is not a result.
    summary = run.summary if run.state == "ok" else {}
    state_bytes = [
        size
        for places in summary.get("state_bytes_per_rank", {}).values()
        for size in places.values()
        if size is not None
    ]
    accuracy, perplexity = summary.get("eval_accuracy"), summary.get("eval_perplexity")
    return [
        cell.arm,
        cell.config.task,
        _model(cell),
        str(cell.ranks),
        run.state,
        _figure(summary.get("train_loss_final"), "{:.4f}"),
        _figure(summary.get("eval_loss_final"), "{:.4f}"),
        _figure(accuracy, "{:.1%}") if accuracy is not None else _figure(perplexity, "{:.1f}"),
        _figure(summary.get("tokens_per_s"), "{:,.0f}"),
        _figure(summary.get("step_time_s_median"), "{:.0f}", 1000),
        _figure(summary.get("peak_memory_gib_device"), "{:.2f}"),
        _figure(summary.get("host_peak_rss_gib"), "{:.2f}"),
        _figure(sum(state_bytes) if state_bytes else None, "{:.1f}", 1 / _MIB),
        _figure(summary.get("comm_bytes_per_step"), "{:.1f}", 1 / _MIB),
    ]


def _model(cell: Cell) -> str:
    return cell.config.model_name_or_path.rstrip("/").rsplit("/", 1)[-1]


def _figure(value: Any, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)


def status_table(
    standings: Sequence[tuple[Cell, Standing]], searches: Sequence[Search] = (), root: Path = Path()
) -> str:
    """How many cells stand where, then each that is not ok, with the reason; then the searches."""
    counts = Counter(standing.state for _, standing in standings)
    lines = [text_table(("state", "cells"), [(state, str(count)) for state, count in sorted(counts.items())])]
    others = [
        (standing.state, cell.id, _why(standing))
        for cell, standing in standings
        if standing.state not in _SPEAKS_FOR_ITSELF
    ]
    if others:
        lines += ["", text_table(("state", "cell", "reason"), sorted(others))]
    if searches:
        lines += ["", search_table(searches, root)]
    return "\n".join(lines)


def _why(standing: Standing) -> str:
    return f"{standing.reason}{f' ({standing.hint})' if standing.hint else ''}"


def series_table(slices: Sequence[Slice]) -> str:
    """A row per slice, in the order in which they run; then each cell that is not ok, and the searches that began."""
    rows, others, searches = [], [], []
    for part in slices:
        standings = standings_of(part.cells, part.root)
        left = list(left_to_run(part.cells, part.root))
        states = Counter(standing.state for _, standing in standings)
        rows.append(
            [part.suite.name, " ".join(part.only) or "-", str(len(part.cells)), str(states["ok"]),
             str(states.total() - sum(states[state] for state in _SPEAKS_FOR_ITSELF)), str(len(left)),
             show_duration(sum(seconds for _, seconds in left))]
        )  # fmt: skip
        others += [
            (standing.state, part.suite.name, cell.id, _why(standing))
            for cell, standing in standings
            if standing.state not in _SPEAKS_FOR_ITSELF
        ]
        if begun := [search for search in part.searches if search.standings(part.root)]:
            searches.append(search_table(begun, part.root))
    tables = [text_table(_SERIES_COLUMNS, rows)]
    if others:
        tables.append(text_table(("state", "suite", "cell", "reason"), sorted(others)))
    return "\n\n".join([*tables, *searches])
