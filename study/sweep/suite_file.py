"""A suite as written: the YAML language, read strictly. What is not understood is refused with file and line."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from study.config.errors import UserError, brief
from study.config.flags import LARGEST_WORLD, RunConfig
from study.config.strategies import STRATEGY_NAMES, STUDIED_STRATEGIES
from study.config.yaml_sections import Section, as_section, read_document
from study.host.stacks import THEN, stacks
from study.records.schema import SearchAxis
from study.sweep.cell import Trainer

SUITE_DIRECTORY = Path(__file__).resolve().parents[1] / "suites"
# What a cell is made of beside its RunConfig.
CELL_KEYS = frozenset({"strategy", "trainer", "world_size", "time_limit_s", "expected_s", "expect", "stack"})
# The same on any number of ranks, where a micro-batch is not.
ACCUMULATION = "gradient_accumulation_steps"
# Where a run writes and what it resumes from is for the sweep to say.
_SETTINGS = CELL_KEYS | {ACCUMULATION} | {field.name for field in dataclasses.fields(RunConfig)} - {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint",
}  # fmt: skip
_SUITE_KEYS = {"name", "description", "requires", "order_seed", "fixed", "grids"}
# A suite that is made of others has no cells of its own.
_SERIES_KEYS = {"name", "description", "slices"}
_GRID_KEYS = {"fixed", "axes", "repeats", "overrides", "exclude", "search"}
# What a search decides for itself.
_SEARCHED_KEYS: dict[str, tuple[str, ...]] = {
    "largest_micro_batch": ("per_device_train_batch_size", "global_batch_size"),
    "largest_model": ("model_name_or_path",),
}
# Of a file with its aliases written out, of a suite's cells and of a ladder's rungs: more is a slip, and takes minutes
# to plan or all of the memory.
MOST = 10_000
# YAML takes seconds for each MB, and whoever names a log or a model's weights means another file.
_MOST_BYTES = 2**20
# What is right for a value, and how to say it. What is not here is a flag of study/train.py, which knows that itself.
_Check = tuple[Callable[[Any], object], str]
_TEXT: _Check = (lambda value: isinstance(value, str), "text")
_WHOLE: _Check = (lambda value: type(value) is int, "a whole number")
_COUNT: _Check = (lambda value: type(value) is int and value >= 1, "a whole number from 1 up")
_SECONDS: _Check = (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number of seconds")
_GIB: _Check = (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a number of GiB")
_LIST: _Check = (lambda value: isinstance(value, list), "a list")
_FILLED: _Check = (lambda value: isinstance(value, list) and value, "a list of one or more")
_GPUS: _Check = (
    lambda value: type(value) is int and 0 <= value <= LARGEST_WORLD, f"a whole number from 0 to {LARGEST_WORLD}",
)  # fmt: skip
_CHECKS: dict[str, _Check] = {
    "name": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[\w][\w.-]{,99}", value),
        "at most 100 letters, digits, `-` and `_`: it names a folder",
    ),
    "description": _TEXT, "suite": _TEXT, "order_seed": _WHOLE, "from": _WHOLE, "to": _WHOLE, "repeats": _COUNT,
    "gpus": _GPUS, "gpus_per_node": _GPUS,
    "gpu_memory_gib": _GIB, "host_memory_gib": _GIB, "grids": _FILLED, "slices": _FILLED, "overrides": _LIST,
    "exclude": _LIST,
    "only": (
        lambda value: isinstance(value, list) and all(isinstance(pattern, str) for pattern in value),
        "a list of patterns, such as [seed=42]",
    ),
    "strategy": (lambda value: value in STRATEGY_NAMES, f"{', '.join(STRATEGY_NAMES)} or all"),
    "trainer": (lambda value: value in get_args(Trainer), ", ".join(get_args(Trainer))),
    "world_size": _COUNT, ACCUMULATION: _COUNT, "time_limit_s": _SECONDS, "expected_s": _SECONDS,
    "expect": (lambda value: value == "oom", "oom, or leave it out"),
    # As a list: what a file says may have no hash.
    "stack": (lambda value: value in list(stacks()), "a stack of study/releases/stacks.yaml, or all, today or then"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Requirements:
    """What a box must have before a suite starts on it."""

    gpus: int = 0
    # Of several nodes, where one has fewer than all.
    gpus_per_node: int = 0
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
    only: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Suite:
    """Grids of its own, or slices of others in the order in which they are worth running."""

    name: str
    description: str
    requires: Requirements = Requirements()
    order_seed: int = 0
    grids: tuple[Grid, ...] = ()
    slices: tuple[SliceOf, ...] = ()


class _Section(Section):
    """One that knows what is right for each key of a suite."""

    def value(self, key: str, default: Any = None) -> Any:
        if default is None:
            self.need(key)
        return self.checked(key, self.get(key, default))

    def checked(self, key: str, value: Any) -> Any:
        """A value of this key, or one of several."""
        if key not in _CHECKS:
            return getattr(RunConfig.from_dict({key: value}, self.place_of(key)), key)
        is_right, wanted = _CHECKS[key]
        if not is_right(value):
            raise self.refusal(key, f"is {value!r}", f"use {wanted}")
        return value

    def section(self, key: str, keys: Collection[str] = _SETTINGS) -> _Section:
        """What stands at the key; empty where nothing does."""
        return as_section(self.get(key, _Section(self.place)), self.place_of(key), keys, _Section)

    def sections(self, key: str, keys: Collection[str] = _SETTINGS) -> list[_Section]:
        return [as_section(each, self.place_of(key), keys, _Section) for each in self.value(key, [])]


def find_suite(name: str) -> Path:
    """A name in study/suites/, or a path."""
    shipped = {file.stem: file for file in SUITE_DIRECTORY.glob("*.yaml")}
    if name in shipped:
        return shipped[name]
    with contextlib.suppress(OSError):
        if Path(name).is_file():
            return Path(name)
    known = ", ".join(sorted(shipped))
    raise UserError(f"no suite is called {brief(name)}, and no such file is there", f"use one of {known}, or a path")


def read_suite(file: Path) -> Suite:
    if file.stat().st_size > _MOST_BYTES:
        raise UserError(f"{file} is larger than any suite", "name a suite's file")
    return _suite(read_document(file, _Section, MOST), str(file))


def _suite(document: Any, file: str) -> Suite:
    is_series = isinstance(document, _Section) and "slices" in document
    top = as_section(document, file, _SERIES_KEYS if is_series else _SUITE_KEYS, _Section)
    name, description = top.value("name"), top.value("description")
    shared = _settings(top.section("fixed"))
    if is_series:
        slices = top.sections("slices", {"suite", "only"})
        return Suite(
            name, description,
            slices=tuple(SliceOf(each.place, each.value("suite"), tuple(each.value("only", []))) for each in slices),
        )  # fmt: skip
    top.need("grids")
    requires = Requirements(**_settings(top.section("requires", vars(Requirements()))))
    grids = tuple(_grid(each, shared) for each in top.sections("grids", _GRID_KEYS))
    if (runs := sum(grid.repeats * math.prod(map(len, grid.axes.values())) for grid in grids)) > MOST:
        raise top.refusal("grids", f"have {runs} runs, and a suite has {MOST} at most", "make several suites of it")
    return Suite(
        name=name,
        description=description,
        requires=requires,
        order_seed=top.value("order_seed", 0),
        grids=grids,
    )


def _grid(grid: _Section, shared: Mapping[str, Any]) -> Grid:
    fixed, axes = _settings(grid.section("fixed")), _choices(grid.section("axes"))
    for key in axes:
        if key in fixed:
            raise grid["axes"].refusal(key, "is fixed and an axis", "keep one of the two")
    rules = grid.sections("overrides", ("where", "fixed"))
    for rule in rules:
        rule.need("where", "fixed")
    ladder = _ladder(grid) if "search" in grid else None
    if ladder is not None:
        sections = [grid.section("fixed"), grid.section("axes"), *(rule.section("fixed") for rule in rules)]
        for section, key in itertools.product(sections, _SEARCHED_KEYS[ladder.axis]):
            if key in section:
                raise section.refusal(key, f"is what {ladder.axis} decides", "take it out")
    return Grid(
        place=grid.place,
        fixed={key: value for key, value in {**shared, **fixed}.items() if key not in axes},
        axes=axes,
        repeats=grid.value("repeats", 1),
        overrides=tuple(Override(_choices(rule.section("where")), _settings(rule.section("fixed"))) for rule in rules),
        exclude=tuple(map(_choices, grid.sections("exclude"))),
        ladder=ladder,
    )


def _ladder(grid: _Section) -> Ladder:
    axes = get_args(SearchAxis)
    section = grid.section("search", axes)
    if len(section) != 1:
        raise grid.refusal("search", f"names {len(section)} things to find", f"name one: {', '.join(axes)}")
    axis: SearchAxis = next(axis for axis in axes if axis in section)
    rungs = given = section[axis]
    kind: type = str
    fix = "use a list of two model names or more, each once, the smallest first"
    if axis == "largest_micro_batch":
        kind = int
        fix = "use {from: 1, to: 512}, or a list such as [1, 2, 4, 8] that goes up"
        if isinstance(given, _Section):
            ends = section.section(axis, ("from", "to"))
            rungs = list(range(ends.value("from"), min(ends.value("to"), ends["from"] + MOST) + 1))
    if isinstance(rungs, list) and len(rungs) > MOST:
        raise section.refusal(axis, f"has more than {MOST} sizes", "list those that are to be tried")
    is_ladder = isinstance(rungs, list) and len(rungs) >= 2 and all(type(rung) is kind for rung in rungs)
    if not is_ladder or len(set(rungs)) < len(rungs) or (kind is int and (rungs != sorted(rungs) or rungs[0] < 1)):
        raise section.refusal(axis, f"is {given!r}", fix)
    return Ladder(axis, tuple(rungs))


def _settings(section: _Section) -> dict[str, Any]:
    return {key: section.value(key) for key in section}


def _choices(section: _Section) -> dict[str, list[Any]]:
    """Several values per key; a single one stands for a list of one, `strategy: all` for the thirteen.

    `stack: today` stands for every stack of that kind.
    """
    found = {}
    for key, value in section.items():
        if key == "strategy" and value == "all":
            value = list(STUDIED_STRATEGIES)
        if key == "stack" and value in ("all", "today", "then"):
            value = [name for name in stacks() if value == "all" or name.endswith(THEN) == (value == "then")]
        options = value if isinstance(value, list) and key != "engine_override" else [value]
        if not options:
            raise section.refusal(key, "is an empty list", "list at least one value")
        found[key] = [section.checked(key, option) for option in options]
    return found
