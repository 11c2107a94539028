"""docs/compositions.md and docs/restored_faults.md, from the stored matrices and the recall: `make releases`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from study.compositions.answers import (
    KnownFinding,
    Verdict,
    look_up_answer,
    match_known_finding,
    read_matrices,
    read_other_matrices,
)
from study.compositions.changes import combinations_to_repeat, find_changes
from study.compositions.features import (
    Combination,
    Report,
    make_combination,
    rarity,
    read_common_groups,
    read_reports,
    read_rows,
    read_rules,
)
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationOutcome
from study.config.places import REPOSITORY
from study.host.stacks import release_key
from study.records.shares import share_upper_bound
from study.releases.costs import CombinationCost, CostTable, changed_figures, select_table
from study.report.document import render_markdown

PAGE = REPOSITORY / "docs" / "compositions.md"
RESTORED_FAULTS_PAGE = REPOSITORY / "docs" / "restored_faults.md"
# Combinations of one explanation in the table of other releases.
_SHOWN = 3
# Characters of an engine's message in a table.
_LONGEST_MESSAGE = 160
_INSTEAD = "Instead"
RECALL = REPOSITORY / "reports" / "compositions" / "replanted.json"
CLEAN_RUNS = REPOSITORY / "reports" / "compositions" / "clean.json"
# Of tools/quick_design.py.
QUICK = REPOSITORY / "reports" / "compositions" / "quick.json"
# Packages whose newest releases the page judges.
_JUDGED = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate", "torch": "torch"}
# Pull requests of early 2025, by repository: earlier numbers among the restored faults are of 2024.
_FIRST_PULLS_OF_2025 = {"deepspeed": 6933, "accelerate": 3394, "torch": 147289}


@dataclasses.dataclass(frozen=True)
class ExplainedFindings:
    """One entry of known.yaml with its smallest combinations, that of the commonest features first."""

    entry: KnownFinding
    combinations: tuple[Combination, ...]

    @property
    def title(self) -> str:
        return self.entry.title

    @property
    def says(self) -> str:
        return self.entry.says + f" ({self.entry.address})" * bool(self.entry.address)

    @property
    def names(self) -> str:
        return ", ".join(f"`{combination.name}`" for combination in self.combinations)


def page(
    matrix: Matrix,
    recall: dict[str, Any],
    clean: dict[str, Any],
    quick: dict[str, Any],
    matrices: Sequence[Matrix] = (),
) -> str:
    """Return the page of the newest matrix, and of those with other releases of torch and Accelerate."""
    wrong = _explain_findings(matrix, "wrong")
    refused = _explain_findings(matrix, "refused")
    by_design = _explain_findings(matrix, "by_design")
    cpu = _explain_findings(matrix, "cpu")
    return render_markdown(
        "compositions.md.j2",
        stack=_stack_text(matrix.stack),
        runs=len(matrix.outcomes),
        minutes=round(matrix.seconds / 60),
        pairs=matrix.pairs,
        equal_pairs=matrix.pairs - len(matrix.open_pairs),
        open_pairs=len(matrix.open_pairs),
        triples=matrix.triples,
        equal_triples=matrix.triples - len(matrix.open_triples),
        open_triples=len(matrix.open_triples),
        equal_runs=sum(outcome.is_equal for outcome in matrix.outcomes.values()),
        findings=len(matrix.findings),
        engines=len(read_rows()["engine"].levels),
        features=sum(len(row.levels) for row in read_rows().values()),
        wrong_count=len(wrong),
        common_count=sum(_group_number(findings) == 0 for findings in wrong),
        wrong=list(_tables_by_group(wrong)),
        newest=_newest_releases_table([matrix, *matrices]),
        refused=_summary_table(refused),
        by_design=_summary_table(by_design),
        cpu=_summary_table(cpu).drop(columns=_INSTEAD),
        details=[
            {"title": "Silent faults", "entries": wrong},
            {"title": "Errors", "entries": refused},
            {"title": "Documented differences", "entries": by_design},
            {"title": "Limits of CPUs", "entries": cpu},
            {"title": "Other releases", "entries": _explain_other_findings(matrix, matrices)},
        ],
        rows=_feature_table(),
        exclusions=_exclusions_table(),
        reports=_reports_table(matrix),
        deepspeed=_deepspeed_table(matrix, [item for item in matrices if _has_other_deepspeed(matrix, item)]),
        others=_others_table(matrix, [item for item in matrices if not _has_other_deepspeed(matrix, item)]),
        **_recall_counts(recall),
        **_clean_counts(clean),
        **_minutes(matrix, recall, clean, matrices),
        quick=quick | {"found": _count_faults(quick, wrong), **_as_text(quick, "minutes", "load")},
    )


def _as_text(figures: Mapping[str, Any], *names: str) -> dict[str, str]:
    return {name: format(figures[name], "g") for name in names}


def _count_faults(quick: dict[str, Any], wrong: Iterable[ExplainedFindings]) -> int:
    """Return how many silent faults of the page the quick design has found."""
    return sum(findings.title in quick["wrong"] for findings in wrong)


def _newest_releases_table(matrices: Sequence[Matrix]) -> pd.DataFrame:
    """Return what is wrong in the newest release of each package, by the runs of that release."""
    return pd.DataFrame([_newest_release_row(package, matrices) for package in _JUDGED])


def _newest_release_row(package: str, matrices: Sequence[Matrix]) -> dict[str, Any]:
    # The first among equals: the newest matrix has the most runs.
    newest = max(matrices, key=lambda matrix: release_key(_release(matrix, package)))
    wrong, refused = (
        [findings for findings in _explain_findings(newest, verdict) if package in findings.entry.packages[:1]]
        for verdict in ("wrong", "refused")
    )
    return {
        "Newest release": f"{_JUDGED[package]} {_release(newest, package)}",
        "Combinations run": sum(package in combination.packages for combination in newest.outcomes),
        "Wrong without an error": len(wrong),
        "With": ", ".join(f"`{findings.combinations[0].name}`" for findings in wrong) or "\N{EN DASH}",
        "End with an error": len(refused),
    }


def _release(matrix: Matrix, package: str) -> str:
    return (matrix.stack[package] or "0").partition("+")[0]


def _minutes(
    matrix: Matrix, recall: dict[str, Any], clean: dict[str, Any], matrices: Iterable[Matrix]
) -> dict[str, Any]:
    """Return the wall time of all runs besides the matrix; a restored fault takes two runs."""
    seconds = {
        "other_minutes": sum(item.seconds for item in matrices),
        "clean_minutes": _seconds_in(matrix, clean["runs"]),
        "restored_minutes": 2 * _seconds_in(matrix, recall["faults"]),
    }
    hours = (matrix.seconds + sum(seconds.values())) / 3600
    return {name: round(value / 60) for name, value in seconds.items()} | {"all_hours": format(hours, ".1f")}


def _seconds_in(matrix: Matrix, rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the time of the combinations of rows, by their runs in the matrix, else by its mean run."""
    mean = matrix.seconds / len(matrix.outcomes)
    outcomes = (matrix.outcomes.get(make_combination(row["features"].split(","))) for row in rows)
    return sum(mean if outcome is None else outcome.seconds for outcome in outcomes)


