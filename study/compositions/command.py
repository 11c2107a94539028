"""`study verify` with --features, --pairs or --locate: combinations against one process of plain PyTorch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from study.compositions.answers import (
    STACK_PACKAGES,
    fault_under_accelerate,
    match_known_finding,
    other_loop_line,
    read_matrices,
)
from study.compositions.features import LISTED, Combination, make_combination, read_rows
from study.compositions.matrix import Matrix, fill
from study.compositions.session import CombinationOutcome, CombinationSession
from study.config.errors import UserError
from study.config.places import install_command
from study.config.printing import TextTable, print_page, print_result
from study.config.text import format_duration
from study.host.stacks import package_version

# Exit statuses of verify.
_PASS, _FAIL, _UNTESTED = 0, 1, 3
# The file of --pairs in --runs_dir.
PAIRS_FILE = "compositions.json"
# What --locate runs without --only.
_LOCATED = ("zero1", "zero2", "zero3")


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """Add the flags of combinations to `study verify`."""
    add = parser.add_argument
    add(
        "--features",
        type=parse_features,
        metavar="A,B,...",
        default=argparse.SUPPRESS,
        help="train this combination, such as zero2,muon,accumulation, and name the first tensor that differs;"
        " `--features list` prints all features",
    )
    add(
        "--locate",
        action="store_true",
        help="for each strategy of --only (default: zero1, zero2, zero3) under Accelerate, with and without"
        " accumulation, the first tensor that differs",
    )
    add(
        "--pairs",
        type=_minutes,
        metavar="N",
        help="train combinations that cover all pairs of features, for N minutes; --runs_dir DIR keeps them, and a"
        " later call continues",
    )
    add("--per_engine", action="store_true", help="of --pairs: cover every pair under every engine")


def parse_features(text: str) -> Combination | None:
    """Parse the names of a combination, as an argparse type; None for `list`; UserError for a wrong combination."""
    if text == "list":
        return None
    try:
        combination = make_combination(name.strip() for name in text.split(",") if name.strip())
    except UserError as error:
        raise UserError(f"argument --features: {error.problem}", error.fix) from None
    if (rule := combination.conflict) is not None:
        both = " and ".join(sorted(combination.levels & (rule.first | rule.second)))
        problem = f"{both} cannot be combined: {rule.reason}"
        raise UserError(f"argument --features: {problem}", f"leave one out; {LISTED}")
    return combination


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 10_000:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a duration in minutes such as 10")
    return minutes


def requests_combinations(options: argparse.Namespace) -> bool:
    """Whether the command line asks for combinations."""
    return hasattr(options, "features") or options.locate or options.pairs is not None or options.per_engine


def run(options: argparse.Namespace) -> int:
    """Run the requested combinations and return the exit status."""
    if hasattr(options, "features") and options.features is None:
        print_page([feature_table()])
        return _PASS
    if options.per_engine and options.pairs is None:
        raise UserError("--per_engine is of --pairs", "add --pairs N, or leave it out")
    stack = installed_stack()
    needed = [name for name in ("torch", "transformers") if stack[name] is None]
    if needed:
        fix = f"install the releases to test, or those of this study: {install_command('train', missing=needed)}"
        raise UserError(f"not installed here: {' and '.join(needed)}", fix)
    if options.pairs is not None:
        return _run_pairs(options, stack)
    combinations = [options.features] if hasattr(options, "features") else locate_combinations(options.only)
    return _run_each(options, stack, combinations)


def installed_stack() -> dict[str, str | None]:
    return {name: package_version(name) for name in STACK_PACKAGES}


def locate_combinations(only: Sequence[str] | None) -> list[Combination]:
    """Return the combinations of --locate for the strategies of --only; UserError for other strategies than engines."""
    engines = read_rows()["engine"].levels
    chosen = only or _LOCATED
    if unknown := [name for name in chosen if name not in engines]:
        raise UserError(f"--locate does not support {unknown[0]}", f"use {', '.join(engines)}")
    return [make_combination([engine, "accelerate", *extra]) for engine in chosen for extra in ((), ("accumulation",))]


def _run_each(options: argparse.Namespace, stack: Mapping[str, str | None], combinations: list[Combination]) -> int:
    started = time.monotonic()
    outcomes: list[tuple[CombinationOutcome, CombinationOutcome]] = []
    with CombinationSession() as session:
        for number, combination in enumerate(combinations, start=1):
            outcome = session.run(combination)
            finding = outcome
            if not outcome.is_equal:
                print_page([f"{combination.name} {outcome.kind}; looking for the features that it takes"], sys.stderr)
                finding = session.reduce(outcome)
            elif len(combinations) > 1:
                print_page([f"[{number}/{len(combinations)}] {combination.name}: equal"], sys.stderr)
            outcomes.append((outcome, finding))
    duration = format_duration(time.monotonic() - started)
    lines: list[str | TextTable] = [f"{_answer([outcome for outcome, _ in outcomes])} ({duration})"]
    lines.append("tested: " + ", ".join(f"{name} {version}" for name, version in stack.items() if version))
    for outcome, finding in outcomes:
        lines += _explained(outcome, finding, stack)
        lines += _about_accelerate(outcome)
    document = lambda: {  # noqa: E731
        "stack": dict(stack),
        "answer": lines[0],
        "combinations": [
            outcome.document() | {"shown_by": list(finding.combination.features)} for outcome, finding in outcomes
        ],
    }
    print_result(options.json, document, tuple(lines))
    return exit_status([outcome for outcome, _ in outcomes])


def _answer(outcomes: Sequence[CombinationOutcome]) -> str:
    names = {
        kind: [outcome.combination.name for outcome in outcomes if outcome.kind == kind]
        for kind in dict.fromkeys(outcome.kind for outcome in outcomes)
    }
    if set(names) == {"equal"}:
        return f"PASS: {'; '.join(names['equal'])}: equal to one process of plain PyTorch up to rounding"
    parts = [f"{'; '.join(combinations)} {_VERBS[kind]}" for kind, combinations in names.items() if kind != "equal"]
    failed = exit_status(outcomes) == _FAIL
    return f"{'FAIL' if failed else 'NOT TESTED'}: {'; '.join(parts)}"


_VERBS = {
    "differs": "differs from one process of plain PyTorch",
    "refuses": "is rejected by the engine",
    "crashes": "ends with an error",
    "hangs": "does not end",
    "no reference": "has no reference",
}


def exit_status(outcomes: Sequence[CombinationOutcome]) -> int:
    """Return 1 for a wrong result or a crash, 3 if something could not be tested, else 0."""
    kinds = {outcome.kind for outcome in outcomes}
    if kinds & {"differs", "crashes", "hangs"}:
        return _FAIL
    return _PASS if kinds <= {"equal"} else _UNTESTED


def _explained(outcome: CombinationOutcome, finding: CombinationOutcome, stack: Mapping[str, str | None]) -> list[str]:
    if outcome.is_equal:
        return []
    lines = [f"{outcome.combination.name}:", f"  {outcome.says}" + f" ({outcome.line})" * bool(outcome.line)]
    if outcome.besides is not None:
        lines.append(f"  besides: {outcome.besides['says']}")
    if finding.combination != outcome.combination:
        lines.append(f"  it takes only {finding.combination.name}: {finding.says}")
    if (entry := match_known_finding(finding, stack)) is not None:
        lines.append(f"  known: {entry.title}" + f" ({entry.address})" * bool(entry.address))
    return lines


def _about_accelerate(outcome: CombinationOutcome) -> Iterator[str]:
    """Yield the stored fault in Accelerate's loop, for a combination that is equal in another."""
    stored = next(read_matrices())
    fault = fault_under_accelerate(outcome.combination, stored) if outcome.is_equal else None
    if fault is not None:
        line = other_loop_line(outcome.combination, fault)
        yield f"{outcome.combination.name}: {line} (stored, accelerate {stored.stack['accelerate']})"


