"""docs/releases.md, reports/releases/causes.md and study/releases/grid.json, which `make releases` writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from study.config.places import REPOSITORY
from study.host.stacks import is_of_today, release_key
from study.records.directory import json_by_row
from study.records.frames import Records, read_parquet, steps_by_run
from study.records.workloads import strategy_order
from study.releases.causes import GRID, PACKAGES
from study.releases.command import LATEST_RELEASES
from study.releases.costs import CostTable, find_changes, group_changes, read_costs, read_list
from study.releases.races import GpuRace, read_races
from study.releases.release_cells import ReleaseCell, release_cells
from study.report.document import render_markdown
from study.report.questions import releases

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
_SEVERAL = [
    ("bare-losses", 1),
    ("bare-losses", 4),
    ("bare-forwards", 1),
    ("boundary-forwards", 1),
    ("accelerate-forwards", 1),
]
_SHOWN_LOSSES = 3
_WHOSE = {
    "engine": "DeepSpeed's",
    "pairing": "a mismatch of releases; DeepSpeed alone does not do it, and with other releases beside it neither",
}


def latest_cells(records: Records, count: int = LATEST_RELEASES) -> list[ReleaseCell]:
    """Return the cells of DeepSpeed in the latest tested releases."""
    tested = [
        cell
        for cell in releases.clipped(release_cells(records))
        if cell.precision == "fp32" and not cell.is_contemporary and cell.strategy != "ddp"
    ]
    latest = list(dict.fromkeys(cell.release for cell in tested))[-count:]
    return [cell for cell in tested if cell.release in latest]


def page(records: Records) -> str:
    """Return docs/releases.md: the faults by strategy, and by groups of releases with the same ones."""
    muon, by_release = _muon_cells(records), pd.DataFrame(document(records)["releases"])
    return render_markdown(
        "releases.md.j2",
        answer=releases.QUESTION.answer(records),
        causes=releases.cause_table(),
        by_release=by_release.groupby([*by_release][1:], sort=False).agg(", ".join).reset_index()[[*by_release]],
        muon=_grid(muon) if muon else None,
        races=_races(),
        costs=_cost_changes(read_costs()),
        cost_releases=read_costs().names,
        cost_combinations=len(read_list()),
        accelerate_costs=_cost_changes(read_costs("accelerate")),
        accelerate_deepspeed=read_costs("accelerate").packages["deepspeed"],
        accelerate_releases=read_costs("accelerate").names,
        accelerate_combinations=len(read_list("accelerate")),
    )


def _races() -> pd.DataFrame:
    """Return the races of GPU streams, a row each, the newest fix first."""
    return pd.DataFrame(
        {
            "Race": race.title,
            "Strategies": " ".join(f"`{name}`" for name in race.strategies),
            "Only with": ", ".join(filter(None, [race.condition, *_other_packages(race)])) or "-",
            "Releases before": race.fix.release,
            "Fixed by": race.fix.change,
            "Reports": " ".join(race.threads) or "-",
        }
        for race in read_races()
    )


def _other_packages(race: GpuRace) -> list[str]:
    return [f"{name} {specifier}" for name, specifier in race.releases.items() if name != "deepspeed"]


def _cost_changes(table: CostTable) -> pd.DataFrame:
    """Return what changed of a step's costs, a row per release and cause."""
    return pd.DataFrame(
        {
            "Releases": f"{change.before} to {change.release}",
            "Change": change.text,
            "Combinations": " ".join(f"`{name}`" for name in change.features),
            "Why": change.reason,
        }
        for change in group_changes(find_changes(table))
    )


def _muon_cells(records: Records) -> list[ReleaseCell]:
    """Return the cells of DeepSpeed's Muon, which clip nothing."""
    return [cell for cell in release_cells(records) if cell.optimizer == "muon"]


def read_control() -> list[Row]:
    """Return the rows of the bare control; the file has a table for each set of columns, in groups of one stack."""
    tables = json.loads((REPORT / BARE).read_text(encoding="utf-8"))
    return [
        dict(zip((*table["common"], *table["columns"]), (*group["common"], *row), strict=True))
        for table in tables
        for group in table["groups"]
        for row in group["rows"]
    ]


