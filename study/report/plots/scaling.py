"""How speed changes with the number of ranks, the batch and the model."""

from __future__ import annotations

import functools
import math
from collections import defaultdict

import numpy as np
import pandas as pd

from study.host.memory import MIB
from study.records.arms import speed_beside_baseline
from study.records.frames import Records
from study.records.statistics import geometric_mean, paired_ratio
from study.report.plots.canvas import (
    GUIDE,
    MOST_WORKLOADS,
    QUIET,
    Drawing,
    EndLabel,
    beside,
    drawings,
    finish,
    finished,
    label_beside,
    marked,
    notes_of,
    number,
    per_workload,
    plain_ticks,
    rows_of_arms,
    sheet,
    sheet_of_rows,
    single_runs,
    style_of,
)
from study.report.searches import Fit, fits
from study.virtual.records import PLANNED, over_nodes


def what_fits(records: Records) -> list[Drawing]:
    subjects: defaultdict[str, list[Fit]] = defaultdict(list)
    for fit in fits(records):
        if not math.isnan(fit.size):
            subjects[fit.subject].append(fit)
    return drawings("what_fits", subjects.items(), _bars)


def _bars(subject: str, found: list[Fit]) -> Drawing:
    limits = list(dict.fromkeys(fit.within for fit in found))
    arms = list(dict.fromkeys(fit.arm for fit in found))
    subtitle = "Each answer is bounded by a run that fitted and one that did not; with ≥ nothing larger was tried."
    figure, panels = sheet_of_rows(len(arms), 0.34, columns=len(limits), sharex=True, sharey=True)
    for axes, limit in zip(panels, limits, strict=True):
        for fit in (fit for fit in found if fit.within == limit):
            place = arms.index(fit.arm)
            axes.barh(place, fit.size, height=0.66, color=style_of(fit.any["strategy"]).colour)
            beside(axes, _label(fit), (fit.size, place))
        rows_of_arms(axes, arms, {})
        axes.margins(x=0.3)
        axes.set(xlim=(0, None), xlabel="samples" if found[0].axis == "largest_micro_batch" else "million parameters")
        axes.set_title(limit, size=9.5, loc="left")
        plain_ticks(axes.xaxis)
        axes.locator_params(axis="x", nbins=4)
    words = "; ".join(f"{fit.arm} within {fit.within} {fit.what_fits.answer}" for fit in found)
    return finish(figure, "What fits", subject, subtitle, words)


def _label(fit: Fit) -> str:
    if fit.largest is None:
        return "none"
    return f"{'≥ ' if fit.what_fits.is_open else ''}{fit.value(fit.largest).rsplit('/', 1)[-1]}"


def efficiency(records: Records) -> list[Drawing]:
    rows = over_nodes(records)
    subjects = [(f"{model}, {kind}", of_it) for (model, kind), of_it in rows.groupby(["model", "scaling"])]
    return drawings("nodes", subjects, _node_lines)


