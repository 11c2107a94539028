"""`study releases --features A,B`: the stored answer for a combination of features on a stack."""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from study.compositions.answers import (
    Evidence,
    KnownFinding,
    collect_evidence,
    fault_under_accelerate,
    faults_by_source,
    is_known_in,
    known_span,
    look_up_answer,
    other_loop_line,
    read_known_findings,
    read_matrices,
    read_other_matrices,
    with_instead,
)
from study.compositions.command import feature_table
from study.compositions.features import Combination, read_rows
from study.compositions.matrix import Matrix
from study.config.errors import UserError
from study.config.printing import print_result
from study.config.strategies import STRATEGY_NAMES
from study.host.stacks import package_version, release_key
from study.releases.causes import GRID, Cause, read_causes
from study.releases.judge import FAULTY, UNTESTED, JudgedStack, find_untested, has_releases

# Packages that decide whether a stack was tested.
_PACKAGES = ("deepspeed", "accelerate", "torch")
# Exit status and words of each kind of answer.
Kind = Literal["right", "by_design", "wrong", "error", "pairs", "untested"]
_STATUS: dict[Kind, int] = {
    "right": 0,
    "by_design": 0,
    "wrong": FAULTY,
    "error": FAULTY,
    "pairs": UNTESTED,
    "untested": UNTESTED,
}
_WORDS: dict[Kind, str] = {
    "right": "right",
    "by_design": "differs as documented",
    "wrong": "wrong",
    "error": "ends with an error",
    "pairs": "not tested as a whole",
    "untested": "not tested",
}
# Features of the trainings of the grid of releases, besides the stage; all of them clip.
_IN_GRID = {"accelerate", "accumulation", "clipping", "bf16", "cpu_adam", "optimizer_cpu", "all_cpu"}
# How an answer is known.
_HOW = "tested on two to four CPU ranks, in three steps of a tiny model"
_BY_THE_GRID = "by the grid of `study releases`: two CPU ranks, with clipping"
_BY_CAUSES = "by the causes of `study releases`, which has their sources"


def judge_features(options: argparse.Namespace) -> int:
    """Print the answer of the stored matrices for a combination, and return the exit status."""
    if options.features is None:
        rows = {name: dict(row.levels) for name, row in read_rows().items()}
        print_result(options.json, lambda: rows, [feature_table()])
        return 0
    answer = answer_features(options)
    print_result(options.json, answer.document, answer.page())
    return answer.status


@dataclasses.dataclass(frozen=True)
class _Question:
    """A combination on a stack."""

    combination: Combination
    # Releases of all packages, whether the combination uses them or not.
    versions: dict[str, str | None]

    @property
    def used(self) -> dict[str, str | None]:
        """The releases that decide: those of the packages that the combination runs in."""
        return {name: self.versions[name] for name in self.combination.packages}

    @property
    def text(self) -> str:
        return f"{self.combination.name} with {', '.join(f'{name} {version}' for name, version in self.used.items())}"

    @property
    def command(self) -> str:
        """The command that tests it."""
        return f"study verify --features {self.combination.name}"


