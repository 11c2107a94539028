"""Answers of the stored matrices for a combination, and the explanation of each finding."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Literal

import yaml

from study.compositions.covering import list_pairs
from study.compositions.features import Combination
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationOutcome

STACK_PACKAGES = ("deepspeed", "accelerate", "torch", "transformers", "peft")
_FOLDER = Path(__file__).parent
# Matrices of earlier calls of `study verify --pairs`, one for each stack.
RESULTS = _FOLDER / "results"
# Outcomes with other releases of torch or Accelerate, by `tools/other_releases.py`.
OTHER_RESULTS = RESULTS / "other"
_KNOWN = _FOLDER / "known.yaml"
# wrong: it silently trains something else. by_design: documented, or the purpose of the algorithm. cpu: only machines
# without a GPU show it. refused: it ends with an error.
Verdict = Literal["wrong", "by_design", "cpu", "refused"]


@dataclasses.dataclass(frozen=True)
class KnownFinding:
    """One entry of known.yaml: the explanation of findings."""

    title: str
    # Every one of these features, and one of each list of alternatives.
    features: tuple[frozenset[str], ...]
    kind: str
    verdict: Verdict
    says: str
    address: str = ""
    instead: str = ""
    # Part of the outcome's text, to distinguish findings with these features.
    words: str = ""
    # Sets of features with which it does not arise.
    unless: tuple[frozenset[str], ...] = ()
    # Settings of a file that it needs besides, as (key, value).
    setting: tuple[tuple[str, str], ...] = ()
    # The first releases that have it, and those that mend it, as (package, release).
    since: tuple[tuple[str, str], ...] = ()
    before: tuple[tuple[str, str], ...] = ()
    # The package with its lines, without `since` and `before`.
    package: str = ""
    # The same fault in study/releases/causes.yaml.
    cause: str = ""
    # Also the program decides it: the settings of a file do not show it.
    needs_program: bool = False

    def explains(self, outcome: CombinationOutcome) -> bool:
        levels = outcome.combination.levels
        return (
            outcome.kind in self.kind.split("|")
            and self.words in f"{outcome.says} {outcome.line}"
            and self.arises_with(levels)
        )

    def arises_with(self, levels: Set[str]) -> bool:
        """Whether these features have all that it takes, and none that lifts it."""
        return all(levels & alternatives for alternatives in self.features) and not self.is_lifted(levels)

    def is_in(self, stack: Mapping[str, str | None]) -> bool:
        """Whether the packages of a stack are of releases that have it."""
        from study.host.stacks import release_key

        has_begun = all(release_key(stack.get(name) or "0") >= release_key(release) for name, release in self.since)
        is_mended = any(release_key(stack.get(name) or "0") >= release_key(release) for name, release in self.before)
        return has_begun and not is_mended

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose releases decide whether it arises."""
        names = [self.package] if self.package else []
        return tuple(dict.fromkeys([*names, *dict(self.since), *dict(self.before)]))

    def is_lifted(self, levels: Set[str]) -> bool:
        """Whether these features keep it from arising."""
        return any(lifting <= levels for lifting in self.unless)


@functools.cache
def read_known_findings() -> tuple[KnownFinding, ...]:
    """Read known.yaml; tests/unit/test_compositions.py checks that every finding of a stored matrix is in it."""
    entries = yaml.safe_load(_KNOWN.read_text(encoding="utf-8"))["known"]
    return tuple(
        KnownFinding(
            **{
                **entry,
                "features": tuple(frozenset(name.split("|")) for name in entry["features"]),
                "unless": tuple(frozenset(names) for names in entry.get("unless", ())),
                "setting": tuple(entry.get("setting", {}).items()),
                "since": tuple(entry.get("since", {}).items()),
                "before": tuple(entry.get("before", {}).items()),
            }
        )
        for entry in entries
    )


def match_known_finding(outcome: CombinationOutcome, stack: Mapping[str, str | None]) -> KnownFinding | None:
    """Return the first entry of a stack's releases that explains an outcome."""
    return next((entry for entry in read_known_findings() if entry.is_in(stack) and entry.explains(outcome)), None)


@dataclasses.dataclass(frozen=True)
class Reason:
    """The reason for an answer, and the combination whose run shows it; None if it is not the finding of a run."""

    why: str
    shown_by: Combination | None = None

    def __str__(self) -> str:
        return self.why if self.shown_by is None else f"{self.shown_by.name}: {self.why}"


@dataclasses.dataclass(frozen=True)
class CombinationAnswer:
    """Answer for a combination on one stack."""

    kind: Literal["right", "wrong", "error", "by_design", "pairs", "untested"]
    explanation: Reason
    stack: dict[str, str | None]
    # What else is wrong with it, or ends it with an error.
    besides: tuple[Reason, ...] = ()

    @property
    def text(self) -> str:
        return str(self.explanation)


@functools.cache
def newest_tested_stack() -> dict[str, str | None]:
    """Return the releases of the newest stored matrix."""
    return read_releases(_files_of_results()[0])


