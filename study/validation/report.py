"""Writes reports/prediction, and the intervals that predictions show, from every measurement there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy
import pandas as pd
import yaml

from study.predict import intervals
from study.report.site.page import markdown_text, table_markdown
from study.spec.strategies import REPOSITORY
from study.validation import saving, tables
from study.validation.league import standings
from study.validation.measured import Measured, impossible
from study.validation.own import ALL_STATE, SENT, own_rows
from study.validation.own import compared as own_compared
from study.validation.own import table as own_table
from study.validation.published import published_rows, refused_sources, sources
from study.validation.score import score

FOLDER = REPOSITORY / "reports" / "prediction"
# Of scored rows, this share lies within an interval. Each page counts the same: a reader's box is of none of them.
WITHIN = 0.8
_INTERVALS_HEAD = """\
# Written by `python -m study.validation report`: between which shares of a predicted figure {within:.0%} of the
# measured ones lie, each published page counting the same, and over how many rows and pages. Of a peak: of what is
# above weights and optimizer, which are certain.
"""


def all_rows() -> list[Measured]:
    return published_rows() + own_rows()


def scores_frame(rows: Sequence[Measured]) -> pd.DataFrame:
    scored = [score(row) for row in rows]
    return pd.DataFrame(
        [dataclasses.asdict(row) | {"peak_error": row.peak_error, "step_error": row.step_error} for row in scored]
    ).astype({"fits": "boolean", "predicted_fits": "boolean"})


def league_frame(rows: Sequence[Measured]) -> pd.DataFrame:
    """Published rows and own records apart: what is easy to say of one may be hard of the other."""
    lines = []
    for what in ("published", "own records"):
        # No other estimator knows of adapters.
        some = [
            row for row in rows
            if (row.source == tables.OWN) == (what == "own records")
            and not impossible(row) and row.request.shape.lora_rank is None
        ]  # fmt: skip
        if some:
            lines += [{"rows": what, **dataclasses.asdict(one)} for one in standings(some)]
    return pd.DataFrame(lines)


def write(folder: Path = FOLDER, intervals_file: Path = intervals.FILE) -> None:
    rows = all_rows()
    frame = scores_frame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder / tables.SCORES)
    league_frame(rows).to_parquet(folder / tables.LEAGUE)
    (folder / "summary.md").write_text(summary(frame, folder), encoding="utf-8")
    intervals_file.write_text(intervals_text(frame), encoding="utf-8")


def summary(frame: pd.DataFrame, folder: Path) -> str:
    parts = [
        "# Predictions held against measurements",
        "Made by `python -m study.validation report`; the same tables with a plot: `notebooks/prediction.ipynb`. An"
        " error is predicted over measured, less one. Rows that fitted a constant of time score no time, and rows by"
        " which something of memory was chosen score no memory.",
        table_markdown(tables.headline(frame)),
        "Own peaks are how well the rules fit: each kind of own record mended some. What was said of two suites before"
        " they ran, and before the rules were mended by them:",
        table_markdown(tables.foretold(FOLDER, frame)),
        "## Fits, or runs out of memory", table_markdown(tables.fits(frame)),
        "## Beside other estimators", table_markdown(tables.league(folder)),
        "## State and traffic of own records", table_markdown(own_table()),
        "## Host memory while a checkpoint is saved", table_markdown(saving.table()),
        "## By source", table_markdown(tables.by(frame, "source")),
        "## By strategy", table_markdown(tables.by(frame, "strategy")),
        "## By device", table_markdown(tables.by(frame, "device")),
        "## Sources", "\n".join(_source_line(each.id, each.title, each.url, each.note) for each in sources()),
        "## Rows that do not count", table_markdown(tables.refused(frame)),
        "\n".join(_unused_line(**each) for each in refused_sources()),
        "## Every row", table_markdown(tables.each(frame)),
    ]  # fmt: skip
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _source_line(name: str, title: str, url: str, note: str) -> str:
    said = f": {markdown_text(note)}" if note else ""
    return f"- `{name}`: [{markdown_text(title)}]({url}){said}"


def _unused_line(what: str, why: str, url: str) -> str:
    return f"- [{markdown_text(what)}]({url}): {markdown_text(why)}"


def _interval(ratios: pd.Series, pages: pd.Series) -> tuple[float, float]:
    """The quantiles where each page has the same weight."""
    order = ratios.sort_values()
    weights = 1 / pages.groupby(pages).transform("count")
    below = weights[order.index].cumsum() - weights[order.index] / 2
    low, high = numpy.interp([(1 - WITHIN) / 2, (1 + WITHIN) / 2], below / weights.sum(), order)
    return float(low), float(high)


def intervals_text(frame: pd.DataFrame) -> str:
    """Shares of the predicted figure, as study/predict/intervals.py takes them."""
    rows = tables.counted(frame)
    own, published = (rows[(rows["source"] == tables.OWN) == is_own] for is_own in (True, False))
    scored = published[published["use"] == "score"]
    timed = scored[~scored["offloads"]]
    steps = timed["step_s"] / timed["predicted_step_s"]
    # What a GPU holds above weights and optimizer, and what a process without one does.
    peaks = published[published["use_memory"] == "score"]
    above, said = (peaks[name] - peaks["state_gib"] for name in ("peak_gib", "predicted_peak_gib"))
    processes = own[own["peak_kind"] == "resident"]
    process = processes["peak_gib"] / processes["predicted_peak_gib"]
    ratios = {"step_s": steps, "tokens": 1 / steps, "above_state": above / said, "process": process}
    compared = list(own_compared())
    for what, figure in (("state", ALL_STATE), ("sent", SENT)):
        some = [one for one in compared if one.figure == figure and one.measured > 1000]
        ratios[what] = pd.Series([one.measured / one.predicted for one in some], dtype="float64")
    table = {}
    for what, found in ratios.items():
        if len(found := found.dropna()):
            of_pages = rows.loc[found.index] if what in ("step_s", "tokens", "above_state") else None
            pages = pd.Series(0, found.index) if of_pages is None else tables.page(of_pages)
            low, high = _interval(found, pages)
            table[what] = {"low": round(low, 3), "high": round(high, 3), "rows": len(found)}
            table[what] |= {} if of_pages is None else {"pages": pages.nunique()}
    offloaded = scored[scored["offloads"]]
    if len(found := (offloaded["step_s"] / offloaded["predicted_step_s"]).dropna()):
        # Too few for an interval: the ends of all.
        table["offload_step_s"] = {
            "low": round(float(found.min()), 3), "high": round(float(found.max()), 3), "rows": len(found)
        }  # fmt: skip
    return _INTERVALS_HEAD.format(within=WITHIN) + yaml.safe_dump(table, sort_keys=False)
