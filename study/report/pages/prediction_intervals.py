"""Intervals of predictions by kind of training, and how many figures of pages that did not make them they cover."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, get_args

import numpy
import pandas as pd
import yaml

from study.predictor.hardware import known_devices
from study.predictor.intervals import NOT_KNOWN, Kind, interval_name
from study.predictor.recorded_runs import ALL_STATE, SENT
from study.predictor.run_predictions import compare_figures, host_memory_table
from study.predictor.validation.setups import SetupPair, fit_single_error, held_out_pairs

OWN = "own"
ADAPTERS = "published, adapters"
# Fraction of scored rows within an interval. Pages have equal weight: a reader's hardware is on none of them.
INTERVAL_COVERAGE = 0.8
# The largest of n pages bounds the next one with the probability n / (n + 1): 90 % from 9 pages on.
MIN_PAGES = 9
# Figures of published rows, in the names of intervals.
PublishedFigure = Literal["above_state", "step_s"]
_TITLES: dict[PublishedFigure, str] = {"above_state": "peak memory", "step_s": "step time"}
_USES: dict[PublishedFigure, str] = {"above_state": "use_memory", "step_s": "use"}
_ERRORS: dict[PublishedFigure, str] = {"above_state": "peak_error", "step_s": "step_error"}
# Kinds whose pages make the interval of full training.
_GENERAL: dict[PublishedFigure, tuple[Kind, ...]] = {
    "above_state": ("full", "offload", "scale"),
    "step_s": ("full", "scale"),
}
# Measured over predicted figures, and their pages.
Ratios = tuple[pd.Series, pd.Series]
_HEAD = """\
# Written by `python -m study.report.pages.prediction report`: between which shares of a predicted figure
# {within:.0%} of the measured ones lie, each published page counting the same, and over how many rows and pages. Of a
# peak: of the bytes above weights and optimizer, which are certain. Kinds of training have separate lines: adapters,
# offload, and scale (several nodes, or more than 64 GPUs). A kind of fewer than {least} pages has of its peak the wider
# of the general line and the range of its rows, and of its step no interval (too_few_pages). Calibrated figures are of
# configurations of which another one of the same setup was measured. host_error: over runs on one GPU, no interval.
"""


def counted(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without those refused as arithmetically impossible."""
    return scores[scores["refused"].isna()]


