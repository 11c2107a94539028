"""One run directory as one row of `runs` and one block of `steps`: which columns there are, and what fills them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import shlex
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np

from study.errors import UserError
from study.record.directory import Run, read_json
from study.record.schema import STATE_KINDS, STATE_PLACES, SUMMARY_KEYS, RecordError
from study.spec.config import RunConfig, resolved
from study.spec.flags import parse_command_line
from study.spec.strategies import STRATEGY_NAMES, read_strategy
from study.sweep.suite_file import SearchAxis
from study.virtual.summary import MOMENTS

PHASES = ("init", "first_step", "steady", "eval")
FIGURES = ("allocated", "reserved", "device", "host")
MEMORY_COLUMNS = {
    f"memory_{phase}_{figure}_gib": (phase, figure) for phase in PHASES for figure in FIGURES
}  # fmt: skip
STATE_COLUMNS = {f"{kind}_bytes_{place}": (kind, place) for kind in STATE_KINDS for place in STATE_PLACES}
_PATHS = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "nvme_path"}
_TYPES: dict[Any, str] = {bool: "boolean", int: "Int64", float: "float64"}
_FLOORS = {
    "floor_loss": "expected_loss", "floor_accuracy": "expected_accuracy", "floor_eval_loss": "oracle_eval_loss",
    "floor_eval_accuracy": "oracle_eval_accuracy",
}  # fmt: skip
_VERSIONS = ("torch", "deepspeed", "accelerate", "transformers")


def _config_columns() -> dict[str, str]:
    hints = typing.get_type_hints(RunConfig)
    columns = {}
    for field in dataclasses.fields(RunConfig):
        hint = hints[field.name]
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(member for member in typing.get_args(hint) if member is not type(None))
        if field.name not in _PATHS:
            columns[field.name] = _TYPES.get(hint, "str")
    return columns


CONFIG_COLUMNS = _config_columns()
RUN_COLUMNS: dict[str, str] = {
    "run": "str",
    **{f"status_{key}": "str" for key in ("state", "reason", "hint", "started_at", "ended_at")},
    "status_attempt": "Int64",
    "sealed": "boolean",
    # What is compared with what; study/report/records/fairness.py and workloads.py fill these.
    **dict.fromkeys(("workload", "workload_key", "arm", "baseline", "confounded", "confounded_loss", "notes"), "str"),
    "strategy": "str",
    "world_size": "Int64",
    "virtual": "boolean",
    "trainer": "str",
    **dict.fromkeys(("model_parameters", "model_layers", "preset_layers"), "Int64"),
    "repeat": "Int64",
    # The searches that it answers to, and where on their ladders it stands, as JSON; and whether it is nothing else.
    "searches": "str",
    "probe": "boolean",
    **CONFIG_COLUMNS,
    **dict.fromkeys(("distributed_type", "engine_precision", "param_dtype", "optimizer_class"), "str"),
    **dict.fromkeys(("optimizer_settings", "buckets", "warnings", "initial_weights_sha256"), "str"),
    **dict.fromkeys(("offload_optimizer", "offload_param", "train_data_sha256", "eval_data_sha256"), "str"),
    "zero_stage": "Int64",
    "gradient_accumulation_steps": "Int64",
    "micro_batch_size": "Int64",
    "gradient_clipping": "float64",
    "samples_sha256": "str",
    **{key: "float64" for key in SUMMARY_KEYS if key != "state_bytes_per_rank"},
    **dict.fromkeys(STATE_COLUMNS, "float64"),
    **dict.fromkeys(MEMORY_COLUMNS, "float64"),
    **dict.fromkeys(
        ("buffer_bytes_device", "buffer_bytes_host", "grads_in_bucket_bytes", "kept_whole_bytes"), "float64"
    ),
    "other_tensor_bytes": "float64",
    "grads_by_moment": "str",
    "buffers": "str",
    "collectives": "str",
    # What profile.json says, as JSON; nothing where no step was profiled.
    "profile": "str",
    **dict.fromkeys(_FLOORS, "float64"),
    **dict.fromkeys(("cpu", "devices", "driver", "git_commit"), "str"),
    **dict.fromkeys(("cpu_cores", "threads_per_rank"), "Int64"),
    "host_memory_gib": "float64",
    # What a device of the box reached in plain matrix products of the run's precision, when its sweep began.
    "matmul_tflops": "float64",
    **{f"{name}_version": "str" for name in _VERSIONS},
}
# Columns that the study did not have yet when older records were kept: nothing of the kind was asked of their runs.
LATER_COLUMNS = frozenset({*CONFIG_COLUMNS, "searches", "probe", "profile", "matmul_tflops"})
STEP_COLUMNS: dict[str, str] = {
    "run": "str", "step": "int64", "loss": "float64", "lr": "float64", "grad_norm": "float64",
    "step_time_s": "float64", "tokens": "int64", "samples_hash": "str", "eval_loss": "float64",
    "eval_accuracy": "float64", "eval_perplexity": "float64",
}  # fmt: skip
_LARGEST = 2**53
_REPEAT = re.compile(r"-r([1-9]\d{0,5})$")
_NAMED = re.compile(rf"-({'|'.join(sorted(STRATEGY_NAMES, key=len, reverse=True))})-(\d{{1,6}})x-[0-9a-f]{{8}}")


def run_row(run: Run) -> dict[str, Any]:
    """What a table can hold of a run, by column; None where the record does not say."""
    row: dict[str, Any] = {"run": run.path.name, "repeat": _repeat(run.path.name), "virtual": False}
    row |= {f"status_{key}": run.status[key] for key in ("state", "reason", "hint", "started_at", "ended_at")}
    row["status_attempt"] = run.status["attempt"]
    notes = read_json(run.path / "sweep.json") if (run.path / "sweep.json").is_file() else {}
    row["searches"] = _searches(run.path / "sweep.json", notes.get("searches"))
    row["probe"] = row["searches"] is not None and notes.get("probe") is not False
    cell = {} if run.config and run.engine else _cell(run.path)
    config = _config(run) if run.config else cell.pop("config", None)
    if config is not None:
        row |= {key: value for key, value in dataclasses.asdict(config).items() if key in CONFIG_COLUMNS}
        row["engine_override"] = json.dumps(row["engine_override"])
        row["virtual"] = config.virtual_world_size is not None
        row["matmul_tflops"] = _matmul_tflops(notes, config.precision)
    row |= cell | _engine(run.engine) | _environment(run.environment)
    if not run.engine and row.get("strategy"):
        row |= _promised(row["strategy"])
        # A virtual rank is launched as the one process that it is.
        row["world_size"] = row.get("virtual_world_size") or row["world_size"]
    # A run that did not end well is a row and a reason; what it measured before is no figure of it.
    if run.state == "ok":
        row |= {key: value for key, value in run.summary.items() if key != "state_bytes_per_rank"}
        state = run.summary["state_bytes_per_rank"]
        row |= {column: state[kind][place] for column, (kind, place) in STATE_COLUMNS.items()}
        row |= _memory(run.memory["ranks"])
        row["collectives"] = json.dumps(run.traffic["collectives"]) if run.traffic["step"] is not None else None
        row["profile"] = json.dumps(run.profile) if run.profile else None
        row["samples_sha256"] = hashlib.sha256("".join(step["samples_hash"] for step in run.steps).encode()).hexdigest()
    return {key: _cell_value(run.path, key, row.get(key)) for key in RUN_COLUMNS}


def _cell_value(path: Path, key: str, value: Any) -> Any:
    if isinstance(value, str):
        # Half a surrogate pair is JSON and no text; control characters are neither for a table nor for a page.
        return "".join(
            letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in value
        )
    if RUN_COLUMNS[key] == "Int64" and value is not None and abs(value) > _LARGEST:
        raise RecordError(path, f"{key} is {value:.3g}, which no run can have")
    return value


def _config(run: Run) -> RunConfig:
    file = run.path / "config.json"
    try:
        config = RunConfig.from_dict(run.config, "config.json")
        resolved(config, accelerator_visible=False)
    except UserError as error:
        raise RecordError(file, error.problem) from None
    return config


def _repeat(name: str) -> int:
    found = _REPEAT.search(name)
    return int(found[1]) if found else 1


def _cell(path: Path) -> dict[str, Any]:
    """What a run was to be that ended before it could write it: from the sweep's note, else from its own name."""
    notes = path / "sweep.json"
    if not notes.is_file():
        found = _NAMED.search(path.name)
        return {"strategy": found[1], "world_size": int(found[2])} if found else {}
    note = read_json(notes)
    kinds: dict[str, type] = {"strategy": str, "world_size": int, "command": list}
    for key, kind in kinds.items():
        if type(note.get(key)) is not kind or (key == "strategy" and note[key] not in STRATEGY_NAMES):
            raise RecordError(notes, f"{key} is {note.get(key)!r}"[:300])
    return {"strategy": note["strategy"], "world_size": note["world_size"], "config": _asked(notes, note["command"])}


