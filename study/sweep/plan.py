"""From a suite to the cells of this box, in the order they run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from study.config import RunConfig, resolved
from study.errors import UserError
from study.strategies import read_strategy
from study.sweep.box import Box
from study.sweep.suite_file import CELL_KEYS, DEFAULT_TIME_LIMIT_S, Grid, Suite

RANKS_WITHOUT_A_GPU = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a suite."""

    strategy: str
    world_size: int
    config: RunConfig
    # What the suite says of it, without the defaults of study/train.py.
    asked: RunConfig
    repeat: int
    time_limit_s: float

    @functools.cached_property
    def id(self) -> str:
        return f"{self.config.run_id(self.strategy, self.world_size)}-r{self.repeat}"

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps, where they can be told without the data."""
        known = self.config.max_steps or self.config.train_samples
        return self.config.total_steps(self.config.train_samples or self.config.global_batch_size) if known else None

    def flags(self, output_dir: Path) -> list[str]:
        """The command line of study/train.py that asks for exactly this run."""
        flags = []
        for field in dataclasses.fields(RunConfig):
            value = getattr(self.asked, field.name)
            if value == field.default and field.name != "task":
                continue
            if isinstance(value, bool):
                flags.append(f"--{field.name}" if value else f"--no-{field.name}")
            elif isinstance(value, tuple):
                flags += [f"--{field.name}={item}" for item in value]
            else:
                flags += [f"--{field.name}", str(value)]
        return [*flags, "--output_dir", str(output_dir)]


def plan_cells(suite: Suite, box: Box, only: str | None = None) -> list[Cell]:
    """Blocks of a repeat and a seed, each holding every arm once in an order of its own.

    So a machine that drifts over hours does not favour the arm that happened to run first. A cell that two grids name
    is one cell. The order is the suite's: what `only` leaves out leaves the rest as it was.
    """
    cells = {cell.id: cell for grid in suite.grids for cell in _grid_cells(grid, box)}
    blocks: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells.values():
        blocks.setdefault((cell.repeat, cell.config.seed), []).append(cell)
    order = random.Random(suite.order_seed)
    for block in blocks.values():
        order.shuffle(block)
    planned = list(itertools.chain.from_iterable(block for _, block in sorted(blocks.items())))
    if only is None:
        return planned
    chosen = [cell for cell in planned if fnmatch(cell.id, only)]
    if not chosen:
        raise UserError(f"--only {only} matches no cell of {suite.name}", f"an id looks like {planned[0].id}")
    return chosen


def _grid_cells(grid: Grid, box: Box) -> Iterator[Cell]:
    for combination in itertools.product(*grid.axes.values()):
        values = {**grid.fixed, **dict(zip(grid.axes, combination, strict=True))}
        if "strategy" not in values:
            raise UserError(f"{grid.place}: the grid names no strategy", "add strategy: to its axes, or to fixed")
        values.setdefault("world_size", box.gpus or RANKS_WITHOUT_A_GPU)
        for override in grid.overrides:
            if _matches(values, override.where, grid.place):
                values |= override.fixed
        if values["strategy"] == "single":
            values["world_size"] = 1
        if any(_matches(values, rule, grid.place) for rule in grid.exclude):
            continue
        for repeat in range(1, grid.repeats + 1):
            yield _cell(values, repeat, box, grid.place)


def _matches(values: Mapping[str, Any], rule: Mapping[str, list[Any]], place: str) -> bool:
    for key, options in rule.items():
        if key not in values:
            raise UserError(
                f"{place}: a rule looks at {key}, which the grid does not set", f"set {key}, or drop the rule"
            )
        if values.get(key) not in options:
            return False
    return True


def _cell(values: Mapping[str, Any], repeat: int, box: Box, place: str) -> Cell:
    strategy, world_size = values["strategy"], values["world_size"]
    try:
        asked = RunConfig.from_dict({key: value for key, value in values.items() if key not in CELL_KEYS}, place)
        config = resolved(asked, accelerator_visible=box.gpus > 0)
        config.batch_plan(world_size)
        _check_engine(strategy, config)
        cell = Cell(
            strategy=strategy,
            world_size=world_size,
            config=config,
            # What `auto` means is settled here once, for the id and for the run.
            asked=dataclasses.replace(asked, scale=config.scale),
            repeat=repeat,
            time_limit_s=float(values.get("time_limit_s", DEFAULT_TIME_LIMIT_S)),
        )
        cell.total_steps  # noqa: B018 - refuses a batch larger than the samples
    except UserError as refusal:
        raise UserError(f"{place}: {strategy} on {world_size} ranks: {refusal.problem}", refusal.mend) from None
    return cell


def _check_engine(strategy: str, config: RunConfig) -> None:
    if (config.precision == "bf16-engine" or config.engine_override) and read_strategy(strategy).deepspeed is None:
        asked = "precision: bf16-engine" if config.precision == "bf16-engine" else "engine_override"
        raise UserError(f"{asked} is for DeepSpeed, and {strategy} runs without it", "exclude the combination")


def uses_nvme(cell: Cell) -> bool:
    return read_strategy(cell.strategy).uses_nvme
