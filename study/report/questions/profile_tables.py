"""Where the time of a step goes, in numbers: by kind of work, and by kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from study.record.schema import PROFILE_CATEGORIES
from study.report.records.arms import NAN, Arm, Row, arms, frame, one_value
from study.report.records.frames import Records, real
from study.theory.hardware import peak_flops

NO_PROFILE = "No run here was profiled: --profile_steps does that."
# What the FLOPs of a model are counted over; kernels of other kinds do none that count.
MODEL_FLOPS_KINDS = ("matmul", "attention")
LABELS = {
    "matmul": "matrix products", "attention": "attention", "elementwise": "elementwise and norms",
    "optimizer": "optimizer", "copies": "copies, casts, fills", "collectives": "collectives", "other": "other",
    "idle": "idle",
}  # fmt: skip


def has_profile(runs: pd.DataFrame) -> bool:
    return bool(((runs["status_state"] == "ok") & runs["profile"].notna()).any())


def profiled_arms(records: Records) -> Iterator[tuple[Arm, dict[str, Any]]]:
    """Each with the profile of its first run that has one: profiles are looked at, and not averaged."""
    runs = real(records).runs
    for arm in arms(runs) if has_profile(runs) else ():
        profiled = arm.ended["profile"].dropna()
        if len(profiled):
            yield arm, json.loads(profiled.iloc[0])


def parts_ms(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by kind of work, and those in which nothing ran."""
    seconds = {**profile["categories_s_per_step"], "idle": profile["idle_s_per_step"]}
    return {kind: 1e3 * seconds[kind] for kind in (*PROFILE_CATEGORIES, "idle")}


def step_profile_table(records: Records) -> pd.DataFrame:
    """Time of a step by kind of work, and how fast the model's own arithmetic went while it ran."""
    rows = []
    for arm, profile in profiled_arms(records):
        figures: Row = {
            "Profiled step, ms": 1e3 * profile["wall_s_per_step"],
            "Timed step, ms": 1e3 * arm.median("step_time_s_median"),
            **{f"{LABELS[kind].capitalize()}, ms": part for kind, part in parts_ms(profile).items()},
            "Of it counted twice, ms": 1e3 * (profile["summed_s_per_step"] - profile["busy_s_per_step"]),
            "Model FLOP utilization": arm.median("mfu"),
            **_while_it_multiplied(arm, profile),
        }
        rows.append(arm.row(figures))
    return frame(rows)


def _while_it_multiplied(arm: Arm, profile: dict[str, Any]) -> Row:
    """The model's FLOPs over the time of matrix products and attention alone; devices do it, and not cores."""
    seconds = sum(profile["categories_s_per_step"][kind] for kind in MODEL_FLOPS_KINDS)
    world_size = arm.ended["world_size"].iloc[0]
    rate = arm.median("model_flops_per_step") / world_size / seconds if seconds else NAN
    peak = _peak(arm) if profile["device"] == "cuda" else None
    return {
        "Share in matrix products and attention": seconds / profile["wall_s_per_step"],
        "TFLOP/s in matrix products and attention": rate / 1e12,
        "Of the device's peak": rate / peak if peak else NAN,
    }


def _peak(arm: Arm) -> float | None:
    devices = json.loads(one_value(arm.ended["devices"]) or "[]")
    return peak_flops(devices[0], one_value(arm.ended["precision"])) if devices else None


def kernels_table(records: Records) -> pd.DataFrame:
    """The largest pieces of work of each profiled arm, the longest first."""
    rows = []
    for arm, profile in profiled_arms(records):
        for entry in profile["top"]:
            row: Row = {
                "Workload": arm.workload,
                "Arm": arm.name,
                "Kernel or operator": entry["name"],
                "Kind": LABELS[entry["category"]],
                "Calls per step": entry["calls_per_step"],
                "Per step, ms": 1e3 * entry["s_per_step"],
                "Share of the step": entry["s_per_step"] / profile["wall_s_per_step"],
            }
            rows.append(row)
    return frame(rows)


PROFILE_TABLES: dict[str, Callable[[Records], pd.DataFrame]] = {
    "step_profile": step_profile_table,
    "profile": kernels_table,
}
