"""`study why`: the cause and the remedy of an error message, or of those in a log."""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import heapq
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from study.advisor.full_gpu import FullGpu, names_several_gpus, read_full_gpu
from study.advisor.full_gpu_moment import find_moment
from study.config.errors import UserError, first_line, replace_unprintable
from study.config.printing import print_result
from study.config.yaml_sections import load_package_yaml
from study.host.folders import resolve_path

EPILOG = """\
A log may be of any length: its last 20 MB are read. Each message that is known is printed once, the first in the log
first, since later ones are often its consequences. Messages that only report another process's error come last. Before
all comes the first error of the log, if it is not known and none of these.
Warnings that healthy runs print, too, are known in a text of at most ten lines, or if a log has no other message.
Exit status 3: no message is known.
"""
# The end of a longer log has the error.
_MAX_LOG_BYTES = 20_000_000
NOT_KNOWN = 3
# Of a GPU that is out of memory, and of the traceback before.
_MAX_MESSAGE_BYTES = 20_000
_MAX_FRAMES_BYTES = 100_000
# A longer text is a log.
_MAX_ASKED_LINES = 10
# Letters of a message in one line.
_MAX_SHOWN = 160
_ANY = b"..."
_NUMBER = re.compile(rb"(\d|nan)$")
_TRACEBACK = b"Traceback (most recent call last):"
# Between two tracebacks of one error.
_CHAINED = (b"The above exception was the direct cause", b"During handling of the above exception")
_ERROR = re.compile(rb"[\w.]*(Error|Exception|Exit|Interrupt|Iteration|Timeout|Expired|Failure)\b(:|$)")
# Launchers name the process that failed, not its error.
_LAUNCHER = re.compile("ChildFailedError|CalledProcessError")
# Lines of one traceback. Those of a recursion are thousands.
_MAX_TRACEBACK_LINES = 10_000
_MAX_TRACEBACK_BYTES = 2_000_000
# Lines of other ranks after the first line of a traceback.
_MAX_OTHERS = 100
# Each rank prints one of a launcher or of a lost connection.
_MAX_TRACEBACKS = 64
# Names of ranks and processes, and the times and files of loggers, before an error.
_PREFIX = re.compile(
    rb"(\[rank\d+\]:|\d+: |\([\w .=-]+\)|(ERROR|CRITICAL)\b[-\d :,.]*|[-\d :,.]{10,}|\[[\w.]+:\d+\]|E\d{4} [^\]\n]*\])"
    rb"\s*"
)
# Of an error that has no traceback before it, or one of a notebook.
_NAMES = (b"Error: ", b"Exception: ")
_MAX_NAMES = 100
_MAX_NAMED_LINES = 20_000


