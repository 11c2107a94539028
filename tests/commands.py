"""Command lines of `study` parsed in the test's process."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from types import ModuleType

from study.config.flags import Parser


@functools.cache
def _make_parser(command: ModuleType) -> Parser:
    """Return the parser of a command, which takes ten times as long to make as to use."""
    parser = Parser(prog="study", allow_abbrev=False)
    command.add_arguments(parser)
    return parser


def parse(command: ModuleType, words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command from the words that follow its name."""
    options: argparse.Namespace = _make_parser(command).parse_args(words)
    return options
