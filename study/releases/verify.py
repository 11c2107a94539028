"""`study verify`: check that each strategy reproduces DDP with the installed packages.

Each strategy trains a tiny model for a few steps in this study's loop, with accumulation 1 and 4, and is compared with
one process without an engine. The runs import the engines under test and base packages only.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from study.compositions import command as compositions
from study.config.errors import UserError
from study.config.flags import Precision, RunConfig, resolve_config
from study.config.places import IMPORT_ROOT, install_command
from study.config.printing import print_page, print_result
from study.config.strategies import STUDIED_STRATEGIES, read_strategy
from study.host.folders import cache_directory, folder_argument
from study.host.machine import Machine, detect_machine
from study.host.stacks import ENGINE_PACKAGES, ENGINES_ONLY_VARIABLE, UNVERIFIED_VARIABLE, is_at_least, package_version
from study.predictor.hardware import parse_int
from study.records.directory import find_runs, read_json
from study.records.schema import RecordError
from study.releases.causes import PACKAGES, find_causes, find_races, known_faults
from study.releases.judged_stack import UNTESTED
from study.releases.verdict import Reference, Verdict, reference_precision, trace_at
from study.releases.verification import (
    ONE_RANK,
    Option,
    Verification,
    VerifyAnswer,
    VerifyRow,
    fault_text,
    stack_text,
)
from study.sweep.cell import Cell
from study.sweep.execute import run_cells
from study.sweep.plan import RANKS_WITHOUT_A_GPU

MICRO_STEPS = (1, 4)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "bf16-engine")
# Only on request: few CPUs have fp16, and its tolerances are derived from its bits, not measured.
ON_REQUEST: tuple[Precision, ...] = ("fp16", "fp16-engine")
QUICK_STRATEGIES = ("zero1", "zero2", "zero3")
# Flags of the runs with an option. DeepSpeed's stages would clip Muon's updates instead of gradients.
_FLAGS: dict[Option, dict[str, Any]] = {
    "": {},
    "muon": {"optimizer": "muon", "max_grad_norm": 0.0},
    "lora": {"peft": "lora"},
}
# Every strategy runs in fp32. Half precision uses other code paths of an engine, which a few strategies cover.
_HALF: dict[Precision, tuple[str, ...]] = {
    "bf16": ("ddp", "zero0", "zero2", "zero3"),
    "bf16-engine": ("zero1", "zero2", "zero3"),
    "fp16": ("ddp", "zero0"),
    "fp16-engine": ("zero1", "zero2", "zero3"),
}
# The first loss precedes any update, the second follows an update that is the same at any scale, and the third shows
# the scale; later steps show the size of a difference. Without warm-up, and with a norm above 1 from the start, each
# step updates and clips. With the learning rate of this scale the steps overshoot at the batch of 8 ranks, and the
# rounding of DeepSpeed's CPU Adam grows beyond the tolerance.
_RUN: dict[str, Any] = {
    "task": "gpt-wikitext",
    "scale": "laptop",
    "max_steps": 6,
    "warmup_ratio": 0.0,
    "dropout": 0.0,
    "seed": 7,
    "train_samples": 256,
    "eval_samples": 8,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "weight_decay": 0.1,
    "learning_rate": 1e-3,
}
# Before it, the steps of DeepSpeed's Muon without ZeRO were those of SGD (issue 8441).
_MUON_SINCE = "0.19.7"
# Measured on two cores: imports, then a run of two ranks as a fork.
_START_S, _CELL_S = 25, 6
# Measured as well: 6 min 43 s in place of 70 s with --quick, the first time after an installation.
_COMPILE_MIN = 6
_FIRST_TIME = f"the first time {_COMPILE_MIN} more, since DeepSpeed compiles an operator"
# The first run on a machine also compiles a DeepSpeed operator, and ranks may share cores.
_TIME_LIMIT_S = 900.0


EPILOG = """\
Trains a tiny GPT under one process, under DDP and under each strategy, with one and with four micro-batches per step,
on the installed stack, and compares the loss and gradient norm of every step and the final weights. PASS: they differ
by no more than rounding. FAIL names strategy, set-up and the known cause. Exit status: 0 PASS, 1 FAIL, 3 if nothing was
compared. --mine runs your program instead, which needs a receipt (docs/receipt.md), and names the first step and tensor
that differ; its exit status is 2 if the program makes no receipt or fails.
"""
_MINE_STEPS = 3
# Flags that choose among this study's trainings.
_NOT_OF_MINE = ("quick", "only", "precision", "optimizer", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help=f"zero1, zero2 and zero3 in fp32: 1 to 2 min on two cores, {_FIRST_TIME}")
    add("--only", nargs="+", metavar="STRATEGY", help="only these strategies, in every precision that they support")
    precisions = f"only these precisions; default: {', '.join(PRECISIONS)}"
    add("--precision", nargs="+", choices=(*PRECISIONS, *ON_REQUEST), help=precisions)
    add("--optimizer", choices=("muon",), help="also with DeepSpeed's Muon, in fp32")
    add("--peft", choices=("lora",), help="also with LoRA adapters, in fp32; needs peft")
    ranks = "number of ranks; default: one per GPU, or two without a GPU"
    add("--world_size", type=lambda text: parse_int(text, 999, "number of ranks"), metavar="N", help=ranks)
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    runs_dir = "keep the records in this folder and reuse them; default: a temporary folder"
    add("--runs_dir", type=folder_argument, metavar="DIR", help=runs_dir)
    compositions.add_arguments(parser.add_argument_group("combinations of features"))
    _add_arguments_of_mine(parser.add_argument_group("your program, with a receipt"))


def _add_arguments_of_mine(parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    command = "a script, or the command that launches it, in quotes: each of its steps is compared with plain training"
    add("--mine", metavar="COMMAND", help=f'{command}, such as "accelerate launch --config_file zero2.yaml train.py"')
    add(
        "--config_file",
        metavar="FILE",
        help="of --mine SCRIPT: Accelerate's file; default: torchrun launches the script",
    )
    steps = f"of --mine: optimizer steps after which the program ends; default: {_MINE_STEPS}"
    add("--steps", type=lambda text: parse_int(text, 1000, "number of steps"), metavar="N", help=steps)


def run(options: argparse.Namespace, run_mine: Callable[[argparse.Namespace], int]) -> int:
    """Verify the strategies; return exit status 0 if all that can run here agree, and 1 if one diverges.

    It is 3 if no DeepSpeed engine can run here, or if a strategy or an option that the user asked for cannot run.
    `run_mine` verifies a program of the user's.
    """
    if _requests_mine(options):
        return run_mine(options)
    if compositions.requests_combinations(options):
        return compositions.run(options)
    os.environ.update({UNVERIFIED_VARIABLE: "1", ENGINES_ONLY_VARIABLE: "1"})
    started = time.monotonic()
    strategies = _selected_strategies(options)
    extras = tuple(cast(Option, option) for option in (options.optimizer, options.peft) if option)
    stack = {name: package_version(name) for name in PACKAGES}
    _check_packages(strategies, stack, extras)
    cache_directory()
    with contextlib.ExitStack() as scope:
        root = options.runs_dir or Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="study-verify-")))
        matrix = _plan_matrix(options, root, stack, extras)
        cells = _planned_cells(matrix, strategies)
        print_page([f"Testing {stack_text(stack)}: {_tested_text(matrix, strategies, len(cells))}"], sys.stderr)
        _check_imports(min(strategies, key=lambda name: read_strategy(name).deepspeed is None))
        if options.quick:
            matrix.run(strategies)
        verification = _verification(matrix, strategies)
    answer = VerifyAnswer(
        stack=stack,
        on_gpu=matrix.box.gpus > 0,
        verification=verification,
        tolerances={key: reference.tolerance for key, reference in matrix.references.items()},
        not_tested=_not_tested(options, matrix, strategies),
        seconds=time.monotonic() - started,
    )
    print_result(options.json, lambda: answer.document, answer.page())
    if verification.agrees is False:
        return 1
    # A strategy or an option that the user asked for, and that cannot run here, is not verified.
    unverified = [name for name in verification.unverified if options.only or name not in strategies]
    return UNTESTED if verification.agrees is None or unverified else 0


def _requests_mine(options: argparse.Namespace) -> bool:
    """Whether the command line names a program of the user's; raise UserError if other flags contradict it."""
    if options.mine is None:
        if flag := next((name for name in ("config_file", "steps") if getattr(options, name) is not None), None):
            raise UserError(f"--{flag} is of --mine", "add --mine COMMAND, or leave it out")
        return False
    contradicting = [name for name in _NOT_OF_MINE if getattr(options, name)]
    if contradicting or compositions.requests_combinations(options):
        flag = f"--{contradicting[0]}" if contradicting else "a combination of features"
        raise UserError(f"{flag} does not go with --mine, which runs your program", "leave one of them out")
    options.steps = options.steps or _MINE_STEPS
    return True


