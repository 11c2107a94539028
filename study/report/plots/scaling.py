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
from study.report.plots.select import MOST_WORKLOADS, finished, notes_of, whole_parameters, workloads
from study.report.records.fairness import baseline_arm
from study.report.records.frames import Records

ONE_WORLD = "No workload here ran with more than one number of ranks, so there is no scaling to draw."
ONE_BATCH = "No model here was trained with more than one global batch, so there is no amortization to draw."
ONE_MODEL = "No task here was trained with more than one model of known size, so there is nothing to draw against size."
# What must be the same for runs that differ in their batch alone, or in their model alone.
_SETTING = ["task", "seq_length", "precision", "gradient_checkpointing"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@in_house_style
def scaling(records: Records) -> list[Drawing] | str:
    drawings = []
    for place, (workload, runs) in enumerate(workloads(finished(records)), start=1):
        if runs["world_size"].nunique() > 1 and runs["tokens_per_s"].notna().any():
            drawings.append(_scaling(f"scaling_{place}", workload, runs))
    return drawings or ONE_WORLD


def _scaling(name: str, workload: str, runs: pd.DataFrame) -> Drawing:
    """Strong scaling: the global batch is part of the workload, so it is the same for every number of ranks."""
    speed = runs.groupby(["strategy", "world_size"])["tokens_per_s"].median().reset_index()
    start = speed[speed["world_size"] == speed["world_size"].min()]
    unit_speed, fewest = float(start["tokens_per_s"].max()), int(start["world_size"].iloc[0])
    one = str(start.sort_values("tokens_per_s")["strategy"].iloc[-1])
    speed["speedup"] = speed["tokens_per_s"] / unit_speed
    ranks = sorted(speed["world_size"].unique())
    title = "Speed by number of ranks"
    top = speed.sort_values("speedup").iloc[-1]
    subtitle = (
        f"The global batch stays the same. Best: {top['strategy']} on {top['world_size']:.0f} ranks, "
        f"{number(top['speedup'])} times {one} on {fewest}."
    )
    figure, (axes,) = sheet(title, workload, subtitle, 4.0)
    axes.plot(ranks, [rank / fewest for rank in ranks], color=QUIET, linestyle=(0, (4, 3)), linewidth=1.1)
    ends = [EndLabel(ranks[-1], ranks[-1] / fewest, "ideal", QUIET)]
    for strategy, line in speed.groupby("strategy"):
        colour, marker, dash = style_of(strategy)
        line = line.sort_values("world_size")
        axes.plot(line["world_size"], line["speedup"], color=colour, marker=marker, linestyle=dash, markersize=8,
                  markeredgecolor="white")  # fmt: skip
        last = line.iloc[-1]
        ends.append(EndLabel(last["world_size"], last["speedup"], f"{strategy} {number(last['speedup'])}", colour))
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
    words = ", ".join(f"{row.strategy} on {row.world_size:.0f}: {number(row.speedup)}" for row in speed.itertuples())
    return Drawing(
        name, f"{title}, {workload}", f"{title}, {workload}, in times of {one} on {fewest}: {words}.", figure
    )


@in_house_style
def batch_size(records: Records) -> list[Drawing] | str:
    """S0's amortization: speed against the baseline at each global batch."""
    runs = finished(records)
    if runs.empty:
        return ONE_BATCH
    drawings: list[Drawing] = []
    for _, group in runs.groupby([*_SETTING, "model_name_or_path", "world_size"], sort=True):
        relative = _against_baseline(group, "global_batch_size")
        if relative["global_batch_size"].nunique() > 1 and len(drawings) < MOST_WORKLOADS:
            what = f"{group['model_name_or_path'].iloc[0]} on {group['world_size'].iloc[0]:.0f} ranks"
            drawings.append(_lines(f"batch_size_{len(drawings) + 1}", "Speed by global batch", what, relative,
                                   "global_batch_size", "global batch, samples"))  # fmt: skip
    return drawings or ONE_BATCH


@in_house_style
def model_size(records: Records) -> list[Drawing] | str:
    """S2's second figure: speed with and without ZeRO as models grow."""
    runs = finished(records)
    if runs.empty:
        return ONE_MODEL
    runs = runs.assign(parameters=_parameters(runs) / 1e6)
    drawings: list[Drawing] = []
    for (task, *_), group in runs[runs["parameters"].notna()].groupby([*_SETTING, "world_size"], sort=True):
        relative = _against_baseline(group, "parameters")
        if relative["parameters"].nunique() > 1 and len(drawings) < MOST_WORKLOADS:
            what = f"{task} on {group['world_size'].iloc[0]:.0f} ranks"
            drawings.append(_lines(f"model_size_{len(drawings) + 1}", "Speed by model size", what, relative,
                                   "parameters", "model size, million parameters"))  # fmt: skip
    return drawings or ONE_MODEL


def _parameters(runs: pd.DataFrame) -> pd.Series:
    """Of each run's model, from an arm that holds it whole."""
    return (
        (whole_parameters(runs) / runs["param_dtype"].map(_BYTES)).groupby(runs["model_name_or_path"]).transform("max")
    )


def _against_baseline(runs: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Throughput of every arm in percent of the baseline's at the same place of the axis; without one there is none."""
    found = []
    for value, group in runs.groupby(axis):
        baseline = baseline_arm(group)
        if baseline is None or group["arm"].nunique() < 2:
            continue
        speed = group.groupby(["arm", "strategy"])["tokens_per_s"].median().reset_index()
        whole = float(speed.loc[speed["arm"] == baseline, "tokens_per_s"].iloc[0])
        notes = notes_of(group)
        found.append(speed.assign(**{axis: value, "percent": 100 * speed["tokens_per_s"] / whole, "baseline": baseline,
                                     "note": [notes.get(arm, "") for arm in speed["arm"]]}))  # fmt: skip
    return pd.concat(found) if found else pd.DataFrame(columns=["arm", "strategy", axis, "percent", "baseline", "note"])


def _lines(name: str, title: str, workload: str, relative: pd.DataFrame, axis: str, axis_words: str) -> Drawing:
    baseline = " or ".join(sorted(relative["baseline"].unique()))
    figure, (axes,) = sheet(
        title, workload, f"Throughput in percent of {baseline} at the same place; above 100 is faster.", 3.9
    )
    axes.axhline(100, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.1)
    notes = {str(arm): "; ".join(sorted(set(group) - {""})) for arm, group in relative.groupby("arm")["note"]}
    ends, words = [], []
    for arm, line in relative.groupby("arm"):
        line = line.sort_values(axis)
        colour, marker, dash = style_of(line["strategy"].iloc[0])
        axes.plot(line[axis], line["percent"], color=colour, marker=marker, linestyle=dash, markersize=7,
                  markeredgecolor="white")  # fmt: skip
        ends.append(EndLabel(line[axis].iloc[-1], line["percent"].iloc[-1], marked(str(arm), notes), colour))
        places = zip(line[axis], line["percent"], strict=True)
        words.append(f"{arm} " + ", ".join(f"{number(percent)} % at {number(place)}" for place, percent in places))
    axes.set_xscale("log")
    ticks = np.unique(relative[axis].to_numpy(dtype=float))
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis_words)
    axes.set_ylabel(f"throughput in % of {baseline}")
    axes.grid(axis="y")
    plain_ticks(axes.yaxis)
    footnote(axes, notes)
    label_beside(axes, ends, size=9)
    return Drawing(
        name, f"{title}, {workload}", f"{title}, {workload}, in percent of {baseline}: {'; '.join(words)}.", figure
    )
