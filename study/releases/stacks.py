"""Runs under several releases of DeepSpeed as cells with a verdict: each compared with `single` under the same stack.

A stack is the installed packages with another release of DeepSpeed, or, with `-then` behind its name, with contemporary
releases of other packages too. Repeats are one cell: where one of them differs, the cell does.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from study.host.stacks import THEN, release_order
from study.records.frames import Records, real, steps_by_run
from study.records.workloads import strategy_order
from study.releases.causes import PACKAGES, Cause, causes_of
from study.releases.verdict import Reference, Trace, Verdict, reference_precision

# The verdict of a cell whose runs have several: the worst, which is the first of these.
_WORST = ("different", "crashes", "not judged", "refuses", "not installable", "equal")
# Runs that agree in these do the same work, and one of them without an engine is the reference of the others.
_SAME_WORK = ("max_grad_norm", "task", "model_name_or_path", "seed", "global_batch_size", "max_steps", "dropout",
              "learning_rate", "warmup_ratio")  # fmt: skip

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ReleaseCell:
    stack: str
    strategy: str
    precision: str
    micro_steps: int
    max_norm: float
    trainer: str
    versions: Mapping[str, str | None]
    verdicts: tuple[Verdict, ...]
    # Names of the runs, and of their reference.
    runs: tuple[str, ...]
    single: str
    # With today's other packages: the verdict of the same cell with contemporary ones; empty where it was not run.
    of_its_time: str = ""

    @property
    def release(self) -> str:
        return self.stack.removesuffix(THEN)

    @property
    def is_of_its_time(self) -> bool:
        return self.stack.endswith(THEN)

    @property
    def verdict(self) -> Verdict:
        return min(self.verdicts, key=lambda each: (_WORST.index(each.kind), -(each.size or 0)))

    @property
    def worst_run(self) -> str:
        return self.runs[self.verdicts.index(self.verdict)]

    @property
    def differs_sometimes(self) -> bool:
        """Some runs of the same cell agree: the fault is a race."""
        return {"equal", "different"} <= {each.kind for each in self.verdicts}

    @property
    def is_mismatch(self) -> bool:
        """The engine alone is not wrong: its cause says so or, where none is known, the contemporary releases do."""
        if self.verdict.kind != "different":
            return False
        blames = {cause.blame for cause in self.causes}
        return blames == {"pairing"} if blames else self.of_its_time == "equal"

    @property
    def gpu_hides_it(self) -> bool:
        return bool(self.causes) and all(cause.gpu == "hidden" for cause in self.causes)

    @property
    def is_lucky(self) -> bool:
        """Right by chance: its releases have a race in such a cell."""
        return self.verdict.kind == "equal" and bool(self.races)

    @property
    def races(self) -> tuple[Cause, ...]:
        return tuple(cause for cause in self._causes("weights") if cause.sometimes)

    @property
    def causes(self) -> tuple[Cause, ...]:
        return self._causes(self.verdict.differs)

    def _causes(self, differs: str | None) -> tuple[Cause, ...]:
        return causes_of(self.versions, self.strategy, self.micro_steps, self.precision, differs)


def release_cells(records: Records) -> list[ReleaseCell]:
    """Return the cells but for `single`, which is their reference, from the oldest release on."""
    runs = real(records).runs
    runs = runs[runs["stack"].notna()]
    if runs.empty:
        return []
    steps = steps_by_run(records)
    rows: list[Row] = runs.to_dict("records")
    versions = _versions(rows)
    made: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["strategy"] != "single" and isinstance(row["strategy"], str):
            made[row["stack"], row["strategy"], row["precision"], _micro_steps(row), row["trainer"],
                 row["max_grad_norm"]].append(row)  # fmt: skip
    cells = [_cell(repeats, rows, versions, steps) for repeats in made.values()]
    then = {_but_stack(cell): cell.verdict.kind for cell in cells if cell.is_of_its_time}
    cells = [
        cell if cell.is_of_its_time else dataclasses.replace(cell, of_its_time=then.get(_but_stack(cell), ""))
        for cell in cells
    ]
    return sorted(cells, key=_place)


def _but_stack(cell: ReleaseCell) -> tuple[Any, ...]:
    return cell.release, cell.strategy, cell.precision, cell.micro_steps, cell.max_norm, cell.trainer


def _place(cell: ReleaseCell) -> tuple[Any, ...]:
    order = (release_order(cell.release), cell.is_of_its_time, cell.precision, strategy_order(cell.strategy))
    return *order, cell.micro_steps, cell.max_norm, cell.trainer


def _cell(
    repeats: Sequence[Row], rows: Sequence[Row], versions: Mapping[str, Any], steps: Mapping[str, Any]
) -> ReleaseCell:
    first = repeats[0]
    # `single` under the same stack; else under one that differs in DeepSpeed alone, which `single` does not use.
    alike = [
        other for other in rows
        if other["precision"] == reference_precision(first["precision"]) and other["status_state"] == "ok"
        and all(_same(other[key], first[key]) for key in _SAME_WORK)
        and all(versions[other["stack"]][name] == versions[first["stack"]][name] for name in PACKAGES[1:])
    ]  # fmt: skip
    alike.sort(key=lambda other: other["stack"] != first["stack"])
    single = next((other for other in alike if other["strategy"] == "single"), None)
    reference = Reference(first["precision"], Trace([], [], [], state="missing"))
    if single is not None:
        ddp = [other for other in alike if other["strategy"] == "ddp" and other["stack"] == single["stack"]]
        traces = tuple(_trace(other, steps) for other in ddp)
        reference = Reference(first["precision"], _trace(single, steps), traces)
    return ReleaseCell(
        first["stack"], first["strategy"], first["precision"], _micro_steps(first), _number(first["max_grad_norm"]),
        str(first["trainer"]), versions[first["stack"]],
        tuple(reference.judge(_trace(row, steps)) for row in repeats), tuple(row["run"] for row in repeats),
        single["run"] if single else "",
    )  # fmt: skip


def _trace(row: Row, steps: Mapping[str, pd.DataFrame]) -> Trace:
    taken = steps.get(row["run"])
    columns: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "lr": [], "samples_hash": []}
    if taken is not None:
        columns = {key: taken[key].tolist() for key in columns}
    losses, norms = ([None if math.isnan(value) else value for value in columns[key]] for key in ("loss", "grad_norm"))
    weights = row["initial_weights_sha256"]
    return Trace(
        losses, norms, columns["lr"], row["status_state"], row["status_reason"] or "",
        weights if isinstance(weights, str) else None, columns["samples_hash"], _number(row["max_grad_norm"]),
    )  # fmt: skip


def _versions(rows: Iterable[Row]) -> dict[str, dict[str, str | None]]:
    """Return versions by stack; a run that did not begin has none, and others of its stack have."""
    found: dict[str, dict[str, str | None]] = {}
    for row in rows:
        of_stack = found.setdefault(row["stack"], dict.fromkeys(PACKAGES))
        for name in PACKAGES:
            if isinstance(version := row[f"{name}_version"], str):
                of_stack[name] = version
    for stack, of_stack in found.items():
        of_stack["deepspeed"] = stack.removesuffix(THEN)
    return found


def _micro_steps(row: Row) -> int:
    said = row["gradient_accumulation_steps"]
    if not pd.isna(said):
        return int(said)
    parts = [row[key] for key in ("global_batch_size", "world_size", "per_device_train_batch_size")]
    return 1 if any(pd.isna(part) for part in parts) else int(parts[0] // (parts[1] * parts[2]))


def _number(value: Any) -> float:
    return 0.0 if pd.isna(value) else float(value)


def _same(one: Any, other: Any) -> bool:
    return bool(one == other or (pd.isna(one) and pd.isna(other)))
