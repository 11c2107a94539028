"""Columns of the tables `runs` and `steps`, and their values from one run directory."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from study.config.errors import UserError, replace_unprintable
from study.config.flags import RunConfig, inner_type, parse_command_line, resolve_config
from study.config.precisions import computing_type
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.records import older
from study.records.directory import Run, read_json
from study.records.models import (
    EngineRecord,
    EnvironmentRecord,
    EvaluationRow,
    Record,
    StatusRecord,
    StepRow,
    SummaryRecord,
)
from study.records.schema import SEAL, STATE_KINDS, STATE_PLACES, RecordError, validate
from study.records.virtual_summary import GRADIENT_READ_POINTS, largest

# sweep.json: the planned cell of a run, its searches, and the speed of the machine.

_NAMED = re.compile(rf"-({'|'.join(sorted(STRATEGY_NAMES, key=len, reverse=True))})-(\d{{1,6}})x-[0-9a-f]{{8}}")


def read_notes(path: Path) -> dict[str, Any]:
    """Return the sweep's notes on a run; empty without a sweep. Raises RecordError."""
    file = path / "sweep.json"
    if not file.is_file():
        return {}
    notes = read_json(file)
    validate(file, notes)
    return notes


def planned_cell(path: Path, notes: dict[str, Any]) -> dict[str, Any]:
    """Return strategy, ranks and config of a run that failed early: from the sweep's notes, else from its name."""
    if not notes:
        match = _NAMED.search(path.name)
        return {"strategy": match[1], "world_size": int(match[2])} if match else {}
    file = path / "sweep.json"
    if missing := [key for key in ("strategy", "world_size", "command") if key not in notes]:
        raise RecordError(file, f"lacks {', '.join(missing)}")
    words = notes["command"]
    script = next((place for place, word in enumerate(words) if word.endswith("study/train.py")), None)
    if script is None:
        raise RecordError(file, f"command is {shlex.join(words)!r}, which launches no run"[:300])
    try:
        config = resolve_config(parse_command_line(words[script + 1 :]), accelerator_visible=False)
    except UserError as error:
        raise RecordError(file, f"command: {error.problem}") from None
    return {"strategy": notes["strategy"], "world_size": notes["world_size"], "config": config}


def matmul_tflops(notes: dict[str, Any], precision: str | None) -> float | None:
    """Return the measured matmul rate in TFLOP/s; None without a GPU or a measurement."""
    attempts = notes.get("attempts") or [{}]
    rates = attempts[-1].get("matmul_rates", {}).get("tflops", {})
    rate: float | None = rates.get(computing_type(precision or ""))
    return rate


MEMORY_COLUMNS = {
    f"memory_{phase}_{figure}_gib": (phase, figure)
    for phase in ("init", "first_step", "steady", "eval")
    for figure in ("allocated", "reserved", "device", "host")
}
STATE_COLUMNS = {f"{kind}_bytes_{place}": (kind, place) for kind in STATE_KINDS for place in STATE_PLACES}
# Absolute folders, which are removed from texts: a report shows only the last name.
_FOLDERS = re.compile(r"(?<![\w./:~-])/(?:[^\s/:'\"()]+/){2,}")
_MAY_NAME_FOLDERS = {"data", "tokenizer_name", "model_name_or_path", "status_reason", "status_hint"}
_PATHS = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "nvme_path"}
_FLOORS = {
    "floor_loss": "expected_loss",
    "floor_accuracy": "expected_accuracy",
    "floor_eval_loss": "oracle_eval_loss",
    "floor_eval_accuracy": "oracle_eval_accuracy",
}
_TYPES: dict[Any, str] = {bool: "boolean", int: "Int64", float: "float64"}


def _column_type(hint: Any) -> str:
    """Return the type of the column of a field; texts and JSON have the type `str`."""
    kind = inner_type(hint)
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    return _TYPES.get(kind, "str")


