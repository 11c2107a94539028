"""What a suite that is made of slices has still to measure, as it stood when its report was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from study.launch.cell import Cell
from study.report.records.workloads import word_for
from study.sweep.notes import left_to_run
from study.sweep.search import Search, cell_states, example_of
from study.sweep.slices import Plan


class Remaining(NamedTuple):
    """One slice: what was planned, how it ended as far as it ran, and the rest by what tells its cells apart."""

    suite: str
    only: str
    planned: int
    ok: int
    # Out of memory, failed, refused by the box: a row of the report each, and an answer.
    other: int
    seconds: float
    left: Sequence[str]


def remaining_of(plan: Plan) -> tuple[Remaining, ...]:
    found = []
    names = {part.suite.name: _names([cell for each in plan.slices if each.root == part.root for cell in each.cells])
             for part in plan.slices}  # fmt: skip
    for part in plan.slices:
        states = [record.state for _, record in cell_states(part.cells, part.root)]
        ok, to_do = states.count("ok"), states.count("to do")
        left = list(left_to_run(part.cells, part.root))
        found.append(
            Remaining(
                suite=part.suite.name,
                only=" ".join(part.only),
                planned=len(part.cells),
                ok=ok,
                other=len(states) - ok - to_do,
                seconds=sum(seconds for _, seconds in left),
                left=tuple(names[part.suite.name][cell.id] for cell, _ in left),
            )
        )
    return tuple(found)


def _names(cells: Sequence[Cell | Search]) -> dict[str, str]:
    """By id, the strategy and whatever differs among the cells of one suite."""
    settings = {cell.id: _settings(cell) for cell in cells}
    differing = {
        key for each in settings.values() for key in each
        if len({str(other.get(key)) for other in settings.values()}) > 1
    }  # fmt: skip
    return {
        name: ", ".join(
            [
                each["arm"],
                *(word_for(key, value) for key, value in each.items() if key in differing - {"arm"} and value),
            ]
        )
        for name, each in settings.items()
    }


def _settings(cell: Cell | Search) -> dict[str, Any]:
    one = example_of(cell)
    return {"arm": one.arm, **one.config.to_dict(), "repeat": one.repeat}