def _run_pairs(options: argparse.Namespace, stack: dict[str, str | None]) -> int:
    file = Path(options.runs_dir) / PAIRS_FILE if options.runs_dir else None
    matrix = Matrix(stack)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            matrix = Matrix.read(file)
            if matrix.stack != stack:
                raise UserError(f"{file} has runs of another stack", "name another folder")
    print_progress = lambda line: print_page([line], sys.stderr)  # noqa: E731
    with CombinationSession() as session:
        fill(
            matrix,
            session,
            minutes=options.pairs,
            report=print_progress,
            file=file,
            per_engine=options.per_engine,
        )
    print_result(options.json, matrix.document, matrix_page(matrix, per_engine=options.per_engine))
    return exit_status([finding for finding in matrix.findings.values() if _counts(finding, stack)])


def _counts(finding: CombinationOutcome, stack: Mapping[str, str | None]) -> bool:
    """Whether a finding is a fault, rather than a documented difference or a limit of CPUs."""
    entry = match_known_finding(finding, stack)
    return entry is None or entry.verdict == "wrong"


def matrix_page(matrix: Matrix, *, per_engine: bool = False) -> tuple[str | TextTable, ...]:
    """Return the coverage and the findings of a matrix."""
    total, uncovered = (matrix.triples, matrix.open_triples) if per_engine else (matrix.pairs, matrix.open_pairs)
    covered = 1 - len(uncovered) / total if total else 0.0
    what = "pairs under an engine" if per_engine else "pairs"
    equal = sum(outcome.is_equal for outcome in matrix.outcomes.values())
    head = (
        f"{len(matrix.outcomes)} runs in {format_duration(matrix.seconds)}, {equal} equal to one process;"
        f" {covered:.1%} of {total} {what} covered; {len(matrix.findings)} findings"
    )
    rows = [[finding.combination.name, finding.kind, finding.says[:90]] for finding in matrix.findings.values()]
    return head, "", TextTable(["smallest combination", "outcome", "what"], rows)


def feature_table() -> TextTable:
    """Return all features with their rows."""
    rows = [[row.name, level, says] for row in read_rows().values() for level, says in row.levels.items()]
    return TextTable(["row", "feature", "what"], rows)
