"""What a suite's name means on this box: one slice, or for a suite that is made of others, all of them in order.

Records of a slice stand where those of its suite do, so that a series and its suites go on from each other's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from study.errors import UserError
from study.host.box import Box
from study.host.memory import HOST_MEMORY_VARIABLE
from study.launch.cell import Cell
from study.sweep.plan import chosen_of, plan_cells
from study.sweep.rehearsal import rehearsed
from study.sweep.search import Search, example_of
from study.sweep.suite_file import SliceOf, Suite, find_suite, read_suite


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
