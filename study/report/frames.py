"""Run directories as two tables, one row per run and one per step, and those tables as parquet files in git.

python -m study.report.frames runs/laptop reports/laptop
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from study.config import RunConfig
from study.errors import UserError
from study.records import STATE_KINDS, STATE_PLACES, RecordError, Run, find_runs, read_run

RUNS_FILE, STEPS_FILE = "runs.parquet", "steps.parquet"
_ENGINE_COLUMNS = (
    "strategy", "distributed_type", "world_size", "virtual", "zero_stage", "offload_optimizer", "offload_param",
    "optimizer_class", "param_dtype", "initial_weights_sha256", "torch", "deepspeed",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Records:
    """All that a report is made of; `refused` are the run directories that cannot be believed, and why."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    refused: tuple[str, ...] = ()


def read_runs(root: Path) -> Records:
    rows, steps, refused = [], [], []
    for path in find_runs(root):
        try:
            run = read_run(path)
            row = _row(run)
        except (RecordError, UserError) as error:
            refused.append(str(error))
            continue
        rows.append(row)
        steps += [{"run": path.name, **step} for step in run.steps]
    return Records(pd.DataFrame(rows), pd.DataFrame(steps), tuple(refused))


def write_parquet(records: Records, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records.runs.to_parquet(folder / RUNS_FILE, index=False)
    records.steps.to_parquet(folder / STEPS_FILE, index=False)


def read_parquet(folder: Path) -> Records:
    try:
        return Records(pd.read_parquet(folder / RUNS_FILE), pd.read_parquet(folder / STEPS_FILE))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no readable {RUNS_FILE} and {STEPS_FILE} ({error})",
            f"make them: python -m study.report.frames RUNS_DIR {folder}",
        ) from None


def _row(run: Run) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run.path.name, **{f"status_{key}": value for key, value in run.status.items()}}
    if run.config:
        row |= dataclasses.asdict(RunConfig.from_dict(run.config, str(run.path / "config.json")))
        row["engine_override"] = json.dumps(row["engine_override"])
    if run.engine:
        row |= {key: run.engine[key] for key in _ENGINE_COLUMNS}
        row["warnings"] = json.dumps(run.engine["warnings"])
        # What was asked is in the config's columns; this is what ran.
        row["engine_precision"] = run.engine["precision"]
    if run.summary:
        row |= {key: value for key, value in run.summary.items() if key != "state_bytes_per_rank"}
        for kind in STATE_KINDS:
            for place in STATE_PLACES:
                row[f"{kind}_bytes_{place}"] = run.summary["state_bytes_per_rank"][kind][place]
    if run.environment:
        row["cpu"] = run.environment.get("cpu")
        row["devices"] = json.dumps([device["name"] for device in run.environment.get("devices", [])])
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs_dir", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    records = read_runs(options.runs_dir)
    for reason in records.refused:
        print(f"left out: {reason}", file=sys.stderr)
    if records.runs.empty:
        print(f"error: {options.runs_dir} holds no readable run", file=sys.stderr)
        return 2
    write_parquet(records, options.output)
    print(f"{len(records.runs)} runs, {len(records.steps)} steps -> {options.output}")
    return 1 if records.refused else 0


if __name__ == "__main__":
    sys.exit(main())
