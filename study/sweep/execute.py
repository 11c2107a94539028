"""Run the cells of a suite one after another, each in separate processes, and record each of them."""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from study.config import errors, places, strategies
from study.config.text import format_duration
from study.host import folders, machine, slurm, stacks
from study.records import lock, schema
from study.records.directory import read_attempt, read_json, utc_now, write_json
from study.records.outcome import Outcome, raise_on_signals
from study.sweep import cell_outcome, fork_server
from study.sweep.cell import Cell
from study.sweep.forecast import NOTES, earlier_durations, expected_s
from study.sweep.launch import kill_stale_processes, lock_sweep_directory, run_cell
from study.sweep.search import Search, new_and_tried, pending_runs

# Ctrl-C, `kill` and a closed terminal all end the current run in an orderly way.
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ADDRESS = re.compile(r"(--main_process_ip )\S+")


class Stopped(KeyboardInterrupt):
    """Ctrl-C, a signal with the same meaning, or a full disk: no further cell begins."""


def run_cells(
    cells: Sequence[Cell | Search],
    root: Path,
    box: machine.Machine,
    *,
    retry: bool = False,
    time_budget_s: float | None = None,
    time_limit_s: float = math.inf,
    is_kept: bool = True,
    allow_forks: bool = False,
) -> Sweep:
    """Run all unanswered cells and searches in the given order, those that were tried before last.

    Otherwise a cell that hangs until the call is over would block the others in every call. `root` has one directory
    per cell; `is_kept` is False if the caller deletes it, so that no call can resume. `allow_forks` means that
    memory and time are not measured, so runs may be forks.
    """
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    # A sweep that cannot train leaves no folder behind.
    if cells and not root.exists():
        stacks.check_training_packages()
    with lock_sweep_directory(root):
        ended = kill_stale_processes(root)
        if (job := slurm.current_job()) is not None:
            slurm.check_shared_folder(job, root)
        new, tried = new_and_tried(cells, root, retry)
        if to_do := [*new, *tried]:
            stacks.check_training_packages()
        searches = sum(isinstance(item, Search) for item in to_do)
        progress = SweepProgress(len(to_do), len(cells) - len(to_do), searches)
        with progress.bars, raise_on_signals(Stopped("stopped"), *_STOPS):
            if ended:
                progress.show(f"notice: ended {ended} processes of an earlier sweep")
            sweep = Sweep(root, box, progress, retry, deadline, time_limit_s, allow_forks)
            try:
                sweep.run(to_do)
            except Stopped as stop:
                progress.show(str(stop))
                sweep.stopped = True
            finally:
                sweep.forks.close()
            # A full disk was reported above.
            with suppress(OSError):
                note_searches(cells, root)
            sweep.pending = len(to_do) - sweep.finished
            if sweep.pending:
                items = "cells and searches" if any(isinstance(item, Search) for item in cells) else "cells"
                hint = "; run the same command again to continue" if is_kept else ""
                progress.show(f"{sweep.pending} of {len(cells)} {items} are left{hint}")
            return sweep


