"""Tables and the plot of the scores, for the committed summary and for the notebook, from scores.parquet alone."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import pandas as pd
import yaml
from IPython.display import HTML, display

from study.config.errors import RunFailed, UserError, extra
from study.config.strategies import REPOSITORY, from_root
from study.predictor.time import FILE as INTERVALS_FILE
from study.predictor.validation.league import standings
from study.predictor.validation.measured import Measured, impossible, score
from study.predictor.validation.own import ALL_STATE, SENT, own_rows, saving_table
from study.predictor.validation.own import compared as own_compared
from study.predictor.validation.own import table as own_table
from study.predictor.validation.published import published_rows, refused_sources, sources
from study.report.site.page import markdown_text, table_html, table_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SCORES, LEAGUE = "scores.parquet", "league.parquet"
# What the code of an earlier commit said of suites that had not run then, and that the rules were mended by since.
FORETOLD = "foretold.csv"
# What the predictions were to reach against published rows, and with own records.
AIMS = {"peak": 0.10, "step": 0.15, "own peak": 0.05}
OWN = "own"
# Of own records, by `peak_kind`.
OWN_KINDS = {
    "resident": "own real ranks",
    "resident_returned": "own virtual ranks",
    "allocated": "own GPU runs",
}


def read(folder: Path) -> pd.DataFrame:
    file = folder / SCORES
    if not file.is_file():
        raise UserError(f"there is no {file}", "make it: python -m study.report.pages.prediction report")
    return pd.read_parquet(file)


def counted(scores: pd.DataFrame) -> pd.DataFrame:
    """Without what arithmetic refused."""
    return scores[scores["refused"].isna()]


def page(rows: pd.DataFrame) -> pd.Series:
    """One page may be several sources, which share a box, a code base and an author."""
    return rows["url"].str.split("#").str[0]


def foretold(folder: Path, scores: pd.DataFrame) -> pd.DataFrame:
    """Beside what today's rules say of the same ranks."""
    rows = pd.read_csv(folder / FORETOLD)
    now = scores[scores["source"] == OWN].set_index("name")["peak_error"].reindex(rows["suite"] + " " + rows["run"])
    rows = rows.assign(then=rows["predicted_gib"] / rows["measured_gib"] - 1, now=now.to_numpy())
    return pd.DataFrame([
        {
            "suite": suite, "predicted by": some["predicted_by"].iloc[0], "rows": len(some),
            "median error": _percent(some["then"].abs().median()), "worst": _percent(some["then"].abs().max()),
            "worst since": _percent(some["now"].abs().max()),
        }
        for suite, some in rows.groupby("suite", sort=False)
    ])  # fmt: skip


def headline(scores: pd.DataFrame) -> pd.DataFrame:
    rows = counted(scores)
    own, published = rows[rows["source"] == OWN], rows[rows["source"] != OWN]
    own_peaks = [
        (f"peak memory, {what}", own[own["peak_kind"] == kind]["peak_error"], AIMS["own peak"])
        for kind, what in OWN_KINDS.items()
    ]
    scored = published[published["use"] == "score"]
    offloaded, scored = (scored[scored["offloads"] == is_so] for is_so in (True, False))
    fitted = page(scored).isin(page(rows[rows["use"] == "fit"]))
    kinds = [
        ("peak memory, published", published[published["use_memory"] == "score"]["peak_error"], AIMS["peak"]),
        ("step time, published, rows that fitted nothing", scored["step_error"], AIMS["step"]),
        ("step time, pages that fitted nothing", scored[~fitted]["step_error"], AIMS["step"]),
        ("step time, published, offload: no interval", offloaded["step_error"], AIMS["step"]),
        *own_peaks,
        ("step time, own GPU runs", own["step_error"], AIMS["step"]),
    ]
    return pd.DataFrame([_line(what, errors, f"{aim:.0%}") for what, errors, aim in kinds if errors.notna().any()])