def _selected_strategies(options: argparse.Namespace) -> list[str]:
    """Return the requested strategies in the study's order; raise UserError if one is not verified."""
    verifiable = STUDIED_STRATEGIES[1:]
    if unknown := next((name for name in options.only or () if name not in verifiable), None):
        raise UserError(f"--only: {unknown!r} is not verified", f"use {', '.join(verifiable)}")
    selected = options.only or (QUICK_STRATEGIES if options.quick else verifiable)
    return [name for name in verifiable if name in selected]


def _plan_matrix(
    options: argparse.Namespace, root: Path, stack: dict[str, str | None], extras: Sequence[Option]
) -> VerifyMatrix:
    """Return the matrix for this machine; raise UserError if the folder or the number of ranks does not suit it."""
    box = detect_machine()
    _check_same_stack(root, stack, box)
    ranks = options.world_size or box.gpus or RANKS_WITHOUT_A_GPU
    if box.gpus and ranks > box.gpus:
        raise UserError(f"--world_size {ranks} exceeds this machine, which has {box}", f"use {box.gpus} or less")
    precisions = options.precision or (("fp32",) if options.quick else PRECISIONS)
    matrix = VerifyMatrix(root.absolute(), box, stack, precisions, ranks, chosen=bool(options.only), extras=extras)
    matrix.is_kept = options.runs_dir is not None
    return matrix


