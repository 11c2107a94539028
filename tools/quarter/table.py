"""Print each record of some suites with its peaks and its step beside their prediction by this checkout.

    python tools/quarter/table.py SUITE... [--runs_dir runs] [--hardware BOX] [--csv FILE] [--all] [--rehearse]

Peaks are those of the steps: bytes allocated on the device, and the resident set of the process on the host. In
brackets: prediction over measurement, minus 1. The CSV also has cells without a record, whose predictions were made
before any measurement.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from study.config.errors import UserError
from study.host.machine import Machine
from study.predictor.hardware import to_box
from study.predictor.memory import predict_memory
from study.predictor.time import predict_time
from study.records.directory import read_json
from study.records.schema import RecordError
from study.sweep.cell import Cell
from study.sweep.forecast import Forecast
from study.sweep.plan import Slice, plan_suite

MIB = 2**20
NO_RECORD = "to do"


@dataclasses.dataclass(frozen=True)
class Row:
    """One cell with its measurements and their predictions; None is not known."""

    suite: str
    cell: str
    state: str
    allocated_mib: float | None = None
    predicted_allocated_mib: float | None = None
    host_mib: float | None = None
    predicted_host_mib: float | None = None
    step_s: float | None = None
    predicted_step_s: float | None = None
    startup_s: float | None = None
    wall_s: float | None = None
    reason: str = ""


def read_document(file: Path) -> Mapping[str, Any]:
    """Return a document of a record; empty if it is missing or damaged."""
    try:
        document: Mapping[str, Any] = read_json(file)
    except (RecordError, OSError):
        return {}
    return document


def peak_mib(memory: Mapping[str, Any], figure: str) -> float | None:
    """Return the largest peak of a step on any rank."""
    peaks = []
    for rank in memory.get("ranks", ()):
        for phase in ("first_step", "steady"):
            size_gib = rank.get("phases", {}).get(phase, {}).get(figure)
            if size_gib is not None:
                peaks.append(1024 * size_gib)
    return max(peaks, default=None)


def read_row(part: Slice, cell: Cell, forecast: Forecast) -> Row:
    """Read the record of a cell and predict its figures."""
    folder = part.root / cell.id
    status = read_document(folder / "status.json")
    summary = read_document(folder / "summary.json")
    memory = read_document(folder / "memory.json")
    attempts = read_document(folder / "sweep.json").get("attempts") or [{}]
    row = Row(
        suite=part.suite.name,
        cell=cell.id,
        state=attempts[-1].get("state") or status.get("state") or NO_RECORD,
        allocated_mib=peak_mib(memory, "allocated"),
        host_mib=peak_mib(memory, "host"),
        step_s=summary.get("step_time_s_median"),
        startup_s=summary.get("startup_s"),
        wall_s=attempts[-1].get("wall_s"),
        reason=status.get("reason") or "",
    )
    request = forecast.request(cell)
    if request is None:
        return row
    use = predict_memory(request)
    # Communication of a virtual rank takes no time, so its step has no prediction.
    step_s = None if cell.config.virtual_world_size else predict_time(request).step_s.value
    return dataclasses.replace(
        row,
        predicted_allocated_mib=use.peak_allocated.value / MIB,
        predicted_host_mib=use.host_peak.value / MIB,
        predicted_step_s=step_s,
    )


def read_rows(slices: Iterable[Slice], forecast: Forecast) -> Iterator[Row]:
    """Yield the rows of all cells, also of the probes of a search; each cell once."""
    seen = set()
    for part in slices:
        for item in part.cells:
            cells = [item] if isinstance(item, Cell) else [item.probe_at(place) for place in item.states(part.root)]
            for cell in cells:
                key = (part.suite.name, cell.id)
                if key not in seen:
                    seen.add(key)
                    yield read_row(part, cell, forecast)


def beside_prediction(measured: float | None, predicted: float | None, digits: str) -> str:
    """Return a measurement with the error of its prediction."""
    if measured is None:
        return "-" if predicted is None else f"- ({predicted:{digits}} predicted)"
    if not measured or predicted is None:
        return f"{measured:{digits}}"
    return f"{measured:{digits}} ({predicted / measured - 1:+.1%})"


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    print(f"{'suite':18} {'cell':54} {'state':11} {'allocated MiB':18} {'host MiB':18} {'step s':18} start wall")
    for row in rows:
        figures = (
            beside_prediction(row.allocated_mib, row.predicted_allocated_mib, ".0f"),
            beside_prediction(row.host_mib, row.predicted_host_mib, ".0f"),
            beside_prediction(row.step_s, row.predicted_step_s, ".4f"),
        )
        times = " ".join("    -" if seconds is None else f"{seconds:5.0f}" for seconds in (row.startup_s, row.wall_s))
        cells = " ".join(f"{text:18}" for text in figures)
        print(f"{row.suite[:18]:18} {row.cell[-54:]:54} {row.state:11} {cells} {times} {row.reason[:80]}".rstrip())


def main() -> int:
    """Print the table; return 2 if a suite cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("suites", nargs="+", metavar="SUITE")
    add("--runs_dir", type=Path, default=Path("runs"), metavar="DIR")
    hardware_help = "predict for H100, A100-80, ...; default: this machine with a GPU, else H100"
    add("--hardware", default="this" if torch.cuda.is_available() else "H100", metavar="BOX", help=hardware_help)
    add("--host_memory_gib", type=float, default=128.0, metavar="GIB")
    add("--csv", type=Path, metavar="FILE")
    add("--all", action="store_true", help="print cells without a record, too")
    add("--rehearse", action="store_true", help="the cells of rehearsals")
    options = parser.parse_args()
    try:
        hardware = to_box(options.hardware)
        box = Machine((hardware.device.memory_gib or 0.0,), options.host_memory_gib)
        plans = [plan_suite(suite, box, options.runs_dir, rehearse=options.rehearse) for suite in options.suites]
        slices = [part for plan in plans for part in plan.slices]
        rows = list(read_rows(slices, Forecast(box, {}, hardware)))
    except UserError as refusal:
        print(f"error: {refusal.problem}. To fix it: {refusal.fix}.", file=sys.stderr)
        return 2
    if options.csv:
        names = [field.name for field in dataclasses.fields(Row)]
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)
    print_rows([row for row in rows if options.all or row.state != NO_RECORD])
    return 0


if __name__ == "__main__":
    sys.exit(main())
