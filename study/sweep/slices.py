"""What a suite's name means on this box: one slice, or for a suite that is made of others, all of them in order.

Records of a slice stand where those of its suite do, so that a series and its suites go on from each other's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.host.box import Box
from study.host.memory import HOST_MEMORY_VARIABLE
from study.sweep.cell import Cell
from study.sweep.plan import chosen_of, plan_cells
from study.sweep.search import Search, example_of
from study.sweep.suite_file import Grid, Ladder, Override, Requirements, SliceOf, Suite, find_suite, read_suite

# A rehearsal: the same grids and commands with tiny models, once each, in a folder of its own.
# What a larger value of the suite becomes: six steps are the fewest that leave a step time behind, and on more than
# two ranks a tiny model's shards in bf16 are too small for DeepSpeed to swap.
_AT_MOST = {
    "world_size": 2, "virtual_world_size": 2, "max_steps": 6, "seq_length": 64, "global_batch_size": 64,
    "team_size": 2, "per_device_train_batch_size": 4, "train_samples": 64, "eval_samples": 8,
    "time_limit_s": 180,
}  # fmt: skip
# For the large box alone, or about weights and data that the tiny models do not need.
_DROPPED = {
    "device_memory_cap_gib", "expected_s", "expect", "weights", "data", "dataset_config_name", "tokenizer_name",
    "num_train_epochs",
}  # fmt: skip
# A rule that asks for one of these would be a wider one without it.
_NOT_REHEARSED = _DROPPED | {"seed"}
_RUNGS = 3


def rehearsed(suite: Suite) -> Suite:
    return dataclasses.replace(
        suite,
        name=f"{suite.name}-rehearsal",
        requires=Requirements(),
        grids=tuple(_small_grid(grid) for grid in suite.grids),
    )


def _small_grid(grid: Grid) -> Grid:
    fixed = {
        **{key: _AT_MOST[key] for key in ("max_steps", "time_limit_s")},
        **_small_values(grid.fixed),
        "scale": "laptop",
    }
    given = [grid.fixed, *(rule.fixed for rule in grid.overrides)]
    asked = [*(values.get("profile_steps") for values in given), *grid.axes.get("profile_steps", [])]
    profiled = max((steps for steps in asked if steps), default=0)
    if profiled:
        # The profiler needs steps of its own, after those that are timed.
        fixed["max_steps"] = _AT_MOST["max_steps"] + 2 + profiled
    axes = _small_choices(grid.axes)
    if "seed" in axes:
        axes["seed"] = axes["seed"][:1]
    return dataclasses.replace(
        grid,
        fixed=fixed,
        axes=axes,
        repeats=1,
        overrides=tuple(
            Override(_small_choices(rule.where), _small_values(rule.fixed))
            for rule in grid.overrides
            if not _NOT_REHEARSED & rule.where.keys()
        ),
        exclude=tuple(_small_choices(rule) for rule in grid.exclude if not _NOT_REHEARSED & rule.keys()),
        ladder=_small_ladder(grid.ladder),
    )


def _small_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _small(key, value) for key, value in values.items() if key not in _DROPPED}


def _small_choices(choices: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Values that become the same are one."""
    return {
        key: list(dict.fromkeys(_small(key, option) for option in options))
        for key, options in choices.items()
        if key not in _DROPPED
    }


def _small(key: str, value: Any) -> Any:
    if value is None:
        # As left out.
        return None
    if key == "model_name_or_path":
        return "bert-tiny" if "bert" in value else "gpt-tiny"
    return min(value, _AT_MOST[key]) if key in _AT_MOST else value


def _small_ladder(ladder: Ladder | None) -> Ladder | None:
    if ladder is None:
        return None
    if ladder.axis == "largest_micro_batch":
        return Ladder(ladder.axis, range(1, _RUNGS + 1))
    tiny = _small("model_name_or_path", ladder.rungs[0])
    return Ladder(ladder.axis, tuple(f"{tiny}-{layers}layers" for layers in range(1, _RUNGS + 1)))


@dataclasses.dataclass(frozen=True)
class Slice:
    """Cells of one suite that are run together. `only` is what the series takes of it."""

    suite: Suite
    only: tuple[str, ...]
    cells: list[Cell | Search]
    root: Path

    @property
    def title(self) -> str:
        return " ".join([self.suite.name, *self.only])

    @property
    def searches(self) -> list[Search]:
        return [cell for cell in self.cells if isinstance(cell, Search)]


@dataclasses.dataclass(frozen=True)
class Plan:
    name: str
    # Made of slices of other suites, without cells of its own.
    is_series: bool
    slices: list[Slice]

    def roots(self) -> list[Path]:
        return list(dict.fromkeys(part.root for part in self.slices))