def _stack_text(stack: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in stack.items() if version)


def _explain_findings(matrix: Matrix, verdict: Verdict) -> list[ExplainedFindings]:
    """Return the findings of one verdict by their explanation."""
    return _explain([matrix], lambda entry: entry.verdict == verdict)


def _explain_other_findings(newest: Matrix, matrices: Iterable[Matrix]) -> list[ExplainedFindings]:
    """Return the findings of other releases, by explanations that are of no finding of the newest."""
    newest_entries = {match_known_finding(finding, newest.stack) for finding in newest.findings.values()}
    return _explain(matrices, lambda entry: entry not in newest_entries)


def _explain(matrices: Iterable[Matrix], is_wanted: Callable[[KnownFinding], bool]) -> list[ExplainedFindings]:
    """Return findings by their explanation, those of the commonest features first."""
    combinations: dict[KnownFinding, set[Combination]] = {}
    for matrix in matrices:
        for finding in matrix.findings.values():
            entry = match_known_finding(finding, matrix.stack)
            if entry is not None and is_wanted(entry):
                combinations.setdefault(entry, set()).add(finding.combination)
    explained = [
        ExplainedFindings(entry, tuple(sorted(matching, key=_by_rarity))) for entry, matching in combinations.items()
    ]
    return sorted(explained, key=lambda findings: _by_rarity(findings.combinations[0]))


