"""Group runs into workloads, and name workloads and strategies in tables and plots."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from study.config.strategies import STRATEGY_NAMES

# Baseline strategies. A workload without any of these uses its first strategy in the usual order.
BASELINES = ("single", "ddp", "zero0")
# Columns that separate experiments, with their format: model and data, then the amount of work.
_SUBJECT = {
    "virtual": "virtual",
    "task": "{}",
    "model_name_or_path": "{}",
    "data": "{}",
    "dataset_config_name": "{}",
    "stack": "DeepSpeed {}",
    "weights": "{} weights",
    "seq_length": "{} tokens",
}
_WORK = {
    "precision": "{}",
    "global_batch_size": "batch {}",
    "per_device_train_batch_size": "micro-batch {}",
    "train_samples": "{} samples",
    "num_train_epochs": "{} epochs",
    "max_steps": "{} steps",
    "gradient_checkpointing": "checkpointing {}",
    "attn_implementation": "{} attention",
    "torch_compile": "compile {}",
    "tokenizer_name": "tokenizer {}",
    "device_memory_cap_gib": "cap {} GiB",
    "peft": "{}",
    "lora_rank": "rank {}",
    "lora_alpha": "alpha {}",
    "optimizer": "{}",
    "bf16_states": "states in bf16",
}
# Columns that should be equal within an experiment.
_RULES = {
    "learning_rate": "learning rate {}",
    "lr_scheduler_type": "{} schedule",
    "warmup_ratio": "warm-up {}",
    "weight_decay": "decay {}",
    "max_grad_norm": "clipping {}",
    "dropout": "dropout {}",
    "eval_samples": "{} eval samples",
}
_WORDS = _SUBJECT | _WORK | _RULES
# Data in words; --data hub is the data that a task is named after.
_DATA = {"builtin": "built-in text", "reviews": "film reviews"}
_HUB_DATA = {"bert-imdb": "IMDB", "gpt-wikitext": "Wikitext"}

# Values that count as unset, because older records lack these settings.
_AS_BEFORE = {"peft": "none", "lora_rank": 8, "lora_alpha": 16, "optimizer": "adamw", "bf16_states": False}
Columns = Mapping[str, Any]
Values = Sequence[tuple[str, Any]]


class ArmName(NamedTuple):
    """The parts of a strategy's name in tables and plots."""

    strategy: str
    # None if the strategy ran on one number of ranks in its workload.
    ranks: int | None = None
    # A virtual rank, another trainer, the profiler, overrides, and settings in which runs of a workload differ.
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((self.label, *self.settings))

    @property
    def label(self) -> str:
        """The strategy and its ranks, without its settings."""
        return self.strategy if self.ranks is None else f"{self.strategy} x{self.ranks}"

    @property
    def without_ranks(self) -> str:
        return str(self._replace(ranks=None))


def read_arm(name: str) -> ArmName:
    """Return the parts of a strategy's name that `name_workloads` wrote."""
    label, *settings = name.split(", ")
    strategy, _, ranks = label.partition(" x")
    return ArmName(strategy, int(ranks) if ranks else None, tuple(settings))


def name_workloads(rows: Sequence[Columns]) -> list[dict[str, Any]]:
    """Return each run with its `workload`, `workload_key` and `arm`; None means not recorded."""
    exact = [tuple((field, _asked(field, row[field])) for field in _WORDS) for row in rows]
    experiments = _experiments(rows, exact)
    keys = {values: json.dumps(dict(experiment)) for values, experiment in experiments.items()}
    texts = workload_names(sorted(set(keys.values())))
    labelled = [
        {**row, "workload_key": keys[values], "workload": texts[keys[values]]}
        for row, values in zip(rows, exact, strict=True)
    ]
    worlds: defaultdict[Any, set[Any]] = defaultdict(set)
    for row in labelled:
        worlds[row["workload_key"], row["strategy"]].add(row["world_size"])
    for row, values in zip(labelled, exact, strict=True):
        has_several = len(worlds[row["workload_key"], row["strategy"]] - {None}) > 1
        ranks = row["world_size"] if has_several else None
        virtual_rank = f"rank {row['virtual_rank']}" if row["virtual_rank"] else ""
        trainer = "" if row["trainer"] in (None, "study") else row["trainer"]
        # The profiler slows the last steps, so a profiled run is not a repeat of other runs.
        profiled = "profiled" if row["profile_steps"] else ""
        overrides = json.loads(row["engine_override"] or "[]")
        words = (format_setting(field, value) for field, value in _differing(values, experiments[values]))
        settings = (part for part in (virtual_rank, trainer, profiled, *overrides, *words) if part)
        row["arm"] = str(ArmName(row["strategy"] or "unknown", ranks, tuple(settings)))
    return labelled


