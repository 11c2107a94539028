"""Whether the checks of a claim were in the ledger, as they are now, before the records that they judge were made."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from study.claims.evidence import AUTOPSY, KEYS_FILE, Evidence
from study.claims.ledger import LEDGER
from study.claims.scoreboard import JudgedClaim
from study.config.places import IMPORT_ROOT, REPOSITORY
from study.config.printing import TextTable
from study.config.yaml_sections import load_package_yaml

ENGINE_KEYS = "engine_keys"
Order = Literal["before", "after", "unknown"]
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Keys of a check that do not change its answer; `elsewhere` was the name of `proxy`.
_LABELS = {"shows", "tests", "reading", "decides", "necessary", "internal", "proxy", "elsewhere", "source", "needs"}
# The checks of the ledger by claim, unparsed.
Written = Mapping[str, list[Any]]


def preregistration_text(judged: list[JudgedClaim], evidence: Evidence) -> list[str | TextTable]:
    """Return the number of checks by order, and a row for each claim with one that is not older than its records."""
    total: Counter[Order] = Counter()
    rows = []
    for item in judged:
        orders = Counter(preregistration_orders(item, evidence))
        total += orders
        if orders["after"] or orders["unknown"]:
            rows.append([item.claim.id, *(str(orders[order] or "-") for order in get_args(Order))])
    older = f"{total['before']} were in the ledger, as they are now, before their records"
    head = f"{total.total()} checks on records: {older}"
    about = "after: written or changed later; unknown: a record names no commit, or one that git does not have here"
    return [head, "", TextTable(["claim", *get_args(Order)], rows), about] if rows else [head]


def preregistration_orders(judged: JudgedClaim, evidence: Evidence, repository: Path = REPOSITORY) -> list[Order]:
    """Return for each check on records whether the commits that made these already had it in its present form."""
    written = _checks_in(LEDGER.read_text(encoding="utf-8")).get(judged.claim.id, [])
    results: list[Order] = []
    for check, result in zip(written, judged.results, strict=False):
        if not result.reports or not result.figure:
            continue
        ledgers = [_ledger_at(str(commit), repository) for commit in _commits(evidence, result.figure.records)]
        readable = [checks.get(judged.claim.id, []) for checks in ledgers if checks is not None]
        if any(all(_deciding(check) != _deciding(old) for old in checks) for checks in readable):
            results.append("after")
        else:
            results.append("before" if ledgers and len(readable) == len(ledgers) else "unknown")
    return results


def _commits(evidence: Evidence, records: tuple[str, ...]) -> set[str | None]:
    """Return the commits that made these records, each named REPORT/RUN."""
    commits = set()
    for record in records:
        report, _, name = record.partition("/")
        commits.add(_commits_of(evidence, report).get(name))
    return commits


@functools.lru_cache(32)
def _commits_of(evidence: Evidence, report: str) -> dict[str, str | None]:
    """Return the commit of each record of a report: of runs, autopsy sessions or engine probes."""
    if report == AUTOPSY:
        environments = evidence.arms.drop_duplicates("session").set_index("session")["environment"]
        return {str(session): json.loads(text).get("git_commit") for session, text in environments.items()}
    if report == ENGINE_KEYS:
        document = json.loads((evidence.root / report / KEYS_FILE).read_text(encoding="utf-8"))
        return {probe["name"]: document["environment"].get("git_commit") for probe in document["probes"]}
    runs = evidence.records(report).runs
    return dict(zip(runs["run"], runs["git_commit"], strict=True))


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