@dataclasses.dataclass(frozen=True)
class Message:
    """One entry of messages.yaml."""

    id: str
    # Words that find it; " ... " stands for any others of the same line.
    text: tuple[str, ...]
    says: str
    fix: str
    # A command of study.
    see: str = ""
    # The installed file with these words; else `place` names the library.
    file: str = ""
    place: str = ""
    # Words of a harmless line with the same text.
    unless: tuple[str, ...] = ()
    # A warning that healthy runs print, too.
    in_healthy_logs: bool = False
    # It only reports an error that another process has, or that is above it.
    is_consequence: bool = False

    @functools.cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        return tuple(map(_make_pattern, self.text))


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One text of a message in lower case, with any spaces between the words."""

    expression: re.Pattern[bytes]
    # Its longest word: most logs lack it, and a search for a word is ten times as fast.
    word: bytes

    def find(self, lower: bytes) -> list[int]:
        """Return the places of it in a text of lower case."""
        return [match.start() for match in self.expression.finditer(lower)] if self.word in lower else []


def _make_pattern(text: str) -> Pattern:
    words = text.lower().encode().split()
    parts = [re.escape(word) for word in words]
    expression = rb"\s+".join(parts).replace(rb"\s+" + re.escape(_ANY) + rb"\s+", rb"[^\n]{1,200}?")
    # -9 differs from -95, and nan from a name that begins with it.
    end = rb"(?!\w)" if _NUMBER.search(words[-1]) else b""
    return Pattern(re.compile(expression + end), max(words, key=len))


@dataclasses.dataclass(frozen=True)
class FirstError:
    """The line that ends the first traceback of a log."""

    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class FoundMessage:
    """A known message, with its first line in the text and the number of lines that have it."""

    message: Message
    line: int
    count: int
    first_text: str
    # Of a GPU that is out of memory; None if the message lacks its figures.
    memory: FullGpu | None = None

    @property
    def remedies(self) -> list[str]:
        """Return the remedies of its figures, or of the message."""
        return self.memory.remedies() if self.memory else [self.message.fix]


@functools.cache
def read_messages() -> tuple[Message, ...]:
    """Return the content of messages.yaml."""
    entries = load_package_yaml(Path(__file__).with_name("messages.yaml").read_text(encoding="utf-8"))
    return tuple(
        Message(**{**entry, "text": tuple(entry["text"]), "unless": tuple(entry.get("unless", ()))})
        for entry in entries
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="+", metavar="MESSAGE", help="an error message, a log, or - for standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")


def run(options: argparse.Namespace) -> int:
    """Print the known messages of a text; return 3 if there are none."""
    text = read_text(options.text)
    messages = find_messages(text)
    error = find_unknown_error(text, messages)
    warnings = [] if messages or error else find_messages(text, with_warnings=True)
    print_result(options.json, lambda: _document(messages, error, warnings), list(_page(messages, error, warnings)))
    return 0 if messages else NOT_KNOWN


def read_text(words: list[str]) -> str:
    """Return the text of a command line: of a file, of standard input, or the words themselves."""
    if words == ["-"]:
        return sys.stdin.read(_MAX_LOG_BYTES)
    path = resolve_path(words[0])
    if len(words) > 1 or not _is_file(path):
        if len(words) == 1 and re.fullmatch(r"\S+\.(log|txt|out|err)", words[0]):
            raise UserError(f"there is no file {words[0]}", "name a log, or give the message in quotes")
        return " ".join(words)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{words[0]} is not readable ({first_line(error)})", "name a log") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A pasted message is often longer than a file's name may be.
        return False


def find_messages(text: str, *, with_warnings: bool = False) -> list[FoundMessage]:
    """Return the known messages of a text, causes before consequences and the first one first.

    `with_warnings`: of a log, too, those that healthy runs print."""
    results = []
    data = text.encode("utf-8", errors="replace")
    # Of bytes: a pattern that ignores case takes ten times as long, and the lower case of other letters is longer.
    lower = data.lower()
    # A log may have a message ten thousand times.
    ends = [match.start() for match in re.finditer(b"\n", data)]
    is_log = len(ends) > _MAX_ASKED_LINES
    for message in read_messages():
        if is_log and message.in_healthy_logs and not with_warnings:
            continue
        places = sorted(place for pattern in message.patterns for place in pattern.find(lower))
        if message.unless:
            places = [place for place in places if not _is_harmless(message, lower, place)]
        if places:
            # Two names of one error are often in one line.
            lines = {bisect.bisect_left(ends, place) for place in places}
            first = min(lines)
            begin = ends[first - 1] + 1 if first else 0
            line = data[begin : ends[first] if first < len(ends) else None].decode()
            memory = None
            if message.id == "out-of-memory":
                before = data[max(0, begin - _MAX_FRAMES_BYTES) : begin].decode(errors="replace")
                rest = data[places[0] : places[0] + _MAX_MESSAGE_BYTES].decode(errors="replace")
                memory = _read_memory(before, line, rest, is_alone=not names_several_gpus(text))
            results.append(FoundMessage(message, first + 1, len(lines), line.strip(), memory))
    return sorted(results, key=lambda found_message: (found_message.message.is_consequence, found_message.line))


def _read_memory(before: str, line: str, rest: str, is_alone: bool) -> FullGpu | None:
    """Return the figures of a full GPU with the moment of the allocation; None if the message lacks them."""
    memory = read_full_gpu(rest)
    if memory is None:
        return None
    return dataclasses.replace(memory, is_alone=is_alone, moment=find_moment(before, line))


def _is_harmless(message: Message, lower: bytes, place: int) -> bool:
    """Whether the line of a place is harmless."""
    begin = lower.rfind(b"\n", 0, place) + 1
    end = lower.find(b"\n", place)
    line = lower[begin : end if end >= 0 else None]
    return any(words.lower().encode() in line for words in message.unless)


def find_unknown_error(text: str, messages: list[FoundMessage]) -> FirstError | None:
    """Return the line that names the first error of a text; None if there is none, or a message of it is known.

    A report of another process's error is passed over, as its cause is another line."""
    data = text.encode("utf-8", errors="replace")
    causes = [item for item in messages if not item.message.is_consequence]
    first: FirstError | None = None
    place = 0
    is_known = False
    for _ in range(_MAX_TRACEBACKS):
        start = data.find(_TRACEBACK, place)
        if start < 0 or first or is_known:
            break
        begin = data.rfind(b"\n", 0, start) + 1
        first, lines = _read_traceback(data, begin, start)
        # Tracebacks of other ranks begin among its lines.
        place = start + len(_TRACEBACK)
        # A message may also have been in the log before.
        is_known = first is not None and (
            any(lines[0] <= item.line <= lines[1] for item in causes) or bool(find_messages(first.text))
        )
    # A line without a traceback is often of a warning: it counts if no cause is known before it.
    end = min([item.line for item in causes] + ([first.line] if first else []), default=None)
    plain = _find_plain_error(data, end)
    return plain or (None if is_known else first)


