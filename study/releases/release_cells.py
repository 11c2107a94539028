"""Verdicts on releases of DeepSpeed: each cell compares a strategy with `single` under the same stack.

A stack is the installed packages with another release of DeepSpeed; if its name goes on after the release, such as
0.18.6-then, also with other releases of other packages. Repeats form one cell, which differs if one of them does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from study.host.stacks import deepspeed_release, is_of_today, release_key
from study.records.frames import Records, outcome_of_run, real_runs
from study.records.outcome import Outcome
from study.records.workloads import strategy_order
from study.releases.causes import PACKAGES, Cause, find_causes
from study.releases.verdict import Reference, TrainingTrace, Verdict, make_trace, reference_precision

# Verdicts from worst to best; a cell has the worst verdict of its runs.
_WORST = ("different", "crashes", "not judged", "refuses", "not installable", "equal")
# Columns that must be equal for a run of `single` to be the reference of another run.
_SAME_WORK = (
    "optimizer",
    "max_grad_norm",
    "task",
    "model_name_or_path",
    "seed",
    "global_batch_size",
    "max_steps",
    "dropout",
    "learning_rate",
    "warmup_ratio",
)

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ReleaseCell:
    """Runs of one strategy under one stack, with their verdicts and known causes."""

    stack: str
    strategy: str
    precision: str
    micro_steps: int
    max_norm: float
    trainer: str
    optimizer: str
    versions: Mapping[str, str | None]
    verdicts: tuple[Verdict, ...]
    # Names of the runs and of the reference run.
    runs: tuple[str, ...]
    single: str
    # Verdict of the same cell under contemporary packages; empty if that cell was not run, or is this one.
    contemporary: str = ""

    @property
    def release(self) -> str:
        return deepspeed_release(self.stack)

    @property
    def row(self) -> str:
        """Label in grids: the release, with the other one in a stack that has one."""
        return self.stack.removesuffix("-then")

    @property
    def is_contemporary(self) -> bool:
        return not is_of_today(self.stack)

    @functools.cached_property
    def verdict(self) -> Verdict:
        """The worst verdict of the runs; among equal kinds that with the largest difference."""
        return min(self.verdicts, key=lambda verdict: (_WORST.index(verdict.kind), -(verdict.size or 0)))

    @property
    def worst_run(self) -> str:
        return self.runs[self.verdicts.index(self.verdict)]

    @property
    def differs_sometimes(self) -> bool:
        """Whether only some runs of the cell differ, which indicates a race condition."""
        return {"equal", "different"} <= {verdict.kind for verdict in self.verdicts}

    @property
    def is_mismatch(self) -> bool:
        """Whether the pairing of releases is at fault: by known causes, else by an equal contemporary stack."""
        if self.verdict.kind != "different":
            return False
        blames = {cause.blame for cause in self.causes}
        return blames == {"pairing"} if blames else self.contemporary == "equal"

    @property
    def hides_on_gpu(self) -> bool:
        return bool(self.causes) and all(cause.gpu == "hidden" for cause in self.causes)

    @property
    def is_equal_by_chance(self) -> bool:
        """Whether the cell is equal although its releases have a known race condition."""
        return self.verdict.kind == "equal" and bool(self.races)

    @property
    def races(self) -> tuple[Cause, ...]:
        return tuple(cause for cause in self._causes("weights") if cause.sometimes)

    @functools.cached_property
    def causes(self) -> tuple[Cause, ...]:
        return self._causes(self.verdict.differs)

    def _causes(self, differs: str | None) -> tuple[Cause, ...]:
        return find_causes(self.versions, self.strategy, self.micro_steps, self.precision, differs, self.optimizer)


@functools.lru_cache(maxsize=1)
def release_cells(records: Records) -> tuple[ReleaseCell, ...]:
    """Return a cell per stack and setting, the oldest release first; `single` is the reference and has none."""
    runs = real_runs(records).runs
    runs = runs[runs["stack"].notna()]
    if runs.empty:
        return ()
    figures = records.steps[["run", "loss", "grad_norm", "lr", "samples_hash"]].astype(object)
    figures = figures.where(figures.notna(), None)
    steps: defaultdict[str, list[Row]] = defaultdict(list)
    for step in figures.to_dict("records"):
        steps[step["run"]].append(step)
    rows: list[Row] = runs.to_dict("records")
    # Package versions by stack, from all of its runs: a run that never began has recorded none.
    recorded = runs.groupby("stack")[[f"{name}_version" for name in PACKAGES[1:]]].last().set_axis(PACKAGES[1:], axis=1)
    packages = recorded.astype(object).where(recorded.notna(), None).to_dict("index")
    versions = {str(stack): {"deepspeed": deepspeed_release(str(stack)), **packages[stack]} for stack in packages}
    repeats_by_cell: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    ended_by_work: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["status_state"] == "ok":
            ended_by_work[_work(row, row["precision"], versions)].append(row)
        if row["strategy"] != "single" and isinstance(row["strategy"], str):
            repeats_by_cell[
                row["stack"],
                row["strategy"],
                row["precision"],
                _micro_steps(row),
                row["trainer"],
                row["max_grad_norm"],
                row["optimizer"],
            ].append(row)
    cells = [_cell(repeats, ended_by_work, versions, steps) for repeats in repeats_by_cell.values()]
    contemporary = {_but_stack(cell): cell.verdict.kind for cell in cells if cell.is_contemporary}
    cells = [
        cell if cell.is_contemporary else dataclasses.replace(cell, contemporary=contemporary.get(_but_stack(cell), ""))
        for cell in cells
    ]
    return tuple(
        sorted(
            cells,
            key=lambda cell: (
                release_key(cell.release),
                cell.is_contemporary,
                cell.precision,
                strategy_order(cell.strategy),
                cell.micro_steps,
                cell.max_norm,
                cell.trainer,
                cell.optimizer,
            ),
        )
    )


def _but_stack(cell: ReleaseCell) -> tuple[Any, ...]:
    return cell.release, cell.strategy, cell.precision, cell.micro_steps, cell.max_norm, cell.trainer, cell.optimizer


def _cell(
    repeats: Sequence[Row], ended_by_work: Mapping[Any, Any], versions: Mapping[str, Any], steps: Mapping[str, Any]
) -> ReleaseCell:
    first = repeats[0]
    # Prefer `single` under the same stack. Another release of DeepSpeed is as good: `single` does not use it. Only
    # Muon is DeepSpeed's, and the newest release is its reference.
    candidates = [*ended_by_work.get(_work(first, reference_precision(first["precision"]), versions), ())]
    if first["optimizer"] == "muon":
        candidates.sort(key=lambda candidate: release_key(candidate["stack"]), reverse=True)
    else:
        candidates.sort(key=lambda candidate: candidate["stack"] != first["stack"])
    single = next((candidate for candidate in candidates if candidate["strategy"] == "single"), None)
    ddp = tuple(
        _trace(candidate, steps)
        for candidate in candidates
        if single and candidate["stack"] == single["stack"] and candidate["strategy"] == "ddp"
    )
    trace = _trace(single, steps) if single else make_trace([], None, Outcome("missing"), None, 0.0)
    reference = Reference(first["precision"], trace, ddp)
    return ReleaseCell(
        first["stack"],
        first["strategy"],
        first["precision"],
        _micro_steps(first),
        _number(first["max_grad_norm"]),
        str(first["trainer"]),
        str(first["optimizer"]),
        versions[first["stack"]],
        tuple(reference.judge(_trace(row, steps)) for row in repeats),
        tuple(row["run"] for row in repeats),
        single["run"] if single else "",
    )


def _trace(row: Row, steps: Mapping[str, Sequence[Row]]) -> TrainingTrace:
    weights = row["initial_weights_sha256"] if isinstance(row["initial_weights_sha256"], str) else None
    rows = steps.get(row["run"], ())
    return make_trace(rows, row["optimizer"], outcome_of_run(row), weights, _number(row["max_grad_norm"]))


def _micro_steps(row: Row) -> int:
    recorded = row["gradient_accumulation_steps"]
    if not pd.isna(recorded):
        return int(recorded)
    parts = [row[key] for key in ("global_batch_size", "world_size", "per_device_train_batch_size")]
    return 1 if any(pd.isna(part) for part in parts) else int(parts[0] // (parts[1] * parts[2]))


def _number(value: Any) -> float:
    return 0.0 if pd.isna(value) else float(value)


def _work(row: Row, precision: str, versions: Mapping[str, Any]) -> tuple[Any, ...]:
    return precision, *(str(row[key]) for key in _SAME_WORK), *(versions[row["stack"]][name] for name in PACKAGES[1:])
