"""What the files of a run directory hold: every key, what its value may be, and what must agree with what.

The reader refuses anything else with the file's name and the reason: a wrong number must not slip into a table
because a file was damaged.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

State = Literal["ok", "oom", "timeout", "unsupported", "failed", "interrupted"]
STATES: tuple[State, ...] = get_args(State)


_DEEPEST = 20


class RecordError(ValueError):
    """A file of a run directory that cannot be believed: which one, and why."""

    def __init__(self, file: Path, reason: str):
        self.file, self.reason = file, reason
        super().__init__(f"{file}: {reason}")


STATE_KINDS = ("params", "grads", "optimizer")
STATE_PLACES = ("device", "host", "nvme")


class Kind(NamedTuple):
    """What a value of a record may be, in words for the refusal and as a test."""

    words: str
    holds: Callable[[Any], bool]

    def or_null(self) -> Kind:
        return Kind(f"{self.words} or null", lambda value: value is None or self.holds(value))


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


TEXT = Kind("a string", lambda value: isinstance(value, str))
TIME = Kind("a time with its zone", _is_time)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number from 0 up", lambda value: type(value) is int and value >= 0)
POSITIVE_COUNT = Kind("a whole number from 1 up", lambda value: type(value) is int and value >= 1)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and math.isfinite(value))
AMOUNT = Kind("a number from 0 up", lambda value: NUMBER.holds(value) and value >= 0)
SHARE = Kind("a number from 0 to 1", lambda value: AMOUNT.holds(value) and value <= 1)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def _one_of(*values: Any) -> Kind:
    return Kind(
        f"one of {', '.join(map(str, values))}",
        lambda value: any(type(value) is type(known) and value == known for known in values),
    )


def _hex(digits: int) -> Kind:
    return Kind(
        f"{digits} hexadecimal digits",
        lambda value: isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None,
    )


STATUS = {
    "state": _one_of(*STATES), "reason": TEXT, "hint": TEXT, "attempt": POSITIVE_COUNT, "started_at": TIME,
    "ended_at": TIME.or_null(),
}  # fmt: skip
# Beside those, where a writer closed its record itself: what every file then held, and what this one says.
SEAL = {"files_sha256": Kind("an object", lambda value: isinstance(value, dict)), "status_sha256": _hex(64)}
# Every figure of summary.json; null where it could not be measured, never 0. Losses alone may be negative.
SUMMARY = {
    "steps": COUNT, "tokens": COUNT,
    **dict.fromkeys(("train_loss_first", "train_loss_final", "eval_loss_final"), NUMBER.or_null()),
    "eval_accuracy": SHARE.or_null(),
    **dict.fromkeys((
        "eval_perplexity", "runtime_s", "startup_s", "step_time_s_median", "step_time_s_p10", "step_time_s_p90",
        "tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "model_flops_per_step", "mfu",
        "peak_memory_gib_allocated", "peak_memory_gib_reserved", "peak_memory_gib_device", "avg_memory_gib_device",
        "host_peak_rss_gib",
    ), AMOUNT.or_null()),
    "state_bytes_per_rank": OBJECT,
    **dict.fromkeys(("comm_bytes_per_step", "comm_calls_per_step", "energy_j"), AMOUNT.or_null()),
}  # fmt: skip
SUMMARY_KEYS = tuple(SUMMARY)
ENGINE = {
    "strategy": TEXT, "distributed_type": TEXT, "world_size": POSITIVE_COUNT, "virtual": FLAG,
    "zero_stage": _one_of(0, 1, 2, 3).or_null(), "offload_optimizer": _one_of("cpu", "nvme").or_null(),
    "offload_param": _one_of("cpu", "nvme").or_null(), "nvme_path": TEXT.or_null(), "optimizer_class": TEXT,
    "precision": TEXT, "param_dtype": TEXT, "gradient_clipping": AMOUNT, "buckets": OBJECT, "torch": TEXT,
    "deepspeed": TEXT.or_null(), "initial_weights_sha256": _hex(64).or_null(),
    "warnings": Kind("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.holds, value))),
}  # fmt: skip
STEP = {
    "step": POSITIVE_COUNT, "loss": NUMBER.or_null(), "lr": AMOUNT, "grad_norm": AMOUNT.or_null(),
    "step_time_s": AMOUNT.or_null(), "tokens": COUNT, "samples_hash": _hex(16),
}  # fmt: skip
# A row as the writer leaves it: whatever matches holds every key of STEP once, each with a value that its kind allows.
_DIGITS = r"(?:0|[1-9]\d{0,14})"
_FIGURE = rf"{_DIGITS}(?:\.\d{{1,25}})?(?:[eE][-+]?\d{{1,2}})?"
PLAIN_STEP = re.compile(
    rf'\{{"step": {_DIGITS}, "loss": (?:-?{_FIGURE}|null), "lr": {_FIGURE}, "grad_norm": (?:{_FIGURE}|null), '
    rf'"step_time_s": (?:{_FIGURE}|null), "tokens": {_DIGITS}, "samples_hash": "[0-9a-f]{{16}}"\}}',
    re.ASCII,
)
EVALUATION = {"step": POSITIVE_COUNT, "eval_loss": NUMBER}
TASK_FIGURES = {"accuracy": SHARE, "perplexity": AMOUNT.or_null()}
# Figures of summary.json that are the largest of memory.json over ranks and phases.
PEAKS = {
    "peak_memory_gib_allocated": "allocated", "peak_memory_gib_reserved": "reserved",
    "peak_memory_gib_device": "device", "host_peak_rss_gib": "host",
}  # fmt: skip
RANK_MEMORY = {"rank": COUNT, "phases": OBJECT, "device_mean_over_steps": AMOUNT.or_null(), "state": OBJECT.or_null()}
# Keys that need not be there, and what they must hold where they are.
STATE_EXTRAS = {
    "pieces": OBJECT, "buffer_bytes": OBJECT, "grads_in_bucket_bytes": AMOUNT.or_null(),
    "other_tensor_bytes": AMOUNT.or_null(),
}  # fmt: skip
TIME_KEYS = ("step_time_s_median", "step_time_s_p10", "step_time_s_p90")
ENGINE_EXTRAS = {
    "trainer": TEXT, "floor": OBJECT.or_null(), "data": OBJECT.or_null(), "attn_implementation": TEXT.or_null(),
    "optimizer_settings": OBJECT.or_null(), "gradient_accumulation_steps": POSITIVE_COUNT.or_null(),
    "per_device_train_batch_size": POSITIVE_COUNT.or_null(),
}  # fmt: skip
ENVIRONMENT_EXTRAS = {
    "cpu": TEXT.or_null(), "cpu_cores": POSITIVE_COUNT.or_null(), "threads_per_rank": POSITIVE_COUNT.or_null(),
    "host_memory_gib": AMOUNT.or_null(), "driver": TEXT.or_null(), "cuda": TEXT.or_null(), "packages": OBJECT,
    "git_commit": TEXT.or_null(), "devices": Kind("a list", lambda value: isinstance(value, list)),
}  # fmt: skip
TRAFFIC = {"step": POSITIVE_COUNT.or_null(), "world_size": POSITIVE_COUNT, "collectives": OBJECT}
# Where the time of a profiled step goes, and profile.json, which a run without --profile_steps has none of.
PROFILE_CATEGORIES = ("matmul", "attention", "elementwise", "optimizer", "copies", "collectives", "other")
PROFILE = {
    "device": _one_of("cuda", "cpu"),
    "steps": Kind(
        "a list of consecutive steps",
        lambda value: isinstance(value, list) and value != [] and all(map(POSITIVE_COUNT.holds, value))
        and value == list(range(value[0], value[0] + len(value))),
    ),
    "wall_s_per_step": Kind("a number above 0", lambda value: AMOUNT.holds(value) and value > 0),
    **dict.fromkeys(("busy_s_per_step", "idle_s_per_step", "summed_s_per_step", "calls_per_step"), AMOUNT),
    "categories_s_per_step": OBJECT, "top": Kind("a list", lambda value: isinstance(value, list)),
}  # fmt: skip
PROFILE_TOP = {
    "name": Kind("at most 200 printable letters", lambda value: TEXT.holds(value) and len(value) <= 200
                 and value.isprintable()),
    "category": _one_of(*PROFILE_CATEGORIES), "calls_per_step": AMOUNT, "s_per_step": AMOUNT,
}  # fmt: skip
COLLECTIVE = {"calls": COUNT, "payload_bytes": COUNT, "wire_bytes_per_rank": AMOUNT}


def check(
    file: Path, document: Mapping[str, Any], kinds: Mapping[str, Kind], where: str = "", others_allowed: bool = False
) -> None:
    missing = [key for key in kinds if key not in document]
    if missing:
        raise RecordError(file, f"{where}lacks {', '.join(missing)}")
    unknown = [key for key in document if key not in kinds]
    if unknown and not others_allowed:
        raise RecordError(file, f"{where}has the unknown key {unknown[0]!r}")
    for key, kind in kinds.items():
        if not kind.holds(document[key]):
            raise RecordError(file, f"{where}{key} is {document[key]!r}, not {kind.words}"[:300])


def check_present(file: Path, document: Mapping[str, Any], kinds: Mapping[str, Kind], where: str = "") -> None:
    check(file, document, {key: kind for key, kind in kinds.items() if key in document}, where, others_allowed=True)


def check_engine(file: Path, engine: Mapping[str, Any]) -> None:
    # Beside these keys an engine may say more about itself.
    check(file, engine, ENGINE, others_allowed=True)
    check_present(file, engine, ENGINE_EXTRAS)
    floor = engine.get("floor") or {}
    check(file, floor, dict.fromkeys(floor, AMOUNT.or_null()), "floor.")


def check_environment(file: Path, environment: Mapping[str, Any]) -> None:
    check_present(file, environment, ENVIRONMENT_EXTRAS)
    packages = environment.get("packages", {})
    check(file, packages, dict.fromkeys(packages, TEXT), "packages.")
    for number, device in enumerate(environment.get("devices", [])):
        check(file, {"device": device}, {"device": OBJECT}, f"devices.{number}: ")
        check(file, device, {"name": TEXT}, f"devices.{number}.", others_allowed=True)


def check_summary(file: Path, summary: Mapping[str, Any]) -> None:
    check(file, summary, SUMMARY)
    check_state_bytes(file, summary["state_bytes_per_rank"])


def check_state_bytes(file: Path, state_bytes: Any, where: str = "state_bytes_per_rank") -> None:
    check(file, {where: state_bytes}, {where: OBJECT})
    check(file, state_bytes, dict.fromkeys(STATE_KINDS, OBJECT), f"{where}.")
    for kind, places in state_bytes.items():
        check(file, places, dict.fromkeys(STATE_PLACES, AMOUNT.or_null()), f"{where}.{kind}.")


def check_memory(file: Path, memory: Mapping[str, Any]) -> None:
    check(file, memory, {"unit": _one_of("GiB"), "ranks": Kind("a list", lambda value: isinstance(value, list))})
    check_amounts(file, memory["ranks"], "ranks")
    for number, rank in enumerate(memory["ranks"]):
        where = f"ranks.{number}."
        check(file, {"rank": rank}, {"rank": OBJECT}, where)
        check(file, rank, RANK_MEMORY, where, others_allowed=True)
        for phase, figures in rank["phases"].items():
            check(file, {phase: figures}, {phase: OBJECT}, f"{where}phases.")
            kinds = dict.fromkeys(PEAKS.values(), AMOUNT.or_null())
            check(file, figures, kinds, f"{where}phases.{phase}.")
        if rank["state"] is not None:
            check(file, rank["state"], {"state_bytes": OBJECT}, f"{where}state.", others_allowed=True)
            check_state_bytes(file, rank["state"]["state_bytes"], f"{where}state.state_bytes")
            check_present(file, rank["state"], STATE_EXTRAS, f"{where}state.")
        check_present(file, rank, {"time": OBJECT.or_null()}, where)


def check_traffic(file: Path, traffic: Mapping[str, Any]) -> None:
    check(file, traffic, TRAFFIC)
    for name, figures in traffic["collectives"].items():
        check(file, {name: figures}, {name: OBJECT}, "collectives.")
        check(file, figures, COLLECTIVE, f"collectives.{name}.")


def check_profile(file: Path, profile: Mapping[str, Any]) -> None:
    check(file, profile, PROFILE)
    categories, summed = profile["categories_s_per_step"], profile["summed_s_per_step"]
    check(file, categories, dict.fromkeys(PROFILE_CATEGORIES, AMOUNT), "categories_s_per_step.")
    for number, row in enumerate(profile["top"]):
        check(file, {"row": row}, {"row": OBJECT}, f"top.{number}: ")
        check(file, row, PROFILE_TOP, f"top.{number}.")
    wall, busy, idle = (profile[f"{what}_s_per_step"] for what in ("wall", "busy", "idle"))
    for key, value, other, what in (
        ("summed_s_per_step", summed, sum(categories.values()), "its categories"),
        ("wall_s_per_step", wall, busy + idle, "busy and idle"),
    ):
        if not math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9):
            raise RecordError(file, f"{key} is {value}, and {what} add up to {other}")
    # What is listed is a part of what is summed, and that covers all the time in which something ran.
    for key, part in (("busy_s_per_step", busy), ("top", sum(row["s_per_step"] for row in profile["top"]))):
        if part > summed * (1 + 1e-6) + 1e-9:
            raise RecordError(file, f"{key} says {part} s, of {summed} s in all")


def check_amounts(file: Path, tree: Any, path: str = "", depth: int = 0) -> None:
    """For documents whose every leaf is a figure."""
    if depth > _DEEPEST:
        raise RecordError(file, f"nests deeper than {_DEEPEST} levels")
    if isinstance(tree, (dict, list)):
        for key, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
            check_amounts(file, branch, f"{path}.{key}" if path else str(key), depth + 1)
    elif not AMOUNT.or_null().holds(tree):
        raise RecordError(file, f"{path} is {tree!r}, not {AMOUNT.or_null().words}"[:300])


def check_steps(file: Path, rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows, start=1):
        check(file, row, STEP, f"row {number}: ")
    check_step_numbers(file, rows)


def check_step_numbers(file: Path, rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows, start=1):
        if row["step"] != number:
            raise RecordError(file, f"row {number} says step {row['step']}")


def check_evaluations(file: Path, rows: list[dict[str, Any]]) -> None:
    last = 0
    for number, row in enumerate(rows, start=1):
        figures = {key: kind for key, kind in TASK_FIGURES.items() if key in row}
        check(file, row, EVALUATION | figures, f"row {number}: ")
        if row["step"] <= last:
            raise RecordError(file, f"row {number} says step {row['step']} after step {last}")
        last = row["step"]


class FinishedRun(Protocol):
    """What of a run is compared with itself."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def engine(self) -> dict[str, Any]: ...
    @property
    def summary(self) -> dict[str, Any]: ...
    @property
    def memory(self) -> dict[str, Any]: ...
    @property
    def traffic(self) -> dict[str, Any]: ...
    @property
    def profile(self) -> dict[str, Any]: ...
    @property
    def steps(self) -> list[dict[str, Any]]: ...
    @property
    def evals(self) -> list[dict[str, Any]]: ...


