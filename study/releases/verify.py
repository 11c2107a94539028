"""`study verify`: which strategies compute what DDP computes, in the environment that this command is called in.

Each trains a tiny model for a few steps with this study's loop, with a step in one piece and in four, and is held
against one process without an engine.
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
from typing import Any

from study.config.errors import UserError
from study.config.flags import Precision, RunConfig, resolved
from study.config.strategies import STUDIED_STRATEGIES, read_strategy
from study.host.box import Box, this_box
from study.host.folders import cache_directory, folder_argument
from study.host.stacks import UNVERIFIED_VARIABLE, package_version
from study.predictor.boxes import whole
from study.records.directory import find_runs, read_json
from study.records.schema import RecordError
from study.releases.causes import PACKAGES, Cause, causes_of, races_of
from study.releases.verdict import Tolerance, Trace, Verdict, judge, tolerance_of, trace_at
from study.sweep.cell import Cell
from study.sweep.execute import run_cells
from study.sweep.plan import RANKS_WITHOUT_A_GPU
from study.sweep.progress import show_duration
from study.sweep.tables import print_tables, table_of

MICRO_STEPS = (1, 4)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "bf16-engine")
# In fp32 every strategy runs; half precision takes other paths through an engine, and a few strategies see them.
_HALF: dict[Precision, tuple[str, ...]] = {
    "bf16": ("ddp", "zero0", "zero2", "zero3"), "bf16-engine": ("zero1", "zero2", "zero3"),
}  # fmt: skip
# The first loss is before any update, the second behind one of any scale, the third tells of scales; the others show
# how far it goes. The rate does not warm up, and the norm is above 1 from the start: each step updates, and each clips.
# At this scale's own rate the steps overshoot at the batch of 8 ranks, and the rounding of DeepSpeed's Adam on the host
# grows with them beyond the tolerance.
_RUN: dict[str, Any] = {
    "task": "gpt-wikitext", "scale": "laptop", "max_steps": 6, "warmup_ratio": 0.0, "dropout": 0.0, "seed": 7,
    "train_samples": 256, "eval_samples": 8, "max_grad_norm": 0.5, "logging_steps": 1, "weight_decay": 0.1,
    "learning_rate": 1e-3,
}  # fmt: skip
# Generous: the first run on a machine also compiles an operator of DeepSpeed, and ranks may share cores.
_TIME_LIMIT_S = 900.0
# Where a race is known of this stack an equal run proves nothing. What engines that cannot run here do is no wrong
# training.
BY_LUCK = "equal, by luck"
_FINE = ("equal", "refuses", "not judged")


@dataclasses.dataclass(frozen=True)
class VerifyRow:
    """One cell of the matrix, and what came of it."""

    strategy: str
    precision: Precision
    micro_steps: int
    verdict: Verdict
    causes: tuple[Cause, ...] = ()

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
    add(
        "--world-size", type=lambda text: whole(text, 999, "number of ranks"), metavar="N",
        help="ranks; one for each GPU by default, or two without",
    )  # fmt: skip
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    add(
        "--runs-dir", type=folder_argument, metavar="DIR",
        help="keep the records there, and go on from them; else they are removed",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Exit status 0 where all that can run here agree, 1 where one does not, where nothing of DeepSpeed or not all that
    was named can run, or where the user stopped it."""
    os.environ[UNVERIFIED_VARIABLE] = "1"
    strategies, started = _strategies(options.only), time.monotonic()
    out = sys.stderr if options.json else sys.stdout
    stack = {name: package_version(name) for name in PACKAGES}
    rows: list[VerifyRow] = []
    needed = PACKAGES if any(read_strategy(name).deepspeed for name in strategies) else PACKAGES[1:]
    if lacking := [name for name in needed if stack[name] is None]:
        raise UserError(f"not installed here: {', '.join(lacking)}", "run: pip install -e '.[train]'")
    cache_directory()
    with contextlib.ExitStack() as held:
        root = options.runs_dir or Path(held.enter_context(_scratch()))
        box = this_box()
        _refuse_another_stack(root, stack, box)
        ranks = options.world_size or box.gpus or RANKS_WITHOUT_A_GPU
        if box.gpus and ranks > box.gpus:
            raise UserError(f"--world-size {ranks}, and this box has {box}", f"use {box.gpus} or less")
        matrix = Matrix(root.absolute(), box, stack, options.precision, ranks, chosen=bool(options.only))
        matrix.is_kept = options.runs_dir is not None
        if not any(map(matrix.cells, strategies)):
            raise UserError(f"{' and '.join(strategies)} have no {' or '.join(options.precision)}", "use fp32")
        print(f"{_named(stack)}; {matrix.where}", file=out, flush=True)
        for number, strategy in enumerate(strategies, start=1):
            found = list(matrix.rows(strategy))
            rows += found
            print(f"[{number}/{len(strategies)}] {_line(strategy, found)}", file=out, flush=True)
    bad = [name for name in strategies if any(row.strategy == name and not _is_fine(row) for row in rows)]
    cannot = _unverified(strategies, rows)
    agrees = None if not bad and _nothing_was_verified(strategies, cannot) else not bad
    if options.json:
        print(json.dumps(_document(stack, matrix, rows, agrees, bad, cannot), indent=2))
    else:
        print()
        print_tables(iter([_table(strategies, rows)]))
        print(f"\n{_answer(strategies, rows, bad, cannot)} ({show_duration(time.monotonic() - started)})")
    # What the user named and cannot run here was not verified either.
    return 0 if agrees and not (options.only and cannot) else 1