def plan_suite(name: str, box: Box, runs_dir: Path, only: Sequence[str] = (), *, rehearse: bool = False) -> Plan:
    """Each cell stands in the first slice that names it; a rehearsal has every suite once and whole."""
    file = find_suite(name)
    suite = read_suite(file)
    is_series = bool(suite.slices)
    parts = _members(file, suite) if is_series else [(suite, SliceOf("", name))]
    if rehearse:
        suite = rehearsed(suite)
        small = {member.name: rehearsed(member) for member, _ in parts}
        parts = [(member, SliceOf("", member.name)) for member in small.values()]
    slices = []
    seen: set[tuple[str, str]] = set()
    members = {member.name: member for member, _ in parts}
    planned = {name: plan_cells(member, _smallest_box_for(member, box)) for name, member in members.items()}
    for member, part in parts:
        taken = chosen_of(planned[member.name], part.only)
        if not taken:
            raise _matches_nothing(f"{part.place}: only {list(part.only)}", member.name, planned[member.name])
        cells = [cell for cell in taken if (member.name, cell.id) not in seen]
        seen |= {(member.name, cell.id) for cell in cells}
        if chosen := chosen_of(cells, only):
            slices.append(Slice(member, part.only, chosen, (runs_dir / member.name).absolute()))
    if not slices:
        raise _matches_nothing(f"--only {' --only '.join(only)}", suite.name, next(iter(planned.values())))
    return Plan(suite.name, is_series, slices)


def _matches_nothing(only: str, suite: str, planned: Sequence[Cell | Search]) -> UserError:
    return UserError(f"{only} matches no cell of {suite}", f"an id looks like {planned[0].id}")


def _members(file: Path, series: Suite) -> list[tuple[Suite, SliceOf]]:
    """The suites a series is made of: beside its own file, else a name in study/suites/, or a path."""
    read: dict[str, Suite] = {}
    for part in series.slices:
        if part.suite in read:
            continue
        is_beside = False
        try:
            beside = file.parent / f"{part.suite}.yaml"
            with contextlib.suppress(OSError):
                is_beside = beside.is_file()
            suite = read_suite(beside if is_beside else find_suite(part.suite))
        except UserError as refusal:
            raise UserError(f"{part.place}: {refusal.problem}", refusal.fix) from None
        if suite.slices:
            raise UserError(f"{part.place}: {part.suite} is made of slices itself", "name the suites it is made of")
        if any(other != part.suite and each.name == suite.name for other, each in read.items()):
            raise UserError(f"{part.place}: another suite here is called {suite.name}, too", "give one another name")
        read[part.suite] = suite
    return [(read[part.suite], part) for part in series.slices]


def missing_here(suite: Suite, box: Box, cells: Sequence[Cell | Search] = ()) -> UserError | None:
    """The first thing that the suite needs and the box lacks; of chosen cells, as many GPUs as the largest needs."""
    wanted = suite.requires
    if cells:
        largest = max(example_of(cell).world_size for cell in cells)
        gpus, per_node = min(wanted.gpus, largest), min(wanted.gpus_per_node, largest)
        wanted = dataclasses.replace(wanted, gpus=gpus, gpus_per_node=per_node)
    smallest_gib = min(box.gpu_memory_gib[: wanted.gpus], default=0.0)
    there = "run it where they are, or use --dry-run to see what it would do"
    for is_here, needs, has, fix in (
        (box.gpus >= wanted.gpus, f"{wanted.gpus} GPU{'s'[: wanted.gpus > 1]}", f"this box shows {box.gpus}", there),
        (
            box.gpus_per_node >= wanted.gpus_per_node,
            f"{wanted.gpus_per_node} GPUs on each node", f"here are {box}", there,
        ),
        (
            not wanted.gpus or smallest_gib >= wanted.gpu_memory_gib,
            f"GPUs of {wanted.gpu_memory_gib:g} GiB", f"one here has {smallest_gib:.0f}", there,
        ),
        (
            box.host_memory_gib >= wanted.host_memory_gib,
            f"{wanted.host_memory_gib:g} GiB of host memory", f"here are {box.host_memory_gib:.0f}",
            f"run it where there is more, or let {HOST_MEMORY_VARIABLE} say how much this box can have",
        ),
    ):  # fmt: skip
        if not is_here:
            return UserError(f"{suite.name} needs {needs}, and {has}", fix)
    return None


def _smallest_box_for(suite: Suite, box: Box) -> Box:
    """This box, or where it shows fewer GPUs than the suite needs, one that has them: a plan is for where it runs."""
    wanted = suite.requires
    if box.gpus >= wanted.gpus:
        return box
    nodes = max(1, wanted.gpus // (wanted.gpus_per_node or wanted.gpus))
    return Box((wanted.gpu_memory_gib,) * wanted.gpus, max(box.host_memory_gib, wanted.host_memory_gib), nodes)