def _by_rarity(combination: Combination) -> tuple[tuple[int, int, int], list[int]]:
    """Return a key that puts the commonest combination first; among equals the one whose features are listed first."""
    listed = [level for row in read_rows().values() for level in row.levels]
    return rarity(combination), [listed.index(feature) for feature in combination.features]


def _group_number(findings: ExplainedFindings) -> int:
    """Return the place of the group of common features that a fault is in."""
    rarest_group, _, _ = rarity(findings.combinations[0])
    return rarest_group


def _tables_by_group(explained: Sequence[ExplainedFindings]) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(read_common_groups()):
        chosen = [findings for findings in explained if _group_number(findings) == number]
        if chosen:
            yield {"title": group.title, "table": _summary_table(chosen)}


def _summary_table(explained: Iterable[ExplainedFindings]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "What happens": findings.title,
                "With": f"`{findings.combinations[0].name}`",
                _INSTEAD: findings.entry.instead or "\N{EN DASH}",
            }
            for findings in explained
        ]
    )


def _has_other_deepspeed(newest: Matrix, matrix: Matrix) -> bool:
    return matrix.stack["deepspeed"] != newest.stack["deepspeed"]


def _deepspeed_table(newest: Matrix, matrices: Sequence[Matrix]) -> pd.DataFrame:
    """Return the silent faults and errors of DeepSpeed's releases, those of the newest release alone left out."""
    releases = [newest, *matrices]
    explained = _explain(releases, lambda entry: entry.verdict in ("wrong", "refused"))
    marks = {findings.title: [_shown_in(findings, matrix) for matrix in releases] for findings in explained}
    return pd.DataFrame(
        [
            {
                "What happens": findings.title,
                "With": f"`{findings.combinations[0].name}`",
                **{
                    str(matrix.stack["deepspeed"]): "yes" if is_shown else "\N{EN DASH}"
                    for matrix, is_shown in zip(releases, marks[findings.title], strict=True)
                },
            }
            for findings in explained
            if any(marks[findings.title][1:])
        ]
    )


def _shown_in(findings: ExplainedFindings, matrix: Matrix) -> bool:
    return any(match_known_finding(finding, matrix.stack) == findings.entry for finding in matrix.findings.values())


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
        entry = match_known_finding(finding, matrix.stack)
        by_title.setdefault(entry.title if entry is not None else finding.says, []).append(combination.name)
    for title, names in by_title.items():
        yield f"{_names_text(names)}: {title}"
    if mended:
        yield f"equal: {_names_text(mended)}"


def _names_text(names: Sequence[str]) -> str:
    examples = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return examples + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _reports_table(matrix: Matrix) -> pd.DataFrame:
    """Return the reports of others, each with the matrix's answer for its combination."""
    return pd.DataFrame(
        [
            {
                "Report": f"{report.says} ({report.address})",
                "With": f"`{report.combination.name}`",
                "Here": _outcome_of_report(report, matrix),
            }
            for report in read_reports()
        ]
    )


def _outcome_of_report(report: Report, matrix: Matrix) -> str:
    """Return the outcome of a report's combination in the matrix, with its reason."""
    because = f"; {report.because}" * bool(report.because)
    if report.more_than:
        return f"{_memory_outcome(*report.more_than)}{because}"
    if (rule := report.combination.conflict) is not None:
        return f"not run: {rule.reason}{because}"
    answer = look_up_answer(report.combination, matrix)
    is_of_run = answer.explanation.shown_by == report.combination
    return f"{_OUTCOMES[answer.kind]}{f': {answer.explanation.why}' * is_of_run}{because}"


def _memory_outcome(more: Combination, less: Combination) -> str:
    """Return in which releases a combination's step needs more memory than another's, with the figures of both."""
    table = select_table(more)
    arises: dict[bool, list[str]] = {}
    for release in table.names:
        costs = table.releases[release]
        arises.setdefault(_needs_more(costs[more.name], costs[less.name]), []).append(release)
    parts = [
        f"{'arises' if is_more else 'does not arise'} with {table.package} {', '.join(releases)}"
        f" ({_memory_text(table, releases[-1], more)}; {_memory_text(table, releases[-1], less)})"
        for is_more, releases in arises.items()
    ]
    return "; ".join(parts) + "; state and peak of a step in bytes a parameter, rank 0 of 2"


