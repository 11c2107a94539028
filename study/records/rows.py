"""Columns of the tables `runs` and `steps`, and their values from one run directory."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import typing
from pathlib import Path
from typing import Any

import numpy as np

from study.config.errors import UserError, replace_unprintable
from study.config.flags import RunConfig, inner_type, parse_command_line, resolve_config
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.records.directory import Run, read_json
from study.records.schema import STATE_KINDS, STATE_PLACES, SUMMARY_KEYS, SUMMARY_OPTIONAL, RecordError, validate
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
    rate: float | None = rates.get((precision or "").removesuffix("-engine"))
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
_TYPES: dict[Any, str] = {bool: "boolean", int: "Int64", float: "float64"}
_FLOORS = {
    "floor_loss": "expected_loss",
    "floor_accuracy": "expected_accuracy",
    "floor_eval_loss": "oracle_eval_loss",
    "floor_eval_accuracy": "oracle_eval_accuracy",
}


CONFIG_COLUMNS = {
    name: _TYPES.get(inner_type(hint), "str")
    for name, hint in typing.get_type_hints(RunConfig).items()
    if name not in _PATHS
}
RUN_COLUMNS: dict[str, str] = {
    "run": "str",
    **{f"status_{key}": "str" for key in ("state", "reason", "hint", "started_at", "ended_at")},
    "status_attempt": "Int64",
    "sealed": "boolean",
    # Comparison labels, from study/records/fairness.py and workloads.py.
    **dict.fromkeys(("workload", "workload_key", "arm", "baseline", "confounded", "confounded_loss", "notes"), "str"),
    "strategy": "str",
    "world_size": "Int64",
    "virtual": "boolean",
    "trainer": "str",
    **dict.fromkeys(("model_parameters", "model_layers", "preset_layers"), "Int64"),
    "repeat": "Int64",
    # Name of the stack; null for the installed packages.
    "stack": "str",
    # Searches that use the run, with its place in each, as JSON; and whether it is only a probe of a search.
    "searches": "str",
    "probe": "boolean",
    **CONFIG_COLUMNS,
    **dict.fromkeys(("distributed_type", "engine_precision", "param_dtype", "optimizer_class"), "str"),
    **dict.fromkeys(("optimizer_settings", "buckets", "warnings", "initial_weights_sha256"), "str"),
    **dict.fromkeys(("offload_optimizer", "offload_param", "train_data_sha256", "eval_data_sha256"), "str"),
    "zero_stage": "Int64",
    "gradient_accumulation_steps": "Int64",
    # Size of the model-parallel group, whose ranks share samples; null without one.
    "group_ranks": "Int64",
    "micro_batch_size": "Int64",
    "gradient_clipping": "float64",
    "samples_sha256": "str",
    **{key: "float64" for key in (*SUMMARY_KEYS, *SUMMARY_OPTIONAL) if key != "state_bytes_per_rank"},
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
    **dict.fromkeys(("cpu", "devices", "driver", "git_commit", "code_sha256", "study_version"), "str"),
    "git_dirty": "boolean",
    **dict.fromkeys(("cpu_cores", "threads_per_rank"), "Int64"),
    "host_memory_gib": "float64",
    # Matmul rate of this machine in the precision of the run, measured at the start of the sweep.
    "matmul_tflops": "float64",
    **{f"{name}_version": "str" for name in ("torch", "deepspeed", "accelerate", "transformers")},
}
STEP_COLUMNS: dict[str, str] = {
    "run": "str",
    "step": "int64",
    "loss": "float64",
    "lr": "float64",
    "grad_norm": "float64",
    "step_time_s": "float64",
    "tokens": "int64",
    "samples_hash": "str",
    "eval_loss": "float64",
    "eval_accuracy": "float64",
    "eval_perplexity": "float64",
}
_REPEAT = re.compile(r"-r([1-9]\d{0,5})$")


def run_row(run: Run) -> dict[str, Any]:
    """Return the row of a run by column; None means not recorded. Raises RecordError."""
    numbered = _REPEAT.search(run.path.name)
    row: dict[str, Any] = {"run": run.path.name, "repeat": int(numbered[1]) if numbered else 1, "virtual": False}
    row |= {f"status_{key}": value for key, value in run.status.items()}
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


def _engine(engine: dict[str, Any]) -> dict[str, Any]:
    if not engine:
        return {}
    copied = (
        "strategy",
        "world_size",
        "virtual",
        "distributed_type",
        "param_dtype",
        "optimizer_class",
        "zero_stage",
        "offload_optimizer",
        "offload_param",
        "initial_weights_sha256",
        "gradient_clipping",
        "gradient_accumulation_steps",
        "model_parameters",
        "model_layers",
        "preset_layers",
    )
    # Settings of the live engine; the requested ones are in the columns of the config.
    renamed = {
        "engine_precision": "precision",
        "micro_batch_size": "per_device_train_batch_size",
        "torch_version": "torch",
        "deepspeed_version": "deepspeed",
    }
    hashes = (engine.get("data") or {}).get("tokens_sha256")
    digests = (
        {split: text for split, text in hashes.items() if isinstance(text, str)} if isinstance(hashes, dict) else {}
    )
    settings = engine.get("optimizer_settings")
    return {
        **{key: engine.get(key) for key in copied},
        **{column: engine.get(key) for column, key in renamed.items()},
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
    copied = ("cpu_cores", "threads_per_rank", "host_memory_gib", "driver", "git_commit", "git_dirty", "code_sha256")
    packages, boxes = environment.get("packages", {}), [environment, *environment.get("other_machines", [])]
    devices = dict.fromkeys(tuple(device["name"] for device in box.get("devices", [])) for box in boxes)
    return {
        **{key: environment.get(key) for key in copied},
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
    block: dict[str, Any] = {"samples_hash": np.array([step["samples_hash"] for step in run.steps], dtype=object)}
    for key in ("step", "tokens", "loss", "lr", "grad_norm", "step_time_s"):
        block[key] = np.array([step[key] for step in run.steps], dtype=STEP_COLUMNS[key])
    for key in ("eval_loss", "accuracy", "perplexity"):
        values = np.full(len(run.steps), np.nan)
        for row in run.evals:
            values[row["step"] - 1] = np.nan if row.get(key) is None else row[key]
        block[f"eval_{key.removeprefix('eval_')}"] = values
    return block