def check_agreement(run: FinishedRun) -> None:
    """What a finished run says twice must be the same both times: a damaged figure seldom stays plausible in both."""
    first, last = (run.steps[0], run.steps[-1]) if run.steps else ({}, {})
    evaluation = run.evals[-1] if run.evals else {}
    said_again: list[tuple[str, str, float | None]] = [
        ("steps", "steps.jsonl", len(run.steps)),
        ("tokens", "steps.jsonl", sum(row["tokens"] for row in run.steps)),
        ("train_loss_first", "steps.jsonl", first.get("loss")),
        ("train_loss_final", "steps.jsonl", last.get("loss")),
        ("eval_loss_final", "evals.jsonl", evaluation.get("eval_loss")),
        ("eval_accuracy", "evals.jsonl", evaluation.get("accuracy")),
        ("eval_perplexity", "evals.jsonl", evaluation.get("perplexity")),
    ]
    watched = run.traffic["step"] is not None
    for key, figure in (("comm_bytes_per_step", "payload_bytes"), ("comm_calls_per_step", "calls")):
        total = sum(entry[figure] for entry in run.traffic["collectives"].values())
        said_again.append((key, "traffic.json", total if watched else None))
    phases = [phase for rank in run.memory["ranks"] for phase in rank["phases"].values()]
    for key, figure in PEAKS.items():
        known = [phase[figure] for phase in phases if phase[figure] is not None]
        said_again.append((key, "memory.json", max(known, default=None)))
    said_again += _said_by_ranks(run.memory["ranks"])
    for key, file, other in said_again:
        value: Any = functools.reduce(dict.__getitem__, key.split("."), run.summary)
        if value != other and (value is None or other is None or not math.isclose(value, other, rel_tol=1e-9)):
            raise RecordError(run.path / "summary.json", f"{key} is {value}, and {file} says {other}")
    for row in run.steps:
        if row["loss"] is None and not run.engine["virtual"]:
            raise RecordError(run.path / "steps.jsonl", f"step {row['step']} of a run that ended ok has no loss")
    _check_profiled_steps(run)


