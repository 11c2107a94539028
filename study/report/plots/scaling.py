"""How speed changes with the number of ranks, the batch and the model."""

from __future__ import annotations

import numpy as np
import pandas as pd

from study.report.plots.canvas import (
    Drawing,
    EndLabel,
    footnote,
    in_house_style,
    label_beside,
    marked,
    number,
    plain_ticks,
    sheet,
)
from study.report.plots.palette import QUIET, style_of
from study.report.plots.select import MOST_WORKLOADS, finished, notes_of, per_workload
from study.report.records.frames import Records
from study.report.records.speed import speed_beside_baseline


@in_house_style
def scaling(records: Records) -> list[Drawing]:
    return per_workload("scaling", finished(records), _scaling)


def _scaling(figure_name: str, workload: str, runs: pd.DataFrame) -> Drawing | None:
    """Strong scaling: the global batch is part of the workload, so it is the same for every number of ranks."""
    timed = runs[runs["tokens_per_s"].notna()]
    if timed["world_size"].nunique() < 2:
        return None
    # One line per arm whatever its ranks; an override or another trainer is another line.
    timed = timed.assign(line=timed["arm"].str.replace(r" x\d+", "", regex=True), fair=timed["confounded"] == "")
    speed = timed.groupby(["line", "strategy", "world_size"])[["tokens_per_s", "fair"]].agg(
        {"tokens_per_s": "median", "fair": "min"}
    ).reset_index()  # fmt: skip
    fair = speed[speed["fair"]] if speed["fair"].any() else speed
    start = fair[fair["world_size"] == fair["world_size"].min()]
    unit_speed, fewest = float(start["tokens_per_s"].max()), int(start["world_size"].iloc[0])
    one = str(start.sort_values("tokens_per_s")["line"].iloc[-1])
    speed["speedup"] = speed["tokens_per_s"] / unit_speed
    ranks = sorted(speed["world_size"].unique())
    title = "Speed by number of ranks"
    top = speed[speed["fair"] == fair["fair"].iloc[0]].sort_values("speedup").iloc[-1]
    subtitle = (
        f"The global batch stays the same. Best: {top['line']} on {top['world_size']:.0f} ranks, "
        f"{number(top['speedup'])} times {one} on {fewest}."
    )
    figure, (axes,) = sheet(title, workload, subtitle, 4.0)
    axes.plot(ranks, [rank / fewest for rank in ranks], color=QUIET, linestyle=(0, (4, 3)), linewidth=1.1)
    ends = [EndLabel(ranks[-1], ranks[-1] / fewest, "ideal", QUIET)]
    for label, line in speed.groupby("line"):
        colour, marker, dash = style_of(line["strategy"].iloc[0])
        line = line.sort_values("world_size")
        axes.plot(line["world_size"], line["speedup"], color=colour, marker=marker, linestyle=dash, markersize=8,
                  markeredgecolor="white")  # fmt: skip
        last = line.iloc[-1]
        name = marked(str(label), {} if line["fair"].all() else {str(label): "confounded"})
        text = f"{name} {number(last['speedup'])}"
        ends.append(EndLabel(last["world_size"], last["speedup"], text, colour))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:.0f}" for rank in ranks])
    axes.minorticks_off()
    axes.set_xlim(ranks[0] * 0.9, ranks[-1] * 1.03)
    axes.set_ylim(0, max(ranks[-1] / fewest, float(speed["speedup"].max())) * 1.06)
    axes.set_xlabel("ranks (without an accelerator a rank is one core)")
    axes.set_ylabel(f"throughput against {one} on {fewest} rank{'s' if fewest > 1 else ''} (times)")
    axes.grid(axis="y")
    footnote(axes, notes_of(runs))
    label_beside(axes, ends, size=9)
    words = ", ".join(f"{row.line} on {row.world_size:.0f}: {number(row.speedup)}" for row in speed.itertuples())
    return Drawing.of(figure_name, title, workload, f"in times of {one} on {fewest}: {words}", figure)


@in_house_style
def batch_size(records: Records) -> list[Drawing]:
    return _by_subject(records, "global_batch_size", "Speed by global batch", "global batch, samples", "batch_size")


@in_house_style
def model_size(records: Records) -> list[Drawing]:
    words = "model size, million parameters"
    return _by_subject(records, "model_name_or_path", "Speed by model size", words, "model_size")


def _by_subject(records: Records, column: str, title: str, axis_words: str, name: str) -> list[Drawing]:
    speed = speed_beside_baseline(finished(records), column)
    several = speed[speed.groupby("subject")["place"].transform("nunique") > 1]
    subjects = list(several.groupby("subject"))[:MOST_WORKLOADS]
    return [
        _lines(f"{name}_{place}", title, str(subject), lines, axis_words)
        for place, (subject, lines) in enumerate(subjects, 1)
    ]


def _lines(name: str, title: str, subject: str, relative: pd.DataFrame, axis_words: str) -> Drawing:
    baseline = " or ".join(sorted(relative["baseline"].unique()))
    figure, (axes,) = sheet(
        title, subject, f"Throughput in percent of {baseline} at the same place; above 100 is faster.", 3.9
    )
    axes.axhline(100, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.1)
    notes = {str(arm): "; ".join(sorted(set(group) - {""})) for arm, group in relative.groupby("arm")["note"]}
    ends, words = [], []
    for arm, line in relative.groupby("arm"):
        line = line.sort_values("place")
        colour, marker, dash = style_of(line["strategy"].iloc[0])
        axes.plot(line["place"], line["percent"], color=colour, marker=marker, linestyle=dash, markersize=7,
                  markeredgecolor="white")  # fmt: skip
        ends.append(EndLabel(line["place"].iloc[-1], line["percent"].iloc[-1], marked(str(arm), notes), colour))
        places = zip(line["place"], line["percent"], strict=True)
        words.append(f"{arm} " + ", ".join(f"{number(percent)} % at {number(place)}" for place, percent in places))
    axes.set_xscale("log")
    ticks = np.unique(relative["place"].to_numpy(dtype=float))
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis_words)
    axes.set_ylabel(f"throughput in % of {baseline}")
    axes.grid(axis="y")
    plain_ticks(axes.yaxis)
    footnote(axes, notes)
    label_beside(axes, ends, size=9)
    return Drawing.of(name, title, subject, f"in percent of {baseline}: {'; '.join(words)}", figure)
