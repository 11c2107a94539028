"""How records were made, in the columns of runs: also of sessions of the listing, and of probes of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from study.claims.evidence import AUTOPSY, KEYS_FILE, Evidence
from study.spec.strategies import REPOSITORY

ENGINE_KEYS = "engine_keys"
# Reports of other records, and what makes these anew.
NOT_OF_RUNS = {AUTOPSY: "study autopsy run", ENGINE_KEYS: "python -m study.doctor.engine_keys"}


def made(evidence: Evidence, report: str) -> pd.DataFrame:
    if report == AUTOPSY:
        return _sessions(evidence.arms())
    if report == ENGINE_KEYS:
        return _probes(evidence.root / report)
    return evidence.records(report).runs


def command(report: str) -> str:
    """Which makes them anew; empty where it is not known."""
    has_suite = (REPOSITORY / "study" / "suites" / f"{report}.yaml").is_file()
    return NOT_OF_RUNS.get(report, f"study run {report}" if has_suite else "")


def _sessions(arms: pd.DataFrame) -> pd.DataFrame:
    one = arms.drop_duplicates("session").set_index("session", drop=False)
    # Its arms' initial weights are told apart by their sum.
    weights = arms[arms["start"] == "initial"].groupby("session")["start_weights_abs_sum"].first().map(str)
    started = pd.to_datetime(one["started_at"], utc=True, format="ISO8601")
    made_in = pd.DataFrame([_box(json.loads(text)) for text in one["environment"]], index=one.index)
    return made_in.assign(
        run=one["session"], status_state=one["state"], virtual=False, seed=one["seed"], workload_key=one["kind"],
        arm=one["cell"], initial_weights_sha256=weights, status_started_at=started.map(pd.Timestamp.isoformat),
        status_ended_at=(started + pd.to_timedelta(one["session_s"], unit="s")).map(pd.Timestamp.isoformat),
    ).reset_index(drop=True)  # fmt: skip


def _probes(folder: Path) -> pd.DataFrame:
    said = json.loads((folder / KEYS_FILE).read_text(encoding="utf-8"))
    rows = [_box(said["environment"]) | {"run": probe["name"], "status_state": "ok"} for probe in said["probes"]]
    nothing = ("seed", "workload_key", "arm", "initial_weights_sha256", "status_started_at", "status_ended_at")
    return pd.DataFrame(rows).assign(virtual=False, **dict.fromkeys(nothing))


def _box(environment: dict[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages", {})
    versions = {f"{name}_version": packages.get(name) for name in ("torch", "deepspeed", "accelerate", "transformers")}
    devices = json.dumps([device["name"] for device in environment.get("devices", [])])
    return versions | {"cpu": environment.get("cpu"), "devices": devices, "git_commit": environment.get("git_commit")}
