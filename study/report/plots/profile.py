"""Where the time of a step goes: work by kind, and what the device waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from study.record.schema import PROFILE_CATEGORIES
from study.report.plots.canvas import (
    MOST_WORKLOADS,
    Drawing,
    arms_of,
    bars,
    drawings,
    finish,
    legend_of_fills,
    notes_of,
    number,
    sheet_of_rows,
)
from study.report.plots.palette import PROFILE
from study.report.records.arms import NAN, Arm, arms
from study.report.records.frames import Records, real

Profiled = tuple[Arm, dict[str, Any]]
LABELS = {
    "matmul": "matrix products", "attention": "attention", "elementwise": "elementwise and norms",
    "optimizer": "optimizer", "copies": "copies, casts, fills", "collectives": "collectives", "other": "other",
    "idle": "idle",
}  # fmt: skip
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


def step_profile(records: Records) -> list[Drawing]:
    profiled: dict[str, dict[str, Profiled]] = {}
    for arm, profile in profiled_arms(records):
        profiled.setdefault(arm.workload, {})[arm.name] = (arm, profile)
    return drawings("step_profile", sorted(profiled.items())[:MOST_WORKLOADS], _step_profile)


def _step_profile(workload: str, found: dict[str, Profiled]) -> Drawing:
    runs = next(iter(found.values()))[0].beside
    names = [arm for arm in arms_of(runs) if arm in found]
    notes = {arm: note for arm, note in notes_of(runs).items() if arm in found}
    profiles = pd.DataFrame([found[arm][1] for arm in names], index=names)
    parts = pd.DataFrame([parts_ms(found[arm][1]) for arm in names], index=names)
    wall = 1e3 * profiles["wall_s_per_step"]
    overlaps = profiles["summed_s_per_step"] - profiles["busy_s_per_step"] > _OVERLAP_THAT_SHOWS * wall / 1e3
    subtitle = " ".join(_DEVICES[device] for device in sorted(set(profiles["device"])))
    if overlaps.any():
        subtitle += " Work that overlaps is drawn side by side: the black line is where the step ends."
    mfu = {arm: found[arm][0].median("mfu") for arm in names}
    texts = [f"{number(wall[arm])} ms" + ("" if pd.isna(mfu[arm]) else f"\nMFU {mfu[arm]:.0%}") for arm in names]
    figure, (axes,) = sheet_of_rows(len(names), 0.36)
    bars(axes, parts, PROFILE, texts, "ms per optimizer step, rank 0", notes, marks=wall.where(overlaps, NAN).tolist(),
         margin=0.16)  # fmt: skip
    told = []
    for arm in names:
        shares = ", ".join(f"{LABELS[str(kind)]} {number(part)}" for kind, part in parts.loc[arm].items() if part)
        told.append(f"{arm} {number(wall[arm])} ms, of which {shares}")
    legend = legend_of_fills({kind: fill for kind, fill in PROFILE.items() if parts[kind].any()}, LABELS)
    return finish(figure, "Where the time of a step goes", workload, subtitle, "; ".join(told), notes, legend)
