"""Checks that one GPU decides: the runs that feed each, its outcome so far, and the finding that each outcome gives.

`make claims` writes docs/gpu_checks.md; the checks are older than the records that they judge.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from study.claims.ledger import ClaimCheck
from study.claims.scoreboard import JudgedClaim, Scoreboard
from study.claims.verdicts import CheckResult, ClaimFinding, Figure, FindingKind, Region, combine, number
from study.config.places import REPOSITORY
from study.host.machine import Machine
from study.report.document import Link, render_markdown
from study.sweep.cell import Cell
from study.sweep.forecast import PROBES_OF_A_SEARCH, expected_s
from study.sweep.plan import plan_suite
from study.sweep.search import Search, representative_cell
from study.sweep.suite_file import Suite

PAGE = REPOSITORY / "docs" / "gpu_checks.md"
REPORT = "gpu"
SERIES = "one_gpu"
# Virtual ranks that judge claims have it.
_VIRTUAL_PRECISION = "bf16-engine"
# A machine on which no suite of the series is cut.
_LARGE = Machine((141.0,), 128.0)
# Above it a suite is for a GPU of 141 GB.
_GIB_OF_80_GB = 81.0


@dataclasses.dataclass(frozen=True, eq=False)
class Feed:
    """A cell or search of the series whose records a check reads."""

    suite: Suite
    item: Cell | Search

    @property
    def cell(self) -> Cell:
        return representative_cell(self.item)

    @property
    def seconds(self) -> float:
        """The suite's estimate, by which `study run --time_budget` chooses."""
        probes = PROBES_OF_A_SEARCH if isinstance(self.item, Search) else 1
        return probes * expected_s(self.cell, {})


@dataclasses.dataclass(frozen=True)
class GpuCheck:
    """A check of a claim that needs records of one GPU, with the findings that its outcomes give."""

    judged: JudgedClaim
    place: int
    feeds: tuple[Feed, ...]

    @property
    def check(self) -> ClaimCheck:
        return self.judged.claim.checks[self.place]

    @property
    def answer(self) -> str:
        """The answer of the committed records, with their figure; empty without a record that it can judge."""
        result = self.judged.results[self.place]
        if result.answer == "not judged" or result.figure is None:
            return ""
        return f"{result.answer}: {number(result.figure.value)}{result.figure.spread} {self.check.unit}".rstrip()

    @property
    def without(self) -> FindingKind:
        """The finding without any record of the GPU."""
        return with_figures(self.judged, dict.fromkeys(gpu_places(self.judged))).kind

    def finding_if(self, passes: bool) -> FindingKind:
        """Return the finding with a figure of this outcome, and without figures of the claim's other GPU checks."""
        figures: dict[int, Figure | None] = dict.fromkeys(gpu_places(self.judged))
        figures[self.place] = example(self.check.region, passes)
        return with_figures(self.judged, figures).kind


def gpu_places(judged: JudgedClaim) -> list[int]:
    """Return the positions of a claim's checks that need records of one GPU."""
    return [place for place, check in enumerate(judged.claim.checks) if check.numbers.get("report") == REPORT]


def finding_if_all(judged: JudgedClaim, passes: bool) -> FindingKind:
    """Return the finding if all of a claim's GPU checks have this outcome."""
    checks = judged.claim.checks
    return with_figures(judged, {place: example(checks[place].region, passes) for place in gpu_places(judged)}).kind


def example(region: Region, passes: bool) -> Figure:
    """Return a figure inside the region, or one outside, without an interval."""
    ends = [end for end in (region.low, region.high) if math.isfinite(end)]
    if passes:
        return Figure(sum(ends) / len(ends))
    beyond = max(1.0, abs(ends[-1]))
    return Figure(region.high + beyond if math.isfinite(region.high) else region.low - beyond)


def with_figures(judged: JudgedClaim, figures: Mapping[int, Figure | None]) -> ClaimFinding:
    """Return the finding if some checks, named by their positions, had these figures, or none."""
    results = list(judged.results)
    for place, figure in figures.items():
        check = judged.claim.checks[place]
        results[place] = CheckResult(check, "not judged") if figure is None else check.judge(figure)
    return combine(results)


def gpu_checks(scoreboard: Scoreboard) -> list[GpuCheck]:
    """Return the checks of all claims that need records of one GPU, in the order of the ledger."""
    series = list(_series())
    return [
        GpuCheck(judged, place, tuple(feed for feed in series if _feeds(feed, judged.claim.checks[place])))
        for judged in scoreboard.judged
        for place in gpu_places(judged)
    ]


def _series() -> Iterator[Feed]:
    for part in plan_suite(SERIES, _LARGE, Path("runs")).slices:
        for item in part.cells:
            yield Feed(part.suite, item)


