"""Tables of cells and their records, with a dash for missing measurements."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.config.printing import TextTable
from study.config.text import format_duration
from study.host.memory import MIB
from study.records import directory, schema
from study.records.outcome import SliceProgress
from study.sweep import cell_outcome, forecast
from study.sweep.cell import Cell
from study.sweep.plan import Plan, Slice
from study.sweep.search import Search, cell_states, representative_cell

_RESULT_COLUMNS = (
    "strategy",
    "task",
    "model",
    "world",
    "seed",
    "state",
    "train loss",
    "eval loss",
    "acc/ppl",
    "tokens/s",
    "step ms",
    "GPU GiB",
    "host GiB",
    "state MiB/rank",
    "ring MiB/step",
)
# Columns that only --details shows: the others fit into 120 columns, and _MAX_ROWS rows into a screen.
_DETAILS = {"train loss", "host GiB", "state MiB/rank", "ring MiB/step"}
_MAX_ROWS = 18
# Lines of a further table besides its rows, and columns of a line.
_LINES_OF_A_TABLE, _WIDTH = 3, 120
# Cells in other states are listed with their reasons.
_NEEDS_NO_REASON = ("ok", "to do")


def result_tables(cells: Sequence[Cell | Search], root: Path, details: bool) -> Iterator[str | TextTable]:
    """Yield a table with a row per cell that has a record, and one of the searches; by default they fit a screen."""
    if plain := [cell for cell in cells if isinstance(cell, Cell)]:
        rows = []
        for cell in plain:
            with suppress(schema.RecordError):
                rows.append(_result_row(cell, cell_outcome.read_record(root / cell.id)))
        rows.sort(key=lambda row: row[:5])
        visible = rows if details else rows[:_MAX_ROWS]
        places = [
            place
            for place, column in enumerate(_RESULT_COLUMNS)
            if details or (column not in _DETAILS and any(row[place] != "-" for row in visible))
        ]
        if visible:
            columns = [_RESULT_COLUMNS[place] for place in places]
            yield TextTable(columns, [[row[place] for place in places] for row in visible])
        if len(visible) < len(rows):
            yield f"and {len(rows) - len(visible)} more; --details prints all of them with memory and communication"
    if searches := [cell for cell in cells if isinstance(cell, Search)]:
        yield from fit_screen([_search_table(searches, root)], details)


def fit_screen(tables: Sequence[TextTable], details: bool) -> Iterator[str | TextTable]:
    """Yield the tables, with details completely, else the first rows of each, so that a screen of 25 lines has all.

    The reasons in the last column are cut if they have no room for a second line.
    """
    is_full = 2 * sum(len(table.rows) for table in tables) > _MAX_ROWS
    unused_rows, row_counts = _MAX_ROWS - _LINES_OF_A_TABLE * (len(tables) - 1), [0] * len(tables)
    for count, place in enumerate(sorted(range(len(tables)), key=lambda place: len(tables[place].rows))):
        row_counts[place] = min(len(tables[place].rows), unused_rows // (len(tables) - count))
        unused_rows -= row_counts[place]
    for table, most in zip(tables, row_counts, strict=True):
        rows = table.rows if details else table.rows[:most]
        if is_full and not details:
            widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
            room = max(_WIDTH - sum(width + 2 for width in widths[:-1]), 20)
            rows = [[*row[:-1], row[-1] if len(row[-1]) <= room else f"{row[-1][: room - 3]}..."] for row in rows]
        yield dataclasses.replace(table, rows=rows)
        if len(rows) < len(table.rows):
            more = f"and {len(table.rows) - len(rows)} more; --details prints all"
            yield more if table is tables[-1] else f"{more}\n"


def status_verdict(plan: Plan, options: argparse.Namespace, lack: str = "") -> str:
    """Return one line with the number of finished cells, the states of the others, and the next command or `lack`."""
    place = [] if options.runs_dir == Path("runs") else ["--runs_dir", str(options.runs_dir)]
    only = [word for pattern in options.only for word in ("--only", pattern)]
    counts = Counter(record.state for part in plan.slices for _, record in cell_states(part.cells, part.root))
    remaining_s = [seconds for part in plan.slices for _, seconds in forecast.pending_items(part.cells, part.root)]
    done, _ = counts.pop("ok", 0), counts.pop("to do", 0)
    other_states = "".join(f", {count} {state}" for state, count in counts.most_common())
    has_searches = any(part.searches for part in plan.slices)
    if not counts and not any(part.root.is_dir() for part in plan.slices):
        other_states = f" (there is no folder {plan.slices[0].root})"
    cells = f"{done} runs" if has_searches else f"{done} of {sum(len(part.cells) for part in plan.slices)} cells"
    retry = "; after a fix, study run --retry runs those again" * bool(counts and not remaining_s)
    following = f"next: study report {shlex.join([plan.name if options.rehearse else options.suite, *place])}"
    if remaining_s:
        run_flags = shlex.join([options.suite, *place, *only, *["--rehearse"] * options.rehearse])
        remaining = f"about {format_duration(sum(remaining_s))} left; " * (sum(remaining_s) > 0)
        following = remaining + (f"cannot run here: {lack}" if lack else f"next: study run {run_flags}")
    return f"{plan.name}: {cells} done{other_states}; {following}{retry}"


def status_tables(plan: Plan) -> Iterator[TextTable]:
    """Yield tables of a series' slices in running order, of the cells that are not ok, and of the searches."""
    rows = [
        [
            part.suite,
            part.only or "-",
            *map(str, (part.planned, part.ok, part.other, len(part.left))),
            format_duration(part.seconds),
        ]
        for part in map(_progress, plan.slices if plan.is_series else ())
    ]
    if len(rows) > _MAX_ROWS:
        rows.sort(key=lambda row: row[5] == "0")
    if rows:
        yield TextTable(("suite", "part", "cells", "ok", "not ok", "left", "time left"), rows)
    reasons = [
        (record.state, *[part.suite.name] * plan.is_series, cell.id, record.why)
        for part in plan.slices
        for cell, record in cell_states(part.cells, part.root)
        if record.state not in _NEEDS_NO_REASON
    ]
    if reasons:
        yield TextTable(("state", *["suite"] * plan.is_series, "cell", "reason"), sorted(reasons))
    for part in plan.slices:
        # Of a series, those that have begun.
        if searches := [search for search in part.searches if not plan.is_series or search.states(part.root)]:
            yield _search_table(searches, part.root)


