"""The stored answer for a combination of features on a stack: one for `study releases`, `explain` and the receipt."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from study.compositions.answers import (
    Evidence,
    KnownFinding,
    Reason,
    explain_fault,
    fault_under_accelerate,
    faults_by_source,
    is_known_in,
    known_span,
    look_up_answer,
    newest_tested_stack,
    other_loop_line,
    read_known_findings,
    stored_evidence,
    stored_matrices,
)
from study.compositions.features import Combination, Report, read_reports
from study.compositions.matrix import Matrix
from study.config.strategies import STRATEGY_NAMES
from study.host.stacks import package_version, release_key
from study.releases.causes import GRID, Cause, read_causes
from study.releases.judged_stack import FAULTY, UNTESTED, JudgedStack, find_untested, has_releases

# Exit status and words of each kind of answer.
_STATUS = {"right": 0, "by_design": 0, "wrong": FAULTY, "error": FAULTY, "pairs": UNTESTED, "untested": UNTESTED}
_WORDS = {
    "right": "right",
    "by_design": "differs as documented",
    "wrong": "wrong",
    "error": "ends with an error",
    "pairs": "not tested as a whole",
    "untested": "not tested",
}
# Features of the trainings of the grid of releases, besides the stage; all of them clip.
_IN_GRID = {"accelerate", "accumulation", "clipping", "bf16", "cpu_adam", "optimizer_cpu", "all_cpu"}
_HOW = "tested on two to four CPU ranks, in three steps of a tiny model"


AnswerKind = Literal["right", "wrong", "error", "by_design", "pairs", "untested"]
AnswerSource = Literal["runs", "causes", "source", "grid", "none"]
# Kind, explanation, besides and notes.
_Parts = tuple[AnswerKind, Reason, tuple[Reason, ...], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class FeatureAnswer:
    """Answer for a combination with releases of its packages."""

    combination: Combination
    # Of the packages that the combination runs in.
    releases: dict[str, str | None]
    kind: AnswerKind
    # Why; empty if nothing is known.
    explanation: Reason
    # What else is wrong with it, or ends it with an error.
    besides: tuple[Reason, ...]
    # The origin of the answer, and faults of other releases.
    notes: tuple[str, ...]
    # Stored runs of these releases, the causes of `study releases`, DeepSpeed's source with runs of other releases, or
    # the grid of releases.
    source: AnswerSource

    @property
    def status(self) -> int:
        return _STATUS[self.kind]

    @property
    def is_open(self) -> bool:
        """Whether the command of `test` would show more."""
        return self.source in ("source", "none") or self.status == UNTESTED

    @property
    def faults(self) -> tuple[str, ...]:
        """Its faults, without the combinations that show them."""
        if self.status != FAULTY:
            return ()
        return tuple(explanation.why for explanation in (self.explanation, *self.besides))

    @property
    def text(self) -> str:
        return str(self.explanation)

    @property
    def says(self) -> str:
        """The answer without its combination, such as "wrong: the norm is the mean of the ranks' norms"."""
        return f"{_WORDS[self.kind]}: {self.text}" if self.text else _WORDS[self.kind]

    @property
    def test(self) -> str:
        """The command that tests it in a minute."""
        return f"study verify --features {self.combination.name}"

    @property
    def lines(self) -> list[str]:
        releases = ", ".join(f"{name} {release}" for name, release in self.releases.items())
        command = f"; run: {self.test}" * (self.source == "none")
        first = f"{self.combination.name} with {releases}: {self.says}{command}"
        return [first, *(f"besides: {text}" for text in self.besides), *self.notes]

    @property
    def document(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        return {
            "features": list(self.combination.features),
            "releases": self.releases,
            "answer": self.kind,
            "why": self.text,
            "besides": list(map(str, self.besides)),
            "by": self.source,
            "test": self.test if self.is_open else None,
        }


def fill_releases(requested: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the releases that are requested, else the installed ones, else those of the newest stored matrix."""
    newest = newest_tested_stack()
    return {name: release or package_version(name) or newest[name] for name, release in requested.items()}


