"""What was profiled: each arm with the profile of its step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from study.record.schema import PROFILE_CATEGORIES
from study.report.records.arms import Arm, arms
from study.report.records.frames import Records, real

LABELS = {
    "matmul": "matrix products", "attention": "attention", "elementwise": "elementwise and norms",
    "optimizer": "optimizer", "copies": "copies, casts, fills", "collectives": "collectives", "other": "other",
    "idle": "idle",
}  # fmt: skip


def profiled_arms(records: Records) -> Iterator[tuple[Arm, dict[str, Any]]]:
    """Each with the profile of its first run that has one: profiles are looked at, and not averaged."""
    for arm in arms(real(records).runs):
        profiled = arm.ended["profile"].dropna()
        if len(profiled):
            yield arm, json.loads(profiled.iloc[0])


def parts_ms(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by kind of work, and those in which nothing ran."""
    seconds = {**profile["categories_s_per_step"], "idle": profile["idle_s_per_step"]}
    return {kind: 1e3 * seconds[kind] for kind in (*PROFILE_CATEGORIES, "idle")}
