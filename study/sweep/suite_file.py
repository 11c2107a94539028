"""A suite as written: the YAML language, read strictly. What is not understood is refused with file and line."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from study.errors import UserError
from study.launch.cell import Trainer
from study.spec.config import RunConfig
from study.spec.strategies import STRATEGY_NAMES

SUITE_DIRECTORY = Path(__file__).resolve().parents[1] / "suites"
DEFAULT_TIME_LIMIT_S = 3600.0
# Where a run writes and what it resumes from is for the sweep to say.
_NOT_FOR_SUITES = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint"}
RUN_KEYS = frozenset(field.name for field in dataclasses.fields(RunConfig)) - _NOT_FOR_SUITES
SearchAxis = Literal["largest_micro_batch", "largest_model"]
# What a cell is made of beside its RunConfig: what is right, and how to say it.
_CELL_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "strategy": (lambda value: value in STRATEGY_NAMES, f"{', '.join(STRATEGY_NAMES)} or all"),
    "trainer": (lambda value: value in get_args(Trainer), ", ".join(get_args(Trainer))),
    "world_size": (lambda value: type(value) is int and value >= 1, "a whole number from 1 up"),
    "time_limit_s": (lambda value: type(value) in (int, float) and value > 0, "a number of seconds"),
    "expected_s": (lambda value: type(value) in (int, float) and value > 0, "a number of seconds"),
}
CELL_KEYS = frozenset(_CELL_CHECKS)
_SUITE_KEYS = {"name", "description", "requires", "order_seed", "fixed", "grids"}
# A suite that is made of others has no cells of its own.
_SERIES_KEYS = {"name", "description", "slices"}
_GRID_KEYS = {"fixed", "axes", "repeats", "overrides", "exclude", "search"}
# What a search decides for itself.
_SEARCHED_KEYS: dict[str, tuple[str, ...]] = {
    "largest_micro_batch": ("per_device_train_batch_size", "global_batch_size"),
    "largest_model": ("model_name_or_path",),
}
_NUMBER_LIKE_1E5 = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


@dataclasses.dataclass(frozen=True)
class Requirements:
    """What a box must have before a suite starts on it."""

    gpus: int = 0
    gpu_memory_gib: float = 0.0
    host_memory_gib: float = 0.0


@dataclasses.dataclass(frozen=True)
class Override:
    where: Mapping[str, list[Any]]
    fixed: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Ladder:
    """What a search climbs: micro-batches or models, the smallest first."""

    axis: SearchAxis
    rungs: Sequence[int] | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every combination of the axes' values, with the fixed ones; with a ladder, a search for each."""

    place: str
    fixed: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    repeats: int
    overrides: tuple[Override, ...]
    exclude: tuple[Mapping[str, list[Any]], ...]
    ladder: Ladder | None = None


@dataclasses.dataclass(frozen=True)
class SliceOf:
    """Cells of another suite: all of them, or those that every pattern of `only` means."""

    place: str
    suite: str
    only: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Suite:
    """Grids of its own, or slices of others in the order in which they are worth running."""

    name: str
    description: str
    requires: Requirements = Requirements()
    order_seed: int = 0
    grids: tuple[Grid, ...] = ()
    slices: tuple[SliceOf, ...] = ()


class _Mapping(dict[str, Any]):
    """A mapping that knows its own line in the file, and the line of each key."""

    line: int
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    file: Path

    def mapping(self, node: yaml.MappingNode) -> _Mapping:
        mapping = _Mapping()
        mapping.line, mapping.lines = node.start_mark.line + 1, {}
        for key_node, value_node in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UserError(f"{self.file}:{line}: the key {key!r} is not a word", "quote it, or fix it")
            if key in mapping:
                raise UserError(f"{self.file}:{line}: {key} is there twice", "remove one of them")
            mapping[key], mapping.lines[key] = self.construct_object(value_node, deep=True), line
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)
# YAML 1.1 reads 1e-5 as a word; who writes it means the number.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER_LIKE_1E5, list("-+0123456789"))


def find_suite(name: str) -> Path:
    """A name in study/suites/, or a path."""
    shipped = SUITE_DIRECTORY / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    if Path(name).is_file():
        return Path(name)
    names = ", ".join(sorted(file.stem for file in SUITE_DIRECTORY.glob("*.yaml")))
    raise UserError(f"no suite is called {name!r}, and no such file is there", f"use one of {names}, or a path")


