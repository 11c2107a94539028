"""Suite files: a strict reader of their YAML language, and rehearsals. Unknown input is an error with file and line."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from study.config import strategies, yaml_sections
from study.config.errors import UserError, clip, did_you_mean
from study.config.flags import RunConfig
from study.host.stacks import is_of_today, stacks
from study.records.schema import SearchAxis
from study.sweep.cell import Trainer

SUITE_DIRECTORY = Path(__file__).resolve().parents[1] / "suites"
# Settings of a cell other than its RunConfig.
CELL_KEYS = frozenset({"strategy", "trainer", "world_size", "time_limit_s", "expected_s", "expect", "stack"})
# A suite may set it instead of a micro-batch, which depends on the number of ranks.
ACCUMULATION = "gradient_accumulation_steps"
# The sweep sets these three flags itself.
_SETTINGS = (
    CELL_KEYS
    | {ACCUMULATION}
    | {field.name for field in dataclasses.fields(RunConfig)}
    - {
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
    }
)
_SUITE_KEYS = {"name", "description", "requires", "order_seed", "fixed", "grids"}
# A series consists only of slices of other suites.
_SERIES_KEYS = {"name", "description", "slices"}
_GRID_KEYS = {"fixed", "axes", "repeats", "overrides", "exclude", "search", "requires"}
# Settings that a search varies.
_SEARCHED_KEYS: dict[str, tuple[str, ...]] = {
    "largest_micro_batch": ("per_device_train_batch_size", "global_batch_size"),
    "largest_model": ("model_name_or_path",),
}
# A test of a value, and the text of its error. Other keys are flags of study/train.py, which checks them itself.
_Check = tuple[Callable[[Any], object], str]
_TEXT: _Check = (lambda value: isinstance(value, str), "text")
_WHOLE: _Check = (lambda value: type(value) is int, "a whole number")
_COUNT: _Check = (lambda value: type(value) is int and value >= 1, "a whole number from 1 up")
_GPUS: _Check = (lambda value: type(value) is int and value >= 0, "a whole number from 0 up")
_DURATION: _Check = (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number of seconds")
_GIB: _Check = (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a number of GiB")
_LIST: _Check = (lambda value: isinstance(value, list), "a list")
_FILLED: _Check = (lambda value: isinstance(value, list) and value, "a list of one or more")
_CHECKS: dict[str, _Check] = {
    "name": (
        lambda value: isinstance(value, str) and re.fullmatch(r"[\w][\w.-]{,99}", value),
        "at most 100 letters, digits, `-` and `_`: it names a folder",
    ),
    "description": _TEXT,
    "suite": _TEXT,
    "order_seed": _WHOLE,
    "from": _WHOLE,
    "to": _WHOLE,
    "repeats": _COUNT,
    "gpus": _GPUS,
    "gpus_per_node": _GPUS,
    "gpu_memory_gib": _GIB,
    "host_memory_gib": _GIB,
    "grids": _FILLED,
    "slices": _FILLED,
    "overrides": _LIST,
    "exclude": _LIST,
    "only": (
        lambda value: isinstance(value, list) and all(isinstance(pattern, str) for pattern in value),
        "a list of patterns, such as [seed=42]",
    ),
    "strategy": (lambda value: value in strategies.STRATEGY_NAMES, f"{', '.join(strategies.STRATEGY_NAMES)} or all"),
    "trainer": (lambda value: value in get_args(Trainer), ", ".join(get_args(Trainer))),
    "world_size": _COUNT,
    ACCUMULATION: _COUNT,
    "time_limit_s": _DURATION,
    "expected_s": _DURATION,
    "expect": (lambda value: value == "oom", "oom, or leave it out"),
    # In a list, because a value of a file may not be hashable.
    "stack": (lambda value: value in list(stacks()), "a stack of study/releases/stacks.yaml, or all, today or then"),
}


@dataclasses.dataclass(frozen=True)
class Requirements:
    """Resources that a suite requires of a machine."""

    gpus: int = 0
    # Set if the GPUs are on several nodes.
    gpus_per_node: int = 0
    gpu_memory_gib: float = 0.0
    host_memory_gib: float = 0.0


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The candidates of a search: micro-batches or models in ascending size."""

    axis: SearchAxis
    rungs: Sequence[int] | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every combination of the axes' values with the fixed ones; with a ladder, one search per combination."""

    place: str
    fixed: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    repeats: int
    # Cells whose settings match the first mapping get those of the second.
    overrides: tuple[tuple[Mapping[str, list[Any]], Mapping[str, Any]], ...]
    exclude: tuple[Mapping[str, list[Any]], ...]
    ladder: Ladder | None = None
    # A machine with less host memory leaves its runs out.
    host_memory_gib: float = 0.0


