"""`study verify --mine COMMAND`: some steps of a user's program, compared with plain training of its micro-batches.

The command runs as it is. A variable of the environment makes the receipt in it compare (recorder.py), and each rank
writes a record, which is read here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.config.printing import TextTable, print_page, print_result
from study.config.text import format_duration
from study.host.machine import detect_machine
from study.receipt.mine_record import (
    RECORD_VARIABLE,
    STAGES,
    STEPS_VARIABLE,
    RankRecord,
    RecordedDifference,
    read_records,
)
from study.sweep.launch import with_supervisor
from study.sweep.plan import RANKS_WITHOUT_A_GPU

_EQUAL, _DIFFERS, _NOT_COMPARABLE = 0, 1, 3
_LOG = "log.txt"
_TWO_LINES = "add the two lines of docs/receipt.md: receipt = Receipt(model, optimizer), and its steps around the loop"
# The last line of a traceback, other than the launcher's.
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w]+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*)$")
# First line of torchrun's report on a rank that has failed: a log line, or its own traceback.
_LAUNCHER_REPORT = re.compile(r"^(?:[EW]\d{4} |Traceback \(most recent call last\))")
_OF_LAUNCHER = ("ChildFailedError", "CalledProcessError", "SystemExit")
# A sum of weights within this of a number is that number.
_SAME_WEIGHT = 1e-3
_PLACES = {
    "start": "weights",
    "loss": "loss",
    "output": "output",
    "gradient": "gradient",
    "norm": "gradient norm",
    "clipping": "clipped gradient",
    "update": "update",
    "weight": "weight after the update",
}


def run(options: argparse.Namespace) -> int:
    """Run the program, compare it with plain training, and return the exit status."""
    command = mine_command(options)
    started = time.monotonic()
    with contextlib.ExitStack() as scope:
        folder = Path(options.runs_dir or scope.enter_context(tempfile.TemporaryDirectory(prefix="study-mine-")))
        _clear(folder)
        print_page([f"Running {options.steps} steps of: {shlex.join(command)}"], sys.stderr)
        status = _run_program(command, folder, options.steps)
        verdict = judge(folder, _script_name(command), options.steps, status)
    duration = format_duration(time.monotonic() - started)
    page = (f"{verdict.answer} ({duration})", *verdict.page())
    print_result(options.json, lambda: {"command": command, **verdict.document()}, page)
    return verdict.status


# --- The command.


def mine_command(options: argparse.Namespace) -> list[str]:
    """Return the command to run; raise UserError if it names a file or a program that does not exist."""
    try:
        words = shlex.split(options.mine)
    except ValueError as error:
        raise UserError(f"--mine: {error}", "quote the whole command once") from None
    if not words:
        raise UserError("--mine has no command", "give a script, or the command that launches it")
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None:
        _check_script(Path(script))
    if words[0] == script:
        return _launched(options, words)
    if options.config_file or options.world_size:
        flag = "--config_file" if options.config_file else "--world_size"
        raise UserError(f"{flag} goes with a script, and --mine has a command", "put it into that command")
    return [_program(words[0]), *words[1:]]


def _check_script(script: Path) -> None:
    if not script.is_file():
        raise UserError(f"--mine: there is no file {script}", "name a script from this folder")
    # The receipt may be in a module of its folder.
    if not any("Receipt" in file.read_text(encoding="utf-8", errors="replace") for file in _sources(script)):
        raise UserError(f"{script} has no receipt", _TWO_LINES)


def _sources(script: Path) -> Iterator[Path]:
    yield script
    yield from script.parent.glob("*.py")
    yield from script.parent.glob("*/*.py")


def _launched(options: argparse.Namespace, words: list[str]) -> list[str]:
    """Return the launch of a script: by Accelerate with a config file, else by torchrun."""
    ranks = options.world_size
    if options.config_file:
        if not Path(options.config_file).is_file():
            raise UserError(f"--config_file: there is no file {options.config_file}", "name a file of Accelerate")
        chosen = ["--num_processes", str(ranks)] if ranks else []
        launcher = ["accelerate.commands.launch", "--config_file", options.config_file, *chosen]
    else:
        ranks = ranks or detect_machine().gpus or RANKS_WITHOUT_A_GPU
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [sys.executable, "-m", *launcher, *words]


def _program(name: str) -> str:
    """Return a program of the command line; one of this interpreter's folder if the shell finds none."""
    installed = Path(sys.executable).parent / name
    program = shutil.which(name) or (str(installed) if installed.is_file() else None)
    if program is None:
        raise UserError(f"--mine: there is no program {name}", "give a script, or the command that launches it")
    return program


def _script_name(command: Sequence[str]) -> str:
    return next((word for word in command if word.endswith(".py")), command[0])


# --- The run.