def _nothing_was_verified(strategies: Sequence[str], cannot: Sequence[str]) -> bool:
    """Of what has an engine of DeepSpeed's, where any was asked for."""
    engines = {name for name in strategies if read_strategy(name).deepspeed is not None}
    return bool(engines) and engines <= set(cannot)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="study-verify-")
    except OSError as error:
        raise UserError(f"there is no room for records ({error.strerror})", "name a folder with --runs-dir") from None


class Matrix:
    """Runs the cells of a strategy when it is asked for, and judges each against `single` in its precision."""

    def __init__(
        self,
        root: Path,
        box: Box,
        stack: Mapping[str, str | None],
        precisions: Sequence[Precision],
        ranks: int,
        *,
        chosen: bool,
    ):
        """`chosen` where the user named the strategies, so that none is spared a precision."""
        self.root, self.box, self._stack, self._precisions, self._chosen = root, box, stack, precisions, chosen
        self.is_kept = True
        self._asked = set[str]()
        self.ranks = ranks
        self.tolerances: dict[Precision, Tolerance] = {}

    @property
    def where(self) -> str:
        where = f"{self.ranks} rank{'s'[: self.ranks > 1]} on {'a GPU each' if self.box.gpus else 'processor cores'}"
        return where if self.ranks > 1 else f"{where}, so what goes wrong between ranks is not seen"

    def rows(self, strategy: str) -> Iterator[VerifyRow]:
        asked = self.cells(strategy)
        self._run([self._cell(strategy, *each) for each in asked])
        for precision, micro_steps in asked:
            single, tolerance = self._reference(precision)
            trace = trace_at(self.root / self._cell(strategy, precision, micro_steps).id)
            verdict = judge(trace, single, tolerance)
            if single.state != "ok":
                verdict = Verdict("not judged", reason=f"one process did not end well: {single.reason}")
            known = causes_of(self._stack, strategy, micro_steps, precision, verdict.differs)
            if verdict.kind == "equal":
                known = races_of(self._stack, strategy, micro_steps, precision, self.box.gpus > 0)
            yield VerifyRow(strategy, precision, micro_steps, verdict, known)

    def cells(self, strategy: str) -> list[tuple[Precision, int]]:
        """Its precisions and micro-steps; half precision with accumulation alone, where most has gone wrong."""
        whole: list[tuple[Precision, int]] = [("fp32", steps) for steps in MICRO_STEPS if "fp32" in self._precisions]
        half = [each for each in self._precisions if each in _HALF and self._has(strategy, each)]
        return whole + [(precision, MICRO_STEPS[-1]) for precision in half]

    def _has(self, strategy: str, precision: Precision) -> bool:
        if not self._chosen:
            return strategy in _HALF[precision]
        try:
            read_strategy(strategy).check_engine_flags(RunConfig(precision=precision))
        except UserError:
            return False
        return True

    def _reference(self, precision: Precision) -> tuple[Trace, Tolerance]:
        # Without an engine there is no bf16 of an engine.
        plain: Precision = "bf16" if precision == "bf16-engine" else precision
        single = self._cell("single", plain, 1)
        ddp = [self._cell("ddp", plain, steps) for steps in MICRO_STEPS if plain == "fp32" or steps > 1]
        self._run([single, *ddp])
        alone = trace_at(self.root / single.id)
        if precision not in self.tolerances:
            repeats = [trace_at(self.root / cell.id) for cell in ddp]
            self.tolerances[precision] = tolerance_of(precision, alone, repeats)
        return alone, self.tolerances[precision]

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
        """What has not ended well, once in a call: what an earlier one could not run, this box may."""
        left = [cell for cell in cells if cell.id not in self._asked]
        self._asked.update(cell.id for cell in left)
        if left and run_cells(left, self.root, self.box, retry=True, is_kept=self.is_kept, only_computes=True).stopped:
            raise KeyboardInterrupt