def fits(scores: pd.DataFrame) -> pd.DataFrame:
    """Said to fit and did not costs a run; said not to fit and did costs a chance."""
    found = []
    for what, rows in _parts(counted(scores)):
        known = rows[rows["fits"].notna() & rows["predicted_fits"].notna()]
        if len(known):
            said, was = known["predicted_fits"].astype(bool), known["fits"].astype(bool)
            found.append({
                "rows": what, "judged": len(known), "right": _percent((said == was).mean()),
                "of those that ran out, called": f"{int((~said & ~was).sum())} of {int((~was).sum())}",
                "said to fit, and did not": int((said & ~was).sum()),
                "said not to fit, and did": int((~said & was).sum()),
            })  # fmt: skip
    return pd.DataFrame(found)


def by(scores: pd.DataFrame, column: str) -> pd.DataFrame:
    """Errors by source, by strategy, by device; rows that fitted a constant are left out of time."""
    lines = []
    for name, rows in counted(scores).groupby(column, sort=False):
        scored = rows[rows["use"] == "score"]
        peaks = rows[rows["use_memory"] == "score"]
        for what, errors in (("step time", scored["step_error"]), ("peak memory", peaks["peak_error"])):
            if errors.notna().any():
                lines.append({column: name, **_line(what, errors, None)})
    return pd.DataFrame(lines)


def each(scores: pd.DataFrame) -> pd.DataFrame:
    rows = counted(scores)
    return pd.DataFrame({
        "source": rows["source"], "run": rows["name"], "precision": rows["precision"],
        "peak, GiB": rows["peak_gib"].map(_number), "predicted": rows["predicted_peak_gib"].map(_number),
        "error": rows["peak_error"].map(_signed),
        "step, s": rows["step_s"].map(_number), "predicted ": rows["predicted_step_s"].map(_number),
        "error ": rows["step_error"].map(_signed),
        "fits": rows["fits"].map(_said), "said": rows["predicted_fits"].map(_said), "use": rows["use"],
    })  # fmt: skip


def refused(scores: pd.DataFrame) -> pd.DataFrame:
    rows = scores[scores["refused"].notna()]
    return pd.DataFrame({"source": rows["source"], "run": rows["name"], "why": rows["refused"]})


def league(folder: Path) -> pd.DataFrame:
    return league_table(pd.read_parquet(folder / LEAGUE))


def league_table(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({
        "rows": rows["rows"], "tool": rows["tool"], "peaks it speaks of": rows["peaks"],
        "median error": rows["median_error"].map(_percent), "worst": rows["worst_error"].map(_percent),
        "fit or not, right": rows["right"].astype(str) + " of " + rows["judged"].astype(str),
        "of those that ran out, called": rows["called"].astype(str) + " of " + rows["ran_out"].astype(str),
    })  # fmt: skip


def drawing(scores: pd.DataFrame) -> Figure:
    """Predicted over measured, for each figure; the line is agreement."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    drawn = {"peak_gib": "GiB at the peak", "step_s": "seconds of a step"}
    for place, (name, unit) in zip(axes, drawn.items(), strict=True):
        rows = counted(scores).dropna(subset=[name])
        for source, some in rows.groupby(rows["source"] == OWN):
            label = "own records" if source else "published"
            place.scatter(some[name], some[f"predicted_{name}"], s=14, alpha=0.6, label=label)
        if len(rows):
            ends = [rows[name].min(), rows[name].max()]
            place.plot(ends, ends, color="grey", linewidth=1)
            place.legend()
        place.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel="predicted")
    plt.close(figure)
    return figure


def _parts(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield "published", rows[rows["source"] != OWN]
    yield "own records", rows[rows["source"] == OWN]


def _line(what: str, errors: pd.Series, aim: str | None) -> dict[str, object]:
    sizes = errors.dropna().abs()
    line: dict[str, object] = {"figure": what, "rows": len(sizes), "median error": _percent(sizes.median())}
    if aim is not None:
        line["aim"] = aim
    return {**line, "worst": _percent(sizes.max()), "leans": _signed(errors.dropna().median())}


def _percent(share: float) -> str:
    return "not measured" if pd.isna(share) else f"{share:.1%}"


def _signed(share: float) -> str:
    return "" if pd.isna(share) else f"{share:+.0%}"


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.3g}"


def _said(value: object) -> str:
    return "" if value is None or pd.isna(value) else "fits" if value else "out of memory"


class Predictions:
    """Of one source or one strategy, or all."""

    def __init__(self, reports_dir: str, source: str = "", strategy: str = "") -> None:
        self._folder = from_root(reports_dir)
        self._scores = read(self._folder)
        for column, asked in (("source", source), ("strategy", strategy)):
            known = list(dict.fromkeys(self._scores[column]))
            if asked and asked not in known:
                raise UserError(f"no row has the {column} {asked!r}", f"use one of {', '.join(known)}")
            if asked:
                self._scores = self._scores[self._scores[column] == asked]

    def headline(self) -> None:
        _show(headline(self._scores))

    def drawing(self) -> None:
        display(drawing(self._scores))

    def fits(self) -> None:
        _show(fits(self._scores))

    def league(self) -> None:
        _show(league(self._folder))

    def by(self, column: str) -> None:
        _show(by(self._scores, column))

    def each(self) -> None:
        _show(each(self._scores))

    def refused(self) -> None:
        _show(refused(self._scores))


def _show(table: pd.DataFrame) -> None:
    display(HTML(table_html(table)) if len(table) else "nothing of that")


FOLDER = REPOSITORY / "reports" / "prediction"
# Of scored rows, this share lies within an interval. Each page counts the same: a reader's box is of none of them.
WITHIN = 0.8
_INTERVALS_HEAD = """\
# Written by `python -m study.report.pages.prediction report`: between which shares of a predicted figure
# {within:.0%} of the measured ones lie, each published page counting the same, and over how many rows and pages. Of a
# peak: of what is above weights and optimizer, which are certain.
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
            if (row.source == OWN) == (what == "own records")
            and not impossible(row) and row.request.shape.lora_rank is None
        ]  # fmt: skip
        if some:
            lines += [{"rows": what, **dataclasses.asdict(one)} for one in standings(some)]
    return pd.DataFrame(lines)


