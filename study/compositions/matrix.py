"""The matrix of combinations on one stack: a covering design, run and searched, as one document."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from study.compositions.covering import Design
from study.compositions.features import Combination, make_combination, read_chosen
from study.compositions.session import CombinationOutcome, CombinationSession
from study.records.directory import json_by_row

# DeepSpeed's messages for features that no CPU has, or few, such as fp16.
_NEEDS_A_GPU = (
    "is not supported on your device",
    "not been implemented on CPU backend",
    "only supports NVIDIA CUDA GPUs",
    "Error building extension 'dc'",
)


# Fields that an equal run leaves out in a file.
_EQUAL: dict[str, Any] = {"kind": "equal", "says": "", "line": "", "difference": None}


@dataclasses.dataclass
class Matrix:
    """Outcomes of runs, and the smallest combinations that are not equal."""

    stack: dict[str, str | None]
    outcomes: dict[Combination, CombinationOutcome] = dataclasses.field(default_factory=dict)
    findings: dict[Combination, CombinationOutcome] = dataclasses.field(default_factory=dict)
    # Pairs that can meet, and those that no equal run has.
    pairs: int = 0
    open_pairs: list[list[str]] = dataclasses.field(default_factory=list)
    # The same for pairs under each engine.
    triples: int = 0
    open_triples: list[list[str]] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes.values())

    def document(self) -> dict[str, Any]:
        return {
            "stack": self.stack,
            "pairs": self.pairs,
            "open_pairs": sorted(map(sorted, self.open_pairs)),
            "triples": self.triples,
            "open_triples": sorted(map(sorted, self.open_triples)),
            "findings": [_stored(outcome) for outcome in self.findings.values()],
            "runs": [
                _stored_run(outcome)
                for combination, outcome in self.outcomes.items()
                if outcome != self.findings.get(combination)
            ],
        }

    def write(self, file: Path) -> None:
        """Write it with one run a line, so that a change of one run is a change of one line."""
        new = file.with_suffix(".new")
        new.write_text(json_by_row(self.document()), encoding="utf-8")
        new.replace(file)

    @classmethod
    def read(cls, file: Path) -> Matrix:
        document = json.loads(file.read_text(encoding="utf-8"))
        counts = {name: document[name] for name in ("pairs", "open_pairs", "triples", "open_triples")}
        matrix = cls(document["stack"], **counts)
        for entry in document["runs"]:
            outcome = _read_stored(_EQUAL | entry)
            matrix.outcomes[outcome.combination] = outcome
        for entry in document["findings"]:
            outcome = _read_stored(entry)
            matrix.findings[outcome.combination] = outcome
            # A finding is a run, too, and is stored once.
            matrix.outcomes.setdefault(outcome.combination, outcome)
        return matrix


def fill(
    matrix: Matrix,
    session: CombinationSession,
    *,
    minutes: float,
    report: Callable[[str], None],
    file: Path | None = None,
    levels: Collection[str] | None = None,
    per_engine: bool = False,
) -> None:
    """Run combinations until every pair is covered or the time is over; `file` keeps the matrix after each run.

    `per_engine` covers every pair under every engine.
    """
    deadline = time.monotonic() + 60 * minutes
    design = Design(levels=levels, per_engine=per_engine)
    _add_earlier_outcomes(matrix, session, design)

    def keep(outcome: CombinationOutcome) -> None:
        matrix.outcomes[outcome.combination] = outcome
        if outcome.is_equal:
            design.cover(outcome.combination)
        if file is not None:
            matrix.write(file)

    # First each feature alone: what fails alone is not looked for in pairs.
    _run_single_features(matrix, session, design, keep, report, deadline)
    chosen = [combination for combination in read_chosen() if levels is None and combination not in matrix.outcomes]
    while time.monotonic() < deadline:
        drawn = chosen.pop() if chosen else design.draw()
        if drawn is None:
            break
        outcome = session.run(drawn)
        keep(outcome)
        covered = 1 - len(design.uncovered) / len(design.pairs)
        what = "pairs under an engine" if per_engine else "pairs"
        report(f"{len(matrix.outcomes)} runs, {covered:.1%} of {len(design.pairs)} {what}: {drawn.name} {outcome.kind}")
        if not outcome.is_equal:
            finding = _like_an_earlier_one(matrix, session, outcome, keep) or session.reduce(outcome, keep)
            _note(matrix, design, finding, report)
    _count_pairs(matrix, design, per_engine)
    if file is not None:
        matrix.write(file)


def _run_single_features(
    matrix: Matrix,
    session: CombinationSession,
    design: Design,
    keep: Callable[[CombinationOutcome], None],
    report: Callable[[str], None],
    deadline: float,
) -> None:
    """Run each feature alone until the deadline, and note those that fail."""
    for combination in design.single_features():
        if time.monotonic() > deadline:
            break
        outcome = session.run(combination)
        keep(outcome)
        if not outcome.is_equal and combination not in matrix.findings:
            _note(matrix, design, outcome, report)
            _drop_if_it_needs_a_gpu(design, outcome)


def _count_pairs(matrix: Matrix, design: Design, per_engine: bool) -> None:
    """Write the number of pairs and those that are not covered into the matrix."""
    open_pairs = [sorted(pair) for pair in design.missing]
    if per_engine:
        matrix.triples, matrix.open_triples = len(design.pairs), open_pairs
    else:
        matrix.pairs, matrix.open_pairs = len(design.pairs), open_pairs


def _add_earlier_outcomes(matrix: Matrix, session: CombinationSession, design: Design) -> None:
    """Cover, forbid and drop in the design the outcomes of earlier calls, which the session does not run again."""
    for outcome in matrix.outcomes.values():
        session.remember(outcome)
        if outcome.is_equal:
            design.cover(outcome.combination)
    for outcome in matrix.findings.values():
        design.forbid(_shown_by(outcome.combination))
        _drop_if_it_needs_a_gpu(design, outcome)


def _drop_if_it_needs_a_gpu(design: Design, outcome: CombinationOutcome) -> None:
    """Drop a feature that lacks a GPU here: no other engine can have it either."""
    if needs_other_hardware(outcome):
        design.drop(outcome.combination.features[-1])


def _stored(outcome: CombinationOutcome) -> dict[str, Any]:
    """Return an outcome as a file has it: features as one text, figures with four significant digits."""
    return outcome.document() | {
        "features": outcome.combination.name,
        "difference": _rounded(outcome.difference),
    }


def _stored_run(outcome: CombinationOutcome) -> dict[str, Any]:
    """Return a run without fields of an equal one, and with the stage of a difference alone; its finding has all."""
    entry = {name: value for name, value in _stored(outcome).items() if name not in _EQUAL or value != _EQUAL[name]}
    if outcome.difference is not None:
        entry["difference"] = {"stage": outcome.difference["stage"]}
    return entry


def _read_stored(entry: dict[str, Any]) -> CombinationOutcome:
    features = entry["features"]
    return CombinationOutcome.read_document(
        entry | {"features": features.split(",") if isinstance(features, str) else features}
    )


def _rounded(figures: Any) -> Any:
    """Return figures with four significant digits, also those in dictionaries and sequences."""
    if isinstance(figures, float):
        return float(f"{figures:.4g}")
    if isinstance(figures, dict):
        return {name: _rounded(value) for name, value in figures.items()}
    return [_rounded(value) for value in figures] if isinstance(figures, (list, tuple)) else figures


def needs_other_hardware(outcome: CombinationOutcome) -> bool:
    """Whether an engine rejects a combination on this CPU, with any release."""
    return outcome.kind == "refuses" and any(words in outcome.says for words in _NEEDS_A_GPU)


def _like_an_earlier_one(
    matrix: Matrix, session: CombinationSession, outcome: CombinationOutcome, keep: Callable[[CombinationOutcome], None]
) -> CombinationOutcome | None:
    """Return the outcome of an earlier finding's features with this engine, if it explains this outcome."""
    levels = outcome.combination.levels
    engine = outcome.combination.level("engine")
    for finding in list(matrix.findings):
        features = [name for name in finding.features if name != finding.level("engine")]
        if not levels.issuperset(features):
            continue
        candidate = make_combination([engine, *features])
        if candidate.conflict is None:
            tried = session.run(candidate)
            keep(tried)
            if tried.is_like(outcome):
                return tried
    return None


def _note(matrix: Matrix, design: Design, finding: CombinationOutcome, report: Callable[[str], None]) -> None:
    matrix.findings[finding.combination] = finding
    design.forbid(_shown_by(finding.combination))
    report(f"  finding: {finding.combination.name} {finding.kind}: {finding.says}")


def _shown_by(combination: Combination) -> tuple[str, ...]:
    return combination.features
