"""Where the time of a step goes, by kind of work and by kernel."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from study.predictor.hardware import peak_flops
from study.records.arms import NAN, Arm, Row, frame, one_value
from study.records.frames import Records
from study.records.statistics import percent
from study.report.plots.memory import LABELS, parts_ms, profiled_arms, step_profile
from study.report.questions.question import Answer, Question, span
from study.report.questions.time import step_s

# What the FLOPs of a model are counted over; kernels of other kinds do none that count.
_MODEL_FLOPS_KINDS = ("matmul", "attention")


def answer(records: Records) -> Answer | None:
    rows = []
    for arm, profile in profiled_arms(records):
        parts, wall = parts_ms(profile), 1e3 * profile["wall_s_per_step"]
        multiplied = sum(parts[kind] for kind in _MODEL_FLOPS_KINDS)
        rows.append((arm.workload, arm.name, wall, multiplied / wall, parts["idle"] / wall))
    if not rows:
        return None
    shares = ["Matrix products and attention", "Idle"]
    table = pd.DataFrame(rows, columns=["Workload", "Arm", "Step, ms", *shares])
    of_products, idle = (span(table[share], percent) for share in shares)
    table[shares] = table[shares].map(percent)
    sentence = f"Matrix products and attention take {of_products} of a step, and in {idle} of it nothing runs."
    return Answer(sentence, table, ("Profiled steps are slower, and are in no other time here.",))


def step_profile_table(records: Records) -> pd.DataFrame:
    """Time of a step by kind of work, and how fast the model's own arithmetic went while it ran."""
    return frame(arm.row(_figures(arm, profile)) for arm, profile in profiled_arms(records))


def _figures(arm: Arm, profile: dict[str, Any]) -> Row:
    return {
        "Profiled step, ms": 1e3 * profile["wall_s_per_step"],
        "Timed step, ms": 1e3 * step_s(arm),
        **{f"{LABELS[kind].capitalize()}, ms": part for kind, part in parts_ms(profile).items()},
        "Of it counted twice, ms": 1e3 * (profile["summed_s_per_step"] - profile["busy_s_per_step"]),
        "Model FLOP utilization": arm.median("mfu"),
        **_while_it_multiplied(arm, profile),
    }


def _while_it_multiplied(arm: Arm, profile: dict[str, Any]) -> Row:
    """The model's FLOPs over the time of matrix products and attention alone; devices do it, and not cores. Under
    gradient checkpointing that time has products which are no FLOPs of the model's."""
    seconds = sum(profile["categories_s_per_step"][kind] for kind in _MODEL_FLOPS_KINDS)
    has_rate = seconds and not arm.ended["gradient_checkpointing"].any()
    rate = arm.median("model_flops_per_step") / arm.ended["world_size"].iloc[0] / seconds if has_rate else NAN
    devices = json.loads(one_value(arm.ended["devices"]) or "[]") if profile["device"] == "cuda" else []
    peak = peak_flops(devices[0], one_value(arm.ended["precision"])) if devices else None
    return {
        "Share in matrix products and attention": seconds / profile["wall_s_per_step"],
        "TFLOP/s in matrix products and attention": rate / 1e12,
        "Of the device's peak": rate / peak if peak else NAN,
    }


def kernels_table(records: Records) -> pd.DataFrame:
    """The largest pieces of work of each profiled arm, the longest first."""
    rows: list[Row] = [
        {
            "Workload": arm.workload,
            "Arm": arm.name,
            "Kernel or operator": entry["name"],
            "Kind": LABELS[entry["category"]],
            "Calls per step": entry["calls_per_step"],
            "Per step, ms": 1e3 * entry["s_per_step"],
            "Share of the step": entry["s_per_step"] / profile["wall_s_per_step"],
        }
        for arm, profile in profiled_arms(records)
        for entry in profile["top"]
    ]
    return frame(rows)


QUESTION = Question(
    name="profile",
    title="Where does the time of a step go?",
    answer=answer,
    nothing="No run here was profiled: --profile_steps does that.",
    tables={"step_profile": step_profile_table, "profile": kernels_table},
    figures={"step_profile": step_profile},
    first_figure="step_profile",
    notebook="runtime",
)
