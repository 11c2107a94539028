"""Where the time of a step goes: work by kind, and what the device waits."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Patch

from study.report.plots.canvas import Drawing, footnote, in_house_style, legend_below, number, rows_of_arms, sheet
from study.report.plots.palette import INK, PROFILE
from study.report.plots.select import MOST_WORKLOADS, arms_of, notes_of
from study.report.questions.profile_tables import LABELS, NO_PROFILE, parts_ms, profiled_arms
from study.report.records.arms import Arm
from study.report.records.frames import Records

Profiled = tuple[Arm, dict[str, Any]]
_ROW_IN, _FRAME_IN = 0.36, 0.75
_DEVICES = {
    "cuda": "Kernels of one GPU; idle is the GPU without one, waiting for the host.",
    "cpu": "Operators of one rank; idle is what lies between them, which is Python and waiting.",
}
# As a share of the step; less than this nobody sees.
_OVERLAP_THAT_SHOWS = 0.01


@in_house_style
def step_profile(records: Records) -> list[Drawing] | str:
    profiled: dict[str, dict[str, Profiled]] = {}
    for arm, profile in profiled_arms(records):
        profiled.setdefault(arm.workload, {})[arm.name] = (arm, profile)
    drawings = [
        _step_profile(f"step_profile_{place}", workload, found)
        for place, (workload, found) in enumerate(sorted(profiled.items())[:MOST_WORKLOADS], start=1)
    ]
    return drawings or NO_PROFILE


def _step_profile(name: str, workload: str, found: dict[str, Profiled]) -> Drawing:
    runs = next(iter(found.values()))[0].beside
    names = [arm for arm in arms_of(runs) if arm in found]
    notes = {arm: note for arm, note in notes_of(runs).items() if arm in found}
    profiles = {arm: found[arm][1] for arm in names}
    title = "Where the time of a step goes"
    subtitle = " ".join(_DEVICES[device] for device in sorted({profile["device"] for profile in profiles.values()}))
    overlap = {
        arm: (profile["summed_s_per_step"] - profile["busy_s_per_step"]) / profile["wall_s_per_step"]
        for arm, profile in profiles.items()
    }
    if max(overlap.values()) > _OVERLAP_THAT_SHOWS:
        subtitle += " Work that overlaps is drawn side by side: the black line is where the step ends."
    figure, (axes,) = sheet(title, workload, subtitle, _FRAME_IN + _ROW_IN * len(names))
    told = []
    for row, arm in enumerate(names):
        left = 0.0
        parts = parts_ms(profiles[arm])
        for kind, width in parts.items():
            fill = PROFILE[kind]
            axes.barh(row, width, left=left, height=0.72, color=fill.colour, hatch=fill.hatch, edgecolor="white",
                      linewidth=0.4)  # fmt: skip
            left += width
        wall = 1e3 * profiles[arm]["wall_s_per_step"]
        if overlap[arm] > _OVERLAP_THAT_SHOWS:
            axes.plot([wall, wall], [row - 0.4, row + 0.4], color=INK, linewidth=1.6)
        mfu = found[arm][0].median("mfu")
        words = f"{number(wall)} ms" + (f"\nMFU {mfu:.0%}" if mfu == mfu else "")
        axes.annotate(words, (left, row), xytext=(4, 0), textcoords="offset points", va="center", size=8.5)
        shares = ", ".join(f"{LABELS[kind]} {number(part)}" for kind, part in parts.items() if part)
        told.append(f"{arm} {number(wall)} ms, of which {shares}")
    rows_of_arms(axes, names, notes)
    axes.grid(visible=False)
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms per optimizer step, rank 0")
    footnote(axes, notes)
    shown = [kind for kind in PROFILE if any(parts_ms(profile)[kind] for profile in profiles.values())]
    handles = [
        Patch(facecolor=PROFILE[kind].colour, hatch=PROFILE[kind].hatch, edgecolor="white", label=LABELS[kind])
        for kind in shown
    ]
    legend_below(figure, handles, 3, columnspacing=1.3)
    return Drawing(name, f"{title}, {workload}", f"{title}, {workload}: {'; '.join(told)}.", figure)