class Copied(NamedTuple):
    """A column that has the value and the type of a key of a file."""

    model: type[Record]
    key: str

    @property
    def type(self) -> str:
        return _column_type(self.model.model_fields[self.key].annotation)


def _copied(model: type[Record], *keys: str, **renamed: str) -> dict[str, Copied]:
    """Return columns by name: of keys with the same name, then of renamed ones."""
    return {column: Copied(model, key) for column, key in ({key: key for key in keys} | renamed).items()}


CONFIG_COLUMNS = {
    name: _column_type(hint) for name, hint in typing.get_type_hints(RunConfig).items() if name not in _PATHS
}
_COLUMNS: dict[str, str | Copied] = {
    "run": "str",
    **{f"status_{key}": Copied(StatusRecord, key) for key in StatusRecord.model_fields if key not in SEAL},
    "sealed": "boolean",
    # Comparison labels, from study/records/fairness.py and workloads.py.
    **dict.fromkeys(("workload", "workload_key", "arm", "baseline", "confounded", "confounded_loss", "notes"), "str"),
    **_copied(EngineRecord, "strategy", "world_size", "virtual", "trainer"),
    **_copied(EngineRecord, "model_parameters", "model_layers", "preset_layers"),
    "repeat": "Int64",
    # Name of the stack; null for the installed packages.
    "stack": "str",
    # Searches that use the run, with its place in each, as JSON; and whether it is only a probe of a search.
    "searches": "str",
    "probe": "boolean",
    **CONFIG_COLUMNS,
    # Settings of the live engine; the requested ones are in the columns of the config.
    **_copied(EngineRecord, "distributed_type", engine_precision="precision"),
    **_copied(EngineRecord, "param_dtype", "optimizer_class"),
    **dict.fromkeys(("optimizer_settings", "buckets", "warnings"), "str"),
    **_copied(EngineRecord, "initial_weights_sha256", "offload_optimizer", "offload_param", "nvme_param_dtype"),
    **dict.fromkeys(("train_data_sha256", "eval_data_sha256"), "str"),
    **_copied(EngineRecord, "zero_stage", "gradient_accumulation_steps"),
    # Size of the model-parallel group, whose ranks share samples; null without one.
    "group_ranks": "Int64",
    **_copied(EngineRecord, micro_batch_size="per_device_train_batch_size"),
    **_copied(EngineRecord, "gradient_clipping"),
    "samples_sha256": "str",
    **{key: "float64" for key in SummaryRecord.model_fields if key != "state_bytes_per_rank"},
    **dict.fromkeys(STATE_COLUMNS, "float64"),
    **dict.fromkeys(MEMORY_COLUMNS, "float64"),
    **dict.fromkeys(
        ("buffer_bytes_device", "buffer_bytes_host", "grads_in_bucket_bytes", "kept_whole_bytes"), "float64"
    ),
    **dict.fromkeys(("other_tensor_bytes", "forward_holds_bytes", "forward_gathers_bytes"), "float64"),
    "grads_by_moment": "str",
    "buffers": "str",
    "collectives": "str",
    # Machines of the job, and ring bytes of a rank in groups that span machines.
    "machines": "Int64",
    "across_machines_bytes_per_step": "float64",
    # Content of profile.json; null if no step was profiled.
    "profile": "str",
    **dict.fromkeys(_FLOORS, "float64"),
    **dict.fromkeys(("cpu", "devices"), "str"),
    **_copied(EnvironmentRecord, "driver", "git_commit", "code_sha256"),
    "study_version": "str",
    **_copied(EnvironmentRecord, "git_dirty", "cpu_cores", "threads_per_rank", "host_memory_gib"),
    # Matmul rate of this machine in the precision of the run, measured at the start of the sweep.
    "matmul_tflops": "float64",
    **_copied(EngineRecord, torch_version="torch", deepspeed_version="deepspeed"),
    **dict.fromkeys(("accelerate_version", "transformers_version"), "str"),
}
RUN_COLUMNS = {name: column if isinstance(column, str) else column.type for name, column in _COLUMNS.items()}
# Columns of a row of steps.jsonl, and of the evaluation after it.
_OF_STEP = {key: Copied(StepRow, key) for key in StepRow.model_fields if key != "skipped"}
_OF_EVALUATION = {
    f"eval_{key.removeprefix('eval_')}": Copied(EvaluationRow, key)
    for key in EvaluationRow.model_fields
    if key != "step"
}
# Whole numbers of a step have no null.
STEP_COLUMNS = {"run": "str"} | {
    name: column.type.replace("Int64", "int64") for name, column in (_OF_STEP | _OF_EVALUATION).items()
}
_REPEAT = re.compile(r"-r([1-9]\d{0,5})$")


