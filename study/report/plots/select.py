"""Which runs belong in one figure, in which order, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from study.report.plots.canvas import Drawing
from study.report.records.frames import Records, real
from study.report.records.workloads import strategy_order

# More than this many workloads in one notebook is a heap; the tables hold them all.
MOST_WORKLOADS = 6


def finished(records: Records) -> pd.DataFrame:
    """The runs that trained to their end on devices that were there: nothing else has a loss or a time."""
    runs = real(records).runs
    return runs[runs["status_state"] == "ok"]


def workloads(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The runs that may be compared with each other; of many workloads those with most runs."""
    if runs.empty:
        return
    sizes = runs.groupby("workload").size().sort_values(ascending=False, kind="stable")
    for workload in sorted(sizes.index[:MOST_WORKLOADS]):
        yield str(workload), runs[runs["workload"] == workload]


def per_workload(
    name: str, runs: pd.DataFrame, draw: Callable[[str, str, pd.DataFrame], Drawing | None]
) -> list[Drawing]:
    """A numbered drawing of each workload that has something to draw."""
    drawings = (
        draw(f"{name}_{place}", workload, chosen) for place, (workload, chosen) in enumerate(workloads(runs), 1)
    )
    return [drawing for drawing in drawings if drawing is not None]


def arms_of(runs: pd.DataFrame) -> list[str]:
    """In the order of the strategies, from plain training to the most offloaded."""
    arms = runs.drop_duplicates("arm")
    places = zip(arms["strategy"].map(strategy_order), arms["world_size"], arms["arm"], strict=True)
    return [str(arm) for _, _, arm in sorted(places)]


def notes_of(runs: pd.DataFrame, column: str = "confounded") -> dict[str, str]:
    """What breaks the comparison, by arm; empty where nothing does."""
    return {str(arm): "; ".join(sorted({text for text in group if text})) for arm, group in runs.groupby("arm")[column]}


def whole_parameters(runs: pd.DataFrame) -> pd.Series:
    """Bytes of all parameters, where a run holds them undivided; else nothing."""
    undivided = (runs["zero_stage"].fillna(0) < 3) & (runs["distributed_type"] != "FSDP")
    return runs["params_bytes_device"].where(undivided.astype(bool))