@functools.cache
def read_releases(file: Path) -> dict[str, str | None]:
    """Return the releases of a stored matrix, whose runs take ten times as long to read."""
    stack: dict[str, str | None] = json.loads(file.read_text(encoding="utf-8"))["stack"]
    return stack


def stored_files() -> Iterator[Path]:
    """Yield the files of read_matrices, then those of read_other_matrices."""
    yield from _files_of_results()
    yield from _files_of_other_results()


def read_matrices() -> Iterator[Matrix]:
    """Yield the stored matrices, that of the newest DeepSpeed first."""
    yield from map(Matrix.read, _files_of_results())


def read_other_matrices() -> Iterator[Matrix]:
    """Yield the matrices of other releases of torch and Accelerate, each package's newest release first."""
    yield from map(Matrix.read, _files_of_other_results())


def _files_of_results() -> list[Path]:
    from study.host.stacks import release_key

    def release(file: Path) -> tuple[int, ...]:
        return release_key(read_releases(file)["deepspeed"] or "0")

    return sorted(RESULTS.glob("*.json"), key=release, reverse=True)


def _files_of_other_results() -> list[Path]:
    from study.host.stacks import release_key

    files = sorted(OTHER_RESULTS.glob("*.json"), key=lambda file: release_key(file.stem), reverse=True)
    return sorted(files, key=lambda file: file.stem.partition("-")[0], reverse=True)


@functools.cache
def stored_matrices() -> tuple[Matrix, ...]:
    """Return all matrices, that of the newest DeepSpeed first."""
    return (*read_matrices(), *read_other_matrices())


# The oldest and the newest release of each package whose runs show an entry.
Evidence = Mapping[KnownFinding, Mapping[str, tuple[str, str]]]


def collect_evidence(matrices: Iterable[Matrix]) -> Evidence:
    """Return the releases whose runs show each entry of known.yaml."""
    from study.host.stacks import release_key

    releases: dict[KnownFinding, dict[str, list[str]]] = {}
    for matrix in matrices:
        for finding in matrix.findings.values():
            if (entry := match_known_finding(finding, matrix.stack)) is not None:
                for package in entry.packages:
                    release = (matrix.stack[package] or "0").partition("+")[0]
                    releases.setdefault(entry, {}).setdefault(package, []).append(release)
    return {
        entry: {name: (min(runs, key=release_key), max(runs, key=release_key)) for name, runs in by_package.items()}
        for entry, by_package in releases.items()
    }


@functools.cache
def stored_evidence() -> Evidence:
    """Return the releases whose stored runs show each entry."""
    return collect_evidence(stored_matrices())


def is_known_in(entry: KnownFinding, stack: Mapping[str, str | None], evidence: Evidence) -> bool:
    """Whether the source, or runs of older and newer releases, show that the releases of a stack have an entry."""
    from study.host.stacks import release_key

    if not entry.is_in(stack) or not entry.packages:
        return False
    for package in entry.packages:
        release = release_key((stack.get(package) or "0").partition("+")[0])
        oldest, newest = evidence[entry][package] if entry in evidence else (None, None)
        if package not in dict(entry.since) and (oldest is None or release < release_key(oldest)):
            return False
        if package not in dict(entry.before) and (newest is None or release > release_key(newest)):
            return False
    return True


def faults_by_source(
    combination: Combination, stack: Mapping[str, str | None], evidence: Evidence
) -> list[KnownFinding]:
    """Return the entries that a combination has with releases that were not run, errors first.

    Of errors in every release the features are not enough: the message decides.
    """
    faults = [
        entry
        for entry in read_known_findings()
        if (entry.verdict == "wrong" or (entry.verdict == "refused" and (entry.since or entry.before)))
        and entry.arises_with(combination.levels)
        and is_known_in(entry, stack, evidence)
    ]
    return sorted(faults, key=lambda entry: entry.verdict != "refused")


def has_same_releases(
    stack: Mapping[str, str | None], tested: Mapping[str, str | None], packages: Iterable[str]
) -> bool:
    """Whether two stacks have the same releases of packages; a local label, such as +cpu, makes no difference."""
    return all((stack[name] or "0").partition("+")[0] == (tested[name] or "0").partition("+")[0] for name in packages)


def known_span(entry: KnownFinding, evidence: Evidence) -> str:
    """Return the releases that are known to have an entry, such as "deepspeed 0.18.3 to before 0.19.2"."""
    parts = []
    for package in entry.packages:
        oldest, newest = evidence[entry][package] if entry in evidence else ("", "")
        since, before = dict(entry.since).get(package, oldest), dict(entry.before).get(package, "")
        parts.append(f"{package} {since} to {f'before {before}' if before else newest}")
    return ", ".join(parts)


_PRECEDENCE = ("error", "wrong", "untested", "by_design")


def _is_lifted(finding: CombinationOutcome, combination: Combination, stack: Mapping[str, str | None]) -> bool:
    """Whether a larger combination has a feature with which a finding does not arise."""
    entry = match_known_finding(finding, stack)
    return entry is not None and entry.is_lifted(combination.levels)


