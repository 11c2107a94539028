"""Workloads: which runs are one experiment, and their names in tables and plots."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from study.config.strategies import STRATEGY_NAMES

# What a comparison is measured against; without any of these it is the first strategy in the usual order.
BASELINES = ("single", "ddp", "zero0")
# Runs that differ in one of these are two experiments: a model, its data and the amount of work. With their words.
_SUBJECT = {
    "virtual": "virtual", "task": "{}", "model_name_or_path": "{}", "data": "data {}", "dataset_config_name": "{}",
    "stack": "DeepSpeed {}", "weights": "{} weights", "seq_length": "{} tokens",
}  # fmt: skip
_WORK = {
    "precision": "{}", "global_batch_size": "batch {}", "per_device_train_batch_size": "micro-batch {}",
    "train_samples": "{} samples", "num_train_epochs": "{} epochs", "max_steps": "{} steps",
    "gradient_checkpointing": "checkpointing {}", "attn_implementation": "{} attention", "torch_compile": "compile {}",
    "tokenizer_name": "tokenizer {}", "device_memory_cap_gib": "cap {} GiB", "peft": "{}", "lora_rank": "rank {}",
    "lora_alpha": "alpha {}", "optimizer": "{}", "bf16_states": "states in bf16",
}  # fmt: skip
# Runs that differ in one of these should have been one experiment.
_RULES = {
    "learning_rate": "learning rate {}", "lr_scheduler_type": "{} schedule", "warmup_ratio": "warm-up {}",
    "weight_decay": "decay {}", "max_grad_norm": "clipping {}", "dropout": "dropout {}",
    "eval_samples": "{} eval samples",
}  # fmt: skip
_WORDS = _SUBJECT | _WORK | _RULES


# Of settings that older records could not have: as what those say, which is nothing.
_AS_BEFORE = {"peft": "none", "lora_rank": 8, "lora_alpha": 16, "optimizer": "adamw", "bf16_states": False}
Columns = Mapping[str, Any]
Values = Sequence[tuple[str, Any]]


def name_workloads(rows: Sequence[Columns]) -> list[dict[str, Any]]:
    """Return every run with its `workload`, `workload_key` and `arm`. None is not recorded."""
    exact = [tuple((field, _asked(field, row[field])) for field in _WORDS) for row in rows]
    experiments = _experiments(rows, exact)
    keys = {values: json.dumps(dict(experiment)) for values, experiment in experiments.items()}
    texts = texts_of(sorted(set(keys.values())))
    named = [
        {**row, "workload_key": keys[values], "workload": texts[keys[values]]}
        for row, values in zip(rows, exact, strict=True)
    ]
    worlds: defaultdict[Any, set[Any]] = defaultdict(set)
    for row in named:
        worlds[row["workload_key"], row["strategy"]].add(row["world_size"])
    return [
        row | {"arm": _arm(row, worlds[row["workload_key"], row["strategy"]], _differing(values, experiments[values]))}
        for row, values in zip(named, exact, strict=True)
    ]


def _asked(field: str, value: Any) -> Any:
    return None if field in _AS_BEFORE and (pd.isna(value) or value == _AS_BEFORE[field]) else value


def options_of(row: Columns) -> list[str]:
    """Return the options of a run that are not settings of its strategy, in words."""
    asked = {field: _asked(field, row[field]) for field in _AS_BEFORE}
    return [word_for(field, value) for field, value in asked.items() if value is not None]


def _experiments(rows: Sequence[Columns], exact: Sequence[Values]) -> dict[Values, Values]:
    """The experiment of each set of settings: its own, or the nearest that has the baseline which its own lacks."""
    members: defaultdict[Values, set[str]] = defaultdict(set)
    for values, row in zip(exact, rows, strict=True):
        members[values].add(row["strategy"] or "")
    with_baseline = [values for values, strategies in members.items() if strategies & set(BASELINES)]
    experiments = {}
    for values, strategies in members.items():
        near = [other for other in with_baseline if _same(values, other, _SUBJECT)]
        by_rules = [other for other in near if _same(values, other, _WORK)]
        # Several strategies with another amount of work are an experiment of their own; other rules never make one.
        choice = by_rules or (near if len(strategies) == 1 else [])
        if values in with_baseline or not choice:
            experiments[values] = values
        else:
            experiments[values] = min(choice, key=lambda other: (len(_differing(values, other)), -len(members[other])))
    return experiments


def _same(one: Values, other: Values, fields: Iterable[str]) -> bool:
    return not {field for field, _ in _differing(one, other)} & set(fields)


def _differing(one: Values, other: Values) -> list[tuple[str, Any]]:
    return [(field, value) for (field, value), (_, there) in zip(one, other, strict=True) if value != there]


def word_for(field: str, value: Any) -> str:
    """A setting in words."""
    if field == "virtual":
        return "virtual" if value else "real"
    if field == "dropout" and value == -1:
        return "the model's own dropout"
    text = "off" if value is False else "on" if value is True else f"{value:g}" if isinstance(value, float) else value
    if field == "model_name_or_path" or field == "data":
        text = str(value).rstrip("/").rsplit("/", 1)[-1]
    return _WORDS.get(field, f"{field} {{}}").format("unset" if text is None else text)


def texts_of(keys: Sequence[str]) -> dict[str, str]:
    """The names of workloads by their keys: task and model, and what else differs among the workloads of that model."""
    parsed = {key: json.loads(key) for key in keys}
    alike: defaultdict[tuple[Any, Any], list[str]] = defaultdict(list)
    for key, values in parsed.items():
        alike[values["task"], values["model_name_or_path"]].append(key)
    texts = {}
    for (task, _), group in alike.items():
        for key in group:
            values = parsed[key]
            varying = {field for field in values if len({json.dumps(parsed[other][field]) for other in group}) > 1}
            said = [field for field in values if field in ("task", "model_name_or_path") or field in varying]
            words = [word_for(field, values[field]) for field in said if values[field] not in (None, False)]
            texts[key] = ", ".join(words) if task else "workload not recorded"
    return texts


def _arm(row: Columns, worlds: set[Any], differing: Values) -> str:
    name = row["strategy"] or "unknown"
    if len(worlds - {None}) > 1 and row["world_size"] is not None:
        name += f" x{row['world_size']}"
    if row["virtual_rank"]:
        name += f", rank {row['virtual_rank']}"
    trainer = "" if row["trainer"] in (None, "study") else row["trainer"]
    # The profiler slowed its last steps, so it is no repeat of a run without it.
    profiled = "profiled" if row["profile_steps"] else ""
    overrides = json.loads(row["engine_override"] or "[]")
    words = (word_for(field, value) for field, value in differing)
    return ", ".join(part for part in (name, trainer, profiled, *overrides, *words) if part)


def strategy_order(strategy: Any) -> int:
    return STRATEGY_NAMES.index(strategy) if strategy in STRATEGY_NAMES else len(STRATEGY_NAMES)