def _planned_cells(matrix: VerifyMatrix, strategies: Sequence[str]) -> list[tuple[Precision, int, Option]]:
    """Return the cells of the strategies; raise UserError if there are none, or none with a requested option."""
    cells = [cell for strategy in strategies for cell in matrix.cells(strategy)]
    if not cells:
        requested = f"{' or '.join(matrix.precisions)} of {' and '.join(strategies)}"
        raise UserError(f"verify does not run {requested} on this device", "use fp32")
    if unsupported := set(matrix.extras) - {option for _, _, option in cells}:
        raise UserError(f"{' and '.join(strategies)} have no {unsupported.pop()}", f"use {QUICK_STRATEGIES[0]}")
    return cells


def _tested_text(matrix: VerifyMatrix, strategies: Sequence[str], cells: int) -> str:
    """Return the strategies, ranks and accumulation of a call, and its duration without a GPU."""
    which = f"{len(strategies)} strategies" if len(strategies) > 3 else ", ".join(strategies)
    tested = f"{which} on {matrix.where}, with accumulation {' and '.join(map(str, MICRO_STEPS))}"
    if not matrix.box.gpus:
        minutes = math.ceil((_START_S + _CELL_S * cells) / 60)
        tested += f"; about {minutes} min on two cores, {_FIRST_TIME}"
    return tested


def _verification(matrix: VerifyMatrix, strategies: Sequence[str]) -> Verification:
    """Return the verdicts on the strategies, and print those of each one as soon as it has run."""
    rows = list[VerifyRow]()
    for number, strategy in enumerate(strategies, start=1):
        strategy_rows = list(matrix.rows(strategy))
        rows += strategy_rows
        wrong = [f"{row.option} {row.place}: {row.says}".lstrip() for row in strategy_rows if row.kind != "equal"]
        outcome = " | ".join(wrong) or "reproduces one process"
        print_page([f"[{number}/{len(strategies)}] {strategy}: {outcome}"], sys.stderr)
    return Verification(strategies, matrix.ranks, rows)