def read_suite(file: Path) -> Suite:
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
        loader.file = file
        document = loader.get_single_data()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable ({error})", "fix the file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        raise UserError(f"{where}: not YAML ({getattr(error, 'problem', error)})", "fix the file") from None
    return _Reader(file).suite(document)


@dataclasses.dataclass(frozen=True)
class _Reader:
    file: Path

    def suite(self, document: Any) -> Suite:
        is_series = isinstance(document, _Mapping) and "slices" in document
        keys, parts = (_SERIES_KEYS, "slices") if is_series else (_SUITE_KEYS, "grids")
        top = self.mapping(document, str(self.file), keys, needs=("name", "description", parts))
        name, description = self.value(top, "name", str), self.value(top, "description", str)
        if not re.fullmatch(r"[\w][\w.-]*", name):
            raise self.refusal(top, "name", f"is {name!r}", "use letters, digits, `-` and `_`: it names a folder")
        shared = self.values(top, "fixed")
        given = self.value(top, parts, list)
        if not given:
            raise self.refusal(top, parts, "is empty", f"list at least one {parts[:-1]}")
        if is_series:
            return Suite(name, description, slices=tuple(self.slice_of(each, self.place(top, parts)) for each in given))
        return Suite(
            name=name,
            description=description,
            requires=self.requirements(top),
            order_seed=self.value(top, "order_seed", int, default=0),
            grids=tuple(self.grid(grid, self.place(top, parts), shared) for grid in given),
        )

    def slice_of(self, document: Any, where: str) -> SliceOf:
        section = self.mapping(document, where, {"suite", "only"}, needs=("suite",))
        only = self.value(section, "only", list, default=[])
        if any(not isinstance(pattern, str) for pattern in only):
            raise self.refusal(section, "only", f"is {only!r}", "list patterns, such as [seed=42]")
        return SliceOf(f"{self.file}:{section.line}", self.value(section, "suite", str), tuple(only))

    def requirements(self, top: _Mapping) -> Requirements:
        if "requires" not in top:
            return Requirements()
        kinds: dict[str, type] = {"gpus": int, "gpu_memory_gib": float, "host_memory_gib": float}
        section = self.mapping(top["requires"], self.place(top, "requires"), set(kinds))
        given = {key: self.value(section, key, kinds[key]) for key in section}
        for key, amount in given.items():
            if amount < 0:
                raise self.refusal(section, key, f"is {amount}", "use 0 or more")
        return Requirements(**given)

    def grid(self, document: Any, where: str, shared: Mapping[str, Any]) -> Grid:
        grid = self.mapping(document, where, _GRID_KEYS)
        fixed = self.values(grid, "fixed")
        axes = self.choices(grid, "axes")
        overrides = tuple(self.overrides(grid))
        for key in axes:
            if key in fixed:
                raise self.refusal(grid["axes"], key, "is fixed and an axis", "keep one of the two")
        ladder = self.ladder(grid) if "search" in grid else None
        if ladder is not None:
            sections = [grid.get("fixed", {}), grid.get("axes", {})]
            sections += [override["fixed"] for override in grid.get("overrides", [])]
            for section, key in itertools.product(sections, _SEARCHED_KEYS[ladder.axis]):
                if key in section:
                    raise self.refusal(section, key, f"is what {ladder.axis} decides", "take it out")
        repeats = self.value(grid, "repeats", int, default=1)
        if repeats < 1:
            raise self.refusal(grid, "repeats", f"is {repeats}", "use 1 or more")
        return Grid(
            place=f"{self.file}:{grid.line}",
            fixed={key: value for key, value in {**shared, **fixed}.items() if key not in axes},
            axes=axes,
            repeats=repeats,
            overrides=overrides,
            exclude=tuple(
                self.all_choices(rule, self.place(grid, "exclude")) for rule in self.value(grid, "exclude", list, [])
            ),
            ladder=ladder,
        )

    def ladder(self, grid: _Mapping) -> Ladder:
        axes = get_args(SearchAxis)
        section = self.mapping(grid["search"], self.place(grid, "search"), set(axes))
        if len(section) != 1:
            raise self.refusal(grid, "search", f"names {len(section)} things to find", f"name one: {', '.join(axes)}")
        axis: SearchAxis = next(axis for axis in axes if axis in section)
        rungs = given = section[axis]
        kind: type = str
        fix = "use a list of two model names or more, each once, the smallest first"
        if axis == "largest_micro_batch":
            kind = int
            fix = "use {from: 1, to: 512}, or a list such as [1, 2, 4, 8] that goes up"
            if isinstance(given, _Mapping):
                ends = self.mapping(given, self.place(section, axis), {"from", "to"}, needs=("from", "to"))
                rungs = list(range(self.value(ends, "from", int), self.value(ends, "to", int) + 1))
        is_ladder = isinstance(rungs, list) and len(rungs) >= 2 and all(type(rung) is kind for rung in rungs)
        if not is_ladder or len(set(rungs)) < len(rungs) or (kind is int and (rungs != sorted(rungs) or rungs[0] < 1)):
            raise self.refusal(section, axis, f"is {given!r}", fix)
        return Ladder(axis, tuple(rungs))

    def overrides(self, grid: _Mapping) -> Iterator[Override]:
        for entry in self.value(grid, "overrides", list, default=[]):
            where = self.place(grid, "overrides")
            rule = self.mapping(entry, where, {"where", "fixed"}, needs=("where", "fixed"))
            yield Override(self.choices(rule, "where"), self.values(rule, "fixed"))

    def values(self, parent: _Mapping, key: str) -> dict[str, Any]:
        """One value per key, each of which a run or a cell knows."""
        section = self.mapping(parent.get(key, _empty(parent)), self.place(parent, key), RUN_KEYS | CELL_KEYS)
        return {name: self.checked(section, name, section[name]) for name in section}

    def choices(self, parent: _Mapping, key: str) -> dict[str, list[Any]]:
        return self.all_choices(parent.get(key, _empty(parent)), self.place(parent, key))

    def all_choices(self, document: Any, where: str) -> dict[str, list[Any]]:
        """Several values per key; a single one stands for a list of one, and `strategy: all` for every strategy."""
        section = self.mapping(document, where, RUN_KEYS | CELL_KEYS)
        found = {}
        for key, value in section.items():
            if key == "strategy" and value == "all":
                value = list(STRATEGY_NAMES)
            options = value if isinstance(value, list) and key != "engine_override" else [value]
            if not options:
                raise self.refusal(section, key, "is an empty list", "list at least one value")
            found[key] = [self.checked(section, key, option) for option in options]
        return found

    def checked(self, section: _Mapping, key: str, value: Any) -> Any:
        if key not in _CELL_CHECKS:
            return getattr(RunConfig.from_dict({key: value}, self.place(section, key)), key)
        is_right, wanted = _CELL_CHECKS[key]
        if not is_right(value):
            raise self.refusal(section, key, f"is {value!r}", f"use {wanted}")
        return value

    def mapping(self, value: Any, where: str, keys: set[str] | frozenset[str], needs: tuple[str, ...] = ()) -> _Mapping:
        if not isinstance(value, _Mapping):
            raise UserError(f"{where}: a {type(value).__name__} stands where a mapping belongs", "write key: value")
        for key, line in value.lines.items():
            if key not in keys:
                raise UserError(f"{self.file}:{line}: unknown key {key!r}", f"known here: {', '.join(sorted(keys))}")
        for key in needs:
            if key not in value:
                raise UserError(f"{self.file}:{value.line}: {key} is missing", f"add {key}: to it")
        return value

    def value(self, section: _Mapping, key: str, kind: type, default: Any = None) -> Any:
        if key not in section and default is not None:
            return default
        value = section[key]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.refusal(section, key, f"is {value!r}", f"use a value of type {kind.__name__}")
        return value

    def place(self, section: _Mapping, key: str) -> str:
        return f"{self.file}:{section.lines.get(key, section.line)}"

    def refusal(self, section: _Mapping, key: str, problem: str, fix: str) -> UserError:
        return UserError(f"{self.place(section, key)}: {key} {problem}", fix)


def _empty(parent: _Mapping) -> _Mapping:
    empty = _Mapping()
    empty.line, empty.lines = parent.line, {}
    return empty