def _progress(part: Slice) -> SliceProgress:
    counts = Counter(record.state for _, record in cell_states(part.cells, part.root))
    with_reason = counts.total() - sum(counts[state] for state in (*_NEEDS_NO_REASON, "at work"))
    pending = list(forecast.pending_items(part.cells, part.root))
    return SliceProgress(
        part.suite.name,
        " ".join(part.only),
        len(part.cells),
        counts["ok"],
        with_reason,
        sum(seconds for _, seconds in pending),
        [cell.id for cell, _ in pending],
    )


def slice_progress(plan: Plan) -> tuple[SliceProgress, ...]:
    """Return the progress of each slice of a series, for its report, with labels of the pending cells."""
    # This import needs pandas, which a sweep does not.
    from study.records.workloads import format_setting

    # A cell's label has the strategy, and the settings that differ among the cells of its suite.
    labels: dict[Path, dict[str, str]] = {}
    for root in plan.roots():
        examples = {
            cell.id: representative_cell(cell) for part in plan.slices if part.root == root for cell in part.cells
        }
        settings = {id: {**example.config.to_dict(), "repeat": example.repeat} for id, example in examples.items()}
        first = next(iter(settings.values()))
        varying = {key for key in first if len({str(values[key]) for values in settings.values()}) > 1}
        labels[root] = {
            id: ", ".join(
                [
                    examples[id].arm,
                    *(format_setting(key, value) for key, value in values.items() if key in varying and value),
                ]
            )
            for id, values in settings.items()
        }
    parts = [(labels[part.root], _progress(part)) for part in plan.slices]
    return tuple(progress._replace(left=[names[id] for id in progress.left]) for names, progress in parts)


def _search_table(searches: Sequence[Search], root: Path) -> TextTable:
    rows = []
    for search in searches:
        result, cell = search.what_fits(root), search.first
        model = "-" if search.axis == "largest_model" else cell.config.model_name
        rows.append(
            [
                search.axis,
                cell.arm,
                cell.config.task,
                model,
                str(cell.ranks),
                search.label or "-",
                result.state,
                result.answer,
                str(len(result.states)),
                result.limiting_reason or "-",
            ]
        )
    columns = "search", "strategy", "task", "model", "world", "under", "state", "largest", "probes", "why not more"
    return TextTable(columns, sorted(rows, key=lambda row: (row[0], *row[2:4], row[5], row[1])))


def _result_row(cell: Cell, run: directory.Run) -> list[str]:
    # A failed run may have a summary of its measurements, which are not results.
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
    config = cell.config
    return [cell.arm, config.task, config.model_name, str(cell.ranks), str(config.seed), run.state, *texts]
