"""Cells and their records as text a person reads: aligned columns, a dash where nothing was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study.records import RecordError, Run, read_run
from study.sweep.outcome import Standing
from study.sweep.plan import Cell

_MIB = 2**20
_RIGHT = {
    "world", "train loss", "eval loss", "acc/ppl", "tokens/s", "step ms", "GPU GiB", "host GiB", "state MiB/rank",
    "MiB/step", "cells",
}  # fmt: skip
_RESULT_COLUMNS = (
    "strategy", "task", "model", "world", "state", "train loss", "eval loss", "acc/ppl", "tokens/s", "step ms",
    "GPU GiB", "host GiB", "state MiB/rank", "MiB/step",
)  # fmt: skip


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


def result_table(cells: Sequence[Cell], root: Path) -> str:
    """One row per cell that has a record, from the records alone."""
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
        cell.strategy,
        cell.config.task,
        cell.config.model_name_or_path.rstrip("/").rsplit("/", 1)[-1],
        str(cell.world_size),
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


def _figure(value: Any, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)


def status_table(standings: Sequence[tuple[Cell, Standing]]) -> str:
    """How many cells stand where, then each that is not ok, with the reason."""
    counts = Counter(standing.state for _, standing in standings)
    lines = [text_table(("state", "cells"), [(state, str(count)) for state, count in sorted(counts.items())])]
    others = [
        (standing.state, cell.id, f"{standing.reason}{f' ({standing.hint})' if standing.hint else ''}")
        for cell, standing in standings
        if standing.state not in ("ok", "to do")
    ]
    if others:
        lines += ["", text_table(("state", "cell", "reason"), sorted(others))]
    return "\n".join(lines)
