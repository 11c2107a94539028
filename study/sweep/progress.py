"""What the user sees while a sweep runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from study.launch.cell import Cell
from study.record.outcome import Ending


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


class Progress(AbstractContextManager["Progress"]):
    """Cells done, failed and left; the current one with its step and the time it still needs."""

    def __init__(self, cells_to_do: int, already_done: int, searches: int = 0, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        # How many probes a search takes shows while it goes on: each counts as one cell until it asks for more.
        self._total, self._already_done, self._searches = cells_to_do, already_done, searches
        self._done = self._failed = 0
        self._started = self._cell_started = self._first_step_at = time.monotonic()
        self._cell: Cell | None = None
        self._step, self._first_step_seen = 0, 0
        self._live: Any = None

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self, cell: Cell, one_more: bool = False) -> None:
        """`one_more` is a search's further probe, which nobody had counted."""
        self._cell, self._step, self._cell_started = cell, 0, time.monotonic()
        self._total += one_more
        if self._live is None:
            more = "+" if self._searches else ""
            self.say(f"[{self._done + 1}/{self._total}{more}] {cell.id}")

    def step(self, step: int) -> None:
        if step and not self._step:
            self._first_step_at, self._first_step_seen = time.monotonic(), step
        self._step = step

    def end(self, cell: Cell, ending: Ending, seconds: float, oom_is_an_answer: bool = False) -> None:
        self._done += 1
        self._failed += ending.state not in ("ok", "unsupported", *(["oom"] if oom_is_an_answer else []))
        self._cell = None
        why = f": {ending.reason}{f' ({ending.hint})' if ending.hint else ''}" if ending.state != "ok" else ""
        name = f"{cell.id} " if self._live is not None else "    "
        self.say(f"{name}{ending.state} after {show_duration(seconds)}{why}")

    def searched(self, answer: str) -> None:
        self._searches -= 1
        self.say(answer)

    def _render(self) -> Any:
        from rich.text import Text

        elapsed = show_duration(time.monotonic() - self._started)
        left = self._total - self._done
        line = f"{self._done} done, {self._failed} failed, {'at least ' if self._searches else ''}{left} left"
        if self._already_done:
            line += f" ({self._already_done} were done before)"
        text = Text(f"{line}, elapsed {elapsed}", style="bold")
        if self._cell is not None:
            text.append(f"\n{self._cell.id}: {self._where()}", style="not bold")
        return text

    def _where(self) -> str:
        assert self._cell is not None
        if not self._step:
            return f"starting, {show_duration(time.monotonic() - self._cell_started)}"
        total = self._cell.total_steps
        if total is None:
            return f"step {self._step}"
        text = f"step {self._step}/{total}"
        measured = self._step - self._first_step_seen
        if measured > 0:
            pace = (time.monotonic() - self._first_step_at) / measured
            text += f", {show_duration(pace * (total - self._step))} left"
        return text
