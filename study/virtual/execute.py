"""Start one virtual rank, and wait for its record."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from study.errors import CannotBeHeld, Unsupported, UserError
from study.launch.cell import Cell
from study.launch.process import CellProcess, clean_environment, launch_command
from study.record.directory import Run, is_finished, read_json, read_run, read_status


class VirtualRunFailed(Exception):
    """A rank that started and did not finish: its state, and why."""

    def __init__(self, state: str, reason: str, hint: str):
        self.state, self.reason, self.hint = state, reason, hint
        super().__init__(f"{state}: {reason}")


def run_rank(cell: Cell, root: Path) -> Run:
    """The record of one virtual rank, made anew; raises UserError where it is refused."""
    directory = root / cell.id
    again = ["--overwrite_output_dir"] if (directory / "status.json").exists() else []
    began = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        refusal_file = Path(scratch) / "refusal.json"
        command = launch_command(cell, directory, *again)
        process = CellProcess.start(command, clean_environment(root, refusal_file))
        try:
            while process.wait(1.0) is None:
                if time.time() - began > cell.time_limit_s:
                    raise VirtualRunFailed("timeout", f"no end within {cell.time_limit_s:.0f} s", "use a smaller model")
        finally:
            process.end()
            printed = process.collect()
        if refusal_file.exists():
            raise _refusal(refusal_file)
    if (directory / "status.json").exists() and (directory / "status.json").stat().st_mtime >= began:
        if is_finished(directory):
            return read_run(directory)
        status = read_status(directory)
        if status["ended_at"] is not None:
            raise VirtualRunFailed(status["state"], status["reason"], status["hint"])
    # Nobody wrote an end: a kernel that ran out of memory gives no time to.
    last = (printed.strip().splitlines() or ["it said nothing"])[-1]
    raise VirtualRunFailed("failed", f"the process was ended from outside ({last[:200]})", _EXTRAPOLATE)


_EXTRAPOLATE = "if its memory ran out, extrapolate over layers: --layers-fit A,B,C"


def _refusal(file: Path) -> UserError:
    said = read_json(file)
    if "layers_that_fit" in said:
        return CannotBeHeld(said["problem"], said["fix"], said["layers_that_fit"])
    kind = Unsupported if said["kind"] == "Unsupported" else UserError
    return kind(said["problem"], said["fix"])
