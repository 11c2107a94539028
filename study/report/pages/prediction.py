"""reports/prediction: every prediction compared with its measurement, and the intervals that predictions show."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import matplotlib
import pandas as pd
from markupsafe import Markup
from matplotlib.lines import Line2D

from study.benchmark.answers import Predictor, shipped_predictors
from study.benchmark.command import SCORE_COLUMNS, fits_table, marked_name, score_cells
from study.benchmark.questions import ENGINES, BenchmarkQuestion, read_questions, sharding_engine
from study.benchmark.scores import Score, answered_figure
from study.benchmark.scores import scores as benchmark_scores
from study.config.places import REPOSITORY
from study.config.strategies import read_strategy
from study.config.yaml_sections import load_package_yaml
from study.host.memory import GIB
from study.predictor.intervals import FILE as INTERVALS_FILE
from study.predictor.run_predictions import host_memory_table, saving_table, study_rows
from study.predictor.run_predictions import table as own_table
from study.predictor.validation import (
    CAUSES,
    Measurement,
    predicted_peak,
    published_rows,
    refused_sources,
    score,
    sources,
)
from study.predictor.validation.setups import (
    SetupFigure,
    SetupPair,
    held_out_pairs,
    medians_by_page,
)
from study.records.shares import share_text
from study.report.canvas import FAINT, GUIDE, SETTINGS, Drawing, as_svg, finish, sheet
from study.report.document import render_markdown
from study.report.pages.prediction_intervals import (
    INTERVAL_COVERAGE,
    MIN_PAGES,
    OWN,
    by_origin,
    counted,
    coverage_table,
    intervals_text,
    page,
)

FOLDER = REPOSITORY / "reports" / "prediction"
SCORES, FIGURE, LEAGUE_FIGURE = "scores.parquet", "figures/errors.svg", "figures/league.svg"
# Errors of `study predict`, and of other estimators on the rows of commit 7e0ec02, which has the code that ran them.
LEAGUE, OURS, TRACKER = "league.parquet", "study predict", "torch MemTracker"
# Predictions of earlier commits for suites that ran afterwards, and that corrected the rules since.
FORETOLD = "foretold.csv"
# Aimed errors of published rows, and of own records.
AIMS = {"peak": 0.10, "step": 0.15, "own peak": 0.05}
# Sources whose worst row is named with its cause.
_WORST_SOURCES = 5
_UNITS = {"gib": "GiB", "s": "s"}
WorstFigure = Literal["peak", "step"]
# Errors of runs that others published.
HELD_OUT = (
    "peak memory, published",
    "step time, published, rows that fitted nothing",
    "step time, published, offload: no interval",
)
# Own records by `peak_kind`.
OWN_KINDS = {"resident": "own real ranks", "resident_returned": "own virtual ranks", "allocated": "own GPU runs"}


def preregistered_table(folder: Path, scores: pd.DataFrame) -> pd.DataFrame:
    """Return errors of predictions made before a suite ran, and of today's rules for the same ranks."""
    rows = _foretold(folder)
    now = scores[scores["source"] == OWN].set_index("name")["peak_error"].reindex(rows["suite"] + " " + rows["run"])
    suites = rows.assign(now=now.abs().to_numpy()).groupby("suite", sort=False)
    return pd.DataFrame(
        {
            "predicted by": suites["predicted_by"].first(),
            "peaks": suites["peak_error"].count(),
            "median error": suites["peak_error"].median().map(_percent),
            "worst": suites["peak_error"].max().map(_percent),
            "worst since": suites["now"].max().map(_percent_or_dash),
            "step times": suites["step_error"].count(),
            "median error of a step": suites["step_error"].median().map(_percent_or_dash),
            "worst step": suites["step_error"].max().map(_percent_or_dash),
        }
    ).reset_index()


def foretold_errors(folder: Path, suites: Collection[str]) -> dict[str, dict[str, float]]:
    """Return how far the peaks and step times of suites were from the predictions made before they ran."""
    rows = _foretold(folder)
    rows = rows[rows["suite"].isin(suites)]
    summaries = {}
    for what in ("peak", "step"):
        errors = rows[f"{what}_error"].dropna()
        summaries[what] = {"median": errors.median(), "rows": len(errors)}
    return summaries


