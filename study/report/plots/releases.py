"""Which releases compute what one process computes: a grid by strategy, and what a user sees of a fault."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from study.host.stacks import release_order
from study.records.frames import Records, steps_by_run
from study.records.workloads import strategy_order
from study.releases.causes import Cause, read_causes
from study.releases.stacks import ReleaseCell, release_cells
from study.report.plots.canvas import INK, QUIET, RELEASES, Drawing, drawings, finish, plain_ticks, sheet

# Cells are drawn for one clipping: what it does is in the table.
_ROW_IN, _LETTERS = 0.21, string.ascii_lowercase + string.ascii_uppercase
_MOST_CURVES = 6
KINDS = {False: "with today's Accelerate and torch", True: "with Accelerate and torch of its time"}


def clipped(cells: Iterable[ReleaseCell]) -> list[ReleaseCell]:
    """Those that clip, where any does."""
    every = list(cells)
    return [cell for cell in every if cell.max_norm] or every


def lettered(cells: Iterable[ReleaseCell]) -> dict[Cause, str]:
    """The causes that any cell has, each with the letter that stands for it in all grids."""
    seen = {cause.id for cell in cells for cause in cell.causes}
    return dict(zip((cause for cause in read_causes() if cause.id in seen), _LETTERS, strict=False))


def release_grid(records: Records) -> list[Drawing]:
    every = clipped(release_cells(records))
    letters = lettered(every)
    subjects = {
        f"{precision}, {KINDS[of_its_time]}": [
            cell for cell in every if cell.is_of_its_time == of_its_time and cell.precision == precision
        ]
        for precision, of_its_time in itertools.product(_precisions(every), (False, True))
    }
    return drawings("release_grid", [item for item in subjects.items() if item[1]],
                    lambda subject, cells: _grid(subject, cells, letters))  # fmt: skip


def _precisions(cells: Iterable[ReleaseCell]) -> list[str]:
    return sorted({cell.precision for cell in cells}, key=lambda name: (name != "fp32", name))


def _grid(subject: str, cells: Sequence[ReleaseCell], letters: dict[Cause, str]) -> Drawing:
    releases = sorted({cell.release for cell in cells}, key=release_order, reverse=True)
    strategies = sorted({cell.strategy for cell in cells}, key=strategy_order)
    steps = sorted({cell.micro_steps for cell in cells})
    figure, (axes,) = sheet(_ROW_IN * len(releases) + 0.95)
    for cell in cells:
        width = 0.94 / len(steps)
        place = strategies.index(cell.strategy) + 0.03 + width * steps.index(cell.micro_steps)
        _draw_cell(axes, cell, place, releases.index(cell.release), width, letters)
    axes.set(xlim=(0, len(strategies)), ylim=(len(releases), 0))
    axes.set_yticks([row + 0.5 for row in range(len(releases))], releases)
    axes.set_xticks([column + 0.5 for column in range(len(strategies))], strategies, rotation=40, ha="left",
                    rotation_mode="anchor")  # fmt: skip
    axes.tick_params(length=0, labelcolor=INK)
    axes.xaxis.tick_top()
    for side in axes.spines.values():
        side.set_visible(False)
    bad = [cell for cell in cells if cell.verdict.kind == "different"]
    used = {cause: letters[cause] for cell in cells for cause in cell.causes}
    halves = " and ".join(f"{count} micro-step{'s'[: count > 1]}" for count in steps)
    subtitle = f"In each cell, from the left: {halves} a step. {len(bad)} of {len(cells)} differ from one process."
    words = "; ".join(
        f"{release}: {', '.join(sorted({cell.strategy for cell in bad if cell.release == release})) or 'none'}"
        for release in releases
    )
    titles = [f"{letter}  {cause.title}" for cause, letter in used.items()]
    notes = [Patch(facecolor="none", edgecolor="none", label=title) for title in sorted(titles)]
    if any(cell.differs_sometimes for cell in cells):
        notes.append(Patch(facecolor="none", edgecolor="none", label="'  in some of its runs"))
    legend = [*_legend(cells), *notes]
    return finish(figure, "Which releases train as one process does", subject, subtitle, words, legend=legend,
                  legend_columns=1, lead=f"Releases whose training differs, {subject}")  # fmt: skip


def _draw_cell(axes: Axes, cell: ReleaseCell, left: float, row: int, width: float, letters: dict[Cause, str]) -> None:
    fill = RELEASES[_kind(cell)]
    look: Any = {"facecolor": fill.colour, "hatch": fill.hatch, "edgecolor": "white", "linewidth": 0.5}
    axes.add_patch(Rectangle((left, row + 0.06), width, 0.88, **look))
    text = "".join(letters[cause] for cause in cell.causes) or "?" * (cell.verdict.kind == "different")
    text += "'" * cell.differs_sometimes
    label = axes.text(
        left + width / 2, row + 0.52, text, ha="center", va="center", size=7.5, weight="bold", color="white"
    )
    label.set_path_effects([withStroke(linewidth=2.5, foreground=fill.colour)])


def _kind(cell: ReleaseCell) -> str:
    if cell.verdict.kind != "different":
        return "lucky" if cell.is_lucky else cell.verdict.kind
    if cell.is_mismatch:
        return "mismatch"
    return "cpu" if cell.gpu_hides_it else "different"


_WORDS = {
    "equal": "the same as one process, up to rounding",
    "lucky": "the same, and by chance: its releases have a race", "different": "another training",
    "cpu": "another training on a CPU, and not on a GPU",
    "mismatch": "another training, by a mismatch of releases",
    "refuses": "refuses", "crashes": "crashes",
    "not installable": "not installable", "not judged": "not judged",
}  # fmt: skip


def _legend(cells: Iterable[ReleaseCell]) -> list[Patch]:
    kinds = {_kind(cell) for cell in cells}
    return [
        Patch(facecolor=RELEASES[kind].colour, hatch=RELEASES[kind].hatch, edgecolor="white", label=words)
        for kind, words in _WORDS.items() if kind in kinds
    ]  # fmt: skip


def fault_curves(records: Records) -> list[Drawing]:
    """One drawing of the faults that a user would see, each beside the right curve."""
    every = clipped(release_cells(records))
    found, letters = worst_of_each_cause(every), lettered(every)
    return drawings("fault_curves", [("fp32, one run each", found)] if found else [],
                    lambda subject, cells: _curves(subject, cells, letters, steps_by_run(records)))  # fmt: skip


def worst_of_each_cause(cells: Sequence[ReleaseCell]) -> list[ReleaseCell]:
    """The largest difference in fp32 of each cause, or of each strategy where none is known."""
    found: dict[str, ReleaseCell] = {}
    for cell in cells:
        if cell.verdict.kind == "different" and cell.precision == "fp32" and cell.verdict.size:
            name = " ".join(cause.id for cause in cell.causes) or f"{cell.strategy} {cell.verdict.what}"
            if name not in found or (found[name].verdict.size or 0) < cell.verdict.size:
                found[name] = cell
    return sorted(found.values(), key=lambda cell: -(cell.verdict.size or 0))[:_MOST_CURVES]


def _curves(
    subject: str, cells: Sequence[ReleaseCell], letters: dict[Cause, str], steps: Mapping[str, pd.DataFrame]
) -> Drawing | None:
    drawn = [cell for cell in cells if cell.worst_run in steps and cell.single in steps]
    if not drawn:
        return None
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, _ = sheet(1.75 * rows)
    figure.clear()
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    for axes in grid[len(drawn) :]:
        axes.set_visible(False)
    for axes, cell in zip(grid, drawn, strict=False):
        right, wrong = steps[cell.single], steps[cell.worst_run]
        axes.plot(right["step"], right["loss"], color=INK, linewidth=1.6)
        axes.plot(
            wrong["step"], wrong["loss"], color=RELEASES["different"].colour, linewidth=1.6, linestyle=(0, (4, 1.5))
        )
        of = ", ".join(letters[cause] for cause in cell.causes)
        axes.set_title(f"{cell.release} {cell.strategy}{f' ({of})' if of else ''}", size=8.5, pad=15)
        about = f"{cell.micro_steps} micro-step{'s'[: cell.micro_steps > 1]}: {cell.verdict.what}"
        axes.text(0, 1.03, about, transform=axes.transAxes, size=8, color=QUIET)
        axes.grid(axis="y")
        plain_ticks(axes.yaxis)
    grid[0].set_ylabel("loss, nats")
    for axes in grid[len(drawn) - columns : len(drawn)]:
        axes.set_xlabel("step")
    words = "; ".join(f"{cell.release} {cell.strategy} off by {cell.verdict.size:.2g}" for cell in drawn)
    legend = [Patch(facecolor=INK, label="one process"),
              Patch(facecolor=RELEASES["different"].colour, label="this release")]  # fmt: skip
    subtitle = "The same samples and the same first weights; each run ended as if all were well."
    return finish(figure, "What a user sees of a fault", subject, subtitle, words, legend=legend)
