"""Time of an optimizer step, and what it makes of a whole run."""

from __future__ import annotations

import pandas as pd

from study.report.plots.time import frontier, step_time
from study.report.questions.cells import span, times_text
from study.report.questions.comparing import Columns, beside_reference, certainty, paired_times, real_arms, table_of
from study.report.questions.question import Answer, Question
from study.report.records.arms import MIB, NAN, Arm, Row, against
from study.report.records.frames import Records
from study.report.records.statistics import effect, interval, noise_floor

STEP = "step_time_s_median"


def answer(records: Records) -> Answer | None:
    beside = beside_reference(records, lambda arm: arm.median(STEP), paired_times(STEP))
    if beside is None:
        return None
    sentence = ""
    if beside.ratios:
        ratios = span((ratio for ratio, _ in beside.ratios), times_text)
        chance = certainty(beside.workloads.values(), STEP)
        sentence = f"A step with sharded state takes {ratios} times as long as one of {beside.names}; {chance}."
    columns: Columns = {
        "Step, ms": lambda arm: 1e3 * arm.median(STEP),
        f"x {beside.plain_names}": beside.cell(times_text),
    }
    return beside.answer(sentence, "the time of a step", columns)


def runtime_table(records: Records) -> pd.DataFrame:
    return table_of(real_arms(records), _figures)


def _figures(arm: Arm) -> Row:
    return {
        "Step time, ms": interval((1e3 * arm.ended[STEP]).tolist()).text(1),
        "p10, ms": 1e3 * arm.median("step_time_s_p10"),
        "p90, ms": 1e3 * arm.median("step_time_s_p90"),
        "Tokens/s": arm.median("tokens_per_s"),
        "Tokens/s per device": arm.median("tokens_per_s_per_device"),
        "Samples/s": _median(arm.ended["tokens_per_s"] / arm.ended["seq_length"].astype(float)),
        "Start-up, s": arm.median("startup_s"),
        "Run, s": arm.median("runtime_s"),
        "Payload per step, MiB": arm.median("comm_bytes_per_step") / MIB,
        "Calls per step": arm.median("comm_calls_per_step"),
        "Model FLOP utilization": arm.median("mfu"),
        "Of the measured matmul rate": _of_the_matmul_rate(arm),
        "Energy, J": arm.median("energy_j"),
        "Time, x baseline": against(arm, STEP),
        "In words": _in_words(arm),
    }


def _in_words(arm: Arm) -> str:
    if arm.baseline is None or arm.is_baseline:
        return "baseline" if arm.is_baseline else "no baseline"
    return effect(arm.beside, STEP, arm.name, arm.baseline, noise_floor(arm.beside, STEP))


def _of_the_matmul_rate(arm: Arm) -> float:
    """The model's FLOPs per second beside what the device reached in plain matrix products."""
    runs = arm.ended
    steps_per_s = runs["tokens_per_s"] / (runs["global_batch_size"] * runs["seq_length"]).astype(float)
    flops_per_s = runs["model_flops_per_step"] * steps_per_s / runs["world_size"].astype(float)
    return _median(flops_per_s / (1e12 * runs["matmul_tflops"]))


def _median(values: pd.Series) -> float:
    return float(values.median()) if values.notna().any() else NAN


QUESTION = Question(
    name="time",
    title="How long does a step take?",
    answer=answer,
    nothing="No run here that ended well has timed steps.",
    tables={"runtime": runtime_table},
    figures={"step_time": step_time, "frontier": frontier},
    notebook="runtime",
)