def _read_traceback(data: bytes, begin: int, start: int) -> tuple[FirstError | None, tuple[int, int]]:
    """Return the error of the traceback that starts at a place, and its first and last line.

    Of a chain the last error that is not a launcher's."""
    lines = data[begin : begin + _MAX_TRACEBACK_BYTES].split(b"\n", _MAX_TRACEBACK_LINES)[:_MAX_TRACEBACK_LINES]
    # The name of the rank, which a launcher puts before each of its lines. Other ranks may print the next ones.
    rank = data[begin:start]
    if not any(line.startswith(rank) for line in lines[1:_MAX_OTHERS]):
        rank = b""
    # Other ranks print between its lines.
    rest = {index: line[len(rank) :].rstrip() for index, line in enumerate(lines) if line.startswith(rank)}
    endings, last = _find_endings({index: line for index, line in rest.items() if line})
    first = data.count(b"\n", 0, begin) + 1
    texts = {index: lines[index].decode(errors="replace").strip() for index in endings}
    errors = [FirstError(first + index, text) for index, text in texts.items() if not _is_report(text)]
    return errors[-1] if errors else None, (first, first + last)


def _is_report(text: str) -> bool:
    """Whether a line only reports the error of another process."""
    return bool(_LAUNCHER.search(text)) or any(item.message.is_consequence for item in find_messages(text))


def _find_endings(lines: dict[int, bytes]) -> tuple[list[int], int]:
    """Return the indices of the lines that name the errors of a traceback and of its chain, and of its last line."""
    endings: list[int] = []
    last = 0
    is_open = True
    is_chained = False
    for index, line in lines.items():
        if is_open:
            if _ERROR.match(line):
                endings.append(index)
                is_open = False
        elif line.startswith(_CHAINED):
            is_chained = True
        elif is_chained and line.startswith(_TRACEBACK):
            is_open, is_chained = True, False
        elif not line[:1].isspace():
            # A message of several lines indents those after the first.
            break
        last = index
    # A traceback that the log does not end: its chain's error is not there.
    return ([] if is_open else endings), last


