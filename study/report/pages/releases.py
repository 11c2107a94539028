"""docs/releases.md, reports/releases/causes.md and study/releases/grid.json, from the records and causes.yaml.

`make releases` writes them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from study.config.places import REPOSITORY
from study.host.stacks import is_of_today, release_key
from study.records.frames import Records, read_parquet, steps_by_run
from study.records.workloads import strategy_order
from study.releases.causes import GRID, PACKAGES
from study.releases.command import LATEST_RELEASES
from study.releases.release_cells import ReleaseCell, release_cells
from study.report.document import Answer, render_markdown
from study.report.questions.releases import KINDS, ON_GPU, QUESTION, cause_table, clipped, faults_on_gpu, lettered

PAGE, REPORT = REPOSITORY / "docs" / "releases.md", REPOSITORY / "reports" / "releases"
DETAILS = REPORT / "causes.md"
# DeepSpeed without this project's trainer: records of study/releases/bare.py, in the history up to 7ff8d96.
BARE = "bare.json"
INSTALLED, NOT_RUN = "installed", "\N{MIDDLE DOT}"
Row = Mapping[str, Any]
# Rounding of a loss or a norm. The installed release differs by 1e-7, in bf16 by 3e-4; a fault by 4e-3.
_ROUNDING = {"fp32": 1e-5, "bf16": 2e-3}
# Callers and micro-batches of the control's two tables.
_ONE = [("bare", 4), ("boundary", 4), ("accelerate", 4)]
_SEVERAL = [("bare-losses", 1), ("bare-losses", 4), ("bare-forwards", 1), ("boundary-forwards", 1),
            ("accelerate-forwards", 1)]  # fmt: skip
_SHOWN_LOSSES = 3
_WHOSE = {
    "engine": "DeepSpeed's",
    "pairing": "a mismatch of releases; DeepSpeed alone does not do it, and with other releases beside it neither",
}


@dataclasses.dataclass(frozen=True, eq=False)
class ReleaseReport:
    """The records of releases, judged once for both pages and for the document of `study releases`."""

    records: Records

    @functools.cached_property
    def cells(self) -> tuple[ReleaseCell, ...]:
        """All cells, the oldest release first."""
        return release_cells(self.records)

    @functools.cached_property
    def answer(self) -> Answer:
        """The answer of the report's question."""
        return QUESTION.answer(self.records) or Answer("No release is tested.", pd.DataFrame())

    @functools.cached_property
    def today(self) -> list[ReleaseCell]:
        """The fp32 cells with the other packages of this study."""
        return [cell for cell in clipped(self.cells) if cell.precision == "fp32" and not cell.is_contemporary]

    @functools.cached_property
    def muon(self) -> list[ReleaseCell]:
        """The cells of DeepSpeed's Muon, which clip nothing."""
        return [cell for cell in self.cells if cell.optimizer == "muon"]

    def latest(self, count: int = LATEST_RELEASES) -> list[ReleaseCell]:
        """Return the cells of DeepSpeed in the latest tested releases."""
        tested = [cell for cell in self.today if cell.strategy != "ddp"]
        latest = list(dict.fromkeys(cell.release for cell in tested))[-count:]
        return [cell for cell in tested if cell.release in latest]

    def page(self) -> str:
        """Return docs/releases.md: the faults of each release, one row per group of releases with the same ones."""
        muon = _grid(self.muon) if self.muon else None
        return render_markdown("releases.md.j2", answer=self.answer, causes=cause_table(), muon=muon)

    def details(self, control: Sequence[Row]) -> str:
        """Return reports/releases/causes.md: the grid, the causes, and the bare control."""
        visible = clipped(self.cells)
        grids = {
            f"{precision}, {words}": [
                cell for cell in visible if cell.precision == precision and cell.is_contemporary == is_contemporary
            ]
            for precision in sorted({cell.precision for cell in visible}, key=lambda name: (name != "fp32", name))
            for is_contemporary, words in KINDS.items()
        }
        grids["fp32, Muon, with today's Accelerate and torch"] = self.muon
        versions = {cell.stack: cell.versions for cell in self.cells}
        stacks = [
            {"Stack": stack, "Kind": "today" if is_of_today(stack) else "contemporary",
             **{name: versions[stack][name] or "not known" for name in PACKAGES}}
            for stack in sorted(versions, key=_stack_order)
        ]  # fmt: skip
        judged = [row for row in control if row.get("precision") == "fp32" and row.get("clipping")]
        return render_markdown(
            "causes.md.j2", answer=self.answer, letters=lettered(), whose=_WHOSE, on_gpu=ON_GPU,
            grids={title: _grid(cells) for title, cells in grids.items() if cells},
            cells_by_cause={cause: [cell for cell in self.cells if cause in cell.causes] for cause in lettered()},
            losses=self._losses(), stopped=_stopped(self.cells),
            control=_control([row for row in judged if row["loss"] == "inside"], _ONE),
            several=_control([row for row in judged if "-" in row["caller"]], _SEVERAL), stacks=pd.DataFrame(stacks),
        )  # fmt: skip

    def _losses(self) -> pd.DataFrame | None:
        """Return the losses and norms of the cells that diverge; None if none does."""
        cells = [cell for cell in self.cells if cell.precision == "fp32" and cell.micro_steps > 1 and cell.max_norm]
        steps = steps_by_run(self.records)
        groups: dict[tuple[str, ...], list[ReleaseCell]] = {}
        for cell in (cell for cell in cells if cell.verdict.kind == "different"):
            signs = "".join(lettered()[cause] for cause in cell.causes) or "?"
            # A run whose first loss is NaN has no recorded steps.
            worst = steps.get(cell.worst_run)
            figures = (cell.verdict.reason, "none") if worst is None else _figures(worst)
            groups.setdefault((*figures, signs), []).append(cell)
        if not groups:
            return None
        right = sorted({_figures(steps[cell.single]) for cell in cells if cell.single})
        rows = [("any", "single", *figures, "") for figures in right] + [
            (_names(group, "stack"), _names(group, "strategy"), *line) for line, group in groups.items()
        ]
        return pd.DataFrame(rows, columns=["Stack", "Strategy", "Losses", "First norm", "Cause"])

    def document(self) -> dict[str, Any]:
        """Return what `study releases` prints: tested releases with the faults expected on a GPU, the newest first."""
        lines = []
        for release, cells in itertools.groupby(reversed(self.latest(0)), key=lambda cell: cell.release):
            group = list(cells)[::-1]
            halves = {"no accumulation": [cell for cell in group if cell.micro_steps == 1],
                      "accumulation": [cell for cell in group if cell.micro_steps > 1]}  # fmt: skip
            faults = {column: faults_on_gpu(half) for column, half in halves.items()}
            lines.append({"DeepSpeed": release, **faults})
        latest = self.latest()
        runs = self.records.runs[self.records.runs["run"].isin({run for cell in latest for run in cell.runs})]
        started = runs["status_started_at"].dropna().str[:10]
        versions = {name: cell.versions[name] for cell in latest for name in PACKAGES[1:]}
        days = " to ".join(dict.fromkeys((started.min(), started.max())))
        packages = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        return {
            "tested": f"Tested {days} on two CPU ranks in fp32 with clipping, 1 and 4 micro-batches a step; {packages}",
            "versions": versions, "letters": {cause.id: letter for cause, letter in lettered().items()},
            "releases": lines, "muon": _muon_faults(self.muon),
        }  # fmt: skip


