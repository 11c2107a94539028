"""Cells and their records as tables, with a dash where nothing was measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config.printing import TextTable
from study.config.text import format_duration
from study.host.memory import MIB
from study.records.directory import Run, read_run
from study.records.schema import RecordError
from study.sweep.cell import Cell
from study.sweep.forecast import left_to_run
from study.sweep.plan import Plan, Slice
from study.sweep.search import Search, cell_states, example_of
from study.sweep.verdict import CellState

if TYPE_CHECKING:
    from study.records.frames import Remaining

_RESULT_COLUMNS = (
    "strategy", "task", "model", "world", "seed", "state", "train loss", "eval loss", "acc/ppl", "tokens/s", "step ms",
    "GPU GiB", "host GiB", "state MiB/rank", "ring MiB/step",
)  # fmt: skip
# With --details alone: what fits into 120 columns and a screen comes without.
_DETAILS = {"train loss", "host GiB", "state MiB/rank", "ring MiB/step"}
_MAX_ROWS = 18
# Every other state is listed with its reason.
_NEEDS_NO_REASON = ("ok", "to do")


def result_tables(cells: Sequence[Cell | Search], root: Path, details: bool) -> Iterator[str | TextTable]:
    """Yield one row per cell that has a record, and the answer of each search; without details what a screen takes."""
    if plain := [cell for cell in cells if isinstance(cell, Cell)]:
        rows = []
        for cell in plain:
            with suppress(RecordError):
                rows.append(_result_row(cell, read_run(root / cell.id)))
        rows.sort(key=lambda row: row[:5])
        shown = rows if details else rows[:_MAX_ROWS]
        places = [
            place for place, column in enumerate(_RESULT_COLUMNS)
            if details or (column not in _DETAILS and any(row[place] != "-" for row in shown))
        ]  # fmt: skip
        if shown:
            columns = [_RESULT_COLUMNS[place] for place in places]
            yield TextTable(columns, [[row[place] for place in places] for row in shown])
        if len(shown) < len(rows):
            yield f"and {len(rows) - len(shown)} more; --details prints all of them with memory and communication"
    if searches := [cell for cell in cells if isinstance(cell, Search)]:
        yield _search_table(searches, root)


def status_verdict(plan: Plan, run_flags: str, report_flags: str) -> str:
    """How many cells are done, how the others ended, and the command that comes next."""
    counts = Counter(record.state for part in plan.slices for _, record in cell_states(part.cells, part.root))
    is_left = any(any(True for _ in left_to_run(part.cells, part.root)) for part in plan.slices)
    done, _ = counts.pop("ok", 0), counts.pop("to do", 0)
    others = "".join(f", {count} {state}" for state, count in counts.most_common())
    has_searches = any(part.searches for part in plan.slices)
    cells = f"{done} runs" if has_searches else f"{done} of {sum(len(part.cells) for part in plan.slices)} cells"
    retry = "; after a fix, study run --retry runs those again" * bool(counts and not is_left)
    following = f"run {run_flags}" if is_left else f"report {report_flags}"
    return f"{plan.name}: {cells} done{others}; next: study {following}{retry}"


def status_tables(part: Slice) -> Iterator[TextTable]:
    """Yield each cell that is neither ok nor to do with its reason, then the searches."""
    if others := _with_reasons(cell_states(part.cells, part.root)):
        yield TextTable(("state", "cell", "reason"), sorted(others))
    if part.searches:
        yield _search_table(part.searches, part.root)


def series_tables(slices: Sequence[Slice]) -> Iterator[TextTable]:
    """Yield a row per slice in running order; then each cell that is not ok, and the searches that began."""
    rows, others = [], []
    for part in slices:
        states = cell_states(part.cells, part.root)
        left = list(left_to_run(part.cells, part.root))
        counts = Counter(record.state for _, record in states)
        rows.append(
            [part.suite.name, " ".join(part.only) or "-", str(len(part.cells)), str(counts["ok"]),
             str(_count_not_ok(counts)), str(len(left)), format_duration(sum(seconds for _, seconds in left))]
        )  # fmt: skip
        others += [(state, part.suite.name, *rest) for state, *rest in _with_reasons(states)]
    yield TextTable(("suite", "part", "cells", "ok", "not ok", "left", "time left"), rows)
    if others:
        yield TextTable(("state", "suite", "cell", "reason"), sorted(others))
    for part in slices:
        if begun := [search for search in part.searches if search.states(part.root)]:
            yield _search_table(begun, part.root)


def remaining_of(plan: Plan) -> tuple[Remaining, ...]:
    """Return what a series has still to measure, for its report."""
    # Needs pandas, which a sweep does not.
    from study.records.frames import Remaining
    from study.records.workloads import word_for

    # A cell's name: the strategy, and the settings that differ among the cells of its suite.
    names: dict[Path, dict[str, str]] = {}
    for root in plan.roots():
        ones = {cell.id: example_of(cell) for part in plan.slices if part.root == root for cell in part.cells}
        settings = {id: {**one.config.to_dict(), "repeat": one.repeat} for id, one in ones.items()}
        values: defaultdict[str, set[str]] = defaultdict(set)
        for each in settings.values():
            for key, value in each.items():
                values[key].add(str(value))
        names[root] = {
            id: ", ".join([ones[id].arm, *(word_for(key, value) for key, value in each.items()
                                           if len(values[key]) > 1 and value)])
            for id, each in settings.items()
        }  # fmt: skip
    found = []
    for part in plan.slices:
        counts = Counter(record.state for _, record in cell_states(part.cells, part.root))
        left = list(left_to_run(part.cells, part.root))
        found.append(Remaining(
            part.suite.name, " ".join(part.only), len(part.cells), counts["ok"], _count_not_ok(counts),
            sum(seconds for _, seconds in left), [names[part.root][cell.id] for cell, _ in left],
        ))  # fmt: skip
    return tuple(found)


def _count_not_ok(counts: Counter[str]) -> int:
    return counts.total() - sum(counts[state] for state in (*_NEEDS_NO_REASON, "at work"))


def _with_reasons(states: Sequence[tuple[Cell, CellState]]) -> list[tuple[str, ...]]:
    return [(record.state, cell.id, record.why) for cell, record in states if record.state not in _NEEDS_NO_REASON]


def _search_table(searches: Sequence[Search], root: Path) -> TextTable:
    rows = []
    for search in searches:
        found, cell = search.what_fits(root), search.first
        model = "-" if search.axis == "largest_model" else cell.config.model_name
        rows.append(
            [search.axis, cell.arm, cell.config.task, model, str(cell.ranks), search.label or "-",
             found.state, found.answer, str(len(found.states)),
             found.why_not_more or "-"]
        )  # fmt: skip
    columns = "search", "strategy", "task", "model", "world", "under", "state", "largest", "probes", "why not more"
    return TextTable(columns, sorted(rows, key=lambda row: (row[0], *row[2:4], row[5], row[1])))


def _result_row(cell: Cell, run: Run) -> list[str]:
    # A run that did not end ok may have a summary of what it measured, which is not a result.
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