def _strategies(only: Sequence[str] | None) -> tuple[str, ...]:
    if unknown := next((name for name in only or () if name not in STUDIED_STRATEGIES[1:]), None):
        raise UserError(f"--only: {unknown!r} is not verified", f"use {', '.join(STUDIED_STRATEGIES[1:])}")
    return tuple(name for name in STUDIED_STRATEGIES[1:] if not only or name in only)


def _refuse_another_stack(root: Path, stack: dict[str, str | None], box: Box) -> None:
    """Records of an earlier call stand for runs that are not made again."""
    for path in find_runs(root):
        with contextlib.suppress(RecordError):
            environment = read_json(path / "environment.json")
            packages = environment.get("packages", {})
            if bool(environment.get("devices")) != (box.gpus > 0):
                where = "without a GPU" if box.gpus else "on GPUs"
                raise UserError(f"{root} holds runs {where}, and these are others", "name a folder of its own")
            if other := {name: packages.get(name) for name in stack if packages.get(name) != stack[name]}:
                raise UserError(f"{root} holds runs of another stack ({_named(other)})", "name a folder of its own")


def _named(stack: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in stack.items())


def _is_fine(row: VerifyRow) -> bool:
    return row.kind in _FINE


def _line(strategy: str, rows: Sequence[VerifyRow]) -> str:
    kinds = {row.kind for row in rows}
    if kinds == {"equal"}:
        return f"{strategy}: computes what one process computes"
    return f"{strategy}: " + " | ".join(f"{row.place}: {row.says}" for row in rows if row.kind != "equal")


def _table(strategies: Sequence[str], rows: Sequence[VerifyRow]) -> Any:
    places = list(dict.fromkeys(row.place for row in rows))
    kinds = {(row.strategy, row.place): row.kind for row in rows}
    lines = [[name, *(kinds.get((name, place), "-") for place in places)] for name in strategies]
    return table_of(["strategy", *places], lines)


def _unverified(strategies: Sequence[str], rows: Sequence[VerifyRow]) -> list[str]:
    """Those of which nothing could be run, or nothing be judged."""
    none = ("refuses", "not judged")
    return [name for name in strategies if all(row.kind in none for row in rows if row.strategy == name)]


def _answer(strategies: Sequence[str], rows: Sequence[VerifyRow], bad: Sequence[str], cannot: Sequence[str]) -> str:
    not_here = f" {', '.join(cannot)} cannot be judged here." if cannot else ""
    if _nothing_was_verified(strategies, cannot):
        return f"Nothing of DeepSpeed was verified.{not_here}"
    if not bad:
        return f"Every strategy that runs here computes what DDP computes.{not_here}"
    return f"Do not trust here: {', '.join(bad)}.{not_here}"


def _document(
    stack: dict[str, str | None], matrix: Matrix, rows: Sequence[VerifyRow], agrees: bool | None, bad: Sequence[str],
    cannot: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    return {
        "stack": stack, "ranks": matrix.ranks, "on_gpu": matrix.box.gpus > 0, "agrees": agrees, "not_trusted": bad,
        "not_verified": cannot,
        "tolerances": {precision: dataclasses.asdict(each) for precision, each in matrix.tolerances.items()},
        "rows": [
            {"strategy": row.strategy, "precision": row.precision, "micro_steps": row.micro_steps,
             **dataclasses.asdict(row.verdict), "kind": row.kind, "says": row.says,
             "causes": [cause.id for cause in row.causes]}
            for row in rows
        ],
    }  # fmt: skip
