"""docs/compositions.md, from the stored matrices and the recall; `make releases` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from study.compositions.answers import (
    KnownFinding,
    Verdict,
    match_known_finding,
    read_matrices,
    read_other_matrices,
)
from study.compositions.changes import combinations_to_repeat, find_changes
from study.compositions.features import read_rows
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationOutcome
from study.config.places import REPOSITORY
from study.report.document import render_markdown

PAGE = REPOSITORY / "docs" / "compositions.md"
# Smallest combinations of one fault in a table.
_SHOWN = 3
RECALL = REPOSITORY / "reports" / "compositions" / "replanted.json"


def page(matrix: Matrix, recall: dict[str, Any], matrices: Sequence[Matrix] = ()) -> str:
    """Return the page of the newest matrix, and of those with other releases of torch and Accelerate."""
    faults = recall["faults"]
    return render_markdown(
        "compositions.md.j2",
        stack=", ".join(f"{name} {version}" for name, version in matrix.stack.items() if version),
        runs=len(matrix.outcomes),
        minutes=round(matrix.seconds / 60),
        pairs=matrix.pairs,
        equal_runs=sum(outcome.is_equal for outcome in matrix.outcomes.values()),
        findings=len(matrix.findings),
        open_pairs=len(matrix.open_pairs),
        triples=matrix.triples,
        open_triples=len(matrix.open_triples),
        engines=len(read_rows()["engine"].levels),
        features=sum(len(row.levels) for row in read_rows().values()),
        wrong=_table(matrix, "wrong"),
        refused=_table(matrix, "refused"),
        by_design=_table(matrix, "by_design"),
        cpu=_table(matrix, "cpu"),
        wrong_count=len(_rows(matrix, "wrong")),
        faults=len(faults),
        found=sum(row["found"] for row in faults),
        located=sum(row["located"] for row in faults),
        alarms=sum(row["alarm"] for row in faults),
        recall=_recall_table(faults),
        rows=_feature_table(),
        others=_others_table(matrix, matrices),
    )


def _rows(matrix: Matrix, verdict: Verdict) -> dict[KnownFinding, list[CombinationOutcome]]:
    """Return the findings of one verdict by their explanation."""
    rows: dict[KnownFinding, list[CombinationOutcome]] = {}
    for finding in matrix.findings.values():
        entry = match_known_finding(finding)
        if entry is not None and entry.verdict == verdict:
            rows.setdefault(entry, []).append(finding)
    return rows


def _table(matrix: Matrix, verdict: Verdict) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "Features": _examples(findings),
                "What happens": entry.title,
                "Why": entry.says + f" ({entry.address})" * bool(entry.address),
                "Instead": entry.instead or "\N{EN DASH}",
            }
            for entry, findings in _rows(matrix, verdict).items()
        ]
    )


def _examples(findings: Sequence[CombinationOutcome]) -> str:
    """Return the smallest combinations, and how many there are."""
    ordered = sorted(findings, key=lambda finding: len(finding.combination.features))
    examples = "; ".join(f"`{finding.combination.name}`" for finding in ordered[:_SHOWN])
    return examples + f"; {len(ordered) - _SHOWN} more" * (len(ordered) > _SHOWN)


def _others_table(newest: Matrix, matrices: Sequence[Matrix]) -> pd.DataFrame:
    """Return what changes with another release of torch or Accelerate."""
    return pd.DataFrame(
        [
            {
                "Instead of": _stack_change(newest, matrix)[0],
                "Release": _stack_change(newest, matrix)[1],
                "Combinations": len(set(combinations_to_repeat(newest)) & matrix.outcomes.keys()),
                "Other outcome": sum(1 for _ in find_changes(newest, matrix)),
                "Which": "; ".join(_changes_text(newest, matrix)) or "\N{EN DASH}",
            }
            for matrix in matrices
        ]
    )


def _stack_change(newest: Matrix, matrix: Matrix) -> tuple[str, str]:
    """Return the package of another release, once as the newest matrix has it and once as this one has it."""
    name = next(name for name, version in matrix.stack.items() if version != newest.stack[name])
    return f"{name} {newest.stack[name]}", f"{name} {matrix.stack[name]}"


def _changes_text(newest: Matrix, matrix: Matrix) -> Iterator[str]:
    """Yield the smallest combinations by explanation, and the combinations that are equal now."""
    changes = list(find_changes(newest, matrix))
    mended = sorted(change.now.combination.name for change in changes if change.kind == "mended")
    findings = {change.shown_by.combination: change.shown_by for change in changes if change.shown_by is not None}
    by_title: dict[str, list[str]] = {}
    for combination, finding in findings.items():
        entry = match_known_finding(finding)
        by_title.setdefault(entry.title if entry is not None else finding.says, []).append(combination.name)
    for title, names in by_title.items():
        yield f"{_names_text(names)}: {title}"
    if mended:
        yield f"equal: {_names_text(mended)}"


def _names_text(names: Sequence[str]) -> str:
    examples = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return examples + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _recall_table(faults: Iterable[dict[str, Any]]) -> pd.DataFrame:
    repositories = {
        "deepspeed": "deepspeedai/DeepSpeed",
        "accelerate": "huggingface/accelerate",
        "torch": "pytorch/pytorch",
    }
    return pd.DataFrame(
        [
            {
                "Fault": row["title"],
                "Fixed by": f"https://github.com/{repositories[row['package']]}/pull/{row['pull']}",
                "Features": f"`{row['features']}`",
                "Outcome": f"{row['with']}: {row['says']}" if row["found"] else "not found",
            }
            for row in faults
        ]
    )


def _feature_table() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"Row": row.name, "Levels, the default first": ", ".join(f"`{level}`" for level in row.levels)}
            for row in read_rows().values()
        ]
    )


def main() -> None:
    """Write the page."""
    recall = json.loads(RECALL.read_text(encoding="utf-8"))
    PAGE.write_text(page(next(read_matrices()), recall, list(read_other_matrices())), encoding="utf-8")


if __name__ == "__main__":
    main()
