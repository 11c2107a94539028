"""A user's file as text: a JSON or YAML mapping that says nothing twice, or one clear line of what is wrong with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from study.errors import UserError, first_line
from study.host.folders import folder_named
from study.spec.yaml_sections import written_out

_LARGEST_FILE_BYTES = 1_000_000
_MOST_VALUES = 10_000


def read_document(name: str) -> dict[str, Any]:
    path = folder_named(name)
    try:
        if path.is_dir():
            raise UserError(f"{name} is a folder", "name the file in it")
        if not path.exists():
            raise UserError(f"there is no file {name}", _near_file(path))
        if not path.is_file():
            raise UserError(f"{name} is no plain file", "save what it says in a file, and name that")
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise UserError(f"{name} is larger than 1 MB", "give a DeepSpeed JSON or an Accelerate YAML")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{name} is not readable ({first_line(error)})", "name a text file") from None
    try:
        is_json = path.suffix == ".json" or text.lstrip().startswith("{")
        document = json.loads(text, object_pairs_hook=_once) if is_json else yaml.load(text, _Loader)
    except _Twice as twice:
        raise UserError(f"{name} says {twice} twice", "keep one of the two: DeepSpeed refuses such a file") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if is_json else "YAML"
        raise UserError(
            f"{name} is not readable as {kind} ({' '.join(str(error).split())[:120]})", f"make it {kind} at that place"
        ) from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UserError(f"{name} is not a mapping of settings", "give a DeepSpeed JSON or an Accelerate YAML")
    return document


def _near_file(path: Path) -> str:
    try:
        there = [each.name for each in path.parent.iterdir() if each.suffix in (".json", ".yaml", ".yml")]
    except OSError:
        there = []
    near = difflib.get_close_matches(path.name, there, n=2)
    return f"beside it there is {', '.join(near)}" if near else "name a DeepSpeed JSON or an Accelerate YAML"


class _Twice(Exception):
    """A key is there twice; both parsers would keep the last without a word."""


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and written_out(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its aliases make more than {_MOST_VALUES} values of it")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [getattr(key, "value", None) for key, _ in node.value]
        for name in names:
            if isinstance(name, str) and name != "<<" and names.count(name) > 1:
                raise _Twice(name)
        return super().construct_mapping(node, deep)
