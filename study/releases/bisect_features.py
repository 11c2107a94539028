"""`study releases bisect --features A,B`: find the releases that introduced and fixed a fault of a combination.

Each release runs the combination in its stack, once: stored runs and those of an earlier call are not repeated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from study.compositions.answers import has_same_releases, read_known_findings, stored_matrices
from study.compositions.command import feature_table, installed_stack
from study.compositions.features import Combination, read_rows
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationOutcome, CombinationSession
from study.config.errors import UserError
from study.config.printing import print_page, print_result
from study.host.folders import cache_directory
from study.host.stacks import release_key, stacks
from study.releases.bisect import BisectResult, fill_options, print_bisected, progress_stream
from study.sweep.launch import clean_environment

# Within the folder of records.
FOLDER = "combinations"


class CombinationBisection:
    """Judges releases of DeepSpeed for one combination, each once."""

    def __init__(self, combination: Combination, runs: int, root: Path, progress: TextIO):
        if not combination.uses_deepspeed:
            problem = f"{combination.name} does not run in DeepSpeed, whose releases are bisected"
            raise UserError(problem, "name a stage, such as zero2")
        self._combination, self._runs, self._root = combination, runs, root / FOLDER
        self._progress = progress
        self.verdicts: dict[str, bool | None] = {}

    def is_bad(self, stack: str) -> bool | None:
        """Whether the combination differs from one process; None if it ends with an error or is not installable."""
        if stack not in self.verdicts:
            outcome, origin = self._find_outcome(stack)
            self.verdicts[stack] = {"equal": False, "differs": True}.get(outcome.kind)
            print_page([f"{stack}: {outcome.kind}{f': {outcome.says}' * bool(outcome.says)}{origin}"], self._progress)
        return self.verdicts[stack]

    def _find_outcome(self, stack: str) -> tuple[CombinationOutcome, str]:
        """Return the outcome in a stack and its origin: a stored run, an earlier call or a new run."""
        versions = {**installed_stack(), **stacks()[stack].releases}
        file = self._root / f"{stack}.json"
        matrix = Matrix.read(file) if file.exists() else Matrix(versions)
        if matrix.stack != versions:
            raise UserError(f"{file} has runs of another stack", "name another folder")
        if self._combination in matrix.outcomes:
            return matrix.outcomes[self._combination], " (of an earlier call)"
        for stored in stored_matrices() if self._runs == 1 else ():
            same = has_same_releases(stored.stack, versions, self._combination.packages)
            if same and self._combination in stored.outcomes:
                return stored.outcomes[self._combination], " (stored)"
        outcome = self._run(stack)
        matrix.outcomes[self._combination] = outcome
        file.parent.mkdir(parents=True, exist_ok=True)
        matrix.write(file)
        return outcome, ""

    def _run(self, stack: str) -> CombinationOutcome:
        """Run the combination in a stack, each time with other weights and samples, up to the first difference."""
        environment = None
        if not has_same_releases(installed_stack(), stacks()[stack].releases, stacks()[stack].releases):
            if problem := stacks()[stack].install_error():
                return CombinationOutcome(self._combination, "not installable", problem, "", 0.0)
            layers = stacks()[stack].environment(os.environ)
            environment = clean_environment(cache_directory(), Path(os.devnull)) | layers
        with CombinationSession(environment) as session:
            for seed in range(self._runs):
                outcome = session.run_with_seed(self._combination, seed)
                if not outcome.is_equal:
                    break
        return outcome


def run(options: argparse.Namespace) -> int:
    """Print the result of the bisection; return exit status 1 if no release of the range is bad."""
    combination: Combination | None = options.features
    if combination is None:
        rows = {name: dict(row.levels) for name, row in read_rows().items()}
        print_result(options.json, lambda: rows, [feature_table()])
        return 0
    if options.strategy:
        raise UserError(f"{options.strategy} is not used with --features", "name the engine in the features")
    if options.accumulation is not None:
        raise UserError("--accumulation is not used with --features", "add the feature accumulation, of 4 steps")
    fill_options(options)
    bisection = CombinationBisection(combination, options.repeat, options.runs_dir, progress_stream(options))
    subject = {"features": list(combination.features)}
    return print_bisected(options, subject, bisection, lambda result: describe_changes(result, combination))


def describe_changes(result: BisectResult, combination: Combination) -> Iterator[str]:
    """Yield the known faults of a combination that were introduced or fixed at the boundaries of a bad span."""
    for word, name, before, after in (
        ("introduced in", "since", result.last_good, result.first_bad),
        ("fixed in", "before", result.last_bad, result.first_good),
    ):
        for entry in read_known_findings() if before is not None and after is not None else ():
            release = dict(getattr(entry, name)).get("deepspeed")
            if entry.verdict != "wrong" or release is None or not entry.arises_with(combination.levels):
                continue
            if release_key(str(before)) < release_key(release) <= release_key(str(after)):
                yield f"{entry.title}: {word} {release} {entry.address}".rstrip()