def _not_tested(options: argparse.Namespace, matrix: VerifyMatrix, strategies: Sequence[str]) -> list[str]:
    """Return a line for each known fault of other strategies, and one for the precisions that only a request tests."""
    on_gpu = matrix.box.gpus > 0
    lines = [
        f"not tested: {', '.join(cause.strategies)} ({fault_text(cause)})"
        for cause in known_faults(matrix.stack, on_gpu)
        if not set(cause.strategies) & set(strategies)
    ]
    if on_gpu and not options.quick and not set(ON_REQUEST) & set(matrix.precisions):
        lines.append(f"not tested: fp16 (--precision {' '.join(ON_REQUEST)} tests it)")
    return lines


def _check_packages(strategies: Sequence[str], stack: Mapping[str, str | None], extras: Sequence[Option]) -> None:
    uses_deepspeed = "muon" in extras or any(read_strategy(name).deepspeed for name in strategies)
    needed = [*(PACKAGES if uses_deepspeed else PACKAGES[1:]), *ENGINE_PACKAGES, *["peft"] * ("lora" in extras)]
    if lacking := [name for name in dict.fromkeys(needed) if package_version(name) is None]:
        # `.[train]` would replace the releases under test.
        fix = f"install {' and '.join(lacking)} next to the releases under test"
        if not any(stack.values()):
            fix = f"install the releases to test, or those of this study: {install_command('train', missing=lacking)}"
        raise UserError(f"not installed here: {', '.join(lacking)}", fix)
    if "muon" in extras and not is_at_least("deepspeed", _MUON_SINCE):
        problem = f"deepspeed {stack['deepspeed']} has no Muon outside ZeRO, so no run of one process to compare with"
        raise UserError(problem, f"leave out --optimizer muon, or use {_MUON_SINCE} or later")


