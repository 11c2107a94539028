"""What a suite that is made of slices has still to measure, as it stood when its report was made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from study.records.frames import Remaining
from study.records.workloads import word_for
from study.sweep.cell import Cell
from study.sweep.notes import left_to_run
from study.sweep.search import Search, cell_states, example_of
from study.sweep.slices import Plan


def remaining_of(plan: Plan) -> tuple[Remaining, ...]:
    found = []
    names = {part.root: _names([cell for each in plan.slices if each.root == part.root for cell in each.cells])
             for part in plan.slices}  # fmt: skip
    for part in plan.slices:
        states = [record.state for _, record in cell_states(part.cells, part.root)]
        ok, other = states.count("ok"), sum(state not in ("ok", "to do", "at work") for state in states)
        left = list(left_to_run(part.cells, part.root))
        seconds = sum(seconds for _, seconds in left)
        cells_left = [names[part.root][cell.id] for cell, _ in left]
        planned = len(part.cells)
        found.append(Remaining(part.suite.name, " ".join(part.only), planned, ok, other, seconds, cells_left))
    return tuple(found)


def _names(cells: Sequence[Cell | Search]) -> dict[str, str]:
    """By id, the strategy and whatever differs among the cells of one suite."""
    ones = {cell.id: example_of(cell) for cell in cells}
    settings = {name: {**one.config.to_dict(), "repeat": one.repeat} for name, one in ones.items()}
    values: defaultdict[str, set[str]] = defaultdict(set)
    for each in settings.values():
        for key, value in each.items():
            values[key].add(str(value))
    return {
        name: ", ".join([ones[name].arm, *(word_for(key, value) for key, value in each.items()
                                           if len(values[key]) > 1 and value)])
        for name, each in settings.items()
    }  # fmt: skip