def _searches(file: Path, noted: Any) -> str | None:
    if noted is None:
        return None
    kinds: dict[str, type] = {"id": str, "axis": str, "place": int, "last": int}
    axes = typing.get_args(SearchAxis)
    for entry in noted if type(noted) is list and noted else [noted]:
        known = type(entry) is dict and all(type(entry.get(key)) is kind for key, kind in kinds.items())
        if not (known and entry["axis"] in axes and 0 <= entry["place"] <= entry["last"]):
            raise RecordError(file, f"searches is {noted!r}"[:300])
    return json.dumps([{key: entry[key] for key in kinds} for entry in noted])


def _matmul_tflops(notes: dict[str, Any], precision: str) -> float | None:
    """None where the sweep could not measure it, or had no GPU to measure."""
    try:
        rate = notes["attempts"][-1]["matmul_rates"]["tflops"][precision.removesuffix("-engine")]
    except (KeyError, IndexError, TypeError):
        return None
    return float(rate) if type(rate) in (int, float) and 0 < rate < _LARGEST else None


@functools.cache
def _promised(strategy: str) -> dict[str, Any]:
    """What the file of a strategy asks for, where no engine lived to say what it did."""
    file = read_strategy(strategy)
    places = {f"offload_{what}": file.offload_device(what) for what in ("optimizer", "param")}
    return {"zero_stage": file.zero_stage, **places}