def find_answer(combination: Combination, versions: Mapping[str, str | None]) -> FeatureAnswer:
    """Return the answer for a combination with these releases of deepspeed, accelerate and torch.

    Without transformers among them its installed release counts.
    """
    transformers = versions.get("transformers") or package_version("transformers")
    all_versions = {**versions, "transformers": transformers or newest_tested_stack()["transformers"]}
    return _find_answer(combination, tuple(all_versions.items()))


@functools.lru_cache(maxsize=1024)
def _find_answer(combination: Combination, releases: tuple[tuple[str, str | None], ...]) -> FeatureAnswer:
    versions = dict(releases)
    used = {name: versions[name] for name in combination.packages}

    def answer(
        kind: AnswerKind,
        explanation: Reason,
        besides: tuple[Reason, ...],
        notes: tuple[str, ...],
        source: AnswerSource,
    ) -> FeatureAnswer:
        return FeatureAnswer(combination, used, kind, explanation, besides, notes, source)

    if causes := _known_causes(combination, versions):
        return answer(*_by_causes(causes, faults_by_source(combination, versions, stored_evidence())), "causes")
    tested = next((matrix for matrix in stored_matrices() if has_releases(matrix, used)), None)
    tested_answer = look_up_answer(combination, tested) if tested is not None else None
    if tested_answer is None or tested_answer.kind == "untested":
        evidence = stored_evidence()
        if faults := faults_by_source(combination, versions, evidence):
            return answer(*_by_source(combination, faults, evidence), "source")
        if reports := [report for report in read_reports() if report.is_in(combination, versions)]:
            return answer(*_by_reports(reports), "source")
    if (tested_answer is None or _STATUS[tested_answer.kind] == UNTESTED) and _is_in_grid(combination, versions):
        note = "by the grid of `study releases`: two CPU ranks, with clipping"
        return answer("right", Reason(""), (), (note,), "grid")
    if tested is None or tested_answer is None:
        unread = _lines_of_unread(combination, versions, stored_evidence())
        notes = (_nearest_answer(combination, versions, stored_matrices()), *unread, _HOW)
        return answer("untested", Reason(""), (), notes, "none")
    notes = tuple(_with_accelerate(combination, tested)) if tested_answer.kind not in ("wrong", "error") else ()
    command = (f"run: study verify --features {combination.name}",) * (_STATUS[tested_answer.kind] == UNTESTED)
    all_notes = (*notes, *command, _HOW)
    return answer(tested_answer.kind, tested_answer.explanation, tested_answer.besides, all_notes, "runs")


def _by_causes(causes: Sequence[Cause], faults: Sequence[KnownFinding]) -> _Parts:
    """Return the parts of an answer by the causes of `study releases`, with other faults of the releases."""
    described = "; ".join(f"{cause.title}{_fixed_in(cause)}" for cause in causes)
    names = {cause.id for cause in causes}
    besides = tuple(explain_fault(fault) for fault in faults if fault.cause not in names)
    kind: AnswerKind = "error" if all(cause.ends_training for cause in causes) else "wrong"
    return kind, Reason(described), besides, ("by the causes of `study releases`, which has their sources",)


def _by_source(combination: Combination, faults: Sequence[KnownFinding], evidence: Evidence) -> _Parts:
    """Return the parts of an answer for releases that were not run, and which releases have each fault."""
    first, *further = faults
    notes = []
    for fault in faults:
        by = "by the source" if fault.since or fault.before else "by runs of other releases"
        title = f": {fault.title}" * bool(further)
        notes.append(f"{by}, in {known_span(fault, evidence)}{f' ({fault.address})' * bool(fault.address)}{title}")
    notes.append(f"these releases were not run; run: study verify --features {combination.name}")
    kind: AnswerKind = "error" if first.verdict == "refused" else "wrong"
    return kind, explain_fault(first), tuple(map(explain_fault, further)), tuple(notes)


def _by_reports(reports: Sequence[Report]) -> _Parts:
    """Return the parts of an answer for releases that were not run, by reports of others and the source."""
    mended = ", ".join(f"{package} {release}" for report in reports for package, release in report.before)
    notes = tuple(f"reported, and in the source: {report.address}" for report in reports)
    return "wrong", Reason(f"{'; '.join(report.says for report in reports)}; mended in {mended}"), (), notes


