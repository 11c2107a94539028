"""Provenance of a verdict: its runs, seeds, versions and cost, and whether its checks predate the records."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml

from study.claims.evidence import AUTOPSY, KEYS_FILE, Evidence
from study.claims.ledger import LEDGER
from study.claims.scoreboard import JudgedClaim
from study.config.places import IMPORT_ROOT, PACKAGE, REPOSITORY
from study.config.yaml_sections import load_package_yaml

ENGINE_KEYS = "engine_keys"
# Reports whose records are not runs of a suite, with the command that reproduces them.
NOT_OF_RUNS = {AUTOPSY: "study autopsy run", ENGINE_KEYS: "python -m study.advisor.engine_keys of commit 7ff8d96"}
Order = Literal["before", "after", "unknown"]
_ORDERS: dict[Order, str] = {
    "before": "in the ledger, as they are now, before their records were made",
    "after": "written or changed after their records were made",
    "unknown": "of unknown date: a record names no commit, or one that git does not have",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSIONS = {
    "torch": "torch_version",
    "DeepSpeed": "deepspeed_version",
    "Accelerate": "accelerate_version",
    "Transformers": "transformers_version",
}
# Keys of a check that do not change its answer; `elsewhere` was the name of `proxy`.
_LABELS = {"shows", "tests", "reading", "decides", "necessary", "internal", "proxy", "elsewhere", "source", "needs"}
# The checks of the ledger by claim, unparsed.
Written = Mapping[str, list[Any]]


def provenance(judged: JudgedClaim, evidence: Evidence) -> list[tuple[str, str]]:
    """Return pairs of a subject and a sentence; none for a verdict without records."""
    reports = sorted({report for result in judged.results for report in result.reports})
    if not reports:
        return []
    orders = Counter(preregistration_orders(judged, evidence))
    parts = [f"{orders[order]} {text}" for order, text in _ORDERS.items() if orders[order]]
    facts = [("Checks and records", f"Of {_many(orders.total(), 'check')} on records: {'; '.join(parts)}.")]
    for report in reports:
        used, total = _used(judged, evidence, report), source_runs(evidence, report)
        ended = ", ".join(f"{count} {state}" for state, count in total["status_state"].value_counts().items())
        runs = f"{len(used)} of {len(total)}, which ended as: {ended}"
        if report not in NOT_OF_RUNS:
            runs += f"; {len(evidence.records(report).refused)} unreadable or inconsistent records were left out"
        versions = [f"{name} {_list(used[column])}" for name, column in _VERSIONS.items() if used[column].notna().any()]
        devices = {str(name) for text in used["devices"].dropna() for name in json.loads(text)}
        box = f"{_list(used['cpu'])}, {', '.join(sorted(devices)) or 'no GPU'}"
        facts += [
            (f"Runs in {report}", f"{runs}."),
            ("Independent starts", _starts_text(used)),
            ("Made with", f"{', '.join(versions)}; on {box}; commit {_list(used['git_commit'].str[:7])}."),
            ("Rerun", _rerun_text(report, used, total)),
        ]
    return facts


def _starts_text(used: pd.DataFrame) -> str:
    """Return the number of initializations, seeds and repeats of the runs, or why they need none."""
    if used["virtual"].all():
        return "None are needed: bytes of one virtual rank are counted, and no loss is trained."
    if used["initial_weights_sha256"].isna().all():
        return "None are needed: the engine's settings are read, and nothing is trained."
    seeds, weights = used["seed"].nunique(), used["initial_weights_sha256"].nunique()
    repeats = int(used.duplicated(["workload_key", "arm", "seed"]).sum())
    return f"{_many(weights, 'initialization')} from {_many(seeds, 'seed')}; repeats of a seed: {repeats}."


def _rerun_text(report: str, used: pd.DataFrame, total: pd.DataFrame) -> str:
    """Return the command that reproduces the records, and the minutes that it took."""
    command = NOT_OF_RUNS.get(report)
    if command is None and (PACKAGE / "suites" / f"{report}.yaml").is_file():
        command = f"study run {report}"
    rerun = "how long it takes was not recorded."
    if used["status_ended_at"].notna().any():
        rerun = f"these runs took {_minutes(used):.1f} minutes, all of {report} {_minutes(total):.1f}."
    return f"`{command}`: {rerun}" if command else rerun


def source_runs(evidence: Evidence, report: str) -> pd.DataFrame:
    """Return a report's records in the columns of runs, including autopsy sessions and engine probes."""
    if report == AUTOPSY:
        arms = evidence.arms
        sessions = arms.drop_duplicates("session").set_index("session", drop=False)
        # The sum of the initial weights identifies them.
        weights = arms[arms["start"] == "initial"].groupby("session")["start_weights_abs_sum"].first().map(str)
        started = pd.to_datetime(sessions["started_at"], utc=True, format="ISO8601")
        boxes = pd.DataFrame([_box(json.loads(text)) for text in sessions["environment"]], index=sessions.index)
        return boxes.assign(
            run=sessions["session"],
            status_state=sessions["state"],
            virtual=False,
            seed=sessions["seed"],
            workload_key=sessions["kind"],
            arm=sessions["cell"],
            initial_weights_sha256=weights,
            status_started_at=started.map(pd.Timestamp.isoformat),
            status_ended_at=(started + pd.to_timedelta(sessions["session_s"], unit="s")).map(pd.Timestamp.isoformat),
        ).reset_index(drop=True)
    if report == ENGINE_KEYS:
        document = json.loads((evidence.root / report / KEYS_FILE).read_text(encoding="utf-8"))
        box = _box(document["environment"])
        rows = [box | {"run": probe["name"], "status_state": "ok"} for probe in document["probes"]]
        absent = ("seed", "workload_key", "arm", "initial_weights_sha256", "status_started_at", "status_ended_at")
        return pd.DataFrame(rows).assign(virtual=False, **dict.fromkeys(absent))
    return evidence.records(report).runs


