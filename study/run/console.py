"""The terminal of a launched process: its progress, errors and exit status. All other output is logged.

Libraries print from Python, from C++ and from threads; only a redirect of the file descriptors catches all of it.
Their output goes to the run's log.txt, and the terminal shows the progress bar and one line per event.
"""

from __future__ import annotations

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
    """The terminal of one process, whose stdout and stderr are redirected to a log."""

    def __init__(self, speaks: bool):
        self.speaks = speaks
        self._stdout_fd, self._stderr_fd = os.dup(1), os.dup(2)
        self.terminal: TextIO = os.fdopen(self._stderr_fd, "w", buffering=1, closefd=False)
        self.log_path: Path | None = None
        # Until the run directory exists output goes to an unnamed file, so that a wrong request leaves no file.
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._redirect(self._spool.fileno(), self._spool.fileno())

    def _redirect(self, stdout_fd: int, stderr_fd: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)

    def log_to(self, path: Path) -> None:
        # The streams' buffers belong to the spool and would be lost with it.
        sys.stdout.flush()
        sys.stderr.flush()
        with path.open("ab") as log:
            self._spool.seek(0)
            shutil.copyfileobj(self._spool, log)
            log.flush()
            self._redirect(log.fileno(), log.fileno())
        self.log_path = path

    def print_from_main(self, text: str) -> None:
        if self.speaks:
            self.print_from_any_rank(text)

    def print_from_any_rank(self, text: str) -> None:
        print(text, file=self.terminal)

    def progress(self, total_steps: int, first_step: int) -> StepProgress:
        return StepProgress(self, total_steps, first_step)

    def restore(self) -> None:
        self._redirect(self._stdout_fd, self._stderr_fd)


class StepProgress:
    """Progress bar of a run; without a terminal, one line for every tenth of the run."""

    def __init__(self, console: Console, total_steps: int, first_step: int):
        self._console, self._total, self._last_tenth = console, total_steps, 0
        self._bar: Any = None
        if console.speaks and console.terminal.isatty():
            self._bar = tqdm(total=total_steps, initial=first_step, file=console.terminal, unit="step", leave=False)

    def show(self, step: int, loss: float | None, tokens_per_s: float | None, peak_memory_gib: float) -> None:
        speed = "" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s, "
        figures = f"loss {'?' if loss is None else f'{loss:.4f}'}, {speed}peak {peak_memory_gib:.2f} GiB"
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._bar.n)
        elif (tenth := step * 10 // self._total) > self._last_tenth:
            self._last_tenth = tenth
            self._console.print_from_main(f"step {step}/{self._total}: {figures}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def run_for_exit_status(main: Callable[[], int]) -> int:
    """Run `main`, flush all output and return the exit status for `os._exit`, also after SystemExit or Ctrl-C."""
    interruptions = []

    def interrupt(number: int, frame: object) -> None:
        interruptions.append(number)
        raise KeyboardInterrupt

    # If the shell ignores SIGINT, it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        # There is no record yet. An interrupted import may raise any error.
        if not interruptions:
            raise
        print("interrupted: stopped from the keyboard. To continue: run it again.", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
