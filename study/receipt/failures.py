"""Failures inside a receipt, which are caught and listed: a receipt never ends a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from study.config.errors import first_line, replace_unprintable

_MAX_FAILURES = 20
WRONG_USE = "wrong use"


class WrongUse(Exception):
    """A use of the receipt that prevents its measurement; the text has the cause and the remedy."""


class Failures:
    """Failures of one receipt, each once, in their order."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextlib.contextmanager
    def caught(self, doing: str) -> Iterator[None]:
        """Catch and note any error of the work inside, other than an interrupt."""
        try:
            yield
        except Exception as error:
            self.note(doing, error)

    def note(self, doing: str, error: BaseException) -> bool:
        """Note an error, and return whether it is a new one."""
        cause = f"{doing}: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, WrongUse):
            cause = f"{WRONG_USE}: {error}"
        text = replace_unprintable(cause[:300])
        if text in self.texts or len(self.texts) >= _MAX_FAILURES:
            return False
        self.texts.append(text)
        return True


def print_notice(text: str) -> None:
    """Print one line about the receipt to standard error, apart from a program's output."""
    print(f"receipt: {text}", file=sys.stderr, flush=True)
