"""Outcomes of the combinations of a stored matrix on another stack."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from study.compositions.answers import match_known_finding
from study.compositions.covering import Pair, list_pairs, list_triples
from study.compositions.features import Combination, rarity
from study.compositions.matrix import Matrix, needs_other_hardware
from study.compositions.session import CombinationOutcome, CombinationSession

# Features of a run that names a change by itself.
_SMALL: Final = 2
# The group of features that divide layers or sequences over ranks; those after it are rare.
_DIVIDED: Final = 2
# Heading of each kind of change in the report, the worst first.
_HEADINGS = {
    "broken": "Equal before, and not now",
    "other": "Not equal before, and in another way now",
    "mended": "Equal now",
}


@dataclasses.dataclass(frozen=True)
class OutcomeChange:
    """A combination whose outcome differs between two stacks."""

    before: CombinationOutcome
    now: CombinationOutcome
    # The smallest combination that is known to show `now`; None if that is equal.
    shown_by: CombinationOutcome | None = None

    @property
    def kind(self) -> Literal["broken", "other", "mended"]:
        if self.now.is_equal:
            return "mended"
        return "broken" if self.before.is_equal else "other"


def combinations_to_repeat(stored: Matrix) -> list[Combination]:
    """Return the equal runs of a matrix, which cover its pairs, and its findings, without those that need a GPU.

    The smallest are first: they name a change best, if the time is over before the others.
    """
    equal = [combination for combination, outcome in stored.outcomes.items() if outcome.is_equal]
    findings = [
        combination for combination, outcome in stored.findings.items() if not _needs_a_gpu(outcome, stored.stack)
    ]
    return sorted([*equal, *findings], key=lambda combination: len(combination.features))


def equal_runs_with(stored: Matrix, levels: Collection[str]) -> list[Combination]:
    """Return the equal runs that have one of these features, the smallest first."""
    return [
        combination
        for combination in combinations_to_repeat(stored)
        if stored.outcomes[combination].is_equal and combination.has(*levels)
    ]


def combinations_over_releases(stored: Matrix) -> list[Combination]:
    """Return the combinations to repeat under other releases of DeepSpeed, the smallest first.

    These are small equal runs, equal runs that cover the pairs of all but rare features and the triples of common ones,
    and the faults.
    """
    equal = [
        combination
        for combination, outcome in stored.outcomes.items()
        if outcome.is_equal and combination.uses_deepspeed
    ]
    common = [combination for combination in equal if rarity(combination)[0] == 0]
    not_rare = [combination for combination in equal if rarity(combination)[0] <= _DIVIDED]
    chosen = {combination for combination in equal if len(combination.features) <= _SMALL}
    chosen.update(_covering(not_rare, list_pairs), _covering(common, list_triples))
    for combination, outcome in stored.findings.items():
        entry = match_known_finding(outcome, stored.stack)
        if combination.uses_deepspeed and entry is not None and entry.verdict == "wrong":
            chosen.add(combination)
    return sorted(chosen, key=lambda combination: (len(combination.features), combination.name))


def _covering(
    combinations: Sequence[Combination], list_groups: Callable[[Combination], set[Pair]]
) -> list[Combination]:
    """Return few of the combinations that have all groups of levels of all of them."""
    groups = {combination: list_groups(combination) for combination in combinations}
    uncovered = set().union(*groups.values())
    chosen = []
    while uncovered:
        best = max(combinations, key=lambda run: (len(groups[run] & uncovered), -len(run.features), run.name))
        chosen.append(best)
        uncovered -= groups[best]
    return chosen


def _needs_a_gpu(outcome: CombinationOutcome, stack: Mapping[str, str | None]) -> bool:
    entry = match_known_finding(outcome, stack)
    return entry is not None and entry.verdict == "cpu"


def repeat(
    stored: Matrix,
    matrix: Matrix,
    session: CombinationSession,
    *,
    minutes: float,
    report: Callable[[str], None],
    file: Path | None = None,
    combinations: Sequence[Combination] | None = None,
) -> bool:
    """Run a stored matrix's combinations, or some of them, on another stack; return whether all were run in that time.

    What `matrix` has already is not run again. Of a combination that was equal and no longer is, the smallest one that
    shows it becomes a finding, unless an earlier finding's features explain it. A finding of `stored` that is not equal
    stays one.
    """
    deadline = time.monotonic() + 60 * minutes
    for outcome in matrix.outcomes.values():
        session.remember(outcome)

    def keep(outcome: CombinationOutcome) -> None:
        matrix.outcomes[outcome.combination] = outcome
        if file is not None:
            matrix.write(file)

    if combinations is None:
        combinations = combinations_to_repeat(stored)
    for number, combination in enumerate(combinations, start=1):
        # Every call makes some progress.
        if time.monotonic() > deadline and number > 1:
            return False
        outcome = session.run(combination)
        keep(outcome)
        before = stored.outcomes.get(combination) or stored.findings[combination]
        changed = not _is_same(before, outcome)
        report(f"[{number}/{len(combinations)}] {combination.name}: {outcome.kind}{', a change' * changed}")
        if not outcome.is_equal and combination in stored.findings:
            # It was a smallest one, and is not searched again.
            matrix.findings[combination] = outcome
        elif changed and not outcome.is_equal and _explanation(matrix, outcome) is None:
            finding = session.reduce(outcome, keep)
            matrix.findings[finding.combination] = finding
            keep(finding)
    if file is not None:
        # With the last finding, too.
        matrix.write(file)
    return True


def find_changes(stored: Matrix, matrix: Matrix) -> Iterator[OutcomeChange]:
    """Yield the combinations of both whose outcomes differ."""
    for combination in combinations_to_repeat(stored):
        now = matrix.outcomes.get(combination)
        before = stored.outcomes.get(combination) or stored.findings[combination]
        if now is not None and not _is_same(before, now):
            yield OutcomeChange(before, now, None if now.is_equal else _explanation(matrix, now))


def _is_same(before: CombinationOutcome, now: CombinationOutcome) -> bool:
    """Whether two stacks answer alike: lines of an engine move from release to release, stages do not."""
    if before.kind != now.kind:
        # The stored runs had a CPU with fp16.
        return before.is_equal and needs_other_hardware(now)
    if before.difference is None or now.difference is None:
        return True
    return bool(before.difference["stage"] == now.difference["stage"])


def _explanation(matrix: Matrix, outcome: CombinationOutcome) -> CombinationOutcome | None:
    """Return the first finding whose features a combination has, and that shows the same kind of outcome."""
    features = set(outcome.combination.features)
    for finding in matrix.findings.values():
        if finding.kind == outcome.kind and features.issuperset(finding.combination.features):
            return finding
    return None


def changes_page(stored: Matrix, matrix: Matrix, *, missing: int) -> str:
    """Return the differences between two stacks in Markdown; `missing` combinations were not run in time."""
    changes = list(find_changes(stored, matrix))
    repeated = [combination for combination in combinations_to_repeat(stored) if combination in matrix.outcomes]
    counts = {kind: sum(change.kind == kind for change in changes) for kind in _HEADINGS}
    lines = [
        f"**{len(repeated)} combinations: {counts['broken']} equal before and not now, {counts['mended']} equal now,"
        f" {counts['other']} not equal in another way.**",
        "",
        "| | before | now |",
        "| --- | --- | --- |",
        *(f"| {name} | {stored.stack.get(name)} | {version} |" for name, version in matrix.stack.items()),
    ]
    if missing:
        lines += ["", f"{missing} combinations were not run: the time was over."]
    for kind, heading in _HEADINGS.items():
        chosen = [change for change in changes if change.kind == kind]
        if chosen:
            lines += ["", f"## {heading}", "", "| combination | before | now | smallest |", "| --- | --- | --- | --- |"]
            lines += [_row(change) for change in chosen]
    return "\n".join(lines) + "\n"


def _row(change: OutcomeChange) -> str:
    smallest = f"`{change.shown_by.combination.name}`" if change.shown_by is not None else "-"
    return f"| `{change.now.combination.name}` | {_cell(change.before)} | {_cell(change.now)} | {smallest} |"


def _cell(outcome: CombinationOutcome) -> str:
    if outcome.is_equal:
        return "equal"
    text = f"{outcome.kind}: {outcome.says}" + f" ({outcome.line})" * bool(outcome.line)
    # An engine's message may have any character.
    text = " ".join(text.split()).replace("`", "'").replace("|", "/").replace("<", "&lt;")
    return text if len(text) <= 200 else f"{text[:197]}..."