def _muon_faults(cells: Sequence[ReleaseCell]) -> dict[str, str]:
    """Return the faults of Muon by release, the newest first."""
    result = {}
    for release in sorted({cell.release for cell in cells}, key=release_key, reverse=True):
        struck: dict[str, dict[str, None]] = {}
        for cell in cells:
            if cell.release == release and cell.verdict.kind != "equal":
                sign = "".join(lettered()[cause] for cause in cell.causes) or "?"
                struck.setdefault(sign, {})[f"`{cell.strategy}`"] = None
        result[release] = "; ".join(f"{sign}: {', '.join(names)}" for sign, names in struck.items()) or "no fault"
    return result


def is_right(row: Row) -> bool | None:
    """Whether a case of the control equals a plain loop up to rounding; None if it raised an error."""
    if row.get("error"):
        return None
    most = _ROUNDING["fp32" if row["precision"] == "fp32" else "bf16"]
    # Stage 0 reports no norm in fp32.
    norm_off = 0.0 if row["norm"] is None else abs(row["norm"] - row["right_norm"]) / abs(row["right_norm"])
    return max(row["losses_off"], norm_off) <= most


def _control(rows: Sequence[Row], cases: Sequence[tuple[str, int]]) -> pd.DataFrame | None:
    """Return one row per stack, with one sign per caller and number of micro-steps; None without rows."""
    signs = {(row["stack"], row["strategy"], row["caller"], row["accumulation"]):
             {True: "=", False: "!", None: "x"}[is_right(row)] for row in rows}  # fmt: skip
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    lines = [
        {"Stack": stack, **{f"`{name}`": " / ".join(signs.get((stack, name, *case), NOT_RUN) for case in cases)
                            for name in strategies}}
        for stack in sorted({row["stack"] for row in rows}, key=_stack_order)
    ]  # fmt: skip
    return pd.DataFrame(lines) if lines else None