def _needs_more(more: CombinationCost, less: CombinationCost) -> bool:
    larger = {figure for figure in changed_figures(less, more) if more.figure(figure) > less.figure(figure)}
    return bool(larger & {"state", "peak"})


def _memory_text(table: CostTable, release: str, combination: Combination) -> str:
    cost = table.releases[release][combination.name]
    return f"`{combination.name}`: {cost.figure('state'):.1f} and {cost.figure('peak'):.1f}"


_OUTCOMES = {
    "right": "does not arise: equal",
    "pairs": "not run as a whole",
    "wrong": "arises",
    "error": "ends with an error",
    "by_design": "as documented",
    "untested": "not tested",
}


def _recall_counts(recall: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of restored faults, for both pages."""
    faults = recall["faults"]
    return {
        "faults": len(faults),
        "found": sum(row["found"] for row in faults),
        "located": sum(row["located"] for row in faults),
        "alarms": sum(row["alarm"] for row in faults),
        "recent": sum(row["pull"] >= _FIRST_PULLS_OF_2025[row["package"]] for row in faults),
    }


def _clean_counts(clean: dict[str, Any]) -> dict[str, Any]:
    """Return the false alarms of clean runs, for both pages."""
    runs = clean["runs"]
    different = [
        CombinationOutcome(make_combination(row["features"].split(",")), row["kind"], row["says"], row["line"], 0.0)
        for row in runs
        if row["kind"] != "equal"
    ]
    alarms = sum(match_known_finding(outcome, clean["stack"]) is None for outcome in different)
    faults = len(different) - alarms
    return {
        "clean_runs": len(runs) - faults,
        "clean_alarms": alarms,
        "clean_faults": faults,
        "clean_bound": format(share_upper_bound(alarms, len(runs) - faults), ".1%"),
        "clean_local": sum(row.get("local_gradients", False) for row in runs),
        "clean_nearest": format(max(row["share_of_limit"] for row in runs if row["kind"] == "equal"), ".0%"),
    }


def restored_faults_page(recall: dict[str, Any], clean: dict[str, Any]) -> str:
    """Return the page of restored faults."""
    return render_markdown(
        "restored_faults.md.j2",
        stack=_stack_text(recall["stack"]),
        table=_restored_faults_table(recall["faults"]),
        **_recall_counts(recall),
        **_clean_counts(clean),
    )


def _restored_faults_table(faults: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the faults, those that are not found first."""
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
                "Combination": f"`{row['features']}`" + f"; {row['given']}" * bool(row["given"]),
                "Outcome": row["with"] if row["found"] else "not found",
                "Message": _shortened(row["says"]) if row["found"] else "\N{EN DASH}",
            }
            for row in sorted(faults, key=lambda row: row["found"])
        ]
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."


def _feature_table() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"Row": row.name, "Levels, the default first": ", ".join(f"`{level}`" for level in row.levels)}
            for row in read_rows().values()
        ]
    )


def _exclusions_table() -> pd.DataFrame:
    """Return the features that no run combines, and the file of the engine with the line of the reason."""
    return pd.DataFrame(
        [
            {
                "Features": _level_names(rule.first),
                "With": _level_names(rule.second),
                "Unless": _level_names(rule.unless) or "\N{EN DASH}",
                "Why": rule.reason,
                "Line": f"{rule.line[0]}: `{rule.line[1]}`" if rule.line else "\N{EN DASH}",
            }
            for rule in read_rules()
        ]
    )


def _level_names(levels: Collection[str]) -> str:
    """Return features in the order of the rows."""
    return ", ".join(f"`{level}`" for row in read_rows().values() for level in row.levels if level in levels)


def main() -> None:
    """Write both pages."""
    recall = json.loads(RECALL.read_text(encoding="utf-8"))
    clean = json.loads(CLEAN_RUNS.read_text(encoding="utf-8"))
    RESTORED_FAULTS_PAGE.write_text(restored_faults_page(recall, clean), encoding="utf-8")
    quick = json.loads(QUICK.read_text(encoding="utf-8"))
    PAGE.write_text(page(next(read_matrices()), recall, clean, quick, list(read_other_matrices())), encoding="utf-8")


if __name__ == "__main__":
    main()
