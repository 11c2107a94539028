"""The flags of study/train.py, one per field of RunConfig. A wrong one is refused in one line."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection, Sequence
from typing import Any, Literal

from study.errors import UserError
from study.spec.checks import check_values
from study.spec.config import RunConfig, inner_type


def parse_command_line(arguments: Sequence[str] | None = None) -> RunConfig:
    """What was asked, before any default. A wrong flag raises UserError, which ends in one line and exit status 2."""
    parser = _OneLineParser(prog="study/train.py", description="Train under one strategy.", allow_abbrev=False)
    add_flags(parser)
    config = config_from_flags(parser.parse_args(arguments))
    check_values(config)
    return config


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    hints = typing.get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        if field.name in without:
            continue
        kind = inner_type(hints[field.name])
        options: dict[str, Any] = {"help": field.metadata["help"], "default": field.default}
        if typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is tuple:
            options |= {"action": "append", "default": [], "metavar": "KEY=JSON"}
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        parser.add_argument(f"--{field.name}", **options)


def config_from_flags(options: argparse.Namespace) -> RunConfig:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    values = {name: value for name, value in vars(options).items() if name in names}
    return RunConfig(**(values | {"engine_override": tuple(values["engine_override"])}))


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message, "study/train.py --help lists the flags")
