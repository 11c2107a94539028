"""The terminal of a launched process: its progress, refusals and exit status. All other output is logged.

Libraries print from Python, from C++ and from threads; only a redirect of the file descriptors catches all of it.
All their output goes to the run's log.txt, and the terminal shows the progress bar and one line per event.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm


class Console:
    """The real terminal of one process, whose stdout and stderr go to a log meanwhile."""

    def __init__(self, speaks: bool):
        self.speaks = speaks
        self._stdout_fd, self._stderr_fd = os.dup(1), os.dup(2)
        self.terminal: TextIO = os.fdopen(self._stderr_fd, "w", buffering=1, closefd=False)
        self.log_path: Path | None = None
        # Until the run directory exists output waits in a nameless file: a refused request leaves nothing behind.
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._redirect(self._spool.fileno(), self._spool.fileno())

    def _redirect(self, stdout_fd: int, stderr_fd: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)

    def log_to(self, path: Path) -> None:
        """Append the output so far to `path`, and redirect the rest there."""
        # The streams' buffers belong to the spool, and would be lost with it.
        sys.stdout.flush()
        sys.stderr.flush()
        with path.open("ab") as log:
            self._spool.seek(0)
            shutil.copyfileobj(self._spool, log)
            log.flush()
            self._redirect(log.fileno(), log.fileno())
        self.log_path = path

    def say(self, text: str) -> None:
        """Print one line on the terminal, from the one process that speaks."""
        if self.speaks:
            self.shout(text)

    def shout(self, text: str) -> None:
        """Print one line on the terminal, from any process."""
        # After `| head -1`, or in a closed terminal, a write fails: the run continues, and its record is written.
        with contextlib.suppress(OSError):
            print(text, file=self.terminal)

    def progress(self, total_steps: int, first_step: int) -> StepProgress:
        return StepProgress(self, total_steps, first_step)

    def restore(self) -> None:
        self._redirect(self._stdout_fd, self._stderr_fd)


class StepProgress:
    """The bar on a terminal; where there is none, a line every tenth of the run."""

    def __init__(self, console: Console, total_steps: int, first_step: int):
        self._console, self._total, self._last_tenth = console, total_steps, 0
        self._bar: Any = None
        if console.speaks and console.terminal.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, file=console.terminal, unit="step", leave=False)

    def show(self, step: int, loss: float | None, tokens_per_s: float | None, peak_memory_gib: float) -> None:
        speed = "" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s, "
        figures = f"loss {'?' if loss is None else f'{loss:.4f}'}, {speed}peak {peak_memory_gib:.2f} GiB"
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_postfix_str(figures, refresh=False)
                self._bar.update(step - self._bar.n)
        elif (tenth := step * 10 // self._total) > self._last_tenth:
            self._last_tenth = tenth
            self._console.say(f"step {step}/{self._total}: {figures}")

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


def exit_status_of(main: Callable[[], int]) -> int:
    """Return the status for `os._exit`, all output flushed; a refused request is a status like any other."""
    interruptions = []

    def interrupt(number: int, frame: object) -> None:
        interruptions.append(number)
        raise KeyboardInterrupt

    # Where a shell has it ignored it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        # There is no record yet. An import that was interrupted may end in any error.
        if not interruptions:
            raise
        print("interrupted: stopped from the keyboard. To go on: run it again.", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
