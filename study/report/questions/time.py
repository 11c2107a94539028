"""Time of an optimizer step, and what it makes of a whole run."""

from __future__ import annotations

import pandas as pd

from study.records.arms import NAN, Arm, Row, against
from study.records.frames import Records
from study.records.statistics import NOT_TOLD_APART
from study.report.plots.time import frontier, step_time
from study.report.questions.comparing import (
    Columns,
    Comparison,
    beside_reference,
    first_screen,
    noise_notes,
    noise_words,
    real_arms,
    side_by_side,
    table_of,
    workloads,
)
from study.report.questions.question import Answer, Question, span, times_text

STEP = "step_time_s_median"


def answer(records: Records) -> Answer | None:
    beside = beside_reference(records, step_s)
    if beside is None:
        return None
    judged = Comparison(beside.workloads, STEP, lambda arm: beside.bases[arm.workload].name)
    sharding = beside.sharding
    apart = judged.apart(sharding)
    sentence = f"No sharding arm here can be compared with {beside.names} in the time of a step."
    if apart:
        ratios = span((ratio for ratio, _ in apart), times_text)
        sentence = f"A step with sharded state takes {ratios} times as long as one of {beside.names}"
        rest = len(sharding) - len(apart)
        sentence += f"; {rest} of {len(sharding)} arms are {NOT_TOLD_APART}." if rest else "."
    elif sharding:
        sentence = f"The time of a step with sharded state is {NOT_TOLD_APART}, beside {beside.names}."
    columns: Columns = {
        "Step, ms": lambda arm: 1e3 * step_s(arm),
        f"x {beside.plain_names}": judged.cell(times_text),
    }
    return side_by_side(
        sentence,
        first_screen(beside.workloads),
        columns,
        "ms: the middle of an arm's own seeds. Times: seed by seed.",
        *judged.notes,
        *noise_notes(beside.workloads, STEP),
    )


def step_s(arm: Arm) -> float:
    return arm.middle(STEP).center


def noise_fact(records: Records) -> list[str]:
    """For the head of the first page, where it is the same in every workload: the question of time has that of each."""
    said = {noise_words(of_it, STEP).rstrip(".") for of_it in workloads(records).values()}
    return list(said) if len(said) == 1 else []


def runtime_table(records: Records) -> pd.DataFrame:
    every: dict[str, list[Arm]] = {}
    for arm in real_arms(records):
        every.setdefault(arm.workload, []).append(arm)
    judged = Comparison(every, STEP, lambda arm: arm.baseline)
    return table_of((arm for arms in every.values() for arm in arms), lambda arm: _figures(arm, judged))


def _figures(arm: Arm, judged: Comparison) -> Row:
    return {
        "Step time, ms": arm.middle(STEP).text(1, 1e3),
        "p10, ms": 1e3 * arm.median("step_time_s_p10"),
        "p90, ms": 1e3 * arm.median("step_time_s_p90"),
        "Tokens/s": arm.middle("tokens_per_s").center,
        "Tokens/s per device": arm.middle("tokens_per_s_per_device").center,
        "Samples/s": _median(arm.ended["tokens_per_s"] / arm.ended["seq_length"].astype(float)),
        "Start-up, s": arm.median("startup_s"),
        "Run, s": arm.median("runtime_s"),
        "Calls per step": arm.median("comm_calls_per_step"),
        "Model FLOP utilization": arm.median("mfu"),
        "Of the measured matmul rate": _of_the_matmul_rate(arm),
        "Energy of the GPUs over counted steps, J": arm.median("energy_j"),
        "Time, x baseline": against(arm, STEP),
        "In words": _in_words(arm, judged),
    }


def _in_words(arm: Arm, judged: Comparison) -> str:
    if arm.baseline is None or arm.is_baseline:
        return "baseline" if arm.is_baseline else "no baseline"
    if not arm.is_fair():
        return "not judged"
    difference = judged.of(arm)
    return "no run to pair with" if difference is None else difference.words


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
