"""The cells of a suite on this machine in running order: one slice, or the slices of a series.

Records of a slice are in the folder of its suite, so that a series and its suites share them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.config.flags import RunConfig, resolve_config
from study.config.strategies import MIN_RANKS_WITH_REPLICAS, STRATEGY_NAMES, WITH_GROUPS, WITH_REPLICAS, read_strategy
from study.host.machine import Machine
from study.host.memory import HOST_MEMORY_VARIABLE
from study.sweep import forecast, suite_file
from study.sweep.cell import Cell, Trainer
from study.sweep.search import Search, list_runs, representative_cell
from study.sweep.suite_file import Grid, Ladder, SliceSpec, Suite

RANKS_WITHOUT_A_GPU = 2
# A probe does everything that a run does, with the fewest steps and samples.
_PROBE = {"max_steps": 3, "eval_samples": 8}
_STRATEGIES: dict[Trainer, Sequence[str]] = {
    "study": STRATEGY_NAMES,
    "hf_trainer": [name for name in STRATEGY_NAMES if name not in ("fsdp2", "hsdp", *WITH_GROUPS)],
    "bare_loop": ("single", "ddp"),
}

_MORE_MEMORY = f"run it on a machine with more, or set {HOST_MEMORY_VARIABLE} to the memory that this one can use"


@dataclasses.dataclass(frozen=True)
class Slice:
    """Cells of one suite that are run together. `only` is the series' selection."""

    suite: Suite
    only: tuple[str, ...]
    cells: list[Cell | Search]
    root: Path
    # All cells of the suite, also those that `only` leaves out.
    planned: list[Cell | Search]

    @property
    def title(self) -> str:
        return " ".join([self.suite.name, *self.only])

    @property
    def searches(self) -> list[Search]:
        return [cell for cell in self.cells if isinstance(cell, Search)]

    def runs_of_others(self) -> str | None:
        """Return a notice about runs of another suite or version in the folder; None without such runs."""
        cell_ids = {run.id for item in self.planned for run in list_runs(item)}
        run_ids = sorted({file.parent.name for file in self.root.glob("*/status.json")} - cell_ids)
        if not run_ids:
            return None
        return (
            f"runs in the folder {self.root.name} that are not cells of this suite: {len(run_ids)}, such as"
            f" {run_ids[0]}; its report covers them too. If two suites are named {self.suite.name}, rename one"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The slices of a suite or a series, in running order."""

    name: str
    # It consists of slices of other suites.
    is_series: bool
    slices: list[Slice]

    def roots(self) -> list[Path]:
        return list(dict.fromkeys(part.root for part in self.slices))


def plan_suite(name: str, box: Machine, runs_dir: Path, only: Sequence[str] = (), *, rehearse: bool = False) -> Plan:
    """Return the plan of a suite or series; each cell is in the first slice that selects it."""
    file = suite_file.find_suite(name)
    suite = suite_file.read_suite(file)
    is_series = bool(suite.slices)
    parts = _members(file, suite) if is_series else [(suite, SliceSpec("", name))]
    if rehearse:
        suite = suite_file.shrink_suite(suite)
        small = {member.name: suite_file.shrink_suite(member) for member, _ in parts}
        parts = [(member, SliceSpec("", member.name)) for member in small.values()]
    slices = []
    planned_ids: set[tuple[str, str]] = set()
    members = {member.name: member for member, _ in parts}
    planned = {name: plan_cells(member, smallest_machine(member, box)) for name, member in members.items()}
    for member, part in parts:
        chosen = filter_cells(planned[member.name], part.only)
        if not chosen:
            raise _matches_nothing(f"{part.place}: only {list(part.only)}", member.name, planned[member.name])
        cells = [cell for cell in chosen if (member.name, cell.id) not in planned_ids]
        planned_ids |= {(member.name, cell.id) for cell in cells}
        if cells := filter_cells(cells, only):
            slices.append(Slice(member, part.only, cells, (runs_dir / member.name).absolute(), planned[member.name]))
    if not slices:
        raise _matches_nothing(f"--only {' --only '.join(only)}", suite.name, next(iter(planned.values())))
    return Plan(suite.name, is_series, slices)


def _matches_nothing(only: str, suite: str, planned: Sequence[Cell | Search]) -> UserError:
    return UserError(f"{only} matches no cell of {suite}", f"an id looks like {planned[0].id}")


def _members(file: Path, series: Suite) -> list[tuple[Suite, SliceSpec]]:
    """Return the suites of a series: files in its folder, else names in study/suites/, or paths."""
    read: dict[str, Suite] = {}
    for part in series.slices:
        if part.suite in read:
            continue
        sibling = file.parent / f"{part.suite}.yaml"
        try:
            suite = suite_file.read_suite(sibling if sibling.is_file() else suite_file.find_suite(part.suite))
        except UserError as refusal:
            raise UserError(f"{part.place}: {refusal.problem}", refusal.fix) from None
        if suite.slices:
            raise UserError(f"{part.place}: {part.suite} is a series itself", "name the suites of that series")
        if any(key != part.suite and member.name == suite.name for key, member in read.items()):
            raise UserError(f"{part.place}: another suite of this series is also named {suite.name}", "rename one")
        read[part.suite] = suite
    return [(read[part.suite], part) for part in series.slices]


def missing_requirement(suite: Suite, box: Machine, cells: Sequence[Cell | Search] = ()) -> UserError | None:
    """Return an error about the first requirement that the machine lacks for these cells, by default all; or None."""
    requires = suite.requires
    if cells:
        largest = max(representative_cell(cell).world_size for cell in cells)
        gpus, per_node = min(requires.gpus, largest), min(requires.gpus_per_node, largest)
        requires = dataclasses.replace(requires, gpus=gpus, gpus_per_node=per_node)
    smallest_gib = min(box.gpu_memory_gib[: requires.gpus], default=0.0)
    fix = "run it on a machine that has them, or use --dry_run for a forecast"
    if box.gpus < requires.gpus:
        lacks = f"{requires.gpus} GPU{'s'[: requires.gpus > 1]}, and this machine shows {box.gpus}"
    elif box.gpus_per_node < requires.gpus_per_node:
        lacks = f"{requires.gpus_per_node} GPUs on each node, and here are {box}"
    elif requires.gpus and smallest_gib < requires.gpu_memory_gib:
        lacks = f"GPUs of {requires.gpu_memory_gib:g} GiB, and one here has {smallest_gib:.0f}"
    elif box.host_memory_gib < requires.host_memory_gib:
        lacks = f"{requires.host_memory_gib:g} GiB of host memory, and here are {box.host_memory_gib:.0f}"
        fix = _MORE_MEMORY
    else:
        return None
    return UserError(f"{suite.name} needs {lacks}", fix)


def smallest_machine(suite: Suite, box: Machine) -> Machine:
    """Return this machine, or the smallest with the suite's GPUs, as a plan depends on the GPUs that it runs on."""
    requires = suite.requires
    if box.gpus >= requires.gpus:
        return box
    nodes = max(1, requires.gpus // (requires.gpus_per_node or requires.gpus))
    host_memory_gib = requires.host_memory_gib or box.host_memory_gib
    return Machine((requires.gpu_memory_gib,) * requires.gpus, host_memory_gib, nodes)


def plan_cells(suite: Suite, box: Machine) -> list[Cell | Search]:
    """Return the cells in blocks of one repeat and seed, each with every strategy once in random order.

    So a drift of the machine over hours does not favor the strategy that ran first. A cell of two grids is one cell.
    """
    left_out = _grids_left_out(suite, box)
    grids = [grid for grid in suite.grids if grid not in left_out]
    cells = {cell.id: cell for grid in grids for cell in _grid_cells(suite, grid, box)}
    if left_out and not cells:
        raise UserError(f"{suite.name} needs {_lacking_memory(left_out, box)}", _MORE_MEMORY)
    if not cells:
        raise UserError(f"the suite {suite.name} has no cell: its grids exclude all of them", "exclude fewer cells")
    # Virtual ranks have no losses: among real runs they would look like runs whose losses are missing.
    if len({bool(cell.config.virtual_world_size) for cell in cells.values() if isinstance(cell, Cell)}) > 1:
        problem = f"the suite {suite.name} mixes virtual ranks with real runs"
        raise UserError(problem, "put the cells with virtual_world_size in a separate suite")
    # Cells of one stack are adjacent, because they share a process that has imported its libraries.
    blocks: dict[tuple[str, int, int], list[Cell | Search]] = {}
    for cell in cells.values():
        example = representative_cell(cell)
        blocks.setdefault((example.stack or "", example.repeat, example.config.seed), []).append(cell)
    order = random.Random(suite.order_seed)
    for block in blocks.values():
        order.shuffle(block)
    return list(itertools.chain.from_iterable(block for _, block in sorted(blocks.items())))


def _grids_left_out(suite: Suite, box: Machine) -> list[Grid]:
    """Return the grids that need more host memory than the machine has; in a rehearsal their models are small."""
    return [grid for grid in suite.grids if grid.host_memory_gib > box.host_memory_gib and not suite.is_rehearsal]


def _lacking_memory(grids: Sequence[Grid], box: Machine) -> str:
    return f"{min(grid.host_memory_gib for grid in grids):g} GiB of host memory, and here are {box.host_memory_gib:.0f}"


def runs_left_out(suite: Suite, box: Machine) -> str | None:
    """Return which runs of a suite this machine leaves out, and why; None if it runs all."""
    grids = _grids_left_out(suite, box)
    if not grids:
        return None
    cells = [cell for grid in grids for cell in _grid_cells(suite, grid, box)]
    models = dict.fromkeys(representative_cell(cell).config.model_name_or_path for cell in cells)
    return f"{len(cells)} runs of {' and '.join(models)} need {_lacking_memory(grids, box)}: left out"


def filter_cells(cells: Iterable[Cell | Search], only: Sequence[str]) -> list[Cell | Search]:
    """Return the cells that match every pattern: their id, or with KEY=PATTERN a flag or another setting."""
    chosen = list(cells)
    for pattern in only:
        key, has_key, text = pattern.partition("=")
        if not has_key:
            chosen = [cell for cell in chosen if fnmatch(cell.id, pattern)]
            continue
        matching = []
        for cell in chosen:
            example = representative_cell(cell)
            values = example.config.to_dict() | {
                "strategy": example.strategy,
                "trainer": example.trainer,
                "world_size": example.world_size,
                "repeat": example.repeat,
                "stack": example.stack or "",
            }
            if key not in values:
                fix = "use a flag of study/train.py, strategy or repeat"
                raise UserError(f"--only {pattern}: no run has a {key}", fix)
            value = values[key]
            if fnmatch(f"{value:g}" if isinstance(value, float) else str(value).lower(), text.lower()):
                matching.append(cell)
        chosen = matching
    return chosen


def _grid_cells(suite: Suite, grid: Grid, box: Machine) -> Iterator[Cell | Search]:
    # Positions of the rules that matched a run; a rule without a match has a typo.
    matched = set[int]()
    for combination in itertools.product(*grid.axes.values()):
        values = {**grid.fixed, **dict(zip(grid.axes, combination, strict=True))}
        if "strategy" not in values:
            raise UserError(f"{grid.place}: the grid names no strategy", "add strategy: to its axes, or to fixed")
        default = MIN_RANKS_WITH_REPLICAS if values["strategy"] in WITH_REPLICAS else RANKS_WITHOUT_A_GPU
        values.setdefault("world_size", box.gpus or default)
        for number, (where, fixed) in enumerate(grid.overrides):
            if _matches(values, where, grid.place):
                matched.add(number)
                values |= fixed
        if values.get("virtual_world_size"):
            _check_virtual_run(grid, values["strategy"])
        if values["strategy"] == "single" or values.get("virtual_world_size"):
            values["world_size"] = 1
        excluding = [_matches(values, rule, grid.place) for rule in grid.exclude]
        matched.update(len(grid.overrides) + number for number, is_met in enumerate(excluding) if is_met)
        if any(excluding):
            continue
        if suite.is_rehearsal:
            # The number of ranks that the machine decides stays.
            default_size = {} if _sets_world_size(grid) else {"world_size": values["world_size"]}
            values = suite_file.shrink_run(values, grid) | default_size
        yield from _repeated(values, grid, box)
    _check_rules(grid, matched)


def _repeated(values: dict[str, Any], grid: Grid, box: Machine) -> Iterator[Cell | Search]:
    """Yield a cell for each repeat of a run; a search if the grid has a ladder."""
    for repeat in range(1, grid.repeats + 1):
        if grid.ladder is None:
            yield _cell(values, repeat, box, grid.place)
        else:
            yield _search(values, list(grid.axes), grid.ladder, repeat, box, grid.place)


def _sets_world_size(grid: Grid) -> bool:
    """Whether the grid sets the number of ranks, which otherwise the machine decides."""
    return "world_size" in grid.fixed or "world_size" in grid.axes


def _check_virtual_run(grid: Grid, strategy: str) -> None:
    """Raise UserError if the grid also sets a number of real ranks, or if the strategy has one rank only."""
    if {**grid.fixed, **grid.axes}.get("world_size", 1) not in (1, [1]):
        raise UserError(f"{grid.place}: world_size and virtual_world_size are both set", "keep one of the two")
    if strategy == "single":
        raise UserError(f"{grid.place}: single has one rank, and cannot be a virtual rank", "leave it out")


def _check_rules(grid: Grid, matched: set[int]) -> None:
    """Raise UserError for the first override or exclusion that matched no run, by position."""
    rules = [where for where, _ in grid.overrides]
    for number, rule in enumerate([*rules, *grid.exclude]):
        # The machine may decide the number of ranks.
        if number not in matched and ("world_size" not in rule or _sets_world_size(grid)):
            conditions = ", ".join(f"{key}: {' or '.join(map(str, options))}" for key, options in rule.items())
            raise UserError(f"{grid.place}: no run of the grid has {conditions}", "correct the rule, or remove it")


def _search(
    values: Mapping[str, Any], axes: list[str], ladder: Ladder, repeat: int, box: Machine, place: str
) -> Search:
    rung_key = "model_name_or_path" if ladder.axis == "largest_model" else "per_device_train_batch_size"

    @functools.cache
    def probe_of(position: int) -> Cell:
        # Without accumulation, and on the samples of one step: only the micro-batch decides whether it fits.
        probe = {**_PROBE, **values, rung_key: ladder.rungs[position]}
        if micro_batch := probe.get("per_device_train_batch_size"):
            probe["global_batch_size"] = micro_batch * (probe.get("virtual_world_size") or probe["world_size"])
            probe["train_samples"] = max(probe.get("train_samples") or 0, probe["global_batch_size"])
        return _cell(probe, repeat, box, place)

    # Plans both ends first, so that a probe that cannot run is an error before any run starts.
    first, _ = probe_of(0), probe_of(len(ladder.rungs) - 1)
    id_keys = {"strategy", "trainer", "task", "model_name_or_path", "world_size"}
    model = ladder.axis if ladder.axis == "largest_model" else f"{first.config.model_name}-{ladder.axis}"
    digest = hashlib.sha256(f"{first.id} {list(ladder.rungs)}".encode()).hexdigest()[:8]
    return Search(
        id=f"{first.config.task}-{model}-{first.arm}-{first.ranks}x-{digest}-r{repeat}",
        axis=ladder.axis,
        rungs=ladder.rungs,
        label=", ".join(f"{key} {values[key]}" for key in axes if key in values.keys() - id_keys),
        probe_at=probe_of,
        guess=lambda: forecast.Forecast(box, {}, None).last_that_fits(map(probe_of, range(len(ladder.rungs)))),
    )


def _matches(values: Mapping[str, Any], rule: Mapping[str, list[Any]], place: str) -> bool:
    for key, options in rule.items():
        if key not in values:
            raise UserError(f"{place}: a rule names {key}, which the grid does not set", "set it, or remove the rule")
        if values[key] not in options:
            return False
    return True


def _cell(values: Mapping[str, Any], repeat: int, box: Machine, place: str) -> Cell:
    cell_settings = {key: values[key] for key in suite_file.CELL_KEYS & values.keys()}
    flags = {key: value for key, value in values.items() if key not in cell_settings and key != suite_file.ACCUMULATION}
    try:
        requested = RunConfig.from_dict(flags, place)
        if steps := values.get(suite_file.ACCUMULATION):
            batch = resolve_config(requested, accelerator_visible=box.gpus > 0).global_batch_size
            ranks = cell_settings["world_size"]
            if requested.per_device_train_batch_size is not None:
                problem = f"{suite_file.ACCUMULATION} and per_device_train_batch_size are both set"
                raise UserError(problem, "keep one of the two")
            if batch % (ranks * steps):
                problem = f"{suite_file.ACCUMULATION} {steps} does not divide global_batch_size {batch}"
                raise UserError(problem, f"use a global_batch_size that is a multiple of {ranks * steps}")
            requested = dataclasses.replace(requested, per_device_train_batch_size=int(batch // (ranks * steps)))
        config = resolve_config(requested, accelerator_visible=box.gpus > 0)
        # `auto` is resolved here, so that the id and the run agree.
        cell = Cell(
            config=config, requested=dataclasses.replace(requested, scale=config.scale), repeat=repeat, **cell_settings
        )
        cell.plan  # noqa: B018 - raises if the batch does not divide
        read_strategy(cell.strategy).check_engine_flags(config)
        if cell.strategy not in _STRATEGIES[cell.trainer]:
            raise UserError(f"trainer: {cell.trainer} does not run {cell.strategy}", "exclude the combination")
        cell.total_steps  # noqa: B018 - raises if the batch is larger than the samples
    except UserError as refusal:
        subject = f"{cell_settings['strategy']} on {cell_settings['world_size']} ranks"
        raise UserError(f"{place}: {subject}: {refusal.problem}", refusal.fix) from None
    return cell
