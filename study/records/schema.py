"""Schema of the files of a run directory: all keys with their valid values.

Other content raises RecordError with the file and the reason, so that a damaged file cannot add a wrong number to a
table. A null is a figure that could not be measured, never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from study.config.registry import REGISTRY

State = Literal["ok", "oom", "timeout", "unsupported", "failed", "interrupted"]
# Quantities that a search maximizes.
SearchAxis = Literal["largest_micro_batch", "largest_model"]
STATE_KINDS = ("params", "grads", "optimizer")
STATE_PLACES = ("device", "host", "nvme")
# Parts of the time of a profiled step.
PROFILE_CATEGORIES = ("matmul", "attention", "elementwise", "optimizer", "copies", "collectives", "other")
# Figures of summary.json that are maxima of memory.json over ranks and phases.
PEAKS = {
    "peak_memory_gib_allocated": "allocated",
    "peak_memory_gib_reserved": "reserved",
    "peak_memory_gib_device": "device",
    "host_peak_rss_gib": "host",
}
# New names of keys and columns of older records. `read_json` and `read_parquet` rename them.
NEW_NAMES = {"team_size": "group_size", "team": "model_parallel_group", "team_ranks": "group_ranks"}


def with_new_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with the keys of older records renamed."""
    return {NEW_NAMES.get(key, key): value for key, value in document.items()}


class RecordError(ValueError):
    """Invalid file of a run directory, with the reason."""

    def __init__(self, file: Path, reason: str):
        self.file, self.reason = file, reason
        super().__init__(f"{file}: {reason}")


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def _is_tree(value: Any, levels: int = 20) -> bool:
    if isinstance(value, (dict, list)):
        branches = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_tree(branch, levels - 1) for branch in branches)
    return value is None or _is_number(value, 0)


_SHA256, _HASH = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{16}")
# Kinds of values by their names in the tables below. A name with `?`, such as `count?`, allows null.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "anything": ("anything", lambda value: True),
    "text": ("a string", lambda value: isinstance(value, str)),
    "name": (
        "at most 200 printable letters",
        lambda value: isinstance(value, str) and len(value) <= 200 and value.isprintable(),
    ),
    "time": ("a time with its zone", _is_time),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "count": ("a whole number from 0 up", lambda value: type(value) is int and value >= 0),
    "positive": ("a whole number from 1 up", lambda value: type(value) is int and value >= 1),
    "number": ("a number", _is_number),
    "amount": ("a number from 0 up", lambda value: _is_number(value, 0)),
    "share": ("a number from 0 to 1", lambda value: _is_number(value, 0, 1)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "sha256": ("64 hexadecimal digits", lambda value: isinstance(value, str) and bool(_SHA256.fullmatch(value))),
    "hash": ("16 hexadecimal digits", lambda value: isinstance(value, str) and bool(_HASH.fullmatch(value))),
    "steps": (
        "a list of consecutive steps",
        lambda value: (
            isinstance(value, list)
            and value != []
            and all(type(step) is int for step in value)
            and value[0] > 0
            and value == list(range(value[0], value[0] + len(value)))
        ),
    ),
    "figures": ("a tree of at most 20 levels whose every leaf is a number from 0 up", _is_tree),
}


class Keys(NamedTuple):
    """An object with required keys, optional keys, and others of one kind if `others` is set."""

    required: Mapping[str, Any]
    optional: Mapping[str, Any] = {}
    others: Any = None
    may_be_null: bool = False