def look_up_answer(combination: Combination, matrix: Matrix) -> CombinationAnswer:
    """Return the answer of a matrix for a combination."""
    features = set(combination.features)
    answers: dict[str, CombinationAnswer] = {}
    # The exact finding first, then one for each explanation.
    findings = sorted(matrix.findings.values(), key=lambda finding: finding.combination != combination)
    for finding in findings:
        is_part = features.issuperset(finding.combination.features)
        if finding.combination == combination or (is_part and not _is_lifted(finding, combination, matrix.stack)):
            entry = match_known_finding(finding, matrix.stack)
            answers.setdefault(entry.title if entry is not None else finding.says, _finding_answer(finding, matrix))
    for fault in _find_faults(combination, matrix):
        answers.setdefault(fault.title, CombinationAnswer("wrong", explain_fault(fault), matrix.stack))
    if answers:
        return _join_answers(list(answers.values()), is_exact=combination in matrix.findings)
    equal_runs = [outcome.combination for outcome in matrix.outcomes.values() if outcome.is_equal]
    if combination in equal_runs:
        text = "equal, to rounding, to one process of plain PyTorch"
        return CombinationAnswer("right", Reason(text), matrix.stack)
    larger_runs = [run for run in equal_runs if features.issubset(run.features)]
    if larger_runs:
        example = min(larger_runs, key=lambda run: len(run.features))
        count = f"{len(larger_runs)} runs" if len(larger_runs) > 1 else "a run"
        text = f"equal in {count} with these features, such as {example.name}"
        return CombinationAnswer("right", Reason(text), matrix.stack)
    feature_pairs = {pair for pair in list_pairs(combination) if pair <= features}
    missing_pairs = [pair for pair in feature_pairs if not any(pair <= run.levels for run in equal_runs)]
    if feature_pairs and not missing_pairs:
        text = "each pair of these features is in an equal run; no run has them all"
        return CombinationAnswer("pairs", Reason(text), matrix.stack)
    missing = sorted("+".join(sorted(pair)) for pair in missing_pairs)
    text = f"no equal run has {', '.join(missing[:4]) or combination.name}"
    return CombinationAnswer("untested", Reason(text), matrix.stack)


def _join_answers(answers: list[CombinationAnswer], *, is_exact: bool) -> CombinationAnswer:
    """Return the first answer, which names the others.

    Errors precede faults, and faults precede documented differences; an answer of exactly this combination is first.
    """
    first = answers[0] if is_exact else min(answers, key=lambda answer: _PRECEDENCE.index(answer.kind))
    faults = [answer for answer in answers if answer is not first and answer.kind in ("error", "wrong")]
    return dataclasses.replace(first, besides=tuple(answer.explanation for answer in faults))


def _find_faults(combination: Combination, matrix: Matrix) -> Iterator[KnownFinding]:
    """Yield the faults of the matrix that arise with a combination.

    An equal run with all of its features may have one more that lifts the fault. Entries that need a setting of a file
    are left to the findings.
    """
    for entry in read_known_findings():
        # The findings last, which are many.
        arises = entry.verdict == "wrong" and not entry.setting and entry.arises_with(combination.levels)
        if arises and entry.is_in(matrix.stack) and any(map(entry.explains, matrix.findings.values())):
            yield entry


def explain_fault(fault: KnownFinding) -> Reason:
    """Return a known fault with its workaround, for releases of which no run shows it."""
    return Reason(_with_instead(fault.title, fault))


def _with_instead(text: str, entry: KnownFinding | None) -> str:
    """Return a text with the workaround of an entry."""
    return f"{text}; {entry.instead}" if entry is not None and entry.instead else text


def _finding_answer(finding: CombinationOutcome, matrix: Matrix) -> CombinationAnswer:
    entry = match_known_finding(finding, matrix.stack)
    if entry is not None and entry.verdict == "cpu":
        text = f"{finding.combination.name} needs a GPU, and only CPUs were there ({entry.title})"
        return CombinationAnswer("untested", Reason(text), matrix.stack)
    kind: Literal["wrong", "error", "by_design"] = "error"
    if finding.kind == "differs":
        kind = "by_design" if entry is not None and entry.verdict == "by_design" else "wrong"
    title = entry.title if entry is not None else finding.says
    return CombinationAnswer(kind, Reason(_with_instead(title, entry), finding.combination), matrix.stack)


def fault_under_accelerate(combination: Combination, matrix: Matrix) -> CombinationAnswer | None:
    """Return the fault of a combination in Accelerate's loop, if its own loop has none."""
    under_accelerate = combination.replaced("loop", "accelerate")
    if combination.has("accelerate") or under_accelerate.conflict is not None:
        return None
    if look_up_answer(combination, matrix).kind in ("wrong", "error"):
        return None
    answer = look_up_answer(under_accelerate, matrix)
    return answer if answer.kind in ("wrong", "error") else None


def other_loop_line(combination: Combination, fault: CombinationAnswer) -> str:
    """Return a line for people who train with Accelerate."""
    outcome = "wrong" if fault.kind == "wrong" else "an error"
    command = f"study verify --features {combination.replaced('loop', 'accelerate').name}"
    return f"this is the engine's own loop; with Accelerate: {outcome}: {fault.text}; test: {command}"
