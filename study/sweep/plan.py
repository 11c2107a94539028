"""From a suite to the cells of this box, in the order they run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from study.config.errors import UserError
from study.config.flags import RunConfig, resolved
from study.config.strategies import LEAST_RANKS_WITH_COPIES, STRATEGY_NAMES, WITH_COPIES, WITH_TEAMS, read_strategy
from study.host.box import Box
from study.sweep.cell import Cell, Trainer
from study.sweep.foresee import Foresight
from study.sweep.search import Search, example_of
from study.sweep.suite_file import ACCUMULATION, CELL_KEYS, Grid, Ladder, Suite

RANKS_WITHOUT_A_GPU = 2
# A probe asks what fits: it does everything that a run does, and as little of it as possible.
_PROBE = {"max_steps": 3, "eval_samples": 8}
# What each trainer runs.
_STRATEGIES: dict[Trainer, Sequence[str]] = {
    "study": STRATEGY_NAMES,
    "hf_trainer": [name for name in STRATEGY_NAMES if name not in ("fsdp2", "hsdp", *WITH_TEAMS)],
    "bare_loop": ("single", "ddp"),
}


def plan_cells(suite: Suite, box: Box) -> list[Cell | Search]:
    """Blocks of a repeat and a seed, each holding every arm once in an order of its own.

    So a machine that drifts over hours does not favour the arm that happened to run first. A cell that two grids name
    is one cell.
    """
    cells = {cell.id: cell for grid in suite.grids for cell in _grid_cells(suite, grid, box)}
    if not cells:
        raise UserError(f"the suite {suite.name} has no cell: its grids exclude all of them", "exclude less")
    # Virtual ranks have no losses: beside real runs they would look like runs that failed to report theirs.
    if len({bool(cell.config.virtual_world_size) for cell in cells.values() if isinstance(cell, Cell)}) > 1:
        raise UserError(
            f"the suite {suite.name} mixes virtual ranks with real runs",
            "put the cells with virtual_world_size in a suite of their own",
        )
    # A stack's cells together: what has imported its libraries is used by the next one.
    blocks: dict[tuple[str, int, int], list[Cell | Search]] = {}
    for cell in cells.values():
        example = example_of(cell)
        blocks.setdefault((example.stack or "", example.repeat, example.config.seed), []).append(cell)
    order = random.Random(suite.order_seed)
    for block in blocks.values():
        order.shuffle(block)
    return list(itertools.chain.from_iterable(block for _, block in sorted(blocks.items())))


def chosen_of(cells: Iterable[Cell | Search], only: Sequence[str]) -> list[Cell | Search]:
    """Those that every pattern means, in the order of all."""
    return [cell for cell in cells if all(_is_meant(cell, pattern) for pattern in only)]


def _is_meant(cell: Cell | Search, pattern: str) -> bool:
    """A pattern of ids, or KEY=PATTERN for a flag of the run or what else a cell is made of."""
    key, is_about_a_key, wanted = pattern.partition("=")
    if not is_about_a_key:
        return fnmatch(cell.id, pattern)
    one = example_of(cell)
    values = one.config.to_dict() | {
        "strategy": one.strategy, "trainer": one.trainer, "world_size": one.world_size, "repeat": one.repeat,
        "stack": one.stack or "",
    }  # fmt: skip
    if key not in values:
        raise UserError(f"--only {pattern}: no run has a {key}", "use a flag of study/train.py, strategy or repeat")
    value = values[key]
    return fnmatch(f"{value:g}" if isinstance(value, float) else str(value).lower(), wanted.lower())


def _grid_cells(suite: Suite, grid: Grid, box: Box) -> Iterator[Cell | Search]:
    # By place; a rule that meets nothing has a typo.
    rules, met = [override.where for override in grid.overrides], set[int]()
    for combination in itertools.product(*grid.axes.values()):
        values = {**grid.fixed, **dict(zip(grid.axes, combination, strict=True))}
        if "strategy" not in values:
            raise UserError(f"{grid.place}: the grid names no strategy", "add strategy: to its axes, or to fixed")
        is_of_copies = values["strategy"] in WITH_COPIES
        values.setdefault("world_size", box.gpus or (LEAST_RANKS_WITH_COPIES if is_of_copies else RANKS_WITHOUT_A_GPU))
        for number, override in enumerate(grid.overrides):
            if _matches(values, override.where, grid.place):
                met.add(number)
                values |= override.fixed
        if values["strategy"] == "single":
            values["world_size"] = 1
        if values.get("virtual_world_size"):
            _check_virtual(values, grid)
            values["world_size"] = 1
        excluding = [_matches(values, rule, grid.place) for rule in grid.exclude]
        met.update(len(rules) + number for number, is_met in enumerate(excluding) if is_met)
        if any(excluding):
            continue
        for repeat in range(1, grid.repeats + 1):
            if grid.ladder is None:
                yield _cell(values, repeat, box, grid.place)
            else:
                yield _search(suite, values, list(grid.axes), grid.ladder, repeat, box, grid.place)
    for number, rule in enumerate([*rules, *grid.exclude]):
        # How many ranks there are may be the box's to say.
        if number not in met and ("world_size" not in rule or "world_size" in {**grid.fixed, **grid.axes}):
            said = ", ".join(f"{key}: {' or '.join(map(str, options))}" for key, options in rule.items())
            raise UserError(f"{grid.place}: no run of the grid has {said}", "correct the rule, or drop it")


def _check_virtual(values: Mapping[str, Any], grid: Grid) -> None:
    if {**grid.fixed, **grid.axes}.get("world_size", 1) not in (1, [1]):
        raise UserError(f"{grid.place}: world_size and virtual_world_size are both set", "keep one of the two")
    if values["strategy"] == "single":
        raise UserError(f"{grid.place}: single is one rank alone, and cannot be one of many", "leave single out")


def _search(
    suite: Suite, values: Mapping[str, Any], axes: list[str], ladder: Ladder, repeat: int, box: Box, place: str
) -> Search:
    @functools.cache
    def probe_of(place_on_ladder: int) -> Cell:
        return _cell(_probe_values(values, ladder, place_on_ladder), repeat, box, place)

    # Both ends now: a probe that could not run is refused before anything starts.
    first, _ = probe_of(0), probe_of(len(ladder.rungs) - 1)
    named = {"strategy", "trainer", "task", "model_name_or_path", "world_size"}
    model = ladder.axis if ladder.axis == "largest_model" else f"{first.config.model_name}-{ladder.axis}"
    digest = hashlib.sha256(f"{first.id} {list(ladder.rungs)}".encode()).hexdigest()[:8]
    return Search(
        id=f"{first.config.task}-{model}-{first.arm}-{first.ranks}x-{digest}-r{repeat}",
        axis=ladder.axis,
        rungs=ladder.rungs,
        label=", ".join(f"{key} {values[key]}" for key in axes if key not in named),
        probe_of=probe_of,
        guess=lambda: Foresight(suite, box, {}, None).last_that_fits(map(probe_of, range(len(ladder.rungs)))),
    )


def _probe_values(values: Mapping[str, Any], ladder: Ladder, place: int) -> dict[str, Any]:
    """Without accumulation, on as many samples as one step takes: what fits is decided by the micro-batch alone."""
    key = "model_name_or_path" if ladder.axis == "largest_model" else "per_device_train_batch_size"
    probe = {**_PROBE, **values, key: ladder.rungs[place]}
    if micro_batch := probe.get("per_device_train_batch_size"):
        probe["global_batch_size"] = micro_batch * (probe.get("virtual_world_size") or probe["world_size"])
        probe["train_samples"] = max(probe.get("train_samples") or 0, probe["global_batch_size"])
    return probe


def _matches(values: Mapping[str, Any], rule: Mapping[str, list[Any]], place: str) -> bool:
    for key, options in rule.items():
        if key not in values:
            raise UserError(f"{place}: a rule looks at {key}, which the grid does not set", "set it, or drop the rule")
        if values[key] not in options:
            return False
    return True


def _cell(values: Mapping[str, Any], repeat: int, box: Box, place: str) -> Cell:
    own = {key: values[key] for key in CELL_KEYS & values.keys()}
    flags = {key: value for key, value in values.items() if key not in own and key != ACCUMULATION}
    try:
        asked = RunConfig.from_dict(flags, place)
        if steps := values.get(ACCUMULATION):
            asked = dataclasses.replace(asked, per_device_train_batch_size=_micro_batch(asked, box, own, steps))
        config = resolved(asked, accelerator_visible=box.gpus > 0)
        # What `auto` means is settled here once, for the id and for the run.
        cell = Cell(config=config, asked=dataclasses.replace(asked, scale=config.scale), repeat=repeat, **own)
        cell.plan  # noqa: B018 - refuses a batch that does not divide
        read_strategy(cell.strategy).check_engine_flags(config)
        if cell.strategy not in _STRATEGIES[cell.trainer]:
            raise UserError(f"trainer: {cell.trainer} does not run {cell.strategy}", "exclude the combination")
        cell.total_steps  # noqa: B018 - refuses a batch larger than the samples
    except UserError as refusal:
        what = f"{own['strategy']} on {own['world_size']} ranks"
        raise UserError(f"{place}: {what}: {refusal.problem}", refusal.fix) from None
    return cell


def _micro_batch(asked: RunConfig, box: Box, own: Mapping[str, Any], steps: int) -> int:
    batch, ranks = resolved(asked, accelerator_visible=box.gpus > 0).global_batch_size, own["world_size"]
    if asked.per_device_train_batch_size is not None:
        raise UserError(f"{ACCUMULATION} and per_device_train_batch_size are both set", "keep one of the two")
    if batch % (ranks * steps):
        raise UserError(
            f"{ACCUMULATION} {steps} does not divide global_batch_size {batch}",
            f"use a global_batch_size that is a multiple of {ranks * steps}",
        )
    return int(batch // (ranks * steps))
