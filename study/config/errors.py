"""The one way this project refuses a request."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Names the file in which a refused run leaves its reason: of an exit status a launcher says only that it was not 0.
REFUSAL_FILE_VARIABLE = "ZERO_STUDY_REFUSAL_FILE"


_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_MIN_SECRET_LENGTH = 6
_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxdict, _BRIEF.maxlist = 2, 4, 4
_BRIEF.maxstring, _BRIEF.maxlong, _BRIEF.maxother = 100, 60, 60


def clip(value: object) -> str:
    """A value as it was given, for a message: a few lines of YAML with aliases can be gigabytes of text."""
    return _BRIEF.repr(value)


class UserError(Exception):
    """A request that cannot be served: what is wrong and where, and how to fix it, one line each.

    The command line prints it without a traceback and exits with 2.
    """

    def __init__(self, problem: str, fix: str):
        self.problem = _in_one_line(problem)
        self.fix = _in_one_line(fix)
        super().__init__(f"{self.problem} -> {self.fix}")

    def to_json(self) -> dict[str, Any]:
        """Read by refusal_from_json, which knows a kind that is defined elsewhere as the one that it is made of."""
        kind = next(known for known in type(self).__mro__ if known.__name__ in _KINDS)
        return {"kind": kind.__name__, **vars(self)}


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`did you mean a or b? `, to put before what is known; empty where nothing is near."""
    near = difflib.get_close_matches(word[:100], list(known), cutoff=cutoff)
    return f"did you mean {' or '.join(near)}? " if near else ""


class Unsupported(UserError):
    """A request that is right, and that this box cannot serve: a library, a device or NVMe is missing."""


@contextlib.contextmanager
def require_extra(name: str) -> Iterator[None]:
    """Refuse a missing import by the name of its extra in pyproject.toml."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed here", f"run: pip install -e '.[{name}]'") from None


class ModelTooLarge(Unsupported):
    """A model that is too large for this box's memory, and how many of its layers are not."""

    def __init__(self, problem: str, fix: str, layers_that_fit: int):
        self.layers_that_fit = layers_that_fit
        super().__init__(problem, fix)


_KINDS = {kind.__name__: kind for kind in (UserError, Unsupported, ModelTooLarge)}


def refusal_from_json(said: Mapping[str, Any]) -> UserError:
    return _KINDS[said["kind"]](**{key: value for key, value in said.items() if key != "kind"})


class RunFailed(Exception):
    """A run that started and cannot go on, for a reason that is known: becomes `failed` in status.json."""

    def __init__(self, reason: str, hint: str = ""):
        self.reason = _in_one_line(reason)
        self.hint = _in_one_line(hint)
        super().__init__(self.reason)


def _in_one_line(text: str) -> str:
    """A file's name need not be UTF-8, and what is not can be neither printed nor recorded."""
    return replace_unprintable(redact_secrets(" ".join(text.split())).encode(errors="backslashreplace").decode())


def replace_unprintable(text: str) -> str:
    """Half a surrogate pair is JSON and no text; control characters are for a terminal, and for no table or page."""
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


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error."""
    return redact_secrets(next(iter(str(error).strip().splitlines()), type(error).__name__))