def _node_lines(subject: str, rows: pd.DataFrame) -> Drawing:
    is_planned = rows["scaling"].iloc[0] == PLANNED
    figure, (axes,) = sheet(3.8)
    ends, words = [], []
    machines = sorted(rows["machines"].unique())
    if not is_planned:
        axes.axhline(100, **GUIDE)
        ends.append(EndLabel(machines[-1], 100, "ideal", QUIET))
    for line, of_it in rows.groupby("line"):
        style, of_it = (
            style_of(of_it["strategy"].iloc[0]),
            of_it.sort_values("world_size").drop_duplicates("machines", keep="last"),
        )
        # What each rank sends in groups that span machines, or how much of its speed it keeps.
        height = of_it["across"] / MIB if is_planned else 100 * of_it["efficiency"]
        axes.plot(of_it["machines"], height, markersize=8, **style.line)
        ends.append(
            EndLabel(
                of_it["machines"].iloc[-1], height.iloc[-1], f"{_short(line)} {number(height.iloc[-1])}", style.colour
            )
        )
        words.append(
            f"{line} " + ", ".join(f"{number(y)} on {x}" for x, y in zip(of_it["machines"], height, strict=True))
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(machines, [f"{each}" for each in machines])
    axes.minorticks_off()
    title, unit = ("Speed per rank", "% of the ideal")
    if is_planned:
        title, unit = "Sent from machine to machine", "ring bytes (NCCL), MiB per step"
    axes.set(xlabel="machines", ylabel=unit, ylim=(0, None))
    axes.grid(axis="y")
    label_beside(axes, ends)
    subtitle = (
        "In groups with ranks on several machines, of eight each." if is_planned else "Beside the fewest machines."
    )
    return finish(figure, title, subject, subtitle, f"in {unit}: {'; '.join(words)}")


def _short(line: str) -> str:
    """The table has the settings themselves."""
    arm, *settings = line.split(", ")
    return f"{arm}, {len(settings)} setting{'s'[: len(settings) > 1]}" if settings else arm


def scaling(records: Records) -> list[Drawing]:
    return per_workload("scaling", finished(records), _scaling)


def _scaling(workload: str, runs: pd.DataFrame) -> Drawing | None:
    """Strong scaling: the global batch is part of the workload, so it is the same for every number of ranks."""
    timed = runs[runs["tokens_per_s"].notna()]
    if timed["world_size"].nunique() < 2:
        return None
    # One line per arm whatever its ranks; an override or another trainer is another line.
    timed = timed.assign(line=timed["arm"].str.replace(r" x\d+", "", regex=True), fair=timed["confounded"] == "")
    speed = timed.groupby(["line", "strategy", "world_size"])[["tokens_per_s", "fair"]].agg(
        {"tokens_per_s": geometric_mean, "fair": "min"}
    ).reset_index()  # fmt: skip
    fair = speed[speed["fair"]] if speed["fair"].any() else speed
    start = fair[fair["world_size"] == fair["world_size"].min()].sort_values("tokens_per_s").iloc[-1]
    one, fewest = str(start["line"]), int(start["world_size"])
    # As in the tables: seed by seed, where they have one in common.
    base = timed.loc[(timed["line"] == one) & (timed["world_size"] == fewest), "arm"].iloc[0]
    pairs = {arm: paired_ratio(timed, "tokens_per_s", arm, base).center for arm in timed["arm"].unique()}
    arm_of = timed.drop_duplicates(["line", "world_size"]).set_index(["line", "world_size"])["arm"]
    paired = pd.Series([pairs[arm_of[row.line, row.world_size]] for row in speed.itertuples()], speed.index)
    speed["speedup"] = paired.fillna(speed["tokens_per_s"] / start["tokens_per_s"])
    ranks = sorted(speed["world_size"].unique())
    subtitle = f"The global batch stays the same. Dashed: as many times {one} as there are ranks."
    figure, (axes,) = sheet(4.0)
    axes.plot(ranks, [rank / fewest for rank in ranks], **GUIDE)
    ends = [EndLabel(ranks[-1], ranks[-1] / fewest, "ideal", QUIET)]
    for label, line in speed.groupby("line"):
        style, line = style_of(line["strategy"].iloc[0]), line.sort_values("world_size")
        axes.plot(line["world_size"], line["speedup"], markersize=8, **style.line)
        for world_size, each in timed[timed["line"] == label].groupby("world_size")["tokens_per_s"]:
            single_runs(axes, [world_size] * len(each), each / start["tokens_per_s"], style.colour)
        last = line.iloc[-1]
        name = marked(str(label), {} if line["fair"].all() else {str(label): "confounded"})
        ends.append(EndLabel(last["world_size"], last["speedup"], f"{name} {number(last['speedup'])}", style.colour))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:.0f}" for rank in ranks])
    axes.minorticks_off()
    axes.set(
        xlabel="ranks (without an accelerator: cores)",
        ylabel=f"throughput against {one} on {fewest} rank{'s' if fewest > 1 else ''} (times)",
        xlim=(ranks[0] * 0.9, ranks[-1] * 1.03),
        ylim=(0, max(ranks[-1] / fewest, float(speed["speedup"].max())) * 1.06),
    )
    axes.grid(axis="y")
    label_beside(axes, ends)
    words = ", ".join(f"{row.line} on {row.world_size:.0f}: {number(row.speedup)}" for row in speed.itertuples())
    words = f"in times of {one} on {fewest}: {words}"
    return finish(figure, "Speed by number of ranks", workload, subtitle, words, notes_of(runs))


def batch_size(records: Records) -> list[Drawing]:
    return _by_subject(records, "batch_size", "global_batch_size", "Speed by global batch", "global batch, samples")


def model_size(records: Records) -> list[Drawing]:
    words = "model size, million parameters"
    return _by_subject(records, "model_size", "model_name_or_path", "Speed by model size", words)


def _by_subject(records: Records, name: str, column: str, title: str, xlabel: str) -> list[Drawing]:
    subjects = list(speed_beside_baseline(finished(records), column).groupby("subject", sort=False))
    return drawings(name, subjects[:MOST_WORKLOADS], functools.partial(_lines, title, xlabel))


def _lines(title: str, xlabel: str, subject: str, relative: pd.DataFrame) -> Drawing:
    baseline = " or ".join(sorted(relative["baseline"].unique()))
    subtitle = f"Throughput in percent of {baseline} at the same place; above 100 is faster."
    figure, (axes,) = sheet(3.9)
    axes.axhline(100, **GUIDE)
    notes = {str(arm): "; ".join(sorted(set(group) - {""})) for arm, group in relative.groupby("arm")["note"]}
    ends, words = [], []
    for arm, line in relative.groupby("arm"):
        style, line = style_of(line["strategy"].iloc[0]), line.sort_values("place")
        axes.plot(line["place"], line["percent"], markersize=7, **style.line)
        for place, points in zip(line["place"], line["points"], strict=True):
            single_runs(axes, [place] * len(points), points, style.colour)
        ends.append(EndLabel(line["place"].iloc[-1], line["percent"].iloc[-1], marked(str(arm), notes), style.colour))
        places = zip(line["place"], line["percent"], strict=True)
        words.append(f"{arm} " + ", ".join(f"{number(percent)} % at {number(place)}" for place, percent in places))
    axes.set(xscale="log", xlabel=xlabel, ylabel=f"throughput in % of {baseline}", ylim=(0, None))
    ticks = np.unique(relative["place"].to_numpy(dtype=float))
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y")
    plain_ticks(axes.yaxis)
    label_beside(axes, ends)
    return finish(figure, title, subject, subtitle, f"in percent of {baseline}: {'; '.join(words)}", notes)
