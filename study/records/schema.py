"""What the files of a run directory hold: every key, and what its value may be.

Anything else is refused with the file's name and the reason: a wrong number must not slip into a table because a file
was damaged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

State = Literal["ok", "oom", "timeout", "unsupported", "failed", "interrupted"]
# What a search of the largest one looks for.
SearchAxis = Literal["largest_micro_batch", "largest_model"]
STATE_KINDS = ("params", "grads", "optimizer")
STATE_PLACES = ("device", "host", "nvme")
# Where the time of a profiled step goes.
PROFILE_CATEGORIES = ("matmul", "attention", "elementwise", "optimizer", "copies", "collectives", "other")
# Figures of summary.json that are the largest of memory.json over ranks and phases.
PEAKS = {
    "peak_memory_gib_allocated": "allocated", "peak_memory_gib_reserved": "reserved",
    "peak_memory_gib_device": "device", "host_peak_rss_gib": "host",
}  # fmt: skip
_DEEPEST = 20


class RecordError(ValueError):
    """A file of a run directory that cannot be believed: which one, and why."""

    def __init__(self, file: Path, reason: str):
        self.file, self.reason = file, reason
        super().__init__(f"{file}: {reason}")


# What a value may be: a function of its place in the file and the value, which raises ValueError on anything else.
Kind = Callable[[str, Any], None]
Keys = Mapping[str, Kind]


def _kind(words: str, holds: Callable[[Any], bool]) -> Kind:
    def check(where: str, value: Any) -> None:
        if not holds(value):
            raise ValueError(f"{where} is {value!r:.200}, not {words}")

    return check


def _one_of(*values: Any) -> Kind:
    return _kind(
        f"one of {', '.join(map(str, values))}",
        lambda value: any(type(value) is type(known) and value == known for known in values),
    )


def _hex(digits: int) -> Kind:
    form = re.compile(f"[0-9a-f]{{{digits}}}")
    return _kind(f"{digits} hexadecimal digits", lambda value: isinstance(value, str) and bool(form.fullmatch(value)))


def _or_null(kind: Kind) -> Kind:
    return lambda where, value: None if value is None else kind(where, value)


def _keys(required: Keys, optional: Keys | None = None, others: Kind | None = None) -> Kind:
    """An object with these keys; what other keys may hold, or that there are none."""
    kinds = {**required, **(optional or {})}

    def check(where: str, value: Any) -> None:
        OBJECT(where, value)
        inside = f"{where}." if where else ""
        if missing := [key for key in required if key not in value]:
            raise ValueError(f"{inside}lacks {', '.join(missing)}")
        for key, entry in value.items():
            kind = kinds.get(key, others)
            if kind is None:
                raise ValueError(f"{inside}has the unknown key {key!r}")
            kind(f"{inside}{key}", entry)

    return check


def _each(kind: Kind) -> Kind:
    def check(where: str, value: Any) -> None:
        LIST(where, value)
        for number, entry in enumerate(value):
            kind(f"{where}.{number}", entry)

    return check


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def figures(where: str, value: Any) -> None:
    """Any tree whose every leaf is a figure."""
    if where.count(".") > _DEEPEST:
        raise ValueError(f"nests deeper than {_DEEPEST} levels")
    if isinstance(value, (dict, list)):
        for key, branch in value.items() if isinstance(value, dict) else enumerate(value):
            figures(f"{where}.{key}", branch)
    else:
        _or_null(AMOUNT)(where, value)


ANYTHING = _kind("anything", lambda value: True)
TEXT = _kind("a string", lambda value: isinstance(value, str))
TIME = _kind("a time with its zone", _is_time)
FLAG = _kind("true or false", lambda value: isinstance(value, bool))
COUNT = _kind("a whole number from 0 up", lambda value: type(value) is int and value >= 0)
POSITIVE = _kind("a whole number from 1 up", lambda value: type(value) is int and value >= 1)
NUMBER = _kind("a number", _is_number)
AMOUNT = _kind("a number from 0 up", lambda value: _is_number(value) and value >= 0)
SHARE = _kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
OBJECT = _kind("an object", lambda value: isinstance(value, dict))
LIST = _kind("a list", lambda value: isinstance(value, list))
AMOUNT_OR_NULL, TEXT_OR_NULL, OBJECT_OR_NULL, POSITIVE_OR_NULL = map(_or_null, (AMOUNT, TEXT, OBJECT, POSITIVE))

STATUS: Keys = {
    "state": _one_of(*get_args(State)), "reason": TEXT, "hint": TEXT, "attempt": POSITIVE, "started_at": TIME,
    "ended_at": _or_null(TIME),
}  # fmt: skip
# Beside those, where a writer closed its record itself: what every file then held, and what this one says.
SEAL: Keys = {"files_sha256": OBJECT, "status_sha256": _hex(64)}
_STATE_BYTES = _keys(dict.fromkeys(STATE_KINDS, _keys(dict.fromkeys(STATE_PLACES, AMOUNT_OR_NULL))))
# Null where a figure could not be measured, never 0. Losses alone may be negative.
SUMMARY: Keys = {
    "steps": COUNT, "tokens": COUNT,
    **dict.fromkeys(("train_loss_first", "train_loss_final", "eval_loss_final"), _or_null(NUMBER)),
    "eval_accuracy": _or_null(SHARE),
    **dict.fromkeys((
        "eval_perplexity", "runtime_s", "startup_s", "step_time_s_median", "step_time_s_p10", "step_time_s_p90",
        "tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "model_flops_per_step", "mfu",
        "peak_memory_gib_allocated", "peak_memory_gib_reserved", "peak_memory_gib_device", "avg_memory_gib_device",
        "host_peak_rss_gib",
    ), AMOUNT_OR_NULL),
    "state_bytes_per_rank": _STATE_BYTES,
    **dict.fromkeys(("comm_bytes_per_step", "comm_calls_per_step", "energy_j"), AMOUNT_OR_NULL),
}  # fmt: skip
# Later keys, which older records lack.
SUMMARY_MAY_HAVE: Keys = {
    **dict.fromkeys(("sent_bytes_per_step", "gloo_sent_bytes_per_step"), AMOUNT_OR_NULL),
    "steps_skipped": COUNT, "warmup_steps": COUNT,
}  # fmt: skip
SUMMARY_KEYS = tuple(SUMMARY)
_ENGINE: Keys = {
    "strategy": TEXT, "distributed_type": TEXT, "world_size": POSITIVE, "virtual": FLAG,
    "zero_stage": _or_null(_one_of(0, 1, 2, 3)), "offload_optimizer": _or_null(_one_of("cpu", "nvme")),
    "offload_param": _or_null(_one_of("cpu", "nvme")), "nvme_path": TEXT_OR_NULL, "optimizer_class": TEXT,
    "precision": TEXT, "param_dtype": TEXT, "gradient_clipping": AMOUNT, "buckets": OBJECT, "torch": TEXT,
    "deepspeed": TEXT_OR_NULL, "initial_weights_sha256": _or_null(_hex(64)), "warnings": _each(TEXT),
}  # fmt: skip
_ENGINE_MAY_HAVE: Keys = {
    "trainer": TEXT, "floor": _or_null(_keys({}, others=AMOUNT_OR_NULL)), "data": OBJECT_OR_NULL,
    "attn_implementation": TEXT_OR_NULL, "optimizer_settings": OBJECT_OR_NULL, "loss_scaler": OBJECT_OR_NULL,
    "tf32": FLAG, "gradient_checkpointing": FLAG,
    "gradient_accumulation_steps": POSITIVE_OR_NULL, "per_device_train_batch_size": POSITIVE_OR_NULL,
    "own_settings": OBJECT_OR_NULL,
    **dict.fromkeys(("model_layers", "preset_layers", "model_parameters"), _or_null(COUNT)),
}  # fmt: skip
_ENVIRONMENT_MAY_HAVE: Keys = {
    "cpu": TEXT_OR_NULL, "cpu_cores": POSITIVE_OR_NULL, "threads_per_rank": POSITIVE_OR_NULL,
    "host_memory_gib": AMOUNT_OR_NULL, "driver": TEXT_OR_NULL, "cuda": TEXT_OR_NULL, "git_commit": TEXT_OR_NULL,
    "git_dirty": FLAG, "code_sha256": _or_null(_hex(64)),
    "packages": _keys({}, others=TEXT), "devices": _each(_keys({"name": TEXT}, others=ANYTHING)),
    "other_machines": _each(OBJECT), "stack": OBJECT_OR_NULL,
}  # fmt: skip
_RANK_STATE_MAY_HAVE: Keys = {
    "pieces": _keys({}, others=figures), "buffer_bytes": _keys({}, others=figures),
    "grads_in_bucket_bytes": AMOUNT_OR_NULL, "other_tensor_bytes": AMOUNT_OR_NULL,
    "forward_holds_bytes": AMOUNT_OR_NULL, "forward_gathers_bytes": AMOUNT_OR_NULL,
    "kept_whole": _keys({}, others=figures),
    **dict.fromkeys(("grads_before_step", "grads_after_backward"), _or_null(_keys({}, others=AMOUNT_OR_NULL))),
}  # fmt: skip
_RANK_STATE = _keys({"state_bytes": _STATE_BYTES}, _RANK_STATE_MAY_HAVE, figures)
_RANK_MEMORY: Keys = {
    "rank": COUNT, "phases": _keys({}, others=_keys(dict.fromkeys(PEAKS.values(), AMOUNT_OR_NULL))),
    "device_mean_over_steps": AMOUNT_OR_NULL, "state": _or_null(_RANK_STATE),
}  # fmt: skip
# `wire` is what a ring of NCCL sends. Older records do not say what gloo sends.
_COLLECTIVE = _keys(
    {"calls": COUNT, "payload_bytes": COUNT, "wire_bytes_per_rank": AMOUNT}, {"gloo_bytes_per_rank": AMOUNT}
)
_PROFILED_KERNEL: Keys = {
    "name": _kind("at most 200 printable letters", lambda value: isinstance(value, str) and len(value) <= 200
                  and value.isprintable()),
    "category": _one_of(*PROFILE_CATEGORIES), "calls_per_step": AMOUNT, "s_per_step": AMOUNT,
}  # fmt: skip
_PROFILE: Keys = {
    "device": _one_of("cuda", "cpu"),
    "steps": _kind(
        "a list of consecutive steps",
        lambda value: isinstance(value, list) and value != [] and all(type(step) is int for step in value)
        and value[0] > 0 and value == list(range(value[0], value[0] + len(value))),
    ),
    "wall_s_per_step": _kind("a number above 0", lambda value: _is_number(value) and value > 0),
    **dict.fromkeys(("busy_s_per_step", "idle_s_per_step", "summed_s_per_step", "calls_per_step"), AMOUNT),
    "categories_s_per_step": _keys(dict.fromkeys(PROFILE_CATEGORIES, AMOUNT)), "top": _each(_keys(_PROFILED_KERNEL)),
}  # fmt: skip


def _profile(where: str, profile: Any) -> None:
    _keys(_PROFILE)(where, profile)
    wall, busy, idle, summed = (profile[f"{what}_s_per_step"] for what in ("wall", "busy", "idle", "summed"))
    for key, value, other, what in (
        ("summed_s_per_step", summed, sum(profile["categories_s_per_step"].values()), "its categories"),
        ("wall_s_per_step", wall, busy + idle, "busy and idle"),
    ):
        if not math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"{key} is {value}, and {what} add up to {other}")
    # What is listed is a part of what is summed, and that covers all the time in which something ran.
    for key, part in (("busy_s_per_step", busy), ("top", sum(row["s_per_step"] for row in profile["top"]))):
        if part > summed * (1 + 1e-6) + 1e-9:
            raise ValueError(f"{key} says {part} s, of {summed} s in all")


def _status(where: str, status: Any) -> None:
    _keys({**STATUS, **(SEAL if SEAL.keys() & status.keys() else {})})(where, status)
    if status["ended_at"] is None and status["state"] != "interrupted":
        raise ValueError(f"ended_at is null, and the state is {status['state']}")


_STEP: Keys = {
    "step": POSITIVE, "loss": _or_null(NUMBER), "lr": AMOUNT, "grad_norm": AMOUNT_OR_NULL,
    "step_time_s": AMOUNT_OR_NULL, "tokens": COUNT, "samples_hash": _hex(16),
}  # fmt: skip
# Only where the engine left the step out, because its gradients were not finite.
_STEP_MAY_HAVE: Keys = {"skipped": _one_of(True)}
_EVALUATION_MAY_HAVE: Keys = {"accuracy": SHARE, "perplexity": AMOUNT_OR_NULL}
_KINDS: Keys = {
    "status.json": _status,
    "config.json": OBJECT,  # study/config/flags.py says what it may hold
    "environment.json": _keys({}, _ENVIRONMENT_MAY_HAVE, others=ANYTHING),
    "engine.json": _keys(_ENGINE, _ENGINE_MAY_HAVE, others=ANYTHING),
    "summary.json": _keys(SUMMARY, SUMMARY_MAY_HAVE),
    "memory.json": _keys({
        "unit": _one_of("GiB"),
        "ranks": _each(_keys(_RANK_MEMORY, {"time": _or_null(_keys({}, others=figures))}, figures)),
    }),
    "traffic.json": _keys({
        "step": POSITIVE_OR_NULL, "world_size": POSITIVE, "collectives": _keys({}, others=_COLLECTIVE),
    }, {"ranks_per_machine": POSITIVE, "across_machines_bytes_per_rank": AMOUNT}),
    "profile.json": _profile,
    "steps.jsonl": _keys(_STEP, _STEP_MAY_HAVE),
    "evals.jsonl": _keys({"step": POSITIVE, "eval_loss": NUMBER}, _EVALUATION_MAY_HAVE),
}  # fmt: skip
# A row as the writer leaves it: whatever matches has every key of a step once, each with a value that its kind allows.
_DIGITS = r"(?:0|[1-9]\d{0,14})"
_FIGURE = rf"{_DIGITS}(?:\.\d{{1,25}})?(?:[eE][-+]?\d{{1,2}})?"
PLAIN_STEP = re.compile(
    rf'\{{"step": {_DIGITS}, "loss": (?:-?{_FIGURE}|null), "lr": {_FIGURE}, "grad_norm": (?:{_FIGURE}|null), '
    rf'"step_time_s": (?:{_FIGURE}|null), "tokens": {_DIGITS}, "samples_hash": "[0-9a-f]{{16}}"\}}',
    re.ASCII,
)


def check(file: Path, value: Mapping[str, Any], row: int | None = None) -> None:
    """A document, or one row of a file of rows, by the name of its file."""
    try:
        _KINDS[file.name]("", value)
    except ValueError as error:
        raise RecordError(file, f"{error}" if row is None else f"row {row}: {error}") from None


def strictly_parsed(text: str) -> Any:
    """JSON as a record may hold it: no key twice, and no number that is not finite."""
    return json.loads(
        text, parse_constant=_number, parse_float=_number, parse_int=_number, object_pairs_hook=_unique_keys
    )


def _number(text: str) -> float:
    """A float's reach is the limit for whole numbers as well: what reads a record may divide."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key is there twice")
    return document