@dataclasses.dataclass
class Sweep:
    """State and result of one call of `run_cells`."""

    root: Path
    box: machine.Machine
    progress: SweepProgress
    retry: bool
    deadline: float | None
    # No cell has more, whatever its own limit.
    time_limit_s: float
    allow_forks: bool
    finished: int = 0
    pending: int = 0
    stopped: bool = False
    # Cells whose folder is not a run's or is in use: they were not run.
    refused: int = 0
    forks: fork_server.ForkServer = dataclasses.field(default_factory=fork_server.ForkServer)

    def run(self, to_do: Sequence[Cell | Search]) -> None:
        """Run the items and count the finished ones: a cell that has run, a search that needs no further probe."""
        ran: list[str] = []
        for item in to_do:
            ran_before = len(ran)
            for cell in pending_runs(item, self.root, self.retry):
                if cell.id in ran:  # also a probe of another search
                    continue
                expected = 0.0 if self.deadline is None else expected_s(cell, earlier_durations(self.root))
                if self.deadline is not None and time.monotonic() + expected > self.deadline:
                    duration = format_duration(expected)
                    self.progress.show(f"the time budget ends here: the next cell takes about {duration}")
                    return
                self.progress.begin(cell, one_more=len(ran) > ran_before)
                started = time.monotonic()
                ran.append(cell.id)
                try:
                    time_limit_s = min(cell.time_limit_s, self.time_limit_s)
                    limited_cell = dataclasses.replace(cell, time_limit_s=time_limit_s)
                    ending = self.run_cell(limited_cell, len(ran) - 1)
                except errors.UserError as refusal:
                    self.progress.end(cell, Outcome("failed", refusal.problem, refusal.fix), 0)
                    # Another task of this array reports its own cell.
                    self.refused += not (slurm.is_array_task() and isinstance(refusal, lock.LockHeldError))
                    # A search would request the same probe again.
                    break
                except OSError as error:
                    # If one record cannot be written, the next one cannot be written either.
                    place = self.root / cell.id
                    raise Stopped(f"{place} cannot be written ({error.strerror}): make room, or fix it") from None
                # A probe that does not fit is an answer, not a failure.
                seconds = time.monotonic() - started
                is_an_answer = isinstance(item, Search) or cell.expect == "oom"
                self.progress.end(cell, ending, seconds, oom_is_an_answer=is_an_answer)
            if isinstance(item, Search):
                what_fits = item.what_fits(self.root)
                self.progress.searches -= 1
                self.progress.show(f"{item.id}: {what_fits.answer} ({what_fits.limiting_reason})")
            self.finished += 1

    def run_cell(self, cell: Cell, order: int) -> Outcome:
        """Run the cell and return its ending; raise UserError if its folder is not a run's, or in use."""
        directory = self.root / cell.id
        lock.check_is_run_directory(directory, str(directory), "move them away, or name another --runs_dir")
        lock.check_not_active(directory, str(directory))
        ending = None
        node_count = self.box.nodes_for(cell.world_size)
        if node_count is None:
            ending = Outcome(
                "unsupported", f"{cell.world_size} ranks, and this machine has {self.box}", "run it on more"
            )
        elif cell.stack and (problem := stacks.stacks()[cell.stack].install_error()):
            ending = Outcome("unsupported", problem, "compare it where pip can install it", "not installable")
        if ending is not None:
            with lock.lock_run_directory(directory, str(directory)):
                cell_outcome.write_outcome(directory, read_attempt(directory), ending)
            return ending
        # The MFU of a tiny model has no meaning, and would delay a rehearsal on a rented machine.
        rates = machine.matmul_rates(self.box) if cell.config.scale == "paper" else {}
        # Digests of the job's nodes show whether two cells ran on the same nodes.
        job = slurm.current_job()
        nodes = None if job is None else [lock.digest_of_host(name) for name in job.nodes[:node_count]]
        foreign = {"before": self._foreign_gpu_processes()}
        started_at = utc_now()

        def watch() -> None:
            # Before the first step the run may not have created the file.
            with suppress(FileNotFoundError):
                self.progress.step(cell, (directory / "steps.jsonl").read_bytes().count(b"\n"))

        may_fork = (cell.stack is not None or self.allow_forks) and not self.box.gpus and not slurm.is_in_job()
        forks = self.forks if may_fork else None
        ended = run_cell(cell, self.root, watch, forks, self.progress.show)
        ending = ended.ending
        foreign["after"] = self._foreign_gpu_processes(patience_s=1)
        try:
            with lock.lock_run_directory(directory, str(directory)):
                ended.write_end(directory)
                attempt = {
                    "attempt": read_attempt(directory),
                    "state": ending.state,
                    "order": order,
                    "started_at": started_at,
                    "wall_s": ended.wall_s,
                    "launcher_status": ended.launcher_status,
                    "foreign_gpu_processes": foreign,
                    "matmul_rates": rates,
                    "launcher": "accelerate" if forks is None else "forked",
                    "nodes": nodes,
                    "last_lines": [] if ending.state == "ok" else _without_nodes(cell_outcome.last_lines(ended.text)),
                }
                append_attempt(directory, cell, _without_nodes(ended.command), attempt)
        finally:
            if ending.state != "ok" and strategies.read_strategy(cell.strategy).uses_nvme:
                # A killed rank leaves its swap files, which are as large as the model.
                folders.remove_stale_swap_folders(places.WORKING_FOLDER / folders.resolve_path(cell.config.nvme_path))
            if ended.stopped_by == "user":
                raise Stopped("stopped")
            if slurm.is_in_job() and ending.cause in ("Slurm", "SIGTERM"):
                # Slurm ends a job's steps first: the next cell would use the time that remains for an orderly end.
                raise Stopped("stopped: Slurm ends this job")
        return ending

    def _foreign_gpu_processes(self, patience_s: float = 0) -> list[dict[str, Any]]:
        """Return other processes on the GPUs, which disturb the measurement, and print a notice for each."""
        processes = machine.gpu_processes()
        if processes and patience_s:
            # The driver may need time to release the run's processes.
            time.sleep(patience_s)
            processes = machine.gpu_processes()
        for process in processes:
            self.progress.show(f"notice: GPU {process['gpu']} is in use by process {process['pid']}, not of this sweep")
        return processes