def _box(environment: dict[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages", {})
    versions = {column: packages.get(name.lower()) for name, column in _VERSIONS.items()}
    devices = json.dumps([device["name"] for device in environment.get("devices", [])])
    return versions | {"cpu": environment.get("cpu"), "devices": devices, "git_commit": environment.get("git_commit")}


def preregistration_orders(judged: JudgedClaim, evidence: Evidence, repository: Path = REPOSITORY) -> list[Order]:
    """Return for each check whether the commits that made its records already had the check in its present form."""
    written = _checks_in(LEDGER.read_text(encoding="utf-8")).get(judged.claim.id, [])
    results: list[Order] = []
    for check, result in zip(written, judged.results, strict=False):
        if result.reports:
            commits = {
                commit
                for report in result.reports
                for commit in _used(judged, evidence, report, result.figure)["git_commit"]
            }
            ledgers = [_ledger_at(str(commit), repository) for commit in commits]
            readable = [checks.get(judged.claim.id, []) for checks in ledgers if checks is not None]
            if any(all(_deciding(check) != _deciding(old) for old in checks) for checks in readable):
                results.append("after")
            else:
                results.append("before" if ledgers and len(readable) == len(ledgers) else "unknown")
    return results


def _deciding(check: Any) -> Any:
    """Return the keys of a check that affect its answer: its form, arguments and region."""
    return {key: value for key, value in check.items() if key not in _LABELS} if isinstance(check, dict) else check


@functools.cache
def _ledger_at(commit: str, repository: Path) -> Written | None:
    """Return the checks in a commit's ledger, {} before it existed; None if git lacks the commit."""
    if not _COMMIT.fullmatch(commit) or _git(repository, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    text = _git(repository, "show", f"{commit}:{LEDGER.relative_to(IMPORT_ROOT).as_posix()}")
    return {} if text is None else _checks_in(text)


@functools.cache
def _checks_in(ledger: str) -> Written:
    try:
        return {str(claim["id"]): list(claim["checks"]) for claim in load_package_yaml(ledger)["claims"]}
    except (yaml.YAMLError, LookupError, TypeError):
        return {}


def _git(repository: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _used(judged: JudgedClaim, evidence: Evidence, report: str, only: Any = None) -> pd.DataFrame:
    figures = [only] if only else [result.figure for result in judged.results if result.figure]
    names = {record.removeprefix(f"{report}/") for figure in figures for record in figure.records}
    runs = source_runs(evidence, report)
    return runs[runs["run"].isin(names)]


def _minutes(runs: pd.DataFrame) -> float:
    columns = ("status_started_at", "status_ended_at")
    start, end = (pd.to_datetime(runs[column], utc=True, format="ISO8601") for column in columns)
    return float((end - start).dt.total_seconds().sum() / 60)


def _list(values: pd.Series) -> str:
    return " or ".join(sorted({str(value) for value in values.dropna()})) or "not recorded"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
