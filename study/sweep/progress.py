"""What the user sees while a sweep runs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from study.records.outcome import Ending
from study.sweep.cell import Cell


def show_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class StepTail:
    """Counts the rows of a growing steps.jsonl, reading each byte once."""

    def __init__(self, file: Path):
        self._file, self._offset, self.steps = file, 0, 0

    def read(self) -> int:
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                new = stream.read()
        except OSError:
            return self.steps
        self._offset += len(new)
        self.steps += new.count(b"\n")
        return self.steps


class SweepProgress:
    """Cells done, failed and left; the current one with its step and the time it still needs."""

    _cell: TaskID
    _step: int

    def __init__(self, cells_to_do: int, already_done: int, searches: int):
        # A search counts as one cell until it asks for a further probe.
        self._total, self._already_done, self._searches = cells_to_do, already_done, searches
        self._done = self._failed = 0
        console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._bars = Bars(
            "{task.description}", BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn(), console=console,
            transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._all = self._bars.add_task(self._counts(), total=cells_to_do)

    def __enter__(self) -> SweepProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._bars.console.print(text)

    def begin(self, cell: Cell, one_more: bool = False) -> None:
        """`one_more` is a search's further probe, which nobody had counted."""
        self._total += one_more
        self._bars.update(self._all, total=self._total, description=self._counts())
        self._cell, self._step = self._bars.add_task(f"starting  {cell.id}", total=cell.total_steps), 0
        if self._bars.disable:
            self.say(f"[{self._done + 1}/{self._total}{'+' if self._searches else ''}] {cell.id}")

    def step(self, cell: Cell, step: int) -> None:
        if step and not self._step:
            # The time left is judged by the steps alone, without the start.
            self._bars.reset(self._cell)
        if step:
            of_all = f"/{cell.total_steps}" if cell.total_steps else ""
            self._bars.update(self._cell, completed=step, description=f"step {step}{of_all}  {cell.id}")
        self._step = step

    def end(self, cell: Cell, ending: Ending, seconds: float, oom_is_an_answer: bool = False) -> None:
        self._done += 1
        self._failed += ending.state not in ("ok", "unsupported", *(["oom"] if oom_is_an_answer else []))
        self._bars.update(self._all, completed=self._done, description=self._counts())
        self._bars.remove_task(self._cell)
        why = f": {ending.why}" if ending.state != "ok" else ""
        name = "    " if self._bars.disable else f"{cell.id} "
        self.say(f"{name}{ending.state} after {show_duration(seconds)}{why}")

    def searched(self, answer: str) -> None:
        self._searches -= 1
        self.say(answer)

    def _counts(self) -> str:
        at_least = "at least " if self._searches else ""
        before = f" ({self._already_done} were done before)" if self._already_done else ""
        return f"{self._done} done, {self._failed} failed, {at_least}{self._total - self._done} left{before}"
