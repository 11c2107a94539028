"""Output of the commands: tables, notes and one-line verdicts. The first table imports rich."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, TextIO

from study.config.errors import replace_unprintable

_MAX_WIDTH = 120
_SCREEN = 25
_SILENT_S = 1.0
# Blanks before the codes that end a line's style.
_BLANK_END = re.compile(r" +((?:\x1b\[[\d;]*m)+) *$")


@dataclasses.dataclass(frozen=True)
class TextTable:
    """Rows of text. Columns of numbers are aligned to the right; without column names the table has no header."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    indent: int = 0


def print_result(
    as_json: bool, document: Callable[[], object], page: Iterable[str | TextTable], details: bool = True
) -> None:
    """Print a command's result: one JSON document, or a page of verdict, tables and notes.

    Without details a page fits a terminal's screen, of 25 lines or more: its last lines matter least, and are left out.
    """
    if as_json:
        print(json.dumps(document(), indent=2))
    elif details or not sys.stdout.isatty():
        print_page(page)
    else:
        lines = "\n".join(_page_text(page, sys.stdout)).split("\n")
        screen = max(_SCREEN, shutil.get_terminal_size().lines - 1)
        if len(lines) > screen:
            lines[screen - 1 :] = [f"and {len(lines) - screen + 1} more lines; --details prints all"]
        print("\n".join(lines))


@contextlib.contextmanager
def progress_line(message: str, *, in_logs: bool = False) -> Iterator[None]:
    """Show a line on a terminal's stderr while the work takes longer than a second, in the place of an outer one.

    With `in_logs` a file or a pipe has it, too, on a separate line, once in a process.
    """
    if not sys.stderr.isatty() and (not in_logs or message in _logged):
        yield
        return
    line = _Line(message)
    timer = threading.Timer(_SILENT_S, line.show)
    timer.daemon = True
    # A browser's Python has no threads.
    with contextlib.suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        line.clear()


# Messages that a file or a pipe has.
_logged = set[str]()


@dataclasses.dataclass
class _Line:
    """A line about work in progress."""

    message: str
    # On the terminal now; the texts of lines are replaced from the first column on.
    visible_text: ClassVar[str] = ""

    def show(self) -> None:
        if sys.stderr.isatty():
            self._replace(self.message)
        else:
            _logged.add(self.message)
            print(self.message, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if _Line.visible_text == self.message:
            self._replace("")

    @staticmethod
    def _replace(text: str) -> None:
        blank = f"\r{' ' * len(_Line.visible_text)}\r" if _Line.visible_text else ""
        print(f"{blank}{text}", end="", file=sys.stderr, flush=True)
        _Line.visible_text = text


def print_page(page: Iterable[str | TextTable], file: TextIO | None = None) -> None:
    """Print lines and tables, wrapped to a terminal's width or 120 columns; to a file or a pipe, one line per row."""
    out = sys.stdout if file is None else file
    for text in _page_text(page, out):
        print(text, file=out, flush=True)


def _page_text(page: Iterable[str | TextTable], out: TextIO) -> Iterator[str]:
    """Yield each part as text for this output, with an empty line between two tables.

    Control characters, which a user's file or a library's message may have, are replaced.
    """
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) if out.isatty() else None
    last: str | TextTable = ""
    for part in page:
        if isinstance(part, TextTable) and isinstance(last, TextTable):
            yield ""
        last = part
        if isinstance(part, TextTable):
            text = _table_text(part, width, out)
        else:
            text = replace_unprintable(part)
            if width is not None:
                text = "\n".join(_wrapped(line, width) for line in text.split("\n"))
        # The output's encoding may lack characters of a table.
        encoding = out.encoding or "utf-8"
        yield text.encode(encoding, "replace").decode(encoding)


def _wrapped(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def _table_text(table: TextTable, width: int | None, out: TextIO) -> str:
    """Return a table as text. Only the last column wraps, in most tables a reason: names and numbers are not cut."""
    from rich.console import Console
    from rich.table import Table

    rows = [[replace_unprintable(text) for text in row] for row in table.rows]
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(table.columns))
    widths = [
        max(map(len, (*column.split("\n"), *(row[place] for row in rows))))
        for place, column in enumerate(table.columns)
    ]
    for place, column in enumerate(table.columns):
        texts = [row[place] for row in rows]
        is_figure = any(texts) and all(text in ("", "-", "?") or text.lstrip("-~")[:1].isdigit() for text in texts)
        is_last = place == len(widths) - 1
        grid.add_column(
            column,
            justify="right" if is_figure else "left",
            min_width=None if is_last else widths[place],
            no_wrap=not is_last,
        )
    for row in rows:
        grid.add_row(*row)
    needed = sum(widths) + 2 * len(widths)
    room = needed if width is None else max(width - table.indent, needed - widths[-1] + min(widths[-1], 20))
    console = Console(file=out, width=room, height=25, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(grid)
    # A header's blanks have its style, so that they are not the last characters.
    lines = (_BLANK_END.sub(r"\1", line) for line in capture.get().rstrip("\n").split("\n"))
    return "\n".join(f"{'':{table.indent}}{line}".rstrip() for line in lines)
