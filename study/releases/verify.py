"""`study verify`: which strategies compute what DDP computes, with the packages that are installed here.

Each trains a tiny model for a few steps with this study's loop, with accumulation 1 and 4, and is compared with one
process without an engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from study.config.errors import UserError
from study.config.flags import Precision, RunConfig, resolved
from study.config.printing import TextTable, print_page
from study.config.strategies import STUDIED_STRATEGIES, read_strategy
from study.config.text import format_duration
from study.host.box import Box, this_box
from study.host.folders import cache_directory, folder_argument
from study.host.stacks import UNVERIFIED_VARIABLE, package_version
from study.predictor.hardware import whole
from study.records.directory import find_runs, read_json
from study.records.schema import RecordError
from study.releases.causes import PACKAGES, Cause, causes_of, races_of
from study.releases.verdict import Reference, Verdict, reference_precision, trace_at
from study.sweep.cell import Cell
from study.sweep.execute import run_cells
from study.sweep.plan import RANKS_WITHOUT_A_GPU

MICRO_STEPS = (1, 4)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "bf16-engine")
# In fp32 every strategy runs; half precision takes other paths through an engine, and a few strategies see them.
_HALF: dict[Precision, tuple[str, ...]] = {
    "bf16": ("ddp", "zero0", "zero2", "zero3"), "bf16-engine": ("zero1", "zero2", "zero3"),
}  # fmt: skip
# The first loss is before any update, the second after one of any scale, the third shows scales; the others show how
# far it goes. The rate does not warm up, and the norm is above 1 from the start: each step updates, and each clips. At
# this scale's own rate the steps overshoot at the batch of 8 ranks, and the rounding of DeepSpeed's Adam on the host
# grows with them beyond the tolerance.
_RUN: dict[str, Any] = {
    "task": "gpt-wikitext", "scale": "laptop", "max_steps": 6, "warmup_ratio": 0.0, "dropout": 0.0, "seed": 7,
    "train_samples": 256, "eval_samples": 8, "max_grad_norm": 0.5, "logging_steps": 1, "weight_decay": 0.1,
    "learning_rate": 1e-3,
}  # fmt: skip
# Generous: the first run on a machine also compiles an operator of DeepSpeed, and ranks may share cores.
_TIME_LIMIT_S = 900.0
# Where this stack has a known race an equal run proves nothing. An engine that cannot run here computes nothing wrong.
BY_LUCK = "equal, by luck"
_FINE = ("equal", "refuses", "not judged")


@dataclasses.dataclass(frozen=True)
class VerifyRow:
    """One cell of the matrix, and its verdict."""

    strategy: str
    precision: Precision
    micro_steps: int
    verdict: Verdict
    causes: tuple[Cause, ...] = ()

    @property
    def is_fine(self) -> bool:
        return self.kind in _FINE

    @property
    def kind(self) -> str:
        return BY_LUCK if self.verdict.kind == "equal" and self.causes else self.verdict.kind

    @property
    def says(self) -> str:
        known = "; ".join(cause.title for cause in self.causes)
        said = BY_LUCK if self.kind == BY_LUCK else self.verdict.says
        return f"{said} (known: {known})" if known else said

    @property
    def place(self) -> str:
        return f"{self.precision}, {self.micro_steps} micro-step{'s'[: self.micro_steps > 1]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", nargs="+", metavar="STRATEGY", help="these strategies, in every precision that they have")
    add("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="these precisions; all by default")
    ranks = "ranks; one for each GPU by default, or two without"
    add("--world_size", type=lambda text: whole(text, 999, "number of ranks"), metavar="N", help=ranks)
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    kept = "keep the records there, and resume from them; else they are removed"
    add("--runs_dir", type=folder_argument, metavar="DIR", help=kept)


def run(options: argparse.Namespace) -> int:
    """Exit status 0 where all that can run here agree, 1 where one does not, where nothing of DeepSpeed or not all that
    was named can run, or where the user stopped it."""
    os.environ[UNVERIFIED_VARIABLE] = "1"
    known, started = STUDIED_STRATEGIES[1:], time.monotonic()
    if unknown := next((name for name in options.only or () if name not in known), None):
        raise UserError(f"--only: {unknown!r} is not verified", f"use {', '.join(known)}")
    strategies = [name for name in known if not options.only or name in options.only]
    out = sys.stderr if options.json else sys.stdout
    stack = {name: package_version(name) for name in PACKAGES}
    needed = PACKAGES if any(read_strategy(name).deepspeed for name in strategies) else PACKAGES[1:]
    # The others are this study's own, and none of what is compared.
    if lacking := [name for name in (*needed, "datasets", "evaluate", "filelock") if package_version(name) is None]:
        # `.[train]` would put its own releases in place of those that are to be tested.
        fix = f"install {' and '.join(lacking)} next to the releases that are to be tested"
        if not any(stack.values()):
            fix = "install the releases that are to be tested, or those of this study: pip install -e '.[train]'"
        raise UserError(f"not installed here: {', '.join(lacking)}", fix)
    cache_directory()
    with contextlib.ExitStack() as held:
        try:
            root = options.runs_dir or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="study-verify-")))
        except OSError as error:
            problem = f"there is no room for records ({error.strerror})"
            raise UserError(problem, "name a folder with --runs_dir") from None
        box = this_box()
        _refuse_another_stack(root, stack, box)
        ranks = options.world_size or box.gpus or RANKS_WITHOUT_A_GPU
        if box.gpus and ranks > box.gpus:
            raise UserError(f"--world_size {ranks}, and this box has {box}", f"use {box.gpus} or less")
        matrix = Matrix(root.absolute(), box, stack, options.precision, ranks, chosen=bool(options.only))
        matrix.is_kept = options.runs_dir is not None
        if not any(map(matrix.cells, strategies)):
            raise UserError(f"{' and '.join(strategies)} have no {' or '.join(options.precision)}", "use fp32")
        tested = (
            f"{len(strategies)} strategies on {matrix.where}, with accumulation {' and '.join(map(str, MICRO_STEPS))}"
        )
        print_page([f"Testing {_stack_text(stack)}: {tested}"], out)
        found = Verification(strategies)
        for number, strategy in enumerate(strategies, start=1):
            rows = list(matrix.rows(strategy))
            found.rows += rows
            print_page([f"[{number}/{len(strategies)}] {_line(strategy, rows)}"], out)
    if options.json:
        print(json.dumps(_document(stack, matrix, found), indent=2))
    else:
        duration = format_duration(time.monotonic() - started)
        print_page(["", _table(found), f"\n{found.answer} ({duration})"])
    # What the user named and cannot run here was not verified either.
    return 0 if found.agrees and not (options.only and found.unverified) else 1


@dataclasses.dataclass
class Verification:
    strategies: Sequence[str]
    rows: list[VerifyRow] = dataclasses.field(default_factory=list)

    @property
    def not_trusted(self) -> list[str]:
        bad = {row.strategy for row in self.rows if not row.is_fine}
        return [name for name in self.strategies if name in bad]

    @property
    def unverified(self) -> list[str]:
        """Strategies that could not run, or not be judged."""
        judged = {row.strategy for row in self.rows if row.kind not in ("refuses", "not judged")}
        return [name for name in self.strategies if name not in judged]

    @property
    def agrees(self) -> bool | None:
        """None where no engine of DeepSpeed was verified, if any was asked for."""
        engines = {name for name in self.strategies if read_strategy(name).deepspeed is not None}
        nothing = bool(engines) and engines <= set(self.unverified)
        return None if nothing and not self.not_trusted else not self.not_trusted

    @property
    def answer(self) -> str:
        not_here = f"; not judged here: {', '.join(self.unverified)}" if self.unverified else ""
        if self.agrees is None:
            return f"NOT JUDGED: no engine of DeepSpeed could run here{not_here}"
        if self.agrees:
            return f"PASS: every strategy that runs here computes what one process computes{not_here}"
        return f"FAIL: {'; '.join(map(self._fault, self.not_trusted))}{not_here}"

    def _fault(self, strategy: str) -> str:
        """Name the strategy, the set-ups in which it differs, and the known causes."""
        wrong = [row for row in self.rows if row.strategy == strategy and not row.is_fine]
        causes = list(dict.fromkeys(f"cause {cause.id}: {cause.title}" for row in wrong for cause in row.causes))
        where = (
            ""
            if len({row.micro_steps for row in wrong}) > 1
            else (" with accumulation" if wrong[0].micro_steps > 1 else " without accumulation")
        )
        return f"{strategy}{where} ({', '.join(causes) or 'no known cause'})"


class Matrix:
    """Runs the cells of a strategy when it is asked for, and judges each against `single` in its precision."""

    def __init__(
        self, root: Path, box: Box, stack: Mapping[str, str | None], precisions: Sequence[Precision], ranks: int, *,
        chosen: bool,
    ):  # fmt: skip
        """`chosen` where the user named the strategies, so that each runs in every precision."""
        self.root, self.box, self.ranks = root, box, ranks
        self._stack, self._precisions, self._chosen = stack, precisions, chosen
        self.is_kept = True
        self._asked = set[str]()
        self.references: dict[Precision, Reference] = {}

    @property
    def where(self) -> str:
        where = f"{self.ranks} rank{'s'[: self.ranks > 1]} on {'a GPU each' if self.box.gpus else 'CPU cores'}"
        return where if self.ranks > 1 else f"{where}, so faults between ranks are not seen"

    def rows(self, strategy: str) -> Iterator[VerifyRow]:
        asked = self.cells(strategy)
        self._run([self._cell(strategy, *each) for each in asked])
        for precision, micro_steps in asked:
            reference = self._reference(precision)
            verdict = reference.judge(trace_at(self.root / self._cell(strategy, precision, micro_steps).id))
            if reference.single.state != "ok":
                verdict = Verdict("not judged", reason=f"one process did not end well: {reference.single.reason}")
            known = causes_of(self._stack, strategy, micro_steps, precision, verdict.differs)
            if verdict.kind == "equal":
                known = races_of(self._stack, strategy, micro_steps, precision, self.box.gpus > 0)
            yield VerifyRow(strategy, precision, micro_steps, verdict, known)

    def cells(self, strategy: str) -> list[tuple[Precision, int]]:
        """Return its precisions and micro-steps; half precision only with accumulation, where most faults were."""
        fp32: list[tuple[Precision, int]] = [("fp32", steps) for steps in MICRO_STEPS if "fp32" in self._precisions]
        half = [each for each in self._precisions if each in _HALF and self._has(strategy, each)]
        return fp32 + [(precision, MICRO_STEPS[-1]) for precision in half]

    def _has(self, strategy: str, precision: Precision) -> bool:
        if not self._chosen:
            return strategy in _HALF[precision]
        try:
            read_strategy(strategy).check_engine_flags(RunConfig(precision=precision))
        except UserError:
            return False
        return True

    def _reference(self, precision: Precision) -> Reference:
        if precision not in self.references:
            plain = cast(Precision, reference_precision(precision))
            single = self._cell("single", plain, 1)
            ddp = [self._cell("ddp", plain, steps) for steps in MICRO_STEPS if plain == "fp32" or steps > 1]
            self._run([single, *ddp])
            traces = [trace_at(self.root / cell.id) for cell in (single, *ddp)]
            self.references[precision] = Reference(precision, traces[0], tuple(traces[1:]))
        return self.references[precision]

    def _cell(self, strategy: str, precision: Precision, micro_steps: int) -> Cell:
        ranks = 1 if strategy == "single" else self.ranks
        # The same samples in every cell, and a micro-step of two on each rank where a step has four.
        batch = 2 * self.ranks * MICRO_STEPS[-1]
        asked = RunConfig(
            **_RUN | {"train_samples": max(_RUN["train_samples"], batch)},
            precision=precision,
            global_batch_size=batch,
            per_device_train_batch_size=batch // ranks // micro_steps,
        )
        config = resolved(asked, accelerator_visible=self.box.gpus > 0)
        return Cell(strategy, ranks, config, asked, repeat=1, time_limit_s=_TIME_LIMIT_S)

    def _run(self, cells: Sequence[Cell]) -> None:
        """Run cells that have not ended well, each once per call: what failed in an earlier call may run now."""
        left = [cell for cell in cells if cell.id not in self._asked]
        self._asked.update(cell.id for cell in left)
        if left and run_cells(left, self.root, self.box, retry=True, is_kept=self.is_kept, only_computes=True).stopped:
            raise KeyboardInterrupt


def _refuse_another_stack(root: Path, stack: dict[str, str | None], box: Box) -> None:
    """Runs that have a record are not repeated, so the records must be of this stack and device."""
    for path in find_runs(root):
        with contextlib.suppress(RecordError):
            environment = read_json(path / "environment.json")
            packages = environment.get("packages", {})
            if bool(environment.get("devices")) != (box.gpus > 0):
                where = "without a GPU" if box.gpus else "on GPUs"
                raise UserError(f"{root} has runs {where}, and these are others", "name another folder")
            if other := {name: packages.get(name) for name in stack if packages.get(name) != stack[name]}:
                raise UserError(f"{root} has runs of another stack ({_stack_text(other)})", "name another folder")


def _stack_text(stack: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in stack.items())


def _line(strategy: str, rows: Sequence[VerifyRow]) -> str:
    if all(row.kind == "equal" for row in rows):
        return f"{strategy}: computes what one process computes"
    return f"{strategy}: " + " | ".join(f"{row.place}: {row.says}" for row in rows if row.kind != "equal")


def _table(found: Verification) -> TextTable:
    places = list(dict.fromkeys(row.place for row in found.rows))
    kinds = {(row.strategy, row.place): row.kind for row in found.rows}
    lines = [[name, *(kinds.get((name, place), "-") for place in places)] for name in found.strategies]
    return TextTable(["strategy", *places], lines)


def _document(stack: dict[str, str | None], matrix: Matrix, found: Verification) -> dict[str, Any]:
    references = matrix.references.items()
    return {
        "stack": stack, "ranks": matrix.ranks, "on_gpu": matrix.box.gpus > 0, "agrees": found.agrees,
        "not_trusted": found.not_trusted, "not_verified": found.unverified,
        "tolerances": {precision: dataclasses.asdict(each.tolerance) for precision, each in references},
        "rows": [
            {"strategy": row.strategy, "precision": row.precision, "micro_steps": row.micro_steps,
             **dataclasses.asdict(row.verdict), "kind": row.kind, "says": row.says,
             "causes": [cause.id for cause in row.causes]}
            for row in found.rows
        ],
    }  # fmt: skip
