"""What reaches the user's terminal, and what goes to the log instead.

Libraries print from Python, from C++ and from threads; only a redirect of the file descriptors catches all of it.
Everything they say is kept in the run's log.txt, and the terminal shows the progress bar and one line per event.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm


class Console:
    """Holds the real terminal of one process while its stdout and stderr go to a log."""

    def __init__(self, speaks: bool):
        self.speaks = speaks
        sys.stdout.flush()
        sys.stderr.flush()
        self._stdout_fd, self._stderr_fd = os.dup(1), os.dup(2)
        self.terminal: TextIO = os.fdopen(self._stderr_fd, "w", buffering=1, closefd=False)
        self.log_path: Path | None = None
        # Until the run directory exists the noise waits in a nameless file: a refused request leaves nothing behind.
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._point_at(self._spool.fileno())

    def _point_at(self, descriptor: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)

    def log_to(self, path: Path) -> None:
        """Move what has been said so far to the end of `path`, and send the rest there."""
        # What the streams still hold belongs to the spool, and would be lost with it.
        sys.stdout.flush()
        sys.stderr.flush()
        with path.open("ab") as log:
            self._spool.seek(0)
            shutil.copyfileobj(self._spool, log)
            log.flush()
            self._point_at(log.fileno())
        self.log_path = path

    def say(self, text: str) -> None:
        """One line on the terminal, from the one process that speaks."""
        if self.speaks:
            self.shout(text)

    def shout(self, text: str) -> None:
        """One line on the terminal from a process that has to be heard, whichever it is."""
        # `| head -1`, or a terminal that was closed: nobody reads any more, and the run goes on. Its record tells.
        with contextlib.suppress(OSError):
            print(text, file=self.terminal)

    def progress(self, total_steps: int, first_step: int) -> StepProgress:
        return StepProgress(self, total_steps, first_step)

    def restore(self) -> None:
        self._point_at(self._stderr_fd)
        os.dup2(self._stdout_fd, 1)


class StepProgress:
    """The bar on a terminal; where there is none, a line every tenth of the run."""

    def __init__(self, console: Console, total_steps: int, first_step: int):
        self._console, self._total = console, total_steps
        self._last_tenth = 0
        self._bar: Any = None
        if console.speaks and console.terminal.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, file=console.terminal, unit="step", leave=False)

    def show(self, step: int, loss: float | None, tokens_per_s: float | None, peak_memory_gib: float) -> None:
        parts = [f"loss {loss:.4f}" if loss is not None else "loss ?"]
        if tokens_per_s is not None:
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
        parts.append(f"peak {peak_memory_gib:.2f} GiB")
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_postfix_str(", ".join(parts), refresh=False)
                self._bar.update(step - self._bar.n)
        elif (tenth := step * 10 // self._total) > self._last_tenth:
            self._last_tenth = tenth
            self._console.say(f"step {step}/{self._total}: {', '.join(parts)}")

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
