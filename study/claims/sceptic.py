"""What a reader should know of the records behind a verdict before believing it.

Which runs there were and how they ended, how many independent starts, made with what and how long ago it would take to
do them again; and whether the check was written before the records were made, as git tells.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml

from study.claims.board import JudgedClaim
from study.claims.evidence import AUTOPSY, KEYS_FILE, Evidence
from study.claims.ledger import LEDGER
from study.config.strategies import REPOSITORY
from study.config.yaml_sections import read_own

# How records were made, in the columns of runs: also of sessions of the listing, and of probes of the engine.

ENGINE_KEYS = "engine_keys"
# Reports of other records, and what makes these anew.
NOT_OF_RUNS = {AUTOPSY: "study autopsy run", ENGINE_KEYS: "python -m study.advisor.engine_keys of commit 7ff8d96"}


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


Order = Literal["before", "after", "cannot be told"]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSIONS = {"torch": "torch_version", "DeepSpeed": "deepspeed_version", "Accelerate": "accelerate_version",
             "Transformers": "transformers_version"}  # fmt: skip
# By claim, the checks of its entry as they are written.
Written = Mapping[str, list[Any]]


def facts(judged: JudgedClaim, evidence: Evidence) -> list[tuple[str, str]]:
    """Each with what it is about; none for a verdict that rests on no records."""
    reports = sorted({report for finding in judged.findings for report in finding.reports})
    if not reports:
        return []
    found = [("Checks and records", order_text(orders(judged, evidence)))]
    for report in reports:
        used = _used(judged, evidence, report)
        found += [
            (f"Runs in {report}", _runs_text(used, evidence, report)), ("Independent starts", _starts_text(used)),
            ("Made with", _made_with(used)), ("To do it again", _again_text(used, evidence, report)),
        ]  # fmt: skip
    return found


def orders(judged: JudgedClaim, evidence: Evidence, repository: Path = REPOSITORY) -> list[Order]:
    """Of each check that rests on records: was it in the ledger, as it is now, of the commit that made each of them?"""
    written = _checks_in(LEDGER.read_text(encoding="utf-8")).get(judged.claim.id, [])
    found = []
    for check, finding in zip(written, judged.findings, strict=False):
        if finding.reports:
            commits = {commit for report in finding.reports
                       for commit in _used(judged, evidence, report, finding.figure)["git_commit"]}  # fmt: skip
            found.append(_order(check, judged.claim.id, commits, repository))
    return found


def order_text(found: Iterable[Order]) -> str:
    counts = Counter(found)
    words: dict[Order, str] = {
        "before": "in the ledger, as they are now, before their records were made",
        "after": "written or changed after their records were made",
        "cannot be told": "not to be told from git: a record names no commit, or one that is not here",
    }
    said = [f"{counts[order]} {text}" for order, text in words.items() if counts[order]]
    return f"Of {_many(counts.total(), 'check')} on records: {'; '.join(said)}."


def _order(check: Any, claim: str, commits: set[Any], repository: Path) -> Order:
    ledgers = [_ledger_at(str(commit), repository) for commit in commits]
    known = [each for each in ledgers if each is not None]
    if any(all(_judges(check) != _judges(old) for old in each.get(claim, [])) for each in known):
        return "after"
    return "before" if ledgers and len(known) == len(ledgers) else "cannot be told"


def _judges(check: Any) -> Any:
    """What decides; how the figure is called does not."""
    return {key: value for key, value in check.items() if key != "shows"} if isinstance(check, dict) else check


@functools.cache
def _ledger_at(commit: str, repository: Path) -> Written | None:
    """The checks that a commit had; none before there was a ledger. None where git does not have the commit."""
    if not _COMMIT.fullmatch(commit) or _git(repository, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    text = _git(repository, "show", f"{commit}:{LEDGER.relative_to(REPOSITORY).as_posix()}")
    return {} if text is None else _checks_in(text)


@functools.cache
def _checks_in(ledger: str) -> Written:
    try:
        document = read_own(ledger)
        return {str(claim["id"]): list(claim["checks"]) for claim in document["claims"]}
    except (yaml.YAMLError, LookupError, TypeError):
        return {}


def _git(repository: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return answer.stdout


def _used(judged: JudgedClaim, evidence: Evidence, report: str, only: Any = None) -> pd.DataFrame:
    """The runs of a report that its figures rest on, or one of them does."""
    figures = [only] if only else [finding.figure for finding in judged.findings if finding.figure]
    names = {record.removeprefix(f"{report}/") for figure in figures for record in figure.records}
    runs = made(evidence, report)
    return runs[runs["run"].isin(names)]


def _runs_text(used: pd.DataFrame, evidence: Evidence, report: str) -> str:
    every = made(evidence, report)
    ended = ", ".join(f"{count} {state}" for state, count in every["status_state"].value_counts().items())
    text = f"{len(used)} of {len(every)}, which ended as: {ended}"
    if report in NOT_OF_RUNS:
        return f"{text}."
    refused = len(evidence.records(report).refused)
    return f"{text}; {refused} records were left out because they cannot be believed."


def _starts_text(used: pd.DataFrame) -> str:
    if used["virtual"].all():
        return "None are needed: bytes of one virtual rank are counted, and no loss is trained."
    if used["initial_weights_sha256"].isna().all():
        return "None are needed: what the engine says is read, and nothing is trained."
    seeds, weights = used["seed"].nunique(), used["initial_weights_sha256"].nunique()
    repeats = int(used.duplicated(["workload_key", "arm", "seed"]).sum())
    return f"{_many(weights, 'initialization')} from {_many(seeds, 'seed')}; runs that repeat a seed: {repeats}."


def _made_with(used: pd.DataFrame) -> str:
    versions = [f"{name} {_list(used[column])}" for name, column in _VERSIONS.items() if used[column].notna().any()]
    devices = {str(name) for text in used["devices"].dropna() for name in json.loads(text)}
    box = f"{_list(used['cpu'])}, {', '.join(sorted(devices)) or 'no GPU'}"
    return f"{', '.join(versions)}; on {box}; commit {_list(used['git_commit'].str[:7])}."


def _again_text(used: pd.DataFrame, evidence: Evidence, report: str) -> str:
    typed = f"`{command(report)}`: " if command(report) else ""
    if used["status_ended_at"].isna().all():
        return f"{typed}how long it takes was not recorded."
    own, every = (_minutes(runs) for runs in (used, made(evidence, report)))
    return f"{typed}these runs took {own:.1f} minutes, all of {report} {every:.1f}."


def _minutes(runs: pd.DataFrame) -> float:
    start, end = (
        pd.to_datetime(runs[f"status_{side}_at"], utc=True, format="ISO8601") for side in ("started", "ended")
    )
    return float((end - start).dt.total_seconds().sum() / 60)


def _list(values: pd.Series) -> str:
    return " or ".join(sorted({str(value) for value in values.dropna()})) or "not recorded"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