def run_row(run: Run) -> dict[str, Any]:
    """Return the row of a run by column; None means not recorded. Raises RecordError."""
    numbered = _REPEAT.search(run.path.name)
    row: dict[str, Any] = {"run": run.path.name, "repeat": int(numbered[1]) if numbered else 1, "virtual": False}
    row |= _copy(StatusRecord, run.status)
    row |= {"status_cause": run.ending.cause, "status_not_finite_step": run.ending.not_finite_step}
    notes = read_notes(run.path)
    row["stack"] = notes.get("stack")
    row["searches"] = json.dumps(notes["searches"]) if "searches" in notes else None
    row["probe"] = row["searches"] is not None and notes.get("probe") is not False
    cell = {} if run.config and run.engine else planned_cell(run.path, notes)
    config = cell.pop("config", None)
    if run.config:
        try:
            config = RunConfig.from_dict(run.config, "config.json")
            resolve_config(config, accelerator_visible=False)
        except UserError as error:
            raise RecordError(run.path / "config.json", error.problem) from None
    if config is not None:
        row |= {key: value for key, value in vars(config).items() if key in CONFIG_COLUMNS}
        row["engine_override"] = json.dumps(row["engine_override"])
        row["virtual"] = config.virtual_world_size is not None
        row["matmul_tflops"] = matmul_tflops(notes, config.precision)
    row |= cell | _engine(run.engine) | _environment(run.environment)
    if row.get("virtual") and (per_machine := run.traffic.get("ranks_per_machine")) is not None:
        # The machines of a virtual job do not exist; derive their number.
        row["machines"] = row["world_size"] // per_machine
    if not run.engine and row.get("strategy"):
        file = read_strategy(row["strategy"])
        row |= {f"offload_{what}": file.offload_device(what) for what in ("optimizer", "param")}
        row["zero_stage"] = file.zero_stage
        # A virtual rank is launched as one process.
        row["world_size"] = row.get("virtual_world_size") or row["world_size"]
    # The row of a failed run has a reason, and none of the figures that it measured.
    if run.state == "ok":
        row |= {key: value for key, value in run.summary.items() if key != "state_bytes_per_rank"}
        state = run.summary["state_bytes_per_rank"]
        row |= {column: state[kind][place] for column, (kind, place) in STATE_COLUMNS.items()}
        row |= _memory(run.memory["ranks"])
        row["collectives"] = json.dumps(run.traffic["collectives"]) if run.traffic["step"] is not None else None
        row["across_machines_bytes_per_step"] = run.traffic.get("across_machines_bytes_per_rank")
        row["profile"] = json.dumps(run.profile) if run.profile else None
        row["samples_sha256"] = hashlib.sha256("".join(step["samples_hash"] for step in run.steps).encode()).hexdigest()
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    texts |= {key: _FOLDERS.sub("", texts[key]) for key in _MAY_NAME_FOLDERS & texts.keys()}
    row |= {key: replace_unprintable(text) for key, text in texts.items()}
    return {key: row.get(key) for key in RUN_COLUMNS}


