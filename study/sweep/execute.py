"""Run the cells of a suite one after another, each in processes of its own, and leave a record of every one."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.config.errors import UserError
from study.config.strategies import REPOSITORY
from study.host.box import Box, gpu_processes, matmul_rates
from study.host.folders import folder_named, remove_left_folders
from study.host.slurm import is_array_task, is_in_job, refuse_unshared, this_job
from study.host.stacks import stacks
from study.records.directory import utc_now
from study.records.lock import (
    FileLock,
    Held,
    digest_of_host,
    refuse_files_of_others,
    refuse_folder_at_work,
    take_folder,
)
from study.records.outcome import Ending, raising_on
from study.sweep.cell import Cell
from study.sweep.forks import ForkServer
from study.sweep.launch import end_leftovers, only_sweep, run_cell
from study.sweep.notes import append_attempt, earlier_durations, expected_s, note_searches
from study.sweep.progress import StepTail, SweepProgress, show_duration
from study.sweep.search import Search, new_and_tried, runs_left
from study.sweep.step import without_nodes
from study.sweep.verdict import attempt_of, conclude, last_lines

# Ctrl-C, `kill` and a closed terminal all end the current run in order.
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Ctrl-C, a signal that means the same, or a full disk: no further cell is begun."""


def run_cells(
    cells: Sequence[Cell | Search],
    root: Path,
    box: Box,
    *,
    retry: bool = False,
    time_budget_s: float | None = None,
    is_kept: bool = True,
    only_computes: bool = False,
) -> Sweep:
    """Everything that is not answered yet, in the order given, and last what was tried before.

    A cell that hangs until the call is over would keep the others from it in every call. `root` holds one directory per
    cell; where it is not kept, nobody can go on with what is left. Where all that is asked is what runs compute, not
    what they hold and take, they may be forks.
    """
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    with only_sweep(root) as lock:
        ended = end_leftovers(root)
        if (job := this_job()) is not None:
            refuse_unshared(job, root)
        new, tried = new_and_tried(cells, root, retry)
        to_do = [*new, *tried]
        searches = sum(isinstance(item, Search) for item in to_do)
        with (
            SweepProgress(len(to_do), len(cells) - len(to_do), searches) as progress,
            raising_on(Stopped("stopped"), *_STOPS),
        ):
            if ended:
                progress.say(f"notice: ended {ended} processes that an earlier sweep had left")
            sweep = Sweep(root, lock, box, progress, retry, deadline, only_computes)
            try:
                sweep.run(to_do)
            except Stopped as why:
                progress.say(str(why))
                sweep.stopped = True
            finally:
                sweep.forks.close()
            # The user knows by now that the disk is full.
            with suppress(OSError):
                if lock.is_in_place():
                    note_searches(cells, root)
            sweep.left = len(to_do) - sweep.finished
            if sweep.left:
                what = "cells and searches" if any(isinstance(item, Search) for item in cells) else "cells"
                goes_on = "; the same command goes on with them" if is_kept else ""
                progress.say(f"{sweep.left} of {len(cells)} {what} are left{goes_on}")
            return sweep