def _check(kind: Any, value: Any, where: str) -> None:
    """Raise ValueError if a value is not of a kind: a name in _KINDS, a tuple of choices, a list [kind], or Keys."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r:.200}, not a list")
        for number, entry in enumerate(value):
            _check(kind[0], entry, f"{where}.{number}")
    elif isinstance(kind, Keys):
        if value is not None or not kind.may_be_null:
            _check_keys(kind, value, where)
    elif isinstance(kind, str):
        words, is_valid = _KINDS[kind.rstrip("?")]
        if not (value is None and kind.endswith("?")) and not is_valid(value):
            raise ValueError(f"{where} is {value!r:.200}, not {words}")
    elif not any(type(value) is type(choice) and value == choice for choice in kind):
        raise ValueError(f"{where} is {value!r:.200}, not one of {', '.join(map(str, kind))}")


def _check_keys(kind: Keys, value: Any, where: str) -> None:
    """Raise ValueError if a value is not an object, or if a key of it is missing, unknown or has a wrong value."""
    _check("object", value, where)
    inside = f"{where}." if where else ""
    if missing := [key for key in kind.required if key not in value]:
        raise ValueError(f"{inside}lacks {', '.join(missing)}")
    for key, entry in value.items():
        entry_kind = kind.required.get(key) or kind.optional.get(key) or kind.others
        if entry_kind is None:
            raise ValueError(f"{inside}has the unknown key {key!r}")
        _check(entry_kind, entry, f"{inside}{key}")


SEAL = {"files_sha256": "object", "status_sha256": "sha256"}
_STATUS = {
    "state": get_args(State),
    "reason": "text",
    "hint": "text",
    "attempt": "positive",
    "started_at": "time",
    "ended_at": "time?",
}
_STATE_BYTES = Keys(dict.fromkeys(STATE_KINDS, Keys(dict.fromkeys(STATE_PLACES, "amount?"))))
_SUMMARY = {
    "steps": "count",
    "tokens": "count",
    **dict.fromkeys(("train_loss_first", "train_loss_final", "eval_loss_final"), "number?"),
    "eval_accuracy": "share?",
    **dict.fromkeys(
        (
            "eval_perplexity",
            "runtime_s",
            "startup_s",
            "step_time_s_median",
            "step_time_s_p10",
            "step_time_s_p90",
            "tokens_per_s",
            "tokens_per_s_per_device",
            "samples_per_s",
            "model_flops_per_step",
            "mfu",
            "peak_memory_gib_allocated",
            "peak_memory_gib_reserved",
            "peak_memory_gib_device",
            "avg_memory_gib_device",
            "host_peak_rss_gib",
        ),
        "amount?",
    ),
    "state_bytes_per_rank": _STATE_BYTES,
    **dict.fromkeys(("comm_bytes_per_step", "comm_calls_per_step", "energy_j"), "amount?"),
}
SUMMARY_KEYS = tuple(_SUMMARY)
# Keys that older records lack are optional, here and below.
SUMMARY_OPTIONAL = {
    "sent_bytes_per_step": "amount?",
    "gloo_sent_bytes_per_step": "amount?",
    "steps_skipped": "count",
    "warmup_steps": "count",
}
_DEVICES = ("cpu", "nvme", None)
_ENGINE = Keys({
    "strategy": "text", "distributed_type": "text", "world_size": "positive", "virtual": "flag",
    "zero_stage": (0, 1, 2, 3, None), "offload_optimizer": _DEVICES, "offload_param": _DEVICES, "nvme_path": "text?",
    "optimizer_class": "text", "precision": "text", "param_dtype": "text", "gradient_clipping": "amount",
    "buckets": "object", "torch": "text", "deepspeed": "text?", "initial_weights_sha256": "sha256?",
    "warnings": ["text"],
}, {
    "trainer": "text", "floor": Keys({}, {}, "amount?", may_be_null=True), "attn_implementation": "text?",
    "tf32": "flag", "gradient_checkpointing": "flag",
    **dict.fromkeys(("data", "optimizer_settings", "loss_scaler", "own_settings"), "object?"),
    **dict.fromkeys(("gradient_accumulation_steps", "per_device_train_batch_size"), "positive?"),
    **dict.fromkeys(("model_layers", "preset_layers", "model_parameters"), "count?"),
}, "anything")  # fmt: skip
_ENVIRONMENT = Keys({}, {
    **dict.fromkeys(("cpu", "driver", "cuda", "git_commit"), "text?"), "cpu_cores": "positive?",
    "threads_per_rank": "positive?", "host_memory_gib": "amount?", "git_dirty": "flag", "code_sha256": "sha256?",
    "packages": Keys({}, {}, "text"), "devices": [Keys({"name": "text"}, {}, "anything")],
    "other_machines": ["object"], "stack": "object?",
}, "anything")  # fmt: skip
_TREE, _TREE_OR_NULL = Keys({}, {}, "figures"), Keys({}, {}, "figures", may_be_null=True)
_RANK_STATE = Keys(
    {"state_bytes": _STATE_BYTES},
    {
        "pieces": _TREE,
        "buffer_bytes": _TREE,
        "kept_whole": _TREE,
        **dict.fromkeys(
            ("grads_in_bucket_bytes", "other_tensor_bytes", "forward_holds_bytes", "forward_gathers_bytes"), "amount?"
        ),
        **dict.fromkeys(("grads_before_step", "grads_after_backward"), Keys({}, {}, "amount?", may_be_null=True)),
    },
    "figures",
    may_be_null=True,
)
_RANK_MEMORY = Keys(
    {
        "rank": "count",
        "phases": Keys({}, {}, Keys(dict.fromkeys(PEAKS.values(), "amount?"))),
        "device_mean_over_steps": "amount?",
        "state": _RANK_STATE,
    },
    {"time": _TREE_OR_NULL},
    "figures",
)
# `wire` bytes are those that NCCL's ring algorithm sends.
_COLLECTIVE = Keys(
    {"calls": "count", "payload_bytes": "count", "wire_bytes_per_rank": "amount"}, {"gloo_bytes_per_rank": "amount"}
)
_PROFILE = Keys(
    {
        "device": ("cuda", "cpu"),
        "steps": "steps",
        **dict.fromkeys(
            ("wall_s_per_step", "busy_s_per_step", "idle_s_per_step", "summed_s_per_step", "calls_per_step"), "amount"
        ),
        "categories_s_per_step": Keys(dict.fromkeys(PROFILE_CATEGORIES, "amount")),
        "top": [
            Keys({"name": "name", "category": PROFILE_CATEGORIES, "calls_per_step": "amount", "s_per_step": "amount"})
        ],
    }
)
_SEARCH = Keys({"id": "text", "axis": get_args(SearchAxis), "place": "count", "last": "count"})
# Written by the sweep into the folder of each run.
_NOTES = Keys({}, {
    "strategy": tuple(REGISTRY), "world_size": "positive", "command": ["text"], "stack": "name?",
    "searches": [_SEARCH], "probe": "flag",
    "attempts": [Keys({}, {"matmul_rates": Keys({}, {"tflops": Keys({}, {}, "amount")}, "anything")}, "anything")],
}, "anything")  # fmt: skip
_CHECKPOINT = Keys({
    "step": "positive", "strategy": "text", "world_size": "positive", "config": "object", "schedule": "object",
    "tokens_sha256": "object", "initial_weights_sha256": "text", "environment": "object", "files": "object",
}, {}, "anything")  # fmt: skip
_FILES: dict[str, Any] = {
    "sweep.json": _NOTES,
    "checkpoint.json": _CHECKPOINT,
    "status.json": Keys(_STATUS, SEAL),
    "config.json": "object",  # study/config/flags.py checks its keys
    "environment.json": _ENVIRONMENT,
    "engine.json": _ENGINE,
    "summary.json": Keys(_SUMMARY, SUMMARY_OPTIONAL),
    "memory.json": Keys({"unit": ("GiB",), "ranks": [_RANK_MEMORY]}),
    "traffic.json": Keys(
        {"step": "positive?", "world_size": "positive", "collectives": Keys({}, {}, _COLLECTIVE)},
        {"ranks_per_machine": "positive", "across_machines_bytes_per_rank": "amount"},
    ),
    "profile.json": _PROFILE,
    "steps.jsonl": Keys(
        {
            "step": "positive",
            "loss": "number?",
            "lr": "amount",
            "grad_norm": "amount?",
            "step_time_s": "amount?",
            "tokens": "count",
            "samples_hash": "hash",
        },
        {"skipped": (True,)},
    ),  # set if the engine skipped the step because of non-finite gradients
    "evals.jsonl": Keys({"step": "positive", "eval_loss": "number"}, {"accuracy": "share", "perplexity": "amount?"}),
}


def validate(file: Path, value: Any, row: int | None = None) -> None:
    """Raise RecordError if a document, or one row of a file of rows, does not match the schema of its file."""
    try:
        _check(_FILES[file.name], value, "")
        if file.name == "status.json":
            sealed = SEAL.keys() & value.keys()
            if sealed and (missing := SEAL.keys() - sealed):
                raise ValueError(f"lacks {', '.join(missing)}")
            if value["ended_at"] is None and value["state"] != "interrupted":
                raise ValueError(f"ended_at is null, and the state is {value['state']}")
    except (ValueError, OverflowError) as error:
        raise RecordError(file, f"{error}" if row is None else f"row {row}: {error}") from None
