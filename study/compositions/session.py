"""Runs of combinations from a process without torch: the server of forks, and the search for the smallest."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from study.compositions.features import Combination, make_combination, read_rows
from study.config.errors import UserError
from study.config.places import IMPORT_ROOT


@dataclasses.dataclass(frozen=True)
class CombinationOutcome:
    """Outcome of a combination: equal, differs, refuses, crashes or hangs."""

    combination: Combination
    kind: str
    says: str
    # The innermost line of an engine that an error passed.
    line: str
    seconds: float
    difference: dict[str, Any] | None = None
    # A later difference that the first cannot have caused, with its text.
    besides: dict[str, Any] | None = None
    # Of an equal run just made: its largest difference as a share of the limit there.
    share_of_limit: float | None = dataclasses.field(default=None, compare=False)

    @property
    def is_equal(self) -> bool:
        return self.kind == "equal"

    def is_like(self, earlier: CombinationOutcome) -> bool:
        """Whether two combinations show the same."""
        if self.kind != earlier.kind:
            return False
        if self.difference is not None and earlier.difference is not None:
            return bool(self.difference["stage"] == earlier.difference["stage"])
        return self.line == earlier.line

    def document(self) -> dict[str, Any]:
        document = {
            "features": list(self.combination.features),
            "kind": self.kind,
            "says": self.says,
            "line": self.line,
            "seconds": self.seconds,
            "difference": self.difference,
        }
        return document | ({"besides": self.besides} if self.besides is not None else {})

    @classmethod
    def read_document(cls, document: dict[str, Any]) -> CombinationOutcome:
        values = {name: value for name, value in document.items() if name != "features"}
        return cls(make_combination(document["features"]), **values)


ServerT = TypeVar("ServerT", bound="RankServer")


class RankServer:
    """A process that has imported the engines and answers requests in forks of itself; a context manager."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._module, self._environment = module, environment

    def __enter__(self: ServerT) -> ServerT:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._log = Path(self._folder.name) / "server.txt"
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, self._folder.name],
            cwd=IMPORT_ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; UserError if the engines cannot be imported."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._process.stdout.readline()
        if not answer:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise UserError(
                f"the engines cannot be imported together: {lines[-1] if lines else 'no message'}",
                "install releases that support each other",
            )
        document: dict[str, Any] = json.loads(answer)
        return document


class CombinationSession(RankServer):
    """Runs combinations on the installed engines, and compares them with plain training."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("study.compositions.forks", environment)
        self._known: dict[Combination, CombinationOutcome] = {}

    def run(self, combination: Combination) -> CombinationOutcome:
        """Run a combination, once per session."""
        if combination not in self._known:
            self._known[combination] = self._ask(combination, None)
        return self._known[combination]

    def run_with_fault(self, combination: Combination, fault: str) -> CombinationOutcome:
        """Run a combination with a planted fault: FILE:NAME of a table FAULTS."""
        return self._ask(combination, fault)

    def run_with_seed(self, combination: Combination, seed: int) -> CombinationOutcome:
        """Run a combination with other initial weights and samples than those of `run`, whose seed is 0."""
        return self._ask(combination, None, seed)

    def remember(self, outcome: CombinationOutcome) -> None:
        """Take the outcome of an earlier session for a combination."""
        self._known[outcome.combination] = outcome

    def _ask(self, combination: Combination, fault: str | None, seed: int = 0) -> CombinationOutcome:
        fields = self.ask({"features": list(combination.features), "fault": fault, "seed": seed})
        return CombinationOutcome(
            combination,
            fields["kind"],
            fields["says"],
            fields.get("line", ""),
            fields["seconds"],
            fields.get("difference"),
            fields.get("besides"),
            fields.get("share_of_limit"),
        )

    def reduce(
        self, outcome: CombinationOutcome, report: Callable[[CombinationOutcome], None] = lambda _: None
    ) -> CombinationOutcome:
        """Return a smallest combination that still shows an outcome: without any of its features it does not.

        Halves of the features are left out first, then quarters, and at last each feature.
        """
        smallest = outcome
        # Last rows first: they change least of an engine.
        rows = [row for row in reversed(read_rows().values()) if row.name != "engine"]
        changed = [row.name for row in rows if smallest.combination.level(row.name) != row.default]
        size = len(changed)
        while size:
            size = (size + 1) // 2 if size > 1 else 1
            for start in range(0, len(changed), size):
                dropped = [name for name in changed[start : start + size] if _is_changed(smallest.combination, name)]
                smaller = smallest.combination
                for name in dropped:
                    smaller = smaller.replaced(name)
                if not dropped or smaller.conflict is not None:
                    continue
                tried = self.run(smaller)
                report(tried)
                if tried.is_like(smallest):
                    smallest = tried
            changed = [name for name in changed if _is_changed(smallest.combination, name)]
            if size == 1:
                break
        return smallest


def _is_changed(combination: Combination, row: str) -> bool:
    return combination.level(row) != read_rows()[row].default
