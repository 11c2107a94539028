"""How much of its speed a rank keeps on more machines, and how much it sends from one to another."""

from __future__ import annotations

import pandas as pd

from study.host.memory import MIB
from study.report.plots.canvas import Drawing, EndLabel, drawings, finish, label_beside, number, sheet
from study.report.plots.palette import GUIDE, QUIET, style_of
from study.report.records.frames import Records
from study.report.records.nodes import PLANNED, over_nodes


def efficiency(records: Records) -> list[Drawing]:
    rows = over_nodes(records)
    subjects = [(f"{model}, {kind}", of_it) for (model, kind), of_it in rows.groupby(["model", "scaling"])]
    return drawings("nodes", subjects, _lines)


def _lines(subject: str, rows: pd.DataFrame) -> Drawing:
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