def details(records: Records, control: Sequence[Row]) -> str:
    """Return reports/releases/causes.md: the grid, the causes, and the bare control."""
    cells = release_cells(records)
    visible = releases.clipped(cells)
    grids = {
        f"{precision}, {words}": [
            cell for cell in visible if cell.precision == precision and cell.is_contemporary == is_contemporary
        ]
        for precision in sorted({cell.precision for cell in visible}, key=lambda name: (name != "fp32", name))
        for is_contemporary, words in releases.KINDS.items()
    }
    grids["fp32, Muon, with today's Accelerate and torch"] = _muon_cells(records)
    versions = {cell.stack: cell.versions for cell in cells}
    stacks = [
        {
            "Stack": stack,
            "Kind": "today" if is_of_today(stack) else "contemporary",
            **{name: versions[stack][name] or "not known" for name in PACKAGES},
        }
        for stack in sorted(versions, key=_stack_order)
    ]
    judged = [row for row in control if row.get("precision") == "fp32" and row.get("clipping")]
    return render_markdown(
        "causes.md.j2",
        answer=releases.QUESTION.answer(records),
        notes=releases.case_notes(cells),
        letters=releases.lettered(),
        whose=_WHOSE,
        on_gpu=releases.ON_GPU,
        losses=_losses(records),
        stopped=_stopped(cells),
        stacks=pd.DataFrame(stacks),
        grids={title: _grid(group) for title, group in grids.items() if group},
        cells_by_cause={cause: [cell for cell in cells if cause in cell.causes] for cause in releases.lettered()},
        control=_control([row for row in judged if row["loss"] == "inside"], _ONE),
        several=_control([row for row in judged if "-" in row["caller"]], _SEVERAL),
    )


def _losses(records: Records) -> pd.DataFrame | None:
    """Return the losses and norms of the cells that diverge; None if none does."""
    cells = [
        cell for cell in release_cells(records) if cell.precision == "fp32" and cell.micro_steps > 1 and cell.max_norm
    ]
    steps = steps_by_run(records)
    groups: dict[tuple[str, ...], list[ReleaseCell]] = {}
    for cell in (cell for cell in cells if cell.verdict.kind == "different"):
        # A run whose first loss is NaN has no recorded steps.
        worst = steps.get(cell.worst_run)
        figures = (cell.verdict.reason, "none") if worst is None else _figures(worst)
        groups.setdefault((*figures, _letters(cell)), []).append(cell)
    if not groups:
        return None
    right = sorted({_figures(steps[cell.single]) for cell in cells if cell.single})
    rows: list[tuple[str, ...]] = [("any", "single", *figures, "") for figures in right]
    for line, group in groups.items():
        stacks, strategies = (dict.fromkeys(getattr(cell, name) for cell in group) for name in ("stack", "strategy"))
        rows.append((", ".join(stacks), ", ".join(strategies), *line))
    return pd.DataFrame(rows, columns=["Stack", "Strategy", "Losses", "First norm", "Cause"])


def _letters(cell: ReleaseCell) -> str:
    return releases.cause_letters(cell) or releases.UNKNOWN


def document(records: Records) -> dict[str, Any]:
    """Return what `study releases` prints: tested releases with the faults expected on a GPU, the newest first."""
    latest, muon = latest_cells(records), _muon_cells(records)
    in_bf16 = [
        cell
        for cell in releases.clipped(release_cells(records))
        if cell.precision == "bf16-engine" and not cell.is_contemporary
    ]

    def faults_of_muon(release: str) -> str:
        wrong = [cell for cell in muon if cell.release == release and cell.verdict.kind != "equal"]
        return releases.by_letter((_letters(cell), f"`{cell.strategy}`") for cell in wrong) or "no fault"

    versions = {name: cell.versions[name] for cell in latest for name in PACKAGES[1:]}
    return {
        "tested": _tested(records, latest, "fp32"),
        "tested_in_bf16": _tested(records, in_bf16, "bf16"),
        "versions": versions,
        "letters": {cause.id: letter for cause, letter in releases.lettered().items()},
        "releases": _rows_by_release(latest_cells(records, 0)),
        "bf16": _rows_by_release(in_bf16),
        "trained": _trained(records),
        "faults": [
            *_fault_rows(latest_cells(records, 0), "fp32"),
            *_fault_rows(in_bf16, "bf16-engine"),
            *_muon_fault_rows(muon),
        ],
        "muon": {
            name: faults_of_muon(name)
            for name in sorted({cell.release for cell in muon}, key=release_key, reverse=True)
        },
    }


def _tested(records: Records, cells: Sequence[ReleaseCell], precision: str) -> str:
    """Return when and how cells of one stack were tested, in one line."""
    runs = records.runs[records.runs["run"].isin({run for cell in cells for run in cell.runs})]
    started = runs["status_started_at"].dropna().str[:10]
    days = " to ".join(dict.fromkeys((started.min(), started.max())))
    versions = {name: cell.versions[name] for cell in cells for name in PACKAGES[1:]}
    packages = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return f"Tested {days} on two CPU ranks in {precision} with clipping, 1 and 4 micro-batches a step; {packages}"


def _rows_by_release(cells: Sequence[ReleaseCell]) -> list[dict[str, str]]:
    """Return a row per release with the faults that a GPU shows, the newest release first."""
    verdicts = releases.gpu_verdicts(cells)

    def faults(release: str, several: bool) -> str:
        return releases.faults_on_gpu(verdicts[(verdicts["release"] == release) & (verdicts["several"] == several)])

    return [
        {"DeepSpeed": name, "no accumulation": faults(name, False), "accumulation": faults(name, True)}
        for name in sorted(set(verdicts["release"]), key=release_key, reverse=True)
    ]


