"""Virtual ranks: the ZeRO paper's Table 1 as curves with what was found on them, and traffic by stage and setting."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from matplotlib.lines import Line2D

from study.report.plots.canvas import (
    Drawing,
    beside_bar,
    end_rows,
    in_house_style,
    legend_below,
    legend_of_fills,
    number,
    plain_ticks,
    sheet,
    stack,
)
from study.report.plots.palette import OTHER, QUIET, TRAFFIC, Fill, style_of
from study.report.records.frames import Records
from study.report.records.virtual_ranks import (
    AS_SHIPPED,
    BOOKKEEPING,
    GB,
    STAGES,
    Summary,
    sent,
    shares,
    state_bytes,
    summaries,
    table1_rows,
)
from study.theory.paper import papers_traffic

_ROW_IN, _FRAME_IN = 0.34, 0.75


@in_house_style
def table1(records: Records) -> list[Drawing]:
    models: defaultdict[str, list[Summary]] = defaultdict(list)
    for row in table1_rows(records):
        models[row["model"]].append(row)
    return [_curves(f"table1_{place}", model, rows) for place, (model, rows) in enumerate(models.items(), 1)]


def _curves(name: str, model: str, rows: Sequence[Summary]) -> Drawing:
    """The paper's bytes are a line, for the size that the model is called after; a hollow point is extrapolated."""
    title = "Model state on one of N ranks"
    off = max(abs(state_bytes(row) / row["paper_bytes"] - 1) for row in rows)
    subtitle = f"Points are what a rank holds, lines what the paper says; the furthest is {off:.1%} off."
    figure, (axes,) = sheet(title, model, subtitle, 3.4)
    worlds = sorted({row["world_size"] for row in rows})
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        colour, marker, dash = style_of(strategy)
        own = sorted((row for row in rows if row["strategy"] == strategy), key=lambda row: row["world_size"])
        places = [row["world_size"] for row in own]
        axes.plot(places, [row["paper_bytes"] / GB for row in own], color=colour, linestyle=dash, linewidth=1.2)
        for row in own:
            whole = row["extrapolated"] is None
            axes.plot(row["world_size"], state_bytes(row) / GB, marker=marker, markersize=8, color=colour,
                      markerfacecolor=colour if whole else "white", linestyle="none", zorder=4)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [tick for exponent in range(-3, 6) for tick in (10.0**exponent, 3 * 10.0**exponent) if low <= tick <= high]
    axes.set_yticks(ticks)
    plain_ticks(axes.yaxis)
    axes.grid(axis="y")
    axes.set_xlabel("ranks")
    axes.set_ylabel("GB (1e9 bytes)")
    strategies = dict.fromkeys(row["strategy"] for row in rows)
    handles = [Line2D([], [], color=style_of(one).colour, marker=style_of(one).marker, linestyle=style_of(one).dash,
                      label=one) for one in strategies]  # fmt: skip
    made = {row["extrapolated"] is None for row in rows}
    words = {True: "measured whole", False: "extrapolated over layers"}
    handles += [Line2D([], [], color=QUIET, marker="o", linestyle="none", markerfacecolor=QUIET if whole else "white",
                       label=words[whole]) for whole in sorted(made, reverse=True)]  # fmt: skip
    legend_below(figure, handles, 3, columnspacing=1.3)
    said = ", ".join(f"{row['strategy']} at {row['world_size']} {number(state_bytes(row) / GB)} GB"
                     f" (paper {number(row['paper_bytes'] / GB)})" for row in rows)  # fmt: skip
    return Drawing.of(name, title, model, said, figure)


@in_house_style
def settings(records: Records) -> list[Drawing]:
    grouped: defaultdict[tuple[str, int], list[Summary]] = defaultdict(list)
    for one in summaries(records):
        # Half a bar would be a figure of something else: where one collective has no line there is none.
        if one["strategy"] in STAGES and not math.isnan(sent(one)):
            grouped[one["model"], one["world_size"]].append(one)
    compared = {key: rows for key, rows in grouped.items() if {row["setting"] for row in rows} != {AS_SHIPPED}}
    return [
        _bars(f"settings_{place}", f"{model}, one of {world} ranks{_how(rows)}", world, rows)
        for place, ((model, world), rows) in enumerate(compared.items(), 1)
    ]


def _how(rows: Sequence[Summary]) -> str:
    return ", extrapolated over layers" if any(row["extrapolated"] for row in rows) else ""


def _bars(name: str, what: str, world: int, rows: list[Summary]) -> Drawing:
    rows = sorted(rows, key=lambda one: (one["strategy"], one["setting"] != AS_SHIPPED, one["setting"]))
    title = "Sent in one step, by stage and setting"
    subtitle = "Bytes on the wire; an all-reduce counts twice, in and back. The upright line is the paper's figure."
    figure, (axes,) = sheet(title, what, subtitle, _FRAME_IN + _ROW_IN * len(rows))
    fills: dict[str, Fill] = {}
    said = []
    for place, row in enumerate(rows):
        lengths = _wire(row)
        fills |= {kind: TRAFFIC.get(kind, OTHER) for kind in lengths}
        total = stack(axes, place, lengths, TRAFFIC)
        paper = papers_traffic(row["stage"], world)
        axes.plot([paper, paper], [place - 0.42, place + 0.42], color="black", linewidth=1.6, zorder=5)
        beside_bar(axes, number(total), max(total, paper), place)
        said.append(f"{row['strategy']} {row['setting']} {number(total)} (paper {number(paper)})")
    end_rows(axes, [_label(row) for row in rows], {}, "copies of the weights per rank and step", margin=0.12)
    legend_of_fills(figure, fills, {}, columns=4)
    return Drawing.of(name, title, what, "; ".join(said), figure)


def _wire(row: Summary) -> dict[str, float]:
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