def _foretold(folder: Path) -> pd.DataFrame:
    rows = pd.read_csv(folder / FORETOLD)
    errors = {
        f"{what}_error": (rows[f"predicted_{figure}"] / rows[f"measured_{figure}"] - 1).abs()
        for what, figure in (("peak", "gib"), ("step", "step_s"))
    }
    return rows.assign(**errors)


def _percent_or_dash(error: float) -> str:
    return "-" if pd.isna(error) else _percent(error)


def headline(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the errors of peak memory and step time over published and own rows, next to their aims."""
    rows, (published, study_rows, _) = counted(scores), by_origin(scores).values()
    study_peaks = [
        (f"peak memory, {what}", study_rows[study_rows["peak_kind"] == kind]["peak_error"], AIMS["own peak"])
        for kind, what in OWN_KINDS.items()
    ]
    scored = published[published["use"] == "score"]
    offloaded, scored = (scored[scored["offloads"] == is_so] for is_so in (True, False))
    # Rules of adapters chose nothing for full training on the same page.
    fitted = page(scored).isin(page(rows[(rows["use"] != "score") & ~rows["adapters"]]))
    kinds = [
        (HELD_OUT[0], published[published["use_memory"] == "score"]["peak_error"], AIMS["peak"]),
        (HELD_OUT[1], scored["step_error"], AIMS["step"]),
        ("step time, pages that fitted nothing", scored[~fitted]["step_error"], AIMS["step"]),
        (HELD_OUT[2], offloaded["step_error"], AIMS["step"]),
        *study_peaks,
        ("step time, own GPU runs", study_rows["step_error"], AIMS["step"]),
    ]
    return pd.DataFrame(
        [
            _line(what, errors, f"{aim:.0%}") | {"worst strategy, median error": _worst_strategy(rows, errors)}
            for what, errors, aim in kinds
            if errors.notna().any()
        ]
    )


def _worst_strategy(rows: pd.DataFrame, errors: pd.Series) -> str:
    """Return the strategy with the largest median error, which an error over all strategies hides."""
    sizes = errors.dropna().abs()
    strategies = sizes.groupby(rows["strategy"].reindex(sizes.index))
    worst = strategies.median().idxmax()
    return f"{worst}: {_percent(strategies.median()[worst])} of {strategies.count()[worst]}"


def measured_peaks(scores: pd.DataFrame) -> dict[str, int]:
    """Return the number of held-out published peaks, and of their runs: some were measured in two ways."""
    published = by_origin(scores)["published"]
    scored = published[(published["use_memory"] == "score") & published["peak_error"].notna()]
    ways = scored.groupby([page(scored), "name", "peak_kind"]).size()
    runs = ways.groupby(level=[0, 1]).max().sum()
    return {"peaks": len(scored), "runs": int(runs)}


def fits(scores: pd.DataFrame) -> pd.DataFrame:
    """Count right and wrong answers: a wrong "fits" costs a run, a wrong "does not fit" a chance."""
    counts = []
    for what, group in by_origin(scores).items():
        judged = group.dropna(subset=["fits", "predicted_fits"])
        if len(judged):
            predicted, measured = judged["predicted_fits"].astype(bool), judged["fits"].astype(bool)
            ran_out, called = int((~measured).sum()), int((~predicted & ~measured).sum())
            counts.append(
                {
                    "rows": what,
                    "judged": len(judged),
                    "right": _percent((predicted == measured).mean()),
                    "of those that ran out, called": share_text(called, ran_out),
                    "said to fit, and did not": int((predicted & ~measured).sum()),
                    "said not to fit, and did": int((~predicted & measured).sum()),
                }
            )
    return pd.DataFrame(counts)


def kinds_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the errors of published rows by engine and kind of training, and whether these rows are held out.

    Rows by which something was fitted or chosen are left out, unless a kind has no others: then they are shown as such.
    """
    published, _, adapters = by_origin(scores).values()
    offloads = published["offloads"]
    quantized = adapters["name"].str.contains("QLoRA")
    engines, adapter_engines = (
        rows["strategy"].map(lambda name: sharding_engine(read_strategy(name))) for rows in (published, adapters)
    )
    kinds = {
        **{f"full training, {engine}": published[~offloads & (engines == engine)] for engine in ENGINES},
        "full training, DeepSpeed with offload": published[offloads],
        **{
            f"{name}, {engine}": adapters[is_kind & (adapter_engines == engine)]
            for name, is_kind in (("LoRA", ~quantized), ("QLoRA", quantized))
            for engine in ENGINES
        },
    }
    lines = []
    for kind, rows in kinds.items():
        for what, use, error in (("peak memory", "use_memory", "peak_error"), ("step time", "use", "step_error")):
            scored = rows[rows[use] == "score"][error]
            is_held_out = bool(scored.notna().any())
            errors = scored if is_held_out else rows[error]
            if errors.notna().any():
                lines.append({"kind": kind, **_line(what, errors, None), "held out": "yes" if is_held_out else "no"})
    return pd.DataFrame(lines)


def setups_table() -> pd.DataFrame:
    """Return errors of configurations of which another one of the same setup was measured, with it and without it."""
    figures: dict[str, SetupFigure] = {"peak memory": "peak", "step time": "step"}
    return pd.DataFrame([_setups_line(name, held_out_pairs(figure)) for name, figure in figures.items()])


def _setups_line(name: str, pairs: Sequence[SetupPair]) -> dict[str, object]:
    before, after = (pd.Series(medians_by_page(pairs, before=is_before)) for is_before in (True, False))
    return {
        "figure": name,
        "pages": len(after),
        "pairs": len(pairs),
        "median error of a page, alone": _percent(before.median()),
        "with a measured one": _percent(after.median()),
        "mean of pages, alone": _percent(before.mean()),
        "with a measured one ": _percent(after.mean()),
        "better on": share_text(int((after < before).sum()), len(after)),
    }


def errors_by(scores: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return errors grouped by a column; step times exclude rows that fitted a constant."""
    lines = []
    for name, rows in counted(scores).groupby(column, sort=False):
        scored = rows[rows["use"] == "score"]
        peaks = rows[rows["use_memory"] == "score"]
        for what, errors in (("step time", scored["step_error"]), ("peak memory", peaks["peak_error"])):
            if errors.notna().any():
                lines.append({column: name, **_line(what, errors, None)})
    return pd.DataFrame(lines)


def all_rows_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return every row with its measured and its predicted figures."""
    rows = counted(scores)
    return pd.DataFrame(
        {
            "source": rows["source"],
            "run": rows["name"],
            "precision": rows["precision"],
            "peak, GiB": rows["peak_gib"].map(_number),
            "predicted": rows["predicted_peak_gib"].map(_number),
            "error": rows["peak_error"].map(_signed),
            "step, s": rows["step_s"].map(_number),
            "predicted ": rows["predicted_step_s"].map(_number),
            "error ": rows["step_error"].map(_signed),
            "fits": rows["fits"].map(_said),
            "said": rows["predicted_fits"].map(_said),
            "use": rows["use"],
        }
    )


def worst_rows_table(scores: pd.DataFrame, figure: WorstFigure) -> pd.DataFrame:
    """Return the worst held-out row of each of the sources with the largest errors, with its cause."""
    use, unit = ("use_memory", "gib") if figure == "peak" else ("use", "s")
    rows = counted(scores)
    rows = rows[(rows["source"] != OWN) & (rows[use] == "score")].dropna(subset=[f"{figure}_error"])
    order = rows[f"{figure}_error"].abs().sort_values(ascending=False).index
    worst = rows.loc[order].drop_duplicates("source").head(_WORST_SOURCES)
    causes = load_package_yaml(CAUSES.read_text(encoding="utf-8"))[figure]
    return pd.DataFrame(
        {
            "source": worst["source"],
            "run": worst["name"],
            f"measured, {_UNITS[unit]}": worst[f"{figure}_{unit}"].map(_number),
            "predicted": worst[f"predicted_{figure}_{unit}"].map(_number),
            "error": worst[f"{figure}_error"].map(_signed),
            "cause": worst["source"].map(causes),
        }
    )


def refused_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are impossible by source and reason."""
    refused = scores[scores["refused"].notna()].groupby(["source", "refused"], sort=False)
    return refused.size().reset_index(name="rows").rename(columns={"refused": "why"})[["source", "rows", "why"]]


def _line(what: str, errors: pd.Series, aim: str | None) -> dict[str, object]:
    sizes = errors.dropna().abs()
    line: dict[str, object] = {"figure": what, "rows": len(sizes), "median error": _percent(sizes.median())}
    if aim is not None:
        line["aim"] = aim
    return {**line, "worst": _percent(sizes.max()), "leans": _signed(errors.dropna().median())}


def _percent(fraction: float) -> str:
    return "not measured" if pd.isna(fraction) else f"{fraction:.1%}"


def _signed(fraction: float) -> str:
    return "" if pd.isna(fraction) else f"{fraction:+.0%}"


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.3g}"


def _said(value: object) -> str:
    return "" if value is None or pd.isna(value) else "fits" if value else "out of memory"


def all_rows() -> list[Measurement]:
    """Return the published rows and the study's own."""
    return published_rows() + study_rows()


def scores_frame(rows: Sequence[Measurement]) -> pd.DataFrame:
    """Return a row per measurement with its prediction and its errors."""
    return pd.DataFrame([score(row) for row in rows]).astype({"fits": "boolean", "predicted_fits": "boolean"})


def league_frame(rows: Sequence[Measurement], frame: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of all estimators, with those of `study predict` on these rows; no other supports adapters."""
    league = pd.read_parquet(FOLDER / LEAGUE)
    for what, group in by_origin(frame[[row.request.shape.lora_rank is None for row in rows]]).items():
        errors, judged = group["peak_error"].dropna().abs(), group.dropna(subset=["fits", "predicted_fits"])
        ran_out, called = (~judged[name].astype(bool) for name in ("fits", "predicted_fits"))
        figures = {
            "peaks": len(errors),
            "median_error": errors.median(),
            "worst_error": errors.max(),
            "judged": len(judged),
            "right": (ran_out == called).sum(),
            "ran_out": ran_out.sum(),
            "called": (ran_out & called).sum(),
        }
        league.loc[(league["tool"] == OURS) & (league["rows"] == what), list(figures)] = list(figures.values())
    return league


def write(folder: Path = FOLDER, intervals_file: Path = INTERVALS_FILE) -> None:
    """Write the report of predictions, and the intervals of the predictor."""
    rows = all_rows()
    frame = scores_frame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder / SCORES, compression="zstd", write_statistics=False)
    league_frame(rows, frame).to_parquet(folder / LEAGUE, compression="zstd", write_statistics=False)
    drawn = draw(frame)
    text = summary(frame, folder, *drawn.alts)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    (folder / FIGURE).parent.mkdir(exist_ok=True)
    for name, drawing in ((FIGURE, drawn.errors), (LEAGUE_FIGURE, drawn.league)):
        (folder / name).write_text(as_svg(drawing.figure), encoding="utf-8")
    intervals_file.write_text(intervals_text(frame), encoding="utf-8")


class Drawings(NamedTuple):
    """The figures of the report."""

    errors: Drawing
    league: Drawing

    @property
    def alts(self) -> tuple[str, str]:
        """The texts of both figures."""
        return self.errors.alt, self.league.alt


def draw(frame: pd.DataFrame) -> Drawings:
    """Draw the errors of predictions, and those of all predictors of the benchmark."""
    questions = read_questions()
    benchmark = shipped_predictors(questions)
    lines = benchmark_scores(questions, benchmark)
    return Drawings(errors_figure(frame), league_figure(lines, [item.name for item in benchmark]))


@matplotlib.rc_context(SETTINGS)
def errors_figure(scores: pd.DataFrame) -> Drawing:
    """Draw predicted over measured peaks and step times of published runs, and the range of most scored ones."""
    figure, panels = sheet(4.6, rows=2)
    ranges = []
    published, colours = by_origin(scores)["published"], {False: "#0a35b3", True: "#db3502"}
    drawn = (("peak", "use_memory", "peak_gib", "peak memory, GiB"), ("step", "use", "step_s", "step time, s"))
    for axes, (name, use, size, words) in zip(panels, drawn, strict=True):
        rows = published.assign(ratio=1 + published[f"{name}_error"], scored=published[use] == "score")
        for (is_scored, offloads), group in rows.groupby(["scored", "offloads"]):
            axes.plot(
                group[size],
                group["ratio"],
                "o",
                markersize=4,
                markeredgecolor=colours[offloads],
                color=colours[offloads] if is_scored else "none",
            )
        # Step times with offload have no interval.
        judged = rows[rows["scored"] & ((name == "peak") | ~rows["offloads"])]["ratio"]
        low, high = judged.quantile([(1 - INTERVAL_COVERAGE) / 2, (1 + INTERVAL_COVERAGE) / 2])
        ranges.append(f"{words.partition(',')[0]} {low:.2f} to {high:.2f}")
        axes.axhspan(low, high, color=FAINT, zorder=0)
        axes.axhline(1, **GUIDE)
        axes.set(xscale="log", yscale="log", xlabel=f"measured {words}", ylabel="predicted / measured", ylim=(0.4, 1.9))
        axes.set_yticks([0.5, 0.7, 1, 1.4])
        axes.minorticks_off()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    return finish(
        figure,
        "How far predictions are off",
        "GPU runs that others published",
        f"Band: {INTERVAL_COVERAGE:.0%} of scored runs. Hollow: fitted a constant or chose a rule, not scored.",
        f"predicted over measured of {INTERVAL_COVERAGE:.0%} of scored runs: {', '.join(ranges)}",
        legend=[Line2D([], [], marker="o", linestyle="", color=colours[True], label="with offload (no band of steps)")],
    )


def summary(frame: pd.DataFrame, folder: Path, alt: str, league_alt: str) -> str:
    """Return summary.md."""
    league = pd.read_parquet(folder / LEAGUE)
    counts = league[["right", "judged", "called", "ran_out"]].astype(int)
    estimators = pd.DataFrame(
        {
            "rows": league["rows"],
            "tool": league["tool"],
            "peaks it predicts": league["peaks"],
            "median error": league["median_error"].map(_percent),
            "worst": league["worst_error"].map(_percent),
            "fit or not, right": map(share_text, counts["right"], counts["judged"]),
            "of those that ran out, called": map(share_text, counts["called"], counts["ran_out"]),
        }
    )
    errors = headline(frame)
    peaks, steps, offload = (errors.set_index("figure").loc[name] for name in HELD_OUT)
    questions = read_questions()
    benchmark = shipped_predictors(questions)
    benchmark_fits = fits_table(questions, benchmark)
    tracker = next(item for item in benchmark if item.name == TRACKER)
    differences = tracker_differences(questions, tracker).abs()
    return render_markdown(
        "prediction.md.j2",
        peaks=peaks,
        measured=measured_peaks(frame),
        steps=steps,
        offload=offload,
        figure=Markup(FIGURE),
        alt=Markup.escape(alt),
        headline=errors,
        kinds=kinds_table(frame),
        setups=setups_table(),
        coverage=coverage_table(frame),
        least_pages=MIN_PAGES,
        preregistered=preregistered_table(FOLDER, frame),
        fits=fits(frame),
        estimators=estimators,
        league_figure=Markup(LEAGUE_FIGURE),
        league_alt=Markup.escape(league_alt),
        benchmark=benchmark_table(benchmark_scores(questions, benchmark)),
        differences={
            "rows": len(differences),
            "median": _percent(differences.median()),
            "worst": _percent(differences.max()),
        },
        by_code=benchmark_table(_peaks_of_tracker(benchmark_scores(questions, benchmark[:2], "code"))),
        benchmark_fits=pd.DataFrame(benchmark_fits.rows, columns=list(benchmark_fits.columns)),
        state=own_table(),
        host=_host_table(),
        saving=saving_table(),
        groups={column: errors_by(frame, column) for column in ("source", "strategy", "device")},
        sources=sources(),
        refused_sources=refused_sources(),
        worst={figure: worst_rows_table(frame, figure) for figure in get_args(WorstFigure)},
        refused=refused_table(frame),
    )


def _host_table() -> pd.DataFrame:
    """Return the host memory of runs on a GPU by strategy and model."""
    groups = host_memory_table().groupby(["strategy", "model"])
    lines = [
        {
            "strategy": strategy,
            "model": model,
            "runs": len(runs),
            "measured, GiB": f"{runs['measured'].median():.1f}",
            "predicted, GiB": f"{runs['predicted'].median():.1f}",
            "worst error": _signed(runs["error"][runs["error"].abs().idxmax()]),
        }
        for (strategy, model), runs in groups
    ]
    return pd.DataFrame(lines)


def benchmark_table(lines: Sequence[Score]) -> pd.DataFrame:
    """Return the scores of `study benchmark` by kind of row."""
    cells = [[line.figure, line.group, marked_name(line), *score_cells(line)] for line in lines]
    # On a page the names of columns differ.
    names = [name if name.strip() == name else f"common: {name.strip()}" for name in SCORE_COLUMNS]
    return pd.DataFrame(cells, columns=["figure", "kind", "predictor", *names])


def _peaks_of_tracker(lines: Sequence[Score]) -> list[Score]:
    """Return the scores of peaks in groups that torch's tracker answers."""
    answered = {line.group for line in lines if line.predictor == TRACKER}
    return [line for line in lines if line.figure == "memory" and line.group in answered]


def tracker_differences(questions: Sequence[BenchmarkQuestion], tracker: Predictor) -> pd.Series:
    """Return torch's tracker over `study predict`, less one, with the code that the tracker ran as the request.

    That is transformers' loss, no fused kernels, FSDP2, and the tensors of a peak whatever the page measured.
    """
    differences = {}
    for question in questions:
        peak_gib = answered_figure(question, tracker, "memory")
        if peak_gib is None:
            continue
        measurement = question.measurement
        request = dataclasses.replace(
            measurement.request,
            loss_kernel="transformers",
            keeps_outputs=False,
            compiled=False,
            torch_gate=False,
            fsdp_version=2,
            reentrant_units=False,
            fsdp_mixed_units=False,
        )
        eager = dataclasses.replace(measurement, request=request, peak_kind="allocated")
        differences[question.id] = peak_gib / (predicted_peak(eager) / GIB) - 1
    return pd.Series(differences)


# By order of the league.
_LEAGUE_STYLES = (
    ("o", "#0a35b3"),
    ("D", "#db3502"),
    ("s", "#018228"),
    ("^", "#7a5195"),
    ("v", "#b56a00"),
    ("P", "#767676"),
)


@matplotlib.rc_context(SETTINGS)
def league_figure(lines: Sequence[Score], predictors: Sequence[str]) -> Drawing:
    """Draw the median error of peak memory by kind of row, of every predictor on the rows that it answers."""
    peaks = [line for line in lines if line.figure == "memory" and line.answered.median is not None]
    groups = list(dict.fromkeys(line.group for line in peaks))[::-1]
    figure, (axes,) = sheet(0.36 * len(groups) + 0.5)
    for name, (marker, colour) in zip(predictors, _LEAGUE_STYLES, strict=True):
        points = [line for line in peaks if line.predictor == name]
        places = [groups.index(line.group) for line in points]
        axes.plot([line.answered.median or 0.0 for line in points], places, marker, color=colour, markersize=6)
    axes.set(xscale="log", xlabel="median error of peak memory", xlim=(0.008, 12), ylim=(-0.6, len(groups) - 0.4))
    axes.set_xticks([0.01, 0.1, 1, 10])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.minorticks_off()
    axes.set_yticks(range(len(groups)), groups)
    axes.grid(axis="y")
    ours = [f"{line.group} {line.answered.median:.1%}" for line in peaks if line.predictor == predictors[0]]
    return finish(
        figure,
        "Predictors of peak memory",
        "GPU runs that others published",
        "Each on the rows that it answers; the table has the rows that all answer.",
        f"median errors of {predictors[0]}: {', '.join(ours)}",
        legend=[
            Line2D([], [], marker=marker, linestyle="", color=colour, label=name)
            for name, (marker, colour) in zip(predictors, _LEAGUE_STYLES, strict=True)
        ],
        legend_columns=2,
    )


def main() -> None:
    """Fit the constants of study/predictor/time.py, or write reports/prediction and the intervals."""
    parser = argparse.ArgumentParser(prog="python -m study.report.pages.prediction", description=main.__doc__)
    parser.add_argument("action", choices=("fit", "report"))
    if parser.parse_args().action == "report":
        write()
        return
    from study.predictor.validation.fit import write as write_fit

    print(write_fit(), end="")


if __name__ == "__main__":
    main()