def _asked(notes: Path, command: list[Any]) -> RunConfig:
    """The flags of study/train.py in a launch command, every default resolved; its --scale is never `auto`."""
    words = [str(word) for word in command]
    if "study/train.py" not in words:
        raise RecordError(notes, f"command is {shlex.join(words)!r}, which launches no run"[:300])
    try:
        flags = words[words.index("study/train.py") + 1 :]
        return resolved(parse_command_line(flags), accelerator_visible=False)
    except UserError as error:
        raise RecordError(notes, f"command: {error.problem}") from None


def _engine(engine: dict[str, Any]) -> dict[str, Any]:
    if not engine:
        return {}
    copied = (
        "strategy", "world_size", "virtual", "distributed_type", "param_dtype", "optimizer_class", "zero_stage",
        "offload_optimizer", "offload_param", "initial_weights_sha256", "gradient_clipping",
    )  # fmt: skip
    data = engine.get("data") or {}
    hashes = data.get("tokens_sha256")
    hashes = hashes if isinstance(hashes, dict) else {}
    settings = engine.get("optimizer_settings")
    return {
        **{key: engine[key] for key in copied},
        # What was asked is in the config's columns; this is what ran.
        "engine_precision": engine["precision"],
        "trainer": engine.get("trainer", "study"),
        "warnings": json.dumps(engine["warnings"]),
        "buckets": json.dumps(engine["buckets"], sort_keys=True),
        "optimizer_settings": json.dumps(settings, sort_keys=True) if settings is not None else None,
        "gradient_accumulation_steps": engine.get("gradient_accumulation_steps"),
        "micro_batch_size": engine.get("per_device_train_batch_size"),
        **{key: engine.get(key) for key in ("model_parameters", "model_layers", "preset_layers")},
        "torch_version": engine["torch"],
        "deepspeed_version": engine["deepspeed"],
        **{f"{split}_data_sha256": _text_or_none(hashes.get(split)) for split in ("train", "eval")},
        **{column: (engine.get("floor") or {}).get(key) for column, key in _FLOORS.items()},
    }


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _environment(environment: dict[str, Any]) -> dict[str, Any]:
    if not environment:
        return {}
    copied = ("cpu", "cpu_cores", "threads_per_rank", "host_memory_gib", "driver", "git_commit")
    packages = environment.get("packages", {})
    return {
        **{key: environment.get(key) for key in copied},
        "devices": json.dumps([device["name"] for device in environment.get("devices", [])]),
        **{f"{name}_version": packages.get(name) for name in ("accelerate", "transformers")},
    }


def _memory(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest over ranks, as everywhere: a configuration fits when its fullest rank does."""
    row: dict[str, Any] = {
        column: _largest(rank["phases"].get(phase, {}).get(figure) for rank in ranks)
        for column, (phase, figure) in MEMORY_COLUMNS.items()
    }
    states = [rank["state"] for rank in ranks if rank["state"] is not None]
    buffers = [state["buffer_bytes"] for state in states if "buffer_bytes" in state]
    names = sorted({name for named in buffers for name in named})
    largest = {name: _largest(named.get(name) for named in buffers) for name in names}
    if buffers:
        row["buffers"] = json.dumps(largest)
        for place in ("device", "host"):
            sizes = (size for name, size in largest.items() if name.endswith(f".{place}") and size is not None)
            row[f"buffer_bytes_{place}"] = sum(sizes)
    for key in ("grads_in_bucket_bytes", "other_tensor_bytes"):
        row[key] = _largest(state.get(key) for state in states)
    row["grads_by_moment"] = json.dumps(
        {
            moment: {place: _largest(state[moment].get(place) for state in states) for place in STATE_PLACES}
            for moment in MOMENTS
            if states and all(state.get(moment) for state in states)
        }
    )
    row["kept_whole_bytes"] = _largest(state.get("kept_whole", {}).get("bytes") for state in states)
    return row


def _largest(values: typing.Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def step_block(run: Run) -> dict[str, Any]:
    """The steps of a run that ended well by column, with each evaluation beside the step it followed."""
    if any(step["tokens"] > _LARGEST for step in run.steps):
        raise RecordError(run.path / "steps.jsonl", "a step has more tokens than any run can have")
    block: dict[str, Any] = {"samples_hash": np.array([step["samples_hash"] for step in run.steps], dtype=object)}
    for key in ("step", "tokens", "loss", "lr", "grad_norm", "step_time_s"):
        block[key] = np.array([step[key] for step in run.steps], dtype=STEP_COLUMNS[key])
    for key in ("eval_loss", "accuracy", "perplexity"):
        values = np.full(len(run.steps), np.nan)
        for row in run.evals:
            if row["step"] > len(run.steps):
                raise RecordError(run.path / "evals.jsonl", f"step {row['step']} was never taken")
            values[row["step"] - 1] = np.nan if row.get(key) is None else row[key]
        block[f"eval_{key.removeprefix('eval_')}"] = values
    return block
