"""Virtual ranks: the ZeRO paper's Table 1 as curves with what was found on them, and traffic by stage and setting."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import pandas as pd
from matplotlib.lines import Line2D

from study.predictor.floor import papers_traffic
from study.records.frames import Records
from study.report.plots.canvas import (
    OTHER,
    QUIET,
    TRAFFIC,
    Drawing,
    bars,
    drawings,
    finish,
    legend_of_arms,
    legend_of_fills,
    number,
    plain_ticks,
    sheet,
    sheet_of_rows,
    style_of,
)
from study.virtual.records import (
    AS_SHIPPED,
    BOOKKEEPING,
    GB,
    STAGES,
    Summary,
    rank_state_bytes,
    sent,
    shares,
    summaries,
    table1_rows,
)


def table1(records: Records) -> list[Drawing]:
    models: defaultdict[str, list[Summary]] = defaultdict(list)
    for row in table1_rows(records):
        models[row["model"]].append(row)
    return drawings("table1", models.items(), _curves)


def _curves(model: str, rows: Sequence[Summary]) -> Drawing:
    """The paper's bytes are a line, for the size that the model is called after; a hollow point is extrapolated."""
    off = max(abs(rank_state_bytes(row) / row["paper_bytes"] - 1) for row in rows)
    subtitle = f"Points are what a rank holds, lines what the paper says; the furthest is {off:.1%} off."
    figure, (axes,) = sheet(3.4)
    strategies = {row["strategy"]: row["strategy"] for row in rows}
    for strategy in strategies:
        style = style_of(strategy)
        own = sorted((row for row in rows if row["strategy"] == strategy), key=lambda row: row["world_size"])
        paper = [row["paper_bytes"] / GB for row in own]
        axes.plot([row["world_size"] for row in own], paper, linewidth=1.2, **style.line | {"marker": ""})
        for row in own:
            fill = style.colour if row["extrapolated"] is None else "white"
            axes.plot(row["world_size"], rank_state_bytes(row) / GB, markersize=8, markerfacecolor=fill,
                      markeredgecolor=style.colour, zorder=4, **style.points)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="ranks", ylabel="GB (1e9 bytes)")
    worlds = sorted({row["world_size"] for row in rows})
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [tick for exponent in range(-3, 6) for tick in (10.0**exponent, 3 * 10.0**exponent) if low <= tick <= high]
    axes.set_yticks(ticks)
    plain_ticks(axes.yaxis)
    axes.grid(axis="y")
    legend = legend_of_arms(strategies, {})
    for fill, label, made in (
        (QUIET, "measured whole", [row for row in rows if row["extrapolated"] is None]),
        ("white", "extrapolated over layers", [row for row in rows if row["extrapolated"] is not None]),
    ):
        if made:
            legend.append(Line2D([], [], color=QUIET, marker="o", linestyle="", markerfacecolor=fill,
                                 markeredgecolor=QUIET, label=label))  # fmt: skip
    words = ", ".join(f"{row['strategy']} at {row['world_size']} {number(rank_state_bytes(row) / GB)} GB"
                      f" (paper {number(row['paper_bytes'] / GB)})" for row in rows)  # fmt: skip
    return finish(figure, "Model state on one of N ranks", model, subtitle, words, legend=legend)


def settings(records: Records) -> list[Drawing]:
    grouped: defaultdict[tuple[str, int], list[Summary]] = defaultdict(list)
    for one in summaries(records):
        # Half a bar would be a figure of something else: where one collective has no line there is none.
        if one["strategy"] in STAGES and not math.isnan(sent(one)):
            grouped[one["model"], one["world_size"]].append(one)
    compared = {key: rows for key, rows in grouped.items() if {row["setting"] for row in rows} != {AS_SHIPPED}}
    return drawings("settings", [(f"{model}, one of {world} ranks{_how(rows)}", rows)
                                 for (model, world), rows in compared.items()], _bars)  # fmt: skip


def _how(rows: Sequence[Summary]) -> str:
    return ", extrapolated over layers" if any(row["extrapolated"] for row in rows) else ""


def _bars(what: str, rows: Sequence[Summary]) -> Drawing:
    rows = sorted(rows, key=lambda one: (one["strategy"], one["setting"] != AS_SHIPPED, one["setting"]))
    lengths = pd.DataFrame([_ring_bytes(row) for row in rows], index=[_label(row) for row in rows])
    totals = [number(total) for total in lengths.sum(axis="columns")]
    papers = [papers_traffic(row["stage"], row["world_size"]) for row in rows]
    figure, (axes,) = sheet_of_rows(len(rows), 0.34)
    bars(axes, lengths, TRAFFIC, totals, "copies of the weights per rank and step", {}, marks=papers, margin=0.12)
    subtitle = "Ring bytes (NCCL); an all-reduce counts twice, in and back. The upright line is the paper's figure."
    words = "; ".join(f"{row['strategy']} {row['setting']} {total} (paper {number(paper)})"
                      for row, total, paper in zip(rows, totals, papers, strict=True))  # fmt: skip
    legend = legend_of_fills({kind: TRAFFIC.get(kind, OTHER) for kind in lengths}, {})
    return finish(figure, "Sent in one step, by stage and setting", what, subtitle, words, legend=legend)


def _ring_bytes(row: Summary) -> dict[str, float]:
    """Of each collective that carries more than bookkeeping."""
    sizes = shares(row, "wire_bytes_per_rank").items()
    return {kind: size for kind, size in sizes if size is not None and size >= BOOKKEEPING}


def _label(row: Summary) -> str:
    """Short enough for the side of a figure: the first of the changed settings says which it is."""
    if row["setting"] == AS_SHIPPED:
        return str(row["strategy"])
    first = row["setting"].split(",")[0]
    for prefix in ("stage3_param_", "stage3_", "use_multi_rank_bucket_"):
        first = first.removeprefix(prefix)
    return f"{row['strategy']} {first}"
