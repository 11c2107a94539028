"""What a user of a release sees: the losses and the first norm of every run that is another than one process's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from study.releases.causes import Cause
from study.report.records.frames import Records, steps_by_run
from study.report.records.stacks import Cell
from study.report.site.page import table_markdown

_SHOWN = 3
_HEAD = """## Losses and norms

In fp32 with four micro-steps in a step, clipped: the first three losses and the last, and the first norm that the
engine reported. Releases and strategies that agree in all of these digits are one line; of a cell that ran several
times it is the worst run. What a cause of luck does is another thing in every run.
"""


def losses(records: Records, cells: Sequence[Cell], letters: Mapping[Cause, str]) -> str:
    asked = [cell for cell in cells if cell.precision == "fp32" and cell.micro_steps > 1 and cell.max_norm]
    wrong = [cell for cell in asked if cell.verdict.kind == "different"]
    if not wrong:
        return ""
    steps = steps_by_run(records)
    right = sorted({_figures(steps[cell.single]) for cell in asked if cell.single})
    rows: list[tuple[str, ...]] = [("any", "single", *figures, "") for figures in right]
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in wrong:
        signs = "".join(letters[cause] for cause in cell.causes) or "?"
        # None is kept of a run whose first loss is NaN.
        taken = steps.get(cell.worst_run)
        figures = (cell.verdict.reason, "none") if taken is None else _figures(taken)
        groups.setdefault((*figures, signs), []).append(cell)
    for told, mine in groups.items():
        stacks = ", ".join(dict.fromkeys(cell.stack for cell in mine))
        rows.append((stacks, ", ".join(dict.fromkeys(cell.strategy for cell in mine)), *told))
    table = pd.DataFrame(rows, columns=["Stack", "Strategy", "Losses", "First norm", "Cause"])
    return f"{_HEAD}\n{table_markdown(table)}"


def _figures(steps: pd.DataFrame) -> tuple[str, str]:
    values = steps["loss"].tolist()
    shown = [*map(_short, values[:_SHOWN]), *(["..."] if len(values) > _SHOWN + 1 else []), _short(values[-1])]
    norm = steps["grad_norm"].iloc[0]
    return ", ".join(shown), "not reported" if pd.isna(norm) else f"{norm:.4g}"


def _short(loss: float) -> str:
    return "NaN" if math.isnan(loss) else f"{loss:.6g}"
