"""Recall and false alarms of `study verify --features`: each fault of tests/probes/replanted.py, with and without it.

    python tools/replant.py [--only NAME...]

It writes reports/compositions/replanted.json; with --only it replaces rows of an earlier call on the same stack. The
exit status is 1 if a fault is not found, or a run without one is not equal.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.compositions.answers import match_known_finding
from study.compositions.command import installed_stack
from study.compositions.features import Combination, make_combination
from study.compositions.session import CombinationOutcome, CombinationSession

ROOT = Path(__file__).resolve().parents[1]
FAULTS_FILE = ROOT / "tests" / "probes" / "replanted.py"
RESULT = ROOT / "reports" / "compositions" / "replanted.json"
# The first place of a difference, by the name that the table gives it.
_STAGES = {
    "forward": ("forward", "loss"),
    "local gradient": ("local gradient",),
    "gradient": ("gradient",),
    "norm": ("norm",),
    "update": ("update",),
    "weights": ("weight", "forward", "loss", "evaluation"),
    "resume": ("resumed", "resumed master", "forward", "update", "loss"),
}


def read_faults() -> dict[str, Any]:
    """Return the table of faults."""
    faults: dict[str, Any] = _read_tables().FAULTS
    return faults


def read_settings() -> dict[str, Any]:
    """Return what some faults need besides their features."""
    settings: dict[str, Any] = _read_tables().SETTINGS
    return settings


@functools.cache
def _read_tables() -> Any:
    spec = importlib.util.spec_from_file_location("replanted", FAULTS_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["replanted"] = module
    spec.loader.exec_module(module)
    return module


def is_located(shows: str, kind: str, difference: dict[str, Any] | None) -> bool:
    """Whether an outcome is at the first place of the fault."""
    if shows == "crash":
        return kind in ("crashes", "refuses", "hangs")
    return difference is not None and difference["stage"] in _STAGES[shows]


def shown_faults(outcome: CombinationOutcome) -> tuple[str, str, str]:
    """Return the kind of an outcome, its first difference or error, and the difference besides."""
    return outcome.kind, outcome.says, outcome.besides["says"] if outcome.besides is not None else ""


def new_difference(before: CombinationOutcome, after: CombinationOutcome) -> tuple[str, dict[str, Any] | None]:
    """Return the difference that a fault adds to those of the release, and its text: the first, or the one besides."""
    is_first_old = after.kind == before.kind and after.says == before.says
    if is_first_old and after.besides is not None and after.besides != before.besides:
        return after.besides["says"], after.besides
    return after.says, after.difference


def measure(session: CombinationSession, name: str, fault: Any, combination: Combination) -> dict[str, Any]:
    """Return the row of a fault: what its combination shows without it and with it."""
    setting = f"{FAULTS_FILE}:{fault.given}"
    before = session.run_with_fault(combination, setting) if fault.given else session.run(combination)
    after = session.run_with_fault(combination, f"{FAULTS_FILE}:{name}")
    # Also if the installed release has another fault, whose figures the planted one changes.
    is_found = shown_faults(after) != shown_faults(before)
    says, difference = new_difference(before, after)
    return {
        "name": name,
        "package": fault.package,
        "pull": fault.pull,
        "fixed_in": fault.fixed_in,
        "title": fault.title,
        "features": combination.name,
        "given": read_settings()[fault.given].title if fault.given else "",
        "without": before.kind,
        "with": after.kind,
        "says": says,
        "found": is_found,
        "located": is_found and is_located(fault.shows, after.kind, difference),
        "alarm": not before.is_equal and match_known_finding(before, installed_stack()) is None,
    }


def _kept_rows(stack: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Return the rows of an earlier call on the same stack."""
    if not RESULT.exists():
        return []
    earlier = json.loads(RESULT.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = earlier["faults"] if earlier["stack"] == dict(stack) else []
    return rows


def main() -> int:
    """Run every fault, or some, and write the table."""
    parser = argparse.ArgumentParser(description="Measure recall and false alarms of study verify --features.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="prefixes of the names of faults")
    options = parser.parse_args()
    faults = {name: fault for name, fault in read_faults().items() if name.startswith(tuple(options.only))}
    rows = []
    with CombinationSession() as clean:
        for name, fault in faults.items():
            combination = make_combination(fault.features)
            if combination.conflict is not None:
                print(f"not run: {name}: {combination.conflict.reason}")
                continue
            row = measure(clean, name, fault, combination)
            rows.append(row)
            where = "located" if row["located"] else "-"
            print(f"{row['without']:8} {row['with']:8} {where:8} {name}: {row['says']}", flush=True)
    stack = installed_stack()
    every_row = {row["name"]: row for row in [*_kept_rows(stack), *rows]}
    ordered = [every_row[name] for name in read_faults() if name in every_row]
    document = {"stack": stack, "faults": ordered}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    count = sum(row["found"] for row in rows)
    alarms = sum(row["alarm"] for row in rows)
    print(
        f"{count} of {len(rows)} faults are found, {sum(row['located'] for row in rows)} located; {alarms} false alarms"
    )
    return int(count < len(rows) or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