@dataclasses.dataclass
class Sweep:
    """One call of `run_cells`, and what it did."""

    root: Path
    lock: FileLock
    box: Box
    progress: SweepProgress
    retry: bool
    deadline: float | None
    only_computes: bool
    finished: int = 0
    left: int = 0
    stopped: bool = False
    # Cells whose folder is somebody else's: nothing was run or written there.
    refused: int = 0
    forks: ForkServer = dataclasses.field(default_factory=ForkServer)

    def run(self, to_do: Sequence[Cell | Search]) -> None:
        """Counts what is finished: a cell when it has run, a search when it needs no further probe."""
        ran: list[str] = []
        for item in to_do:
            ran_before = len(ran)
            for cell in runs_left(item, self.root, self.retry):
                if not self.lock.is_in_place():
                    raise Stopped(f"{self.root} was renamed or removed while this sweep ran: put it back to go on")
                if cell.id in ran:  # as some search's probe
                    continue
                if self._is_too_late_for(cell):
                    return
                self.progress.begin(cell, one_more=len(ran) > ran_before)
                started = time.monotonic()
                ran.append(cell.id)
                try:
                    ending = self.run_cell(cell, len(ran) - 1)
                except UserError as refusal:
                    self.progress.end(cell, Ending("failed", refusal.problem, refusal.fix), 0)
                    # Of what another task of this array is at, that task tells.
                    self.refused += not (is_array_task() and isinstance(refusal, Held))
                    # A search would ask for the same probe again.
                    break
                except OSError as error:
                    # A record that cannot be written: the next one could not be, either.
                    place = self.root / cell.id
                    raise Stopped(f"{place} cannot be written ({error.strerror}): make room, or fix it") from None
                # A probe asks whether it fits: that it does not is an answer, and no failure.
                seconds = time.monotonic() - started
                is_an_answer = isinstance(item, Search) or cell.expect == "oom"
                self.progress.end(cell, ending, seconds, oom_is_an_answer=is_an_answer)
            if isinstance(item, Search):
                finding = item.finding(self.root)
                self.progress.searched(f"{item.id}: {finding.what_fits.answer} ({finding.what_fits.why_not_more})")
            self.finished += 1

    def _is_too_late_for(self, cell: Cell) -> bool:
        if self.deadline is None:
            return False
        expected = expected_s(cell, earlier_durations(self.root))
        if time.monotonic() + expected <= self.deadline:
            return False
        self.progress.say(f"the time budget ends here: the next cell takes about {show_duration(expected)}")
        return True

    def run_cell(self, cell: Cell, order: int) -> Ending:
        """Raises UserError where the cell's folder is not a run's, or another run is at work there."""
        directory = self.root / cell.id
        refuse_files_of_others(directory, str(directory), "move them away, or name another --runs-dir")
        refuse_folder_at_work(directory, str(directory))
        ending = None
        if self.box.nodes_for(cell.world_size) is None:
            ending = Ending("unsupported", f"{cell.world_size} ranks, and this box has {self.box}", "run it on more")
        elif cell.stack and (problem := stacks()[cell.stack].why_not()):
            ending = Ending("unsupported", problem, "compare it where pip can install it")
        if ending is not None:
            with take_folder(directory, str(directory)):
                conclude(directory, attempt_of(directory), ending)
            return ending
        # A tiny model's MFU says nothing, and a rehearsal on a rented box should not wait for it.
        rates = matmul_rates(self.box) if cell.config.scale == "paper" else {}
        nodes = self._nodes(cell)
        foreign = {"before": self._foreign_gpu_processes()}
        started_at, tail = utc_now(), StepTail(directory / "steps.jsonl")
        may_fork = (cell.stack is not None or self.only_computes) and not self.box.gpus and not is_in_job()
        forks = self.forks if may_fork else None
        ended = run_cell(cell, self.root, lambda: self.progress.step(cell, tail.read()), forks, say=self.progress.say)
        ending = ended.ending
        foreign["after"] = self._foreign_gpu_processes(patience_s=1)
        try:
            with take_folder(directory, str(directory)):
                ended.write_end(directory)
                attempt = {
                    "attempt": attempt_of(directory),
                    "state": ending.state,
                    "order": order,
                    "started_at": started_at,
                    "wall_s": ended.wall_s,
                    "launcher_status": ended.launcher_status,
                    "foreign_gpu_processes": foreign,
                    "matmul_rates": rates,
                    "launcher": "accelerate" if forks is None else "forked",
                    "nodes": nodes,
                    "last_lines": [] if ending.state == "ok" else without_nodes(last_lines(ended.text)),
                }
                append_attempt(directory, cell, without_nodes(ended.command), attempt)
        finally:
            if ending.state != "ok" and cell.uses_nvme:
                # A rank that was killed leaves its swap files behind, and they are as large as the model.
                remove_left_folders(REPOSITORY / folder_named(cell.config.nvme_path))
            if ended.stopped_by == "user":
                raise Stopped("stopped")
            if is_in_job() and ended.was_terminated:
                # Slurm ends a job's steps first: the next cell would waste what time is left to end in order.
                raise Stopped("stopped: Slurm ends this job")
        return ending

    def _nodes(self, cell: Cell) -> list[str] | None:
        """Which ones of the job, without their names: do two cells stand on the same?"""
        if (job := this_job()) is None:
            return None
        return [digest_of_host(name) for name in job.nodes[: self.box.nodes_for(cell.world_size)]]

    def _foreign_gpu_processes(self, patience_s: float = 0) -> list[dict[str, Any]]:
        """Another process on a GPU disturbs what is measured: the user is told, and the cell's notes say it."""
        found = gpu_processes()
        if found and patience_s:
            # The driver may need a moment to let go of our own.
            time.sleep(patience_s)
            found = gpu_processes()
        for process in found:
            self.progress.say(f"notice: GPU {process['gpu']} is in use by process {process['pid']}, not of this sweep")
        return found