def _stack_order(name: str) -> tuple[Any, ...]:
    return name == INSTALLED, release_key(name), name


def _names(cells: Sequence[ReleaseCell], attribute: str) -> str:
    return ", ".join(dict.fromkeys(getattr(cell, attribute) for cell in cells))


def _figures(steps: pd.DataFrame) -> tuple[str, str]:
    """Return the first three losses and the last, and the first norm."""
    losses = ["NaN" if math.isnan(loss) else f"{loss:.6g}" for loss in steps["loss"]]
    gap = ["..."] if len(losses) > _SHOWN_LOSSES + 1 else []
    norm = steps["grad_norm"].iloc[0]
    shown = ", ".join([*losses[:_SHOWN_LOSSES], *gap, losses[-1]])
    return shown, "not reported" if pd.isna(norm) else f"{norm:.4g}"


def _grid(cells: Sequence[ReleaseCell]) -> pd.DataFrame:
    """Return a row per release and a column per strategy: the signs with one micro-step and with several."""
    signs = {(cell.row, cell.strategy, cell.micro_steps > 1): _sign(cell) for cell in cells}
    assert len(signs) == len(cells), "two cells in one place of the grid"
    strategies = sorted({cell.strategy for cell in cells}, key=strategy_order)
    return pd.DataFrame(
        {"DeepSpeed": row,
         **{f"`{name}`": " / ".join(signs.get((row, name, several), NOT_RUN) for several in (False, True))
            for name in strategies}}
        for row in dict.fromkeys(cell.row for cell in cells)
    )  # fmt: skip


def _sign(cell: ReleaseCell) -> str:
    kind, why = cell.verdict.kind, "".join(lettered()[cause] for cause in cell.causes)
    if kind == "different":
        return (why or "?") + "'" * cell.differs_sometimes
    return {"equal": "(=)" if cell.is_equal_by_chance else "=", "crashes": "x"}.get(kind, "-") + why


def _stopped(cells: Sequence[ReleaseCell]) -> pd.DataFrame:
    """Return the strategies that do not run, by stack and reason."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.verdict.kind in ("crashes", "refuses", "not installable"):
            reason = re.sub(r"^rank \d+: ", "", cell.verdict.reason)
            short = reason if len(reason) <= 160 else f"{reason[:160]}..."
            groups.setdefault((cell.stack, cell.verdict.kind, short), []).append(f"`{cell.strategy}`")
    rows = [(stack, ", ".join(dict.fromkeys(names)), kind, why) for (stack, kind, why), names in groups.items()]
    return pd.DataFrame(rows, columns=["Stack", "Strategies", "Outcome", "Why"])


def main() -> None:
    """Write both pages, and the document of `study releases`."""
    report = ReleaseReport(read_parquet(REPORT))
    GRID.write_text(json.dumps(report.document(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(report.page(), encoding="utf-8")
    DETAILS.write_text(report.details(json.loads((REPORT / BARE).read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
