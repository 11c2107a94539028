"""Errors that the commands print as one line, with a fix, and the text that goes into them."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from study.config.places import install_command

# Names the file to which a rejected run writes its reason: a launcher reports only that an exit status is not 0.
REFUSAL_FILE_VARIABLE = "ZERO_STUDY_REFUSAL_FILE"
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_MIN_SECRET_LENGTH = 6
_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxdict, _BRIEF.maxlist = 2, 4, 4
_BRIEF.maxstring, _BRIEF.maxlong, _BRIEF.maxother = 100, 60, 60


def clip(value: object) -> str:
    """Return a short repr of a value, for a message: a few lines of YAML with aliases can be gigabytes of text."""
    return _BRIEF.repr(value)


class UserError(Exception):
    """A request that fails, printed without a traceback: the problem with its place, and the fix, a line each."""

    # Arguments of the constructor, for an error that another process raises.
    in_json: ClassVar[tuple[str, ...]] = ("problem", "fix")

    def __init__(self, problem: str, fix: str):
        self.problem = _in_one_line(problem)
        self.fix = _in_one_line(fix)
        super().__init__(f"{self.problem} -> {self.fix}")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        """Return what a process needs to raise the error of another one."""
        has_own = type(self).__init__ is not UserError.__init__
        return UserError if has_own else type(self), (self.problem, self.fix)

    def to_json(self) -> dict[str, Any]:
        """Return the document that refusal_from_json reads; a class defined elsewhere becomes its nearest base here."""
        kind = next(_KINDS[base.__name__] for base in type(self).__mro__ if base.__name__ in _KINDS)
        return {"kind": kind.__name__, **{name: getattr(self, name) for name in kind.in_json}}


def similar_words(word: str, words: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the valid words that are similar to a misspelt one, the most similar first."""
    words = list(words)
    plain = {re.sub(r"[\W_]", "", name).lower(): name for name in words}
    same = plain.get(re.sub(r"[\W_]", "", word).lower())
    return [same] if same is not None else difflib.get_close_matches(word[:100], words, cutoff=cutoff)


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `did you mean a or b? `, to put before the list of valid words; empty if none is similar."""
    matches = similar_words(word, words, cutoff)
    return f"did you mean {' or '.join(matches)}? " if matches else ""


class Unsupported(UserError):
    """A valid request that this machine does not support: a library, a device or NVMe is missing."""


class WrongFile(UserError):
    """A file with a mistake: the problem without the file's name, and the line or the key of the mistake, if any."""

    def __init__(
        self, file: str | Path, what: str, fix: str, *, line: int | None = None, key: str = "", place: str = ""
    ):
        self.file = str(file)
        self.what = _in_one_line(what)
        self.line = line
        self.key = key
        # How the problem begins.
        self.place = place or self.file
        super().__init__(f"{self.place} {what}", fix)


class MissingFile(WrongFile):
    """A file that another file names, and that does not exist."""


class NotInstalled(UserError):
    """A request that needs a package which is not installed here."""


@contextlib.contextmanager
def require_extra(name: str, reason: str = "") -> Iterator[None]:
    """Turn a failed import into a UserError that names the extra of pyproject.toml to install, and the reason."""
    try:
        yield
    except ModuleNotFoundError as error:
        fix = f"run: {install_command(name, missing=[(error.name or '').partition('.')[0]])}"
        raise NotInstalled(f"{reason}{error.name} is not installed here", fix) from None


class ModelTooLarge(Unsupported):
    """A model that is too large for this machine's memory, and the number of its layers that fit."""

    in_json = ("problem", "fix", "layers_that_fit")

    def __init__(self, problem: str, fix: str, layers_that_fit: int):
        self.layers_that_fit = layers_that_fit
        super().__init__(problem, fix)


_KINDS = {kind.__name__: kind for kind in (UserError, Unsupported, ModelTooLarge)}


def refusal_from_json(document: Mapping[str, Any]) -> UserError:
    """Return the error that `to_json` was called on."""
    return _KINDS[document["kind"]](**{key: value for key, value in document.items() if key != "kind"})


class RunFailed(Exception):
    """A known failure of a run that has started: becomes `failed` in status.json."""

    def __init__(self, reason: str, hint: str = ""):
        self.reason = _in_one_line(reason)
        self.hint = _in_one_line(hint)
        super().__init__(self.reason)


class NotFinite(RunFailed):
    """A loss or gradients that are not finite, with the step of the training loss; None for other figures."""

    def __init__(self, reason: str, hint: str, step: int | None = None):
        self.step = step
        super().__init__(reason, hint)


def _in_one_line(text: str) -> str:
    """Return printable text without secrets, in one line; bytes of a file name that are not UTF-8 are escaped."""
    return replace_unprintable(redact_secrets(" ".join(text.split())).encode(errors="backslashreplace").decode())


def replace_unprintable(text: str) -> str:
    """Return text without control characters, which would change a terminal, and without half surrogate pairs."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def redact_secrets(text: str) -> str:
    """Return a text without tokens, passwords, and addresses of mirrors and proxies."""
    for name in _SECRETS:
        for variable in (name, name.lower()):
            if len(value := os.environ.get(variable, "").rstrip("/")) >= _MIN_SECRET_LENGTH:
                text = text.replace(value, f"${variable}")
    return _PASSWORD.sub("", text)


# The folders of an absolute path, before a file's name.
_ABSOLUTE = re.compile(r"(?<![\w.:/\\-])(?:~|[A-Za-z]:)?[/\\](?:[\w.@+-]+[/\\])+")
# Characters of a library's message.
_MAX_CAUSE = 160


def describe_cause(error: BaseException) -> str:
    """Return an error's type and first line for a report of a fault: short, and without folders of this machine."""
    line = _ABSOLUTE.sub("", first_line(error))
    kind, text = type(error).__name__, line if len(line) <= _MAX_CAUSE else f"{line[: _MAX_CAUSE - 3]}..."
    return kind if text in ("", kind) else f"{kind}: {text}"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error."""
    return redact_secrets(next(iter(str(error).strip().splitlines()), type(error).__name__))