def _asked(field: str, value: Any) -> Any:
    return None if field in _AS_BEFORE and (pd.isna(value) or value == _AS_BEFORE[field]) else value


def format_options(row: Columns) -> list[str]:
    """Return the options of a run that do not belong to its strategy, as text."""
    options = {field: _asked(field, row[field]) for field in _AS_BEFORE}
    return [format_setting(field, value) for field, value in options.items() if value is not None]


def _experiments(rows: Sequence[Columns], exact: Sequence[Values]) -> dict[Values, Values]:
    """Map settings to experiments: each is a separate one, or joins the nearest one if it lacks a baseline."""
    members: defaultdict[Values, set[str]] = defaultdict(set)
    for values, row in zip(exact, rows, strict=True):
        members[values].add(row["strategy"] or "")
    with_baseline = [values for values, strategies in members.items() if strategies & set(BASELINES)]
    experiments = {}
    for values, strategies in members.items():
        same_subject = [candidate for candidate in with_baseline if _same(values, candidate, _SUBJECT)]
        by_rules = [candidate for candidate in same_subject if _same(values, candidate, _WORK)]
        # Several strategies with another amount of work form a separate experiment; other rules never do.
        choice = by_rules or (same_subject if len(strategies) == 1 else [])
        if values in with_baseline or not choice:
            experiments[values] = values
        else:
            experiments[values] = min(
                choice, key=lambda candidate: (len(_differing(values, candidate)), -len(members[candidate]))
            )
    return experiments


def _same(first: Values, second: Values, fields: Iterable[str]) -> bool:
    return not {field for field, _ in _differing(first, second)} & set(fields)


def _differing(first: Values, second: Values) -> list[tuple[str, Any]]:
    return [
        (field, value) for (field, value), (_, second_value) in zip(first, second, strict=True) if value != second_value
    ]


def format_setting(field: str, value: Any) -> str:
    """Format a setting as text."""
    if field == "virtual":
        return "virtual" if value else "real"
    if field == "dropout" and value == -1:
        return "the model's own dropout"
    text = "off" if value is False else "on" if value is True else f"{value:g}" if isinstance(value, float) else value
    if field == "model_name_or_path" or field == "data":
        text = str(value).rstrip("/").rsplit("/", 1)[-1]
        if part := re.fullmatch(r"(.+)-(\d+)layers", text):
            text = f"{part[2]} layer{'s' * (part[2] != '1')} of {part[1]}"
    return _WORDS.get(field, f"{field} {{}}").format("unset" if text is None else text)


def data_name(values: Columns) -> str | None:
    """Return the data of a run in words; None if not recorded."""
    data = values["data"]
    return _HUB_DATA.get(values["task"]) if data == "hub" else _DATA.get(data, data)


def workload_names(keys: Sequence[str]) -> dict[str, str]:
    """Name workloads by model, data, and the settings that differ among the workloads of that model and task."""
    parsed = {key: (values := json.loads(key)) | {"data": data_name(values)} for key in keys}
    keys_by_model: defaultdict[tuple[Any, Any], list[str]] = defaultdict(list)
    for key, values in parsed.items():
        keys_by_model[values["task"], values["model_name_or_path"]].append(key)
    texts = {}
    for (task, _), group in keys_by_model.items():
        varying = {field for field in parsed[group[0]] if len({json.dumps(parsed[key][field]) for key in group}) > 1}
        for key in group:
            values = parsed[key]
            fields = [field for field in values if field in ("model_name_or_path", "data") or field in varying]
            words = [format_setting(field, values[field]) for field in fields if values[field] not in (None, False)]
            texts[key] = ", ".join(words) if task else "workload not recorded"
    return texts


def strategy_order(strategy: Any) -> int:
    """Return the sort key of a strategy; unknown ones are last."""
    return STRATEGY_NAMES.index(strategy) if strategy in STRATEGY_NAMES else len(STRATEGY_NAMES)