def _clear(folder: Path) -> None:
    """Remove the records of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("rank-*.json"):
        file.unlink()


def _run_program(command: list[str], folder: Path, steps: int) -> int:
    """Run the command with its output in a file; no process of it survives this call."""
    environment = os.environ | {RECORD_VARIABLE: str(folder.absolute()), STEPS_VARIABLE: str(steps)}
    with (
        (folder / _LOG).open("wb") as log,
        subprocess.Popen(
            with_supervisor(command), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as supervisor,
    ):
        assert supervisor.stdin is not None
        try:
            return supervisor.wait()
        finally:
            # It ends all processes below it.
            supervisor.stdin.close()


def last_error(log: Path) -> str:
    """Return the last line of a program's own error, or of its output."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [match[1] for line in lines if (match := _ERROR.match(line)) and not _is_of_launcher(match[1])]
    printed = list(itertools.takewhile(lambda line: not _LAUNCHER_REPORT.match(line), lines))
    return (errors or printed or ["no output"])[-1][:200]


def _is_of_launcher(line: str) -> bool:
    return any(name in line.split(":")[0] for name in _OF_LAUNCHER)


# --- The verdict.


@dataclasses.dataclass(frozen=True)
class MineVerdict:
    """Verdict on the records of all ranks."""

    status: int
    answer: str
    records: Sequence[RankRecord]

    def page(self) -> Iterator[str | TextTable]:
        """Yield the facts, the figures of each step, and the figures without a comparison."""
        first = self.records[0]
        if not first.engine:
            return
        micro_batches = max((len(step.inputs_sha256) for it in self.records for step in it.steps), default=0)
        yield (
            f"{first.model}, {first.trained_parameters:,} trained parameters, {first.precision}, {first.optimizer};"
            f" {first.engine}, {_count(first.ranks, 'rank')},"
            f" {_count(micro_batches, 'micro-batch', 'es')} a step and rank"
        )
        if any(record.steps for record in self.records):
            yield ""
            yield _table(self.records)
        yield from _remarks(self.records)
        yield from (f"not compared: {text}" for text in first.left_out)
        if any(step.loss_weights is None for step in first.steps):
            yield "not compared: the loss, which the program computes outside of the model, and its division"

    def document(self) -> dict[str, Any]:
        records = [record.model_dump(mode="json") for record in self.records]
        return {"answer": self.answer, "exit_status": self.status, "ranks": records}


def judge(folder: Path, script: str, steps: int, status: int) -> MineVerdict:
    """Return the verdict on a program that has ended; raise UserError if it did not make the steps."""
    records = read_records(folder)
    obstacle = next((record for record in records if record.state == "not comparable"), None)
    if obstacle is not None:
        return MineVerdict(_NOT_COMPARABLE, f"NOT COMPARABLE: {obstacle.reason}", records)
    _check_ended(records, folder, script, steps, status)
    faults = [*_unchanged(records), *_differences(records), *_divisions(records), *_same_data(records)]
    if faults:
        return MineVerdict(_DIFFERS, f"FAIL: {'; '.join(faults)}", records)
    return MineVerdict(_EQUAL, f"PASS: {_equal_text(records, script)}", records)


def _check_ended(records: Sequence[RankRecord], folder: Path, script: str, steps: int, status: int) -> None:
    log = folder / _LOG
    if not records:
        if status:
            raise UserError(
                f"{script} failed before its receipt: {last_error(log)}", "run it without this command first"
            )
        raise UserError(f"{script} ended without a receipt", _TWO_LINES)
    is_complete = all(record.state == "complete" for record in records)
    if is_complete and len(records) == records[0].ranks:
        return
    done = min(len(record.steps) for record in records)
    if status:
        raise UserError(f"{script} failed after {_count(done, 'step')}: {last_error(log)}", "mend that first")
    problem = f"{script} ended after {done} of {_count(steps, 'step')}"
    raise UserError(problem, f"give it more data, or --steps {done}" if done else "give it more data")


def _equal_text(records: Sequence[RankRecord], script: str) -> str:
    first = records[0]
    compared = ["losses" if first.steps[0].loss_weights else "outputs", "gradients"]
    compared += ["gradient norms"] * (first.steps[0].norm is not None)
    compared += ["updates"] * (not first.left_out)
    figures = f"{', '.join(compared[:-1])} and {compared[-1]}"
    equal = f"{_count(len(first.steps), 'step')} of {script} equal plain training of the same micro-batches: {figures}"
    return (
        equal if first.ranks > 1 else f"{equal}; one rank exchanges nothing, so faults between ranks are not detected"
    )


def _unchanged(records: Sequence[RankRecord]) -> Iterator[str]:
    """Yield the trained weights that no optimizer changes."""
    first = records[0]
    if not first.unchanged:
        return
    if len(first.unchanged) == first.trained_tensors:
        yield (
            "the optimizer has no trained weight of this model, and none changes: make it after the engine, from"
            " model.parameters()"
        )
    else:
        count = f"{len(first.unchanged)} of {first.trained_tensors}"
        yield (
            f"{count} trained weights are in no optimizer, and no step changes them, such as {first.unchanged[0]}: give"
            " them to the optimizer, or set requires_grad to False"
        )


def _differences(records: Sequence[RankRecord]) -> Iterator[str]:
    """Yield the earliest difference of all ranks."""
    differences = [(it.difference, it.rank) for it in records if it.difference is not None]
    if differences:
        yield describe(*min(differences, key=lambda pair: (pair[0].step, STAGES.index(pair[0].stage), pair[1])))