class VerifyMatrix:
    """Cells of strategies, precisions and accumulation; runs them on demand and compares each with `single`."""

    def __init__(
        self,
        root: Path,
        box: Machine,
        stack: Mapping[str, str | None],
        precisions: Sequence[Precision],
        ranks: int,
        *,
        chosen: bool,
        extras: Sequence[Option] = (),
    ):
        """Plan the cells; `chosen` strategies, which the user named, run in every precision that they support."""
        self.root, self.box, self.ranks = root, box, ranks
        self.stack, self.precisions, self.extras = stack, precisions, extras
        self._chosen = chosen
        self.is_kept = True
        self._asked = set[str]()
        self.references: dict[tuple[Precision, Option], Reference] = {}

    @property
    def where(self) -> str:
        where = f"{self.ranks} rank{'s'[: self.ranks > 1]} on {'a GPU each' if self.box.gpus else 'CPU cores'}"
        return where if self.ranks > 1 else f"{where} ({ONE_RANK})"

    def run(self, strategies: Sequence[str]) -> None:
        """Run the cells of the strategies and their reference cells, in one sweep that imports the engines once."""
        cells = [(strategy, *cell) for strategy in strategies for cell in self.cells(strategy)]
        pairs = dict.fromkeys((precision, option) for _, precision, _, option in cells)
        needed = [cell for pair in pairs for cell in self._reference_cells(*pair)]
        needed += [self._cell(*cell) for cell in cells]
        # Each once per process, those without a successful record: the failures of an earlier call are retried.
        todo = list({cell.id: cell for cell in needed if cell.id not in self._asked}.values())
        self._asked.update(cell.id for cell in todo)
        if todo and run_cells(todo, self.root, self.box, retry=True, is_kept=self.is_kept, allow_forks=True).stopped:
            raise KeyboardInterrupt

    def rows(self, strategy: str) -> Iterator[VerifyRow]:
        """Run the cells of a strategy and yield their verdicts."""
        self.run([strategy])
        for precision, micro_steps, option in self.cells(strategy):
            if (precision, option) not in self.references:
                single, *ddp = (trace_at(self.root / cell.id) for cell in self._reference_cells(precision, option))
                self.references[precision, option] = Reference(precision, single, tuple(ddp))
            reference = self.references[precision, option]
            verdict = reference.judge(trace_at(self.root / self._cell(strategy, precision, micro_steps, option).id))
            if reference.single.ending.state != "ok":
                reason = reference.single.ending.reason
                verdict = Verdict("not judged", reason=f"the run of one process failed: {reason}")
            optimizer = "muon" if option == "muon" else "adamw"
            causes = find_causes(self.stack, strategy, micro_steps, precision, verdict.differs, optimizer)
            if verdict.kind == "equal":
                causes = find_races(self.stack, strategy, micro_steps, precision, self.box.gpus > 0)
            yield VerifyRow(strategy, precision, micro_steps, verdict, causes, option)

    def cells(self, strategy: str) -> list[tuple[Precision, int, Option]]:
        """Return precision, accumulation and option of each cell; half precision only with accumulation."""
        options = [option for option in self.extras if _supports(strategy, **_FLAGS[option])]
        half = [
            name
            for name in self.precisions
            if name in _HALF and (_supports(strategy, precision=name) if self._chosen else strategy in _HALF[name])
        ]
        return [
            *(("fp32", steps, "") for steps in MICRO_STEPS if "fp32" in self.precisions),
            *(("fp32", steps, option) for option in options for steps in MICRO_STEPS),
            *((precision, MICRO_STEPS[-1], "") for precision in half),
        ]

    def _reference_cells(self, precision: Precision, option: Option) -> list[Cell]:
        plain = cast(Precision, reference_precision(precision))
        ddp = [self._cell("ddp", plain, steps, option) for steps in MICRO_STEPS if plain == "fp32" or steps > 1]
        return [self._cell("single", plain, 1, option), *ddp]

    def _cell(self, strategy: str, precision: Precision, micro_steps: int, option: Option) -> Cell:
        ranks = 1 if strategy == "single" else self.ranks
        # Every cell trains on the same samples; with four accumulation steps a micro-batch has two of them.
        batch = 2 * self.ranks * MICRO_STEPS[-1]
        request = RunConfig(
            **_RUN | {"train_samples": max(_RUN["train_samples"], batch)} | _FLAGS[option],
            precision=precision,
            global_batch_size=batch,
            per_device_train_batch_size=batch // ranks // micro_steps,
        )
        config = resolve_config(request, accelerator_visible=self.box.gpus > 0)
        return Cell(strategy, ranks, config, request, repeat=1, time_limit_s=_TIME_LIMIT_S)


def _check_imports(strategy: str) -> None:
    """Raise UserError with Python's message if the engines of a strategy cannot be imported together."""
    call = f"stacks.import_libraries(strategies.read_strategy({strategy!r}))"
    code = f"from study.config import strategies; from study.host import stacks; {call}"
    result = subprocess.run([sys.executable, "-c", code], cwd=IMPORT_ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        problem = f"the packages under test cannot be imported together: {result.stderr.strip().splitlines()[-1]}"
        raise UserError(problem, "install releases that support each other")


def _supports(strategy: str, **flags: Any) -> bool:
    try:
        read_strategy(strategy).check_engine_flags(RunConfig(**flags))
    except UserError:
        return False
    return True


def _check_same_stack(root: Path, stack: dict[str, str | None], box: Machine) -> None:
    """Raise UserError if the folder has records of another stack or device: existing records are reused."""
    for path in find_runs(root):
        with contextlib.suppress(RecordError):
            environment = read_json(path / "environment.json")
            packages = environment.get("packages", {})
            if bool(environment.get("devices")) != (box.gpus > 0):
                where = "without a GPU" if box.gpus else "on GPUs"
                raise UserError(f"{root} has runs {where}, unlike this machine", "name another folder")
            if differing := {name: packages.get(name) for name in stack if packages.get(name) != stack[name]}:
                raise UserError(f"{root} has runs of another stack ({stack_text(differing)})", "name another folder")