def _check_profiled_steps(run: FinishedRun) -> None:
    """The last steps of a run, and as many as were asked for; older records know neither the flag nor the file."""
    asked = run.config.get("profile_steps") or 0
    check(run.path / "config.json", {"profile_steps": asked}, {"profile_steps": COUNT})
    last, told = run.steps[-asked:] if asked else [], run.profile.get("steps", [])
    if told != [row["step"] for row in last]:
        raise RecordError(
            run.path / "profile.json", f"tells of steps {told}, and the last {asked} were asked for"[:300]
        )


def _said_by_ranks(ranks: list[dict[str, Any]]) -> Iterator[tuple[str, str, float | None]]:
    """What the study's own loops keep per rank, and summary.json says again; other writers need not."""
    states = [rank["state"]["state_bytes"] for rank in ranks if rank["state"] is not None]
    if states and len(states) == len(ranks):
        for kind, place in itertools.product(STATE_KINDS, STATE_PLACES):
            known = [state[kind][place] for state in states if state[kind][place] is not None]
            yield f"state_bytes_per_rank.{kind}.{place}", "memory.json", max(known, default=None)
    time = (ranks[0].get("time") if ranks else None) or {}
    for key in TIME_KEYS:
        if key in time:
            yield key, "memory.json", time[key]