@dataclasses.dataclass(frozen=True)
class FeaturesAnswer:
    """Answer for a combination on a stack."""

    question: _Question
    kind: Kind
    # The finding; empty without one.
    text: str = ""
    # Other faults, and those of another loop.
    besides: tuple[str, ...] = ()
    other_loop: tuple[str, ...] = ()
    # How the answer is known.
    evidence: tuple[str, ...] = (_HOW,)
    # Not with faults by the source alone, or without any answer.
    has_run: bool = True

    @property
    def status(self) -> int:
        return _STATUS[self.kind]

    @property
    def command(self) -> str | None:
        """The command that tests the combination; None if it was tested, or a cause answers for it."""
        return self.question.command if self.status == UNTESTED or not self.has_run else None

    def document(self) -> dict[str, Any]:
        return {
            "features": self.question.combination.features,
            "packages": self.question.used,
            "kind": self.kind,
            "status": self.status,
            "text": self.text,
            "besides": self.besides,
            "other_loop": self.other_loop,
            "evidence": self.evidence,
            "command": self.command,
        }

    def page(self) -> list[str]:
        """Return the lines of the answer."""
        first = f"{self.question.text}: {_WORDS[self.kind]}"
        besides = [f"besides: {text}" for text in self.besides]
        if self.command is None:
            finding = f": {self.text}" if self.text else ""
            return [first + finding, *besides, *self.other_loop, *self.evidence]
        if not self.text:
            return [f"{first}; run: {self.command}", *self.evidence]
        if not self.has_run:
            return [
                f"{first}: {self.text}",
                *besides,
                *self.evidence,
                f"these releases were not run; run: {self.command}",
            ]
        return [f"{first}: {self.text}", *besides, *self.other_loop, f"run: {self.command}", *self.evidence]


def answer_features(options: argparse.Namespace) -> FeaturesAnswer:
    """Return the answer for a combination."""
    _check(options)
    matrices = [*read_matrices(), *read_other_matrices()]
    versions = {"deepspeed": options.release, "accelerate": options.accelerate, "torch": options.torch}
    for name in _PACKAGES:
        versions[name] = versions[name] or package_version(name) or matrices[0].stack[name]
    question = _Question(options.features, versions)
    if causes := _known_causes(options.features, versions, matrices[0]):
        faults = faults_by_source(options.features, versions, collect_evidence(matrices))
        return _answer_of_causes(question, causes, faults)
    tested = next((matrix for matrix in matrices if has_releases(matrix, question.used)), None)
    answer = look_up_answer(options.features, tested) if tested is not None else None
    if answer is None or answer.kind == "untested":
        evidence = collect_evidence(matrices)
        if faults := faults_by_source(options.features, versions, evidence):
            return _answer_of_source(question, faults, evidence)
    if tested is None or answer is None:
        return _answer_without_runs(question, matrices)
    other_loop = tuple(_with_accelerate(options.features, tested)) if answer.kind not in ("wrong", "error") else ()
    return FeaturesAnswer(question, answer.kind, answer.text, answer.besides, other_loop)


def _answer_without_runs(question: _Question, matrices: Sequence[Matrix]) -> FeaturesAnswer:
    """Return the answer for releases that no matrix has, and that have no fault by the source."""
    if _is_in_grid(question.combination, question.versions, matrices[0]):
        return FeaturesAnswer(question, "right", evidence=(_BY_THE_GRID,))
    nearest = _nearest_answer(question, matrices)
    unread = _lines_of_unread(question, collect_evidence(matrices))
    return FeaturesAnswer(question, "untested", evidence=(nearest, *unread, _HOW), has_run=False)


def _answer_of_causes(question: _Question, causes: Sequence[Cause], faults: Sequence[KnownFinding]) -> FeaturesAnswer:
    """Return the answer of the causes of `study releases`, with other faults that these releases have."""
    described = "; ".join(f"{cause.title}{_fixed_in(cause)}" for cause in causes)
    kind: Kind = "error" if all(cause.ends_training for cause in causes) else "wrong"
    names = {cause.id for cause in causes}
    besides = tuple(with_instead(fault.title, fault) for fault in faults if fault.cause not in names)
    return FeaturesAnswer(question, kind, described, besides, evidence=(_BY_CAUSES,))


def _answer_of_source(question: _Question, faults: Sequence[KnownFinding], evidence: Evidence) -> FeaturesAnswer:
    """Return the answer for releases that were not run, and which releases have each fault."""
    first, *further = faults
    sources = []
    for fault in faults:
        by = "by the source" if fault.since or fault.before else "by runs of other releases"
        title = f": {fault.title}" * bool(further)
        sources.append(f"{by}, in {known_span(fault, evidence)}{f' ({fault.address})' * bool(fault.address)}{title}")
    return FeaturesAnswer(
        question,
        "error" if first.verdict == "refused" else "wrong",
        with_instead(first.title, first),
        tuple(with_instead(fault.title, fault) for fault in further),
        evidence=tuple(sources),
        has_run=False,
    )


