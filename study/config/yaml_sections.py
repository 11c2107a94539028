"""Strict reader of YAML files: an unknown key raises UserError with file and line."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import yaml

from study.config.errors import UserError, WrongFile

# Limits of a file's values with expanded aliases, and of its size: reading YAML takes seconds per MB.
MAX_VALUES, MAX_BYTES = 20_000, 2**20
_NUMBER_LIKE_1E5 = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class Section(dict[str, Any]):
    """A mapping of a file with its place, and that of each key, as FILE:LINE."""

    def __init__(self, place: str):
        super().__init__()
        self.place = place
        self.places: dict[str, str] = {}

    def key_place(self, key: str) -> str:
        """Return FILE:LINE of a key, or of the section if it lacks the key."""
        return self.places.get(key, self.place)

    def may_repeat(self, key: str) -> bool:
        """Whether a key that is set twice has its last value, instead of ending with an error."""
        return False

    def refusal(self, key: str, problem: str, fix: str) -> UserError:
        return UserError(f"{self.key_place(key)}: {key} {problem}", fix)

    def require_keys(self, *keys: str) -> None:
        for key in keys:
            if key not in self:
                raise UserError(f"{self.place}: {key} is missing", f"add {key}: to it")


class _Sections:
    file: Path
    kind: type[Section]

    def checked_data(self: Any) -> Any:
        """Return the content; raise if aliases expand it to too many values."""
        node = self.get_single_node()
        if node is None:
            return None
        if count_expanded_values(node, {}) > MAX_VALUES:
            problem = f"has more than {MAX_VALUES} values after its aliases are expanded"
            raise WrongFile(self.file, problem, "fix the file")
        return self.construct_document(node)

    def section(self: Any, node: yaml.MappingNode) -> Section:
        section: Section = self.kind(f"{self.file}:{node.start_mark.line + 1}")
        key_count = sum(key_node.tag != "tag:yaml.org,2002:merge" for key_node, _ in node.value)
        # Puts the keys merged by `<<` before the mapping's own keys, which override them.
        self.flatten_mapping(node)
        names: set[str] = set()
        for index, (key_node, value_node) in enumerate(node.value):
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            place = f"{self.file}:{line}"
            if not isinstance(key, str):
                problem = f"the key {key!r} is not a string"
                raise WrongFile(self.file, problem, "quote it, or fix it", line=line, place=f"{place}:")
            if key in names and not section.may_repeat(key):
                raise WrongFile(self.file, f"{key} appears twice", "remove one of them", line=line, place=f"{place}:")
            if index >= len(node.value) - key_count:
                names.add(key)
            section[key], section.places[key] = self.construct_object(value_node, deep=True), place
        return section


def count_expanded_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Count the values with aliases expanded."""
    if node not in counts:
        counts[node] = 1  # set first: a node may contain itself
        if isinstance(node, yaml.CollectionNode):
            parts = itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
            counts[node] += sum(count_expanded_values(part, counts) for part in parts)
    return counts[node]


class _YamlLoader(_Sections, yaml.SafeLoader):
    """Loader of user files."""


# libyaml is ten times as fast, but deep nesting crashes it: it reads only the files of this package.
_Fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PACKAGE = Path(__file__).resolve().parents[1]


class _OwnLoader(_Sections, _Fast):
    pass


_loader: Any
for _loader in (_YamlLoader, _OwnLoader):
    _loader.add_constructor("tag:yaml.org,2002:map", _loader.section)
    # YAML 1.1 reads 1e-5 as a string; here it is a number.
    _loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER_LIKE_1E5, list("-+0123456789"))


def load_package_yaml(text: str) -> Any:
    """Parse a YAML text of this package with the fast loader."""
    return yaml.load(text, _Fast)


def read_document(file: Path, kind: type[Section]) -> Any:
    """Read a file with mappings as sections of this kind; raise UserError if it is not readable or too large."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise WrongFile(file, f"has more than {MAX_BYTES:,} bytes", "name a file of this kind")
        is_own = file.resolve().is_relative_to(_PACKAGE)
        loader = (_OwnLoader if is_own else _YamlLoader)(file.read_text(encoding="utf-8"))
        loader.file, loader.kind = file, kind
        return loader.checked_data()
    except RecursionError:
        raise WrongFile(file, "is not readable (nested too deeply)", "fix the file") from None
    except (OSError, ValueError) as error:
        raise WrongFile(file, f"is not readable ({error})", "fix the file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        place = f"{file}:{line}:" if line else f"{file}:"
        problem = f"not YAML ({getattr(error, 'problem', error)})"
        raise WrongFile(file, problem, "fix the file", line=line, place=place) from None