def _lines_of_unread(combination: Combination, versions: Mapping[str, str | None], evidence: Evidence) -> Iterator[str]:
    """Yield the faults of other releases, where nothing shows whether the requested ones have them."""
    for entry in read_known_findings():
        if (
            entry.verdict == "wrong"
            and entry in evidence
            and entry.arises_with(combination.levels)
            and entry.is_in(versions)
            and not is_known_in(entry, versions, evidence)
        ):
            yield f"known of {known_span(entry, evidence)}, not known of these releases: {entry.title}"


def _nearest_answer(combination: Combination, versions: Mapping[str, str | None], matrices: Sequence[Matrix]) -> str:
    """Return the answer of the oldest tested releases that are not older than the request's; else of the newest."""
    names = combination.packages
    requested = _release_keys(versions, names)
    newer = [matrix for matrix in matrices if all(map(operator.ge, _release_keys(matrix.stack, names), requested))]
    newer.sort(key=lambda matrix: _release_keys(matrix.stack, names))
    # Not each of them has run every engine.
    for matrix in [*newer, matrices[0]]:
        answer = look_up_answer(combination, matrix)
        if answer.kind != "untested":
            break
    stack = ", ".join(f"{name} {matrix.stack[name]}" for name in names)
    return f"with {stack}: {_WORDS[answer.kind]}: {answer.text}"


def _release_keys(stack: Mapping[str, str | None], names: Iterable[str]) -> list[tuple[int, ...]]:
    return [release_key((stack[name] or "0").partition("+")[0]) for name in names]


def _with_accelerate(combination: Combination, matrix: Matrix) -> Iterator[str]:
    """Yield the faults under Accelerate's loop, if the combination has another one, which is right."""
    fault = fault_under_accelerate(combination, matrix)
    if fault is not None:
        yield other_loop_line(combination, fault)
        yield from (f"besides: {text}" for text in fault.besides)


def _known_causes(combination: Combination, versions: Mapping[str, str | None]) -> list[Cause]:
    """Return the causes of wrong gradients that these releases have in the combination, on GPUs."""
    optimizer = "muon" if combination.has("muon") else "adamw"
    precision = _precision(combination)
    return [
        cause
        for cause in read_causes()
        if cause.optimizer == optimizer
        and cause.gpu != "hidden"
        and cause.is_in(versions)
        and cause.shows_in(_strategy(combination), combination.micro_steps, precision)
        # A fault of Accelerate's loop.
        and ("accelerate" not in cause.releases or combination.has("accelerate"))
    ]


def _is_in_grid(combination: Combination, versions: Mapping[str, str | None]) -> bool:
    """Whether the grid of releases trained the combination with these packages."""
    strategy, features = _strategy(combination), combination.features[1:]
    if strategy not in STRATEGY_NAMES or not _IN_GRID.issuperset(features):
        return False
    # Accelerate makes DeepSpeedCPUAdam of AdamW; in the engine's own loop the program does.
    if combination.has("optimizer_cpu", "all_cpu") and combination.has("cpu_adam") == combination.has("accelerate"):
        return False
    # The grid trains in Accelerate's loop, which has a fault that the engine's own has not.
    if _known_causes(combination.replaced("loop", "accelerate"), versions):
        return False
    packages = {name: version or "0" for name, version in versions.items()}
    stack = JudgedStack(**packages, precision=_precision(combination), strategy=strategy)
    return find_untested(json.loads(GRID.read_text(encoding="utf-8")), stack) is None


def _precision(combination: Combination) -> str:
    return "bf16-engine" if combination.has("bf16", "fp32_accumulation") else "fp32"


def _strategy(combination: Combination) -> str:
    """Return the studied strategy of an engine with its offload."""
    engine = combination.level("engine")
    if combination.has("optimizer_cpu"):
        return "zero3_cpu_optimizer" if engine == "zero3" else f"{engine}_cpu"
    return f"{engine}_cpu" if combination.has("all_cpu") else engine


def _fixed_in(cause: Cause) -> str:
    return f" (fixed in {cause.left.release})" * bool(cause.left.release)