def _copy(model: type[Record], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the columns that are copied from this file; None for a key that it lacks."""
    columns = ((name, column) for name, column in _COLUMNS.items() if isinstance(column, Copied))
    return {name: document.get(column.key) for name, column in columns if column.model is model}


def _engine(engine: dict[str, Any]) -> dict[str, Any]:
    if not engine:
        return {}
    hashes = (engine.get("data") or {}).get("tokens_sha256")
    digests = (
        {split: text for split, text in hashes.items() if isinstance(text, str)} if isinstance(hashes, dict) else {}
    )
    settings = engine.get("optimizer_settings")
    if "nvme_param_dtype" not in engine:
        engine = engine | older.read_warnings(engine["warnings"])._asdict()
    return {
        **_copy(EngineRecord, engine),
        "group_ranks": (engine.get("model_parallel_group") or {}).get("ranks"),
        "trainer": engine.get("trainer", "study"),
        "warnings": json.dumps(engine["warnings"]),
        "buckets": json.dumps(engine["buckets"], sort_keys=True),
        "optimizer_settings": json.dumps(settings, sort_keys=True) if settings is not None else None,
        **{f"{split}_data_sha256": digests.get(split) for split in ("train", "eval")},
        **{column: (engine.get("floor") or {}).get(key) for column, key in _FLOORS.items()},
    }


def _environment(environment: dict[str, Any]) -> dict[str, Any]:
    if not environment:
        return {}
    packages, boxes = environment.get("packages", {}), [environment, *environment.get("other_machines", [])]
    devices = dict.fromkeys(tuple(device["name"] for device in box.get("devices", [])) for box in boxes)
    return {
        **_copy(EnvironmentRecord, environment),
        # Machines of the same kind are listed once.
        "cpu": " + ".join(dict.fromkeys(box["cpu"] for box in boxes if box.get("cpu"))) or None,
        "devices": json.dumps([name for names in devices for name in names]),
        "machines": len(boxes),
        **{f"{name}_version": packages.get(name) for name in ("accelerate", "transformers")},
        "study_version": packages.get("zero-study"),
    }


def _memory(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        column: largest(rank["phases"].get(phase, {}).get(figure) for rank in ranks)
        for column, (phase, figure) in MEMORY_COLUMNS.items()
    }
    states = [rank["state"] for rank in ranks if rank["state"] is not None]
    buffers = [state["buffer_bytes"] for state in states if "buffer_bytes" in state]
    names = sorted({name for rank_buffers in buffers for name in rank_buffers})
    largest_buffers = {name: largest(rank_buffers.get(name) for rank_buffers in buffers) for name in names}
    if buffers:
        row["buffers"] = json.dumps(largest_buffers)
        for place in ("device", "host"):
            sizes = (size for name, size in largest_buffers.items() if name.endswith(f".{place}") and size is not None)
            row[f"buffer_bytes_{place}"] = sum(sizes)
    for key in ("grads_in_bucket_bytes", "other_tensor_bytes", "forward_holds_bytes", "forward_gathers_bytes"):
        row[key] = largest(state.get(key) for state in states)
    row["grads_by_moment"] = json.dumps(
        {
            moment: {place: largest(state[moment].get(place) for state in states) for place in STATE_PLACES}
            for moment in GRADIENT_READ_POINTS
            if states and all(state.get(moment) for state in states)
        }
    )
    row["kept_whole_bytes"] = largest(state.get("kept_whole", {}).get("bytes") for state in states)
    return row


def step_block(run: Run) -> dict[str, Any]:
    """Return the steps of a successful run by column; an evaluation is in the row of the preceding step."""
    block: dict[str, Any] = {
        name: np.array([step[column.key] for step in run.steps], dtype=STEP_COLUMNS[name].replace("str", "object"))
        for name, column in _OF_STEP.items()
    }
    for name, column in _OF_EVALUATION.items():
        values = np.full(len(run.steps), np.nan)
        for row in run.evals:
            value = row.get(column.key)
            values[row["step"] - 1] = np.nan if value is None else value
        block[name] = values
    return block
