"""A suite made small enough for any box: the same grids and commands with tiny models, before a large box is paid for.

It proves that every kind of cell starts, trains and leaves its record, once and with one seed. Its figures are not the
suite's, and its records stand in a folder of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from study.sweep.suite_file import Grid, Ladder, Override, Requirements, Suite

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