def _fault_rows(cells: Sequence[ReleaseCell], precision: str) -> list[dict[str, Any]]:
    """Return a row for each fault of a release that a GPU shows, with its strategies, and with those by the source."""
    verdicts = releases.gpu_verdicts(cells)
    faulty = verdicts[verdicts["kind"].isin(releases.FAULTS_ON_GPUS)]
    return [
        {
            "optimizer": "adamw",
            "precision": precision,
            "release": release,
            "letter": letter,
            "strategies": list(dict.fromkeys(rows["strategy"])),
            "from_source": list(dict.fromkeys(rows["strategy"][rows["from_source"]])),
        }
        for (release, letter), rows in faulty.groupby(["release", "letter"], sort=False)
    ]


def _muon_fault_rows(cells: Sequence[ReleaseCell]) -> list[dict[str, Any]]:
    """Return a row for each fault of DeepSpeed's Muon in a release."""
    strategies: dict[tuple[str, str, str], dict[str, None]] = {}
    for cell in cells:
        if cell.verdict.kind != "equal":
            for letter in _letters(cell):
                strategies.setdefault((cell.precision, cell.release, letter), {})[cell.strategy] = None
    return [
        {
            "optimizer": "muon",
            "precision": precision,
            "release": release,
            "letter": letter,
            "strategies": list(names),
            "from_source": [],
        }
        for (precision, release, letter), names in strategies.items()
    ]


def _trained(records: Records) -> list[dict[str, Any]]:
    """Return which strategies were judged under which packages and precision, with and without accumulation.

    A run that ended by a known fault counts: its verdict on GPUs is that of the source.
    """
    judged: dict[tuple[str, ...], dict[str, set[bool]]] = {}
    for cell in releases.clipped(release_cells(records)):
        if cell.precision not in ("fp32", "bf16-engine") or cell.strategy == "ddp":
            continue
        stack = (cell.release, str(cell.versions["accelerate"]), str(cell.versions["torch"]), cell.precision)
        accumulates = judged.setdefault(stack, {}).setdefault(cell.strategy, set())
        if cell.verdict.kind in ("equal", "different") or cell.causes:
            accumulates.add(cell.micro_steps > 1)
    both = {stack: [name for name in cells if len(cells[name]) == 2] for stack, cells in judged.items()}
    return [
        {"deepspeed": release, "accelerate": accelerate, "torch": torch, "precision": precision, "strategies": names}
        for (release, accelerate, torch, precision), names in both.items()
        if names
    ]


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
    signs = {
        (row["stack"], row["strategy"], row["caller"], row["accumulation"]): {True: "=", False: "!", None: "x"}[
            is_right(row)
        ]
        for row in rows
    }
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    lines = [
        {
            "Stack": stack,
            **{
                f"`{name}`": " / ".join(signs.get((stack, name, *case), NOT_RUN) for case in cases)
                for name in strategies
            },
        }
        for stack in sorted({row["stack"] for row in rows}, key=_stack_order)
    ]
    return pd.DataFrame(lines) if lines else None


def _stack_order(name: str) -> tuple[Any, ...]:
    return name == INSTALLED, release_key(name), name


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
        {
            "DeepSpeed": row,
            **{
                f"`{name}`": " / ".join(signs.get((row, name, several), NOT_RUN) for several in (False, True))
                for name in strategies
            },
        }
        for row in dict.fromkeys(cell.row for cell in cells)
    )


def _sign(cell: ReleaseCell) -> str:
    if cell.verdict.kind == "different":
        return _letters(cell) + "'" * cell.differs_sometimes
    signs = {"equal": "(=)" if cell.is_equal_by_chance else "=", "crashes": "x"}
    return signs.get(cell.verdict.kind, "-") + releases.cause_letters(cell)


def _stopped(cells: Sequence[ReleaseCell]) -> pd.DataFrame:
    """Return the strategies that do not run, by stack and reason."""
    columns, rows = ["Stack", "Strategies", "Outcome", "Why"], []
    for cell in cells:
        if cell.verdict.kind in ("crashes", "refuses", "not installable"):
            reason = re.sub(r"^rank \d+: ", "", cell.verdict.reason)
            short = reason if len(reason) <= 160 else f"{reason[:160]}..."
            rows.append((cell.stack, f"`{cell.strategy}`", cell.verdict.kind, short))
    groups = pd.DataFrame(rows, columns=columns).drop_duplicates().groupby(["Stack", "Outcome", "Why"], sort=False)
    return groups["Strategies"].agg(", ".join).reset_index()[columns]


def main() -> None:
    """Write both pages, and the document of `study releases`."""
    records = read_parquet(REPORT)
    GRID.write_text(json_by_row(document(records)), encoding="utf-8")
    PAGE.write_text(page(records), encoding="utf-8")
    DETAILS.write_text(details(records, read_control()), encoding="utf-8")


if __name__ == "__main__":
    main()
