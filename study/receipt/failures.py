"""Failures inside a receipt, which are caught and listed: a receipt never ends a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from study.config.errors import first_line, replace_unprintable

_MAX_FAILURES = 20


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

    def note(self, doing: str, error: BaseException) -> None:
        text = replace_unprintable(f"{doing}: {type(error).__name__}: {first_line(error)}"[:300])
        if text not in self.texts and len(self.texts) < _MAX_FAILURES:
            self.texts.append(text)


def print_notice(text: str) -> None:
    """Print one line about the receipt to standard error, apart from a program's output."""
    print(f"receipt: {text}", file=sys.stderr, flush=True)