def by_origin(scores: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the counted rows by whether others published them; published rows of adapters are a third kind."""
    rows = counted(scores)
    is_own, has_adapters = rows["source"] == OWN, rows["adapters"]
    return {
        "published": rows[~is_own & ~has_adapters],
        "own records": rows[is_own],
        ADAPTERS: rows[~is_own & has_adapters],
    }


def page(rows: pd.DataFrame) -> pd.Series:
    """Return the web page of each row: the sources on one page share hardware, code and an author."""
    return rows["url"].str.split("#").str[0]


def held_out_rows(scores: pd.DataFrame, figure: PublishedFigure, kinds: Collection[Kind]) -> pd.DataFrame:
    """Return the published rows of these kinds with the figure, without those that fitted it or chose its rule."""
    rows = counted(scores)
    rows = rows[(rows["source"] != OWN) & rows["kind"].isin(kinds) & (rows[_USES[figure]] == "score")]
    return rows[rows[_ERRORS[figure]].notna()]


def published_ratios(scores: pd.DataFrame, figure: PublishedFigure, kinds: Collection[Kind]) -> Ratios:
    """Return measured over predicted figures of held-out published rows of these kinds, and their pages."""
    rows = held_out_rows(scores, figure, kinds)
    if figure == "step_s":
        ratios = rows["step_s"] / rows["predicted_step_s"]
    else:
        above, predicted = (rows[name] - rows["state_gib"] for name in ("peak_gib", "predicted_peak_gib"))
        # A prediction of no more than the state has no ratio.
        ratios = above / predicted.where(predicted > 0)
    ratios = ratios.dropna()
    return ratios, page(rows)[ratios.index]


def _without(ratios: Ratios, page_: str) -> Ratios:
    values, pages = ratios
    is_kept = pages != page_
    return values[is_kept], pages[is_kept]


def _interval(ratios: pd.Series, pages: pd.Series | None = None) -> dict[str, Any]:
    """Return the two quantiles of the ratios, their rows and their pages; each page has the same weight."""
    order = ratios.dropna().sort_values()
    row_pages = pd.Series(0, order.index) if pages is None else pages[order.index]
    weights = 1 / row_pages.groupby(row_pages).transform("count")
    below = (weights.cumsum() - weights / 2) / weights.sum()
    low, high = numpy.interp([(1 - INTERVAL_COVERAGE) / 2, (1 + INTERVAL_COVERAGE) / 2], below, order)
    counts = {"rows": len(order)} if pages is None else {"rows": len(order), "pages": row_pages.nunique()}
    return {"low": round(float(low), 3), "high": round(float(high), 3), **counts}


def _extremes(ratios: pd.Series, pages: pd.Series | None = None) -> dict[str, Any]:
    """Return the least and the largest ratio, their rows and their pages."""
    counts = {"rows": len(ratios)} if pages is None else {"rows": len(ratios), "pages": pages.nunique()}
    return {"low": round(float(ratios.min()), 3), "high": round(float(ratios.max()), 3), **counts}


def _kind_interval(kind: Kind, figure: PublishedFigure, kind_ratios: Ratios, general: Ratios) -> dict[str, Any] | None:
    """Return the interval of a kind from its own rows and those of full training; None if its pages are too few."""
    if kind == "full":
        return _interval(*general)
    if kind_ratios[1].nunique() >= MIN_PAGES:
        return _interval(*kind_ratios)
    if figure == "step_s":
        return None
    line, extremes = _interval(*general), _extremes(*kind_ratios)
    return extremes | {"low": min(line["low"], extremes["low"]), "high": max(line["high"], extremes["high"])}


def coverage_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return how many figures of a page lie within the intervals of all other pages; each page counts the same."""
    lines = [_kind_line(scores, kind, figure) for kind in get_args(Kind) for figure in get_args(PublishedFigure)]
    setups, _ = _setup_ratios()
    setup_pairs: dict[PublishedFigure, list[SetupPair]] = {
        "above_state": held_out_pairs("peak"),
        "step_s": _plain_step_pairs(),
    }
    for figure, pairs in setup_pairs.items():
        ratios, errors = setups[f"calibrated_{figure}"], pd.Series([pair.error for pair in pairs])
        line = _coverage_line("full", figure, ratios, ratios)
        lines.append({"kind": "measured setup", "figure": _TITLES[figure], **_error_cells(errors, ratios[1]), **line})
    return pd.DataFrame(lines)


def _error_cells(errors: pd.Series, pages: pd.Series) -> dict[str, object]:
    """Return the number of sources and rows, the median error and the largest one."""
    sizes = errors.abs()
    return {
        "sources": pages.nunique(),
        "rows": len(sizes),
        "median error": f"{sizes.median():.1%}",
        "worst": f"{sizes.max():.1%}",
    }


def _kind_line(scores: pd.DataFrame, kind: Kind, figure: PublishedFigure) -> dict[str, object]:
    rows = held_out_rows(scores, figure, (kind,))
    kind_ratios, general = (published_ratios(scores, figure, kinds) for kinds in ((kind,), _GENERAL[figure]))
    return {
        "kind": kind,
        "figure": _TITLES[figure],
        **_error_cells(rows[_ERRORS[figure]], page(rows)),
        **_coverage_line(kind, figure, kind_ratios, general),
    }


def _coverage_line(kind: Kind, figure: PublishedFigure, kind_ratios: Ratios, general: Ratios) -> dict[str, object]:
    """Return the interval of a kind, and the coverage of each of its pages by the interval without that page."""
    values, pages = kind_ratios
    interval = _kind_interval(kind, figure, kind_ratios, general)
    within, below = list[float](), list[float]()
    for page_ in pages.unique():
        line = _kind_interval(kind, figure, _without(kind_ratios, page_), _without(general, page_))
        if line is not None:
            left_out = values[pages == page_]
            within.append(float(left_out.between(line["low"], line["high"]).mean()))
            below.append(float((left_out <= line["high"]).mean()))
    return {
        "measured / predicted": NOT_KNOWN if interval is None else f"{interval['low']:.2f} to {interval['high']:.2f}",
        f"within the {INTERVAL_COVERAGE:.0%} interval": _mean_text(within),
        "below its upper bound (90%)": _mean_text(below),
    }


def _mean_text(fractions: list[float]) -> str:
    return f"{numpy.mean(fractions):.0%}" if fractions else "-"


def intervals_text(frame: pd.DataFrame) -> str:
    """Return the intervals of study/predictor/intervals.py as YAML: measured values as fractions of the predicted."""
    setups, both_offload = _setup_ratios()
    table, few = _kind_intervals(frame)
    table |= {what: _interval(values) for what, values in _record_ratios(frame).items() if values.notna().any()}
    table |= {what: _interval(*ratios) for what, ratios in setups.items()}
    if len(both_offload):
        few["calibrated_offload_step_s"] = _extremes(both_offload)
    host = host_memory_table()["error"].abs()
    if len(host):
        # No interval: all of one GPU, and of one process a node.
        table["host_error"] = {
            "median": round(float(host.median()), 3),
            "worst": round(float(host.max()), 3),
            "rows": len(host),
        }
    document = {
        "single_error": fit_single_error(),
        **table,
        "too_few_pages": few,
        "timed_devices": _timed_devices(frame),
    }
    return _HEAD.format(within=INTERVAL_COVERAGE, least=MIN_PAGES) + yaml.safe_dump(document, sort_keys=False)


def _kind_intervals(frame: pd.DataFrame) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the intervals of each kind of training, and the extremes of kinds with too few pages."""
    table, few = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for figure in get_args(PublishedFigure):
        general = published_ratios(frame, figure, _GENERAL[figure])
        for kind in get_args(Kind):
            kind_ratios, name = published_ratios(frame, figure, (kind,)), interval_name(kind, figure)
            if kind_ratios[0].empty:
                continue
            if (interval := _kind_interval(kind, figure, kind_ratios, general)) is None:
                few[name] = _extremes(*_all_steps(frame, kind))
                continue
            table[name] = interval
            if figure == "step_s":
                values, pages = general if kind == "full" else kind_ratios
                table[interval_name(kind, "tokens")] = _interval(1 / values, pages)
    return table, few


def _all_steps(frame: pd.DataFrame, kind: Kind) -> Ratios:
    """Return measured over predicted steps of a kind, of adapters with those by which rules were found."""
    if kind != "adapters":
        return published_ratios(frame, "step_s", (kind,))
    rows = by_origin(frame)[ADAPTERS]
    ratios = (rows["step_s"] / rows["predicted_step_s"]).dropna()
    return ratios, page(rows)[ratios.index]


def _timed_devices(frame: pd.DataFrame) -> list[str]:
    """Return the devices of published and own step times, without which a time is not validated."""
    timed = frame[frame["step_s"].notna() & frame["predicted_step_s"].notna()]
    return sorted({*timed["device"]} & {device.name for device in known_devices()})


def _record_ratios(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Return measured over predicted figures of own records: memory of a process without a GPU, state and traffic."""
    recorded = by_origin(frame)["own records"]
    processes = recorded[recorded["peak_kind"] == "resident"]
    ratios = {"process": processes["peak_gib"] / processes["predicted_peak_gib"]}
    comparisons = list(compare_figures())
    for what, figure in (("state", ALL_STATE), ("sent", SENT), ("nvme", "optimizer, nvme")):
        matches = [row for row in comparisons if row.figure == figure and row.measured > 1000]
        # A prediction of 0 has no ratio: table() of study/predictor/run_predictions.py counts it as an error of 100 %.
        shares = [row.measured / row.predicted for row in matches if row.predicted]
        ratios[what] = pd.Series(shares, dtype="float64")
    return ratios


def _plain_step_pairs() -> list[SetupPair]:
    """Return the pairs of steps without offload."""
    return [pair for pair in held_out_pairs("step") if not pair.row.request.offloads]


def _setup_ratios() -> tuple[dict[str, Ratios], pd.Series]:
    """Return measured over predicted figures of configurations of which another one of their setup was measured, with
    their pages; and those of steps with offload, which have no interval."""
    steps, peaks, plain = held_out_pairs("step"), held_out_pairs("peak"), _plain_step_pairs()
    pages = pd.Series([pair.page for pair in plain])
    ratios = pd.Series([pair.value / pair.after for pair in plain])
    above = pd.Series([(pair.value - pair.state) / (pair.after - pair.state) for pair in peaks])
    offloaded = pd.Series([pair.value / pair.after for pair in steps if pair.offloads])
    figures = {
        "calibrated_step_s": (ratios, pages),
        "calibrated_tokens": (1 / ratios, pages),
        "calibrated_above_state": (above, pd.Series([pair.page for pair in peaks])),
    }
    return figures, offloaded
