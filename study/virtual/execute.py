"""Start one virtual rank, and wait for its record."""

from __future__ import annotations

from pathlib import Path

from study.launch.cell import Cell
from study.launch.run import run_cell
from study.record.directory import Run, read_run
from study.record.folder import take_folder

_EXTRAPOLATE = "extrapolate over layers: --layers-fit A,B,C"


class VirtualRunFailed(Exception):
    """A rank that started and did not finish: its state, and why."""

    def __init__(self, state: str, reason: str, hint: str):
        self.state, self.reason, self.hint = state, reason, hint
        super().__init__(f"{state}: {reason}")


def run_rank(cell: Cell, root: Path) -> Run:
    """The record of one virtual rank, made anew; raises UserError where it is refused."""
    ended = run_cell(cell, root)
    if ended.evidence.refusal is not None:
        raise ended.evidence.refusal
    directory, ending = root / cell.id, ended.ending
    with take_folder(directory, str(directory)):
        ended.write_end(directory)
    if ended.was_stopped:
        raise KeyboardInterrupt
    if ending.state != "ok":
        raise VirtualRunFailed(ending.state, ending.reason, _EXTRAPOLATE if ending.state == "oom" else ending.hint)
    return read_run(directory)