def _find_plain_error(data: bytes, before: int | None) -> FirstError | None:
    """Return the first line outside of a traceback that names an error and is before a line; None if its message is
    known, or there is none."""
    end = len(data) if before is None else _find_line(data, before)
    traceback = data.find(_TRACEBACK, 0, end)
    end = end if traceback < 0 else traceback
    error: FirstError | None = None
    last = 0
    for begin, line in itertools.islice(_find_named_lines(data, end), _MAX_NAMES):
        # Of a chain in a notebook the last one counts.
        if error and not any(words in data[last:begin] for words in _CHAINED):
            break
        text = line.decode(errors="replace").strip()
        if not _is_report(text):
            error = FirstError(data.count(b"\n", 0, begin) + 1, text)
        last = begin
    return None if error is None or find_messages(error.text) else error


def _find_named_lines(data: bytes, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the place and the text of each line before a place that begins with the name of an error."""
    before = -1
    places = heapq.merge(*(_find_places(data, name, end) for name in _NAMES))
    for place in itertools.islice(places, _MAX_NAMED_LINES):
        begin = data.rfind(b"\n", 0, place) + 1
        if begin == before:
            continue
        before = begin
        stop = data.find(b"\n", place)
        line = rest = data[begin : stop if stop >= 0 else None]
        while prefix := _PREFIX.match(rest):
            rest = rest[prefix.end() :]
        if _ERROR.match(rest):
            yield begin, line


def _find_places(data: bytes, words: bytes, end: int) -> Iterator[int]:
    place = data.find(words, 0, end)
    while place >= 0:
        yield place
        place = data.find(words, place + 1, end)


def _find_line(data: bytes, number: int) -> int:
    """Return the place of a line's first byte."""
    place = 0
    for _ in range(number - 1):
        place = data.find(b"\n", place) + 1
    return place


def _page(messages: list[FoundMessage], error: FirstError | None, warnings: list[FoundMessage]) -> Iterator[str]:
    if error:
        yield f"first error in the log, unknown: line {error.line}: {replace_unprintable(error.text[:_MAX_SHOWN])}"
    if warnings:
        yield "nothing in this text that is known ends a run: healthy runs print these lines, too"
        yield (
            "look for the first Traceback, exitcode, return code or signal in the log of each rank; a run that hangs"
            " has none (py-spy dump --pid PID)"
        )
    elif not messages:
        yield f"no message of this text is known; {len(read_messages())} are"
        yield "the first error of any rank is the cause of those after it; study doctor checks the machine"
    for item in messages or warnings:
        where = f"line {item.line}" + (f", {item.count} times" if item.count > 1 else "")
        yield f"{where}: {replace_unprintable(item.first_text[:_MAX_SHOWN])}"
        yield f"  why: {item.message.says}"
        if item.memory:
            yield f"  of:  {item.memory.parts()}"
        for remedy in item.remedies:
            yield f"  do:  {remedy}"
        if item.message.see:
            yield f"  see: {item.message.see}"


def _document(messages: list[FoundMessage], error: FirstError | None, warnings: list[FoundMessage]) -> dict[str, Any]:
    return {
        "unknown_first_error": dataclasses.asdict(error) if error else None,
        "messages": [_message_document(item) for item in messages],
        "warnings_of_healthy_runs": [_message_document(item) for item in warnings],
    }


def _message_document(item: FoundMessage) -> dict[str, Any]:
    return {
        "id": item.message.id,
        "line": item.line,
        "count": item.count,
        "why": item.message.says,
        "do": item.remedies,
        "see": item.message.see or None,
        "full_gpu": dataclasses.asdict(item.memory) if item.memory else None,
    }