def _without_nodes(words: Sequence[str]) -> list[str]:
    """Replace the names of this job's nodes by the digests that records use, and remove addresses."""
    job = slurm.current_job()
    names = sorted(job.nodes if job else (), key=len, reverse=True)
    replaced = []
    for word in words:
        for name in names:
            word = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", lock.digest_of_host(name), word)
        replaced.append(_ADDRESS.sub(r"\1ADDRESS", word))
    return replaced


def append_attempt(directory: Path, cell: Cell, command: Sequence[str], attempt: dict[str, Any]) -> None:
    """Add the attempt to sweep.json, in the folder of the cell's record."""
    file = directory / NOTES
    before: dict[str, Any]
    try:
        before = read_json(file)
        attempts = list(before["attempts"])
    except (schema.RecordError, KeyError, TypeError):
        before, attempts = {}, []
    document = {
        "cell": cell.id,
        "arm": cell.arm,
        "strategy": cell.strategy,
        "trainer": cell.trainer,
        "world_size": cell.world_size,
        "stack": cell.stack,
        "repeat": cell.repeat,
        "time_limit_s": cell.time_limit_s,
        "command": list(command),
        "attempts": [*attempts, attempt],
    }
    write_json(file, document | {key: before[key] for key in ("searches", "probe") if key in before})


def note_searches(cells: Iterable[Cell | Search], root: Path) -> None:
    """Write to each probe's sweep.json all searches that use it, also those that found its record.

    A run that is also a cell of the suite is not noted as a probe.
    """
    cells = list(cells)
    cell_ids = {cell.id for cell in cells if isinstance(cell, Cell)}
    noted: dict[str, list[dict[str, Any]]] = {}
    for search in (cell for cell in cells if isinstance(cell, Search)):
        for place in search.states(root):
            entry = {"id": search.id, "axis": search.axis, "place": place, "last": search.last}
            noted.setdefault(search.probe_at(place).id, []).append(entry)
    for name, entries in noted.items():
        file = root / name / NOTES
        try:
            document = read_json(file)
        except schema.RecordError:
            # The sweep was killed during this probe, which will run again.
            continue
        # `cells` may be only some of the suite's cells: the notes of other searches stay.
        search_ids = {entry["id"] for entry in entries}
        other_entries = [entry for entry in document.get("searches", []) if entry["id"] not in search_ids]
        notes = {"searches": other_entries + entries, "probe": name not in cell_ids and document.get("probe", True)}
        if notes != {key: document.get(key) for key in notes}:
            write_json(file, document | notes)


class SweepProgress:
    """Display of finished, failed and remaining cells and the current one's step: bars, or lines without a terminal."""

    _cell: TaskID
    _step: int

    def __init__(self, cells_to_do: int, already_done: int, searches: int):
        # A search counts as one cell until it requests a further probe.
        self._total, self._already_done, self.searches = cells_to_do, already_done, searches
        self._done = self._failed = 0
        console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
        self.bars = Bars(
            "{task.description}",
            BarColumn(20),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._all = self.bars.add_task(self._counts(), total=cells_to_do)

    def show(self, text: str) -> None:
        self.bars.console.print(text)

    def begin(self, cell: Cell, one_more: bool = False) -> None:
        """Show the start of a cell; `one_more` if it is a further probe of a search, which was not counted."""
        self._total += one_more
        self.bars.update(self._all, total=self._total, description=self._counts())
        self._cell, self._step = self.bars.add_task(f"starting  {cell.id}", total=cell.total_steps), 0
        if self.bars.disable:
            self.show(f"[{self._done + 1}/{self._total}{'+' if self.searches else ''}] {cell.id}")

    def step(self, cell: Cell, step: int) -> None:
        if step and not self._step:
            # The remaining time is estimated from the steps, without start-up.
            self.bars.reset(self._cell)
        if step:
            total = f"/{cell.total_steps}" if cell.total_steps else ""
            self.bars.update(self._cell, completed=step, description=f"step {step}{total}  {cell.id}")
        self._step = step

    def end(self, cell: Cell, ending: Outcome, seconds: float, oom_is_an_answer: bool = False) -> None:
        """Print the ending of the current cell, and count it as failed unless it is an answer."""
        self._done += 1
        self._failed += ending.state not in ("ok", "unsupported", *(["oom"] if oom_is_an_answer else []))
        self.bars.update(self._all, completed=self._done, description=self._counts())
        self.bars.remove_task(self._cell)
        why = f": {ending.why}" if ending.state != "ok" else ""
        name = "    " if self.bars.disable else f"{cell.id} "
        self.show(f"{name}{ending.state} after {format_duration(seconds)}{why}")

    def _counts(self) -> str:
        at_least = "at least " if self.searches else ""
        before = f" ({self._already_done} were done before)" if self._already_done else ""
        return f"{self._done} done, {self._failed} failed, {at_least}{self._total - self._done} left{before}"