@dataclasses.dataclass(frozen=True)
class SliceSpec:
    """Cells of another suite: all, or those that match every pattern of `only`."""

    place: str
    suite: str
    only: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite of grids, or a series of slices of other suites, the most important first."""

    name: str
    description: str
    requires: Requirements = Requirements()
    order_seed: int = 0
    grids: tuple[Grid, ...] = ()
    slices: tuple[SliceSpec, ...] = ()
    # Its runs have tiny models and few steps.
    is_rehearsal: bool = False


class _Section(yaml_sections.Section):
    """A mapping of a suite file that checks the value of each key."""

    def value(self, key: str, default: Any = None) -> Any:
        """Return the checked value of a key; raise UserError if it is missing without a default."""
        if default is None:
            self.require_keys(key)
        return self.checked(key, self.get(key, default))

    def checked(self, key: str, value: Any) -> Any:
        """Return a valid value of this key or item of its list; raise UserError if it is not valid."""
        if key not in _CHECKS:
            return getattr(RunConfig.from_dict({key: value}, self.key_place(key)), key)
        is_valid, requirement = _CHECKS[key]
        if not is_valid(value):
            raise self.refusal(key, f"is {value!r}", f"use {requirement}")
        return value

    def section(self, key: str, keys: Collection[str] = _SETTINGS) -> _Section:
        return _as_section(self.get(key, _Section(self.place)), self.key_place(key), keys)

    def sections(self, key: str, keys: Collection[str] = _SETTINGS) -> list[_Section]:
        return [_as_section(entry, self.key_place(key), keys) for entry in self.value(key, [])]

    def settings(self, key: str, keys: Collection[str] = _SETTINGS) -> dict[str, Any]:
        section = self.section(key, keys)
        return {name: section.value(name) for name in section}

    def choices(self) -> dict[str, list[Any]]:
        """Return a list of checked values per key; `all`, `today` and `then` are expanded to strategies or stacks."""
        choices = {}
        for key, value in self.items():
            if key == "strategy" and value == "all":
                value = list(strategies.STUDIED_STRATEGIES)
            if key == "stack" and value in ("all", "today", "then"):
                value = [name for name in stacks() if value == "all" or is_of_today(name) == (value == "today")]
            options = value if isinstance(value, list) and key != "engine_override" else [value]
            if not options:
                raise self.refusal(key, "is an empty list", "list at least one value")
            choices[key] = [self.checked(key, option) for option in options]
        return choices


def _as_section(value: Any, place: str, keys: Collection[str]) -> _Section:
    """Return a value as a section; raise if it is not a mapping or has other keys."""
    if not isinstance(value, _Section):
        actual = "nothing" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{place}: expected a mapping, got {actual}", f"write one with {', '.join(sorted(keys))}")
    for key, where in value.places.items():
        if key not in keys:
            fix = f"{did_you_mean(key, keys)}supported keys: {', '.join(sorted(keys))}"
            raise UserError(f"{where}: unknown key {key!r}", fix)
    return value


def find_suite(name: str) -> Path:
    """Return the suite file with this name in study/suites/, or with this path."""
    shipped = {file.stem: file for file in SUITE_DIRECTORY.glob("*.yaml")}
    if name in shipped:
        return shipped[name]
    if Path(name).is_file():
        return Path(name)
    fix = did_you_mean(name, shipped) or f"suites: {', '.join(sorted(shipped))}"
    raise UserError(f"no suite is named {clip(name)}, and no file has this path", fix)


def read_suite(file: Path) -> Suite:
    """Return the suite of a file; raise UserError with file and line if it is not valid."""
    document = yaml_sections.read_document(file, _Section)
    is_series = isinstance(document, _Section) and "slices" in document
    top = _as_section(document, str(file), _SERIES_KEYS if is_series else _SUITE_KEYS)
    name, description = top.value("name"), top.value("description")
    if is_series:
        slices = top.sections("slices", {"suite", "only"})
        return Suite(
            name,
            description,
            slices=tuple(SliceSpec(part.place, part.value("suite"), tuple(part.value("only", []))) for part in slices),
        )
    shared = top.settings("fixed")
    top.require_keys("grids")
    requires = Requirements(**top.settings("requires", vars(Requirements())))
    grids = tuple(_grid(part, shared) for part in top.sections("grids", _GRID_KEYS))
    return Suite(name, description, requires, top.value("order_seed", 0), grids)


def _grid(grid: _Section, shared: Mapping[str, Any]) -> Grid:
    fixed, axes = grid.settings("fixed"), grid.section("axes").choices()
    for key in axes:
        if key in fixed:
            raise grid["axes"].refusal(key, "is fixed and an axis", "keep one of the two")
    rules = grid.sections("overrides", ("where", "fixed"))
    for rule in rules:
        rule.require_keys("where", "fixed")
    ladder = _ladder(grid) if "search" in grid else None
    if ladder is not None:
        sections = [grid.section("fixed"), grid.section("axes"), *(rule.section("fixed") for rule in rules)]
        for section, key in itertools.product(sections, _SEARCHED_KEYS[ladder.axis]):
            if key in section:
                raise section.refusal(key, f"is set by the search for {ladder.axis}", "remove it")
    return Grid(
        place=grid.place,
        fixed={key: value for key, value in {**shared, **fixed}.items() if key not in axes},
        axes=axes,
        repeats=grid.value("repeats", 1),
        overrides=tuple((rule.section("where").choices(), rule.settings("fixed")) for rule in rules),
        exclude=tuple(rule.choices() for rule in grid.sections("exclude")),
        ladder=ladder,
        host_memory_gib=grid.section("requires", {"host_memory_gib"}).value("host_memory_gib", 0.0),
    )


def _ladder(grid: _Section) -> Ladder:
    axes = get_args(SearchAxis)
    section = grid.section("search", axes)
    if len(section) != 1:
        raise grid.refusal("search", f"has {len(section)} axes", f"name one: {', '.join(axes)}")
    axis: SearchAxis = next(axis for axis in axes if axis in section)
    rungs = value = section[axis]
    is_size = axis == "largest_micro_batch"
    if is_size and isinstance(value, _Section):
        ends = section.section(axis, ("from", "to"))
        rungs = list(range(ends.value("from"), ends.value("to") + 1))
    kind = int if is_size else str
    is_ladder = isinstance(rungs, list) and len(rungs) >= 2 and all(type(rung) is kind for rung in rungs)
    if not is_ladder or len(set(rungs)) < len(rungs) or (is_size and (rungs != sorted(rungs) or rungs[0] < 1)):
        fix = "use a list of at least two different model names, the smallest first"
        if is_size:
            fix = "use {from: 1, to: 512}, or an ascending list such as [1, 2, 4, 8]"
        raise section.refusal(axis, f"is {value!r}", fix)
    return Ladder(axis, tuple(rungs))


# A rehearsal runs the same grids and commands with tiny models, each once, in a separate folder.
# Upper limits of a run's values. Step times need six steps. With more than two ranks, a tiny model's bf16 shards are
# too small for DeepSpeed to swap.
_AT_MOST = {
    "world_size": 2,
    "virtual_world_size": 2,
    "max_steps": 6,
    "seq_length": 64,
    "global_batch_size": 64,
    "group_size": 2,
    "per_device_train_batch_size": 4,
    "train_samples": 64,
    "eval_samples": 8,
    "time_limit_s": 180,
}
# Settings that apply only to the large machine, or to weights and data that tiny models do not need.
_DROPPED = {
    "device_memory_cap_gib",
    "expected_s",
    "expect",
    "weights",
    "data",
    "dataset_config_name",
    "tokenizer_name",
    "num_train_epochs",
}
# Of a search, which probes the second one because the first one fits.
_RUNGS = range(1, 3)


def shrink_suite(suite: Suite) -> Suite:
    """Return the rehearsal of a suite: the same grids once each, whose runs the plan shrinks."""
    grids = []
    for grid in suite.grids:
        ladder = grid.ladder
        if ladder is not None:
            tiny = _small("model_name_or_path", str(ladder.rungs[0]))
            models = tuple(f"{tiny}-{layers}layers" for layers in _RUNGS)
            ladder = Ladder(ladder.axis, models if ladder.axis == "largest_model" else _RUNGS)
        grids.append(dataclasses.replace(grid, repeats=1, ladder=ladder))
    name = f"{suite.name}-rehearsal"
    return dataclasses.replace(suite, name=name, requires=Requirements(), grids=tuple(grids), is_rehearsal=True)


def shrink_run(values: Mapping[str, Any], grid: Grid) -> dict[str, Any]:
    """Return the settings of a run of the grid with a tiny model, few steps and the grid's first seed."""
    small = {key: _AT_MOST[key] for key in ("max_steps", "time_limit_s")}
    small |= {key: _small(key, value) for key, value in values.items() if key not in _DROPPED}
    if profiled := values.get("profile_steps"):
        # The profiler needs steps after the timed ones.
        small["max_steps"] = _AT_MOST["max_steps"] + 2 + profiled
    if "seed" in grid.axes:
        small["seed"] = grid.axes["seed"][0]
    return small | {"scale": "laptop"}


def _small(key: str, value: Any) -> Any:
    if key == "model_name_or_path" and value is not None:
        return "bert-tiny" if "bert" in value else "gpt-tiny"
    return min(value, _AT_MOST[key]) if key in _AT_MOST and value is not None else value