def _feeds(feed: Feed, check: ClaimCheck) -> bool:
    """Return whether a check's form reads the records of a cell."""
    numbers, cell, config = check.numbers, feed.cell, feed.cell.config
    strategy, over = str(numbers["strategy"]), str(numbers.get("over", ""))
    if cell.trainer != "study" or cell.strategy not in (strategy, over):
        return False
    if check.form == "virtual":
        model = (numbers["model"], numbers["ranks"], _VIRTUAL_PRECISION)
        is_virtual = config.virtual_world_size is not None
        is_model = (config.model_name_or_path, cell.ranks, config.precision) == model
        # Bytes of one run do not differ from those of its repeats.
        return is_virtual and is_model and not config.engine_override and cell.repeat == 1
    if config.virtual_world_size or config.task != numbers["task"]:
        return False
    if check.form == "largest":
        expected = (numbers["cap_gib"], numbers["precision"])
        return isinstance(feed.item, Search) and (config.device_memory_cap_gib, config.precision) == expected
    if isinstance(feed.item, Search):
        return False
    where = str(numbers.get("where", ""))
    sides = ((strategy, where), (over, f"{where} {numbers.get('over_where', '')}"))
    return any(cell.strategy == name and _has(cell, settings) for name, settings in sides)


def _has(cell: Cell, settings: str) -> bool:
    """Return whether a cell has the settings of a check; a later one replaces an earlier one."""
    config = cell.config
    values = {
        **{name: getattr(config, name) for name in ("precision", "seq_length", "dropout", "global_batch_size")},
        **{name: getattr(config, name) for name in ("model_name_or_path", "max_steps", "train_samples")},
        "world_size": cell.ranks,
        "micro_batch_size": cell.plan.per_device_train_batch_size,
        "engine_override": json.dumps(list(config.engine_override)),
    }
    expected = dict(item.split("=", 1) for item in settings.split())
    return all(_equals(values[name], text) for name, text in expected.items())


def _equals(value: object, text: str) -> bool:
    return value == float(text) if isinstance(value, int | float) else value == text


def page(scoreboard: Scoreboard) -> str:
    """Return docs/gpu_checks.md as text."""
    checks = gpu_checks(scoreboard)
    open_checks = [item for item in checks if not item.answer]
    return render_markdown(
        "gpu_checks.md.j2",
        checks=_checks(checks),
        runs=_runs(open_checks),
        claims=len(_claims(checks)),
        figures=len(checks),
        judged=len(checks) - len(open_checks),
    )


def _checks(checks: Sequence[GpuCheck]) -> pd.DataFrame:
    rows: list[tuple[object, ...]] = []
    for item in checks:
        check, claim = item.check, item.judged.claim
        link = Link(claim.id, f"claims.md#{claim.id.lower()}")
        passes = check.region.words(check.unit)
        rows.append(
            (
                link,
                check.shows,
                passes,
                item.answer or "-",
                *_cost(item.feeds),
                item.without,
                item.finding_if(True),
                item.finding_if(False),
            )
        )
        if item.place == gpu_places(item.judged)[-1] and len(gpu_places(item.judged)) > 1:
            feeds = dict.fromkeys(feed for row in checks if row.judged is item.judged for feed in row.feeds)
            outcomes = [finding_if_all(item.judged, passes) for passes in (True, False)]
            rows.append((link, "all of these", "-", "-", *_cost(tuple(feeds)), item.without, *outcomes))
    columns = (
        "claim",
        "figure",
        "passes at",
        "so far",
        "suite",
        "a GPU of",
        "minutes",
        "without a GPU",
        "if it passes",
        "if it fails",
    )
    return pd.DataFrame(rows, columns=columns)


def _cost(feeds: Sequence[Feed]) -> tuple[str, str, str]:
    """Return the suites, the GPU and the minutes of cells, as texts."""
    suites = ", ".join(dict.fromkeys(f"`{feed.suite.name}`" for feed in feeds))
    is_large = any(feed.suite.requires.gpu_memory_gib > _GIB_OF_80_GB for feed in feeds)
    return suites, "141 GB" if is_large else "80 GB", f"{sum(feed.seconds for feed in feeds) / 60:.1f}"


def _claims(checks: Sequence[GpuCheck]) -> list[str]:
    return list(dict.fromkeys(item.judged.claim.id for item in checks))


def _runs(checks: Sequence[GpuCheck]) -> pd.DataFrame:
    """Return the sets of cells that feed the same claims of these checks, those with most claims per minute first."""
    fed: dict[Feed, list[str]] = {}
    for item in checks:
        for feed in item.feeds:
            fed.setdefault(feed, []).append(item.judged.claim.id)
    sets: dict[tuple[str, tuple[str, ...]], list[Feed]] = {}
    for feed, claims in fed.items():
        sets.setdefault((feed.suite.name, tuple(dict.fromkeys(claims))), []).append(feed)
    rows = []
    for (_, ids), feeds in sets.items():
        strategies = ", ".join(dict.fromkeys(f"`{feed.cell.strategy}`" for feed in feeds))
        precisions = ", ".join(dict.fromkeys(feed.cell.config.precision for feed in feeds))
        suite, gpu, minutes = _cost(feeds)
        rows.append((suite, strategies, precisions, len(feeds), gpu, minutes, ", ".join(ids)))
    rows.sort(key=lambda row: float(row[5]) / len(row[6].split(", ")))
    return pd.DataFrame(rows, columns=("suite", "strategies", "precision", "cells", "a GPU of", "minutes", "claims"))