def describe(difference: RecordedDifference, rank: int) -> str:
    """Return the first difference in one line."""
    where = f"step {difference.step}, {_PLACES[difference.stage]}"
    if difference.stage in ("loss", "output"):
        where = f"step {difference.step}, {difference.tensor}"
    elif difference.tensor:
        where += f" of {difference.tensor}"
    where += f" on rank {rank}"
    if difference.tensors > 1:
        where += f" (and {difference.tensors - 1} more of {difference.compared} tensors)"
    return f"{where}: {_what(difference)}{_meaning(difference, rank)}"


def _what(difference: RecordedDifference) -> str:
    if difference.size is None:
        return "not zero, as in plain training" if difference.is_finite else "not finite"
    if difference.weights is not None:
        ranks = [
            f"rank {rank}: {' '.join(f'{round(weight, 2) + 0.0:g}' for weight in row)}"
            for rank, row in enumerate(difference.weights)
        ]
        return f"each micro-batch counts ({'; '.join(ranks)}), right is 1"
    if difference.factor is not None:
        return f"{difference.factor:.3g} times that of plain training"
    reference = "rank 0's" if difference.stage == "start" else "it in plain training"
    return f"differs by {difference.size:.2g} of {reference} (rounding: {difference.allowed:.1g})"


def _meaning(difference: RecordedDifference, rank: int) -> str:
    """Return the reason of a difference if the figures leave one."""
    weights = difference.weights
    if difference.keeps_last:
        return ": it has the gradient of the step before, too, which zero_grad() would have cleared"
    if difference.stage == "start":
        return ": the ranks train different weights"
    if weights is None or len(weights) == 1:
        return ""
    is_alone = all(abs(weight) < _SAME_WEIGHT for row in (*weights[:rank], *weights[rank + 1 :]) for weight in row)
    return ": its gradients are not averaged with those of other ranks" if is_alone else ""


def _divisions(records: Sequence[RankRecord]) -> Iterator[str]:
    """Yield the first step whose micro-batches' losses are not divided by their number, or twice, or not counted."""
    for record in records:
        for number, step in enumerate(record.steps, start=1):
            weights = step.loss_weights or ()
            if len(weights) > 1 and not step.divides_by_tokens and (fault := _wrong_division(weights)):
                yield f"step {number}: {fault}"
                return


def _wrong_division(weights: Sequence[float]) -> str | None:
    count, total = len(weights), sum(weights)
    for factor, how in ((count, "not divided by their number"), (1 / count, "divided by their number twice")):
        if abs(total / factor - 1) < _SAME_WEIGHT:
            return (
                f"the losses of {count} micro-batches are {how}: the gradient is {factor:.3g} times that of their mean"
                " (if the model's loss is the mean of its micro-batch)"
            )
    if total and min(map(abs, weights)) < _SAME_WEIGHT * abs(total):
        return f"the losses of {count} micro-batches count {_weights_text(weights)}"
    return None


def _weights_text(weights: Sequence[float]) -> str:
    return " ".join(f"{round(weight, 3) + 0.0:g}" for weight in weights)


def _remarks(records: Sequence[RankRecord]) -> Iterator[str]:
    """Yield the program's decisions that plain training has followed."""
    first = records[0].steps[0] if records[0].steps else None
    weights = first.loss_weights if first is not None else None
    if first is None or weights is None or first.divides_by_tokens or _wrong_division(weights):
        return
    if any(abs(weight * len(weights) - 1) > _SAME_WEIGHT for weight in weights):
        text = _weights_text(weights)
        yield f"the losses of a step's micro-batches count {text} in this program, and so in plain training"


def _same_data(records: Sequence[RankRecord]) -> Iterator[str]:
    """Yield a fault if two ranks had the same inputs in all steps."""
    first_ranks: dict[tuple[tuple[str, ...], ...], int] = {}
    for record in records:
        inputs = tuple(tuple(sorted(step.inputs_sha256)) for step in record.steps)
        first = first_ranks.setdefault(inputs, record.rank)
        if first != record.rank and any(inputs):
            steps = "all steps" if len(inputs) > 1 else "the step"
            pair = f"ranks {first} and {record.rank}"
            yield f"{pair} had the same inputs in {steps}: the sampler does not divide the data"
            return


def _table(records: Sequence[RankRecord]) -> TextTable:
    rows = []
    for number, steps in enumerate(zip(*(record.steps for record in records), strict=False), start=1):
        means = [_mean([step.loss for step in steps]), _mean([step.plain_loss for step in steps])]
        norm = "-" if steps[0].norm is None else f"{steps[0].norm:.6g}"
        rows.append([str(number), *means, norm, f"{steps[0].plain_norm:.6g}"])
    return TextTable(["step", "loss", "plain loss", "gradient norm", "plain norm"], rows)


def _mean(numbers: Sequence[float | None]) -> str:
    finite = [number for number in numbers if number is not None]
    return f"{sum(finite) / len(finite):.6f}" if finite and len(finite) == len(numbers) else "-"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