def _lines_of_unread(question: _Question, evidence: Evidence) -> Iterator[str]:
    """Yield the faults of other releases, where nothing shows whether the requested ones have them."""
    for entry in read_known_findings():
        if (
            entry.verdict == "wrong"
            and entry in evidence
            and entry.arises_with(question.combination.levels)
            and entry.is_in(question.versions)
            and not is_known_in(entry, question.versions, evidence)
        ):
            yield f"known of {known_span(entry, evidence)}, not known of these releases: {entry.title}"


def _nearest_answer(question: _Question, matrices: Sequence[Matrix]) -> str:
    """Return the answer of the oldest tested releases that are not older than the request's; else of the newest."""
    names = question.combination.packages
    requested = _release_keys(question.versions, names)
    newer = [matrix for matrix in matrices if all(map(operator.ge, _release_keys(matrix.stack, names), requested))]
    newer.sort(key=lambda matrix: _release_keys(matrix.stack, names))
    answers = [(matrix, look_up_answer(question.combination, matrix)) for matrix in [*newer, matrices[0]]]
    # Not each of them has run every engine.
    matrix, answer = next((pair for pair in answers if pair[1].kind != "untested"), answers[-1])
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


def _check(options: argparse.Namespace) -> None:
    """Raise UserError for a release that is none, and for arguments that the features name."""
    if options.release is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)*", options.release):
        raise UserError(f"{options.release!r} is not a release of DeepSpeed", "name one, such as 0.19.8")
    if getattr(options, "strategy", None) is not None:
        raise UserError(f"{options.strategy} is not used with --features", "name the engine in the features")
    if getattr(options, "precision", "fp32") != "fp32":
        raise UserError("--precision is not used with --features", "name bf16, autocast or fp16 in the features")


def _known_causes(combination: Combination, versions: dict[str, str | None], newest: Matrix) -> list[Cause]:
    """Return the causes of wrong gradients that these releases have in the combination, on GPUs."""
    stack = _with_transformers(versions, newest)
    optimizer = "muon" if combination.has("muon") else "adamw"
    precision = _precision(combination)
    return [
        cause
        for cause in read_causes()
        if cause.optimizer == optimizer
        and cause.gpu != "hidden"
        and cause.is_in(stack)
        and cause.shows_in(_strategy(combination), combination.micro_steps, precision)
        # A fault of Accelerate's loop.
        and ("accelerate" not in cause.releases or combination.has("accelerate"))
    ]


def _is_in_grid(combination: Combination, versions: dict[str, str | None], newest: Matrix) -> bool:
    """Whether the grid of releases trained the combination with these packages."""
    strategy, features = _strategy(combination), combination.features[1:]
    if strategy not in STRATEGY_NAMES or not _IN_GRID.issuperset(features):
        return False
    # Accelerate makes DeepSpeedCPUAdam of AdamW; in the engine's own loop the program does.
    if combination.has("optimizer_cpu", "all_cpu") and combination.has("cpu_adam") == combination.has("accelerate"):
        return False
    # The grid trains in Accelerate's loop, which has a fault that the engine's own has not.
    if _known_causes(combination.replaced("loop", "accelerate"), versions, newest):
        return False
    packages = {name: version or "0" for name, version in _with_transformers(versions, newest).items()}
    stack = JudgedStack(**packages, precision=_precision(combination), strategy=strategy)
    return find_untested(json.loads(GRID.read_text(encoding="utf-8")), stack) is None


def _with_transformers(versions: dict[str, str | None], newest: Matrix) -> dict[str, str | None]:
    return {**versions, "transformers": package_version("transformers") or newest.stack["transformers"]}


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
