"""The answer of `study verify`: the verdicts on all cells, which --json prints, and the page that is made of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from study.config.flags import Precision
from study.config.printing import TextTable
from study.config.strategies import read_strategy
from study.config.text import format_duration
from study.releases.causes import GRID, Cause
from study.releases.verdict import Tolerance, Verdict

Option = Literal["", "muon", "lora"]
# An equal run under a stack with a known race condition proves nothing, so this kind is not in _FINE. An engine that
# cannot run here computes nothing wrong.
BY_LUCK = "equal, by chance"
_FINE = ("equal", "refuses", "not judged")
ONE_RANK = "one rank exchanges nothing, so faults between ranks are not detected"


@dataclasses.dataclass(frozen=True)
class VerifyRow:
    """One cell of the matrix with its verdict."""

    strategy: str
    precision: Precision
    micro_steps: int
    verdict: Verdict
    causes: tuple[Cause, ...] = ()
    option: Option = ""

    @property
    def name(self) -> str:
        return f"{self.option} {self.strategy}".lstrip()

    @property
    def is_fine(self) -> bool:
        return self.kind in _FINE

    @property
    def kind(self) -> str:
        """Kind of the verdict; `BY_LUCK` if an equal run has a known race condition."""
        return BY_LUCK if self.verdict.kind == "equal" and self.causes else self.verdict.kind

    @property
    def says(self) -> str:
        titles = "; ".join(cause.title for cause in self.causes)
        description = BY_LUCK if self.kind == BY_LUCK else self.verdict.describe
        return f"{description} (known: {titles})" if titles else description

    @property
    def place(self) -> str:
        return f"{self.precision}, {self.micro_steps} micro-step{'s'[: self.micro_steps > 1]}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """Verdicts on all cells of the verified strategies."""

    strategies: Sequence[str]
    ranks: int
    rows: Sequence[VerifyRow]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.strategies, *(row.name for row in self.rows)]))

    @property
    def not_trusted(self) -> list[str]:
        """Strategies that diverge or crash in a cell, or may be equal only because of a race that GPUs have, too."""
        bad = {row.name for row in self.rows if not row.is_fine} - {row.name for row in self._by_chance_on_cpus}
        return [name for name in self.names if name in bad]

    @property
    def _by_chance_on_cpus(self) -> list[VerifyRow]:
        """Rows of strategies whose only reason for distrust is a race that no GPU has."""
        rows = [row for row in self.rows if not row.is_fine]
        bad = {row.name for row in rows if row.kind != BY_LUCK or any(cause.gpu != "hidden" for cause in row.causes)}
        return [row for row in rows if row.name not in bad]

    @property
    def unverified(self) -> list[str]:
        judged = {row.name for row in self.rows if row.kind not in ("refuses", "not judged")}
        return [name for name in self.names if name not in judged]

    @property
    def agrees(self) -> bool | None:
        """Whether no strategy diverges; None if DeepSpeed strategies were requested and none of them could run."""
        engines = {name for name in self.strategies if read_strategy(name).deepspeed is not None}
        nothing = bool(engines) and engines <= set(self.unverified)
        return None if nothing and not self.not_trusted else not self.not_trusted

    @property
    def table(self) -> TextTable:
        """The verdicts by strategy and place."""
        places = list(dict.fromkeys(row.place for row in self.rows))
        kinds = {(row.name, row.place): row.kind for row in self.rows}
        lines = [[name, *(kinds.get((name, place), "-") for place in places)] for name in self.names]
        return TextTable(["strategy", *places], lines)

    @property
    def answer(self) -> str:
        """The verdict in one line."""
        notes = f"; not judged here: {', '.join(self.unverified)}" if self.unverified else ""
        if by_chance := self._by_chance_on_cpus:
            notes = f"; {_names(by_chance)} {BY_LUCK} ({_faults(by_chance)}){notes}"
        if self.agrees is None:
            return f"NOT JUDGED: no engine of DeepSpeed could run here{notes}"
        if self.agrees:
            equal = [row for row in self.rows if row.verdict.kind == "equal"]
            names, precisions = _names(equal), ", ".join(dict.fromkeys(row.precision for row in equal))
            if self.ranks == 1:
                notes = f"; {ONE_RANK}{notes}"
            return f"PASS: {names}: gradients equal those of one process in {precisions}{notes}"
        # Strategies that diverge alike: with or without accumulation, and with the same known causes.
        groups: dict[tuple[str, str], list[VerifyRow]] = {}
        for name in self.not_trusted:
            wrong = [row for row in self.rows if row.name == name and not row.is_fine]
            is_both = len({row.micro_steps for row in wrong}) > 1
            where = "" if is_both else f" with{'out' * (wrong[0].micro_steps == 1)} accumulation"
            groups.setdefault((where, _faults(wrong)), []).extend(wrong)
        diverging = (f"{_names(rows)}{where} ({faults})" for (where, faults), rows in groups.items())
        return f"FAIL: {'; '.join(diverging)}{notes}"


def _names(rows: Sequence[VerifyRow]) -> str:
    return ", ".join(dict.fromkeys(row.name for row in rows))


def _faults(rows: Sequence[VerifyRow]) -> str:
    causes = "; ".join(dict.fromkeys(fault_text(cause) for row in rows for cause in row.causes))
    return causes or next((row.verdict.describe[:160] for row in rows if row.kind == "crashes"), "no known cause")


def fault_text(cause: Cause) -> str:
    """Return a known cause by its letter, with its limits."""
    letter = json.loads(GRID.read_text(encoding="utf-8"))["letters"].get(cause.id, cause.id)
    limits = ["on CPUs only"] * (cause.gpu == "hidden") + [f"fixed in {cause.left.release}"] * bool(cause.left.release)
    return "; ".join([f"cause {letter}: {cause.title}", *limits])


@dataclasses.dataclass(frozen=True)
class VerifyAnswer:
    """The verification of a stack on this machine."""

    stack: Mapping[str, str | None]
    on_gpu: bool
    verification: Verification
    # By precision and option.
    tolerances: Mapping[tuple[Precision, Option], Tolerance]
    # Lines about strategies and precisions.
    not_tested: Sequence[str]
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        """The answer as --json prints it."""
        verification = self.verification
        return {
            "stack": self.stack,
            "ranks": verification.ranks,
            "on_gpu": self.on_gpu,
            "answer": verification.answer,
            "agrees": verification.agrees,
            "not_trusted": verification.not_trusted,
            "not_verified": verification.unverified,
            "tolerances": {
                " ".join(key).rstrip(): dataclasses.asdict(tolerance) for key, tolerance in self.tolerances.items()
            },
            "rows": [_row_document(row) for row in verification.rows],
            "not_tested": self.not_tested,
        }

    def page(self) -> list[str | TextTable]:
        """Return the parts of the printed answer."""
        return [
            f"{self.verification.answer} ({format_duration(self.seconds)})",
            f"tested: {stack_text(self.stack)}",
            *self.not_tested,
            "",
            self.verification.table,
        ]


def _row_document(row: VerifyRow) -> dict[str, Any]:
    return {
        "strategy": row.strategy,
        "option": row.option or None,
        "precision": row.precision,
        "micro_steps": row.micro_steps,
        **dataclasses.asdict(row.verdict),
        "kind": row.kind,
        "says": row.says,
        "causes": [cause.id for cause in row.causes],
    }


def stack_text(stack: Mapping[str, str | None]) -> str:
    """Return the packages with their releases."""
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in stack.items())