def write(folder: Path = FOLDER, intervals_file: Path = INTERVALS_FILE) -> None:
    rows = all_rows()
    frame = scores_frame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder / SCORES)
    league_frame(rows).to_parquet(folder / LEAGUE)
    (folder / "summary.md").write_text(summary(frame, folder), encoding="utf-8")
    intervals_file.write_text(intervals_text(frame), encoding="utf-8")


def summary(frame: pd.DataFrame, folder: Path) -> str:
    parts = [
        "# Predictions held against measurements",
        "Made by `python -m study.report.pages.prediction report`; the same tables with a plot:"
        " `notebooks/prediction.ipynb`. An error is predicted over measured, less one. Rows that fitted a constant of"
        " time score no time, and rows by which something of memory was chosen score no memory.",
        table_markdown(headline(frame)),
        "Own peaks are how well the rules fit: each kind of own record mended some. What was said of two suites before"
        " they ran, and before the rules were mended by them:",
        table_markdown(foretold(FOLDER, frame)),
        "## Fits, or runs out of memory", table_markdown(fits(frame)),
        "## Beside other estimators", table_markdown(league(folder)),
        "## State and traffic of own records", table_markdown(own_table()),
        "## Host memory while a checkpoint is saved", table_markdown(saving_table()),
        "## By source", table_markdown(by(frame, "source")),
        "## By strategy", table_markdown(by(frame, "strategy")),
        "## By device", table_markdown(by(frame, "device")),
        "## Sources", "\n".join(_source_line(each.id, each.title, each.url, each.note) for each in sources()),
        "## Rows that do not count", table_markdown(refused(frame)),
        "\n".join(_unused_line(**each) for each in refused_sources()),
        "## Every row", table_markdown(each(frame)),
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
    """Shares of the predicted figure, as study/predictor/time.py takes them."""
    rows = counted(frame)
    own, published = (rows[(rows["source"] == OWN) == is_own] for is_own in (True, False))
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
            pages = pd.Series(0, found.index) if of_pages is None else page(of_pages)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m study.report.pages.prediction", allow_abbrev=False)
    parser.add_argument(
        "action", choices=("fit", "report"), metavar="fit|report",
        help="fit the constants of study/predictor/time.py anew; or write reports/prediction and the intervals",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        with extra("report"):
            _run(options.action)
    except (UserError, RunFailed) as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return 0


def _run(action: str) -> None:
    if action == "fit":
        from study.predictor.validation.league import write as write_fit

        print(write_fit(), end="")
    else:
        write()
        print(FOLDER / "summary.md")


if __name__ == "__main__":
    raise SystemExit(main())
