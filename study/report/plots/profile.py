"""Where the time of a step goes: work by kind, and what the device waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from study.record.schema import PROFILE_CATEGORIES
from study.report.plots.canvas import (
    Drawing,
    beside_bar,
    end_rows,
    in_house_style,
    legend_of_fills,
    number,
    sheet,
    stack,
)
from study.report.plots.palette import INK, PROFILE
from study.report.plots.select import MOST_WORKLOADS, arms_of, notes_of
from study.report.records.arms import Arm, arms
from study.report.records.frames import Records, real

Profiled = tuple[Arm, dict[str, Any]]
LABELS = {
    "matmul": "matrix products", "attention": "attention", "elementwise": "elementwise and norms",
    "optimizer": "optimizer", "copies": "copies, casts, fills", "collectives": "collectives", "other": "other",
    "idle": "idle",
}  # fmt: skip
_ROW_IN, _FRAME_IN = 0.36, 0.75
_DEVICES = {
    "cuda": "Kernels of one GPU; idle is the GPU without one, waiting for the host.",
    "cpu": "Operators of one rank; idle is what lies between them, which is Python and waiting.",
}
# As a share of the step; less than this nobody sees.
_OVERLAP_THAT_SHOWS = 0.01


def profiled_arms(records: Records) -> Iterator[Profiled]:
    """Each with the profile of its first run that has one: profiles are looked at, and not averaged."""
    for arm in arms(real(records).runs):
        profiled = arm.ended["profile"].dropna()
        if len(profiled):
            yield arm, json.loads(profiled.iloc[0])


def parts_ms(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by kind of work, and those in which nothing ran."""
    seconds = {**profile["categories_s_per_step"], "idle": profile["idle_s_per_step"]}
    return {kind: 1e3 * seconds[kind] for kind in (*PROFILE_CATEGORIES, "idle")}


@in_house_style
def step_profile(records: Records) -> list[Drawing]:
    profiled: dict[str, dict[str, Profiled]] = {}
    for arm, profile in profiled_arms(records):
        profiled.setdefault(arm.workload, {})[arm.name] = (arm, profile)
    return [
        _step_profile(f"step_profile_{place}", workload, found)
        for place, (workload, found) in enumerate(sorted(profiled.items())[:MOST_WORKLOADS], start=1)
    ]


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
        parts = parts_ms(profiles[arm])
        end = stack(axes, row, parts, PROFILE)
        wall = 1e3 * profiles[arm]["wall_s_per_step"]
        if overlap[arm] > _OVERLAP_THAT_SHOWS:
            axes.plot([wall, wall], [row - 0.4, row + 0.4], color=INK, linewidth=1.6)
        mfu = found[arm][0].median("mfu")
        words = f"{number(wall)} ms" + (f"\nMFU {mfu:.0%}" if mfu == mfu else "")
        beside_bar(axes, words, end, row)
        shares = ", ".join(f"{LABELS[kind]} {number(part)}" for kind, part in parts.items() if part)
        told.append(f"{arm} {number(wall)} ms, of which {shares}")
    end_rows(axes, names, notes, "ms per optimizer step, rank 0", margin=0.16)
    shown = {kind: fill for kind, fill in PROFILE.items() if any(parts_ms(one)[kind] for one in profiles.values())}
    legend_of_fills(figure, shown, LABELS)
    return Drawing.of(name, title, workload, "; ".join(told), figure)
